"""The commands of `tvr`: name, and the function whose signature and docstring define the options."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

RECIPE = ("model", "data", "trainer", "results", "checkpoints", "eval_memory", "seed_everything", "print_config")
AGAIN = "rerun the command to resume"
RESUME = "rerun the command with --checkpoints.resume=true to resume from the last checkpoint"


@dataclass(frozen=True)
class Command:
    """Command of the `tvr` program.

    Attributes:
        name: Name, such as `data synth`.
        run: Function as "module:function".
        sections: Sections of the recipe whose options can also be given; the function gets them as `overrides`.
        resume: Advice for resuming a long-running command after an interruption.
    """

    name: str
    run: str
    sections: tuple[str, ...] = ()
    resume: str | None = None

    def function(self) -> Callable[..., int | None]:
        """Return the function of the command; its module imports no torch."""
        module, name = self.run.split(":")
        return getattr(importlib.import_module(f"tvr_lightning.cli.{module}"), name)

    @property
    def summary(self) -> str:
        """Line in the list of commands."""
        return str(self.function().__doc__).partition("\n")[0].removesuffix(".")


COMMANDS = (
    Command("fit", "train:fit", RECIPE, RESUME),
    Command("validate", "train:validate", RECIPE),
    Command("test", "train:run_test", RECIPE),
    Command("predict", "train:predict", RECIPE),
    Command("evaluate", "evaluate:evaluate", ("data", "normalization")),
    Command("data synth", "data:synth"),
    Command("data download", "data:download", resume=AGAIN),
    Command("data import", "data:import_", resume=AGAIN),
    Command("data check", "data:check", ("data",)),
    Command("data compress", "data:compress", ("data",), AGAIN),
    Command("data stats", "data:stats", ("data",)),
    Command("data show", "data:show"),
    Command("extract", "features:extract", ("model", "data"), AGAIN),
    Command("caption", "features:caption", ("data",), AGAIN),
    Command("convert", "train:convert"),
    Command("schema", "train:schema"),
    Command("push", "train:push"),
    Command("audit", "train:audit", ("model", "data")),
    Command("index", "search:index"),
    Command("search", "search:search"),
    Command("serve", "search:serve"),
    Command("published", "tables:published"),
    Command("reproduce", "tables:reproduce", resume=AGAIN),
    Command("report", "tables:report"),
    Command("verify-released", "tables:verify_released"),
    Command("profile", "tables:profile", ("model", "data", "trainer")),
    Command("completion", "main:completion"),
)
