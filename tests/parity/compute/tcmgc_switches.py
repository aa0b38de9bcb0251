"""Parity of TC-MGC's switches, from similarities to scores and losses, with the paper's equations written out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Literal, get_args

import torch
from parity.case import CaseError, ParityCase
from torch import Tensor, nn

from tvr_lightning.features import Scores
from tvr_lightning.layers.aggregation import ISA, BidirectionalAggregation, MeanAggregation, SoftmaxAggregation
from tvr_lightning.methods.tcmgc.model import TCMGCHead
from tvr_lightning.methods.tcmgc.options import (
    Contrast,
    Decorrelation,
    ScoreAggregation,
    ScoreScale,
    SlotReorganization,
    TCMGCOptions,
)
from tvr_lightning.methods.tcmgc.reorganization import Reorganization, reorganize
from tvr_lightning.training.losses import info_nce

MODES: tuple[Reorganization, ...] = get_args(Reorganization)
CONTRASTS: tuple[Contrast, ...] = get_args(Contrast)
SCALES: tuple[ScoreScale, ...] = get_args(ScoreScale)
PAPER_WORDS = 32
PAPER_KEEP_RATES = tuple(step / 10 for step in range(1, 10))


def compute_tcmgc_switches(case: ParityCase) -> dict[str, Tensor]:
    """Compute every reorganisation, aggregation, loss and parameter count of a switches case, in float64.

    Aggregated scores are (B, B), losses scalar.
    """
    missing = [key for key in ("k", "softmax_lambda") if key not in case.config]
    if missing:
        raise CaseError(f"{case.path}: its config has no {' and no '.join(missing)}")
    vectors = {
        "video_word": "video_word(case,word)",
        "sentence_frame": "sentence_frame(case,word slot)",
    }
    found: dict[str, Tensor] = {}
    for contrast, name in vectors.items():
        found |= dict(_vector(case, contrast, case.input(name).double()))
    found |= dict(_matrix(case, case.input("frame_word(case,word,frame slot)").double()))
    scores = case.input("scores(text,video,granularity)").double().permute(2, 0, 1)
    scale = case.input("logit_scale").double().exp().squeeze()
    found |= dict(_aggregates(case, scores, scale))
    found |= dict(_losses(scores, scale, found["aggregate.lsa.logits.1,2,3,4"]))
    return found | dict(_parameter_counts())


def _isa(case: ParityCase, name: str, slots: int) -> nn.Module:
    matrix = case.checkpoint.get(f"isa.{name}.{slots}")
    if matrix is None:
        raise CaseError(f"{case.path}: no tensor checkpoint.isa.{name}.{slots}, which the config's k needs")
    module = ISA(float(case.config["softmax_lambda"])).module(slots).double()
    module.load_state_dict({"weight": matrix.double()})
    return module


def _vector(case: ParityCase, contrast: str, similarities: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Video-word and sentence-frame: similarities (cases, slots) to slots and to scores (cases,)."""
    softmax = SoftmaxAggregation(float(case.config["softmax_lambda"]))
    for mode in MODES:
        slots = reorganize(similarities, int(case.config["k"]), mode, dim=1)
        yield f"{contrast}.{mode}.reorganised", slots.T
        yield f"{contrast}.{mode}.isa", _isa(case, contrast, len(slots))(slots)
        yield (
            f"{contrast}.{mode}.softmax",
            softmax.module(len(slots))(slots),
        )
        yield f"{contrast}.{mode}.mean", MeanAggregation().module(len(slots))(slots)


