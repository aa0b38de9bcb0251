"""Leakage audit, a test of whether scores and tables depend on information that an evaluation must not use."""

# Increase it when a change can alter the findings of an audit, so that the runs of results tables are repeated.
AUDIT_VERSION = 3
