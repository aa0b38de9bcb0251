"""Switches of DPDV, and which of them cannot be together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tvr_lightning.layers.patch_selector import PatchSelection as PatchSelectionConfig
from tvr_lightning.methods.dpdv.patch_merging import PatchMergingConfig

View = Literal["macro", "micro"]
Pathway = Literal["spot", "recover"]
InteractionKind = Literal["weighted-max", "ucofia", "mean"]
PatchReduction = Literal["merge", "average", "select", "none"]
SpotPartition = Literal["paired", "pairwise"]
MacroForm = Literal["eq6", "eq5"]


@dataclass
class DivergenceConfig:
    """KL terms between the scores of all frames and those of the paths (Eq. 11).

    Attributes:
        weight: beta of Eq. 12 (the paper: 0.1); 0 leaves the terms out (Tables 6 and S9).
        scores: softmaxes over scores times exp(logit_scale), `logits`, or over `cosines`, as HBI's helper has them; not
            stated, and cosines alone would make the distributions almost uniform.
        reduction: `batchmean` divides by B; `mean`, as in HBI's helper, by B * B. Not stated; KL divergence of
            distributions is the former.
        direction: `original-to-path` is KL(S_m || S_m+-) as Eq. 11 prints it; `path-to-original` swaps the arguments
            and lets only S_m follow, which is what distilling the paths would ask for.

    Raises:
        ValueError: the weight is negative.
    """

    weight: float = 0.1
    scores: Literal["logits", "cosines"] = "logits"
    reduction: Literal["batchmean", "mean"] = "batchmean"
    direction: Literal["original-to-path", "path-to-original"] = "original-to-path"

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"divergence.weight is {self.weight}; it must not be negative")


@dataclass
class DPDVConfig:
    """Switches of the head under the names of the arguments of `DPDV`, which says what they mean.

    Raises:
        ValueError: options that are out of range, or of which one makes another senseless.
    """

    views: tuple[View, ...] = ("macro", "micro")
    paths: tuple[Pathway, ...] = ("spot", "recover")
    spot_ratio: float = 0.5
    spot_partition: SpotPartition = "paired"
    captions: int = 6
    recover_captions: int = 1
    macro_interaction: InteractionKind = "weighted-max"
    micro_interaction: InteractionKind = "weighted-max"
    macro_form: MacroForm = "eq6"
    patch_reduction: PatchReduction = "merge"
    patch_merging: PatchMergingConfig = field(default_factory=PatchMergingConfig)
    patch_selection: PatchSelectionConfig = field(default_factory=PatchSelectionConfig)
    original_loss: bool = True
    path_weight: float = 0.5
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if not self.views or len(set(self.views)) != len(self.views):
            raise ValueError(f"views is {list(self.views)}; give macro, micro or both, each once")
        if len(set(self.paths)) != len(self.paths):
            raise ValueError(f"paths is {list(self.paths)}; give spot, recover, both or none, each once")
        if not 0 < self.spot_ratio < 1:
            raise ValueError(f"spot_ratio is {self.spot_ratio}; both paths need frames, so it lies between 0 and 1")
        if not 1 <= self.recover_captions <= self.captions:
            raise ValueError(
                f"recover_captions is {self.recover_captions}; it goes from 1 to captions, which is {self.captions}"
            )
        if self.path_weight < 0:
            raise ValueError(f"path_weight is {self.path_weight}; it must not be negative")
        if self.memory_budget is not None and self.memory_budget < 1:
            raise ValueError(f"memory_budget is {self.memory_budget} MiB; it must be at least 1")
        self._check_losses()
        self._check_views()

    def _check_losses(self) -> None:
        if not self.paths:
            if not self.original_loss:
                raise ValueError("without paths and with original_loss: false nothing is trained; switch one on")
            if self.divergence.weight:
                raise ValueError(
                    f"divergence.weight {self.divergence.weight} compares paths with the original pair, but paths is "
                    "empty: set divergence.weight to 0"
                )
            if self.spot_partition == "pairwise":
                raise ValueError("spot_partition: pairwise divides frames between paths, but paths is empty")
        elif not (self.path_weight or self.divergence.weight):
            raise ValueError(
                f"paths {list(self.paths)} enter no loss: path_weight and divergence.weight are 0; set paths to []"
            )
        if not self.original_loss and not self.path_weight:
            raise ValueError("path_weight 0 and original_loss: false leave no contrastive loss; switch one on")
        if "recover" not in self.paths and self.recover_captions != 1:
            raise ValueError(f"recover_captions {self.recover_captions} belongs to the path recover, which paths lacks")
        ucofia = "ucofia" in [getattr(self, f"{view}_interaction") for view in self.views]
        if self.recover_captions > 1 and ucofia:
            raise ValueError(
                f"ucofia aggregates a fixed number of tokens and recover_captions {self.recover_captions} brings more; "
                "set recover_captions to 1 or use weighted-max"
            )

    def _check_views(self) -> None:
        if self.macro_form == "eq5" and ("macro" not in self.views or self.macro_interaction != "weighted-max"):
            raise ValueError("macro_form: eq5 belongs to the view macro with macro_interaction: weighted-max")
        absent = [
            name
            for name, standard in (
                ("micro_interaction", "weighted-max"),
                ("patch_reduction", "merge"),
                ("patch_merging", PatchMergingConfig()),
                ("patch_selection", PatchSelectionConfig()),
            )
            if getattr(self, name) != standard
        ]
        if "micro" not in self.views and absent:
            raise ValueError(f"{absent[0]} belongs to the view micro, which views lacks")
        if "macro" not in self.views and self.macro_interaction != "weighted-max":
            raise ValueError("macro_interaction belongs to the view macro, which views lacks")
        if self.patch_merging != PatchMergingConfig() and self.patch_reduction != "merge":
            raise ValueError(f"patch_merging belongs to patch_reduction: merge, not to {self.patch_reduction}")
        if self.patch_selection != PatchSelectionConfig() and self.patch_reduction != "select":
            raise ValueError(f"patch_selection belongs to patch_reduction: select, not to {self.patch_reduction}")
        if self.micro_interaction == "ucofia" and self.patch_reduction in ("merge", "none"):
            raise ValueError(
                f"micro_interaction: ucofia has a matrix with a row for every patch; patch_reduction: "
                f"{self.patch_reduction} leaves as many as the frames have: use select (UCoFiA's own) or average"
            )

    @property
    def patches_per_frame(self) -> int:
        """P', where it does not depend on the frames: 1 on average, CLS and k with selection."""
        return 1 if self.patch_reduction == "average" else 1 + self.patch_selection.kept
