"""Interrupted runs end with the same weights as uninterrupted ones; files on disk are always complete."""

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import forked
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from resume_run import add_callback, differences, strike_in
from small_run import small_run

# isort: split
from lightning.pytorch import Callback, Trainer

from tvr_lightning.cli import main
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.runs.resume import (
    AtomicCheckpointIO,
    RunCheckpoint,
    checkpoint_folder,
    newest_checkpoint,
    random_state,
    restore_random_state,
)  # fmt: skip
from tvr_lightning.runs.run import Run

PROGRAMS = Path(__file__).parents[1]
RESUME = "--checkpoints.resume=true"
EVERY_STEP = "--checkpoints.every_n_steps=1"


def options(root, runs, recipe, *more):
    """Six steps in two epochs, with random augmentation."""
    more = ("--data.init_args.augmentation=crop-flip", *more)
    return ["fit", *small_run(root, runs, *more, recipe=recipe)]


def last(runs):
    (run,) = runs.iterdir()
    return torch.load(newest_checkpoint(run), weights_only=True)


def struck(folder, signal_name, when, words, **options):
    """Run a command that `resume_run.py` strikes."""
    return forked.tvr([signal_name, when, *words], folder, program=PROGRAMS / "resume_run.py", **options)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "step"), [("ncl", 4), ("tcmgc", 1), ("gaid", 3), ("xpool", 5)])
def test_a_killed_run_resumes_to_bit_identical_weights(recipe, step, msrvtt, tmp_path):
    assert main(options(msrvtt, tmp_path / "whole", recipe, EVERY_STEP)) == 0
    arguments = options(msrvtt, tmp_path / "killed", recipe, EVERY_STEP)
    assert struck(tmp_path, "SIGKILL", str(step), arguments).returncode == -signal.SIGKILL
    assert main([*arguments, RESUME]) == 0
    assert differences(last(tmp_path / "killed"), last(tmp_path / "whole")) == []


def test_a_run_stopped_by_sigterm_resumes_to_bit_identical_weights(msrvtt, tmp_path, monkeypatch, capsys):
    """T-MASS draws noise in every step; the signal comes in the second step of the first epoch."""
    assert main(options(msrvtt, tmp_path / "whole", "tmass")) == 0
    arguments = options(msrvtt, tmp_path / "stopped", "tmass")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "build_trainer", Run.build_trainer)  # restored after the strike
        strike_in(1, signal.SIGTERM)
        assert main(arguments) == os.EX_TEMPFAIL
    assert "stopped by SIGTERM after step 2 and saved" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert main([*arguments, RESUME]) == 0
    assert re.search(r"parameters, weights of \S+/running\.ckpt; writes to", capsys.readouterr().out)
    whole = last(tmp_path / "whole")
    assert differences(last(tmp_path / "stopped"), whole) == []
    assert whole["global_step"] == 6
    logs = [pd.read_csv(path) for name in ("whole", "stopped") for path in (tmp_path / name).glob("*/*/metrics.csv")]
    pd.testing.assert_frame_equal(*logs)
    assert [path.name for path in (tmp_path / "stopped").glob("*/*")] == ["version_0"]
    torch_state = whole["callbacks"]["RandomState"]["processes"][0]["torch"]
    torch.manual_seed(0)
    assert not torch.equal(torch_state, torch.get_rng_state())  # training did draw


def strike_everywhere(name, first_step, folder, arguments):
    """Strike a run in every hook from a step on and resume it; return the exit statuses of the struck runs.

    Every resumed run must equal the undisturbed one, and no run may write a table before it is complete.
    """
    words = [name, str(folder), str(first_step), *arguments]
    done = forked.tvr(words, folder, timeout=1800, program=PROGRAMS / "strike_everywhere.py")
    assert done.returncode == 0, done.stderr[-3000:]
    attempts = json.loads(done.stdout.splitlines()[-1])
    assert {attempt["hook"].split(":")[0] for attempt in attempts} >= HOOKS
    assert [attempt for attempt in attempts if attempt["resumed"] or attempt["differences"]] == []
    assert [attempt for attempt in attempts if attempt["table"] and attempt["status"] not in (0, -9, -15)] == []
    return {attempt["status"] for attempt in attempts}


