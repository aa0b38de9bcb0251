"""Claims of the papers with the setting and the heads of each, and deviations that are measured in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mechanisms_heads import Control, Head, Job, MeanPooled

from tvr_lightning.layers.stochastic import Normal
from tvr_lightning.methods.dpdv.options import Divergence, DPDVOptions, EveryPatch
from tvr_lightning.methods.gaid.options import DASP, GAIDOptions, GatedFusion, NoFusion, NoPerturbation
from tvr_lightning.methods.gare.options import Bottleneck, GAREOptions, NoIncrement
from tvr_lightning.methods.gare.options import MeanPooling as MeanOfFrames
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, ScoreScale, TCMGCOptions
from tvr_lightning.methods.tmass import TMASSOptions
from tvr_lightning.methods.xpool import XPoolOptions

RATES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Learning rates of a head. Each arm starts with those in the middle, until its best one is between two others."""
FULL_RATE = 3e-3
"""Learning rate of the maps, of which slow maps have a tenth or a hundredth."""
Variant = Literal["paper", "released", ""]
Role = Literal["baseline", "method", "control", "diagnostic"]


@dataclass(frozen=True)
class Arm:
    """One line of a figure: a head, its role, and how it is read (`mechanisms_heads.readings`)."""

    name: str
    head: Head | Control
    role: Role
    reading: str = "plain"


@dataclass(frozen=True)
class Size:
    """Amount of training, the same for all heads of a run; `extend` the rates until the best one is inside."""

    pairs: int = 4096
    queue: int = 4096
    epochs: int = 3
    seeds: int = 10
    extend: bool = True


@dataclass(frozen=True)
class Trial:
    """A claim and how it is tried, or a deviation of two readings of a method.

    Attributes:
        key: Short name, or topic of a deviation in the docstring of its method.
        paper: Paper of the claim, or class of the method.
        setting: Key of `SETTINGS`.
        points: Strengths of the factor. For a claim, the first is 0, the control, and the verdict is at the last.
        arms: Baseline, method, controls, and diagnostics.
        maps: Learning rate of the maps relative to `FULL_RATE`; 1 is that of the head.
        variant: Whether the method is the paper's, the released one, or both.
    """

    key: str
    paper: str
    setting: str
    points: tuple[float, ...]
    arms: tuple[Arm, ...]
    maps: float = 0.1
    variant: Variant = ""

    @property
    def ends(self) -> tuple[float, ...]:
        """Points at which rates are chosen; the others use that of the last point."""
        return tuple(dict.fromkeys((self.points[0], self.points[-1])))

    def job(self, arm: Arm, point: float, seed: int, rate: float, size: Size) -> Job:
        """Return the head of an arm at a point."""
        maps = rate if self.maps == 1 else self.maps * FULL_RATE
        readings = tuple(dict.fromkeys(each.reading for each in self.arms if each.head == arm.head))
        return Job(self.setting, point, arm.head, seed, rate, maps, size.pairs, size.queue, size.epochs, readings)

    def rates(self, arm: Arm) -> tuple[float, ...]:
        """Return the first rates of an arm: one if only slow maps and the temperature are trained."""
        plain = isinstance(arm.head, MeanPooled) or (
            isinstance(arm.head, GAREOptions) and isinstance(arm.head.increment, NoIncrement)
        )
        return (FULL_RATE,) if plain and self.maps != 1 else RATES[6:9]


PLAIN_XPOOL, NO_DIVERGENCE = XPoolOptions(dropout=0.0), Divergence(weight=0.0)
gare = partial(GAREOptions, temporal_layers=0)
gaid = partial(GAIDOptions, attention=PLAIN_XPOOL)
dpdv = partial(DPDVOptions, patch_reduction=EveryPatch())  # a frame has only two patches
tmass = partial(TMASSOptions, PLAIN_XPOOL)
PAPER_GARE: dict[str, Any] = {"pooling": MeanOfFrames(), "fixed_temperature": 0.01}
PAPER_GAID: dict[str, Any] = {"normalize_text": True, "loss_weighting": "uniform"}


def tcmgc(weight: float = 0.5, on: ScoreScale = "logits", conditioned: bool = True, **options: Any) -> TCMGCOptions:
    """Return TC-MGC without temporal layers and dropout, which keeps one of four words; `weight` is that of SDR."""
    attention = LanguageVideoAttention(dropout=0.0, projections=options.pop("projections", False))
    pairs = options.pop("pairs", "positives")
    return TCMGCOptions(
        temporal_layers=0,
        keep_rate=0.25,
        attention=attention if conditioned else None,
        decorrelation=Decorrelation(weight, pairs, on) if weight else Decorrelation(weight=0.0),
        **options,
    )


def _arms(baseline: tuple[str, Head], method: tuple[str, Head], **controls: Head | Control) -> tuple[Arm, ...]:
    named = [Arm(name.replace("_", " "), head, "control") for name, head in controls.items()]
    return Arm(*baseline, "baseline"), Arm(*method, "method"), *named


