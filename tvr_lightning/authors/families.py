"""Released code of each method: how to recognize its checkpoints, and what the shapes of the tensors determine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tvr_lightning.authors import names
from tvr_lightning.authors.names import PREDICTOR, Names
from tvr_lightning.errors import UserError
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.layers.temporal import SeqTransf, SimilarityHeader
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import CLIP4Clip, CLIP4ClipOptions
from tvr_lightning.methods.drl import DRL, DRLOptions, WeightedTokenWise
from tvr_lightning.methods.gaid.method import GAID
from tvr_lightning.methods.gaid.options import GAIDOptions, GatedFusion
from tvr_lightning.methods.gare.method import GARE
from tvr_lightning.methods.gare.options import GAREOptions
from tvr_lightning.methods.tcmgc.method import TCMGC
from tvr_lightning.methods.tcmgc.options import TCMGCOptions
from tvr_lightning.methods.tmass import TMASS, TMASSOptions
from tvr_lightning.methods.ucofia import UCoFiA, UCoFiAOptions
from tvr_lightning.methods.xclip import XCLIP, XCLIPOptions
from tvr_lightning.methods.xpool import XPool, XPoolOptions

Tensors = Mapping[str, Tensor]
XCLIP_MARKS = ("global_mat_weight", "word_mat_weight", "frame_mat_weight")


@dataclass(frozen=True)
class Family:
    """Released code of a method.

    Attributes:
        method: Class of the method; its name in lower case is the name on the command line and of its recipe.
        title: Name of the method in the paper.
        marks: Name prefixes; a checkpoint of this family has a name for each of them.
        names: Rules from the authors' names to ours, in addition to CLIP's and the temporal encoder's.
        options: Options of the released training.
        found: Function that returns the options that a checkpoint determines, given its tensors, its temporal encoder
            and the number of words.
        text_mask: Whether the text transformer masks padding.
        leaks: Whether the released evaluation leaks ground truth, and the recipe `variants/<name>-as-released` sets it.
    """

    method: type[RetrievalModule]
    title: str
    marks: tuple[str, ...]
    names: Names
    options: Callable[[], Any]
    found: Callable[[Tensors, SimilarityHeader, int], dict[str, Any]] = lambda *_: {}
    text_mask: bool = False
    leaks: bool = False

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.method.__name__.lower()

    @property
    def rules(self) -> dict[str, str | None]:
        """Rules from all of the authors' names to ours."""
        return {**names.CLIP, **names.TEMPORAL, **self.names}


def gaid_options() -> GAIDOptions:
    """Return the options of GAID's released training."""
    return GAIDOptions(fusion=GatedFusion(text="paired"), loss_weighting="released")


def fitting_keep_rate(kept: int, words: int) -> float:
    """Return a keep rate r with int(words r) = kept: the released 0.1 if it fits, or else the roundest one."""
    if not 1 <= kept <= words:
        raise UserError(f"its matrices keep {kept} words, so they do not fit {words} words; {kept} or more words fit")
    candidates = [0.1, *(step / 10 for step in range(1, 11)), *(step / 100 for step in range(1, 101))]
    fitting = (rate for rate in candidates if int(words * rate) == kept)
    return next(fitting, (kept + 0.5) / words)


def temporal_layers(tensors: Tensors, header: SimilarityHeader, words: int) -> dict[str, Any]:
    """Return the number of blocks of the temporal transformer, 0 without one."""
    return {"temporal_layers": header.blocks if isinstance(header, SeqTransf) else 0}


def similarity_header(tensors: Tensors, header: SimilarityHeader, words: int) -> dict[str, Any]:
    """Return the temporal encoder."""
    return {"similarity_header": header}


def drl(tensors: Tensors, header: SimilarityHeader, words: int) -> dict[str, Any]:
    """Return the options of DRL with WTI; the released wti_arch is the number of layers of the weighting networks."""
    layers = sum(name.startswith("text_weight_fc.") and name.endswith("weight") for name in tensors)
    return {"temporal_encoder": header, "interaction": WeightedTokenWise(weight_layers=layers)}


def tcmgc(tensors: Tensors, header: SimilarityHeader, words: int) -> dict[str, Any]:
    """Return the options of TC-MGC; the matrices of the kept words are (k, k)."""
    keep_rate = fitting_keep_rate(rows(tensors, "attentive_word_logit_weight"), words)
    return {**temporal_layers(tensors, header, words), "keep_rate": keep_rate}


def ucofia(tensors: Tensors, header: SimilarityHeader, words: int) -> dict[str, Any]:
    """Return the options of UCoFiA; `pixel_mat_weight` has a row for CLS and each selected patch of each frame."""
    pixels, frames = rows(tensors, "pixel_mat_weight"), rows(tensors, "frame_logit_weight")
    if pixels % frames or pixels < 2 * frames:
        raise UserError(f"pixel_mat_weight has {pixels} rows, which is not a multiple of its {frames} frames")
    # The text-to-video evaluation code has another predictor, of concatenated vectors, and never uses L1.
    trains = rows(tensors, f"{PREDICTOR}in_conv.0.weight") == rows(tensors, "global_mat_weight")
    return {
        **temporal_layers(tensors, header, words),
        "patch_selection": PatchSelection(kept=pixels // frames - 1, predictor="train" if trains else "eval-t2v"),
        "patch_matrix": trains and "local_mat_weight1" in tensors,
    }


def rows(tensors: Tensors, name: str) -> int:
    """Return the number of rows of a tensor. Raise UserError if the tensor is missing."""
    if name not in tensors:
        raise UserError(f"the tensor {name} is missing, whose rows determine an option of the method")
    return len(tensors[name])


FAMILIES = (
    # A family comes before families with a subset of its marks.
    Family(GARE, "GARE", ("psi.", "weight_fc."), names.GARE, GAREOptions, temporal_layers, text_mask=True),
    Family(TCMGC, "TC-MGC", ("conditional_transformer.",), names.TCMGC, TCMGCOptions, tcmgc),
    Family(GAID, "GAID", ("gate_fc.", "stochastic."), names.GAID, gaid_options, leaks=True),
    Family(TMASS, "T-MASS", ("stochastic.", "pool_frames."), names.TMASS, TMASSOptions, leaks=True),
    Family(XPool, "X-Pool", ("pool_frames.",), names.XPOOL, XPoolOptions),
    Family(UCoFiA, "UCoFiA", ("visual_token_selector.",), names.UCOFIA, UCoFiAOptions, ucofia),
    Family(XCLIP, "X-CLIP", XCLIP_MARKS, names.XCLIP, XCLIPOptions, similarity_header),
    Family(DRL, "DRL", ("text_weight_fc.",), names.DRL, DRLOptions, drl),
    Family(CLIP4Clip, "CLIP4Clip", ("clip.",), {}, CLIP4ClipOptions, similarity_header),
)
