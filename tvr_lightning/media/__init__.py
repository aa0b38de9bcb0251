"""Bytes to tensors: opening, probing and reading media files, knowing no dataset."""
