"""Importing the checkpoints that the authors publish."""
