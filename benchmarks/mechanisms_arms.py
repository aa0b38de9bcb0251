"""Which method meets which baseline in which world, and which deviations from paper or code are measured there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mechanisms_training import Build, sound_encoder
from mechanisms_worlds import FRAMES, WORDS

from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.normalization import SinkhornBias
from tvr_lightning.layers.stochastic import Normal
from tvr_lightning.methods import DPDV, GAID, GARE, NCL, TCMGC, TMASS, CLIP4Clip, XPool
from tvr_lightning.methods.dpdv.options import DivergenceConfig
from tvr_lightning.methods.gaid import DASP, GAIDOptions, GatedFusion, NoFusion, NoPerturbation
from tvr_lightning.methods.gare import Bottleneck, GAREOptions, MeanPooling, NoIncrement
from tvr_lightning.methods.tcmgc.options import (
    Decorrelation,
    LanguageVideoAttention,
    ScoreAggregation,
    ScoreScale,
    TCMGCOptions,
)
from tvr_lightning.methods.tmass import TMASSOptions
from tvr_lightning.methods.xpool import XPoolOptions


@dataclass(frozen=True)
class Arm:
    """One way to train: a name, unique in its world, what builds it, and whether its released protocol leaks."""

    name: str
    build: Build
    released: bool = False


@dataclass(frozen=True)
class Experiment:
    """A claim and its test: arms in one world, the first of which is the baseline.

    Attributes:
        key: short name.
        paper: whose claim it is.
        claim: what the paper says that the method does.
        world: key of `WORLDS`; its factor is what the paper claims to address.
        arms: the baseline, then the method; further arms, without a control, take the method apart.
    """

    key: str
    paper: str
    claim: str
    world: str
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class Deviation:
    """Two readings of one method, ours first, trained in the factor's world of a method's experiment.

    Attributes:
        method: class name.
        topic: of the deviation in the method's docstring, as the ledger names it.
        world: key of `WORLDS`.
        ours: our default.
        other: the paper's or the released reading, which its name says.
    """

    method: str
    topic: str
    world: str
    ours: Arm
    other: Arm


def clip4clip(encoder: TinyClipEncoder) -> CLIP4Clip:
    return CLIP4Clip(encoder, words=WORDS, frames=FRAMES)


def xpool(encoder: TinyClipEncoder) -> XPool:
    return XPool(encoder, words=WORDS, frames=FRAMES, xpool=XPoolOptions(dropout=0.0))


def tcmgc(
    conditioning: bool = True,
    aggregation: ScoreAggregation = "lsa",
    decorrelation: float = 0.5,
    projections: bool = False,
    interaction_matrices: bool = True,
    aggregation_on: ScoreScale = "logits",
    decorrelation_on: ScoreScale = "logits",
) -> Build:
    """Return TC-MGC without temporal layers and without dropout, with a keep rate that keeps two of eight slots."""
    options = TCMGCOptions(
        temporal_layers=0,
        attention=LanguageVideoAttention(dropout=0.0, projections=projections) if conditioning else None,
        keep_rate=0.25,
        aggregation=aggregation,
        aggregation_on=aggregation_on,
        decorrelation=Decorrelation(weight=decorrelation, scores=decorrelation_on),
        interaction_matrices=interaction_matrices,
    )
    return lambda encoder: TCMGC(encoder, words=WORDS, frames=FRAMES, tcmgc=options)


def ncl(normalize_loss: bool = True, normalize_test: bool = True, detach_biases: bool | None = None) -> Build:
    """Return NCL around CLIP4Clip with mean pooling, as its recipe has it."""

    def make(encoder: TinyClipEncoder) -> CLIP4Clip:
        evaluation = EvaluationConfig(normalization=SinkhornBias()) if normalize_test else None
        contrast = NCL(normalize_loss=normalize_loss, detach_biases=detach_biases, queue_size=1024)
        return CLIP4Clip(encoder, evaluation=evaluation, words=WORDS, frames=FRAMES, contrast=contrast)

    return make


def gaid(**options: Any) -> Build:
    """Return GAID without dropout."""

    def make(encoder: TinyClipEncoder) -> GAID:
        gaid = GAIDOptions(attention=XPoolOptions(dropout=0.0), **options)
        sound = None if isinstance(gaid.fusion, NoFusion) else sound_encoder()
        return GAID(encoder, words=WORDS, frames=FRAMES, gaid=gaid, audio_encoder=sound)

    return make


def tmass(**options: Any) -> Build:
    """Return T-MASS without dropout."""

    def make(encoder: TinyClipEncoder) -> TMASS:
        tmass = TMASSOptions(XPoolOptions(dropout=0.0), **options)
        return TMASS(encoder, words=WORDS, frames=FRAMES, tmass=tmass)

    return make


def gare(**options: Any) -> Build:
    """Return GARE without temporal layers; dropout as released."""

    def make(encoder: TinyClipEncoder) -> GARE:
        return GARE(encoder, words=WORDS, frames=FRAMES, gare=GAREOptions(temporal_layers=0, **options))

    return make


def dpdv(
    paths: bool = True, eq5: bool = False, pairwise: bool = False, divergence: DivergenceConfig | None = None
) -> Build:
    """Return DPDV with both views and patches as they are (a frame has four), with both paths or without."""

    def make(encoder: TinyClipEncoder) -> DPDV:
        return DPDV(
            encoder,
            words=WORDS,
            frames=FRAMES,
            paths=("spot", "recover") if paths else (),
            spot_partition="pairwise" if pairwise else "paired",
            macro_form="eq5" if eq5 else "eq6",
            patch_reduction="none",
            divergence=DivergenceConfig() if paths else DivergenceConfig(weight=0.0),
        )

    return make


EXPERIMENTS = (
    Experiment(
        "conditioning",
        "X-Pool, TC-MGC",
        "a video pooled for the text leaves out what the text does not tell",
        "partially relevant captions",
        (Arm("mean pooling (CLIP4Clip)", clip4clip), Arm("text-conditioned pooling (X-Pool)", xpool)),
    ),
    Experiment(
        "normalisation",
        "NCL",
        "balanced retrieval probabilities stop hubs from being returned to the queries of others",
        "hub videos",
        (
            Arm("CLIP4Clip", clip4clip),
            Arm("NCL", ncl()),
            Arm("NCL's loss alone", ncl(normalize_test=False)),
            Arm("normalised at test alone", ncl(normalize_loss=False)),
        ),
    ),
    Experiment(
        "increments",
        "GARE",
        "an increment per pair absorbs the gradient of false negatives",
        "false negatives",
        (Arm("GARE without increments", gare(increment=NoIncrement())), Arm("GARE", gare())),
    ),
    Experiment(
        "sound",
        "GAID",
        "a gate per frame brings in the sound where the query asks for it",
        "captions told by sound",
        (
            Arm("GAID without sound", gaid(fusion=NoFusion())),
            Arm("GAID", gaid(), released=True),
            Arm("GAID, gate without text", gaid(fusion=GatedFusion(text="none"))),
        ),
    ),
    Experiment(
        "perturbation",
        "GAID",
        "directional perturbation makes texts robust",
        "captions told by sound",
        (Arm("GAID without perturbation", gaid(perturbation=NoPerturbation())), Arm("GAID", gaid(), released=True)),
    ),
    Experiment(
        "paths",
        "DPDV",
        "dividing the frames by the caption, and captions for the rest, bridge what a caption leaves untold",
        "partially relevant captions",
        (Arm("DPDV without paths", dpdv(paths=False)), Arm("DPDV", dpdv())),
    ),
    Experiment(
        "balance",
        "TC-MGC",
        "SDR and LSA make use of granularities whose scores differ much",
        "score imbalance",
        (
            Arm("mean of the contrasts", tcmgc(aggregation="mean", decorrelation=0.0)),
            Arm("TC-MGC", tcmgc()),
            Arm("LSA alone", tcmgc(decorrelation=0.0)),
            Arm("SDR alone", tcmgc(aggregation="mean")),
        ),
    ),
    Experiment(
        "contrasts",
        "TC-MGC",
        "text-conditioned contrasts beat contrasts with the same video for every text (its Table 4)",
        "partially relevant captions",
        (Arm("TC-MGC without conditioning", tcmgc(conditioning=False)), Arm("TC-MGC", tcmgc())),
    ),
)

_PARTIAL, _SOUND = "partially relevant captions", "captions told by sound"
_GARE, _TCMGC, _NCL, _GAID, _DPDV = (
    Arm("GARE", gare()),
    Arm("TC-MGC", tcmgc()),
    Arm("NCL", ncl()),
    Arm("GAID", gaid(), released=True),
    Arm("DPDV", dpdv()),
)
_TMASS = Arm("T-MASS", tmass(), released=True)
LEAKING = (("GAID", _SOUND, _GAID), ("TMASS", _PARTIAL, _TMASS))
"""Methods with a released protocol that leaks: class name, world, and arm."""

DEVIATIONS = (
    Deviation("GARE", "pooling", "false negatives", _GARE, Arm("the paper's mean", gare(pooling=MeanPooling()))),
    Deviation(
        "GARE",
        "information bottleneck",
        "false negatives",
        _GARE,
        Arm("the paper's 0.07 times the mean", gare(bottleneck=Bottleneck(weight=0.07, reduction="mean"))),
    ),
    Deviation(
        "GARE", "temperature", "false negatives", _GARE, Arm("the paper's fixed 0.01", gare(fixed_temperature=0.01))
    ),
    Deviation(
        "TCMGC",
        "interaction matrices",
        "score imbalance",
        _TCMGC,
        Arm("the paper's, without matrices", tcmgc(interaction_matrices=False)),
    ),
    Deviation(
        "TCMGC",
        "projections",
        "score imbalance",
        _TCMGC,
        Arm("the paper's, with projections", tcmgc(projections=True)),
    ),
    Deviation(
        "TCMGC",
        "scale of LSA",
        "score imbalance",
        _TCMGC,
        Arm("the paper's, weights from cosines", tcmgc(aggregation_on="cosines")),
    ),
    Deviation(
        "TCMGC",
        "scale of SDR",
        "score imbalance",
        _TCMGC,
        Arm("the paper's, variance of cosines", tcmgc(decorrelation_on="cosines")),
    ),
    Deviation(
        "NCL",
        "gradient of the biases",
        "hub videos",
        _NCL,
        Arm("a gradient through Sinkhorn", ncl(detach_biases=False)),
    ),
    Deviation("GAID", "gate", _SOUND, _GAID, Arm("the released gate", gaid(fusion=GatedFusion(text="paired")))),
    Deviation("GAID", "sigma", _SOUND, _GAID, Arm("the paper's N(0, 1)", gaid(perturbation=DASP(Normal())))),
    Deviation("GAID", "text", _SOUND, _GAID, Arm("the paper's normalised text", gaid(normalize_text=True))),
    Deviation("GAID", "loss", _SOUND, _GAID, Arm("the paper's plain InfoNCE", gaid(loss_weighting="uniform"))),
    Deviation("DPDV", "macro view", _PARTIAL, _DPDV, Arm("Eq. 5, with the best frame", dpdv(eq5=True))),
    Deviation("DPDV", "partition", _PARTIAL, _DPDV, Arm("a partition by every text", dpdv(pairwise=True))),
    Deviation("TMASS", "sigma", _PARTIAL, _TMASS, Arm("T-MASS, the paper's N(0, 1)", tmass(prior=Normal()))),
    Deviation(
        "TMASS", "support weight", _PARTIAL, _TMASS, Arm("T-MASS, the released default of 0", tmass(support_weight=0.0))
    ),
)
