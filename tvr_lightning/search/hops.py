"""Over how many servers a request came, so that servers which ask one another in a circle come to an end."""

from __future__ import annotations

import contextvars

HOPS = "X-Tvr-Hops"
"""Header that says it."""
MOST_HOPS = 4

hops: contextvars.ContextVar[int] = contextvars.ContextVar("hops", default=0)
"""Of the request that is being answered."""
