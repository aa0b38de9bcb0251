"""Trained methods outside training: in Python, on the Hugging Face Hub, and in MTEB."""
