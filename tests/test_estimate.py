"""`tvr fit --estimate` counts and measures what a run needs before it starts."""

import time
from types import SimpleNamespace

import pytest
import torch

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import RecipeError
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods import GARE
from tvr_lightning.methods.gare.options import GAREOptions
from tvr_lightning.reproduce.profile.costs import measure_costs, random_batch
from tvr_lightning.reproduce.profile.estimate import (
    activation_bytes,
    count_evaluation,
    count_training,
    estimate,
    prepare,
    saved_bytes,
)


@pytest.fixture(scope="module")
def root(synthetic):
    return synthetic("msrvtt", 40)


def words(root, *further):
    return [
        "--config=clip4clip", "--config=fixture",
        f"--data.init_args.root={root}", "--data.init_args.num_workers=0", "--data.init_args.frames=3",
        "--data.init_args.batch_size=8", "--model.init_args.encoder.init_args.width=64", "--trainer.max_epochs=4",
        "--trainer.accelerator=cpu", *further,
    ]  # fmt: skip


def prepared(root, *further):
    return prepare(Recipe.parse([], words(root, *further)))


def estimated(root, *further):
    return estimate(Recipe.parse([], words(root, *further)))


def test_the_estimate_prints_what_a_run_needs_and_writes_nothing(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *words(root), "--estimate"]) == 0
    printed = capsys.readouterr().out
    assert "CLIP4Clip on MSR-VTT: requirements of a run" in printed
    assert "GB, estimated from small batches on the CPU" in printed
    assert "for 16 batches, 16 steps, and 4 epochs, including" in printed
    assert list(tmp_path.iterdir()) == []


# 32 videos train in four batches.
@pytest.mark.parametrize(
    ("options", "batches", "steps", "epochs", "validations"),
    [
        ([], 16, 16, 4, 4),
        (["limit_train_batches=0.5"], 8, 8, 4, 4),
        (["accumulate_grad_batches=3"], 16, 8, 4, 4),
        (["accumulate_grad_batches=2", "max_steps=3"], 6, 3, 1.5, 1),
        (["check_val_every_n_epoch=2"], 16, 16, 4, 2),
        (["val_check_interval=0.5"], 16, 16, 4, 8),
        (["val_check_interval=3", "check_val_every_n_epoch=null"], 16, 16, 4, 5),
        (["limit_val_batches=0"], 16, 16, 4, 0),
        (["devices=2"], 16, 16, 4, 4),
    ],
)
def test_limits_accumulation_and_validations_are_counted(root, options, batches, steps, epochs, validations):
    every_epoch = [] if any("check_val" in option for option in options) else ["check_val_every_n_epoch=1"]
    trainer = prepared(root, *(f"--trainer.{option}" for option in (*every_epoch, *options)))[2]
    assert count_training(trainer) == (batches, epochs, validations)
    assert trainer.estimated_stepping_batches == steps


@pytest.mark.parametrize(
    ("split", "options", "expected"),
    [
        ("val", [], (4, 4, 16)),
        ("test", [], (6, 6, 36)),
        ("test", ["normalization=QueryBankNorm", "bank_size=5"], (6 + 5, 6 + 5, 36 + 5 * 6 + 6 * 5)),
        ("test", ["normalization=QueryBankNorm", "NCL"], (6, 6, 36 + 7 * 6 + 6 * 7)),
    ],
)
def test_evaluations_count_limits_and_banks(root, split, options, expected):
    limited = ("--data.init_args.eval_batch_size=2", "--trainer.limit_val_batches=2", "--trainer.limit_test_batches=3")
    queue = ["--model.init_args.contrast=NCL", "--model.init_args.contrast.init_args.queue_size=7"]
    chosen = [f"--model.init_args.evaluation.{option}" for option in options if option != "NCL"]
    method, data, trainer = prepared(root, *limited, *chosen, *(queue if "NCL" in options else []))
    assert count_evaluation(method, data, split, getattr(trainer, f"limit_{split}_batches")) == expected


def test_time_and_memory_depend_on_what_is_counted(root, monkeypatch):
    found = estimated(root, "--trainer.check_val_every_n_epoch=1")
    without = estimated(root, "--trainer.limit_val_batches=0", "--model.init_args.evaluation.audit=0")
    assert without.evaluation_seconds < found.evaluation_seconds < found.seconds
    method, *_ = prepared(root)
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    assert found.memory > 4 * (sum(p.numel() for p in method.parameters()) + 3 * trained)
    assert "NOT ENOUGH" not in found.text
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1e5))
    assert "0 GB free: NOT ENOUGH" in estimated(root).text
    with pytest.raises(RecipeError, match=r"The run has no end\. Set trainer\.max_epochs"):
        estimated(root, "--trainer.max_epochs=-1")


def test_scoring_is_measured_in_blocks_as_large_as_those_of_an_evaluation():
    """A few pairs alone take hundreds of times longer per pair."""
    encoder = TinyClipEncoder(64, 32, text_layers=1, vision_layers=1, patch_size=16)
    method = GARE(encoder, words=16, frames=4, gare=GAREOptions(temporal_layers=1))
    items = 500
    torch.manual_seed(0)
    text = TextFeatures(torch.randn(items, 64), torch.randn(items, 16, 64), torch.ones(items, 16, dtype=torch.bool))
    video = VideoFeatures(torch.randn(items, 4, 64), torch.ones(items, 4, dtype=torch.bool))

    def scored():
        source = PairScores(method.eval().score, text, video, memory_budget_bytes=2**31)
        began = time.perf_counter()
        assert sum(block.values.numel() for block in source.blocks()) == items**2
        return time.perf_counter() - began

    scored()
    batch = random_batch(method, 4)
    estimated = items * measure_costs(method, batch, items, items).score_ms_per_video / 1000
    ratio = estimated / min(scored() for _ in range(3))
    assert 0.4 < ratio < 2.5


def test_activations_of_a_whole_batch_are_estimated_from_small_ones(root):
    method, _, trainer = prepared(root)
    context = trainer.precision_plugin.forward_context
    batch = random_batch(method, 8)
    expected = saved_bytes(method, random_batch(method, 32), context)
    assert activation_bytes(method, batch, 32, context) == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
def test_a_run_takes_within_a_factor_of_two_of_its_estimate(root, tmp_path):
    further = ("--trainer.max_epochs=30", f"--results.directory={tmp_path}", "--trainer.enable_progress_bar=false")
    expected = estimated(root, *further).seconds
    began = time.perf_counter()
    assert main(["fit", *words(root, *further)]) == 0
    taken = time.perf_counter() - began
    assert taken / 2 < expected < taken * 2
