"""A trained method in Python: features and scores of files and sentences."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import open_clip
import torch
from torch import Tensor

from tvr_lightning.api.hub import PREFIX, from_hub
from tvr_lightning.data.batch import Media
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.search.scorer import Scorer, ScorerSource

TEXTS, VIDEOS = 256, 16  # per forward pass
DECODERS = 4  # threads that decode the videos of a forward pass


class Model:
    """A trained method that reads, encodes and scores as in training; returned by `tvr_lightning.load`.

    `module` is the method, a `RetrievalModule`, and `name` its name, such as `tcmgc`.
    """

    def __init__(self, source: ScorerSource, device: str | None = None, trust: Sequence[str] = ()) -> None:
        self.scorer = Scorer(source, device or ("cuda" if torch.cuda.is_available() else "cpu"), trust)
        self.module = self.scorer.module
        self.name = self.scorer.name

    def __repr__(self) -> str:
        """Return the method, its encoder and weights, and its sizes."""
        encoder = self.module.encoder
        source = self.scorer.source
        backbone = " ".join(filter(None, [type(encoder).__name__, getattr(encoder, "name", "")]))
        sizes = f"{encoder.dimension}-dimensional, {self.module.words} tokens, {self.module.frames} frames"
        weights = source.checkpoint or f"weights {source.weights}"
        return f"Model({type(self.module).__name__}, {backbone}, {weights}: {sizes})"

    def encode_video(
        self, videos: str | Path | Sequence[str | Path], audio: Sequence[Path] | None = None
    ) -> VideoFeatures:
        """Return the features of M video files on the CPU, frames (M, F, D). An unreadable file raises VideoError.

        `audio` lists M files whose audio replaces that of the videos, for methods that use audio.
        """
        paths = [Path(path) for path in ([videos] if isinstance(videos, str | Path) else videos)]
        sounds = [None] * len(paths) if audio is None else audio
        if len(sounds) != len(paths):
            raise UserError(f"{len(sounds)} audio files are given for {len(paths)} videos. Give one for each.")
        parts = []
        with ThreadPoolExecutor(DECODERS) as pool:
            for start in range(0, len(paths), VIDEOS):
                few = slice(start, start + VIDEOS)
                clips = pool.map(lambda path, sound: self.scorer.read(path, audio=sound), paths[few], sounds[few])
                parts.append(self.scorer.encode_videos(Media.cat([clip.media for clip in clips])))
        return VideoFeatures.cat(parts)

    def encode_text(self, texts: str | Sequence[str]) -> TextFeatures:
        """Return the features of N texts on the CPU, sentences (N, D) and words (N, W, D)."""
        lines = [texts] if isinstance(texts, str) else list(texts)
        parts = [lines[start : start + TEXTS] for start in range(0, len(lines), TEXTS)]
        return TextFeatures.cat([self.scorer.encode_texts(part) for part in parts])

    def score(
        self,
        texts: str | Sequence[str] | TextFeatures,
        videos: str | Path | Sequence[str | Path] | VideoFeatures,
    ) -> Tensor:
        """Return the scores (N, M) of texts and video files, or of their features, on the scale of a cosine."""
        text = texts if isinstance(texts, TextFeatures) else self.encode_text(texts)
        video = videos if isinstance(videos, VideoFeatures) else self.encode_video(videos)
        return self.scorer.score(text, video)


def load(source: str | Path, device: str | None = None, trust: Sequence[str] = ()) -> Model:
    """Load a trained method.

    Args:
        source: Checkpoint written by `tvr fit` or `tvr convert`, or `hf:user/name` of a method on the Hub.
        device: Device to run on, such as `cuda`. Default: a GPU if there is one, otherwise the CPU.
        trust: Other modules whose classes the checkpoint may name; they are imported.

    Raises:
        UserError: The checkpoint is missing, damaged, not that of a retrieval method, or names classes of other
            modules, or the Hub has no such method.
    """
    if str(source).startswith(PREFIX):
        with from_hub(str(source).removeprefix(PREFIX)) as checkpoint:
            return load(checkpoint, device, trust)
    if not Path(source).exists() and str(source) in open_clip.list_models():
        raise UserError(f'{source} is an encoder, not a trained method. Use tvr_lightning.zero_shot("{source}").')
    return Model(ScorerSource(checkpoint=str(source)), device, trust)


def zero_shot(
    architecture: str = "ViT-B-32", weights: str = "openai", frames: int = 12, device: str | None = None
) -> Model:
    """Return an untrained encoder with CLIP4Clip's mean pooling: the cosine of the sentence and the frames' mean.

    `weights` is a file, an open_clip tag, or `none` for random weights. `device` is as for `load`.
    """
    return Model(ScorerSource(architecture=architecture, weights=weights, frames=frames), device)
