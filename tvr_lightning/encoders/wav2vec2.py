"""wav2vec 2.0 (Baevski et al. 2020), based on `Wav2Vec2Model` of transformers."""

import json
import logging
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from tvr_lightning.data.audio_alignment import SHORTEST_WAVEFORM
from tvr_lightning.data.batch import AudioInput
from tvr_lightning.encoders.audio import AudioEncoder, pool_steps
from tvr_lightning.encoders.hub import WEIGHTS, how_to_download, repository_folder
from tvr_lightning.errors import UserError, optional
from tvr_lightning.option_types import WeightFile

Wav2Vec2Size = Literal["base", "large"]

# (width, heads, layers) of the transformers (Baevski et al. 2020, Section 4.2)
SIZES: dict[str, tuple[int, int, int]] = {"base": (768, 12, 12), "large": (1024, 16, 24)}
SILENT: dict[str, Any] = dict.fromkeys(
    [
        "hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "layerdrop", "mask_time_prob",
        "mask_feature_prob",
    ],
    0.0,
)  # fmt: skip
"""Settings without dropout and masking."""

logger = logging.getLogger(__name__)


class _Wav2Vec2Encoder(AudioEncoder):
    """Base class for wav2vec 2.0 of any size, built by `Wav2Vec2Encoder` and `TinyWav2Vec2Encoder`."""

    kind = "wav2vec2"

    def __init__(self, model: Any, normalize: bool) -> None:
        super().__init__()
        self.model, self.normalize = model, normalize
        self.dimension = int(model.config.hidden_size)
        self.requires_grad_(False)
        self.model.freeze_feature_encoder()  # otherwise it requires gradients of the waveform in train mode

    @override
    def encode_input(self, audio: AudioInput) -> Tensor:
        weight = self.model.feature_projection.projection.weight
        frames = audio.windows.shape[1]
        features = weight.new_zeros(len(audio), frames, self.dimension)
        # Padding clips into one batch would change the features: the base model's group normalization runs over time.
        for clip in audio.mask.any(dim=1).nonzero().flatten().tolist():
            samples, steps = int(audio.samples[clip]), int(audio.steps[clip])
            waveform = audio.values[clip : clip + 1, : max(samples, SHORTEST_WAVEFORM)]
            if self.normalize:  # as transformers' `Wav2Vec2FeatureExtractor` does
                centered = waveform - waveform.mean()
                waveform = centered / torch.sqrt(centered.square().mean() + 1e-7)
            vectors = self.model(waveform.to(weight.dtype)).last_hidden_state
            if vectors.shape[1] != steps:  # "clip30" (GAID, datasets/audio_feature_extraction_wav2vec2.py)
                vectors = F.interpolate(vectors.mT, size=steps, mode="linear", align_corners=True).mT
            features[clip] = pool_steps(vectors, audio.windows[clip : clip + 1])[0]
        return features

    @override
    def configuration(self) -> dict[str, object]:
        config = self.model.config
        shape = (config.num_attention_heads, config.num_hidden_layers, config.feat_extract_norm, config.hidden_act)
        return {"name": "wav2vec2", "shape": shape, "normalize": self.normalize}


class Wav2Vec2Encoder(_Wav2Vec2Encoder):
    """wav2vec 2.0 base (D_a = 768) or large (1024), as used in GAID (Table 7).

    Args:
        size: size of wav2vec 2.0.
        weights: folder with `config.json` and the weights as saved by transformers, "facebook" for the Hugging Face
            cache of `facebook/wav2vec2-<size>`, or null or "none" for random weights.
    """

    def __init__(self, size: Wav2Vec2Size = "base", weights: WeightFile = "facebook") -> None:
        if weights in (None, "none"):
            width, heads, layers = SIZES[size]
            super().__init__(_build(width, heads, layers, intermediate_size=4 * width), normalize=True)
            logger.warning("wav2vec2 %s starts from RANDOM weights (weights: none) and is untrained", size)
            return
        library = optional("transformers", "audio", "wav2vec2")
        folder = find_wav2vec2_weights(size, str(weights))
        preprocessing = folder / "preprocessor_config.json"
        settings = json.loads(preprocessing.read_text(encoding="utf-8")) if preprocessing.is_file() else {}
        config = library.Wav2Vec2Config.from_pretrained(folder, local_files_only=True)
        width, _, layers = SIZES[size]
        found = (config.hidden_size, config.num_hidden_layers)
        if found != (width, layers):
            raise UserError(
                f"{folder / 'config.json'} is not wav2vec2 {size}: expected width {width} and {layers} layers, found "
                f"width {found[0]} and {found[1]} layers. Set audio_encoder.size to the size with these, of {SIZES}"
            )
        model, report = library.Wav2Vec2Model.from_pretrained(
            folder, local_files_only=True, weights_only=True, output_loading_info=True, **SILENT
        )
        # Only pre-training uses masked_spec_embed.
        if absent := sorted(set(report["missing_keys"]) - {"masked_spec_embed"}):
            raise UserError(
                f"{len(absent)} tensors of wav2vec2 {size} are missing in {folder}: {', '.join(absent[:8])}"
            )
        super().__init__(model, bool(settings.get("do_normalize", True)))
        logger.info("wav2vec2 %s: weights from %s", size, folder)

    @classmethod
    @override
    def required_files(cls, *, size: str = "base", weights: str | None = "facebook", **options: Any) -> list[Path]:
        return [] if weights in (None, "none") else [find_wav2vec2_weights(size, str(weights)) / "config.json"]


class TinyWav2Vec2Encoder(_Wav2Vec2Encoder):
    """Small, randomly initialized wav2vec 2.0 with the original's time steps, for the synthetic dataset and tests.

    Args:
        width: size D_a, a multiple of `heads` and of 16.
        heads: number of attention heads.
        layers: number of transformer blocks.
    """

    def __init__(self, width: int = 64, heads: int = 2, layers: int = 2) -> None:
        positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
        model = _build(width, heads, layers, intermediate_size=2 * width, conv_dim=(width // 2,) * 7, **positions)
        super().__init__(model, normalize=True)


def _build(width: int, heads: int, layers: int, **settings: Any) -> Any:
    library = optional("transformers", "audio", "wav2vec2")
    shape = {"num_attention_heads": heads, "num_hidden_layers": layers}
    return library.Wav2Vec2Model(library.Wav2Vec2Config(hidden_size=width, **shape, **settings, **SILENT))


def find_wav2vec2_weights(size: str, weights: str) -> Path:
    """Return the folder of a wav2vec2 model; `facebook` is the one in the Hugging Face cache."""
    width, _, layers = SIZES[size]
    repository = f"facebook/wav2vec2-{size}"
    return repository_folder(
        repository if weights == "facebook" else weights,
        WEIGHTS,
        f"wav2vec2 {size} (width {width}, {layers} layers) has no weights",
        f"{how_to_download(repository)}, or name a folder saved by transformers: "
        "audio_encoder.weights=/path/to/folder. null means random weights.",
    )
