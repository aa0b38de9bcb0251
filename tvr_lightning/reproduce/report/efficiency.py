"""The papers' efficiency columns next to profiles and training times of the same methods."""

import re
from collections.abc import Sequence

import pandas as pd

from tvr_lightning.reproduce.published import published_rows
from tvr_lightning.reproduce.report.sources import ReportedRun

TABLES = (
    ("TC-MGC", "14"), ("TC-MGC", "1a"), ("TC-MGC", "1b"), ("TC-MGC", "2"), ("TC-MGC", "3"),
    ("GARE", "10"), ("GARE", "11"), ("GAID", "6"), ("GAID", "7"), ("DPDV", "S8"),
)  # fmt: skip
COMPARED = ["parameters, M", "FLOPs of one pair's inference, G", "ms per video", "MiB, training"]
"""Columns of a profile that are compared with the published ones."""


def efficiency_table(profiles: pd.DataFrame, runs: Sequence[ReportedRun]) -> pd.DataFrame:
    """Return every published row on efficiency whose method was profiled or trained, with what was measured."""
    rows = []
    trained = [run for run in runs if run.finished and run.log is not None]
    for row in published_rows():
        extra = {name.replace("_", " "): value for name, value in row.extra.items() if name != "retrained_by_authors"}
        extra |= {f"{row.speed_ms:g}": "ms"} if row.speed_ms is not None else {}
        words = ", ".join(f"{name} {value}" for name, value in extra.items())
        if row.paper == "GARE":  # the variant has the name of the metric and its values
            words = row.variant or ""
        if (row.paper, row.table) not in TABLES or not words:
            continue
        method = re.sub(r" \(.*\)|.* vs |-", "", row.method).lower()  # "TC-MGC (ours)" is the class TCMGC
        own, start = profiles[profiles["method"].str.lower() == method], f"{row.paper}-{row.table}/".lower()
        claimed = [run for run in trained if any(claim.startswith(start) for claim in run.claims)]
        seconds = [f"{run.card.seconds:.1f}" for run in claimed if str(run.results["method"]).lower() == method]
        if len(own) or seconds:
            found = {"method": row.method if row.paper == "GARE" else row.full_method}
            found |= {"table": f"{row.paper} {row.table}", "published": words}
            found |= {column: " / ".join(own[column]) or "-" for column in COMPARED}
            rows.append({**found, "training, s": " / ".join(seconds) or "-"})
    return pd.DataFrame(rows)
