"""The two-stage search over an index: candidates by vectors, ranked anew by a method's score (GARE, appendix I)."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from tvr_lightning.evaluation.normalization import Context, SinkhornBias
from tvr_lightning.evaluation.sources import MatrixSource
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.media.picture import read_picture
from tvr_lightning.search.captions import words_of
from tvr_lightning.search.catalog import Catalog, SpanRow
from tvr_lightning.search.errors import SearchError, UnknownVideoError
from tvr_lightning.search.files import inside
from tvr_lightning.search.indexing import load_scorers
from tvr_lightning.search.places import choose_store
from tvr_lightning.search.results import Answer, Moment, Normalize, Result
from tvr_lightning.search.scorer import Scorer
from tvr_lightning.search.texts import EncodedTexts, GivenUp, never
from tvr_lightning.search.vectors import Hits, open_vectors

NONE = "none"
BEST_MOMENTS = 3
VIDEOS_IN_MEMORY = 4096
CANDIDATES = 256


@dataclass(frozen=True)
class Filter:
    """Which videos may be found.

    Attributes:
        shortest: seconds that a video lasts at least.
        longest: seconds that it lasts at most.
        path: what its path contains; upper and lower case are alike.
        caption: words that its captions contain, all of them in any order and case.
    """

    shortest: float | None = None
    longest: float | None = None
    path: str | None = None
    caption: str | None = None

    def keys(self, catalog: Catalog) -> list[int]:
        """Return the keys of the stretches of a catalog that may be found."""
        return catalog.admitted(self.shortest, self.longest, self.path, words_of(self.caption or ""))


class Searcher:
    """Answers queries from an index; several threads may ask at once, and an indexing run may write meanwhile.

    Args:
        path: folder of the index.
        device: where the methods run.
        store: address of the index's vectors, where they lie on another machine and this user has not indexed them.
        trust: modules whose classes its checkpoints may name besides this package's; they are imported.

    Raises:
        SearchError: no index, its weights are no longer what they were, or its vectors lie at an address that the user
            has not named.
    """

    def __init__(
        self, path: str | Path, device: str = "cpu", store: str | None = None, trust: Sequence[str] = ()
    ) -> None:
        with contextlib.ExitStack() as undo:
            self.catalog = Catalog(Path(path))
            undo.callback(self.catalog.close)
            facts = self.catalog.fact("scorers")
            if not facts:
                raise SearchError(f"{path}: indexing never began; run tvr index VIDEOS... --out {path}")
            self.store = choose_store(self.catalog, store, "exact")
            if self.store != (self.catalog.fact("store") or "exact"):
                raise SearchError(f"--store {store}: the vectors of {path} lie in {self.catalog.fact('store')}")
            self.scorers: dict[str, Scorer] = load_scorers(facts, device, trust)
            self.vectors = open_vectors(self.store, self.catalog)
            undo.pop_all()
        self._lock = threading.RLock()
        self._held: OrderedDict[tuple[int, str], tuple[VideoFeatures, Tensor]] = OrderedDict()
        self._bias_lock = threading.Lock()
        self._bias: tuple[int, dict[int, float]] | None = None
        self._texts_lock = threading.Lock()
        self._texts: tuple[int, EncodedTexts] | None = None

    def __enter__(self) -> Searcher:
        """Return the searcher, open until the context ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the index's files."""
        self.close()

    def close(self) -> None:
        """Let go of the index's files."""
        self.vectors.close()
        self.catalog.close()

    @property
    def first(self) -> str:
        """Name of the scorer whose vectors the first stage compares."""
        return next(iter(self.scorers))

    @property
    def roots(self) -> list[Path]:
        """Files and folders that the index covers."""
        return [Path(root) for root in self.catalog.fact("roots") or []]

    def search(
        self,
        query: str,
        top: int = 10,
        rerank: str | None = None,
        candidates: int = CANDIDATES,
        normalize: Normalize = "none",
        only: Filter | None = None,
    ) -> Answer:
        """Find videos by words.

        Args:
            query: what is to be seen.
            top: how many results.
            rerank: scorer of the second stage, "none" for the first stage's order, None for the index's first scorer.
            candidates: k, how many videos the second stage scores, at least `top`.
            normalize: "sinkhorn" adds to each video's score a bias that keeps hubs from crowding the results (NCL).
            only: which videos may be found.

        Raises:
            SearchError: an empty query, or an option that the index cannot serve.
        """
        if not query.strip():
            raise SearchError("the query is empty; say in a few words what is to be seen")
        rerank = self._check(rerank, top, candidates, normalize)
        among = self._among(only)
        bias = self._biases() if normalize == "sinkhorn" else None  # which may take long, beside other queries
        with self._lock:
            scorer = self.scorers[self.first]
            text = scorer.encode_texts([query])
            vector = scorer.text_vectors(text)[0]
            rows, cosines, biases = self._candidates(vector, max(candidates, top), bias, among)
            answer = Answer(query, rerank, normalize, len(rows), self.catalog.count())
            reranker = self.scorers[self.first if rerank == NONE else rerank]
            if reranker is not scorer and rows:
                text = reranker.encode_texts([query])
            if any(each.truncated(query) for each in {scorer, reranker}):
                answer.notes.append(f"the query is too long; what comes after {scorer.module.words} tokens is not read")
            self._rank(answer, reranker, text, rows, cosines, biases, top)
        return answer

    def search_video(
        self, path: str | Path, top: int = 10, only: Filter | None = None, name: str | None = None
    ) -> Answer:
        """Find videos that look like an example; the second stage compares frames with frames.

        Args:
            path: a video file.
            top: how many results.
            only: which videos may be found.
            name: what the example is called; its file name by default.

        Raises:
            VideoError: the example cannot be decoded.
            SearchError: an option out of range.
        """
        self._check(NONE, top, top, "none")  # before the work of reading
        return self.search_example(self.read_example(path), name or Path(path).name, top, only)

    def read_example(self, path: str | Path) -> VideoFeatures:
        """Decode and encode a video file as an example, while other queries are answered.

        Returns:
            Features of one video, as the first scorer's `score` takes them.

        Raises:
            VideoError: it cannot be decoded.
        """
        scorer = self.scorers[self.first]
        return scorer.encode_videos(scorer.read(Path(path)).media)

    def read_picture_example(self, path: str | Path) -> VideoFeatures:
        """Read and encode a picture file as an example: a silent video that shows it all along.

        Raises:
            PictureError: it cannot be read.
        """
        scorer = self.scorers[self.first]
        return scorer.encode_videos(scorer.still(read_picture(path)).media)

    def search_example(self, example: VideoFeatures, name: str, top: int = 10, only: Filter | None = None) -> Answer:
        """Find videos that look like an example that was read.

        Args:
            example: what `read_example` gave.
            name: what the example is called.
            top: how many results.
            only: which videos may be found.

        Raises:
            SearchError: an option out of range.
        """
        self._check(NONE, top, top, "none")
        among = self._among(only)
        with self._lock:
            return self._like(example, name, top, among, None)

    def similar(self, video: str, top: int = 10, only: Filter | None = None) -> Answer:
        """Find videos that look like one of the index.

        Args:
            video: its id.
            top: how many results.
            only: which videos may be found.

        Raises:
            UnknownVideoError: no such video.
        """
        self._check(NONE, top, top, "none")
        among = self._among(only)
        with self._lock:
            row = self._spans(video)[0]
            return self._like(self._features(row, self.first)[0], row.video.path.name, top, among, video)

    def describe(
        self, video: str, top: int = 10, texts: Sequence[str] | None = None, given_up: GivenUp = never
    ) -> list[tuple[str, float]]:
        """Find the texts that fit a video, best first, with the first scorer's score.

        The index's own texts are encoded once and kept until they change; searches are answered meanwhile.

        Args:
            video: id of a video.
            top: how many.
            texts: to choose from; by default the index's bank of queries, or without one its captions.
            given_up: asked before every block of texts; once it says yes, no more is computed.

        Raises:
            SearchError: there are no texts.
            UnknownVideoError: no such video.
            GivenUpError: `given_up` said yes.
        """
        scorer = self.scorers[self.first]
        known = self._own_texts() if texts is None else EncodedTexts(scorer, list(texts))
        if not known.texts:
            raise SearchError("no texts to choose from; give some, or index with --bank FILE or --captions FILE")
        with self._lock:
            features = VideoFeatures.cat([self._features(row, self.first)[0] for row in self._spans(video)])
        scores = torch.cat([scorer.score(block, features).similarity.amax(1) for block in known.blocks(given_up)])
        best = scores.topk(min(top, len(scores)))
        return [(known.texts[i], float(v)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def _own_texts(self) -> EncodedTexts:
        """Return the index's bank, or without one its captions; what was encoded of them stays until they change."""
        with self._texts_lock:
            generation = self.catalog.generation
            if self._texts is None or self._texts[0] != generation:
                texts = self.catalog.fact("bank") or self._all_captions()
                known = None if self._texts is None or self._texts[1].texts != texts else self._texts[1]
                self._texts = (generation, known or EncodedTexts(self.scorers[self.first], texts))
            return self._texts[1]

    def _all_captions(self) -> list[str]:
        return sorted({text for texts in self.catalog.captions().values() for text in texts})

    def _spans(self, video: str) -> list[SpanRow]:
        rows = self.catalog.spans(video)
        if not rows:
            raise UnknownVideoError(f"no video {video!r} in the index")
        return rows

    def file_of(self, video: str) -> Path:
        """Return the file of a video that is still inside the indexed folders.

        Raises:
            UnknownVideoError: no such video.
            SearchError: its file is gone, or a link now leads out of the indexed folders.
        """
        path = self.catalog.video(video).path
        if not path.is_file() or not inside(path, self.roots):
            raise SearchError(f"{path.name}: no longer inside the indexed folders; run tvr index again")
        return path

    def _check(self, rerank: str | None, top: int, candidates: int, normalize: str) -> str:
        rerank = rerank or self.first
        if rerank != NONE and rerank not in self.scorers:
            raise SearchError(
                f"rerank: the index has no scorer {rerank!r}, only {', '.join(self.scorers)} and none; index with "
                "--ckpt of that method as well"
            )
        if top < 1 or candidates < 1:
            raise SearchError(f"top ({top}) and candidates ({candidates}) must be at least 1")
        if normalize not in get_args(Normalize):
            raise SearchError(f"normalize: {normalize!r}; expected {' or '.join(get_args(Normalize))}")
        return rerank

    def _among(self, only: Filter | None) -> list[int] | None:
        """Return the keys of the stretches that may be found, None for all; other queries are answered meanwhile."""
        return None if only is None else only.keys(self.catalog)

    def _candidates(
        self, vector: Tensor, count: int, bias: dict[int, float] | None, among: list[int] | None
    ) -> tuple[list[SpanRow], list[float], list[float] | None]:
        """Return the first stage's stretches, best first, with their cosines and biases."""
        hits: Hits = self.vectors.nearest(vector, count, among)
        known = self.catalog.by_key([key for key, _ in hits])  # drops what changed since the store was written
        hits = [hit for hit in hits if hit[0] in known]
        biases = None
        if bias is not None:
            hits.sort(key=lambda hit: -(hit[1] + bias.get(hit[0], 0.0)))
            biases = [bias.get(key, 0.0) for key, _ in hits]
        return [known[key] for key, _ in hits], [cosine for _, cosine in hits], biases

    def _biases(self) -> dict[int, float]:
        """Return each stretch's bias by its key: a bank of queries against the gallery, balanced (NCL, Eqs. 10 and 11).

        Taken on the cosines of the first stage, which a gallery of any size has at hand.
        """
        with self._bias_lock:
            generation = self.catalog.generation
            if self._bias is None or self._bias[0] != generation:
                if not self.catalog.fact("bank"):
                    raise SearchError("normalize: sinkhorn needs queries that stand for users'; index with --bank FILE")
                keys, vectors = self.catalog.vectors()
                if not keys:
                    return {}
                scorer = self.scorers[self.first]
                texts = torch.cat([scorer.text_vectors(block) for block in self._own_texts().blocks()])
                scores = MatrixSource(texts @ vectors.T)
                bias = SinkhornBias().gallery_bias(scores, Context(bank=scores, temperature=scorer.gamma()))
                self._bias = (generation, dict(zip(keys, bias.tolist(), strict=True)))
            return self._bias[1]

    def _features(self, row: SpanRow, scorer: str) -> tuple[VideoFeatures, Tensor]:
        place = (row.key, scorer)
        if place not in self._held:
            self._held[place] = self.catalog.features(row.key, scorer)
            while len(self._held) > VIDEOS_IN_MEMORY:
                self._held.popitem(last=False)
        self._held.move_to_end(place)
        return self._held[place]

    def _rank(
        self,
        answer: Answer,
        reranker: Scorer,
        text: TextFeatures,
        rows: list[SpanRow],
        cosines: list[float],
        biases: list[float] | None,
        top: int,
    ) -> None:
        if not rows:
            answer.notes.append("no video fits the filters" if answer.videos else "the index holds no videos yet")
            return
        name = next(name for name, scorer in self.scorers.items() if scorer is reranker)
        if answer.rerank == NONE:
            scores = torch.tensor(cosines)
        else:
            scores = reranker.score(text, VideoFeatures.cat([self._features(row, name)[0] for row in rows])).similarity[
                0
            ]
        if biases is not None:
            scores = scores + torch.tensor(biases)
        order = scores.sort(descending=True, stable=True).indices[:top].tolist()
        for rank, place in enumerate(order, 1):
            features, times = self._features(rows[place], name)
            share = reranker.sound_share(text, features) if answer.rerank != NONE else None
            moments = _moments(text.sentence[0], features, times)
            row = rows[place].video
            answer.results.append(
                Result(
                    rank=rank,
                    first_rank=place + 1,
                    id=row.id,
                    path=str(row.path),
                    duration=row.duration,
                    score=float(scores[place]),
                    cosine=cosines[place],
                    bias=None if biases is None else biases[place],
                    sound=None if share is None else float(share[0, 0]),
                    best=sorted(moments, key=lambda moment: -moment.similarity)[:BEST_MOMENTS],
                    moments=moments,
                    captions=self.catalog.captions_of(row.id),
                )
            )

    def _like(self, example: VideoFeatures, name: str, top: int, among: list[int] | None, itself: str | None) -> Answer:
        """Rank videos by the mean, over the example's frames, of the best cosine with one of their frames."""
        vector = self.scorers[self.first].video_vectors(example)[0]
        rows, cosines, _ = self._candidates(vector, max(CANDIDATES, top) + 1, None, among)
        kept = [place for place, row in enumerate(rows) if row.video.id != itself]
        answer = Answer(name, "frames", "none", len(kept), self.catalog.count())
        if not kept:
            answer.notes.append("no video fits the filters" if answer.videos else "the index holds no videos yet")
        frames = unit(example.frames[0][example.frame_mask[0]])
        found = []
        for first_rank, place in enumerate(kept, 1):
            features, times = self._features(rows[place], self.first)
            similarity = frames @ unit(features.frames[0][features.frame_mask[0]]).T
            best = similarity.max(0).values.tolist()
            real = times[features.frame_mask[0]].tolist()
            moments = [Moment(time, value) for time, value in zip(real, best, strict=True)]
            found.append((float(similarity.max(1).values.mean()), first_rank, place, moments))
        found.sort(key=lambda item: -item[0])
        for rank, (score, first_rank, place, moments) in enumerate(found[:top], 1):
            row, strongest = rows[place].video, sorted(moments, key=lambda moment: -moment.similarity)[:BEST_MOMENTS]
            answer.results.append(
                Result(
                    rank, first_rank, row.id, str(row.path), row.duration, score, cosines[place], None, None,
                    strongest, moments, self.catalog.captions_of(row.id),
                )
            )  # fmt: skip
        return answer


def _moments(query: Tensor, features: VideoFeatures, times: Tensor) -> list[Moment]:
    """Return the cosine of a query (D,) with each real frame of a video, in the order of time."""
    mask = features.frame_mask[0]
    values = unit(features.frames[0][mask]) @ unit(query)
    return [Moment(time, value) for time, value in zip(times[mask].tolist(), values.tolist(), strict=True)]
