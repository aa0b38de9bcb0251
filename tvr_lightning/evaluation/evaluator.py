"""Evaluator that turns features into a results table. Only the evaluator knows which text matches which video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.balance import Balance, balance
from tvr_lightning.evaluation.metrics import sum_of_recalls, summarize
from tvr_lightning.evaluation.normalization import Bank, Context, Direction, Normalizer
from tvr_lightning.evaluation.pair_scores import LeakingScore, PairScores, Score
from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.evaluation.sources import AdjustedSource, Adjustment, ScoreSource, Shard, TransposedSource
from tvr_lightning.evaluation.streaming import streamed_ranks
from tvr_lightning.evaluation.two_stage import TwoStage
from tvr_lightning.evaluation.verdict import Verdict
from tvr_lightning.features import TextFeatures, VideoFeatures

LEAKS = "leaks ground truth"
SHORT: dict[Direction, str] = {"text-to-video": "t2v", "video-to-text": "v2t"}
Adjustments = tuple[Adjustment | None, Adjustment | None]


@dataclass
class Evaluation:
    """Results table of a split, with the conditions it was obtained under.

    Attributes:
        text_to_video, video_to_text: `R@K` in percent, `MdR`, `MnR` and `RSum` of each direction; NaN if nothing was
            ranked.
        sum_of_recalls: SumR, the sum of the recalls of both directions.
        text_to_video_ranks, video_to_text_ranks: ranks per query, in the order of the split.
        dataset, split, protocol: evaluated data and protocol.
        texts, videos: number of texts and videos that were ranked.
        texts_without_video: number of texts left out because their video was not encoded.
        partial: True if some texts or videos of the split were not encoded.
        post_processing: name of the score normalization, or None.
        transductive: True if the score normalization uses the test set as a whole.
        warnings: conditions that limit comparisons with other results.
        measured: values reported by the normalization, in percent by name, such as the recall of candidates.
        balance: balance of the retrieval in each direction; empty unless requested.
        audit: result of the leakage audit of the method and its options, or None.
    """

    text_to_video: dict[str, float]
    video_to_text: dict[str, float]
    sum_of_recalls: float
    text_to_video_ranks: Ranks
    video_to_text_ranks: Ranks
    dataset: str
    split: str
    protocol: str
    texts: int
    videos: int
    texts_without_video: int
    partial: bool
    post_processing: str | None = None
    transductive: bool = False
    warnings: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    balance: dict[Direction, Balance] = field(default_factory=dict)
    audit: Verdict | None = None

    @classmethod
    def of(
        cls,
        rows: tuple[dict[str, float], dict[str, float]],
        ranks: tuple[Ranks, Ranks],
        truth: GroundTruth,
        normalizer: Normalizer | None,
        **seen: Any,
    ) -> Evaluation:
        """Return the evaluation of a split.

        Args:
            rows: Metrics of text-to-video and video-to-text retrieval.
            ranks: Ranks of the text queries and of the video queries.
            truth: Ground truth of the split.
            normalizer: Normalizer that was applied to the scores.
            seen: Other attributes: numbers of texts and videos, `partial` and warnings.
        """
        warnings = [*truth.warnings, *seen.pop("warnings")]
        if normalizer is not None:
            for mark in normalizer.warnings():
                warnings.append(mark)
                rank_zero_warn(f"{normalizer.name}: {mark}. Choose another normalization.")
        named: dict[str, Any] = {"dataset": truth.dataset, "split": truth.split, "protocol": truth.protocol}
        return cls(
            text_to_video=rows[0],
            video_to_text=rows[1],
            sum_of_recalls=sum_of_recalls(*rows),
            text_to_video_ranks=ranks[0],
            video_to_text_ranks=ranks[1],
            post_processing=normalizer.name if normalizer else None,
            transductive=normalizer.transductive if normalizer else False,
            warnings=warnings,
            **(named | seen),
        )

    def values(self) -> dict[str, float]:
        """Return the values to log by name: `t2v_R@1`, `SumR`, and the normalization errors if they were measured."""
        found = {f"t2v_{name}": value for name, value in self.text_to_video.items()}
        found |= {f"v2t_{name}": value for name, value in self.video_to_text.items()}
        found["SumR"] = self.sum_of_recalls
        for direction, balance_found in self.balance.items():
            found[f"{SHORT[direction]}_normalization_error"] = balance_found.error
        return found


@dataclass
class _Seen:
    """Texts and videos that take part, in scoring order.

    Attributes:
        text_rows, video_rows: (N,), (M,) rows of the features as received.
        text_index, video_index: (N,), (M,) indices in the split.
        video_of_text: (N,) column of each text's video.
        dropped: number of texts whose video was not encoded.
        slot_sizes: number of texts per caption slot if videos are scored under their own captions, else empty.
    """

    text_rows: Tensor
    video_rows: Tensor
    text_index: Tensor
    video_index: Tensor
    video_of_text: Tensor
    dropped: int
    slot_sizes: list[int] = field(default_factory=list)


class Evaluator:
    """Evaluator that scores all texts against all videos and ranks the matches.

    Texts and videos are scored in seeded random orders, so that positions reveal nothing about pairs. Scores are
    computed in blocks under a memory budget, and an (N, M) matrix is kept only if it fits; the ranks are the same in
    both cases.

    Args:
        score: scoring function of the method.
        recall: values of K for R@K.
        seed: seed for the orders in which texts and videos are scored.
        memory_budget_bytes: memory budget of a pass over all pairs, in bytes, without the features.
        pair_bytes: memory that the scoring function needs for each pair of a block, in bytes.
        block_texts, block_videos: size of the blocks; by default chosen from the budget.
        device: device that computes the scores; by default the device of the features.
        shard: share of this process in the work; all processes return the same evaluation.
        score_as_released: scoring function for the released protocols that condition each video on its own caption. It
            is used instead of `score` and takes texts, videos and the videos' own captions. The result is marked as
            leaking ground truth.
        temperature: gamma, the divisor of the method's scores, for normalizers without their own temperature.
        parts: Names of the parts whose mean is the method's score, for normalizers that need them.
        measure_balance: measurement of the balance in both directions, which needs `temperature`.

    Raises:
        UserError: Not exactly one of `score` and `score_as_released` is given, or the balance is requested without a
            temperature.
    """

    def __init__(
        self,
        score: Score | None = None,
        *,
        recall: tuple[int, ...] = (1, 5, 10),
        seed: int = 0,
        memory_budget_bytes: int = 2 * 2**30,
        pair_bytes: int = 256,
        block_texts: int | None = None,
        block_videos: int | None = None,
        device: torch.device | None = None,
        shard: Shard | None = None,
        score_as_released: LeakingScore | None = None,
        temperature: float | None = None,
        parts: Sequence[str] = (),
        measure_balance: bool = False,
    ) -> None:
        if (score is None) == (score_as_released is None):
            raise UserError("The evaluator needs either `score` or `score_as_released`.")
        if measure_balance and temperature is None:
            raise UserError("Retrieval probabilities, and therefore the balance, need the method's temperature.")
        self.score = score
        self.score_as_released = score_as_released
        self.recall = recall
        self.seed = seed
        self.memory_budget_bytes = memory_budget_bytes
        self.pair_bytes = pair_bytes
        self.block_texts = block_texts
        self.block_videos = block_videos
        self.device = device
        self.shard = shard or Shard()
        self.temperature = temperature
        self.parts = parts
        self.measure_balance = measure_balance

    def evaluate(
        self,
        texts: TextFeatures,
        text_index: Tensor,
        videos: VideoFeatures,
        video_index: Tensor,
        truth: GroundTruth,
        normalizer: Normalizer | None = None,
        bank: Bank | None = None,
    ) -> Evaluation:
        """Rank the video of every text among the videos, and the texts of every video among the texts.

        Args:
            texts: Features of the texts; repetitions are allowed.
            text_index: Index of each text in the split, (N,) int64. An index that occurs twice counts once.
            videos: Features of the videos; repetitions are allowed.
            video_index: Index of each video in the split, (M,) int64.
            truth: Ground truth of the split.
            normalizer: Score normalization, applied to each direction separately.
            bank: Training texts and videos, for normalizers that need them.

        Returns:
            Results table, marked as partial if texts or videos of the split were not encoded.

        Raises:
            UserError: An index is outside the split, a score is NaN, the normalizer needs a bank that is not given,
                or the videos have different numbers of captions under a released protocol.
        """
        seen = self._seen(texts, text_index, videos, video_index, truth)
        if not len(seen.text_rows):
            return self._nothing_ranked(seen, truth, normalizer)
        source = self._source(texts, videos, seen)
        # Two-stage retrieval scores only the candidates.
        by_candidates = isinstance(normalizer, TwoStage) and self.score is not None and not self.measure_balance
        if isinstance(normalizer, TwoStage) and by_candidates:
            adjustments: Adjustments = (None, None)
            ranks = normalizer.ranks(source, seen.video_of_text)
        else:
            adjustments = self._fit(normalizer, bank, source, seen)
            ranks = streamed_ranks(source, seen.video_of_text, *adjustments)
        text_ranks = _in_split(ranks[0], seen.text_index)
        video_ranks = _in_split(ranks[1], seen.video_index)
        rows = summarize(text_ranks, self.recall), summarize(video_ranks, self.recall)
        evaluation = self._evaluation(rows, (text_ranks, video_ranks), seen, truth, normalizer)
        if normalizer is not None:
            evaluation.measured = normalizer.measured(seen.video_of_text)
        if self.measure_balance:
            evaluation.balance = self._balance(source, adjustments, seen)
        return evaluation

    def _seen(
        self, texts: TextFeatures, text_index: Tensor, videos: VideoFeatures, video_index: Tensor, truth: GroundTruth
    ) -> _Seen:
        text_rows = _first_of_each(text_index, len(texts), truth.texts, "text", truth)
        video_rows = _first_of_each(video_index, len(videos), truth.videos, "video", truth)
        column = torch.full((truth.videos,), -1, dtype=torch.int64)
        column[video_index.cpu()[video_rows]] = torch.arange(len(video_rows))
        video_of_text = column[truth.video_of_text.cpu()[text_index.cpu()[text_rows]]]
        known = video_of_text >= 0
        dropped = int((~known).sum())
        text_rows, video_of_text = text_rows[known], video_of_text[known]
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(text_rows), generator=generator)
        columns = torch.randperm(len(video_rows), generator=generator)
        video_rows, video_of_text = video_rows[columns], torch.argsort(columns)[video_of_text]
        slot_sizes: list[int] = []
        if self.score_as_released is not None:
            slot = _caption_slots(video_of_text, len(video_rows))
            order = order[torch.argsort(slot[order], stable=True)]
            slot_sizes = torch.bincount(slot).tolist()
        text_rows = text_rows[order]
        return _Seen(
            text_rows=text_rows,
            video_rows=video_rows,
            text_index=text_index.cpu()[text_rows],
            video_index=video_index.cpu()[video_rows],
            video_of_text=video_of_text[order],
            dropped=dropped,
            slot_sizes=slot_sizes,
        )

    def _source(self, texts: TextFeatures, videos: VideoFeatures, seen: _Seen) -> PairScores:
        ordered = texts[seen.text_rows]
        own_texts, start = [], 0
        for size in seen.slot_sizes:
            own_texts.append(ordered[start + torch.argsort(seen.video_of_text[start : start + size])])
            start += size
        score = self.score or self.score_as_released
        assert score is not None
        return PairScores(
            score,
            ordered,
            videos[seen.video_rows],
            memory_budget_bytes=self.memory_budget_bytes,
            pair_bytes=self.pair_bytes,
            block_texts=self.block_texts,
            block_videos=self.block_videos,
            device=self.device,
            shard=self.shard,
            own_texts=own_texts,
            slot_sizes=seen.slot_sizes,
            text_index=seen.text_index,
            video_index=seen.video_index,
        )

    def _fit(self, normalizer: Normalizer | None, bank: Bank | None, source: PairScores, seen: _Seen) -> Adjustments:
        if normalizer is None:
            return None, None
        if normalizer.needs_bank and (bank is None or self.score is None):
            why = "no bank was given" if bank is None else "a released protocol with own captions cannot use one"
            raise UserError(
                f"{normalizer.name} needs a bank of training texts and videos, but {why}. Provide bank loaders in the "
                "data module, or choose a normalizer without a bank."
            )
        counts = torch.bincount(seen.video_of_text, minlength=source.gallery).double().to(source.device)
        ones = torch.ones(source.queries, dtype=torch.float64, device=source.device)
        bank_texts = bank_videos = None
        text_parts: list[ScoreSource] = []
        video_parts: list[ScoreSource] = []
        if normalizer.needs_bank and bank is not None:
            bank_texts = self._bank_source(bank.texts, source.videos)
            bank_videos = TransposedSource(self._bank_source(source.texts, bank.videos))
            for part in self.parts if normalizer.needs_parts else ():
                text_parts.append(self._bank_source(bank.texts, source.videos, part))
                video_parts.append(TransposedSource(self._bank_source(source.texts, bank.videos, part)))
        forward = Context("text-to-video", bank_texts, ones, counts, self.temperature, text_parts)
        backward = Context("video-to-text", bank_videos, counts, ones, self.temperature, video_parts)
        return normalizer.fit(source, forward), normalizer.fit(TransposedSource(source), backward)

    def _bank_source(self, texts: TextFeatures, videos: VideoFeatures, part: str | None = None) -> PairScores:
        assert self.score is not None
        return PairScores(
            self.score,
            texts,
            videos,
            memory_budget_bytes=self.memory_budget_bytes,
            pair_bytes=self.pair_bytes,
            block_texts=self.block_texts,
            block_videos=self.block_videos,
            device=self.device,
            shard=self.shard,
            part=part,
        )

    def _balance(self, source: PairScores, adjustments: Adjustments, seen: _Seen) -> dict[Direction, Balance]:
        assert self.temperature is not None  # checked at construction
        videos = torch.arange(source.gallery)
        sources: list[ScoreSource] = [source, TransposedSource(source)]
        for i, adjustment in enumerate(adjustments):
            if adjustment is not None:
                sources[i] = AdjustedSource(sources[i], adjustment)
        return {
            "text-to-video": balance(sources[0], self.temperature, seen.video_of_text, videos),
            "video-to-text": balance(sources[1], self.temperature, videos, seen.video_of_text),
        }

    def _nothing_ranked(self, seen: _Seen, truth: GroundTruth, normalizer: Normalizer | None) -> Evaluation:
        nothing = torch.empty(0, dtype=torch.int64)
        ranks = Ranks(nothing, nothing, nothing)
        row = dict.fromkeys([*(f"R@{k}" for k in self.recall), "MdR", "MnR", "RSum"], float("nan"))
        evaluation = self._evaluation((row, dict(row)), (ranks, ranks), seen, truth, normalizer)
        evaluation.warnings.append("nothing was ranked: no text was read together with its video")
        return evaluation

    def _evaluation(
        self,
        rows: tuple[dict[str, float], dict[str, float]],
        ranks: tuple[Ranks, Ranks],
        seen: _Seen,
        truth: GroundTruth,
        normalizer: Normalizer | None,
    ) -> Evaluation:
        leaks = self.score_as_released is not None
        texts, videos = len(seen.text_rows), len(seen.video_rows)
        return Evaluation.of(
            rows,
            ranks,
            truth,
            normalizer,
            protocol=f"{truth.protocol}, as released" if leaks else truth.protocol,
            texts=texts,
            videos=videos,
            texts_without_video=seen.dropped,
            partial=texts < truth.texts or videos < truth.videos,
            warnings=[LEAKS] if leaks else [],
        )


def _first_of_each(index: Tensor, items: int, places: int, kind: str, truth: GroundTruth) -> Tensor:
    """Return the rows of the first item at each index, sorted by index."""
    index = index.cpu()
    if index.shape != (items,):
        raise UserError(f"{kind}_index must be ({items},), one position per {kind}, got {tuple(index.shape)}")
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= places):
        wrong = index[(index < 0) | (index >= places)][0]
        raise UserError(f"{truth.dataset} {truth.split} has {places} {kind}s, but one has position {int(wrong)}")
    order = torch.argsort(index, stable=True)
    sorted_index = index[order]
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = sorted_index[1:] != sorted_index[:-1]
    return order[first]


def _caption_slots(video_of_text: Tensor, videos: int) -> Tensor:
    """Number each text among the texts of its video, for protocols that pair equal numbers (T-MASS, GAID)."""
    counts = torch.bincount(video_of_text, minlength=videos)
    if int(counts.min()) != int(counts.max()):
        raise UserError(
            "The released protocol scores each video under its own caption, so all videos need the same number of "
            f"captions. These have {int(counts.min())} to {int(counts.max())}. Use protocol: query"
        )
    order = torch.argsort(video_of_text, stable=True)
    slot = torch.empty_like(order)
    slot[order] = torch.arange(len(order)) % int(counts.max())
    return slot


def _in_split(ranks: Ranks, places: Tensor) -> Ranks:
    """Replace the indices of the queries by their indices in the split, sort by them, and move the ranks to the CPU."""
    ranks = ranks.to("cpu")
    return Ranks(ranks.better, ranks.tied, places[ranks.index]).deduplicated()
