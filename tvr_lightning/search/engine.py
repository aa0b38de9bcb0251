"""Two-stage search in an index: candidates by their vectors, reranked by a method's score (GARE, appendix I)."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tvr_lightning.data.batch import Media
from tvr_lightning.evaluation.normalization import Context, SinkhornBias
from tvr_lightning.evaluation.sources import MatrixSource
from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.media.picture import read_picture
from tvr_lightning.media.video import probe
from tvr_lightning.search.catalog import Catalog, SpanRow
from tvr_lightning.search.errors import SearchError, UnknownVideoError
from tvr_lightning.search.files import inside
from tvr_lightning.search.indexing import load_scorers
from tvr_lightning.search.long_video import LongVideo
from tvr_lightning.search.places import choose_store
from tvr_lightning.search.ranking import (
    BEST_MOMENTS,
    Example,
    best_of,
    by_video,
    likeness,
    likeness_to,
    strongest_of_each,
)
from tvr_lightning.search.relevance import Scale, judge
from tvr_lightning.search.results import Answer, Moment, Normalize, Result
from tvr_lightning.search.scorer import Scorer
from tvr_lightning.search.segments import Segments
from tvr_lightning.search.texts import EncodedTexts, GivenUp, never
from tvr_lightning.search.vectors import Hits, open_vectors

ExampleKind = Literal["clip", "image"]
NONE = "none"
VIDEOS_IN_MEMORY = 4096
CANDIDATES = 256
EXAMPLE_QUERIES = 6
EXAMPLE_BLOCK = 16
"""Number of segments of an example per pass through the encoder."""
MOST_KEYS = 20_000
"""Maximum number of segments of a folder that are passed to the vector store; with more, its results are filtered."""


class Searcher:
    """An index that is open for searching. Several threads can search while another process updates the index.

    Args:
        path: Folder of the index.
        device: Device for the methods.
        store: Address of the vectors, required if they are on another machine and another user made the index.
        trust: Modules whose classes the checkpoints may also name. Their code is run.

    Raises:
        SearchError: There is no index, its weights have changed, or `store` is missing.
    """

    def __init__(
        self,
        path: str | Path,
        device: str = "cpu",
        store: str | None = None,
        trust: Sequence[str] = (),
    ) -> None:
        with contextlib.ExitStack() as undo:
            self.catalog = Catalog(Path(path))
            undo.callback(self.catalog.close)
            facts = self.catalog.fact("scorers")
            if not facts:
                raise SearchError(f"{path}: indexing has not started. Run tvr index VIDEOS... --out {path}")
            self.store = choose_store(self.catalog, store)
            if self.store != (self.catalog.fact("store") or "lancedb"):
                raise SearchError(f"--store {store}: the vectors of {path} are stored in {self.catalog.fact('store')}")
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
        """Close the files of the index."""
        self.close()

    def close(self) -> None:
        """Close the files of the index."""
        self.vectors.close()
        self.catalog.close()

    @property
    def first(self) -> str:
        """Name of the scorer whose vectors the first stage compares."""
        return next(iter(self.scorers))

    def search(
        self,
        query: str = "",
        top: int = 10,
        rerank: str | None = None,
        candidates: int = CANDIDATES,
        normalize: Normalize = "none",
        folder: str | None = None,
        threshold: float | None = None,
        like: Example | None = None,
    ) -> Answer:
        """Find videos by text, by an example, or by the mean of both scores.

        The score by an example is the mean, over the example's frames, of the best cosine with a frame of the segment.

        Args:
            query: Description of the videos to find. May be empty if there is an example.
            top: Number of results.
            rerank: Scorer of the second stage. "none" keeps the order of the first stage; None is the first scorer.
            candidates: Number of segments that the second stage scores, at least `top`.
            normalize: "sinkhorn" adds a bias to each segment's score, so that hubs do not dominate the results (NCL).
            folder: Folder whose videos may be found, relative to an indexed one.
            threshold: Minimum relevance of results, 0 to 1. None keeps all results.
            like: Example that results resemble.

        Raises:
            SearchError: There is neither text nor an example, or the index does not support an option.
        """
        if threshold is not None and not 0 <= threshold <= 1:
            raise SearchError(f"threshold is {threshold:g}; it must be between 0 and 1")
        words = query if query.strip() else ""
        if not words and like is None:
            raise SearchError("The query is empty. Describe the video in a few words.")
        if threshold is not None and not words:
            raise SearchError("threshold applies only to text queries. Remove it for examples.")
        rerank = self._check(rerank, top, candidates, normalize)
        keys = None if folder is None else self.catalog.in_folder(folder, MOST_KEYS + 1)
        bias = self._biases() if normalize == "sinkhorn" else None  # which may take long, beside other queries
        with self._lock:
            reranker = self.scorers[self.first if rerank == NONE else rerank]
            rows, cosines = self._found(words, like, candidates, top, bias, folder, keys)
            shown = ", ".join(filter(None, [words, like.name if like else ""]))
            answer = Answer(shown, rerank if words else "frames", normalize, len(rows), self.catalog.count())
            if any(each.truncated(words) for each in {self.scorers[self.first], reranker}):
                most = self.scorers[self.first].module.words
                answer.notes.append(f"the query is too long; only the first {most} tokens are used")
            if not rows:
                answer.notes.append("no videos in this folder" if answer.videos else "the index contains no videos yet")
                return answer
            answer.nearest = max(cosines)
            biases = None if bias is None else [bias.get(row.key, 0.0) for row in rows]
            self._rank(answer, words, like, reranker, rows, cosines, biases, top)
            if words:
                known = self.catalog.fact("relevance")
                judge(answer, None if known is None else Scale(known["middle"], known["spread"]), threshold)
        return answer

    def search_video(self, path: str | Path, top: int = 10, folder: str | None = None) -> Answer:
        """Find videos that look like a video file."""
        self._check(NONE, top, top, "none")  # before the file is decoded
        return self.search(top=top, folder=folder, like=self.read_example(path))

    def read_example(self, path: str | Path, kind: ExampleKind = "clip", name: str | None = None) -> Example:
        """Read a clip or an image as an example, with as many segments as such a video of the index has.

        Raises:
            MediaError: The file cannot be decoded.
        """
        scorer, path = self.scorers[self.first], Path(path)
        how = Segments(**(self.catalog.fact("segments") or {"kind": "none"}))
        if kind == "image":
            features = scorer.encode_videos(scorer.still(read_picture(path)).media)
        elif how.kind == "none" or probe(path).duration <= how.length:
            features = scorer.encode_videos(scorer.read(path).media)
        else:
            segments, blocks = LongVideo(path, {self.first: scorer}, how).segments(), []
            while block := list(itertools.islice(segments, EXAMPLE_BLOCK)):
                blocks.append(scorer.encode_videos(Media.cat([each.clips[self.first].media for each in block])))
            features = VideoFeatures.cat(blocks)
        return Example(name or path.name, features)

    def example(self, video: str) -> Example:
        """Return a video of the index as an example."""
        with self._lock:
            rows = self._spans(video)
            features = VideoFeatures.cat([self._features(row, self.first)[0] for row in rows])
        return Example(rows[0].video.path.name, features, video)

    def describe(
        self, video: str, top: int = 10, texts: Sequence[str] | None = None, given_up: GivenUp = never
    ) -> list[tuple[str, float]]:
        """Find the texts that fit a video, best first, with the first scorer's score."""
        scorer = self.scorers[self.first]
        known = self._own_texts() if texts is None else EncodedTexts(scorer, list(texts))
        if not known.texts:
            raise SearchError(
                "There are no texts to choose from. Pass some, or index with --bank FILE or --captions FILE."
            )
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

    def folders(self) -> list[dict[str, Any]]:
        """Return the folders that videos lie in, below the indexed ones, with how many they hold."""
        counts: Counter[str] = Counter()
        roots = self.catalog.roots
        for folder, count in self.catalog.folders():
            root = next((root for root in roots if root == folder or root in folder.parents), folder)
            counts[folder.relative_to(root).as_posix()] += count
        return [{"folder": name, "count": count} for name, count in sorted(counts.items())]

    def example_queries(self) -> list[str]:
        """Return a few queries to begin with, of the bank or without one of the captions, where there are some."""
        texts = self.catalog.fact("bank") or self.catalog.some_captions(EXAMPLE_QUERIES)
        return list(dict.fromkeys(texts))[:EXAMPLE_QUERIES]

    def file_of(self, video: str) -> Path:
        """Return the file of a video that is still inside the indexed folders."""
        path = self.catalog.video(video).path
        if not path.is_file() or not inside(path, self.catalog.roots):
            raise SearchError(f"{path.name} is no longer in the indexed folders. Run tvr index again.")
        return path

    def _check(self, rerank: str | None, top: int, candidates: int, normalize: str) -> str:
        rerank = rerank or self.first
        if rerank != NONE and rerank not in self.scorers:
            raise SearchError(
                f"rerank: the index has no scorer {rerank!r}, only {', '.join(self.scorers)} and none. Index also with "
                "--ckpt_path of that method."
            )
        if top < 1 or candidates < 1:
            raise SearchError(f"top ({top}) and candidates ({candidates}) must be at least 1")
        if normalize not in get_args(Normalize):
            raise SearchError(f"normalize: {normalize!r}; expected {' or '.join(get_args(Normalize))}")
        return rerank

    def _found(
        self,
        words: str,
        like: Example | None,
        count: int,
        top: int,
        bias: dict[int, float] | None,
        folder: str | None,
        keys: list[int] | None,
    ) -> tuple[list[SpanRow], list[float]]:
        """Return the candidates, best first, with their cosines with the text, or without one with the example."""
        scorer = self.scorers[self.first]
        vectors = [] if not words else [scorer.text_vectors(scorer.encode_texts([words]))[0]]
        vectors += [] if like is None else [unit(each.mean(0, keepdim=True))[0] for each in like.segments()]
        count = max(count // len(vectors), top)
        own = None if like is None else like.video
        rows, cosines = self._candidates(vectors[0], count, top, bias, folder, keys, own)
        for vector in vectors[1:]:
            there = {row.key for row in rows}
            more = [
                row for row in self._candidates(vector, count, top, bias, folder, keys, own)[0] if row.key not in there
            ]
            read, known = self.catalog.vectors([row.key for row in more])
            values = dict(zip(read, (known @ vectors[0]).tolist() if read else [], strict=True))
            more = [row for row in more if row.key in values]
            rows += more
            cosines += [values[row.key] for row in more]
        return rows, cosines

    def _candidates(
        self,
        vector: Tensor,
        count: int,
        top: int,
        bias: dict[int, float] | None,
        folder: str | None,
        keys: list[int] | None,
        leave_out: str | None = None,
    ) -> tuple[list[SpanRow], list[float]]:
        """Return the segments nearest to a vector, best first with the bias, and their cosines.

        These are `count`, or more until they belong to `top` videos other than `leave_out`.
        """
        count = max(count, top)
        while True:
            many = keys is not None and len(keys) > MOST_KEYS
            hits: Hits = self.vectors.nearest(vector, count, None if many else keys)
            found = [key for key, _ in hits]
            if many and folder is not None:
                found = self.catalog.keep_in_folder(found, folder)
            known = self.catalog.by_key(found)  # drops what changed since the store was written
            kept = [(key, cosine) for key, cosine in hits if key in known and known[key].video.id != leave_out]
            if len(hits) < count or len({known[key].video.id for key, _ in kept}) >= min(top, len(kept) or top):
                break
            count *= 4
        if bias is not None:
            kept.sort(key=lambda hit: -(hit[1] + bias.get(hit[0], 0.0)))
        return [known[key] for key, _ in kept], [cosine for _, cosine in kept]

    def _biases(self) -> dict[int, float]:
        """Return each segment's bias by its key: a bank of queries against the gallery, balanced (NCL, Eqs. 10 and 11).

        Taken on the cosines of the first stage, which a gallery of any size has at hand.
        """
        with self._bias_lock:
            generation = self.catalog.generation
            if self._bias is None or self._bias[0] != generation:
                if not self.catalog.fact("bank"):
                    raise SearchError("normalize: sinkhorn needs a bank of sample queries. Index with --bank FILE.")
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
        words: str,
        like: Example | None,
        reranker: Scorer,
        rows: list[SpanRow],
        cosines: list[float],
        biases: list[float] | None,
        top: int,
    ) -> None:
        name = next(name for name, scorer in self.scorers.items() if scorer is reranker)
        by_method = bool(words) and answer.rerank != NONE
        text = reranker.encode_texts([words]) if words else None
        scored = VideoFeatures.cat([self._features(row, name)[0] for row in rows]) if by_method else None
        alike = [] if like is None else like.segments()
        wanted = [self._likeness(alike, rows)] if alike else []
        if text is not None:
            wanted.insert(0, torch.tensor(cosines) if scored is None else reranker.score(text, scored).similarity[0])
        scores = torch.stack(wanted).mean(0)
        if biases is not None:
            scores = scores + torch.tensor(biases)
        seen = torch.cat(alike) if text is None else text.sentence
        where = name if text is not None else self.first
        videos = by_video(rows, scores)
        for rank, found in enumerate(itertools.islice(videos.values(), top), 1):
            segments = [self._moments(seen, rows[place], where) for place in found.places]
            place, moments = found.places[0], strongest_of_each(segments)
            video = rows[place].video
            # What it is ranked by comes first: the best segment's strongest moment.
            first = max(segments[0], key=lambda moment: moment.similarity)
            share = None
            if text is not None and by_method:
                share = reranker.sound_share(text, self._features(rows[place], name)[0])
            result = Result(
                rank=rank,
                first_rank=place + 1,
                id=video.id,
                path=str(video.path),
                duration=video.duration,
                score=found.score,
                cosine=cosines[place],
                bias=None if biases is None else biases[place],
                sound=None if share is None else float(share[0, 0]),
                best=[first, *(each for each in best_of(moments) if each != first)][:BEST_MOMENTS],
                moments=moments,
                captions=self.catalog.captions_of(video.id),
                width=video.width,
                height=video.height,
                start=first.time,
            )
            answer.results.append(result)

    def _likeness(self, example: list[Tensor], rows: list[SpanRow]) -> Tensor:
        """Return how much each segment (S,) looks like an example, whose segments' frames (K, D) are given."""
        values = []
        for row in rows:
            features = self._features(row, self.first)[0]
            values.append(likeness_to(example, features.frames[0][features.frame_mask[0]]))
        return torch.stack(values)

    def _moments(self, like: Tensor, row: SpanRow, scorer: str) -> list[Moment]:
        """Return each real frame of a segment with its best cosine with one of some vectors (K, D)."""
        features, times = self._features(row, scorer)
        mask = features.frame_mask[0]
        values = likeness(unit(like), features.frames[0][mask]).amax(0).tolist()
        return [Moment(time, round(value, 6)) for time, value in zip(times[mask].tolist(), values, strict=True)]
