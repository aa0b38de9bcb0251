"""Two-stage search in an index: candidates by their vectors, reranked by a method's score (GARE, appendix I)."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from torch import Tensor

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.evaluation.normalization import Context, SinkhornBias
from tvr_lightning.evaluation.reranker import reranker_of
from tvr_lightning.evaluation.sources import MatrixSource
from tvr_lightning.features import VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.media.container import MediaError
from tvr_lightning.media.image import read_image
from tvr_lightning.search.errors import SearchError, UnknownVideoError, UnreadableError
from tvr_lightning.search.files import relative
from tvr_lightning.search.query import SearchQuery
from tvr_lightning.search.relevance import Scale, judge
from tvr_lightning.search.results import Answer, Moment, Result, printable
from tvr_lightning.search.scorer import Scorer, ScorerSource
from tvr_lightning.search.segments import Segments, read_segments
from tvr_lightning.search.table import IndexTable, SpanRow
from tvr_lightning.store.feature_store import differences

ExampleKind = Literal["clip", "image"]
SPANS_IN_MEMORY = 4096
BLOCK = 16  # texts or segments per pass through an encoder
EXAMPLE_SEGMENTS = 16
EXAMPLES_IN_MEMORY = 256
BEST_MOMENTS = 3
APART = 1.0  # second between the best moments, if there are enough
Features = tuple[VideoFeatures, Tensor]  # of one segment, with the times of its frames


@dataclass(frozen=True)
class Example:
    """Frames (K, D) of length 1 of each segment of an example. A video of the index has an ID and is not a result."""

    name: str
    segments: list[Tensor]
    video: str | None = None


class Searcher(contextlib.AbstractContextManager["Searcher"]):
    """An index that is open for searching. Several threads can search while another process updates the index.

    Args:
        path: Folder or address of the index.
        device: Device for the methods.
        trust: Modules whose classes the checkpoints may also name. Their code is run.
        rerank: Scorer that ranks the candidates by default, or another reranker by name (`reranker_of`).
    """

    def __init__(
        self, path: str | Path, device: str = "cpu", trust: Sequence[str] = (), rerank: str | None = None
    ) -> None:
        self.table = IndexTable(path)
        self.scorers: dict[str, Scorer] = load_scorers(self.table, (), device, trust)
        self.first = next(iter(self.scorers))
        """Name of the scorer whose vectors the first stage compares."""
        self.default = rerank or self.first
        other = self.default not in ("none", *self.scorers) and ("." in self.default or "/" in self.default)
        self.reranker = reranker_of(self.default, device) if other else None
        self._lock = threading.RLock()
        self._known: OrderedDict[tuple[int, str], Features] = OrderedDict()
        self._biases = lru_cache(1)(self._compute_biases)
        self._examples: OrderedDict[str, Example] = OrderedDict()

    def __exit__(self, *_: object) -> None:
        """Close the table."""
        self.table.close()

    def search(self, query: SearchQuery) -> Answer:
        """Find videos by text, by an example, or by the mean of both scores.

        The score by an example is the mean, over the example's frames, of the best cosine with a frame of the segment.
        """
        rerank = query.rerank or self.default
        if rerank not in ("none", *self.rerankers):
            raise SearchError(
                f"rerank: the index has no scorer {rerank!r}, only {', '.join(self.rerankers)} and none. Index with "
                "--ckpt_path of that method too, or name a CrossEncoder's folder or a module.function."
            )
        text, like = query.query.strip(), self._example(query.like) if query.like else None
        # The biases take long, so before the lock of the search.
        biases = self._biases(self.table.generation()) if query.normalize == "sinkhorn" else {}
        with self._lock:
            rows, cosines, bias = self._candidates(query, text, like, biases)
            shown = ", ".join(filter(None, [text, like.name if like else ""]))
            answer = Answer(shown, rerank if text else "frames", query.normalize, len(rows), self.table.count())
            if any(self.scorers[name].truncated(text) for name in {self.first, rerank} & {*self.scorers}):
                words = self.scorers[self.first].module.words
                answer.notes.append(f"the query is too long; only the first {words} tokens are used")
            if not rows:
                answer.notes.append("no videos in this folder" if answer.videos else "the index contains no videos yet")
                return answer
            answer.results = self._rank(query, rows, cosines, bias, like, rerank)
        known = self.table.fact("relevance")
        if text and known:
            judge(answer, Scale(known["middle"], known["spread"]), float(cosines.max()), query.min_relevance)
        return answer

    def add_example(self, path: str | Path, kind: ExampleKind = "clip", name: str | None = None) -> str:
        """Read a clip or an image, cut as the videos of the index are, and return an ID for `SearchQuery.like`."""
        scorer, path = self.scorers[self.first], Path(path)
        rule = Segments(**self.table.fact("segments"))
        if kind == "image":
            clips = iter([scorer.still(read_image(path))])
        elif rule.cuts(path):
            clips = (each.clips[self.first] for each in read_segments(path, {self.first: scorer}, rule))
        else:
            clips = iter([scorer.read(path)])
        blocks = iter(lambda: [clip.media for clip in itertools.islice(clips, BLOCK)], [])
        features = VideoFeatures.cat([scorer.encode_videos(Media.cat(block)) for block in blocks])
        example = secrets.token_hex(8)
        self._examples[example] = Example(name or printable(path.name), _frames(features))
        while len(self._examples) > EXAMPLES_IN_MEMORY:
            self._examples.popitem(last=False)
        return example

    def _example(self, like: str) -> Example:
        if like in self._examples:
            return self._examples[like]
        rows = self.table.spans(like)
        found = self._features([row.key for row in rows], self.first)
        if not found:
            raise UnknownVideoError(f"no video {like!r} in the index")
        features = VideoFeatures.cat([found[row.key][0] for row in rows if row.key in found])
        return Example(printable(rows[0].video.path.name), _frames(features), like)

    def _features(self, keys: Sequence[int], scorer: str) -> dict[int, Features]:
        """Return the features of segments by key, without those that another process has just removed."""
        with self._lock:
            found = {key: self._known.pop((key, scorer)) for key in keys if (key, scorer) in self._known}
            found |= self.table.features([key for key in keys if key not in found], scorer)
            self._known.update({(key, scorer): features for key, features in found.items()})  # the newest last
            while len(self._known) > SPANS_IN_MEMORY:
                self._known.popitem(last=False)
        return found

    def folders(self) -> list[dict[str, Any]]:
        """Return the folders of videos, relative to the indexed ones, and their numbers of videos."""
        roots = self.table.roots
        counts = Counter(str(PurePath(relative(row.path, roots)).parent) for row in self.table.videos())
        return [{"folder": name, "count": count} for name, count in sorted(counts.items())]

    def _candidates(
        self, query: SearchQuery, text: str, like: Example | None, biases: dict[int, float]
    ) -> tuple[list[SpanRow], Tensor, Tensor]:
        """Return the S nearest segments, best first with the bias, and their cosines (S,) and biases (S,)."""
        scorer = self.scorers[self.first]
        vectors = [scorer.text_vectors(scorer.encode_texts([text]))[0]] if text else []
        if like is not None:
            vectors += [unit(frames.mean(0, keepdim=True))[0] for frames in like.segments]
        found: dict[int, SpanRow] = {}
        for vector in vectors:
            count = max(query.candidates // len(vectors), query.top)
            nearest = partial(self.table.nearest, vector, folder=query.folder, without=like.video if like else None)
            rows = nearest(count)
            while len(rows) == count and len({row.video.id for row in rows}) < query.top:
                count *= 4
                rows = nearest(count)
            found |= {row.key: row for row in rows}
        rows = [found[key] for key in sorted(found)]
        if not rows:
            return [], torch.zeros(0), torch.zeros(0)
        bias = torch.tensor([biases.get(row.key, 0.0) for row in rows], dtype=torch.float64)
        cosines = torch.stack([row.vector for row in rows]) @ vectors[0]
        order = (cosines + bias).sort(descending=True, stable=True).indices
        return [rows[place] for place in order.tolist()], cosines[order], bias[order]

    def _compute_biases(self, _: int) -> dict[int, float]:
        """Return each segment's bias by its key, computed from the cosines of the first stage (NCL, Eqs. 10 and 11)."""
        bank = self.table.fact("bank")
        if not bank:
            raise SearchError("normalize: sinkhorn needs a bank of sample queries. Index with --bank FILE.")
        scorer = self.scorers[self.first]
        blocks = (scorer.encode_texts(bank[i : i + BLOCK]) for i in range(0, len(bank), BLOCK))
        texts = torch.cat([scorer.text_vectors(block) for block in blocks])
        keys: list[int] = []
        cosines = [torch.zeros(len(texts), 0)]
        for of_block, vectors in self.table.vectors():
            keys += of_block
            cosines.append(texts @ vectors.T)
        if not keys:
            return {}
        scores = MatrixSource(torch.cat(cosines, 1))
        context = Context(bank=scores, temperature=scorer.module.score_temperature())
        return dict(zip(keys, SinkhornBias().gallery_bias(scores, context).tolist(), strict=True))

    @property
    def rerankers(self) -> list[str]:
        """Names of everything that can rank the candidates of a text."""
        return [*self.scorers, *([self.default] if self.reranker else [])]

    def _reranked(self, text: str, rows: list[SpanRow]) -> Tensor:
        """Return the scores (S,) of segments by the reranker, which gets whole files if it does not take spans."""
        assert self.reranker is not None
        spans = [(row.video.path, (row.start, row.end) if self.reranker.takes_spans else None) for row in rows]
        try:
            found = {span: self.reranker.checked([text], *span)[0] for span in dict.fromkeys(spans)}
        except MediaError as error:
            raise UnreadableError(f"{error}. Update the index: tvr index --out INDEX") from error
        return torch.tensor([found[span] for span in spans])

    def _rank(
        self, query: SearchQuery, rows: list[SpanRow], cosines: Tensor, bias: Tensor, like: Example | None, rerank: str
    ) -> list[Result]:
        """Score S candidates with their cosines (S,) and biases (S,), and return the best videos."""
        text = query.query.strip()
        name = rerank if text and rerank in self.scorers else self.first
        scorer = self.scorers[name]
        encoded = scorer.encode_texts([text]) if text else None
        needed = ({self.first} if like else set()) | ({name} if text and rerank in self.scorers else set())
        features = {each: self._features([row.key for row in rows], each) for each in needed}
        there = [place for place, row in enumerate(rows) if all(row.key in found for found in features.values())]
        if not there:  # another process has just replaced all
            return []
        rows, cosines, bias = [rows[place] for place in there], cosines[there], bias[there]
        scores = []
        if encoded is not None and rerank not in ("none", *self.scorers):
            scores.append(self._reranked(text, rows))
        elif encoded is not None and rerank != "none":
            videos = VideoFeatures.cat([features[name][row.key][0] for row in rows])
            scores.append(scorer.score(encoded, videos)[0])
        elif encoded is not None:
            scores.append(cosines)
        if like is not None:
            spans = [_frames(features[self.first][row.key][0])[0] for row in rows]
            alike = [[(mine @ frames.T).amax(1).mean() for mine in like.segments] for frames in spans]
            scores.append(torch.tensor(alike).amax(1))
        total = torch.stack(scores).mean(0) + bias
        places: dict[str, list[int]] = {}
        for place in total.sort(descending=True, stable=True).indices.tolist():
            places.setdefault(rows[place].video.id, []).append(place)
        seen = unit(encoded.sentence) if encoded is not None else torch.cat(like.segments if like else [])
        best_videos = list(itertools.islice(places.values(), query.top))
        shown = self._features([rows[place].key for of_video in best_videos for place in of_video], name)
        results: list[Result] = []
        for of_video in best_videos:
            segments = [_moments(seen, *shown[rows[place].key]) for place in of_video if rows[place].key in shown]
            if not segments:
                continue
            strongest = [max(moments, key=lambda moment: moment.similarity) for moments in segments]
            best = strongest[0]  # of the segment that determines the rank
            moments = segments[0] if len(segments) == 1 else sorted(strongest, key=lambda moment: moment.time)
            place, video = of_video[0], rows[of_video[0]].video
            results.append(
                Result(
                    rank=len(results) + 1,
                    **vars(video) | {"path": str(video.path)},
                    score=float(total[place]),
                    cosine=float(cosines[place]),
                    bias=float(bias[place]) if query.normalize == "sinkhorn" else None,
                    best=[best, *(each for each in best_moments(moments) if each != best)][:BEST_MOMENTS],
                    moments=moments,
                    start=best.time,
                )
            )
        return results


