"""Which implementations have parity cases, and which have an importer for the authors' checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from tvr_lightning.authors.clip4clip import compute_clip4clip, import_clip4clip
from tvr_lightning.authors.drl import compute_drl, import_drl
from tvr_lightning.authors.gaid import compute_gaid, import_gaid
from tvr_lightning.authors.gare import compute_gare, import_gare
from tvr_lightning.authors.tcmgc import compute_tcmgc, import_tcmgc
from tvr_lightning.authors.tmass import compute_tmass, import_tmass
from tvr_lightning.authors.ucofia import compute_ucofia, import_ucofia
from tvr_lightning.authors.xclip import compute_xclip, import_xclip
from tvr_lightning.authors.xpool import compute_xpool, import_xpool
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.parity.case import ParityCase
from tvr_lightning.parity.dpc_knn import compute_dpc_knn
from tvr_lightning.parity.dpdv import compute_dpdv
from tvr_lightning.parity.metrics import compute_metrics
from tvr_lightning.parity.ncl import compute_ncl, compute_ncl_multi_caption
from tvr_lightning.parity.tcmgc_switches import compute_tcmgc_switches

COMPUTE: Mapping[str, Callable[[ParityCase], dict[str, Tensor]]] = {
    "clip4clip": compute_clip4clip,
    "dpc_knn": compute_dpc_knn,
    "dpdv": compute_dpdv,
    "drl": compute_drl,
    "gaid": compute_gaid,
    "gare": compute_gare,
    "metrics": compute_metrics,
    "ncl": compute_ncl,
    "ncl_multi_caption": compute_ncl_multi_caption,
    "tcmgc": compute_tcmgc,
    "tcmgc_switches": compute_tcmgc_switches,
    "tmass": compute_tmass,
    "ucofia": compute_ucofia,
    "xclip": compute_xclip,
    "xpool": compute_xpool,
}
"""By the `method` in a case's metadata: computes all its expected tensors, by name without `expected.`."""

IMPORT: Mapping[str, Callable[[Mapping[str, Tensor], str, int, int], RetrievalModule]] = {
    "clip4clip": import_clip4clip,
    "drl": import_drl,
    "gaid": import_gaid,
    "gare": import_gare,
    "tcmgc": import_tcmgc,
    "tmass": import_tmass,
    "ucofia": import_ucofia,
    "xclip": import_xclip,
    "xpool": import_xpool,
}
"""By the method's name on the command line: (checkpoint, source, words, frames) to the method with its weights."""
