"""Trained methods and untrained encoders as models of MTEB (`pip install 'tvr-lightning[mteb]'`).

Videos and audio are read by this package as in training, and not by MTEB's decoder.
"""

from __future__ import annotations

import tempfile
import warnings
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tvr_lightning.api.model import TEXTS, VIDEOS, Model
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit

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
        self.model = model
        self.name = name or f"tvr-lightning/{model.name}"
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

    The vector (D,) of a text is its sentence vector, and that of a video is the mean of its frame vectors, as in
    CLIP4Clip. If one side has a text and a video, their vectors are added, as in MTEB's X-CLIP. Audio is not used.
    `experiment_kwargs` in the results records both choices.

    Args:
        model: Model returned by `tvr_lightning.load` or `tvr_lightning.api.model.zero_shot`.
        name: Name in MTEB's results, as `organization/model`.
    """

    def __init__(self, model: Model, name: str | None = None) -> None:
        self.model = model
        self.name = name or f"tvr-lightning/{model.name}-mean"
        self.mteb_model_meta = _meta(model, self.name, "dense")

    def encode(self, inputs: Any, *, task_metadata: Any, prompt_type: Any = None, **_: Any) -> Tensor:
        """Return the (N, D) vectors of length 1 of a loader's dataset: texts, videos, or sums of both vectors."""
        dataset = inputs.dataset
        scorer = self.model.scorer
        columns = _columns(self.name, False, dataset, task_metadata, prompt_type)
        vectors = []
        if "text" in columns:
            vectors.append(scorer.text_vectors(_text_features(self.model, dataset)))
        if "video" in columns:
            vectors.append(scorer.video_vectors(_video_features(self.model, dataset, with_audio=False)))
        return unit(torch.stack(vectors).sum(0))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines (N, M) of vectors (N, D) and (M, D) that `encode` returned."""
        return torch.as_tensor(embeddings1) @ torch.as_tensor(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines (N,) of two times N vectors (N, D) that `encode` returned."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(-1)


def _meta(model: Model, name: str, kind: Literal["dense", "cross-encoder"]) -> ModelMeta:
    from mteb.models.model_meta import ModelMeta, ScoringFunction  # an optional dependency

    dense = kind == "dense"
    uses_audio = _uses_audio(model) and not dense
    return ModelMeta.create_empty(
        {
            "name": name,
            "revision": str(model.scorer.fingerprint.get("weights", "unknown"))[:40],
            "n_parameters": sum(parameter.numel() for parameter in model.module.parameters()),
            "embed_dim": model.module.encoder.dimension if dense else None,
            "max_tokens": model.module.words,
            "framework": ["PyTorch"],
            "modalities": ["text", "video", "audio"] if uses_audio else ["text", "video"],
            "experiment_kwargs": {
                **({} if uses_audio else {"audio": "unused"}),
                **({"text_and_video": "sum"} if dense else {}),
            },
            "model_type": [kind],
            "similarity_fn_name": ScoringFunction.COSINE if dense else None,
            "use_instructions": False,
        }
    )


def _columns(name: str, uses_audio: bool, dataset: Any, task_metadata: Any, prompt_type: Any) -> list[str]:
    """Return the columns of one side that the model `name` encodes, by MTEB's rule for models without a modality.

    With a `prompt_type`, only the columns that the task declares for that side count. If other columns remain, audio
    is dropped with a warning if the model does not use it or there is no video to which it belongs.
    """
    from mteb.types import PromptType

    declared = MODALITIES if prompt_type is None else task_metadata.get_modalities(PromptType(prompt_type))
    columns = [column for column in MODALITIES if column in dataset.column_names and column in declared]
    if "audio" in columns and len(columns) > 1 and ("video" not in columns or not uses_audio):
        columns.remove("audio")
        warnings.warn(f"{task_metadata.name}: {name} does not use the audio of one side.", stacklevel=3)
    if not columns or "image" in columns or columns == ["audio"]:
        found = " and ".join(columns) or "neither text nor video"
        raise UserError(
            f"{task_metadata.name} has {found} on one side. This model supports text, video, and the audio of a video."
        )
    return columns


def _features(model: Model, dataset: Any, task_metadata: Any, prompt_type: str) -> Features:
    """Encode the texts or videos of one side, which must not contain both."""
    columns = _columns(model.name, _uses_audio(model), dataset, task_metadata, prompt_type)
    if columns == ["text"]:
        return _text_features(model, dataset)
    if "text" in columns:
        raise UserError(
            f"{task_metadata.name} has {' and '.join(columns)} on one side, but a method scores texts against videos. "
            "Use EmbeddingModel."
        )
    return _video_features(model, dataset, "audio" in columns)


def _text_features(model: Model, dataset: Any) -> TextFeatures:
    titles = dataset["title"] if "title" in dataset.column_names else [None] * len(dataset)
    pairs = zip(titles, dataset["text"], strict=True)
    return model.encode_text([f"{title or ''} {text}".strip() for title, text in pairs])


def _video_features(model: Model, dataset: Any, with_audio: bool) -> VideoFeatures:
    """Encode videos. `with_audio` reads audio from a separate column, otherwise it is read from the video file."""
    from datasets import Audio, Video

    videos = dataset.select_columns(["video", "audio"] if with_audio else ["video"])
    videos = videos.cast_column("video", Video(decode=False))
    if with_audio:
        videos = videos.cast_column("audio", Audio(decode=False))
    parts = []
    for start in range(0, len(videos), VIDEOS):
        with tempfile.TemporaryDirectory() as folder:
            rows = videos[start : start + VIDEOS]
            paths = _files(rows["video"], Path(folder) / "video")
            sounds = _files(rows["audio"], Path(folder) / "audio") if with_audio else None
            parts.append(model.encode_video(paths, sounds))
    return VideoFeatures.cat(parts)


def _files(stored: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Return the paths of stored files; those stored as bytes are written to the folder."""
    folder.mkdir()
    paths = []
    for number, file in enumerate(stored):
        path = Path(file["path"] or "")
        if file["bytes"] is not None:
            path = folder / f"{number}{path.suffix}"
            path.write_bytes(file["bytes"])
        paths.append(path)
    return paths


def _uses_audio(model: Model) -> bool:
    return getattr(model.module, "audio_encoder", None) is not None
