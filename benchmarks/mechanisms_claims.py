"""Which claim of which paper is tried in which world, by which heads, and which deviations are measured there.

Method and baseline share world, seeds, steps and learning rates. What stands here was fixed before the run of five
seeds; the page prints the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mechanisms_heads import LEARNING_RATE, Head, MeanPooled

from tvr_lightning.layers.stochastic import Normal
from tvr_lightning.methods.dpdv import Divergence, DPDVOptions, EveryPatch
from tvr_lightning.methods.gaid import DASP, GAIDOptions, GatedFusion, NoFusion, NoPerturbation
from tvr_lightning.methods.gare import Bottleneck, GAREOptions, NoIncrement
from tvr_lightning.methods.gare import MeanPooling as MeanOfFrames
from tvr_lightning.methods.tcmgc import Decorrelation, LanguageVideoAttention, TCMGCOptions
from tvr_lightning.methods.tcmgc.options import ScoreScale
from tvr_lightning.methods.tmass import TMASSOptions
from tvr_lightning.methods.xpool import XPoolOptions


@dataclass(frozen=True)
class Arm:
    """One line of a figure.

    Attributes:
        name: of the line.
        head: that is trained, or what makes one of a point of a sweep.
        reading: how it is read (`mechanisms_heads.readings`).
    """

    name: str
    head: Head | Callable[[float], Head]
    reading: str = "plain"

    def at(self, point: float) -> Head:
        """Return the head at a point of the claim's axis."""
        return self.head(point) if callable(self.head) else self.head


@dataclass(frozen=True)
class Job:
    """One head to train from one seed, in a world of some strength, with the encoders' maps at a learning rate."""

    world: str
    strength: float
    encoder_rate: float
    head: Head
    seed: int


@dataclass(frozen=True)
class Claim:
    """A claim and its trial.

    Attributes:
        key: short name, also of the figure.
        paper: whose claim it is.
        says: what the paper says that the method does.
        refuted_if: what would have spoken against it.
        world: key of `WORLDS`.
        points: where it is tried; the first one is 0, the control, and the verdict is about the last one.
        arms: the baseline, then the method, then what takes the method apart.
        axis: what the points are, on the figure.
        fixed: strength of the world where the points are values of an option; else they are the strengths.
        encoder_rate: learning rate of the maps that stand for the encoders.
        remarks: what the reader should know besides.
    """

    key: str
    paper: str
    says: str
    refuted_if: str
    world: str
    points: tuple[float, ...]
    arms: tuple[Arm, ...]
    axis: str
    fixed: float | None = None
    encoder_rate: float = LEARNING_RATE
    remarks: str = ""

    @property
    def verdict_at(self) -> float:
        """The point that the verdict is about."""
        return self.points[-1]

    def job(self, arm: Arm, point: float, seed: int) -> Job:
        """Return what an arm trains at a point; several arms may read the same head."""
        strength = point if self.fixed is None else self.fixed
        return Job(self.world, strength, self.encoder_rate, arm.at(point), seed)

    def jobs(self, seed: int) -> Iterator[Job]:
        """Yield what all arms train at all points."""
        yield from (self.job(arm, point, seed) for point in self.points for arm in self.arms)


@dataclass(frozen=True)
class Deviation:
    """Two readings of one method, measured in a claim's world.

    Attributes:
        method: class name.
        topic: of the deviation in the method's docstring, as docs/deviations.md names it.
        claim: key of the claim whose world and learning rate are taken.
        strength: of the world.
        ours, other: as here, and the paper's or the released reading, which its name says.
    """

    method: str
    topic: str
    claim: str
    strength: float
    ours: Arm
    other: Arm

    def jobs(self, seed: int) -> tuple[Job, Job]:
        """Return what both readings train."""
        claim = next(claim for claim in CLAIMS if claim.key == self.claim)
        ours, other = (
            Job(claim.world, self.strength, claim.encoder_rate, arm.at(self.strength), seed)
            for arm in (self.ours, self.other)
        )
        return ours, other


