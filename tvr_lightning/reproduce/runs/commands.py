"""The command that makes a run again."""

from __future__ import annotations

import shlex

from tvr_lightning.reproduce.runs.card import Card


def command_of(card: Card) -> str:
    """Return the `tvr reproduce` command that makes a run and the runs that it needs."""
    run = card.run
    table, _, name = (run["claims"] or [card.name])[0].partition("/")
    words = ["tvr", "reproduce", table, "--only", name]
    if run["seed"] is not None:
        words += ["--seeds", str(run["seed"])]
    if run["fixture_videos"] is not None:
        words += ["--fixture", "--fixture_videos", str(run["fixture_videos"])]
    if run["share"] != "nothing":
        words += ["--share", run["share"]]
    if run["overlay"] is not None:
        words += ["--overlay", run["overlay"]["path"]]
    return shlex.join(words)
