"""Which implementations have cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parity.case import ParityCase
from parity.compute.clip4clip import compute_clip4clip
from parity.compute.dpc_knn import compute_dpc_knn
from parity.compute.dpdv import compute_dpdv
from parity.compute.drl import compute_drl
from parity.compute.gaid import compute_gaid
from parity.compute.gare import compute_gare
from parity.compute.metrics import compute_metrics
from parity.compute.ncl import compute_ncl, compute_ncl_multi_caption
from parity.compute.tcmgc import compute_tcmgc
from parity.compute.tcmgc_switches import compute_tcmgc_switches
from parity.compute.tmass import compute_tmass
from parity.compute.ucofia import compute_ucofia
from parity.compute.xclip import compute_xclip
from parity.compute.xpool import compute_xpool
from torch import Tensor

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
