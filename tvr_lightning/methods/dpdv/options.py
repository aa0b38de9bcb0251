"""Options of DPDV: variants of the paper, and choices that it leaves open.

Sources are equations and tables of the paper (anonymous submission, without code), and the code of HBI
(models/cluster.py, modeling.py, until_module.py) and TCFormer, on which the paper builds.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.methods.checks import distinct
from tvr_lightning.option_types import ConfigVariant, Count, Layers, NotNegative, Options, Range, Role, variant

View = Literal["macro", "micro"]
Pathway = Literal["spot", "recover"]
MacroInteraction = Literal["weighted-sum", "weighted-max", "ucofia", "mean"]
MicroInteraction = Literal["weighted-max", "ucofia", "mean"]
ProperFraction = Annotated[float, Range(above=0, below=1)]
DensityRule = Literal["paper", "neighbors", "hbi"]
"""`paper` is exp(-mean of the k smallest distances), including the token itself at 0; `neighbors` excludes it;
`hbi` is HBI's and TCFormer's exp(-mean of squared distances), with distances divided by sqrt(D) and the
token itself included, and the distance of the densest token is the largest distance of the whole set."""


class PatchReduction(ConfigVariant):
    """Reduction of the patches of a frame (Table S10)."""

    per_frame: ClassVar[int | None] = None
    """Number of remaining patches, or None if it depends on the frames."""


class EveryPatch(PatchReduction):
    """No reduction: all patches."""


class AveragePatches(PatchReduction):
    """Mean of the patches (Table S10, "CLIP4Clip")."""

    per_frame = 1


class SelectedPatches(PatchReduction):
    """Selection of a few patches, in addition to CLS (Table S10, "UCoFiA").

    Attributes:
        selection: patch selection; UCoFiA's by default.
    """

    selection: PatchSelection = field(default_factory=PatchSelection)

    @property
    @override
    def per_frame(self) -> int:  # type: ignore[override]
        return 1 + self.selection.kept


class PatchMerging(PatchReduction):
    """Clustering and merging of the patches, stage by stage (section 3.3).

    Attributes:
        ratio: share of the patches that a stage keeps as centers, rounded up (Table S10): .5 reduces 49 to 25, 13, 7
            and .75 to 37, 28, 21. Its row ".25" (49 to 4, 1, 1) is not a quarter: .0625 gives it.
        stages: number of merging stages (Table S10).
        neighbors: k of the density (Eq. 7). Not stated; TCFormer uses 5, HBI 3, so the default is 3.
        density: formula of the density, see `dpc_knn`; `paper` is the paper's.
        weights: `mean` of a cluster (the paper: "merge"), or `scored` as in HBI and TCFormer: tokens pass a
            convolution and a LayerNorm, and are weighted by a learned score.
        heads: number of attention heads; Eq. 8 shows one head, HBI has 8.
        keys: keys and values of the merged patches: the `previous` patches (the paper: "the original patch is used as
            key and value") or the `merged` ones (HBI's released code).
    """

    ratio: Annotated[float, Range(above=0, at_most=1)] = 0.5
    stages: Count = 3
    neighbors: Count = 3
    density: DensityRule = "paper"
    weights: Literal["mean", "scored"] = "mean"
    heads: Count = 8
    keys: Literal["previous", "merged"] = "previous"

    def schedule(self, patches: int) -> list[int]:
        """Return the number of patches after each stage: 49 at .5 gives [25, 13, 7]."""
        counts = []
        for _ in range(self.stages):
            # 1e-9 corrects the binary rounding of .0625 or .1, so that exact products stay integers.
            patches = max(math.ceil(patches * self.ratio - 1e-9), 1)
            counts.append(patches)
        return counts


@dataclass
class Divergence(Options):
    """KL terms between the scores of all frames and those of the paths (Eq. 11).

    Attributes:
        weight: beta of Eq. 12 (the paper: 0.1); 0 omits the terms (Tables 6 and S9).
        scores: inputs of the softmaxes: `logits`, which are scores times exp(logit_scale), or `cosines`, as in HBI's
            helper; not stated, and cosines alone would make the distributions almost uniform.
        reduction: `batchmean` divides by B; `mean`, as in HBI's helper, by B * B. Not stated; KL divergence of
            distributions is `batchmean`.
        direction: `original-to-path` is KL(S_m || S_m+-) as published in Eq. 11; `path-to-original` swaps the arguments
            and trains only S_m, which corresponds to distilling the paths.
    """

    weight: NotNegative = 0.1
    scores: Literal["logits", "cosines"] = "logits"
    reduction: Literal["batchmean", "mean"] = "batchmean"
    direction: Literal["original-to-path", "path-to-original"] = "original-to-path"


@dataclass
class DPDVOptions(Options):
    """Options of DPDV.

    Attributes:
        temporal_layers: number of blocks of CLIP4Clip's temporal transformer on the frames; 0, as the paper mentions
            none.
        views: `macro`, sentences against frames, and `micro`, words against patches (Table 4).
        paths: `spot` and `recover` (Table 3); an empty list trains only on the original pairs.
        spot_ratio: share of a video's frames in the Spot-Path (supplement, section A: half; Table S6 has 1/3 and 2/3).
        spot_partition: `paired`: the matching text divides a video's frames for all texts; `pairwise`: every text
            divides the frames of every video separately. Not stated; L+ and L- index one set of frames per sample.
        captions: maximum number N_s of descriptions of a video (section 3.2: 6).
        recover_captions: number N_s^- of descriptions that the Recover-Path uses (section 3.2: 1; Table S8 up to 3).
        macro_interaction: interaction of sentences and frames (Table 5): `weighted-sum` over the frames (Eq. 6) if
            there is one sentence, `weighted-max` always, which adds its best frame (Eq. 5), `ucofia`'s aggregation, or
            `mean` pooling (Eq. 1).
        micro_interaction: interaction of words and patches (Table 5): `weighted-max` (Eq. 9), `ucofia`, or `mean`.
        patch_reduction: reduction of the patches: `PatchMerging` by default, `AveragePatches`, `SelectedPatches` or
            `EveryPatch` (Table S10).
        original_loss: train on the original pairs, L of Eq. 12 (Table 6).
        path_weight: alpha of Eq. 12 (the paper: 0.5).
        divergence: KL terms, L_KL of Eq. 12.
    """

    temporal_layers: Layers = 0
    views: tuple[View, ...] = ("macro", "micro")
    paths: tuple[Pathway, ...] = ("spot", "recover")
    spot_ratio: ProperFraction = 0.5
    spot_partition: Literal["paired", "pairwise"] = "paired"
    captions: Count = 6
    recover_captions: Count = 1
    macro_interaction: MacroInteraction = "weighted-sum"
    micro_interaction: MicroInteraction = "weighted-max"
    patch_reduction: PatchReduction = variant(PatchMerging)
    original_loss: bool = True
    path_weight: NotNegative = 0.5
    divergence: Annotated[Divergence, Role.TRAINING] = field(default_factory=Divergence)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.views = distinct("views", self.views, View)
        self.paths = distinct("paths", self.paths, Pathway) if self.paths else ()
        micro = self.micro_interaction != "weighted-max" or self.patch_reduction != PatchMerging()
        several = self.recover_captions > 1
        if not self.paths and (self.divergence.weight or self.spot_partition == "pairwise"):
            raise UserError(
                "paths is empty, so there are no paths to divide frames between or to compare the original pairs "
                "with. Set divergence.weight to 0 and leave spot_partition at paired."
            )
        if not self.original_loss and not (self.paths and self.path_weight):
            raise UserError("original_loss: false leaves no contrastive loss without paths that have a path_weight")
        if self.paths and not (self.path_weight or self.divergence.weight):
            raise UserError(
                f"paths {list(self.paths)} are in no loss: path_weight and divergence.weight are 0. Set paths to []"
            )
        if self.recover_captions > self.captions:
            raise UserError(
                f"recover_captions is {self.recover_captions}; it must be between 1 and captions ({self.captions})"
            )
        if several and "recover" not in self.paths:
            raise UserError(f"recover_captions {self.recover_captions} needs the path recover, which is not in paths")
        if several and "ucofia" in (self.macro_interaction, self.micro_interaction):
            raise UserError(
                f"ucofia aggregates a fixed number of tokens, but recover_captions {self.recover_captions} gives more. "
                "Set recover_captions to 1 or use weighted-max."
            )
        if micro and "micro" not in self.views:
            raise UserError("micro_interaction and patch_reduction need the view micro, which is not in views")
        if self.macro_interaction != "weighted-sum" and "macro" not in self.views:
            raise UserError("macro_interaction needs the view macro, which is not in views")
        if self.micro_interaction == "ucofia" and self.patch_reduction.per_frame is None:
            raise UserError(
                f"micro_interaction: ucofia has a matrix with one row per patch, but {self.patch_reduction!r} leaves "
                "a number that depends on the frames. Use SelectedPatches (UCoFiA's own) or AveragePatches."
            )
