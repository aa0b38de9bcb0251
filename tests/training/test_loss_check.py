"""Behind a loss that is not finite there is no step, no checkpoint and no remembered pair."""

import math
import signal
from pathlib import Path

import forked
import pytest
import torch

from tvr_lightning.cli import main
from tvr_lightning.errors import UserError
from tvr_lightning.methods.clip4clip import CLIP4Clip
from tvr_lightning.testing.small import synthetic_data
from tvr_lightning.training.loss_check import LossCheck

TESTS = Path(__file__).parent.parent
RECIPES = TESTS.parent / "recipes"
BROKEN = 3
KILLED = f"""
import signal, sys
import torch
from resume_run import strike_in
from tvr_lightning.cli import main
from tvr_lightning.methods.clip4clip import CLIP4Clip

whole = CLIP4Clip.losses

def broken(self, pairs):
    terms = whole(self, pairs)
    return {{name: term * float("nan") for name, term in terms.items()}} if self.global_step == {BROKEN} else terms

CLIP4Clip.losses = broken
strike_in({BROKEN}, signal.SIGKILL)
sys.exit(main(sys.argv[1:]))
"""


def fit(runs: Path, *more: str) -> list[str]:
    """Six steps of two pairs, each with a checkpoint."""
    return [
        "fit", f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={synthetic_data()}", "--data.init_args.batch_size=2", "--data.init_args.frames=2",
        "--data.init_args.num_workers=0", "--data.init_args.max_train_videos=12", f"--results.directory={runs}",
        "--model.init_args.encoder={class_path: TinyClipEncoder, init_args: "
        "{width: 64, text_layers: 4, vision_layers: 1}}",
        "--trainer.max_epochs=1", "--trainer.limit_val_batches=0", "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false", "--checkpoints.every_n_steps=1", *more,
    ]  # fmt: skip


def saved(runs: Path) -> dict:
    (path,) = runs.glob("*/*/checkpoints/running.ckpt")
    return torch.load(path, weights_only=True)


def finite(checkpoint: dict) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in checkpoint["state_dict"].values())


@pytest.fixture
def broken(monkeypatch) -> list[int]:
    """Break the loss of the fourth batch; returns the steps after which methods remembered pairs."""
    whole, batches, remembered = CLIP4Clip.losses, [0], []

    def losses(self, pairs):
        batches[0] += 1
        terms = whole(self, pairs)
        return {name: term * math.nan for name, term in terms.items()} if batches[0] == BROKEN + 1 else terms

    monkeypatch.setattr(CLIP4Clip, "losses", losses)
    monkeypatch.setattr(CLIP4Clip, "update_state", lambda self, pairs: remembered.append(self.global_step))
    return remembered


@pytest.mark.parametrize(
    ("more", "step"),
    [
        ((), BROKEN),
        (("--model.init_args.optimizer.gradient_cache=1",), BROKEN),
        (("--trainer.accumulate_grad_batches=2",), 1),  # the broken batch is the second of the second step
    ],
)
def test_a_step_whose_loss_is_broken_leaves_no_trace(tmp_path, broken, capsys, more, step):
    assert main(fit(tmp_path / "runs", *more)) == 1
    message = f"step {step}: the loss is not finite: info_nce = nan; the batch's videos are video"
    assert message in capsys.readouterr().err
    assert saved(tmp_path / "runs")["global_step"] == step
    assert finite(saved(tmp_path / "runs"))
    assert broken == list(range(step)), "pairs are remembered before the step counts"


def test_a_kill_between_a_broken_loss_and_its_discovery_leaves_the_step_before(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    done = forked.tvr(fit(tmp_path / "runs"), tmp_path, program=tmp_path / "killed.py")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert saved(tmp_path / "runs")["global_step"] == BROKEN
    assert finite(saved(tmp_path / "runs"))


def test_a_loss_is_checked_by_the_next_one_at_the_latest_and_so_is_the_sum_of_its_terms():
    losses = LossCheck()
    losses.start({"a": torch.tensor(1.0), "b": torch.tensor(math.inf)}, 7, ["v1", "v2"])
    with pytest.raises(UserError, match=r"step 7: .* b = inf; the batch's videos are v1, v2\."):
        losses.start({"a": torch.tensor(1.0)}, 8, ["v3"])
    losses = LossCheck()
    losses.start({"a": torch.tensor(3e38), "b": torch.tensor(3e38)}, 0, ["v"])
    with pytest.raises(UserError, match="the sum of a, b"):
        losses.finish()
