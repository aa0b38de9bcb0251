"""Leakage audit of a method on its own test data."""

import copy
import dataclasses
import math
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tvr_lightning.audit.experiments import (
    MOVED,
    Audit,
    Features,
    Finding,
    audit_scores,
    compare_features,
    compare_scores,
    normalizer_movement,
    recall_at_1,
)
from tvr_lightning.audit.state import State
from tvr_lightning.audit.target import AuditTarget
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import SplitName
from tvr_lightning.evaluation.reranker import Reranker
from tvr_lightning.evaluation.two_stage import TwoStage
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import EmptyQueueError
from tvr_lightning.training.sharding import gathered

QUERIES = "half of the queries"
READ_AGAIN = 8  # videos that are read again
RERANKED = 4  # number of videos and of captions that a reranker scores again; few, since a pair can take a second
# Hooks of Lightning that run only in training and prediction, or after an evaluation.
HARMLESS = re.compile("_|.*(train|fit|backward|optimizer|zero_grad|predict|teardown|test_end|validation_end)")
# Methods of a module that see more than the features of one batch; the audit cannot detect what they use.
EVALUATION_PARTS = (
    "validation_step", "test_step", "predict_step", "_evaluate", "restricted", "bank",
    *(hook for hook in (*vars(DataHooks), *vars(ModelHooks)) if not HARMLESS.match(hook)),
)  # fmt: skip


@torch.inference_mode(False)  # inference tensors do not count the changes made to them in place
@torch.no_grad()
def audit_method(
    method: RetrievalModule,
    data: TextVideoDataModule,
    videos: int = 64,
    seed: int | None = None,
    split: SplitName = "test",
    before: State | None = None,
    seconds: float = math.inf,
) -> Audit:
    """Audit how a method encodes and scores texts and videos of a split, on its device and in evaluation mode.

    At most `videos` are drawn, with up to three texts each. `seed` determines the draw, orders, and partners; by
    default, it is new. `before` is the state before an evaluation that has just ended; what the method kept from it is
    a finding. After `seconds`, the audit stops with a UserError.
    """
    seed = secrets.randbits(32) if seed is None else seed
    method.eval()
    if method._trainer is None:
        attach(method, data)
    target = AuditTarget(method, data, split, videos, torch.Generator().manual_seed(seed), seconds)
    findings = [
        Finding(f"overrides {part}", None, True)
        for part in EVALUATION_PARTS
        if getattr(type(method), part) is not getattr(RetrievalModule, part)
    ]
    try:
        return _experiments(target, findings, seed, before)
    except Exception as error:
        if not any(finding.leaks for finding in findings):
            raise
        problem = f"{type(error).__name__}: {error}"
        return Audit(findings, math.nan, math.nan, len(target.texts), len(target.videos), problem=problem)


