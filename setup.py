"""Puts the recipes, which are next to the package in a checkout, into the wheel; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies `recipes/` to `tvr_lightning/recipes/`."""

    def run(self) -> None:
        """Build, and copy; an editable installation reads the checkout's own."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "tvr_lightning" / "recipes"
            shutil.rmtree(target, ignore_errors=True)  # a build before may have left recipes that are gone
            shutil.copytree("recipes", target)


setup(cmdclass={"build_py": BuildWithRecipes})
