"""Puts the recipes, which are next to the package in a checkout, into the wheel; all else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies `recipes/` to `tvr_lightning/recipes/`, and writes their JSON schema next to them."""

    def run(self) -> None:
        """Build, and copy; an editable installation reads the checkout's own."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "tvr_lightning" / "recipes"
            shutil.rmtree(target, ignore_errors=True)  # a build before may have left recipes that are gone
            shutil.copytree("recipes", target)
            schema = [sys.executable, "-m", "tvr_lightning.cli", "schema"]
            done = subprocess.run(schema, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, check=False)
            if done.returncode == 0:  # an isolated build has no torch; the schema is then made on the first run
                (target / "schema.json").write_bytes(done.stdout)


setup(cmdclass={"build_py": BuildWithRecipes})
