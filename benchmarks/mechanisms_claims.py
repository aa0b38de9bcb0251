"""Claims of the papers with the world and the heads of each, and deviations that are measured in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mechanisms_heads import Head, MeanPooled

from tvr_lightning.layers.stochastic import Normal
from tvr_lightning.methods.dpdv.options import Divergence, DPDVOptions, EveryPatch
from tvr_lightning.methods.gaid.options import DASP, GAIDOptions, GatedFusion, NoFusion, NoPerturbation
from tvr_lightning.methods.gare.options import Bottleneck, GAREOptions, NoIncrement, TextIncrement
from tvr_lightning.methods.gare.options import MeanPooling as MeanOfFrames
from tvr_lightning.methods.tcmgc.options import Decorrelation, LanguageVideoAttention, ScoreScale, TCMGCOptions
from tvr_lightning.methods.tmass import TMASSOptions
from tvr_lightning.methods.xpool import XPoolOptions

SETTINGS = tuple((rate, steps) for steps in (64, 256) for rate in (3e-4, 1e-3, 3e-3))
"""Learning rates of the heads and numbers of steps; each arm uses the best setting on validation pairs."""


@dataclass(frozen=True)
class Arm:
    """One line of a figure: a head, and how it is read (`mechanisms_heads.readings`)."""

    name: str
    head: Head
    reading: str = "plain"


@dataclass(frozen=True)
class Job:
    """One head to train."""

    world: str
    strength: float
    head: Head
    seed: int
    rate: float
    ratio: float
    steps: int


@dataclass(frozen=True)
class Trial:
    """A claim and how it is tried, or a deviation of two readings of a method.

    Attributes:
        key: Short name, or topic of a deviation in the docstring of its method.
        paper: Paper of the claim, or class of the method.
        says: The claim.
        world: Key of `WORLDS`.
        points: Strengths of the factor. For a claim, the first is 0, the control, and the verdict is at the last.
        arms: Baseline, method, and parts or variants of the method.
        ratio: Learning rate of the maps that replace the encoders, relative to that of the head.
    """

    key: str
    paper: str
    world: str
    points: tuple[float, ...]
    arms: tuple[Arm, ...]
    says: str = ""
    ratio: float = 1.0

    @property
    def ends(self) -> tuple[float, ...]:
        """Points at which settings are chosen; the others use those of the last point."""
        return tuple(dict.fromkeys((self.points[0], self.points[-1])))

    def job(self, arm: Arm, point: float, seed: int, setting: tuple[float, int]) -> Job:
        """Return the head of an arm at a point, with a learning rate and a number of steps."""
        return Job(self.world, point, arm.head, seed, setting[0], self.ratio, setting[1])

    def sweep(self, settings: Sequence[tuple[float, int]]) -> Iterator[Job]:
        """Yield the heads with seed 0 from which the settings are chosen."""
        yield from (self.job(arm, p, 0, setting) for p in self.ends for arm in self.arms for setting in settings)


PLAIN_XPOOL, NO_DIVERGENCE = XPoolOptions(dropout=0.0), Divergence(weight=0.0)
gare = partial(GAREOptions, temporal_layers=0)
gaid = partial(GAIDOptions, attention=PLAIN_XPOOL)
silent = partial(gaid, fusion=NoFusion())
dpdv = partial(DPDVOptions, patch_reduction=EveryPatch())  # a frame has only four patches
tmass = partial(TMASSOptions, PLAIN_XPOOL)


def tcmgc(weight: float = 0.5, on: ScoreScale = "logits", conditioned: bool = True, **options: Any) -> TCMGCOptions:
    """Return TC-MGC without temporal layers and dropout, which keeps one of six words; `weight` is that of SDR."""
    attention = LanguageVideoAttention(dropout=0.0, projections=options.pop("projections", False))
    return TCMGCOptions(
        temporal_layers=0,
        keep_rate=0.25,
        attention=attention if conditioned else None,
        decorrelation=Decorrelation(weight=weight, scores=on) if weight else Decorrelation(weight=0.0),
        **options,
    )


GARE_ARMS = (
    Arm("GARE without increments", gare(increment=NoIncrement())),
    Arm("GARE", gare()),
    Arm("GARE's bare texts", gare(), "bare"),
    Arm("GARE, increments without the gap", gare(increment=TextIncrement())),
)
DPDV_ARMS = (
    Arm("DPDV without paths", dpdv(paths=(), divergence=NO_DIVERGENCE)),
    Arm("DPDV", dpdv()),
    Arm("DPDV, paths without divergence", dpdv(divergence=NO_DIVERGENCE)),
)
SHARES, NUMBERS, NOISE = (0, 0.25, 0.5, 0.75), (0, 3, 15), (0, 1, 2, 4)
CLAIMS = (
    Trial("conditioning", "X-Pool", "undescribed scenes", SHARES,
          (Arm("CLIP4Clip, mean of the frames", MeanPooled()), Arm("X-Pool, pooled for the text", PLAIN_XPOOL)),
          "A video pooled for the text omits what the text does not describe."),
    Trial("contrasts", "TC-MGC", "undescribed scenes", SHARES,
          (Arm("TC-MGC without conditioning", tcmgc(on="cosines", conditioned=False)),
           Arm("TC-MGC", tcmgc(on="cosines"))),
          "Contrasts with a video conditioned on the text are better than contrasts with one video for all texts "
          "(Table 4). Both arms use SDR of cosines, as in the paper (Eq. 36)."),
    Trial("normalization", "NCL", "cone", (0, 0.4, 0.8, 1.6),
          (Arm("CLIP4Clip", MeanPooled()),
           Arm("NCL: loss, and biases from training queries", MeanPooled(True), "training queries"),
           Arm("NCL's loss alone", MeanPooled(True)),
           Arm("biases from training queries alone", MeanPooled(), "training queries"),
           Arm("NCL, biases from the test queries (oracle)", MeanPooled(True), "oracle")),
          "Balanced retrieval probabilities keep videos that are similar to all texts from being retrieved for all."),
    Trial("gap", "GARE", "gap", (0, 1, 2), GARE_ARMS,
          "An increment per pair relieves the anchors of the tension from the modality gap."),
    Trial("gap, slow encoders", "GARE", "gap", (0, 1, 2), GARE_ARMS,
          "The same, with encoders that learn a hundred times more slowly than the head; the papers use 1e-7 and 1e-4.",
          ratio=0.01),
    Trial("false negatives", "GARE", "false negatives", NUMBERS, GARE_ARMS,
          "Increments absorb the gradients of false negatives, so that these harm the anchors less."),
    Trial("false negatives of a style", "GARE", "false negatives of a style", NUMBERS, GARE_ARMS,
          "The same, where false negatives teach the baseline something that misleads it in the test."),
    Trial("paths", "DPDV", "additional captions", (0, 0.5, 0.875), DPDV_ARMS,
          "Dividing the frames by the caption, and more captions for the rest, make up for what a caption omits."),
    Trial("paths, test like training", "DPDV", "additional captions everywhere", (0, 0.5, 0.875), DPDV_ARMS,
          "The same, where test videos show the other scenes too."),
    Trial("perturbation", "GAID", "noisy sentences", (0, 0.3, 0.6, 0.9, 1.2),
          (Arm("GAID without perturbation", silent(perturbation=NoPerturbation())),
           Arm("GAID, sigma from U[0, 1) as released", silent()),
           Arm("GAID, sigma from N(0, 1) as in the paper", silent(perturbation=DASP(Normal())))),
          "Texts that are perturbed in training tolerate noise in the test."),
    Trial("decorrelation", "TC-MGC", "noisy words", NOISE,
          (Arm("TC-MGC without SDR", tcmgc(0.0)), Arm("SDR of logits, as released", tcmgc()),
           Arm("SDR of cosines, as in the paper", tcmgc(on="cosines"))),
          "A smaller variance of the contrasts' scores of a matching pair (SDR) keeps one contrast from dominating."),
    Trial("sound", "GAID", "described audio", (0, 0.25, 0.5, 0.75, 1),
          (Arm("GAID without sound", silent()), Arm("GAID", gaid()),
           Arm("GAID, gate without text", gaid(fusion=GatedFusion(text="none")))),
          "A gate per frame adds the sound where the query asks for it."),
    Trial("balance", "TC-MGC", "noisy words", NOISE,
          (Arm("mean of the contrasts", tcmgc(0.0, aggregation="mean")),
           Arm("LSA of logits, as released", tcmgc(0.0)),
           Arm("LSA and SDR of cosines, as in the paper", tcmgc(on="cosines", aggregation_on="cosines"))),
          "Learned weights of the contrasts (LSA) are better than their mean where their scores differ."),
)  # fmt: skip


def _deviation(method: str, topic: str, world: str, strength: float, ours: Head, name: str, other: Head) -> Trial:
    return Trial(topic, method, world, (strength,), (Arm("here", ours), Arm(name, other)))


_SOUND, _SCENES = ("described audio", 1, gaid()), ("undescribed scenes", 0.5, tmass())
_WORDS = ("noisy words", 2, tcmgc(0.0))  # without SDR, since its released weight dominates everything else
_BANK = "training queries"
LEAKS = tuple(
    Trial("protocol", method, world, (at,), (Arm("here", head), Arm("the released protocol", head, "as released")))
    for method, (world, at, head) in (("GAID", _SOUND), ("TMASS", _SCENES))
)
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
          (Arm("here", MeanPooled(True), _BANK),
           Arm("a gradient through Sinkhorn", MeanPooled(True, detach_biases=False), _BANK))),
    _deviation("GAID", "gate", *_SOUND, "the released gate", gaid(fusion=GatedFusion(text="paired"))),
    _deviation("GAID", "sigma", "noisy sentences", 0.9, silent(), "the paper's N(0, 1)",
               silent(perturbation=DASP(Normal()))),
    _deviation("GAID", "text", *_SOUND, "the paper's normalized text", gaid(normalize_text=True)),
    _deviation("GAID", "loss", *_SOUND, "the paper's plain InfoNCE", gaid(loss_weighting="uniform")),
    _deviation("DPDV", "macro view", "additional captions", 0.75, dpdv(), "Eq. 5, with the best frame",
               dpdv(macro_interaction="weighted-max")),
    _deviation("DPDV", "partition", "additional captions", 0.75, dpdv(), "a partition by every text",
               dpdv(spot_partition="pairwise")),
    _deviation("TMASS", "sigma", *_SCENES, "T-MASS, the paper's N(0, 1)", tmass(prior=Normal())),
    _deviation("TMASS", "support weight", *_SCENES, "T-MASS, the released default of 0", tmass(support_weight=0.0)),
)  # fmt: skip