def _texts(head: Head) -> dict[str, Control]:
    return {"one_learned_text_vector": Control(head, "text vector"), "a_linear_text_layer": Control(head, "text layer")}


def _gare(key: str, setting: str, points: tuple[float, ...], maps: float = 0.1) -> Iterator[Trial]:
    paper = gare(bottleneck=Bottleneck(0.07, reduction="mean"), **PAPER_GARE)
    variants: tuple[tuple[Variant, Head, Head], ...] = (
        ("paper", gare(increment=NoIncrement(), **PAPER_GARE), paper),
        ("released", gare(increment=NoIncrement()), gare()),
    )
    for variant, baseline, method in variants:
        arms = _arms(("without increments", baseline), ("GARE", method), **_texts(baseline))
        bare = Arm("bare texts of GARE", method, "diagnostic", "bare")
        yield Trial(key, "GARE", setting, points, (*arms, bare), maps, variant)


def _ncl(maps: float) -> Trial:
    queries = "training queries"
    plain, ncl = MeanPooled(), MeanPooled(True)
    return Trial(
        "normalization", "NCL", "cone", (0, 0.4, 0.8, 1.2, 1.6),
        (
            Arm("CLIP4Clip", plain, "baseline"),
            Arm("NCL", ncl, "method", queries),
            *_arms(("", plain), ("", plain), **_texts(plain))[2:],
            Arm("loss of NCL alone", ncl, "diagnostic"),
            Arm("biases of NCL alone", plain, "diagnostic", queries),
            Arm("NCL, biases from the test queries", ncl, "diagnostic", "oracle"),
        ),
        maps,
    )  # fmt: skip


def _tcmgc(
    key: str, setting: str, variant: Variant, baseline: tuple[str, Head], method: tuple[str, Head], **control: Any
) -> Trial:
    return Trial(key, "TC-MGC", setting, NOISE, _arms(baseline, method, **control), variant=variant)


def _sdr(setting: str, variant: Variant, on: ScoreScale) -> Trial:
    # The paper takes variances and weights from cosines, the released code from logits.
    make = partial(tcmgc, on=on, aggregation_on=on)
    return _tcmgc(
        "decorrelation", setting, variant, ("without SDR", make(0.0)), ("SDR", make()),
        SDR_of_other_pairs=make(pairs="negatives"),
    )  # fmt: skip


def _lsa(variant: Variant, on: ScoreScale) -> Trial:
    make = partial(tcmgc, 0.0, aggregation_on=on)
    return _tcmgc(
        "balance", "noisy words", variant, ("mean of the contrasts", make(aggregation="mean")), ("LSA", make()),
        learned_constant_weights=Control(make(), "constant weights"),
    )  # fmt: skip


def _dpdv(key: str, setting: str) -> Trial:
    plain = dpdv(paths=(), divergence=NO_DIVERGENCE)
    arms = _arms(("without paths", plain), ("DPDV", dpdv()), a_random_caption_per_step=Control(plain, "random caption"))
    return Trial(key, "DPDV", setting, (0, 0.25, 0.5, 0.75, 0.875), arms)


def _contrasts(variant: Variant, on: ScoreScale) -> Trial:
    make = partial(tcmgc, on=on, aggregation_on=on)
    arms = _arms(
        ("without conditioning", make(conditioned=False)), ("TC-MGC", make()),
        the_same_queries_for_all_texts=Control(make(), "constant query"),
    )  # fmt: skip
    return Trial("contrasts", "TC-MGC", "undescribed scenes", SHARES, arms, variant=variant)


def _gaid(variant: Variant, options: dict[str, Any], fusion: GatedFusion, perturbation: DASP) -> Iterator[Trial]:
    make = partial(gaid, **options)
    silent = partial(make, fusion=NoFusion())
    still = silent(perturbation=NoPerturbation())
    perturbed = silent(perturbation=perturbation)
    method = make(fusion=fusion, perturbation=perturbation)
    constant = Control(make(fusion=fusion, perturbation=perturbation), "constant gate")
    blind = make(fusion=GatedFusion(text="none"), perturbation=perturbation)
    yield Trial("perturbation", "GAID", "noisy sentences", (0, 0.3, 0.6, 0.9, 1.2),
                _arms(("without perturbation", still), ("DASP", perturbed),
                      plain_noise_in_training=Control(still, "noisy text")), variant=variant)  # fmt: skip
    yield Trial("audio", "GAID", "described audio", (0, 0.25, 0.5, 0.75, 1),
                _arms(("without audio", perturbed), ("GAID", method), a_constant_gate_of_one_half=constant),
                variant=variant)  # fmt: skip
    yield Trial("gate", "GAID", "unrelated audio", (0, 0.25, 0.5, 0.75, 0.875),
                (Arm("a constant gate of one half", constant, "baseline"), Arm("GAID", method, "method"),
                 Arm("a gate without text", blind, "control")), variant=variant)  # fmt: skip


