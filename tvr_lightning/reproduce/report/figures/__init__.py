"""The papers' figures from the runs' own weights and test splits."""
