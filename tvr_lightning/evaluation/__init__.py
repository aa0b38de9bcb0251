"""Evaluation of retrieval methods: scores, normalization, ranks, metrics, and result files."""
