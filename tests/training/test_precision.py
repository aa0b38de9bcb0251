"""Precisions that would train a method's layers in 16 bits are rejected before data or weights are read."""

import json
import logging

import pytest
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.training.distributed import device_warnings

MESSAGE = "trainer.precision {} stores all weights in 16 bits, but methods score in float32. Use bf16-mixed or 32-true"


@pytest.mark.parametrize(
    ("command", "recipe", "precision"),
    [
        (["fit"], "dpdv-vqa", "bf16-true"),
        (["fit"], "gare", "16-true"),
        (["fit", "--estimate"], "clip4clip", "transformer-engine"),
        (["test"], "clip4clip", "transformer-engine-float16"),
        (["profile"], "clip4clip", "bf16-true"),
    ],
)
def test_weights_of_16_bits_are_rejected(command, recipe, precision, tmp_path, capsys):
    # Without data and weights in the folder, reading any of them would be the error.
    folder = f"--out={tmp_path}" if command == ["profile"] else f"--data.init_args.root={tmp_path}"
    assert main([*command, f"--config={recipe}", folder, f"--trainer.precision={precision}"]) == 2
    assert capsys.readouterr().err == f"tvr: {MESSAGE.format(precision)}\n"


@pytest.mark.parametrize(
    ("recipe", "overlay", "found"),
    [
        ("clip4clip", "hardware/gpu1-bf16", "trainer.precision bf16-mixed"),
        ("clip4clip", "hardware/fsdp8-bf16", "strategy lightning.pytorch.strategies.ModelParallelStrategy"),
        ("clip4clip", "backbone/siglip2-b-16", "ViT-B-16-SigLIP2"),
    ],
)
def test_float16_recipes_reject_other_precisions_and_a_variant_accepts_them(recipe, overlay, found, tmp_path, capsys):
    words = ["fit", f"--config={recipe}", f"--config={overlay}", f"--data.init_args.root={tmp_path}"]
    assert main(words) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert found in message
    assert "recipes/variants/float32.yaml" in message
    main([*words, "--config=variants/float32"])
    assert "MSRVTT_data.json" in capsys.readouterr().err, "only the data are missing"


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("data.init_args.batch_size=6", "batch_size 6 cannot be divided among the 4 devices of the published run. Use"),
        ("model.init_args.gather=local", "gather: local has the same gradient on any number of devices, so released_"),
    ],
)
def test_released_devices_without_a_meaning_are_rejected(option, found, tmp_path, capsys):
    assert main(["fit", "--config=clip4clip", f"--data.init_args.root={tmp_path}", f"--{option}"]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert found in message


def test_a_table_states_that_the_training_differs_from_that_on_the_released_devices(msrvtt, tmp_path):
    options = ("--model.init_args.gather=global", "--trainer.limit_train_batches=1", "--trainer.max_epochs=1")
    assert main(["fit", *small_run(msrvtt, tmp_path, *options)]) == 0
    (results,) = tmp_path.rglob("results.json")
    (expected,) = device_warnings(4, "global", trained_on=1)
    assert expected in json.loads(results.read_text(encoding="utf-8"))["warnings"]


@pytest.mark.parametrize(
    ("devices", "gather", "trained_on", "stated"),
    [
        (None, "own-slice", 2, "on 2 devices"),
        (None, "none", 2, "on 2 devices"),
        (None, "own-slice", 1, ""),
        (4, "own-slice", 2, ""),
        (1, "global", 2, ""),
        (None, "global", 2, ""),
    ],
)
def test_only_a_gradient_that_depends_on_the_devices_is_stated(devices, gather, trained_on, stated):
    found = device_warnings(devices, gather, trained_on)
    assert len(found) == bool(stated)
    assert stated in "".join(found)


def test_float16_trains_on_a_cpu_with_a_warning(msrvtt, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = (
        "--model.init_args.encoder.init_args.encoder_precision=float16", "--trainer.limit_train_batches=1",
        "--trainer.max_epochs=1", "--model.init_args.optimizer={name: bert-adam, encoder_lr: 1e-7}",
    )  # fmt: skip
    assert main(["fit", *small_run(msrvtt, tmp_path, *options)]) == 0
    assert caplog.text.count("encoder_precision float16 is slow on a CPU") == 1
