"""Layers that two or more methods share."""
