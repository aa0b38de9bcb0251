"""One run of a recipe: its folder, trainer, log, page, resumption, and evaluation."""
