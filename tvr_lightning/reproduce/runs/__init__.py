"""From tables to runs: planned, started by an engine, each ending in its card."""
