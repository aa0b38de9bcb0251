"""`tvr audit`: the leakage audit of a recipe, on its own test data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tvr_lightning.checkpoints import read_checkpoint
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.collate import collate
from tvr_lightning.data.datasets import TextDataset, VideoDataset
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.module import RetrievalModule
from tvr_lightning.parity.audit import Audit, Finding, audit_encoding, audit_scores
from tvr_lightning.recipe import from_recipe


def run_audit(config: list[Path], ckpt: Path | None = None, videos: int = 64, seed: int = 0) -> int:
    """Check by experiment that scores depend on the text and the video alone; exit status 1 where they do not.

    Args:
        config: recipe files, later ones on top of earlier ones.
        ckpt: a checkpoint of the recipe; without one the recipe's starting weights are audited.
        videos: how many videos of the test split, with their texts, to audit on.
        seed: of the drawn videos, orders and partners.
    """
    method, data = from_recipe([str(path) for path in config])
    if ckpt is not None:
        checkpoint = read_checkpoint(ckpt)
        method.on_load_checkpoint(checkpoint)
        method.load_state_dict(checkpoint["state_dict"])
    return report_audit(method, *audit_method(method, data, videos, seed))


@torch.no_grad()
def audit_method(
    method: RetrievalModule, data: TextVideoDataModule, videos: int = 64, seed: int = 0
) -> tuple[list[Finding], Audit]:
    """Audit a method's encoding and its scores on texts and videos of the test split.

    Args:
        method: on the device where it is to run; left in evaluation mode.
        data: gives the test split.
        videos: at most how many videos to draw.
        seed: of the draw, orders and partners.

    Returns:
        What was found of the encoding, and the audit of the scores (N, M) of the M drawn videos and their N texts.
    """
    method.eval()
    split = data.load_split("test")
    generator = torch.Generator().manual_seed(seed)
    owned = sorted({text.video for text in split.texts if split.videos[text.video].path.is_file()})
    drawn = [owned[i] for i in torch.randperm(len(owned), generator=generator)[:videos].tolist()]
    column = {video: place for place, video in enumerate(drawn)}
    rows = [i for i, text in enumerate(split.texts) if text.video in column]
    video_of_text = torch.tensor([column[split.texts[i].video] for i in rows])
    read = data.video_reader(training=False)
    texts, clips = TextDataset(split, read), VideoDataset(split, read)
    text_batch: TextBatch = collate([texts[i] for i in rows]).to(method.device)
    video_batch: VideoBatch = collate([clips[i] for i in drawn]).to(method.device)

    def encode_text(some: Tensor) -> TextFeatures:
        return method.text_features(text_batch[some]).float().to("cpu")

    def encode_video(some: Tensor) -> VideoFeatures:
        return method.video_features(video_batch[some]).float().to("cpu")

    encoding = audit_encoding(encode_text, len(rows), seed=seed) + audit_encoding(encode_video, len(drawn), seed=seed)
    text_features, video_features = encode_text(torch.arange(len(rows))), encode_video(torch.arange(len(drawn)))
    score: Callable[..., object] = method.score_as_released if method.protocol == "as-released" else method.score
    name = "score_as_released" if method.protocol == "as-released" else "score"
    audit = audit_scores(
        text_features.to(method.device),
        video_features.to(method.device),
        video_of_text,
        seed=seed,
        **{name: score},  # type: ignore[arg-type]
    )
    return encoding, audit


def report_audit(method: RetrievalModule, encoding: list[Finding], audit: Audit) -> int:
    """Print what an audit found; returns 1 if anything leaks, 0 otherwise."""
    console = Console()
    table = Table(
        title=f"{type(method).__name__}, protocol: {method.protocol}; {audit.texts} texts, {audit.videos} videos"
    )
    for heading in ("the same items again, with", "largest change (deviations)", ""):
        table.add_column(heading)
    for finding in [*encoding, *audit.findings]:
        verdict = "[red]LEAKS[/red]" if finding.leaks else "same"
        table.add_row(finding.experiment, f"{finding.change:.1e}", verdict)
    console.print(table)
    leaks = audit.leaks or any(finding.leaks for finding in encoding)
    effect = (
        f"text-to-video R@1 {audit.recall_as_evaluated:.1f} as evaluated, {audit.recall_without_help:.1f} without help"
    )
    normalizer = method.evaluation_config.normalization
    if normalizer is not None and normalizer.transductive:
        console.print(f"{normalizer.name} is transductive by design: it uses the test set as a whole.", highlight=False)
    if leaks:
        console.print(f"LEAKAGE: something besides the text and the video enters the score; {effect}.", highlight=False)
        return 1
    console.print(f"No leakage: scores depend on the text and the video alone; {effect}.", highlight=False)
    return 0
