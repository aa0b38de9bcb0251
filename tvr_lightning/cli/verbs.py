"""Commands of the `tvr` program."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """Command of the `tvr` program.

    Attributes:
        words: Name, such as `data synth`.
        help: Line in the list of commands.
        run: Function as "module:function", whose signature and docstring define the options; None for Lightning's.
        positional: Parameters given without `--name`; a list takes one or more arguments.
        repeated: Options that can be repeated, in addition to `--config`.
        go_on: Advice for resuming a long-running command after an interruption.
        sections: Sections of the recipe whose options can also be given, as for `tvr fit`; the function gets them as
            `overrides`.
    """

    words: str
    help: str
    run: str | None = None
    positional: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    go_on: str | None = None
    sections: tuple[str, ...] = ()

    def function(self) -> Callable[..., int]:
        """Return the function of the command, imported only now, so that help is fast."""
        assert self.run is not None
        module, name = self.run.split(":")
        return getattr(importlib.import_module(module), name)


AGAIN = "rerun the command to resume"
VERBS = (
    Verb(
        "fit",
        "train a method, test it, and print and save the results; --estimate only prints what the run needs",
        go_on="rerun the command with --checkpoints.resume=true to resume from the last checkpoint",
    ),
    Verb("validate", "evaluate a checkpoint on the validation split"),
    Verb("test", "evaluate a checkpoint on the test split, and print and save the results"),
    Verb("predict", "write the top-ranked videos of every test text to a parquet file"),
    Verb(
        "evaluate",
        "rank a similarity matrix from any source, and print and save the results",
        "tvr_lightning.cli.evaluate:evaluate_matrices",
        ("scores",),
        sections=("data",),
    ),
    Verb(
        "data synth",
        "write a synthetic dataset of playable videos in the layout of a real dataset",
        "tvr_lightning.cli.synth:data_synth",
        ("dataset",),
    ),
    Verb(
        "data download",
        "download a dataset that is openly available on the Hugging Face Hub",
        "tvr_lightning.cli.data:data_download",
        ("dataset",),
        go_on=AGAIN,
    ),
    Verb(
        "data import",
        "import a downloaded dataset into the expected layout",
        "tvr_lightning.cli.data:data_import",
        ("dataset",),
        go_on=AGAIN,
    ),
    Verb("data check", "list all problems of a dataset", "tvr_lightning.cli.data:data_check", sections=("data",)),
    Verb(
        "data compress",
        "write small copies of a dataset's videos for training",
        "tvr_lightning.cli.data:data_compress",
        go_on=AGAIN,
        sections=("data",),
    ),
    Verb("data stats", "print statistics of a dataset", "tvr_lightning.cli.data:data_stats", sections=("data",)),
    Verb(
        "data show",
        "draw the frames, waveform and spectrogram of a video",
        "tvr_lightning.cli.data:data_show",
        ("video",),
    ),
    Verb(
        "extract",
        "compute features once and store them",
        "tvr_lightning.cli.extract:extract_features",
        ("videos",),
        go_on=AGAIN,
        sections=("model", "data"),
    ),
    Verb(
        "caption",
        "describe videos with a vision-language model",
        "tvr_lightning.cli.extract:caption_videos",
        go_on=AGAIN,
        sections=("data",),
    ),
    Verb(
        "convert",
        "convert an authors' checkpoint into one that `tvr test` loads",
        "tvr_lightning.authors.convert:run_convert",
        ("source", "out"),
    ),
    Verb("schema", "print the JSON schema of recipes, for editors", "tvr_lightning.config.recipe:run_schema"),
    Verb(
        "push",
        "publish a trained method on the Hugging Face Hub",
        "tvr_lightning.api.hub:run_push",
        ("checkpoint", "name"),
    ),
    Verb(
        "audit",
        "check that no ground truth leaks into the scores",
        "tvr_lightning.audit.run:run_audit",
        sections=("model", "data"),
    ),
    Verb("index", "make videos searchable", "tvr_lightning.cli.search:run_index", ("videos",), ("ckpt_path", "trust")),
    Verb(
        "search",
        "find videos in an index by words or by an example",
        "tvr_lightning.cli.search:run_search",
        ("query",),
        ("trust",),
    ),
    Verb(
        "serve",
        "serve a web page and an API that search an index",
        "tvr_lightning.cli.search:run_serve",
        repeated=("videos", "trust"),
    ),
    Verb("published", "print the papers' published results", "tvr_lightning.reproduce.published_verb:run_published"),
    Verb(
        "reproduce",
        "rerun published tables and compare the results with the published ones",
        "tvr_lightning.reproduce.reproduce_verb:run_reproduce",
        ("tables",),
        go_on=AGAIN,
    ),
    Verb(
        "report",
        "write results as a folder of pages with tables and figures",
        "tvr_lightning.reproduce.report.report_verb:run_report",
        ("directory",),
    ),
    Verb(
        "verify-released",
        "evaluate the authors' released checkpoints and compare the results with the published ones",
        "tvr_lightning.reproduce.released:run_verify_released",
        ("checkpoints",),
    ),
    Verb(
        "profile",
        "measure the parameters, memory, and time of a method",
        "tvr_lightning.reproduce.profile.verb:run_profile",
        sections=("model", "data", "trainer"),
    ),
)
