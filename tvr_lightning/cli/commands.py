"""The commands of `tvr`: name, one line of help, and the function whose signature and docstring define the options."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

RECIPE = ("model", "data", "trainer", "results", "checkpoints", "eval_memory", "seed_everything", "print_config")
AGAIN = "rerun the command to resume"


@dataclass(frozen=True)
class Command:
    """Command of the `tvr` program.

    Attributes:
        name: Name, such as `data synth`.
        help: Line in the list of commands.
        run: Function as "module:function".
        sections: Sections of the recipe whose options can also be given; the function gets them as `overrides`.
        resume: Advice for resuming a long-running command after an interruption.
    """

    name: str
    help: str
    run: str
    sections: tuple[str, ...] = ()
    resume: str | None = None

    def function(self) -> Callable[..., int]:
        """Return the function of the command; its module imports no torch."""
        module, name = self.run.split(":")
        return getattr(importlib.import_module(f"tvr_lightning.{module}"), name)

    def epilog(self) -> str | None:
        """Return the last paragraphs of the help."""
        if self.sections == RECIPE:
            from tvr_lightning.cli.train import recipes_and_examples

            return recipes_and_examples(self.name)
        if not self.sections:
            return None
        shown = " and ".join(f"--{section}.*" for section in self.sections)
        return f"Options {shown} override those of the recipes, as for `tvr fit`."


COMMANDS = (
    Command(
        "fit", "train a method, test it, and print and save the results", "cli.train:fit", RECIPE,
        "rerun the command with --checkpoints.resume=true to resume from the last checkpoint",
    ),
    Command("validate", "evaluate a checkpoint on the validation split", "cli.train:validate", RECIPE),
    Command(
        "test", "evaluate a checkpoint on the test split, and print and save the results", "cli.train:run_test", RECIPE
    ),
    Command("predict", "write the top-ranked videos of every test text", "cli.train:predict", RECIPE),
    Command(
        "evaluate", "rank a similarity matrix from any source, and print and save the results",
        "cli.evaluate:evaluate", ("data", "normalization"),
    ),
    Command("data synth", "write a synthetic dataset of playable videos", "cli.data:synth"),
    Command(
        "data download", "download a dataset that is openly available on the Hugging Face Hub", "cli.data:download",
        resume=AGAIN,
    ),
    Command("data import", "import a downloaded dataset into the expected layout", "cli.data:import_", resume=AGAIN),
    Command("data check", "list all problems of a dataset", "cli.data:check", ("data",)),
    Command(
        "data compress", "write small copies of a dataset's videos for training", "cli.data:compress", ("data",), AGAIN
    ),
    Command("data stats", "print statistics of a dataset", "cli.data:stats", ("data",)),
    Command("data show", "draw the frames, waveform and spectrogram of a video", "cli.data:show"),
    Command("extract", "compute features once and store them", "cli.features:extract", ("model", "data"), AGAIN),
    Command("caption", "describe videos with a vision-language model", "cli.features:caption", ("data",), AGAIN),
    Command("convert", "convert an authors' checkpoint into one that `tvr test` loads", "cli.train:convert"),
    Command("schema", "print the JSON schema of recipes, for editors", "cli.train:schema"),
    Command("push", "publish a trained method on the Hugging Face Hub", "cli.train:push"),
    Command("audit", "check that no ground truth leaks into the scores", "cli.train:audit", ("model", "data")),
    Command("index", "make videos searchable", "cli.search:index"),
    Command("search", "find videos in an index by words or by an example", "cli.search:search"),
    Command("serve", "serve a web page and an API that search an index", "cli.search:serve"),
    Command("published", "print the papers' published results", "cli.tables:published"),
    Command(
        "reproduce", "rerun published tables and compare the results with the published ones", "cli.tables:reproduce",
        resume=AGAIN,
    ),
    Command("report", "write results as a folder of pages with tables and figures", "cli.tables:report"),
    Command(
        "verify-released", "evaluate the authors' released checkpoints and compare the results with the published ones",
        "cli.tables:verify_released",
    ),
    Command(
        "profile", "measure the parameters, memory, and time of a method", "cli.tables:profile",
        ("model", "data", "trainer"),
    ),
    Command("completion", "print a script that completes commands and options in a shell", "cli.main:completion"),
)  # fmt: skip