FSDP2 = (
    "{class_path: lightning.pytorch.strategies.ModelParallelStrategy, init_args: "
    "{data_parallel_size: 2, tensor_parallel_size: 1, save_distributed_checkpoint: false}}"
)
TWO_PAIRS = (
    "--data.init_args.batch_size=2", "--model.init_args.released_devices=null", "--trainer.val_check_interval=2",
)  # fmt: skip
EARLY_STOPPING = (
    "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/t2v_R@1", "--trainer.callbacks.mode=max",
    "--trainer.callbacks.patience=2", "--trainer.min_steps=4",
)  # fmt: skip
HOOKS = {
    "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end",
    "on_fit_end", "on_test_start", "on_test_batch_end", "on_test_end", "teardown",
}  # fmt: skip


@pytest.mark.slow
def test_a_run_killed_in_any_hook_of_its_last_step_resumes_exactly(msrvtt, tmp_path):
    arguments = options(msrvtt, tmp_path / "runs", "gare", EVERY_STEP)
    strike_everywhere("SIGKILL", 5, tmp_path, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize(
    ("recipe", "first_step", "more"),
    [
        ("clip4clip", 2, (EVERY_STEP,)),
        ("gare", 3, (EVERY_STEP, "--trainer.val_check_interval=1")),
        ("tmass", 0, ("--checkpoints.every_n_steps=2", "--trainer.check_val_every_n_epoch=2")),
        ("gare", 3, ("--trainer.max_steps=5",)),
        ("gare", 3, (EVERY_STEP, "--trainer.accumulate_grad_batches=2", *TWO_PAIRS)),
        ("gare", 3, (EVERY_STEP, "--trainer.val_check_interval=1", *EARLY_STOPPING)),
    ],
)
def test_a_run_struck_in_any_hook_resumes_exactly(name, recipe, first_step, more, msrvtt, tmp_path):
    statuses = strike_everywhere(name, first_step, tmp_path, options(msrvtt, tmp_path / "runs", recipe, *more))
    assert name == "SIGKILL" or os.EX_TEMPFAIL in statuses


def test_a_kill_while_a_checkpoint_is_written_leaves_the_previous_one(msrvtt, tmp_path):
    assert main(options(msrvtt, tmp_path / "whole", "clip4clip", EVERY_STEP)) == 0
    arguments = options(msrvtt, tmp_path / "killed", "clip4clip", EVERY_STEP)
    killed = struck(tmp_path, "SIGKILL", "writing", arguments)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert last(tmp_path / "killed")["global_step"] == 1
    (partial,) = (tmp_path / "killed").glob("*/*/checkpoints/running.ckpt.writing")
    assert main([*arguments, RESUME]) == 0
    assert not partial.exists()
    assert differences(last(tmp_path / "killed"), last(tmp_path / "whole")) == []


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("SIGTERM", "ddp"),
        pytest.param("SIGKILL", "ddp", marks=pytest.mark.slow),
        pytest.param("SIGTERM", FSDP2, marks=pytest.mark.slow),
        pytest.param("SIGKILL", FSDP2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_of_two_processes_ends_both(name, strategy, msrvtt, tmp_path, monkeypatch):
    """The second process gets the signal, and the run resumes exactly; T-MASS draws noise in every step."""
    more = ("--data.init_args.batch_size=2", "--trainer.devices=2", f"--trainer.strategy={strategy}")
    more += ("--checkpoints.every_n_steps=2",) if name == "SIGKILL" else ()
    whole = options(msrvtt, tmp_path / "whole", "tmass", *more)
    done = forked.tvr(whole, tmp_path, devices=2)
    assert done.returncode == 0, done.stderr[-3000:]
    arguments = options(msrvtt, tmp_path / "stopped", "tmass", *more)
    monkeypatch.setenv("STRIKE_RANK", "1")
    stopped = struck(tmp_path, name, "1" if name == "SIGTERM" else "3", arguments, devices=2)
    if name == "SIGTERM":
        assert stopped.returncode == os.EX_TEMPFAIL, stopped.stderr[-3000:]
        assert "stopped by SIGTERM after step 3 and saved" in (tmp_path / "err-0.txt").read_text()
    else:
        assert stopped.returncode
        assert last(tmp_path / "stopped")["global_step"] == 2
    resumed = forked.tvr([*arguments, RESUME], tmp_path, devices=2)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    found = differences(last(tmp_path / "stopped"), last(tmp_path / "whole"))
    assert [line for line in found if ".betas: " not in line] == []  # FSDP2 loads the two values as a list


def test_weights_of_an_earlier_step_are_not_tested_as_those_of_the_last(msrvtt, tmp_path, monkeypatch, capsys):
    """For example, if an older `last.ckpt` is copied over the newer one."""
    old = tmp_path / "old.ckpt"

    class PutBack(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                shutil.copy(checkpoint_folder(trainer) / "last.ckpt", old)

        def on_fit_end(self, trainer, pl_module):
            shutil.copy(old, checkpoint_folder(trainer) / "last.ckpt")

    monkeypatch.setattr(Run, "build_trainer", Run.build_trainer)  # restored after the test
    add_callback(PutBack())
    assert main(options(msrvtt, tmp_path, "clip4clip")) == 2
    assert re.search(r"last\.ckpt contains the weights of step 3, but the run ended at step 6", capsys.readouterr().err)
    assert not list(tmp_path.glob("*/*/results.json"))


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_checkpoints_have_the_permissions_of_other_new_files(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
    finally:
        os.umask(before)
    assert (tmp_path / "last.ckpt").stat().st_mode & 0o777 == mode


def test_a_folder_that_cannot_be_written_is_named_before_training(msrvtt, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(options(msrvtt, tmp_path / "taken" / "runs", "clip4clip")) == 2
    error = capsys.readouterr().err
    assert f"cannot write to {tmp_path / 'taken' / 'runs'}" in error
    assert "(Not a directory). Choose another folder with --results.directory=FOLDER" in error


def test_random_numbers_continue_from_a_saved_state(tmp_path):
    def draw():
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    AtomicCheckpointIO().save_checkpoint({"state": random_state()}, tmp_path / "state.ckpt")
    expected = draw()
    assert draw() != expected
    restore_random_state(torch.load(tmp_path / "state.ckpt", weights_only=True)["state"])
    assert draw() == expected


@pytest.fixture
def copied_run(finished_run, tmp_path):
    """A copy of a finished run in the folder of runs `tmp_path`."""
    return shutil.copytree(finished_run, tmp_path / "clip4clip-msrvtt" / "version_0")


def write_checkpoint(path, step, **more):
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"global_step": step, "hyper_parameters": {}, **more}, path)
    writer.teardown()


def test_the_checkpoint_with_the_most_steps_in_the_newest_run_is_found(tmp_path):
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
    write_checkpoint(newest / "last.ckpt", 6)  # at the same step, after the validation
    os.utime(newest / "last.ckpt", (0, 0))
    assert newest_checkpoint(tmp_path) == newest / "last.ckpt"
    assert newest_checkpoint(tmp_path, lambda run: run.name != "version_10").parent.parent.name == "version_9"


def drop_options(config, *names):
    """Remove options from a run's config, as of a version of the package without them."""
    options = yaml.safe_load(config.read_text())
    for name in names:
        *outer, last = name.split(".")
        section = options
        for key in outer:
            section = section[key]
        del section[last]
    config.write_text(yaml.safe_dump(options))


def test_other_settings_start_a_new_run_instead_of_changing_a_finished_one(copied_run, msrvtt, tmp_path, caplog):
    drop_options(copied_run / "config.yaml", "trainer.gradient_clip_val")
    files = [path for path in copied_run.iterdir() if path.suffix in (".yaml", ".json", ".csv")]
    before = [path.read_bytes() for path in files]
    more = (RESUME, "--model.init_args.optimizer.lr=0.002", "--trainer.max_epochs=1")
    with caplog.at_level("INFO"):
        assert main(["fit", *small_run(msrvtt, tmp_path, *more)]) == 0
    changes = ("gradient_clip_val was None, is 1.0", "max_epochs was 2, is 1", "optimizer.lr was 0.001, is 0.002")
    for change in changes:
        assert change in caplog.text
    assert before == [path.read_bytes() for path in files]
    second = json.loads((copied_run.with_name("version_1") / "results.json").read_text())
    assert second["config"]["model"]["init_args"]["optimizer"]["lr"] == 0.002
    assert "version_1" in second["checkpoint"]


def test_a_damaged_config_and_weights_alone_cannot_be_resumed(copied_run, msrvtt, tmp_path, capsys):
    saved = torch.load(copied_run / "checkpoints" / "last.ckpt", weights_only=True)
    del saved["optimizer_states"], saved["lr_schedulers"]
    torch.save(saved, tmp_path / "w.ckpt")
    assert main(["fit", *small_run(msrvtt, tmp_path / "runs", f"--ckpt_path={tmp_path / 'w.ckpt'}")]) == 2
    assert "w.ckpt contains weights only" in capsys.readouterr().err
    (copied_run / "config.yaml").write_text("trainer: [")
    assert main(["fit", *small_run(msrvtt, tmp_path, RESUME)]) == 2
    assert f"{copied_run / 'config.yaml'}: not a recipe" in capsys.readouterr().err


def test_a_copied_run_of_an_older_version_resumes_and_is_tested_with_its_own_weights(copied_run, msrvtt, tmp_path):
    """Options that the version did not have are equal to their defaults; options of the evaluation may change."""
    method = "model.init_args"
    added = [
        "trainer.val_check_interval", "data.init_args.reshuffle",
        f"{method}.contrast", f"{method}.optimizer.decay", f"{method}.encoder.init_args.text_mask",
        f"{method}.clip4clip.similarity_header.init_args.blocks",
    ]  # fmt: skip
    drop_options(copied_run / "config.yaml", *added)
    (copied_run / "results.json").unlink()
    more = (RESUME, f"--{method}.evaluation.memory_gib=1", "--results.select_on=test")
    assert main(["fit", *small_run(msrvtt, tmp_path, *more)]) == 0
    assert list(tmp_path.glob("*/*")) == [copied_run]
    tested = json.loads((copied_run / "results.json").read_text())["checkpoint"]
    assert tested == str(copied_run / "checkpoints" / "best.ckpt")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # commands filter it
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("optimizer.lr=0", "optimizer.lr 0.001 (here: 0.0)"),
        ("optimizer.rates={encoder.*: 0.1}", "optimizer.rates null (here: {'encoder.*': 0.1})"),
        ("optimizer.name=adamw-hf", "optimizer.name adamw (here: adamw-hf)"),
        ("tuning=Frozen", "the checkpoint trains other parameters than this recipe: encoder.clip."),
    ],
)
def test_other_optimizer_options_are_refused(option, message, finished_run, msrvtt, tmp_path, capsys):
    checkpoint = finished_run / "checkpoints" / "last.ckpt"
    more = (f"--model.init_args.{option}", f"--ckpt_path={checkpoint}", "--trainer.max_epochs=3")
    assert main(["fit", *small_run(msrvtt, tmp_path / "runs", *more)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:.ModelCheckpoint.monitor=")
def test_optimizer_states_belong_to_names_and_the_schedule_to_the_options(finished_run, msrvtt, tmp_path):
    """A version of the package may have other positions of parameters and groups."""
    checkpoint = finished_run / "checkpoints" / "last.ckpt"
    moved = torch.load(checkpoint, weights_only=True)
    (state,) = moved["optimizer_states"]
    state["param_groups"] = [group | {"params": group["params"][::-1]} for group in state["param_groups"][::-1]]
    (schedule,) = moved["lr_schedulers"]
    schedule["base_lrs"].reverse()
    torch.save(moved, tmp_path / "moved.ckpt")
    options = ("--model.init_args.optimizer.schedule=constant", "--trainer.limit_val_batches=0")
    for name, path in (("whole", checkpoint), ("moved", tmp_path / "moved.ckpt")):
        more = ("--trainer.max_epochs=3", *options, f"--ckpt_path={path}")
        assert main(["fit", *small_run(msrvtt, tmp_path / name, *more)]) == 0
    assert differences(last(tmp_path / "moved"), last(tmp_path / "whole")) == []
    assert last(tmp_path / "whole")["global_step"] == 9
    (metrics,) = tmp_path.glob("whole/*/*/metrics.csv")
    rates = pd.read_csv(metrics).filter(like="method, decayed").dropna().squeeze(axis=1).tolist()
    assert rates == [0.001] * 3


def test_a_best_checkpoint_later_than_the_resumed_one_keeps_its_score(tmp_path):
    """A resumed run on a GPU may not reach the same score again."""
    best = RunCheckpoint(tmp_path, monitor="val/t2v_R@1", mode="max", filename="best", enable_version_counter=False)

    def state(score):
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


def test_batches_read_ahead_by_workers_do_not_count_as_trained(msrvtt):
    def data():
        options = {"image_size": 16, "batch_size": 4, "num_workers": 1, "captions_per_epoch": "one"}
        return MSRVTT(root=str(msrvtt), frames=2, **options)

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
