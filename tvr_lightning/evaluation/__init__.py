"""Scores to ranks to tables: metrics, normalisation, the evaluator that alone knows what belongs together, results."""
