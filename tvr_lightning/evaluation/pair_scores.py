"""Scores of a method, block by block: cached if memory allows, otherwise recomputed."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from tvr_lightning.data.records import VideoRecord
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.sources import Block, ProcessShare, ScoreSource
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures

Score = Callable[[TextFeatures, VideoFeatures], Scores]
LeakingScore = Callable[[TextFeatures, VideoFeatures, TextFeatures], Scores]

VIDEO_BLOCK = 128  # videos of a block for small galleries: gives every process blocks and still keeps a GPU busy
PAIR_BYTES = 256  # memory that a scoring function needs for each pair of a block
BYTES_OF_A_PASS = 32  # per pair: the block, its comparisons and its double-precision sums
COPIES_OF_TEXTS = 4  # copies of the texts within a score, such as unit vectors and projections


class PairScores(ScoreSource):
    """Scores (N, M) of N texts against M videos by a method, in blocks of few videos and many texts.

    Blocks have the same shapes in every pass, so that passes are bitwise identical. Scores are computed without
    gradient, with autocast off, from features in float32 or higher precision.

    Args:
        score: scoring function of the method. With `own_texts` it also takes each video's own caption.
        texts: features of N texts, in scoring order.
        videos: features of M videos.
        memory_budget_bytes: memory budget of a pass without the features; the matrix is cached if it fits into an
            eighth.
        block_texts, block_videos: size of a block; by default chosen from the budget.
        device: device that computes the scores; by default the device of the features.
        shard: share of this process in the video blocks.
        own_texts: features of M captions for the first texts, for as many texts that follow, and so on, for the
            released protocols that condition each video on its own caption.
        part: Name of the part to use instead of the similarity.
        text_index, video_index: (N,), (M,) indices in the split, for messages.
        captions, files: the N texts and M videos themselves, for a reranker.
    """

    def __init__(
        self,
        score: Score | LeakingScore,
        texts: TextFeatures,
        videos: VideoFeatures,
        *,
        memory_budget_bytes: int = 2 * 2**30,
        block_texts: int | None = None,
        block_videos: int | None = None,
        device: torch.device | None = None,
        shard: ProcessShare | None = None,
        own_texts: Sequence[TextFeatures] = (),
        part: str | None = None,
        text_index: Tensor | None = None,
        video_index: Tensor | None = None,
        captions: Sequence[str] = (),
        files: Sequence[VideoRecord] = (),
    ) -> None:
        super().__init__(len(texts), len(videos), device or texts.sentence.device, shard)
        self.score = score
        self.own_texts = own_texts
        self.part = part
        self.captions = captions
        self.files = files
        self.text_index = torch.arange(self.queries) if text_index is None else text_index
        self.video_index = torch.arange(self.gallery) if video_index is None else video_index
        pairs = max(memory_budget_bytes // 2 // (PAIR_BYTES + BYTES_OF_A_PASS), 1)
        size = sum(tensor.nbytes for tensor in texts.tensors())
        text_bytes = max(size // max(self.queries, 1), 1)
        texts_at_once = min(max(memory_budget_bytes // 4 // (COPIES_OF_TEXTS * text_bytes), 1), max(self.queries, 1))
        columns = memory_budget_bytes // 2 // (BYTES_OF_A_PASS * max(self.queries, 1))
        # Each block of videos repeats the work per text, so large galleries get larger blocks.
        largest = max(VIDEO_BLOCK, min(8 * VIDEO_BLOCK, self.gallery // (8 * self.shard.world)))
        fitting = min(largest, max(8, columns), max(8, pairs // texts_at_once))
        self.block_videos = block_videos or max(min(fitting, self.gallery), 1)
        self.block_texts = block_texts or max(min(texts_at_once, pairs // self.block_videos), 1)
        self.budget = memory_budget_bytes
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._checked = False
        slot_size = max(self.queries // max(len(own_texts), 1), 1)
        self.text_blocks = [
            (slice(first, min(first + self.block_texts, start + slot_size)), slot)
            for slot, start in enumerate(range(0, self.queries, slot_size))
            for first in range(start, start + slot_size, self.block_texts)
        ]
        self.texts = texts.to(self.device) if size <= memory_budget_bytes // 8 else texts
        self.videos = videos

    def video_blocks(self) -> list[slice]:
        """Return the video blocks of this process."""
        starts = range(0, self.gallery, self.block_videos)
        mine = list(starts)[self.shard.rank :: self.shard.world]
        return [slice(start, min(start + self.block_videos, self.gallery)) for start in mine]

    @override
    def blocks(self) -> Iterator[Block]:
        # All texts of a video block before the next one. All processes raise together after the first complete pass.
        nan = 0
        first = ""
        for columns in self.video_blocks():
            videos: VideoFeatures | None = None
            for rows, slot in self.text_blocks:
                values = self._kept.get((rows.start, columns.start))
                if values is None:
                    videos = self.videos[columns].to(self.device) if videos is None else videos
                    values = self._compute(rows, columns, slot, videos)
                    if self.queries * self.gallery * values.element_size() / self.shard.world <= self.budget / 8:
                        self._kept[rows.start, columns.start] = values
                wrong = None if self._checked else values.isnan().nonzero()
                if wrong is not None and len(wrong):
                    nan += len(wrong)
                    text, video = self.text_index[rows][wrong[0, 0]], self.video_index[columns][wrong[0, 1]]
                    first = first or f"text {text} against video {video}"
                yield Block(values, rows, columns)
        if self._checked:
            return
        nan = int(self.shard.sum(torch.tensor([nan], device=self.device)))
        if nan:
            raise UserError(
                f"{nan} of {self.queries * self.gallery} scores are NaN; the first is "
                f"{first or 'in another process'} (by position in the split). Look for an overflow or an empty mask in "
                "the method's score"
            )
        self._checked = True

    @torch.no_grad()
    def _compute(self, rows: slice, columns: slice, slot: int, videos: VideoFeatures) -> Tensor:
        records = [self.texts[rows].to(self.device), videos]
        if self.own_texts:
            records.append(self.own_texts[slot][columns].to(self.device))
        with torch.autocast(self.device.type, enabled=False):
            scores = self.score(*[record.float() for record in records])  # type: ignore[arg-type]
        values = scores.similarity if self.part is None else scores.parts[self.part]
        expected = (rows.stop - rows.start, columns.stop - columns.start)
        if values.shape != expected:
            raise UserError(
                f"score returned a similarity of shape {tuple(values.shape)} for {expected[0]} texts and "
                f"{expected[1]} videos. The shape must be (N, M)."
            )
        return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
