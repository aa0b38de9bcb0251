"""The verbs of the `tvr` command."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One verb of the command line.

    Attributes:
        words: as typed, such as `data synth`.
        help: its line in the list of verbs.
        run: what it runs as "module:function"; signature and docstring make the options. None: one of Lightning's.
        positional: parameters given without `--name`; a list takes one or more words.
        repeated: options that may be given several times, besides `--config`.
        go_on: of verbs that take long, how to go on after an interruption.
        sections: of the recipe, whose options may be given besides, as for `tvr fit`; the function gets them as
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
        """Return what the verb runs; imported only now, so that help is quick."""
        assert self.run is not None
        module, name = self.run.split(":")
        return getattr(importlib.import_module(module), name)


AGAIN = "the same command goes on where it stopped"
VERBS = (
    Verb(
        "fit",
        "train a recipe, test the result, print and write its table; --estimate tells before what it needs",
        go_on="with --checkpoints.resume=true the same command goes on from the last checkpoint",
    ),
    Verb("validate", "evaluate a checkpoint on the validation split"),
    Verb("test", "evaluate a checkpoint on the test split, print and write its table"),
    Verb("predict", "write the best videos of every test text to parquet"),
    Verb(
        "evaluate",
        "rank a similarity matrix from anywhere, print and write its table",
        "tvr_lightning.verbs.evaluate:evaluate_matrices",
        ("scores",),
        sections=("data",),
    ),
    Verb(
        "data synth",
        "write a synthetic dataset of real videos in a dataset's own layout",
        "tvr_lightning.verbs.synth:data_synth",
        ("dataset",),
    ),
    Verb(
        "data get",
        "fetch a dataset that is kept openly on the hub",
        "tvr_lightning.verbs.data:data_get",
        ("dataset",),
        go_on=AGAIN,
    ),
    Verb(
        "data import",
        "bring a dataset as you hold it into the layout that is read",
        "tvr_lightning.verbs.data:data_import",
        ("dataset",),
        go_on=AGAIN,
    ),
    Verb(
        "data check", "list everything wrong with a dataset", "tvr_lightning.verbs.data:data_check", sections=("data",)
    ),
    Verb(
        "data compress",
        "copy a dataset's videos small, to train from",
        "tvr_lightning.verbs.data:data_compress",
        go_on=AGAIN,
        sections=("data",),
    ),
    Verb("data stats", "print what a dataset consists of", "tvr_lightning.verbs.data:data_stats", sections=("data",)),
    Verb("data show", "draw what a model sees and hears of a video", "tvr_lightning.verbs.data:data_show", ("video",)),
    Verb(
        "extract",
        "compute features once and store them",
        "tvr_lightning.verbs.extract:extract_features",
        ("videos",),
        go_on=AGAIN,
        sections=("model", "data"),
    ),
    Verb(
        "caption",
        "describe videos with a vision-language model",
        "tvr_lightning.verbs.extract:caption_videos",
        go_on=AGAIN,
        sections=("data",),
    ),
    Verb(
        "convert",
        "turn an authors' checkpoint into one that `tvr test` loads",
        "tvr_lightning.authors.convert:run_convert",
        ("source", "out"),
    ),
    Verb(
        "audit",
        "check that no ground truth leaks into the scores",
        "tvr_lightning.audit.run:run_audit",
        sections=("model", "data"),
    ),
    Verb("index", "make videos searchable", "tvr_lightning.verbs.search:run_index", ("videos",), ("ckpt", "trust")),
    Verb(
        "search",
        "find videos in an index by words or by an example",
        "tvr_lightning.verbs.search:run_search",
        ("query",),
        ("index", "video", "picture", "trust"),
    ),
    Verb(
        "serve",
        "serve a page and an API that search an index",
        "tvr_lightning.verbs.search:run_serve",
        repeated=("index", "videos", "trust"),
    ),
    Verb("published", "print what the papers publish", "tvr_lightning.reproduce.published_verb:run_published"),
    Verb(
        "reproduce",
        "run published tables again and set what comes out beside the print",
        "tvr_lightning.reproduce.reproduce_verb:run_reproduce",
        ("tables",),
        go_on=AGAIN,
    ),
    Verb(
        "report",
        "write what was reproduced as tables and one page with figures",
        "tvr_lightning.reproduce.report.report_verb:run_report",
        ("directory",),
    ),
    Verb(
        "verify-released",
        "measure the authors' released checkpoints beside the print",
        "tvr_lightning.reproduce.released:run_verify_released",
        ("checkpoints",),
    ),
    Verb(
        "profile",
        "measure what a method costs",
        "tvr_lightning.reproduce.profile.verb:run_profile",
        sections=("model", "data", "trainer"),
    ),
)
