"""Options of GAID: variants of the paper, and differences between its wording and its released code.

Sources are equations and tables of the paper (Yang, Cao, He, Su) and the files of YangBowenn/GAID.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tvr_lightning.layers.stochastic import Prior, Trials, Uniform
from tvr_lightning.methods.xpool import XPoolOptions
from tvr_lightning.option_types import ConfigVariant, Options, Role, SupportWeight, variant

LossWeighting = Literal["positive", "released", "uniform"]


class Fusion(ConfigVariant):
    """Fusion of frames and audio."""


class NoFusion(Fusion):
    """No fusion: frames without audio (Table 5)."""


class GatedFusion(Fusion):
    """Gated fusion, which mixes audio into every frame (Eqs. 1-2).

    Attributes:
        level: one gate per `frame`, per `sample`, or per `token` (dimension) (Table 5).
        text: text that controls the gate in training: the `query` of every pair (Eq. 1), only the `paired` caption
            (model/clip_stochastic.py), or `none`. Evaluation uses the query, or no text after training with none.
    """

    level: Literal["sample", "frame", "token"] = "frame"
    text: Literal["query", "paired", "none"] = "query"


class Perturbation(ConfigVariant):
    """Perturbation of texts."""

    support_weight = 0.0


class NoPerturbation(Perturbation):
    """No perturbation (Table 6)."""


class DASP(Perturbation):
    """Directional adaptive semantic perturbation (Eqs. 4-5).

    Attributes:
        prior: prior of sigma in training; `Uniform` by default.
        support_weight: lambda of Eq. 10 (Table 8); 0 omits the support texts.
    """

    prior: Prior = variant(Uniform)
    support_weight: SupportWeight = 0.8


class STP(Perturbation):
    """Stochastic text perturbation, the best of several trials, as in T-MASS (Eq. 3).

    Attributes:
        prior: prior of sigma; `Uniform` by default.
        trials: number of samples in evaluation, or `mean`.
        support_weight: lambda of Eq. 10.
    """

    prior: Prior = variant(Uniform)
    trials: Trials = 20
    support_weight: SupportWeight = 0.8


@dataclass
class GAIDOptions(Options):
    """Options of GAID.

    Attributes:
        fusion: fusion of frames and audio; `GatedFusion` by default.
        perturbation: perturbation of the texts; `DASP` by default.
        loss_weighting: `positive` weights pairs by their own similarity; `released` gives negative weights to negative
            similarities, which diverges from random weights (trainer/trainer_stochastic.py); `uniform` weights all
            equally (Eqs. 8-9).
        normalize_text: perturb the text at unit length (the paper, above Eq. 3).
        attention: cross-attention of texts and frames (modules/transformer.py).
    """

    fusion: Fusion = variant(GatedFusion)
    perturbation: Perturbation = variant(DASP)
    loss_weighting: Annotated[LossWeighting, Role.TRAINING] = "positive"
    normalize_text: bool = False
    attention: XPoolOptions = field(default_factory=XPoolOptions)
