"""What a server counts, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from collections import Counter

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Requests by status, and how long searches took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._slots = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def count(self, route: str, status: int) -> None:
        """Count one answered request."""
        with self._lock:
            self._requests[route, status] += 1

    def took(self, seconds: float) -> None:
        """Count one search by how long it took."""
        with self._lock:
            self._slots[sum(seconds > bound for bound in BOUNDS)] += 1
            self._seconds += seconds

    def text(self, videos: int, running: int, decoding: int) -> str:
        """Return everything as lines of text, with gauges of what is now.

        Args:
            videos: in the index.
            running: searches and texts, those that wait included.
            decoding: uploads, those that wait included.
        """
        with self._lock:
            lines = ["# TYPE tvr_requests_total counter"]
            for (route, status), count in sorted(self._requests.items()):
                lines.append(f'tvr_requests_total{{route="{route}",status="{status}"}} {count}')
            lines.append("# TYPE tvr_search_seconds histogram")
            total = 0
            for bound, count in zip([*map(str, BOUNDS), "+Inf"], self._slots, strict=True):
                total += count
                lines.append(f'tvr_search_seconds_bucket{{le="{bound}"}} {total}')
            lines += [f"tvr_search_seconds_sum {self._seconds:.6f}", f"tvr_search_seconds_count {total}"]
        lines += ["# TYPE tvr_videos gauge", f"tvr_videos {videos}"]
        lines += ["# TYPE tvr_searches_running gauge", f"tvr_searches_running {running}"]
        lines += ["# TYPE tvr_uploads_decoding gauge", f"tvr_uploads_decoding {decoding}"]
        return "\n".join(lines) + "\n"
