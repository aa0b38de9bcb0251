"""Checkpoints that contain only the trained weights: their content, loading and errors."""

import json
from pathlib import Path

import pytest
import torch
from search_parts import write_clip
from small_run import small_run

import tvr_lightning
from tvr_lightning.cli import main
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.testing.small import method_recipes
from tvr_lightning.training.checkpoints import FROZEN, CheckpointError

RECIPES = Path(__file__).parents[2] / "recipes"
SIZES = {"width": 64, "image_size": 32, "text_layers": 4, "vision_layers": 2}


def pretrained(path, seed=1):
    torch.manual_seed(seed)
    weights = TinyClipEncoder(**SIZES).state_dict()
    torch.save({"state_dict": {f"encoder.{name}": tensor for name, tensor in weights.items()}}, path)
    return path


@pytest.fixture(scope="session")
def fit(msrvtt):
    """Train one epoch with LoRA, and return the folder of the run."""

    def fit(recipe, folder, weights, *options):
        encoder = {"class_path": "TinyClipEncoder", "init_args": SIZES | {"trained_in": weights and str(weights)}}
        own = (
            "--config=tuning/lora", f"--model.init_args.encoder={json.dumps(encoder)}", "--trainer.max_epochs=1",
        )  # fmt: skip
        assert main(["fit", *small_run(msrvtt, folder, *own, *options, recipe=str(recipe))]) == 0
        (run,) = folder.glob("*/version_0")
        return run

    return fit


@pytest.mark.slow
@pytest.mark.parametrize("title", method_recipes(RECIPES))
def test_every_method_with_lora_can_be_tested_from_its_small_checkpoint(fit, title, tmp_path):
    start = pretrained(tmp_path / "start.ckpt")
    queue = ["--model.init_args.contrast.init_args.queue_size=64"] if title.startswith("NCL") else []
    run = fit(method_recipes(RECIPES)[title], tmp_path / "runs", start, *queue)
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert FROZEN in torch.load(checkpoint, weights_only=True)
    assert main(["test", f"--ckpt_path={checkpoint}"]) == 0
    files = [run / "results.json", *run.glob("test/*/results.json")]
    alone, again = (json.loads(file.read_text())["text_to_video"] for file in files)
    assert alone == again
    # The checkpoint has the method's own layers, their optimizer state, and LoRA.
    assert checkpoint.stat().st_size < start.stat().st_size / 3, checkpoint.stat().st_size


@pytest.fixture(scope="module")
def run(fit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return fit("xpool", folder / "runs", pretrained(folder / "start.ckpt"))


def test_a_checkpoint_contains_only_trained_weights_and_all_buffers(fit, run, tmp_path):
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    model = tvr_lightning.load(run / "checkpoints" / "last.ckpt").module
    missing = model.state_dict().keys() - saved["state_dict"].keys()
    assert missing == {n for n, _ in model.encoder.named_parameters("encoder") if not n.endswith((".down", ".up"))}
    start = run.parents[2] / "start.ckpt"
    whole = fit("xpool", tmp_path / "whole", start, "--checkpoints.whole=true")
    random = fit("xpool", tmp_path / "random", None, "--trainer.limit_train_batches=1")  # saved, since in no other file
    for folder in (whole, random):
        everything = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        assert FROZEN not in everything
        assert everything["state_dict"].keys() == model.state_dict().keys()
    weights = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_small_checkpoint_can_be_indexed_and_resumed(fit, run, tmp_path):
    checkpoint = run / "checkpoints" / "last.ckpt"
    write_clip(tmp_path / "videos" / "a.mp4", 1)
    index = ["index", str(tmp_path / "videos"), "--out", str(tmp_path / "index"), "--num_workers=1"]
    assert main([*index, f"--ckpt_path={checkpoint}"]) == 0
    start = run.parents[2] / "start.ckpt"
    more = fit("xpool", tmp_path / "runs", start, f"--ckpt_path={checkpoint}", "--trainer.max_epochs=2")
    resumed = torch.load(more / "checkpoints" / "last.ckpt", weights_only=True)
    assert resumed["epoch"] == 1
    assert resumed[FROZEN] == torch.load(checkpoint, weights_only=True)[FROZEN]


def test_other_frozen_weights_are_rejected(run, tmp_path, capsys):
    other = pretrained(tmp_path / "other.ckpt", seed=2)
    checkpoint = run / "checkpoints" / "last.ckpt"
    words = ["test", f"--ckpt_path={checkpoint}", f"--model.init_args.encoder.init_args.trained_in={other}"]
    assert main(words) == 2
    assert "the frozen weights of this encoder are not those of its training" in capsys.readouterr().err
    saved = torch.load(checkpoint, weights_only=True)
    saved["hyper_parameters"]["encoder"]["init_args"]["trained_in"] = str(other)
    torch.save(saved, tmp_path / "changed.ckpt")
    with pytest.raises(CheckpointError, match=r"changed\.ckpt: .*frozen weights of this encoder are not those"):
        tvr_lightning.load(tmp_path / "changed.ckpt")