def _experiments(target: AuditTarget, findings: list[Finding], seed: int, before: State | None) -> Audit:
    """Add the results of all experiments to the findings, so that an error does not lose those before it."""
    method = target.method
    own = target.own_text
    noise = encoding_noise(target.method)
    n, m = len(target.texts), len(target.videos)
    if before is not None:
        findings += _changed(before, "the evaluation")
        before.restore()
    state = State(method)
    findings += [Finding(f"contains the split's data: {name}", None, True) for name in state.data]
    with target.with_data(target.decoy):
        # This comes first, when the method cannot remember anything about the other items.
        few = target.drawn(m, m // 2).sort().values
        some = torch.isin(target.video_of_text, few).nonzero().flatten()
        half = target.encode(some[target.drawn(len(some))], few[target.drawn(len(few))])
        changed = _changed(state, "encoding")
        findings += changed
        # Scoring may need what encoding has stored. Copying all weights again takes memory.
        encoded = State(method) if changed[0].leaks else state
        alone = target.score(half, torch.searchsorted(some, own[few]))
        findings += _changed(encoded, "scoring")
        state.restore()
        features = target.encode(target.drawn(n), target.drawn(m))
        scoring: Any = {"score_as_released" if target.released else "score": target.scores}
        audit = audit_scores(*features, target.video_of_text, seed=seed, **scoring)
        findings += audit.findings
        recalls = [audit.recall_with_help]
        similarity = target.score(features, own)
        findings.append(compare_scores("half of the videos encoded", similarity[some][:, few], alone, noise))
        of_normalizer, transductive = _of_normalizer(target, features)
        findings += of_normalizer
        state.restore()
        again = target.encode(target.drawn(n), target.drawn(m))
        findings += compare_features("encoded in another order", features, again, noise)
        again = target.encode(target.drawn(n), target.drawn(m), max(1, m // 3))
        findings += compare_features("encoded again in smaller batches", features, again, noise)
        state.restore()
        whole = target.whole_test()
        if whole is not None:
            used = method.compact_video(features[1]) if method.compacts_texts() else features[1]
            findings += compare_features("encoded in the whole test", (features[0], used), whole[0], noise)
        if whole is not None and not target.released:  # where captions differ between scores
            findings.append(compare_scores("scored in the whole test", similarity, whole[1], noise))
            recalls.append(recall_at_1(whole[1], target.video_of_text))
    state.restore()
    findings += _of_bank(target, features)
    state.restore()
    few = target.drawn(m, READ_AGAIN)
    equal = all(map(torch.equal, target.videos[few].tensors(), target.read_again(few).tensors()))
    findings.append(Finding("videos read with other captions", None, not equal))
    if not equal:
        target.videos = target.read_again(torch.arange(m))
    with target.with_data(target.data):
        # This comes last, so that the method cannot use anything that it remembers from here.
        told = target.encode_told()
        helped = target.score(told, own)
    state.restore()
    findings += compare_features("positions in the split given", features, told, noise)
    findings.append(compare_scores("all help: positions, ground truth, earlier state", similarity, helped, noise))
    findings += [Finding(f"accesses {name}", None, True) for name in dict.fromkeys(target.asked)]
    return dataclasses.replace(
        audit,
        findings=findings,
        transductive=transductive,
        recall_with_help=max(recall_at_1(helped, target.video_of_text), *recalls),
    )


def attach(method: RetrievalModule, data: TextVideoDataModule) -> None:
    """Attach a trainer to a method and its data, as an evaluation does."""
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, use_distributed_sampler=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.strategy.connect(method)
    trainer.datamodule = data  # type: ignore[attr-defined]  # as Lightning does
    method.trainer = data.trainer = trainer
    data.setup("test")
    method.setup("test")
    method.configure_model()
    method.on_test_model_eval()
    method.on_test_start()


def encoding_noise(method: RetrievalModule) -> float:
    """Return the largest change of a feature that counts as noise, in standard deviations.

    For other batch sizes, matrix products round differently in many layers, and much more so in half precision.
    """
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in method.parameters())
    if half or "16" in str(method.trainer.precision):
        return 1e-1
    return 1e-3 if method.device.type == "cpu" else 1e-2  # accelerators may round convolutions to TF32


def _of_normalizer(target: AuditTarget, features: Features) -> tuple[list[Finding], dict[str, bool]]:
    """Return the findings for the score normalization, and for each direction if removed queries changed scores."""
    method = target.method
    normalizer = method.evaluation_config.normalization
    if normalizer is None:
        return [], {}
    of_reranker = []
    if isinstance(normalizer, TwoStage) and normalizer.reranker is not None:
        of_reranker = _of_reranker(target, normalizer.reranker)
        normalizer = copy.copy(normalizer)
        normalizer.reranker = None  # the rest of the audit tests only the first stage
    own = target.own_text if target.released else None
    gamma = method.score_temperature()
    generator = target.generator
    with gathered(method, method.encoder):
        movement = normalizer_movement(
            normalizer, target.function, features, target.video_of_text, own, gamma, generator
        )
    moved = {str(direction): not change <= MOVED for direction, change in movement.items()}
    findings = [
        Finding(f"{QUERIES}, {name} with {normalizer.name}", change, moved[name] and not normalizer.transductive)
        for name, change in movement.items()
    ]
    return of_reranker + findings, moved


def _of_reranker(target: AuditTarget, reranker: Reranker) -> list[Finding]:
    """Return the changes in a reranker's scores for copies of the files, and for captions scored one at a time."""
    items = target.data.load_split(target.split)
    few = target.drawn(len(target.videos), RERANKED)
    captions = [items.texts[text].text for text in target.texts.index[target.own_text[few]].tolist()]
    videos = [items.videos[video] for video in target.videos.index[few].tolist()]
    expected = [reranker.checked(captions, video.path, video.span) for video in videos]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{secrets.token_hex(8)}{video.path.suffix}" for video in videos]
        for video, file in zip(videos, files, strict=True):
            shutil.copyfile(video.path, file)
        copied = [reranker.checked(captions, *each) for each in zip(files, [v.span for v in videos], strict=True)]
    single = [
        [reranker.checked([caption], video.path, video.span)[0] for caption in reversed(captions)][::-1]
        for video in reversed(videos)
    ][::-1]
    others = {"copies of the video files": copied, "one caption at a time, in another order": single}
    return [
        compare_scores(f"reranking with {name}", torch.tensor(expected), torch.tensor(found), reranker.noise)
        for name, found in others.items()
    ]


def _of_bank(target: AuditTarget, features: Features) -> list[Finding]:
    """Return findings for a method's own bank, such as queues: texts and videos of the split must not be in it.

    Texts that are also captions of the training split do not count.
    """
    method, (text, video) = target.method, features
    try:
        own = type(method).bank is not RetrievalModule.bank
        bank = method.bank() if own else method.contrast.bank()
    except EmptyQueueError:
        return []
    if bank is None:
        return []
    trained = {each.text for each in target.data.load_split("train").texts}
    new = torch.tensor([each not in trained for each in target.texts.text])  # type: ignore[union-attr]
    frames = masked_mean(video.frames, video.frame_mask), masked_mean(bank.videos.frames, bank.videos.frame_mask)
    found = {"texts": _shared(text.sentence[new], bank.texts.sentence), "videos": _shared(*frames)}
    return [Finding(f"{count} audited {name} in the bank", None, count > 0) for name, count in found.items()]


def _shared(vectors: Tensor, others: Tensor) -> int:
    """Return the number of vectors (N, D) that are equal to one of the others (K, D), up to rounding."""
    cosines = unit(vectors.float().cpu()) @ unit(others.float().cpu()).T
    return int((cosines > 1 - 1e-6).any(1).sum()) if cosines.numel() else 0


def _changed(state: State, doing: str) -> list[Finding]:
    """Return a finding for each part of its state that a method changed."""
    findings = [Finding(f"{doing} changed {name}", None, True) for name in state.changes()]
    return findings or [Finding(f"state before and after {doing}", 0.0, False)]


def report_audit(method: RetrievalModule, audit: Audit) -> int:
    """Print the findings of an audit. Return 1 if anything leaks, 0 otherwise."""
    console = Console()
    title = f"{method.title}, protocol: {method.protocol}; {audit.texts} texts, {audit.videos} videos"
    table = Table("the same items again, with", "largest change (standard deviations)", "", title=title)
    for finding in audit.findings:
        verdict = "[red]LEAKS[/red]" if finding.leaks else "same"
        if finding.experiment.startswith(QUERIES) and not finding.leaks and (finding.change or 0.0) > MOVED:
            verdict = "changes as declared"
        table.add_row(finding.experiment, "" if finding.change is None else f"{finding.change:.1e}", verdict)
    console.print(table)
    effect = f"text-to-video R@1 {audit.recall_with_help:.1f} with help, {audit.recall_without_help:.1f} without"
    if audit.problem is not None:
        effect = f"the audit could not be completed: {audit.problem}"
    normalizer = method.evaluation_config.normalization
    if normalizer is not None:
        seeing = " and ".join(direction for direction, moved in audit.transductive.items() if moved)
        uses = f"uses the whole set of test queries ({seeing})" if seeing else "uses no other test query"
        declared = "" if normalizer.transductive else "not "
        console.print(f"{normalizer.name} {uses}; it is {declared}declared to do so.", markup=False, highlight=False)
    verdict = "No leakage: scores depend only on the text and the video"
    if audit.leaks:
        verdict = "LEAKAGE: the score depends on more than the text and the video"
    console.print(f"{verdict}; {effect}.", markup=False, highlight=False)
    return int(audit.leaks)