def _moments(like: Tensor, features: VideoFeatures, times: Tensor) -> list[Moment]:
    """Return the real frames of a segment with their best cosines with vectors (K, D) of length 1."""
    values = (like @ _frames(features)[0].T).amax(0).tolist()
    mask = features.frame_mask[0]
    real = times[: len(mask)][mask].tolist()  # a video with one vector has the time of its first frame
    return [Moment(time, round(value, 6)) for time, value in zip(real, values, strict=True)]


def _frames(features: VideoFeatures) -> list[Tensor]:
    """Return the real frames (K, D) of length 1 of each segment, of a long video those of some at equal steps."""
    count = len(features.frames)
    places = torch.linspace(0, count - 1, min(count, EXAMPLE_SEGMENTS)).round().long().tolist()
    return [unit(features.frames[place][features.frame_mask[place]]) for place in places]


def best_moments(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments with the largest similarity, best first, if possible at least a second apart."""
    chosen: list[Moment] = []
    ordered = sorted(moments, key=lambda moment: -moment.similarity)
    for moment in ordered:
        if all(abs(moment.time - other.time) >= APART for other in chosen):
            chosen.append(moment)
    return [*chosen, *(moment for moment in ordered if moment not in chosen)][:BEST_MOMENTS]


def load_scorers(
    table: IndexTable, given: Sequence[ScorerSource], device: str, trust: Sequence[str] = ()
) -> dict[str, Scorer]:
    """Load the scorers of an index by name. Given ones are recorded in a new index, and must equal those of another."""
    known = table.fact("scorers")
    sources = given or [ScorerSource(**fact["source"]) for fact in known or ()]
    if not sources:
        raise SearchError(f"{table.address}: a new index needs a checkpoint or weights")
    models: dict[str, Scorer] = {}
    for source in sources:
        try:
            model = Scorer(source, device, trust)
        except MissingWeightsError as error:
            advice = "The index was created with these weights. Restore them."
            if given:
                advice = "Pass --weights FILE or --ckpt_path FILE, or --weights none (random)."
            raise SearchError(f"{error.looked_for}. {advice}") from error
        same = sum(name.partition("-")[0] == model.name for name in models)
        models[f"{model.name}-{same + 1}" if same else model.name] = model
    if known is None:
        listed = [
            {"name": name, "source": asdict(m.source), "fingerprint": m.fingerprint} for name, m in models.items()
        ]
        table.set_fact("scorers", listed)
        return models
    before = {fact["name"]: fact["fingerprint"] for fact in known}
    found = f"it was created with {', '.join(before)}, but you named {', '.join(models)}"
    if list(before) == list(models):
        found = "; ".join(filter(None, (differences(before[n], m.fingerprint, "the index") for n, m in models.items())))
    if found:
        raise SearchError(
            f"{table.address}: {found}. Use the methods and weights of the index, or index into a new folder."
        )
    return models
