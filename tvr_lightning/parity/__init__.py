"""Checkpoints and numbers of the authors' own code: importers, and the cases that show both compute the same.

One file per method holds its name map, its importer and the function that computes a case; `methods.py` lists them, and
`families.py` knows whose checkpoint has which names.
"""