SHARES, NUMBERS, NOISE, LENGTHS = (0, 0.25, 0.5, 0.625, 0.75), (0, 1, 3, 7, 15), (0, 1, 2, 3, 4), (0, 0.5, 1, 1.5, 2)
CONDITIONING = Trial(
    "conditioning", "X-Pool", "undescribed scenes", SHARES,
    _arms(("CLIP4Clip", MeanPooled()), ("X-Pool", PLAIN_XPOOL),
          the_same_query_for_all_texts=Control(PLAIN_XPOOL, "constant query")),
)  # fmt: skip
PERTURBATION_P, AUDIO_P, GATE_P = _gaid("paper", PAPER_GAID, GatedFusion(), DASP(Normal()))
PERTURBATION_R, AUDIO_R, GATE_R = _gaid("released", {}, GatedFusion(text="paired"), DASP())
CLAIMS = (
    CONDITIONING,
    _contrasts("paper", "cosines"),
    _contrasts("released", "logits"),
    *map(_ncl, (0.01, 0.1, 1)),
    *(trial for maps in (0.01, 0.1, 1) for trial in _gare("gap", "gap", LENGTHS, maps)),
    *_gare("false negatives", "false negatives", NUMBERS),
    *_gare("false negatives of a style", "false negatives of a style", NUMBERS),
    _dpdv("paths", "additional captions"),
    _dpdv("paths, test like training", "additional captions everywhere"),
    PERTURBATION_P, PERTURBATION_R, AUDIO_P, AUDIO_R, GATE_P, GATE_R,
    _sdr("noisy words", "paper", "cosines"), _sdr("noisy words", "released", "logits"),
    _sdr("lower words", "paper", "cosines"), _sdr("lower words", "released", "logits"),
    _lsa("paper", "cosines"), _lsa("released", "logits"),
)  # fmt: skip


def _deviation(method: str, topic: str, setting: str, strength: float, ours: Head, name: str, other: Head) -> Trial:
    return Trial(topic, method, setting, (strength,), (Arm("here", ours, "baseline"), Arm(name, other, "method")))


_SOUND, _SCENES = ("described audio", 1, gaid()), ("undescribed scenes", 0.5, tmass())
_WORDS = ("noisy words", 2, tcmgc(0.0))  # without SDR, since its released weight dominates everything else
_BANK = "training queries"
_SILENT = gaid(fusion=NoFusion())
LEAKS = tuple(
    Trial("protocol", method, setting, (at,),
          (Arm("here", head, "baseline"), Arm("the released protocol", head, "method", "as released")))
    for method, (setting, at, head) in (("GAID", _SOUND), ("TMASS", _SCENES))
)  # fmt: skip
DEVIATIONS = (
    _deviation("GARE", "pooling", "gap", 1, gare(), "the paper's mean", gare(pooling=MeanOfFrames())),
    _deviation("GARE", "information bottleneck", "gap", 1, gare(), "the paper's 0.07 times the mean",
               gare(bottleneck=Bottleneck(0.07, reduction="mean"))),
    _deviation("GARE", "temperature", "gap", 1, gare(), "the paper's fixed 0.01", gare(fixed_temperature=0.01)),
    _deviation("TCMGC", "interaction matrices", *_WORDS, "the paper's, without matrices (both without SDR)",
               tcmgc(0.0, interaction_matrices=False)),
    _deviation("TCMGC", "projections", *_WORDS, "the paper's, with projections (both without SDR)",
               tcmgc(0.0, projections=True)),
    _deviation("TCMGC", "scale of LSA", *_WORDS, "the paper's, weights from cosines (both without SDR)",
               tcmgc(0.0, aggregation_on="cosines")),
    _deviation("TCMGC", "scale of SDR", "noisy words", 2, tcmgc(), "the paper's, variance of cosines",
               tcmgc(on="cosines")),
    Trial("gradient of the biases", "NCL", "cone", (0.4,),
          (Arm("here", MeanPooled(True), "baseline", _BANK),
           Arm("a gradient through Sinkhorn", MeanPooled(True, detach_biases=False), "method", _BANK))),
    _deviation("GAID", "gate", *_SOUND, "the released gate", gaid(fusion=GatedFusion(text="paired"))),
    _deviation("GAID", "sigma", "noisy sentences", 0.9, _SILENT, "the paper's N(0, 1)",
               gaid(fusion=NoFusion(), perturbation=DASP(Normal()))),
    _deviation("GAID", "text", *_SOUND, "the paper's normalized text", gaid(normalize_text=True)),
    _deviation("GAID", "loss", *_SOUND, "the paper's plain InfoNCE", gaid(loss_weighting="uniform")),
    _deviation("DPDV", "macro view", "additional captions", 0.75, dpdv(), "Eq. 5, with the best frame",
               dpdv(macro_interaction="weighted-max")),
    _deviation("DPDV", "partition", "additional captions", 0.75, dpdv(), "a partition by every text",
               dpdv(spot_partition="pairwise")),
    _deviation("TMASS", "sigma", *_SCENES, "T-MASS, the paper's N(0, 1)", tmass(prior=Normal())),
    _deviation("TMASS", "support weight", *_SCENES, "T-MASS, the released default of 0", tmass(support_weight=0.0)),
)  # fmt: skip
