"""The leakage audit: whether a method's scores and tables depend on what evaluation must not know."""

# Raise it when a change may alter what an audit finds: runs of tables are then made again.
AUDIT_VERSION = 1
