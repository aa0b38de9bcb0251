"""Cases of TC-MGC's switches in float64, from similarities to scores (B, B), losses, and parameter counts."""

from itertools import combinations, product
from typing import get_args

import torch

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

MODES, CONTRASTS, SCALES = get_args(Reorganization), get_args(Contrast), get_args(ScoreScale)
PAPER_KEEP_RATES = [step / 10 for step in range(1, 10)]


def compute_tcmgc_switches(case):
    found = {}
    for contrast, name in (("video_word", "case,word"), ("sentence_frame", "case,word slot")):
        found |= dict(_vector(case, contrast, case.inputs[f"{contrast}({name})"].double()))
    found |= dict(_matrix(case, case.inputs["frame_word(case,word,frame slot)"].double()))
    scores = case.inputs["scores(text,video,granularity)"].double().permute(2, 0, 1)
    scale = case.inputs["logit_scale"].double().exp().squeeze()
    found |= dict(_aggregates(case, scores, scale))
    found |= dict(_losses(scores, scale, found["aggregate.lsa.logits.1,2,3,4"]))
    return found | dict(_parameter_counts())


def _isa(case, name, slots):
    module = ISA(float(case.config["softmax_lambda"])).module(slots).double()
    module.load_state_dict({"weight": case.checkpoint[f"isa.{name}.{slots}"].double()})
    return module


def _vector(case, contrast, similarities):
    """Video-word and sentence-frame: similarities (cases, slots) to slots and to scores (cases,)."""
    softmax = SoftmaxAggregation(float(case.config["softmax_lambda"]))
    for mode in MODES:
        slots = reorganize(similarities, int(case.config["k"]), mode, dim=1)
        yield f"{contrast}.{mode}.reorganised", slots.T
        yield f"{contrast}.{mode}.isa", _isa(case, contrast, len(slots))(slots)
        yield f"{contrast}.{mode}.softmax", softmax.module(len(slots))(slots)
        yield f"{contrast}.{mode}.mean", MeanAggregation().module(len(slots))(slots)


def _matrix(case, similarities):
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


def _head(**options):
    """Return a head with the paper's 32 words; its similarities come from the case, so it needs no vectors."""
    options = TCMGCOptions(**{"keep_rate": 0.1, "decorrelation": Decorrelation(weight=0.0)} | options)
    return TCMGCHead(1, words=32, frames=1, options=options).double()


def _aggregates(case, scores, scale):
    """Scores (4, N, M) of the contrasts to their aggregates (N, M), times the scale."""
    for kind, weighed in product(get_args(ScoreAggregation), SCALES):
        counts = range(1, 5) if kind == "lsa" else (4,)
        for chosen in (subset for count in counts for subset in combinations(range(4), count)):
            subset = ",".join(str(index + 1) for index in chosen)
            contrasts = tuple(CONTRASTS[index] for index in chosen)
            head = _head(contrasts=contrasts, aggregation=kind, aggregation_on=weighed)
            if head.lsa is not None:
                head.lsa.load_state_dict({"weight": case.checkpoint[f"lsa.{subset}"].double()})
            yield f"aggregate.{kind}.{weighed}.{subset}", scale * head.aggregate(scores[list(chosen)], scale)


def _losses(scores, scale, logits):
    """InfoNCE on the aggregated logits (B, B), and SDR on the scores (4, B, B)."""
    mean = info_nce(logits)
    yield "loss.info_nce.mean", mean
    yield "loss.info_nce.sum", info_nce(logits, reduction="sum")
    parts = Scores(logits, dict(zip(CONTRASTS, scores, strict=True)))
    for which, scores_on, unbiased in product(("positives", "negatives", "all"), SCALES, (True, False)):
        term = _head(decorrelation=Decorrelation(0.5, which, scores_on, unbiased)).decorrelation(parts, scale)
        yield f"loss.sdr.{which}.{scores_on}.{'unbiased' if unbiased else 'biased'}", term
        if (which, scores_on, unbiased) == ("positives", "logits", True):
            name = "loss.total(released: mean InfoNCE + 0.5 * positives, logits, unbiased)"
            yield name, mean + 0.5 * term


def _parameter_counts():
    """Parameters of ISA with 32 words at keep rates 0.1 to 0.9: the Params columns of Tables 5-8."""

    def counts(contrasts, **modes):
        options = {"contrasts": contrasts, "aggregation": "mean", "reorganization": SlotReorganization(**modes)}
        heads = [_head(keep_rate=rate, **options) for rate in PAPER_KEEP_RATES]
        isa = [[p.numel() for name, p in head.named_parameters() if "_aggregation." in name] for head in heads]
        return torch.tensor([sum(numbers) for numbers in isa])

    yield "parameter_count.default(removal, fusion, removal+removal)", counts(CONTRASTS)
    for mode in MODES:
        yield f"parameter_count.vector.{mode}", counts(("video_word",), video_word=mode)
    for words, frames in product(MODES, MODES):
        name = f"parameter_count.frame_word.words_{words}.frames_{frames}"
        yield name, counts(("frame_word",), words=words, frames=frames)
    yield "parameter_count.k(W=32,keep_rate=.1...9)", torch.tensor([int(32 * rate) for rate in PAPER_KEEP_RATES])
