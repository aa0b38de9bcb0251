"""The `tvr` command."""

from tvr_lightning.cli.main import main

__all__ = ["main"]