PLAIN_XPOOL = XPoolOptions(dropout=0.0)


def gare(**options: Any) -> GAREOptions:
    """Return GARE without temporal layers; dropout as released."""
    return GAREOptions(temporal_layers=0, **options)


def tcmgc(weight: float = 0.5, on: ScoreScale = "logits", conditioned: bool = True, **options: Any) -> TCMGCOptions:
    """Return TC-MGC without temporal layers and dropout, which keeps one of six words, and decorrelates by a weight."""
    attention = LanguageVideoAttention(dropout=0.0, projections=options.pop("projections", False))
    return TCMGCOptions(
        temporal_layers=0,
        keep_rate=0.25,
        attention=attention if conditioned else None,
        decorrelation=Decorrelation(weight=weight, scores=on) if weight else Decorrelation(weight=0.0),
        **options,
    )


def gaid(**options: Any) -> GAIDOptions:
    """Return GAID without dropout."""
    return GAIDOptions(attention=PLAIN_XPOOL, **options)


def silent(**options: Any) -> GAIDOptions:
    """Return GAID without dropout that hears nothing."""
    return gaid(fusion=NoFusion(), **options)


def dpdv(**options: Any) -> DPDVOptions:
    """Return DPDV with patches as they are; a frame has four."""
    return DPDVOptions(patch_reduction=EveryPatch(), **options)


def tmass(**options: Any) -> TMASSOptions:
    """Return T-MASS without dropout."""
    return TMASSOptions(PLAIN_XPOOL, **options)


NO_DIVERGENCE = Divergence(weight=0.0)
GARE_ARMS = (
    Arm("GARE without increments", gare(increment=NoIncrement())),
    Arm("GARE", gare()),
    Arm("GARE, bare texts", gare(), "bare"),
)
FALSE_NEGATIVES = (0, 1, 3, 7, 15)

