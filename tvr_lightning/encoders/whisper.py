"""Whisper's encoder (Radford et al. 2023), based on `AudioEncoder` of openai-whisper."""

import logging
import math
import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from tvr_lightning.data.audio_alignment import MEL_BANDS, WINDOW_STEPS
from tvr_lightning.data.batch import AudioInput
from tvr_lightning.encoders.audio import AudioEncoder, pool_steps
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import do_weights_follow
from tvr_lightning.encoders.weights import fitted, read_plain
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import WeightFile

WhisperSize = Literal["base", "small"]

# (width, heads, layers) of the encoders (Radford et al. 2023, Table 1)
SIZES: dict[str, tuple[int, int, int]] = {"base": (512, 8, 6), "small": (768, 12, 12)}
WINDOWS_AT_ONCE = 16

logger = logging.getLogger(__name__)


class _WhisperEncoder(AudioEncoder):
    """Base class for Whisper's encoder of any size, built by `WhisperEncoder` and `TinyWhisperEncoder`."""

    kind = "whisper"

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        from whisper.model import AudioEncoder as OpenAIAudioEncoder  # imports numba, which text-only runs do not need

        self.dimension = width
        self.encoder = OpenAIAudioEncoder(MEL_BANDS, WINDOW_STEPS, width, heads, layers)
        self.requires_grad_(False)

    @override
    def encode_input(self, audio: AudioInput) -> Tensor:
        clips, windows = audio.values.shape[:2]  # log-mel windows of 30 s, (M, C, 80, 3000)
        weight = self.encoder.conv1.weight
        vectors = weight.new_zeros(clips * windows, WINDOW_STEPS, self.dimension)
        heard = [
            clip * windows + window
            for clip, last in enumerate(audio.last)
            for window in range(min(windows, math.ceil(last / WINDOW_STEPS)))
        ]
        mel, places = audio.values.flatten(0, 1), torch.tensor(heard, dtype=torch.int64)
        for part in places.to(mel.device, non_blocking=True).split(WINDOWS_AT_ONCE) if heard else ():
            vectors[part] = self.encoder(mel[part].to(weight.dtype))
        return pool_steps(vectors.view(clips, windows * WINDOW_STEPS, self.dimension), audio.windows)

    @override
    def configuration(self) -> dict[str, object]:
        first = self.encoder.blocks[0]
        return {"name": "whisper", "heads": first.attn.n_head, "layers": len(self.encoder.blocks)}


class WhisperEncoder(_WhisperEncoder):
    """Whisper base (D_a = 512) or small (768), as used in GAID (Table 7).

    Args:
        size: size of Whisper.
        weights: openai-whisper checkpoint (.pt with `dims` and `model_state_dict`), "openai" for the file in
            openai-whisper's cache, or null or "none" for random weights.
    """

    def __init__(self, size: WhisperSize = "base", weights: WeightFile = "openai") -> None:
        super().__init__(*SIZES[size])
        self.size, self.weights = size, weights
        if not do_weights_follow():
            self.load_weights()

    @override
    def load_weights(self) -> None:
        if self.weights in (None, "none"):
            logger.warning("Whisper %s starts from RANDOM weights (weights: none) and is untrained", self.size)
            return
        path = find_whisper_weights(self.size, str(self.weights))
        content = read_plain(path)
        if not isinstance(content, dict) or not content.keys() >= {"dims", "model_state_dict"}:
            raise UserError(f"{path} is not an openai-whisper checkpoint: expected the keys dims and model_state_dict")
        found = tuple(content["dims"].get(name) for name in ("n_audio_state", "n_audio_head", "n_audio_layer"))
        if found != SIZES[self.size]:
            raise UserError(
                f"{path} is not Whisper {self.size}: expected width, heads, and layers {SIZES[self.size]}, found "
                f"{found}. Set audio_encoder.size to the size with these, of {SIZES}"
            )
        prefix = "encoder."
        state = {n.removeprefix(prefix): t for n, t in content["model_state_dict"].items() if n.startswith(prefix)}
        self.encoder.load_state_dict(fitted(state, self.encoder.state_dict(), f"{path} (Whisper {self.size})"))
        logger.info("Whisper %s: weights from %s", self.size, path)

    @classmethod
    @override
    def required_files(cls, *, size: str = "base", weights: str | None = "openai", **options: Any) -> list[Path]:
        random = weights in (None, "none") or do_weights_follow()
        return [] if random else [find_whisper_weights(size, str(weights))]


class TinyWhisperEncoder(_WhisperEncoder):
    """Small, randomly initialized Whisper encoder, for the synthetic dataset and tests.

    Args:
        width: size D_a, a multiple of `heads` and of 4.
        heads: number of attention heads.
        layers: number of blocks.
        seed: seed for the weights, which are then the same in every run, like those of a pretrained encoder; None uses
            the program's random state.
    """

    def __init__(self, width: int = 64, heads: int = 2, layers: int = 2, seed: int | None = None) -> None:
        if width <= 0 or width % 4 or width % heads:
            raise UserError(f"TinyWhisperEncoder.width is {width}; expected a multiple of 4 and of heads ({heads})")
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            super().__init__(width, heads, layers)


def find_whisper_weights(size: str, weights: str) -> Path:
    """Return the file of an openai-whisper checkpoint; `openai` is the one in openai-whisper's own cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "whisper" / f"{size}.pt"
    path = cache if weights == "openai" else Path(weights).expanduser()
    if path.is_file():
        return path
    width, _, layers = SIZES[size]
    raise MissingWeightsError(
        f"Whisper {size} (width {width}, {layers} layers) has no weights: looked for {path.absolute()}. Set "
        f"audio_encoder.weights to a file, or download: `python -c \"import whisper; whisper.load_model('{size}')\"`"
    )
