"""Trained methods and untrained encoders as models of MTEB, whose runner then scores its text-video retrieval tasks.

MTEB is an extra: `pip install 'tvr-lightning[mteb]'`. Videos are read from their files by this package's own reader, as
the method was trained to see and hear them, and not by the decoder that MTEB brings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tvr_lightning.api.model import TEXTS, Model
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta

Kind = Literal["text", "video"]


class MtebTaskError(UserError, ValueError):
    """A task asks for other than texts and videos; says for what."""


class PairwiseModel:
    """A method that scores pairs of texts and videos (MTEB's `SearchProtocol`).

    Args:
        model: as `tvr_lightning.load` returns it.
        name: in MTEB's results, as `organization/model`.
    """

    def __init__(self, model: Model, name: str | None = None) -> None:
        self.model, self.name = model, name or f"tvr-lightning/{model.name}"
        self._corpus: TextFeatures | VideoFeatures | None = None
        self._ids: list[str] = []

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """What MTEB writes beside results."""
        return _meta(self.model, self.name, "cross-encoder")

    def index(self, corpus: Any, *, task_metadata: Any, **rest: Any) -> None:
        """Encode M items, all of them texts or all of them videos, and keep their features.

        Args:
            corpus: dataset with the columns `id` and `text` or `video`.
            task_metadata: says which.
            rest: what MTEB says besides, which changes nothing here.

        Raises:
            MtebTaskError: the task's items are neither, or both.
            VideoError: a video cannot be decoded.
        """
        self._ids = [str(name) for name in corpus["id"]]
        self._corpus = _features(self.model, corpus, _kind(task_metadata, "document"))

    def search(
        self, queries: Any, *, task_metadata: Any, top_k: int, top_ranked: Any = None, **rest: Any
    ) -> dict[str, dict[str, float]]:
        """Return the scores of each of N queries with its `top_k` best items, by query and item.

        Args:
            queries: dataset with the columns `id` and `text` or `video`.
            task_metadata: says which.
            top_k: items per query at most.
            top_ranked: by query, the items that alone are to be ranked; None ranks all.
            rest: what MTEB says besides, which changes nothing here.

        Raises:
            MtebTaskError: nothing is indexed, or queries and items are of one kind.
            VideoError: a video cannot be decoded.
        """
        if self._corpus is None:
            raise MtebTaskError("Nothing is indexed. Call index with the corpus first.")
        asked = _features(self.model, queries, _kind(task_metadata, "query"))
        scores = self._scores(asked, self._corpus)
        found: dict[str, dict[str, float]] = {}
        for query, row in zip(queries["id"], scores, strict=True):
            of_query = dict(zip(self._ids, row.tolist(), strict=True))
            if top_ranked is not None:
                of_query = {name: of_query[name] for name in top_ranked.get(query, ()) if name in of_query}
            best = sorted(of_query, key=lambda name: -of_query[name])[:top_k]
            found[str(query)] = {name: of_query[name] for name in best}
        return found

    def _scores(self, asked: TextFeatures | VideoFeatures, corpus: TextFeatures | VideoFeatures) -> Tensor:
        if isinstance(asked, TextFeatures) and isinstance(corpus, VideoFeatures):
            return self._in_parts(asked, corpus)
        if isinstance(asked, VideoFeatures) and isinstance(corpus, TextFeatures):
            return self._in_parts(corpus, asked).T
        raise MtebTaskError(
            "Queries and items are both texts or both videos, but a method scores texts against videos."
        )

    def _in_parts(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        parts = [text[start : start + TEXTS] for start in range(0, len(text), TEXTS)]
        return torch.cat([self.model.score(part, video) for part in parts])


class EmbeddingModel:
    """An encoder whose texts and videos are single vectors, compared by their cosine (MTEB's `EncoderProtocol`).

    A text is its sentence vector, a video the mean of its real frames' vectors: CLIP4Clip's mean pooling, and what the
    first stage of this package's search compares. A method that scores pairs is more than these vectors: that is
    `PairwiseModel`.

    Args:
        model: as `tvr_lightning.load`, or `tvr_lightning.api.model.zero_shot`, returns it.
        name: in MTEB's results, as `organization/model`.
    """

    def __init__(self, model: Model, name: str | None = None) -> None:
        self.model, self.name = model, name or f"tvr-lightning/{model.name}-mean"

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """What MTEB writes beside results."""
        return _meta(self.model, self.name, "dense")

    def encode(self, inputs: Any, *, task_metadata: Any, prompt_type: Any = None, **rest: Any) -> Tensor:
        """Return the (N, D) vectors of length 1 of N texts or videos.

        Args:
            inputs: MTEB's loader of a dataset with the column `text` or `video`.
            task_metadata: says which.
            prompt_type: whether they are queries or items.
            rest: what MTEB says besides, which changes nothing here.

        Raises:
            MtebTaskError: the task's items are neither, or both.
            VideoError: a video cannot be decoded.
        """
        features = _features(self.model, inputs.dataset, _kind(task_metadata, prompt_type))
        if isinstance(features, TextFeatures):
            return self.model.scorer.text_vectors(features)
        return self.model.scorer.video_vectors(features)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines (N, M) of vectors (N, D) and (M, D) that `encode` returned."""
        return torch.as_tensor(embeddings1) @ torch.as_tensor(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines (N,) of vectors (N, D) with those (N, D) in the same places."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(-1)


def _meta(model: Model, name: str, kind: Literal["dense", "cross-encoder"]) -> ModelMeta:
    from mteb.models.model_meta import ModelMeta, ScoringFunction  # an extra, which few have

    dense = kind == "dense"
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    return ModelMeta.create_empty(
        {
            "name": name,
            "revision": str(model.scorer.fingerprint.get("weights", "unknown"))[:40],
            "n_parameters": parameters,
            "embed_dim": model.module.encoder.dimension if dense else None,
            "max_tokens": model.module.words,
            "framework": ["PyTorch"],
            "modalities": ["text", "video"],
            "model_type": [kind],
            "similarity_fn_name": ScoringFunction.COSINE if dense else None,
            "use_instructions": False,
        }
    )


def _kind(task_metadata: Any, prompt_type: Any) -> Kind:
    from mteb.types import PromptType

    side = None if prompt_type is None else PromptType(prompt_type)
    modalities = list(task_metadata.get_modalities(side))
    if modalities not in (["text"], ["video"]):
        raise MtebTaskError(
            f"{task_metadata.name} has {' and '.join(modalities)} on one side. This model takes text or video, and "
            "reads the audio from the video file."
        )
    return modalities[0]


def _features(model: Model, dataset: Any, kind: Kind) -> TextFeatures | VideoFeatures:
    if kind == "text":
        return model.encode_text(_texts(dataset))
    from datasets import Video

    # As stored: paths or bytes.
    raw = dataset.cast_column("video", Video(decode=False)).select_columns(["video"])
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for row in raw:
            path, content = row["video"].get("path"), row["video"].get("bytes")
            if content is not None:
                path = Path(folder) / f"video{Path(path or '').suffix}"
                path.write_bytes(content)
            parts.append(model.encode_video(path))
    return VideoFeatures.cat(parts)


def _texts(dataset: Any) -> list[str]:
    titles: Sequence[str | None] = dataset["title"] if "title" in dataset.column_names else [None] * len(dataset)
    return [f"{title or ''} {text}".strip() for title, text in zip(titles, dataset["text"], strict=True)]