def _matrix(case: ParityCase, similarities: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Frame-word: similarities (cases, words, frame slots) to matrices and to scores (cases,)."""
    kept, isa = int(case.config["k"]), ISA(float(case.config["softmax_lambda"]))
    for word_mode, frame_mode in product(MODES, MODES):
        name = f"frame_word.words_{word_mode}.frames_{frame_mode}"
        matrix = reorganize(similarities, kept, word_mode, dim=1)  # (words, cases, frame slots)
        matrix = reorganize(matrix, kept, frame_mode, dim=2)  # (frame slots, words, cases)
        frames, words = matrix.shape[:2]
        yield f"{name}.reorganised", matrix.permute(2, 1, 0)
        module = BidirectionalAggregation(isa, frames, words)
        module.words = _isa(case, "frame_word.word", words)
        module.frames_after_words = _isa(case, "frame_word.frame2", frames)
        module.frames = _isa(case, "frame_word.frame", frames)
        module.words_after_frames = _isa(case, "frame_word.word2", words)
        word_then_frame, frame_then_word = module.directions(matrix)
        yield f"{name}.word_then_frame", word_then_frame
        yield f"{name}.frame_then_word", frame_then_word
        yield f"{name}.isa", module(matrix)
        yield f"{name}.mean", BidirectionalAggregation(MeanAggregation(), frames, words)(matrix)


def _head(
    contrasts: tuple[Contrast, ...] = CONTRASTS,
    aggregation: ScoreAggregation = "lsa",
    scores: ScoreScale = "logits",
    decorrelation: Decorrelation | None = None,
    reorganization: SlotReorganization | None = None,
    keep_rate: float = 0.1,
) -> TCMGCHead:
    """A head with the paper's 32 words whose similarities come from the case, so that its vectors are never made."""
    options = TCMGCOptions(
        contrasts=contrasts,
        aggregation=aggregation,
        aggregation_on=scores,
        keep_rate=keep_rate,
        reorganization=reorganization or SlotReorganization(),
        decorrelation=decorrelation or Decorrelation(weight=0.0),
    )
    return TCMGCHead(1, words=PAPER_WORDS, frames=1, options=options).double()


def _aggregates(case: ParityCase, scores: Tensor, scale: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Scores (4, N, M) of the contrasts to their aggregates (N, M), times the scale."""
    for kind, weighed in product(get_args(ScoreAggregation), SCALES):
        counts = range(1, 5) if kind == "lsa" else (4,)
        for chosen in (subset for count in counts for subset in combinations(range(4), count)):
            subset = ",".join(str(index + 1) for index in chosen)
            head = _head(tuple(CONTRASTS[index] for index in chosen), kind, weighed)
            if head.lsa is not None:
                matrix = case.checkpoint.get(f"lsa.{subset}")
                if matrix is None:
                    raise CaseError(f"{case.path}: no tensor checkpoint.lsa.{subset}")
                head.lsa.load_state_dict({"weight": matrix.double()})
            yield f"aggregate.{kind}.{weighed}.{subset}", scale * head.aggregate(scores[list(chosen)], scale)


def _losses(scores: Tensor, scale: Tensor, logits: Tensor) -> Iterator[tuple[str, Tensor]]:
    """InfoNCE on the aggregated logits (B, B), and SDR on the scores (4, B, B)."""
    mean = info_nce(logits)
    yield "loss.info_nce.mean", mean
    yield "loss.info_nce.sum", info_nce(logits, reduction="sum")
    parts = Scores(logits, dict(zip(CONTRASTS, scores, strict=True)))
    pairs: tuple[Literal["positives", "negatives", "all"], ...] = ("positives", "negatives", "all")
    for which, scores_on, unbiased in product(pairs, SCALES, (True, False)):
        term = _head(decorrelation=Decorrelation(0.5, which, scores_on, unbiased)).decorrelation(parts, scale)
        yield f"loss.sdr.{which}.{scores_on}.{'unbiased' if unbiased else 'biased'}", term
        if (which, scores_on, unbiased) == ("positives", "logits", True):
            name = "loss.total(released: mean InfoNCE + 0.5 * positives, logits, unbiased)"
            yield name, mean + 0.5 * term


def _parameter_counts() -> Iterator[tuple[str, Tensor]]:
    """Parameters of ISA with 32 words at keep rates 0.1 to 0.9: the Params columns of Tables 5-8."""

    def counts(contrasts: tuple[Contrast, ...], reorganization: SlotReorganization) -> Tensor:
        heads = [_head(contrasts, "mean", reorganization=reorganization, keep_rate=rate) for rate in PAPER_KEEP_RATES]
        isa = [[p for name, p in head.named_parameters() if "_aggregation." in name] for head in heads]
        return torch.tensor([sum(p.numel() for p in parameters) for parameters in isa])

    yield "parameter_count.default(removal, fusion, removal+removal)", counts(CONTRASTS, SlotReorganization())
    for mode in MODES:
        yield f"parameter_count.vector.{mode}", counts(("video_word",), SlotReorganization(video_word=mode))
    for words, frames in product(MODES, MODES):
        chosen = SlotReorganization(words=words, frames=frames)
        yield f"parameter_count.frame_word.words_{words}.frames_{frames}", counts(("frame_word",), chosen)
    kept = [int(PAPER_WORDS * rate) for rate in PAPER_KEEP_RATES]
    yield "parameter_count.k(W=32,keep_rate=.1...9)", torch.tensor(kept)
