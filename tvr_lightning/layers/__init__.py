"""Blocks that two or more methods share, and nothing else."""
