"""Input of the figures: a run's own weights, its test split encoded once, and the scores of all pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Split, VideoRecord
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.evaluation.evaluator import SHORT, Evaluator, normalized_sources
from tvr_lightning.evaluation.loop import encode_split
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.sources import complete_matrix
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import DecodedClip, read_clip
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.ranks import text_to_video_ranks
from tvr_lightning.reproduce.report.sources import ReportedRun, read_ranks
from tvr_lightning.training.checkpoints import check_trusted, read_checkpoint

MOST_PAIRS = 256  # in pairwise figures; more would not change what they show
FEW_VIDEOS = 200  # up to which decoding takes less time than starting a process for it
STRIP_FRAMES, STRIP_SIZE = 4, 72


@dataclass
class LoadedRun:
    """A run's method with its own weights, and its data."""

    module: Any
    data: TextVideoDataModule

    def clip(self, video: VideoRecord, frames: int, size: int = STRIP_SIZE) -> DecodedClip:
        """Return frames of a video, sampled as the method does; padded ones are black."""
        return read_clip(video.path, frames, Preparation(size), self.data.sampling, video.span)


@dataclass
class EncodedSplit(LoadedRun):
    """A run's test split as its weights encode it.

    `texts` and `videos` are features of N texts and M videos at increasing positions `text_index` (N,) and
    `video_index` (M,) of the split; `similarity` (N, M) is before post-processing, `matching` (N,) the row of each
    text's video, `pairs` (B, 2) rows of texts and their videos, no video twice; `ranks` (N,) are expected ranks as
    evaluated.
    """

    split: Split
    texts: TextFeatures
    videos: VideoFeatures
    text_index: Tensor
    video_index: Tensor
    similarity: Tensor
    matching: Tensor
    pairs: Tensor
    ranks: Tensor | None = None
    post_processing: str | None = None

    def paired(self, most: int = MOST_PAIRS) -> tuple[TextFeatures, VideoFeatures]:
        """Return the features of the B matching pairs, or of the first ones."""
        return self.texts[self.pairs[:most, 0]], self.videos[self.pairs[:most, 1]]

    def caption(self, text: int | Tensor) -> str:
        """Return a text by its row."""
        return self.split.texts[int(self.text_index[text])].text

    def expected_ranks(self) -> Tensor:
        """Return the ranks (N,) as evaluated, or of the scores before post-processing if the run omitted texts."""
        return text_to_video_ranks(self.similarity, self.matching).expected() if self.ranks is None else self.ranks

    def record(self, video: int | Tensor) -> VideoRecord:
        """Return a video by its row."""
        return self.split.videos[int(self.video_index[video])]

    def strip(self, video: int, frames: int = STRIP_FRAMES, size: int = STRIP_SIZE) -> np.ndarray:
        """Return (F, S, S, 3) uint8 frames of a video by its row."""
        return self.clip(self.record(video), frames, size).pixels.permute(0, 2, 3, 1).numpy()


def encode_run(run: ReportedRun, trust: Sequence[str] = ()) -> LoadedRun:
    """Rebuild a run from its settings and weights, and encode its test split unless it answers questions.

    The settings may run code of this package and of modules and repositories in `trust`.
    """
    checkpoint = run.card.checkpoint
    results = run.results
    if checkpoint is None or not Path(checkpoint).is_file():
        reason = f"there is no file {checkpoint}" if checkpoint else "the run has none, as for external scores"
        raise MissingAssetError(f"figures need weights, but {reason}")
    config = {name: results["config"][name] for name in ("model", "data")}
    check_trusted(Path(checkpoint), config, trust, results["environment"]["packages"]["tvr-lightning"])
    config["seed_everything"] = results["config"]["seed_everything"]
    module, data = from_recipe([], [f"--config={yaml.safe_dump(config)}"])
    module.load_weights(read_checkpoint(Path(checkpoint)))
    if not isinstance(module, RetrievalModule):
        return LoadedRun(module, data)
    ranks, _ = read_ranks(run, "text_to_video")
    encoded = encode_test_split(module.to("cuda" if torch.cuda.is_available() else "cpu").eval(), data)
    encoded.post_processing = results["post_processing"]
    if torch.equal(ranks.index, encoded.text_index):  # else the run omitted texts
        encoded.ranks = ranks.expected().double()
    return encoded


@torch.no_grad()
def encode_test_split(module: RetrievalModule, data: TextVideoDataModule) -> EncodedSplit:
    """Encode the test split with a method in evaluation mode, and score all its pairs."""
    seed_everything(0, verbose=False)
    # Stored features are read as the method needs them, and the reader asks the trainer for the method.
    data.trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="auto")
    data.trainer.strategy.connect(module)
    data.setup("test")
    split = data.load_split("test")
    truth = data.ground_truth("test")
    if data.features is not None or len(split.videos) <= FEW_VIDEOS:
        data.num_workers = 0
    texts, videos = encode_split(module, data.evaluation_dataloaders("test"))
    row = torch.full((truth.videos,), -1, dtype=torch.int64)
    row[videos.index] = torch.arange(len(videos))
    matching = row[truth.video_of_text[texts.index]]
    texts, matching = texts[matching >= 0], matching[matching >= 0]
    features = texts.features.to(module.device), videos.features.to(module.device)
    pair_scores = PairScores(module.score, *features, memory_budget_bytes=2**30, device=module.device)
    similarity = complete_matrix(pair_scores).float().cpu()
    matched, first = np.unique(matching.numpy(), return_index=True)  # the first text of every video
    spread = np.linspace(0, len(matched) - 1, min(len(matched), MOST_PAIRS)).astype(int)
    pairs = torch.tensor(np.stack([first, matched], axis=1)[spread])
    return EncodedSplit(module, data, split, *features, texts.index, videos.index, similarity, matching, pairs)


@torch.no_grad()
def normalized_scores(encoded: EncodedSplit) -> tuple[Tensor, Tensor]:
    """Return the scores after the method's normalization, texts (N, M) and videos (M, N) as queries.

    Raises:
        UserError: The normalization needs training queries that a checkpoint does not contain.
    """
    module = encoded.module
    normalizer = module.evaluation_config.normalization
    bank = module.contrast.bank() if normalizer.needs_bank else None
    if normalizer.needs_bank and bank is None:
        raise UserError("it needs a bank of the training split, which is not encoded for figures")
    evaluator = Evaluator(module.score, temperature=module.score_temperature(), device=module.device)
    index = {"text_index": encoded.text_index, "video_index": encoded.video_index}
    pairs = evaluator.pair_scores(encoded.texts, encoded.videos, **index)
    captions = torch.bincount(encoded.matching, minlength=pairs.gallery)
    contexts = [evaluator.context(direction, normalizer, bank, pairs, captions) for direction in SHORT]
    texts, videos = normalized_sources(pairs, normalizer, contexts)
    return complete_matrix(texts).cpu(), complete_matrix(videos).cpu()
