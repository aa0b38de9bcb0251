"""Trained methods and untrained encoders as models of MTEB (`pip install 'tvr-lightning[mteb]'`).

Videos and audio are read by this package as in training, and not by MTEB's decoder.
"""

from __future__ import annotations

import tempfile
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tvr_lightning.api.model import TEXTS, VIDEOS, Model
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta

Features = TextFeatures | VideoFeatures
MODALITIES = ("text", "image", "audio", "video")  # MTEB's names of the columns that a model may have to encode


class PairwiseModel:
    """A method that scores pairs of texts and videos (MTEB's `SearchProtocol`).

    Args:
        model: Model returned by `tvr_lightning.load`.
        name: Name in MTEB's results, as `organization/model`.
    """

    def __init__(self, model: Model, name: str | None = None) -> None:
        self.model, self.name = model, name or f"tvr-lightning/{model.name}"
        self.mteb_model_meta = _meta(model, self.name, "cross-encoder")
        self._corpus: Features | None = None
        self._ids: list[str] = []

    def index(self, corpus: Any, *, task_metadata: Any, **_: Any) -> None:
        """Encode the M texts or videos of a dataset with the columns `id` and `text` or `video`; keep the features."""
        self._ids = [str(name) for name in corpus["id"]]
        self._corpus = _features(self.model, corpus, task_metadata, "document")

    def search(
        self, queries: Any, *, task_metadata: Any, top_k: int, top_ranked: Any = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """Return the scores of the `top_k` best items for each of N queries, by query and item.

        Args:
            queries: Dataset with the columns `id` and `text` or `video`.
            task_metadata: MTEB's description of the task.
            top_k: Maximum number of items per query.
            top_ranked: Items to rank, by query; None ranks all.

        Raises:
            UserError: Nothing is indexed, queries and items are both texts or both videos, or a video is damaged.
        """
        if self._corpus is None:
            raise UserError("Nothing is indexed. Call index with the corpus first.")
        features = _features(self.model, queries, task_metadata, "query")
        reverse = isinstance(features, VideoFeatures)
        texts, videos = (self._corpus, features) if reverse else (features, self._corpus)
        if not (isinstance(texts, TextFeatures) and isinstance(videos, VideoFeatures)):
            raise UserError("Queries and items are both texts or both videos; a method scores texts against videos.")
        starts = range(0, len(texts), TEXTS)
        scores = torch.cat([self.model.score(texts[start : start + TEXTS], videos) for start in starts])
        found: dict[str, dict[str, float]] = {}
        for query, row in zip(queries["id"], scores.T if reverse else scores, strict=True):
            of_query = dict(zip(self._ids, row.tolist(), strict=True))
            if top_ranked is not None:
                of_query = {name: of_query[name] for name in top_ranked.get(query, ()) if name in of_query}
            found[str(query)] = dict(nlargest(top_k, of_query.items(), key=itemgetter(1)))
        return found


class EmbeddingModel:
    """An encoder whose texts and videos are single vectors, compared by their cosine (MTEB's `EncoderProtocol`).

    A text is its sentence vector, and a video is the mean of its frames' vectors, as in CLIP4Clip's mean pooling.

    Args:
        model: Model returned by `tvr_lightning.load` or `tvr_lightning.api.model.zero_shot`.
        name: Name in MTEB's results, as `organization/model`.
    """

    def __init__(self, model: Model, name: str | None = None) -> None:
        self.model, self.name = model, name or f"tvr-lightning/{model.name}-mean"
        self.mteb_model_meta = _meta(model, self.name, "dense")

    def encode(self, inputs: Any, *, task_metadata: Any, **_: Any) -> Tensor:
        """Return the (N, D) vectors of length 1 of the texts or videos in the dataset of a loader."""
        features = _features(self.model, inputs.dataset, task_metadata)
        if isinstance(features, TextFeatures):
            return self.model.scorer.text_vectors(features)
        return self.model.scorer.video_vectors(features)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines (N, M) of vectors (N, D) and (M, D) that `encode` returned."""
        return torch.as_tensor(embeddings1) @ torch.as_tensor(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines (N,) of two times N vectors (N, D) that `encode` returned."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(-1)


def _meta(model: Model, name: str, kind: Literal["dense", "cross-encoder"]) -> ModelMeta:
    from mteb.models.model_meta import ModelMeta, ScoringFunction  # an optional dependency

    dense = kind == "dense"
    return ModelMeta.create_empty(
        {
            "name": name,
            "revision": str(model.scorer.fingerprint.get("weights", "unknown"))[:40],
            "n_parameters": sum(parameter.numel() for parameter in model.module.parameters()),
            "embed_dim": model.module.encoder.dimension if dense else None,
            "max_tokens": model.module.words,
            "framework": ["PyTorch"],
            "modalities": ["text", "video"],
            "model_type": [kind],
            "similarity_fn_name": ScoringFunction.COSINE if dense else None,
            "use_instructions": False,
        }
    )


def _features(model: Model, dataset: Any, task_metadata: Any, prompt_type: str | None = None) -> Features:
    """Encode the texts or videos of a dataset; of a prompt, only the columns that the task declares count."""
    from datasets import Video
    from mteb.types import PromptType

    declared = MODALITIES if prompt_type is None else task_metadata.get_modalities(PromptType(prompt_type))
    columns = [name for name in MODALITIES if name in dataset.column_names and name in declared]
    if columns == ["text"]:
        titles = dataset["title"] if "title" in dataset.column_names else [None] * len(dataset)
        pairs = zip(titles, dataset["text"], strict=True)
        return model.encode_text([f"{title or ''} {text}".strip() for title, text in pairs])
    if columns != ["video"]:
        raise UserError(
            f"{task_metadata.name} has {' and '.join(columns) or 'neither text nor video'} on one side. This model "
            "takes text or video, and reads the audio from the video file."
        )
    parts = []
    videos = dataset.select_columns(["video"]).cast_column("video", Video(decode=False))
    for start in range(0, len(videos), VIDEOS):
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for number, stored in enumerate(videos[start : start + VIDEOS]["video"]):
                path = Path(stored["path"] or "")
                if stored["bytes"] is not None:
                    path = Path(folder) / f"{number}{path.suffix}"
                    path.write_bytes(stored["bytes"])
                paths.append(path)
            parts.append(model.encode_video(paths))
    return VideoFeatures.cat(parts)
