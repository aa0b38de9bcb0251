"""Memory of this process."""

from __future__ import annotations

import sys

try:
    import resource
except ImportError:  # Windows has no such module
    resource = None  # type: ignore[assignment]


def peak_memory_mib() -> float | None:
    """Return the maximum resident memory of this process so far, or None if the system does not measure it."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
