"""Evaluator that turns features into a results table. Only the evaluator knows which text matches which video."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.balance import Balance, balance
from tvr_lightning.evaluation.intervals import metric_intervals
from tvr_lightning.evaluation.normalization import Bank, Context, Normalizer
from tvr_lightning.evaluation.pair_scores import LeakingScore, PairScores, Score
from tvr_lightning.evaluation.sources import AdjustedSource, ProcessShare, ScoreSource, TransposedSource, streamed_ranks
from tvr_lightning.evaluation.two_stage import TwoStage, UnscoredPairs
from tvr_lightning.features import IndexedFeatures, TextFeatures, VideoFeatures, first_of_each
from tvr_lightning.metrics import Direction, RankMetric, direction_metrics
from tvr_lightning.ranks import Ranks

LEAKS = "leaks ground truth"
SHORT: dict[Direction, str] = {"text-to-video": "t2v", "video-to-text": "v2t"}


@dataclass(kw_only=True)
class RetrievalTable:
    """Results table of retrieval on a split, with the conditions it was obtained under.

    Attributes:
        text_to_video, video_to_text: metrics of each direction by name: `R@K` in percent, `MdR`, `MnR`, `RSum`, and
            those of the recipe; NaN if nothing was ranked.
        sum_of_recalls: SumR, the sum of the recalls of both directions.
        dataset, split, protocol: evaluated data and protocol.
        texts, videos: number of texts and videos that were ranked.
        partial: True if some texts or videos of the split were not ranked (limited batches, skipped files).
        post_processing: name of the score normalization, or None.
        transductive: True if the score normalization uses the test set as a whole.
        warnings: conditions that limit comparisons with other results, such as "leaks ground truth".
        measured: values reported by the normalization, by name, in percent unless the name ends with
            a unit in parentheses, such as the recall of candidates.
        intervals: `low` and `high` of the 95 % interval over queries, by direction and metric.
    """

    text_to_video: dict[str, float]
    video_to_text: dict[str, float]
    sum_of_recalls: float
    dataset: str
    split: str
    protocol: str
    texts: int
    videos: int
    partial: bool
    post_processing: str | None = None
    transductive: bool = False
    warnings: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Evaluation(RetrievalTable):
    """Results table of a split with the rank of every query.

    Attributes:
        text_to_video_ranks, video_to_text_ranks: ranks per query, in the order of the split.
        balance: balance of the retrieval in each direction; empty unless requested.
        audit: result of the leakage audit of the method and its options, or None.
    """

    text_to_video_ranks: Ranks
    video_to_text_ranks: Ranks
    balance: dict[Direction, Balance] = field(default_factory=dict)
    audit: AuditResult | None = None

    @classmethod
    def of(
        cls,
        metrics: Sequence[RankMetric],
        ranks: tuple[Ranks, Ranks],
        truth: GroundTruth,
        normalizer: Normalizer | None,
        warnings: Sequence[str],
        **fields: Any,
    ) -> Evaluation:
        """Return the evaluation of a split from the metrics of each direction and the ranks of texts and videos.

        `warnings` are those in addition to the dataset's; the other fields are passed by name.
        """
        texts, videos = ({metric.name: float(metric.of(each)) for metric in metrics} for each in ranks)
        return cls(
            text_to_video=texts,
            video_to_text=videos,
            sum_of_recalls=texts["RSum"] + videos["RSum"],
            text_to_video_ranks=ranks[0],
            video_to_text_ranks=ranks[1],
            dataset=truth.dataset,
            split=truth.split,
            protocol=truth.protocol,
            post_processing=normalizer.name if normalizer else None,
            transductive=normalizer.transductive if normalizer else False,
            warnings=[*truth.warnings, *warnings],
            intervals=metric_intervals(ranks, truth.video_of_text, [metric.name for metric in metrics]),
            **fields,
        )


class Evaluator:
    """Evaluator that scores all texts against all videos and ranks the matches.

    Texts and videos are scored in seeded random orders, so that positions reveal nothing about pairs. Scores are
    computed in blocks, and an (N, M) matrix is kept only if it fits in the budget; the ranks are the same.

    Args:
        score: scoring function of the method.
        seed: seed for the orders in which texts and videos are scored.
        score_as_released: scoring function for the released protocols that condition each video on its own caption. It
            is used instead of `score` and takes texts, videos and the videos' own captions. The result is marked as
            leaking ground truth.
        temperature: gamma, the divisor of the method's scores, for normalizers without their own temperature.
        parts: Names of the parts whose mean is the method's score, for normalizers that need them.
        measure_balance: measurement of the balance in both directions, which needs `temperature`.
        shard: share of this process in the work; all processes return the same evaluation.
        options: options of `PairScores`, such as the device.
    """

    def __init__(
        self,
        score: Score | None = None,
        *,
        seed: int = 0,
        score_as_released: LeakingScore | None = None,
        temperature: float | None = None,
        parts: Sequence[str] = (),
        measure_balance: bool = False,
        shard: ProcessShare | None = None,
        **options: Any,
    ) -> None:
        self.leaks = score is None
        self.seed = seed
        self.temperature = temperature
        self.parts = parts
        self.measure_balance = measure_balance
        self.shard = shard or ProcessShare()
        scored: Any = score or score_as_released
        self.pair_scores: Callable[..., PairScores] = partial(PairScores, scored, shard=self.shard, **options)

    def evaluate(
        self,
        texts: TextFeatures,
        text_index: Tensor,
        videos: VideoFeatures,
        video_index: Tensor,
        truth: GroundTruth,
        normalizer: Normalizer | None = None,
        bank: Bank | None = None,
        metrics: Sequence[RankMetric] | None = None,
    ) -> Evaluation:
        """Rank the video of each of N texts among M videos, and the texts of every video among the texts.

        `text_index` (N,) and `video_index` (M,) int64 are the indices in the split; one that occurs twice counts once.
        The normalizer is applied to each direction separately. `metrics` are by default those of most papers.
        """
        placed_texts, placed_videos, video_of_text = self._in_scoring_order(
            IndexedFeatures(text_index.cpu(), texts), IndexedFeatures(video_index.cpu(), videos), truth
        )
        warnings = [LEAKS] if self.leaks else []
        if not len(placed_texts):
            warnings.append("nothing was ranked: no text was read together with its video")
        # A copy, since the method's own normalizer must not keep anything about the split.
        fitted = copy.deepcopy(normalizer) if len(placed_texts) else None
        starts = range(0, len(placed_texts), len(placed_videos)) if self.leaks else ()
        own = [start + torch.argsort(video_of_text[start : start + len(placed_videos)]) for start in starts]
        pairs = self.pair_scores(
            placed_texts.features,
            placed_videos.features,
            own_texts=[placed_texts.features[rows] for rows in own],
            text_index=placed_texts.index,
            video_index=placed_videos.index,
            **named_items(truth, placed_texts.index, placed_videos.index),
        )
        alone = isinstance(fitted, TwoStage) and not self.leaks and not self.measure_balance
        source = UnscoredPairs(pairs) if alone else pairs
        contexts: list[Context | None] = [None, None]
        if fitted is not None:
            captions = torch.bincount(video_of_text, minlength=pairs.gallery)
            contexts = [self.context(direction, fitted, bank, pairs, captions) for direction in SHORT]
        ranks, _ = normalized_ranks(source, video_of_text, fitted, contexts, warnings)
        balances: dict[Direction, Balance] = {}
        if self.measure_balance and self.temperature is not None and len(placed_texts):
            columns = torch.arange(len(placed_videos))
            texts_first, videos_first = normalized_sources(pairs, fitted, contexts)
            balances = {
                "text-to-video": balance(texts_first, self.temperature, video_of_text, columns),
                "video-to-text": balance(videos_first, self.temperature, columns, video_of_text),
            }
        evaluation = Evaluation.of(
            metrics or direction_metrics(),
            (_in_split(ranks[0], placed_texts.index), _in_split(ranks[1], placed_videos.index)),
            truth,
            fitted or normalizer,
            warnings,
            texts=len(placed_texts),
            videos=len(placed_videos),
            partial=len(placed_texts) < truth.texts or len(placed_videos) < truth.videos,
            measured=fitted.measured(video_of_text) if fitted else {},
            balance=balances,
        )
        if self.leaks:
            evaluation.protocol += ", as released"
        return evaluation

    def _in_scoring_order(
        self, texts: IndexedFeatures[TextFeatures], videos: IndexedFeatures[VideoFeatures], truth: GroundTruth
    ) -> tuple[IndexedFeatures[TextFeatures], IndexedFeatures[VideoFeatures], Tensor]:
        """Return the N distinct texts whose video was read, the M distinct videos, and the column of each text's video.

        If videos are scored under their own captions, the first M texts describe different videos, as do the next M.
        """
        text_rows, video_rows = first_of_each(texts.index), first_of_each(videos.index)
        described = truth.video_of_text.cpu()[texts.index[text_rows]]
        known = torch.isin(described, videos.index)
        text_rows, described = text_rows[known], described[known]
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(text_rows), generator=generator)
        video_rows = video_rows[torch.randperm(len(video_rows), generator=generator)]
        column = torch.empty(truth.videos, dtype=torch.int64)
        column[videos.index[video_rows]] = torch.arange(len(video_rows))
        video_of_text = column[described]
        if self.leaks:
            counts = torch.bincount(video_of_text, minlength=len(video_rows))
            if int(counts.min()) != int(counts.max()):
                raise UserError(
                    "The released protocol scores each video under its own caption, so all videos need the same number "
                    f"of captions. These have {int(counts.min())} to {int(counts.max())}. Use protocol: query"
                )
            by_video = torch.argsort(video_of_text, stable=True)
            slot = torch.empty_like(video_of_text)
            slot[by_video] = torch.arange(len(by_video)) % int(counts.max())
            order = order[torch.argsort(slot[order], stable=True)]
        return texts[text_rows[order]], videos[video_rows], video_of_text[order]

    def context(
        self, direction: Direction, normalizer: Normalizer, bank: Bank | None, source: PairScores, captions: Tensor
    ) -> Context:
        """Return the information for a normalizer in one direction; `captions` (M,) counts the texts of each video."""
        of_videos = direction == "video-to-text"
        counts = captions.double().to(source.device)
        ones = torch.ones(source.queries, dtype=torch.float64, device=source.device)
        sides = (counts, ones) if of_videos else (ones, counts)
        context = Context(direction, None, *sides, self.temperature)
        if not normalizer.needs_bank:
            return context
        if bank is None or self.leaks:
            why = "no bank was given" if bank is None else "a released protocol with own captions cannot use one"
            raise UserError(
                f"{normalizer.name} needs a bank of training texts and videos, but {why}. Provide bank loaders in "
                "the data module, or choose a normalizer without a bank."
            )

        def scores(part: str | None = None) -> ScoreSource:
            if of_videos:
                return TransposedSource(self.pair_scores(source.texts, bank.videos, part=part))
            return self.pair_scores(bank.texts, source.videos, part=part)

        context.bank = scores()
        context.bank_parts = [scores(part) for part in self.parts] if normalizer.needs_parts else []
        return context


def normalized_ranks(
    source: ScoreSource,
    video_of_text: Tensor,
    normalizer: Normalizer | None,
    contexts: Sequence[Context | None],
    warnings: list[str],
) -> tuple[tuple[Ranks, Ranks], ScoreSource]:
    """Rank the matches of N texts among scores (N, M) in both directions, each normalized if it has a context.

    Adds warnings about the normalization to `warnings`. Also returns the keys (N, M) that rank the videos of each text.
    """
    keys = normalized_sources(source, normalizer, [context and replace(context, keys=True) for context in contexts])
    ranks = streamed_ranks(source, video_of_text, *[each.adjustment for each in keys])
    if normalizer is not None:
        found = [warning for context in contexts if context for warning in context.warnings]
        if any(bool((each.tied > 1).any()) for each in ranks):
            before = streamed_ranks(source, video_of_text)
            added = sum(int(((new.tied > 1) & (old.tied == 1)).sum()) for old, new in zip(before, ranks, strict=True))
            found += [f"it adds ties to the ranks of {added} queries"] if added else []
        warnings.extend(dict.fromkeys(found))
    return ranks, keys[0]


def normalized_sources(
    source: ScoreSource, normalizer: Normalizer | None, contexts: Sequence[Context | None]
) -> list[AdjustedSource]:
    """Return the scores of both directions."""
    return [
        AdjustedSource(each, normalizer.fit(each, context) if normalizer and context else None)
        for each, context in zip((source, TransposedSource(source)), contexts, strict=True)
    ]


def named_items(truth: GroundTruth, texts: Tensor, videos: Tensor) -> dict[str, Any]:
    """Return the captions (N,) and files (M,) of indices in a split as arguments of `PairScores`, if they are known."""
    if truth.items is None:
        return {}
    captions = [truth.items.texts[text].text for text in texts.tolist()]
    return {"captions": captions, "files": [truth.items.videos[video] for video in videos.tolist()]}


def _in_split(ranks: Ranks, index: Tensor) -> Ranks:
    """Replace the rows of the queries by their indices in the split, sort by them, and move the ranks to the CPU."""
    ranks = ranks.to("cpu")
    ranks.index = index[ranks.index]
    return ranks[ranks.index.argsort()]
