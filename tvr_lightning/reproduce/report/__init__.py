"""The report of a folder of run cards: tables, training curves, and the papers' figures from the runs' own tensors."""
