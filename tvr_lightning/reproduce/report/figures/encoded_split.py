"""What figures are computed from: a run's own weights, its test split encoded once, and the scores of all pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.data.records import Split
from tvr_lightning.errors import MissingAssetError
from tvr_lightning.evaluation.loop import PAIR_BYTES, encode_split
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.video import read_clip
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.recipe import from_recipe
from tvr_lightning.recipe_files import RecipeError
from tvr_lightning.reproduce.runs.card import Card, read_ranks

MOST_PAIRS = 256
"""Matching pairs that pairwise figures look at; more would not change what a figure shows."""

FEW_VIDEOS = 200
"""Up to as many videos are decoded sooner than a process that would decode them has started."""

STRIP_FRAMES, STRIP_SIZE = 4, 72


@dataclass
class EncodedSplit:
    """A run's test split as its weights see it.

    Attributes:
        module: in evaluation mode, with the weights of the run.
        data: its data module.
        split: the test split.
        truth: which video each text describes.
        texts, videos: features of N texts and M videos, in the order of `text_index` and `video_index`.
        text_index, video_index: (N,), (M,) int64, places in the split, rising.
        similarity: (N, M) scores before post-processing, on the scale of a cosine.
        matching: (N,) int64, row of the video of each text.
        pairs: (B, 2) int64, rows of a text and of its video, no video twice, at most MOST_PAIRS.
        ranks: (N,) float64, expected rank of each text's video from 1 as the run's card has it.
        post_processing: that the run's ranks went through, or None.
    """

    module: RetrievalModule
    data: TextVideoDataModule
    split: Split
    truth: GroundTruth
    texts: TextFeatures
    videos: VideoFeatures
    text_index: Tensor
    video_index: Tensor
    similarity: Tensor
    matching: Tensor
    pairs: Tensor
    ranks: Tensor | None = None
    post_processing: str | None = None

    def paired(self) -> tuple[TextFeatures, VideoFeatures]:
        """Return the features of the B matching pairs."""
        return self.texts[self.pairs[:, 0]], self.videos[self.pairs[:, 1]]

    def caption(self, text: int) -> str:
        """Return the words of a text by its row."""
        return self.split.texts[int(self.text_index[text])].text

    def strip(self, video: int, frames: int = STRIP_FRAMES, size: int = STRIP_SIZE) -> np.ndarray:
        """Return (F, S, S, 3) uint8 frames of a video by its row, sampled as the method does; padded ones are black."""
        record = self.split.videos[int(self.video_index[video])]
        clip = read_clip(record.path, frames=frames, image_size=size, sampling=self.data.sampling, span=record.span)
        return clip.pixels.permute(0, 2, 3, 1).numpy()


def encode_run(card: Card, cards: Path) -> EncodedSplit:
    """Rebuild a run from its card and encode its test split.

    Args:
        card: finished.
        cards: folder of the cards, for the ranks.

    Raises:
        MissingAssetError: its weights, data or encoder weights are gone.
        RecipeError: the run was no retrieval, or its weights are not those of its settings.
    """
    results = card.results or {}
    if card.checkpoint is None or not Path(card.checkpoint).is_file():
        raise MissingAssetError(f"the weights of run {card.name} are missing: {card.checkpoint}")
    config = {name: results["config"][name] for name in ("seed_everything", "model", "data")}
    module, data = from_recipe([], [f"--config={yaml.safe_dump(config)}"])
    if not isinstance(module, RetrievalModule):
        raise RecipeError(f"{type(module).__name__} does not rank videos, so there are no figures")
    saved = torch.load(card.checkpoint, map_location="cpu", weights_only=True)
    module.on_load_checkpoint(saved)
    module.load_state_dict(saved["state_dict"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoded = encode_test_split(module.to(device).eval(), data)
    encoded.post_processing = results["post_processing"]
    ranks, _ = read_ranks(card.key, cards, "text_to_video")
    if torch.equal(ranks.index, encoded.text_index):  # else the run left texts out, and its ranks are of others
        encoded.ranks = ranks.expected().double()
    return encoded


@torch.no_grad()
def encode_test_split(module: RetrievalModule, data: TextVideoDataModule) -> EncodedSplit:
    """Encode the test split and score all its pairs, (N, M) on the CPU.

    Args:
        module: in evaluation mode, on its device.
        data: of the run.
    """
    seed_everything(0, verbose=False)
    # Stored features are read as the method needs them, and the reader asks the trainer for the method.
    data.trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="auto")
    data.trainer.strategy.connect(module)
    data.setup("test")
    if data.features is not None or len(data.load_split("test").videos) <= FEW_VIDEOS:
        data.num_workers = 0
    encoded = encode_split(module, data.evaluation_dataloaders("test"))
    texts, videos = encoded.texts, encoded.videos
    truth = data.ground_truth("test")
    row = torch.full((truth.videos,), -1, dtype=torch.int64)
    row[videos.index] = torch.arange(len(videos))
    matching = row[truth.video_of_text[texts.index]]
    seen = matching >= 0
    texts, matching = texts[seen], matching[seen]
    text_features, video_features = texts.features.to(module.device), videos.features.to(module.device)
    similarity = torch.empty(len(texts), len(videos))
    source = PairScores(
        module.score,
        text_features,
        video_features,
        memory_budget_bytes=2**30,
        pair_bytes=PAIR_BYTES,
        device=module.device,
    )
    for block in source.blocks():
        similarity[block.rows, block.columns] = block.values.float().cpu()
    return EncodedSplit(
        module, data, data.load_split("test"), truth, text_features, video_features, texts.index, videos.index,
        similarity, matching, _matching_pairs(matching),
    )  # fmt: skip


def _matching_pairs(matching: Tensor) -> Tensor:
    """The first text of every video, of evenly spread videos where there are many."""
    first: dict[int, int] = {}
    for text, video in enumerate(matching.tolist()):
        first.setdefault(video, text)
    videos = sorted(first)
    chosen = [videos[int(place)] for place in np.linspace(0, len(videos) - 1, min(len(videos), MOST_PAIRS))]
    return torch.tensor([[first[video], video] for video in chosen])