CLAIMS = (
    Claim(
        "conditioning",
        "X-Pool",
        "a video that is pooled for the text leaves out what the text does not tell",
        "pooling for the text finds no more than the mean where most frames are untold, or as much more without them",
        "untold scenes",
        (0, 0.125, 0.25, 0.5, 0.75),
        (Arm("CLIP4Clip, mean of the frames", MeanPooled()), Arm("X-Pool, pooled for the text", PLAIN_XPOOL)),
        "share of frames that the caption does not tell",
    ),
    Claim(
        "contrasts",
        "TC-MGC",
        "contrasts with a video that is conditioned on the text beat contrasts with the same video for every text "
        "(Table 4)",
        "conditioning finds no more where most frames are untold, or as much more without them",
        "untold scenes",
        (0, 0.125, 0.25, 0.5, 0.75),
        (
            Arm("TC-MGC without conditioning", tcmgc(on="cosines", conditioned=False)),
            Arm("TC-MGC", tcmgc(on="cosines")),
        ),
        "share of frames that the caption does not tell",
        remarks="Both decorrelate cosines, as the paper writes it (Eq. 36): as released, decorrelation would drown the "
        "rest (see `decorrelation`).",
    ),
    Claim(
        "normalisation",
        "NCL",
        "balanced retrieval probabilities keep videos that are near to all texts from being returned to all of them",
        "the biases find no more where videos lie along the mean text, or as much more where none does",
        "cone",
        (0, 0.05, 0.1, 0.2, 0.4),
        (
            Arm("CLIP4Clip", MeanPooled()),
            Arm("NCL: loss, and biases from training queries", MeanPooled(True), "training queries"),
            Arm("NCL's loss alone", MeanPooled(True)),
            Arm("biases from training queries alone", MeanPooled(), "training queries"),
            Arm("NCL, biases from the test queries (oracle)", MeanPooled(True), "oracle"),
        ),
        "deviation along the other modality's mean direction",
        encoder_rate=1e-4,
    ),
    Claim(
        "gap",
        "GARE",
        "an increment for every pair relieves anchors of the tension that the gap between the modalities makes",
        "increments find no more where there is a gap, or as much more where there is none",
        "gap",
        (0, 0.5, 1, 1.5, 2),
        GARE_ARMS,
        "length of the modalities' offsets",
    ),
    Claim(
        "gap-slow-encoders",
        "GARE",
        "the same, with encoders that learn a hundred times more slowly than the head, nearer to the papers' 1e-7 "
        "against 1e-4",
        "increments find no more where there is a gap, or as much more where there is none",
        "gap",
        (0, 0.5, 1, 1.5, 2),
        GARE_ARMS,
        "length of the modalities' offsets",
        encoder_rate=1e-5,
        remarks="The baseline has next to nothing that could learn here: what is seen is that a head can undo a gap "
        "that the encoders cannot, not that it relieves them.",
    ),
    Claim(
        "false-negatives",
        "GARE",
        "increments take up the gradients of false negatives, so that these spoil the anchors less",
        "increments, or the bare texts that were trained with them, find less than the baseline where there are false "
        "negatives, or lose more by them than the baseline does",
        "false negatives",
        FALSE_NEGATIVES,
        GARE_ARMS,
        "false negatives of a text in its batch",
    ),
    Claim(
        "false-negatives-of-a-style",
        "GARE",
        "the same, where false negatives teach the baseline what misleads it at test",
        "as above",
        "false negatives of a style",
        FALSE_NEGATIVES,
        GARE_ARMS,
        "false negatives of a text in its batch",
    ),
    Claim(
        "paths",
        "DPDV",
        "dividing the frames by the caption, and further captions for the rest, bridge what a caption leaves untold",
        "both paths find no more where captions leave most of a video untold, or as much more where they tell all",
        "told at test",
        (0, 0.25, 0.5, 0.75, 0.875),
        (
            Arm("DPDV without paths", dpdv(paths=(), divergence=NO_DIVERGENCE)),
            Arm("DPDV", dpdv()),
            Arm("DPDV, paths without divergence", dpdv(divergence=NO_DIVERGENCE)),
        ),
        "share of training frames that the caption does not tell",
    ),
    Claim(
        "perturbation",
        "GAID",
        "texts that are perturbed in training stand noise at test",
        "perturbed texts find no more where sentences are noisier than in training, or as much more where they are not",
        "noisy sentences",
        (0, 0.3, 0.6, 0.9),
        (
            Arm("GAID without perturbation", silent(perturbation=NoPerturbation())),
            Arm("GAID, sigma from U[0, 1) as released", silent()),
            Arm("GAID, sigma from N(0, 1) as the paper has it", silent(perturbation=DASP(Normal()))),
        ),
        "noise of test sentences beyond that of training",
    ),
    Claim(
        "decorrelation",
        "TC-MGC",
        "making the contrasts' scores of a matching pair vary less (SDR) keeps one contrast from dominating",
        "SDR finds no more than TC-MGC without it at the released weight of 0.5",
        "noisy words",
        (0, 0.005, 0.05, 0.5),
        (
            Arm("TC-MGC without SDR", tcmgc(0.0)),
            Arm("SDR of logits, as released", lambda weight: tcmgc(weight)),
            Arm("SDR of cosines, as the paper has it", lambda weight: tcmgc(weight, on="cosines")),
        ),
        "weight of SDR",
        fixed=2,
    ),
    Claim(
        "sound",
        "GAID",
        "a gate per frame brings in the sound where the query asks for it",
        "the gate finds no more where captions tell sound, or as much more where none does",
        "told by sound",
        (0, 0.5, 0.75, 1),
        (
            Arm("GAID without sound", silent()),
            Arm("GAID", gaid()),
            Arm("GAID, gate without text", gaid(fusion=GatedFusion(text="none"))),
        ),
        "share of videos that only sound tells apart",
    ),
    Claim(
        "balance",
        "TC-MGC",
        "a learnt weighing of the contrasts (LSA) makes better use of them than their mean where their scores differ",
        "LSA finds no more than the mean where the contrasts with words are worse, or as much more where they are not",
        "noisy words",
        (0, 1, 2, 4),
        (
            Arm("mean of the contrasts", tcmgc(0.0, aggregation="mean")),
            Arm("LSA of logits, as released", tcmgc(0.0)),
        ),
        "noise of the words beyond the usual",
    ),
)

