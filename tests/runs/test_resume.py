"""Interrupted runs end with the very weights of uninterrupted ones; what is on the disk is whole."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import forked
import numpy as np
import pandas as pd
import pytest
import torch
from resume_run import differences, strike_in

# isort: split
from lightning.pytorch import Callback, Trainer

import tvr_lightning.runs.run
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import CheckpointConfig
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.errors import UserError
from tvr_lightning.runs.resume import (
    AtomicCheckpointIO,
    RunCheckpoint,
    checkpoint_folder,
    newest_checkpoint,
    random_state,
    restore_random_state,
)
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parents[2] / "recipes"
PROGRAM = Path(__file__).parents[1] / "resume_run.py"


@pytest.fixture(scope="module")
def fixture_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("fixture")
    synthesize("msrvtt", root, 16, 0, workers=1, progress=False)
    return root


def options(root: Path, runs: Path, recipe: str, *more: str) -> list[str]:
    """Six steps in two epochs, with dropout or noise in every one of them."""
    return [
        "fit", f"--config={RECIPES / recipe}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={root}", "--data.init_args.batch_size=4", "--data.init_args.num_workers=0",
        "--data.init_args.frames=2", "--data.init_args.augmentation=crop-flip", f"--results.directory={runs}",
        "--model.init_args.encoder={class_path: TinyClipEncoder, init_args: "
        "{width: 64, text_layers: 4, vision_layers: 1}}",
        "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1",
        "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false", *more,
    ]  # fmt: skip


def last(runs: Path) -> dict:
    path = newest_checkpoint(runs / next(runs.iterdir()).name)
    return torch.load(path, weights_only=True)


def interrupt(name: str, step: int, arguments: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), name, str(step), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "step"),
    [(recipe, step) for recipe in ("ncl.yaml", "gare.yaml") for step in (1, 3, 5)]
    + [
        (recipe, random.Random(recipe).randrange(1, 6))
        for recipe in ("tcmgc.yaml", "gaid.yaml", "tmass.yaml", "xpool.yaml")
    ],
)
def test_a_killed_run_resumes_to_bit_identical_weights(recipe, step, fixture_root, tmp_path):
    every_step = "--checkpoints.every_n_steps=1"
    assert main(options(fixture_root, tmp_path / "whole", recipe, every_step)) == 0
    arguments = options(fixture_root, tmp_path / "killed", recipe, every_step)
    assert interrupt("SIGKILL", step, arguments).returncode == -signal.SIGKILL
    assert main([*arguments, "--checkpoints.resume=true"]) == 0
    assert differences(last(tmp_path / "killed"), last(tmp_path / "whole")) == []


def test_a_run_stopped_by_sigterm_says_so_and_resumes_to_bit_identical_weights(
    fixture_root, tmp_path, monkeypatch, capsys
):
    """T-MASS draws noise in every step; the signal comes in the second step of the first epoch."""
    assert main(options(fixture_root, tmp_path / "whole", "tmass.yaml")) == 0
    arguments = options(fixture_root, tmp_path / "stopped", "tmass.yaml")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with monkeypatch.context() as patch:
        patch.setattr(
            tvr_lightning.runs.run.Run,
            "build_trainer",
            tvr_lightning.runs.run.Run.build_trainer,
        )
        strike_in(1, signal.SIGTERM)
        assert main(arguments) == os.EX_TEMPFAIL
    assert "stopped by SIGTERM after step 2 and saved" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert main([*arguments, "--checkpoints.resume=true"]) == 0
    whole = last(tmp_path / "whole")
    assert differences(last(tmp_path / "stopped"), whole) == []
    logs = [pd.read_csv(path) for name in ("whole", "stopped") for path in (tmp_path / name).glob("*/*/metrics.csv")]
    pd.testing.assert_frame_equal(*logs)
    assert whole["global_step"] == 6
    assert [path.name for path in (tmp_path / "stopped").glob("*/*")] == ["version_0"]
    torch_state = whole["callbacks"]["RandomState"]["processes"][0]["torch"]
    torch.manual_seed(0)
    assert not torch.equal(torch_state, torch.get_rng_state())  # training did draw


def strike_everywhere(name: str, first_step: int, folder: Path, arguments: list[str]) -> list[dict]:
    """Strike a run in every hook from a step on and resume it; return what came of each attempt."""
    words = [name, str(folder), str(first_step), *arguments]
    done = forked.tvr(words, folder, timeout=1800, program=PROGRAM.with_name("strike_everywhere.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_all_as_undisturbed(attempts: list[dict], hooks: set[str]) -> None:
    """Every resumed run equals the undisturbed one, and no run printed a table that was not complete."""
    assert hooks <= {attempt["hook"].split(":")[0] for attempt in attempts}
    assert [attempt for attempt in attempts if attempt["resumed"] or attempt["differences"]] == []
    assert [attempt for attempt in attempts if attempt["table"] and attempt["status"] not in (0, -9, -15)] == []


FSDP2 = (
    "{class_path: lightning.pytorch.strategies.ModelParallelStrategy, init_args: "
    "{data_parallel_size: 2, tensor_parallel_size: 1, save_distributed_checkpoint: false}}"
)
FLOAT32 = "--model.init_args.encoder.init_args.encoder_precision=float32"
TWO_PAIRS = ("--data.init_args.batch_size=2", "--trainer.val_check_interval=2")
EARLY_STOPPING = (
    "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/t2v_R@1", "--trainer.callbacks.mode=max",
    "--trainer.callbacks.patience=2", "--trainer.min_steps=4",
)  # fmt: skip
HOOKS = {
    "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end",
    "on_fit_end", "on_test_start", "on_test_batch_end", "on_test_end", "teardown",
}  # fmt: skip


def test_whatever_the_hook_of_the_last_step_in_which_a_run_is_killed_it_resumes_exactly(fixture_root, tmp_path):
    arguments = options(fixture_root, tmp_path / "runs", "gare.yaml", "--checkpoints.every_n_steps=1")
    attempts = strike_everywhere("SIGKILL", 5, tmp_path, arguments)
    assert_all_as_undisturbed(attempts, HOOKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("gare.yaml", ()),
        ("clip4clip.yaml", ("--checkpoints.every_n_steps=1",)),
        ("gare.yaml", ("--checkpoints.every_n_steps=1", "--trainer.val_check_interval=1")),
        ("tmass.yaml", ("--checkpoints.every_n_steps=2", "--trainer.check_val_every_n_epoch=2")),
        ("gare.yaml", ("--trainer.max_steps=5",)),
        ("gare.yaml", ("--checkpoints.every_n_steps=1", "--trainer.accumulate_grad_batches=2", *TWO_PAIRS)),
        ("gare.yaml", ("--checkpoints.every_n_steps=1", "--trainer.val_check_interval=1", *EARLY_STOPPING)),
    ],
)
def test_whatever_the_hook_in_which_a_run_is_struck_it_resumes_exactly(name, recipe, more, fixture_root, tmp_path):
    attempts = strike_everywhere(name, 0, tmp_path, options(fixture_root, tmp_path / "runs", recipe, *more))
    assert_all_as_undisturbed(attempts, HOOKS)
    if name == "SIGTERM":
        assert os.EX_TEMPFAIL in {attempt["status"] for attempt in attempts}


def test_a_kill_while_a_checkpoint_is_written_leaves_the_previous_one(fixture_root, tmp_path):
    every = "--checkpoints.every_n_steps=1"
    assert main(options(fixture_root, tmp_path / "whole", "clip4clip.yaml", every)) == 0
    arguments = options(fixture_root, tmp_path / "killed", "clip4clip.yaml", every)
    killed = forked.tvr(arguments, tmp_path, program=PROGRAM.with_name("kill_while_saving.py"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert last(tmp_path / "killed")["global_step"] == 1
    (partial,) = (tmp_path / "killed").glob("*/*/checkpoints/running.ckpt.writing")
    assert main([*arguments, "--checkpoints.resume=true"]) == 0
    assert not partial.exists()
    assert differences(last(tmp_path / "killed"), last(tmp_path / "whole")) == []


@pytest.mark.parametrize("strategy", ["ddp", FSDP2], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_a_signal_to_one_of_two_processes_ends_both_and_the_run_resumes_exactly(
    name, strategy, fixture_root, tmp_path, monkeypatch
):
    """The second process gets the signal; T-MASS draws noise in every step."""
    more = ("--data.init_args.batch_size=2", "--trainer.devices=2", f"--trainer.strategy={strategy}", FLOAT32)
    more += ("--checkpoints.every_n_steps=2",) if name == "SIGKILL" else ()
    whole = options(fixture_root, tmp_path / "whole", "tmass.yaml", *more)
    done = forked.tvr(whole, tmp_path, devices=2)
    assert done.returncode == 0, done.stderr[-3000:]
    arguments = options(fixture_root, tmp_path / "stopped", "tmass.yaml", *more)
    monkeypatch.setenv("STRIKE_RANK", "1")
    stopped = forked.tvr([name, "1" if name == "SIGTERM" else "3", *arguments], tmp_path, devices=2, program=PROGRAM)
    if name == "SIGTERM":
        assert stopped.returncode == os.EX_TEMPFAIL, stopped.stderr[-3000:]
        assert "stopped by SIGTERM after step 3 and saved" in (tmp_path / "err-0.txt").read_text()
    else:
        assert stopped.returncode
        assert last(tmp_path / "stopped")["global_step"] == 2
    resumed = forked.tvr([*arguments, "--checkpoints.resume=true"], tmp_path, devices=2)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    found = differences(last(tmp_path / "stopped"), last(tmp_path / "whole"))
    assert [line for line in found if ".betas: " not in line] == []  # FSDP2 loads the two values as a list


def test_weights_of_an_earlier_step_are_not_tested_as_those_of_the_last(fixture_root, tmp_path, monkeypatch, capsys):
    """As when somebody copies an older `last.ckpt` over the newer one."""
    arguments = options(fixture_root, tmp_path, "clip4clip.yaml")
    old = tmp_path / "old.ckpt"

    class PutBack(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                shutil.copy(checkpoint_folder(trainer) / "last.ckpt", old)

        def on_fit_end(self, trainer, pl_module):
            shutil.copy(old, checkpoint_folder(trainer) / "last.ckpt")

    with_callback(monkeypatch, PutBack())
    assert main(arguments) == 1
    assert re.search(r"last\.ckpt contains the weights of step 3, but the run ended at step 6", capsys.readouterr().err)
    assert not list(tmp_path.glob("*/*/results.json"))


def with_callback(monkeypatch, callback: Callback) -> None:
    """Have every trainer of this test call `callback` as well."""
    build = tvr_lightning.runs.run.Run.build_trainer

    def with_it(self, **kwargs):
        trainer = build(self, **kwargs)
        trainer.callbacks.append(callback)
        return trainer

    monkeypatch.setattr(tvr_lightning.runs.run.Run, "build_trainer", with_it)


def test_resuming_and_a_checkpoint_of_ones_own_contradict(fixture_root, tmp_path, capsys):
    more = ("--checkpoints.resume=true", "--ckpt_path=last")
    assert main(options(fixture_root, tmp_path, "clip4clip.yaml", *more)) == 2
    assert "Drop it or --ckpt_path" in capsys.readouterr().err


def test_checkpoints_need_a_positive_interval():
    with pytest.raises(UserError, match="every_n_steps is 0"):
        CheckpointConfig(every_n_steps=0)


def test_a_full_disk_leaves_the_former_checkpoint_whole(tmp_path):
    path = tmp_path / "last.ckpt"
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"weight": torch.ones(10)}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(UserError, match=r"last\.ckpt could not be written.*previous checkpoint is intact"):
            writer.save_checkpoint({"weight": torch.ones(1 << 18)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.load(path, weights_only=True)["weight"].tolist() == [1.0] * 10
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_checkpoints_have_the_rights_that_the_users_files_have(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
    finally:
        os.umask(before)
    assert (tmp_path / "last.ckpt").stat().st_mode & 0o777 == mode


class Deadly:
    """Kills the process that saves it."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Watched:
    """Looks what is there while a checkpoint with it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.left = folder, 0

    def __reduce__(self):
        self.left = len(list(self.folder.iterdir()))
        return (OrderedDict, ())


def test_what_a_killed_process_left_of_a_checkpoint_is_overwritten_by_the_next_one(tmp_path):
    folder = tmp_path / "version_0" / "checkpoints"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, folder / "last.ckpt")
    child = os.fork()
    if not child:
        try:
            AtomicCheckpointIO().save_checkpoint({"step": 2, "then": Deadly()}, folder / "last.ckpt")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(folder.iterdir())) == 2
    watched = Watched(folder)
    AtomicCheckpointIO().save_checkpoint({"step": 3, "watched": watched}, folder / "last.ckpt")
    assert watched.left == 2  # the former checkpoint and its successor, but not what was left
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]
    assert torch.load(folder / "last.ckpt", weights_only=True)["step"] == 3


def test_a_place_that_takes_no_files_is_named_before_training(fixture_root, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(options(fixture_root, tmp_path / "taken" / "runs", "clip4clip.yaml")) == 1
    said = capsys.readouterr().err
    assert f"cannot write to {tmp_path / 'taken' / 'runs'}" in said
    assert "(Not a directory). Choose another folder with --results.directory=FOLDER" in said


def test_random_numbers_go_on_where_their_state_was_taken(tmp_path):
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    AtomicCheckpointIO().save_checkpoint({"state": random_state()}, tmp_path / "state.ckpt")
    expected = draw()
    assert draw() != expected
    restore_random_state(torch.load(tmp_path / "state.ckpt", weights_only=True)["state"])
    assert draw() == expected


def write_checkpoint(path: Path, step: int, **more) -> None:
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"global_step": step, "hyper_parameters": {}, **more}, path)
    writer.teardown()


def test_the_furthest_checkpoint_of_the_newest_run_is_found_whatever_the_clock_said(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    written = {
        "version_9": {"last.ckpt": 12, "best.ckpt": 12},
        "version_10": {"last.ckpt": 4, "running.ckpt": 6, "best.ckpt": 4},
        "version_11": {"best.ckpt": 20},
    }
    for hours, (version, names) in enumerate(written.items()):
        for name, step in names.items():
            path = tmp_path / version / "checkpoints" / name
            write_checkpoint(path, step)
            os.utime(path, (10**9 - hours, 10**9 - hours))
    newest = tmp_path / "version_10" / "checkpoints"
    assert newest_checkpoint(tmp_path) == newest / "running.ckpt"
    write_checkpoint(newest / "last.ckpt", 6)  # at the same step, behind the validation
    os.utime(newest / "last.ckpt", (0, 0))
    assert newest_checkpoint(tmp_path) == newest / "last.ckpt"
    assert newest_checkpoint(tmp_path, lambda run: run.name != "version_10").parent.parent.name == "version_9"


@pytest.fixture(scope="module")
def finished(fixture_root, tmp_path_factory) -> Path:
    """The folder of all runs, with one finished run of CLIP4Clip."""
    runs = tmp_path_factory.mktemp("finished") / "runs"
    assert main(options(fixture_root, runs, "clip4clip.yaml")) == 0
    return runs


def test_a_finished_run_does_not_take_other_settings(finished, fixture_root, tmp_path, caplog):
    shutil.copytree(finished, tmp_path / "runs")
    first = tmp_path / "runs" / "clip4clip-msrvtt" / "version_0"
    before = {path.name: path.read_bytes() for path in first.iterdir() if path.suffix in (".yaml", ".json", ".csv")}
    arguments = options(fixture_root, tmp_path / "runs", "clip4clip.yaml", "--checkpoints.resume=true")
    with caplog.at_level("INFO"):
        assert main([*arguments, "--model.init_args.optimizer.lr=0.002", "--trainer.max_epochs=1"]) == 0
    said = "other settings: trainer.max_epochs was 2, is 1; model.init_args.optimizer.lr was 0.001, is 0.002"
    assert said in caplog.text
    assert before == {name: (first / name).read_bytes() for name in before}
    second = json.loads((first.with_name("version_1") / "results.json").read_text())
    assert second["config"]["model"]["init_args"]["optimizer"]["lr"] == 0.002
    assert "version_1" in second["checkpoint"]


def test_a_copied_run_is_tested_with_its_own_weights_wherever_it_is_carried_out(finished, fixture_root, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    (run,) = (tmp_path / "copy").glob("*/*")
    (run / "results.json").unlink()
    for path in finished.glob("*/*/checkpoints/*"):
        path.rename(path.with_suffix(".gone"))
    try:
        more = ("--checkpoints.resume=true", "--eval_memory=1GiB", "--results.select_on=test")
        assert main(options(fixture_root, tmp_path / "copy", "clip4clip.yaml", *more)) == 0
    finally:
        for path in finished.glob("*/*/checkpoints/*"):
            path.rename(path.with_suffix(".ckpt"))
    assert list((tmp_path / "copy").glob("*/*")) == [run]
    assert json.loads((run / "results.json").read_text())["checkpoint"] == str(run / "checkpoints" / "best.ckpt")


def test_a_best_checkpoint_from_behind_the_one_a_run_goes_on_from_keeps_its_score(tmp_path):
    """A killed run replaced the former best; on a GPU its successor may not reach the same score again."""
    best = RunCheckpoint(tmp_path, monitor="val/t2v_R@1", mode="max", filename="best", enable_version_counter=False)

    def state(score: float) -> dict:
        path, value = str(tmp_path / "best.ckpt"), torch.tensor(score)
        return best.state_dict() | {
            "best_model_path": path, "kth_best_model_path": path, "best_k_models": {path: value},
            "best_model_score": value, "kth_value": value, "dirpath": str(tmp_path),
        }  # fmt: skip

    write_checkpoint(tmp_path / "best.ckpt", 6, callbacks={best.state_key: state(25.0)})
    checkpoint = {"global_step": 5, "callbacks": {best.state_key: state(20.0)}}
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[best], enable_progress_bar=False)
    trainer.ckpt_path = str(tmp_path / "running.ckpt")
    best.on_load_checkpoint(trainer, None, checkpoint)
    best.load_state_dict(checkpoint["callbacks"][best.state_key])
    assert best.best_model_score == 25
    assert not best.check_monitor_top_k(trainer, torch.tensor(24.0))


def test_batches_read_ahead_by_workers_do_not_count_as_trained(fixture_root):
    def data() -> MSRVTT:
        return MSRVTT(
            root=str(fixture_root), frames=2, image_size=16, batch_size=4, num_workers=1, captions_per_epoch="one"
        )

    first = data()
    batches = iter(first.train_dataloader())
    next(batches)
    state = first.state_dict()
    rest = [batch.text.index.tolist() for batch in batches]
    resumed = data()
    resumed.load_state_dict(state)
    assert state["training"] == {"epoch": 0, "consumed": 4}
    assert [batch.text.index.tolist() for batch in resumed.train_dataloader()] == rest
    assert len(rest) == 2
