"""By the `method` in a case's metadata: a function that computes its expected tensors, named without `expected.`."""

from parity.compute import dpc_knn, dpdv, drl, metrics, ncl, pooled, tcmgc_switches, tempme, ucofia, whole

COMPUTE = {
    name.removeprefix("compute_"): function
    for module in (dpc_knn, dpdv, drl, metrics, ncl, pooled, tcmgc_switches, tempme, ucofia, whole)
    for name, function in vars(module).items()
    if name.startswith("compute_")
}
