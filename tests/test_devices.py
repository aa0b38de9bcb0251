"""Training on two devices: real processes, gloo, no GPU."""

import json
from pathlib import Path

import forked
import pandas as pd
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from small_run import small_run

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.testing import run_processes, small
from tvr_lightning.testing.processes import Batches, comparable, descending, quiet_trainer, strategies, trained

RECIPES = Path(__file__).parent.parent / "recipes"
AUDITED_IN_BF16 = ("--trainer.precision=bf16-mixed", "--model.init_args.evaluation.audit=4")
FREEZE = "--model.init_args.tuning={class_path: LastBlocks, init_args: {blocks: 12}}"
STRATEGIES = {
    "ddp": "strategy: {class_path: DDPStrategy, init_args: {broadcast_buffers: false}}",
    "fsdp2": "strategy: {class_path: lightning.pytorch.strategies.ModelParallelStrategy, init_args: "
    "{data_parallel_size: 2, tensor_parallel_size: 1, save_distributed_checkpoint: false}}",
}


def tvr(command: str, method: str, strategy: str, root: Path, folder: Path, *options: str) -> Path:
    """Run a command on two devices and return the folder of the run's files.

    Both processes already exist, as after torchrun, and have nothing to import; `tests/reproduce/runs/test_runner.py`
    shows that Lightning starts the second one itself. An epoch has three steps. The evaluation has one block of scores,
    which two devices cannot share evenly.
    """
    more = ("--trainer.max_epochs=1", "--trainer.devices=2", f"--config={{trainer: {{{STRATEGIES[strategy]}}}}}")
    done = forked.tvr([command, *small_run(root, folder / command, *more, *options, recipe=method)], folder, devices=2)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted((folder / command).glob("*/version_*"))[-1]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_run_in_bf16_on_two_devices_ends_in_a_table_and_an_audit(msrvtt, tmp_path, strategy):
    run = tvr("fit", "gaid", strategy, msrvtt, tmp_path, *AUDITED_IN_BF16)
    assert list((tmp_path / "fit").glob("*/*")) == [run], "the processes of a run must share its folder"
    results = json.loads((run / "results.json").read_text())
    assert (results["texts"], results["videos"], results["partial"]) == (4, 4, False)
    assert results["audit"]["passed"], results["audit"]
    last = run / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 3
    if strategy == "fsdp2":
        predicted = tvr("predict", "gaid", "ddp", msrvtt, tmp_path, f"--ckpt_path={last}")
        assert pd.read_parquet(predicted / "predictions.parquet")["text_index"].nunique() == 4


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_a_checkpoint_without_frozen_weights_resumes_under_another_strategy(msrvtt, tmp_path, first, then):
    start = {f"encoder.{n}": t for n, t in TinyClipEncoder(width=64, vision_layers=1).state_dict().items()}
    torch.save({"state_dict": start}, tmp_path / "start.ckpt")
    encoder = "--model.init_args.encoder.init_args"
    lora = ("--config=tuning/lora", f"{encoder}.trained_in={tmp_path / 'start.ckpt'}")
    path = tvr("fit", "gare", first, msrvtt, tmp_path, *lora) / "checkpoints" / "last.ckpt"
    resume = (f"--ckpt_path={path}", "--trainer.max_epochs=2", *lora)
    other = tvr("fit", "gare", then, msrvtt, tmp_path, *resume) / "checkpoints" / "last.ckpt"
    saved, resumed = (torch.load(file, weights_only=True) for file in (path, other))
    assert resumed["global_step"] == 6
    assert resumed["frozen_weights"] == saved["frozen_weights"]
    assert resumed["state_dict"].keys() == saved["state_dict"].keys()
    assert not saved["state_dict"].keys() & start.keys()


@pytest.mark.slow
def test_a_resumed_run_continues_its_sharded_queues(msrvtt, tmp_path):
    first = tvr("fit", "ncl", "fsdp2", msrvtt, tmp_path)
    queues = torch.load(first / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert queues["contrast.text_queue.filled"].item() == 12
    more = (f"--ckpt_path={first / 'checkpoints' / 'last.ckpt'}", "--trainer.max_epochs=2")
    second = tvr("fit", "ncl", "fsdp2", msrvtt, tmp_path, *more)
    resumed = torch.load(second / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert resumed["contrast.text_queue.filled"].item() == 2 * 12
    stored = next(name for name in queues if name.startswith("contrast.text_queue.stored_"))
    assert torch.equal(resumed[stored][:12], queues[stored][:12])


def train_on_two_devices(rank, root):
    """Queues of NCL, without an exchange of buffers, and losses of CLIP4Clip in bf16."""
    method = comparable(small(RECIPES / "ncl.yaml", root=root)[0])
    _, state = trained(method, Batches(method, 2), strategy=DDPStrategy(broadcast_buffers=False))
    found = {"queues": {name: tensor for name, tensor in state.items() if "queue" in name}}
    for name, strategy in strategies().items():
        method = descending(small(RECIPES / "clip4clip.yaml", root=root)[0])
        layer = method.encoder.clip.transformer.resblocks[0].mlp.c_fc
        layer.register_forward_pre_hook(lambda layer, _, name=name: found.update({name: layer.weight.dtype}))
        losses, weights = trained(method, Batches(method, 2), strategy=strategy, precision="bf16-mixed")
        found[f"{name} losses"] = losses
        found[f"{name} stored in"] = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    return found


def resume_on_two_devices(rank, root, folder):
    """Save checkpoints of GARE, and of runs that resume them under each strategy."""

    def step(name, path, start=None):
        method = small(RECIPES / "gare.yaml", FREEZE, root=root)[0]
        data = Batches(method, 1)
        data.batches = [batch[rank::2] for batch in data.batches]
        trainer = quiet_trainer(devices=2, strategy=strategies()[name], max_epochs=2 if start else 1)
        trainer.fit(method, datamodule=data, ckpt_path=start)
        trainer.save_checkpoint(path)

    for first in strategies():
        step(first, start := f"{folder}/{first}.ckpt")
        for then in strategies():
            step(then, f"{folder}/{first} {then}.ckpt", start)


@pytest.fixture(scope="module")
def checkpoints(msrvtt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    run_processes(resume_on_two_devices, 2, str(msrvtt), str(folder))
    return folder


@pytest.fixture(scope="module")
def two_devices(msrvtt):
    return run_processes(train_on_two_devices, 2, str(msrvtt))


def test_queues_are_equal_on_two_devices_without_an_exchange(two_devices):
    one, other = (found["queues"] for found in two_devices)
    assert one["contrast.text_queue.position"].item() > 0
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_fsdp2_gathers_blocks_in_bf16_and_trains_as_ddp_does(two_devices):
    for found in two_devices:
        assert (found["ddp"], found["fsdp2"]) == (torch.float32, torch.bfloat16)
        assert found["fsdp2 stored in"] == {torch.float32}
        assert found["fsdp2 losses"] == pytest.approx(found["ddp losses"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_a_run_resumes_under_another_strategy_with_the_state_of_its_optimizer(checkpoints, first, then):
    saved = (torch.load(checkpoints / f"{first} {name}.ckpt", weights_only=True) for name in (first, then))
    one, other = (checkpoint["optimizer_states"][0] for checkpoint in saved)
    assert [group["params"] for group in one["param_groups"]] == [group["params"] for group in other["param_groups"]]
    assert one["state"].keys() == other["state"].keys()
    for name, state in one["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(other["state"][name][key], value, rtol=1e-3, atol=1e-6, msg=f"{name} {key}")
