"""Published results, runs of their tables, and the report that compares both."""
