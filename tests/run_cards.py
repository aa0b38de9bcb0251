"""Cards of synthetic runs, with ranks of random but plausible scores."""

from dataclasses import asdict
from pathlib import Path

import torch
from metric_rows import summarize

from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.intervals import write_ranks
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.ranks import Ranks, text_to_video_ranks, video_to_text_ranks
from tvr_lightning.reproduce.runs.card import Card, write_record
from tvr_lightning.reproduce.runs.plan import Setting, make_plan
from tvr_lightning.reproduce.tables import load_table

RECIPES = Path(__file__).parents[1] / "recipes"
TINY = """
trainer: {max_epochs: 1, check_val_every_n_epoch: 1, log_every_n_steps: 1, accelerator: cpu}
model: {init_args: {encoder: {class_path: TinyClipEncoder, init_args: {width: 64, image_size: 32, vision_layers: 1}}}}
data: {init_args: {frames: 4, batch_size: 8, num_workers: 0}}
"""
"""Overlay of a short run."""
DIRECTIONS = ("text_to_video", "video_to_text")


def plan_of(tables, root, only=(), **setting):
    """Plan the runs of tables, whose names are separated by spaces."""
    return make_plan([load_table(name, RECIPES) for name in tables.split()], Setting(RECIPES, root, **setting), only)


def keys_of(plan, claim):
    """Keys of the planned runs for a run of a table, one per seed."""
    return [key for key, run in plan.runs.items() if claim in run.claims]


def make_card(run, cards, quality, **changes):
    """Write the card and ranks of a run on 60 pairs, whose matches score `quality` higher than the rest."""
    torch.manual_seed(0)
    own = torch.arange(60)
    scores = torch.randn(60, 60) + quality * torch.eye(60)
    ranks = text_to_video_ranks(scores, own), video_to_text_ranks(scores, own)
    rows = [summarize(each, (1, 5, 10)) for each in ranks]
    found = {
        "text_to_video": rows[0], "video_to_text": rows[1], "sum_of_recalls": rows[0]["RSum"] + rows[1]["RSum"],
        "texts": 60, "videos": 60, "partial": False, "post_processing": None, "transductive": False,
        "warnings": [], "audit": asdict(AuditResult(True)), "weights": asdict(Weights("last")),
    }  # fmt: skip
    return _written(run, cards, found, dict(zip(DIRECTIONS, ((each, own) for each in ranks), strict=True)), changes)


def make_answers(run, cards, right):
    """Write the card of a run that answers `right` of 40 questions, two per video."""
    place = torch.arange(40)
    hits = Ranks(better=(place >= right).long(), tied=torch.ones_like(place), index=place)
    found = {"evaluation": {"accuracy": 100 * right / 40, "questions": 40}}
    return _written(run, cards, found, {"question": (hits, place // 2)}, {})


def _written(run, cards, found, ranks, changes):
    results = {
        "method": "Method", "dataset": "MSR-VTT", "protocol": "1k-A", "select_on": "last", "precision": "32-true",
        "skipped": [], "seed": run.seed or 0, "config": {"seed_everything": 0, "model": {}, "data": {}},
        "environment": {"date": "2026-11-20T13:42:07+00:00", "packages": {"tvr-lightning": "1.2"}, "machine": "a host"},
        **found,
    }  # fmt: skip
    card = Card(run.key, run.name, "finished", asdict(run), results=results, steps=10, epochs=1, seconds=30.0,
                peak_memory_mib=800.0)  # fmt: skip
    for name, value in changes.items():
        setattr(card, name, value)
    write_ranks(cards / f"{run.key}.parquet", ranks)
    write_record(card, cards / f"{run.key}.json")
    return card
