"""The loss of docs/adding-a-method.md: values, options, ten training steps, and the audit."""

import json
from pathlib import Path

import pytest
import torch
from examples.dual_softmax_loss import DualSoftmaxLoss, revised

from tvr_lightning.cli import main
from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.synthetic import synthesize
from tvr_lightning.testing import MethodTestSuite

HERE = Path(__file__).parent
FIXTURE = HERE.parent.parent / "recipes" / "fixture.yaml"


def test_an_even_prior_changes_nothing():
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for queries in (0, 1):
        torch.testing.assert_close(revised(logits, queries, temperature=1e9), logits)


def test_a_candidate_that_others_ask_for_more_counts_less():
    logits = torch.tensor([[2.0, 1.0], [5.0, 1.0]])
    lowered = revised(logits, queries=0, temperature=1.0)
    assert lowered[0, 0] < logits[0, 0]
    assert lowered[1, 0] > logits[1, 0]
    assert torch.equal(lowered[:, 1], logits[:, 1])


def test_a_temperature_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="prior_temperature is 0"):
        DualSoftmaxLoss(TinyClipEncoder(64), prior_temperature=0)


class TestDualSoftmaxLoss(MethodTestSuite):
    """Tests that every method must pass."""

    recipe = HERE / "dual_softmax_loss.yaml"


def test_it_trains_ten_steps_and_searches(tmp_path, capsys):
    synthesize("msrvtt", tmp_path, 20, 0, workers=1, progress=False)
    options = [
        f"--config={HERE / 'dual_softmax_loss.yaml'}", f"--config={FIXTURE}", f"--data.init_args.root={tmp_path}",
        "--data.init_args.batch_size=8", "--data.init_args.num_workers=0", "--data.init_args.frames=2",
        "--model.init_args.encoder.init_args.width=64", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1",
    ]  # fmt: skip
    steps = ["--trainer.max_epochs=10", "--trainer.max_steps=10", "--trainer.check_val_every_n_epoch=5"]
    assert main(["fit", *options, *steps, f"--results.directory={tmp_path / 'runs'}"]) == 0
    (run,) = (tmp_path / "runs").glob("*/version_0")
    assert json.loads((run / "results.json").read_text())["audit"]["passed"] is True
    videos, out = sorted(map(str, (tmp_path / "msrvtt" / "videos").iterdir()))[:3], str(tmp_path / "index")
    trust = ["--trust", "examples.dual_softmax_loss"]
    index = ["index", *videos, "--out", out, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    assert main(index) == 1
    assert "--trust examples.dual_softmax_loss" in capsys.readouterr().err
    assert main([*index, *trust]) == 0
    capsys.readouterr()
    assert main(["search", "a red ball", "--index", out, "--top", "1", *trust]) == 0
    assert Path(videos[0]).parent.name in capsys.readouterr().out
