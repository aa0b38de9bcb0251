"""The leakage audit: whether a method's scores and tables depend on what evaluation must not know."""