_GARE, _NCL = Arm("GARE", gare()), Arm("NCL", MeanPooled(True), "training queries")
_SOUND, _TMASS = Arm("GAID", gaid()), Arm("T-MASS", tmass())

LEAKS = (
    Deviation(
        "GAID", "protocol", "sound", 1, _SOUND, Arm("the released protocol, same weights", gaid(), "as released")
    ),
    Deviation(
        "TMASS",
        "protocol",
        "conditioning",
        0.5,
        _TMASS,
        Arm("the released protocol, same weights", tmass(), "as released"),
    ),
)
"""Released protocols that leak."""


def _gare(topic: str, name: str, **options: Any) -> Deviation:
    return Deviation("GARE", topic, "gap", 1, _GARE, Arm(name, gare(**options)))


def _undrowned(topic: str, name: str, **options: Any) -> Deviation:
    """As released, SDR drowns what else there is to see of TC-MGC."""
    ours = Arm("TC-MGC without SDR", tcmgc(0.0))
    return Deviation("TCMGC", topic, "balance", 2, ours, Arm(f"{name} (both without SDR)", tcmgc(0.0, **options)))


def _gaid(topic: str, name: str, **options: Any) -> Deviation:
    return Deviation("GAID", topic, "sound", 1, _SOUND, Arm(name, gaid(**options)))


def _dpdv(topic: str, name: str, **options: Any) -> Deviation:
    return Deviation("DPDV", topic, "paths", 0.75, Arm("DPDV", dpdv()), Arm(name, dpdv(**options)))


def _tmass(topic: str, name: str, **options: Any) -> Deviation:
    return Deviation("TMASS", topic, "conditioning", 0.5, _TMASS, Arm(name, tmass(**options)))


DEVIATIONS = (
    _gare("pooling", "the paper's mean", pooling=MeanOfFrames()),
    _gare(
        "information bottleneck",
        "the paper's 0.07 times the mean",
        bottleneck=Bottleneck(weight=0.07, reduction="mean"),
    ),
    _gare("temperature", "the paper's fixed 0.01", fixed_temperature=0.01),
    _undrowned("interaction matrices", "the paper's, without matrices", interaction_matrices=False),
    _undrowned("projections", "the paper's, with projections", projections=True),
    _undrowned("scale of LSA", "the paper's, weights from cosines", aggregation_on="cosines"),
    Deviation(
        "TCMGC",
        "scale of SDR",
        "balance",
        2,
        Arm("TC-MGC", tcmgc()),
        Arm("the paper's, variance of cosines", tcmgc(on="cosines")),
    ),
    Deviation(
        "NCL",
        "gradient of the biases",
        "normalisation",
        0.1,
        _NCL,
        Arm("a gradient through Sinkhorn", MeanPooled(True, detach_biases=False), "training queries"),
    ),
    _gaid("gate", "the released gate", fusion=GatedFusion(text="paired")),
    Deviation(
        "GAID",
        "sigma",
        "perturbation",
        0.9,
        Arm("GAID", silent()),
        Arm("the paper's N(0, 1)", silent(perturbation=DASP(Normal()))),
    ),
    _gaid("text", "the paper's normalised text", normalize_text=True),
    _gaid("loss", "the paper's plain InfoNCE", loss_weighting="uniform"),
    _dpdv("macro view", "Eq. 5, with the best frame", macro_interaction="weighted-max"),
    _dpdv("partition", "a partition by every text", spot_partition="pairwise"),
    _tmass("sigma", "T-MASS, the paper's N(0, 1)", prior=Normal()),
    _tmass("support weight", "T-MASS, the released default of 0", support_weight=0.0),
)
"""Readings in which paper or released code differ from what is done here."""
