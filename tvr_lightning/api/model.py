"""A trained method in Python: from files and sentences to features and scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tvr_lightning.api.hub import PREFIX, from_hub
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.search.scorer import Scorer, ScorerSource

TEXTS = 256
"""Texts per pass through the encoder."""


class Model:
    """A trained method that reads, encodes and scores as it was trained to; `tvr_lightning.load` makes one.

    Args:
        scorer: the method, in evaluation mode.

    Attributes:
        module: the method itself, a `RetrievalModule`.
        name: of the method, such as `tcmgc`.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.module, self.name = scorer, scorer.module, scorer.name

    def encode_video(self, videos: str | Path | Sequence[str | Path]) -> VideoFeatures:
        """Return the features of M videos, frames (M, F, D), in main memory; of one file M is 1.

        Args:
            videos: media files, decoded one after another.

        Raises:
            VideoError: one is absent or cannot be decoded; says which.
        """
        paths = [videos] if isinstance(videos, str | Path) else videos
        return VideoFeatures.cat([self.scorer.encode_videos(self.scorer.read(Path(path)).media) for path in paths])

    def encode_text(self, texts: str | Sequence[str]) -> TextFeatures:
        """Return the features of N texts, sentences (N, D) and words (N, W, D), in main memory; of one text N is 1."""
        lines = [texts] if isinstance(texts, str) else list(texts)
        parts = [lines[start : start + TEXTS] for start in range(0, len(lines), TEXTS)]
        return TextFeatures.cat([self.scorer.encode_texts(part) for part in parts])

    def score(
        self,
        texts: str | Sequence[str] | TextFeatures,
        videos: str | Path | Sequence[str | Path] | VideoFeatures,
    ) -> Tensor:
        """Return the scores (N, M) of N texts against M videos, larger is better, on the scale of a cosine.

        Args:
            texts: sentences, or what `encode_text` returned of them.
            videos: media files, or what `encode_video` returned of them.

        Raises:
            VideoError: a video is absent or cannot be decoded.
        """
        text = texts if isinstance(texts, TextFeatures) else self.encode_text(texts)
        video = videos if isinstance(videos, VideoFeatures) else self.encode_video(videos)
        return self.scorer.score(text, video).similarity


def load(source: str | Path, device: str = "cpu", trust: Sequence[str] = ()) -> Model:
    """Load a trained method.

    Args:
        source: checkpoint that `tvr fit` or `tvr convert` wrote, or `hf:user/name` of a method on the hub.
        device: where it runs, such as `cuda`.
        trust: modules whose classes the checkpoint may name besides this package's; they are imported.

    Raises:
        CheckpointError: it is absent, damaged, or names classes of other modules.
        SearchError: it is none of a retrieval method, or does not say how it was made.
        HubError: the hub has no such method, or does not answer.
    """
    if str(source).startswith(PREFIX):
        with from_hub(str(source).removeprefix(PREFIX)) as checkpoint:
            return Model(Scorer(ScorerSource(checkpoint=str(checkpoint)), device, trust))
    return Model(Scorer(ScorerSource(checkpoint=str(source)), device, trust))


def zero_shot(architecture: str = "ViT-B-32", weights: str = "openai", frames: int = 12, device: str = "cpu") -> Model:
    """Return an untrained encoder: its frames are averaged and compared with its sentences, as CLIP4Clip does.

    Args:
        architecture: open_clip's name.
        weights: a file, an open_clip tag, or `none` for random ones.
        frames: F per video.
        device: where it runs.

    Raises:
        MissingAssetError: the weights are absent.
        SearchError: no architecture has them.
    """
    return Model(Scorer(ScorerSource(architecture=architecture, weights=weights, frames=frames), device))
