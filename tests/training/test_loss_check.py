"""A loss that is not finite stops training before a step, a checkpoint, or remembered pairs contain it."""

import math
import signal

import forked
import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.errors import UserError
from tvr_lightning.methods.clip4clip import CLIP4Clip
from tvr_lightning.training.loss_check import LossCheck

BROKEN = 3
KILLED = f"""
import signal, sys
from resume_run import strike_in
from tvr_lightning.cli import main
from tvr_lightning.methods.clip4clip import CLIP4Clip

whole = CLIP4Clip.losses
CLIP4Clip.losses = lambda self, pairs: {{
    name: term * float("nan") if self.global_step == {BROKEN} else term for name, term in whole(self, pairs).items()
}}
strike_in({BROKEN}, signal.SIGKILL)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def fit(msrvtt, tmp_path):
    """Options of five steps of two pairs, each with a checkpoint."""
    options = ("--data.init_args.batch_size=2", "--trainer.max_epochs=1", "--checkpoints.every_n_steps=1")
    return ["fit", *small_run(msrvtt, tmp_path / "runs", *options, "--trainer.limit_val_batches=0")]


def check_saved(folder, step):
    """Assert that the checkpoint of a run is of a step and has finite weights."""
    (path,) = folder.glob("runs/*/*/checkpoints/running.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == step
    assert all(bool(tensor.isfinite().all()) for tensor in saved["state_dict"].values())


@pytest.mark.parametrize(
    ("more", "step"),
    [
        ((), BROKEN),
        (("--model.init_args.optimizer.gradient_cache=1",), BROKEN),
        (("--trainer.accumulate_grad_batches=2",), 1),  # the broken batch is the second of the second step
    ],
)
def test_a_broken_loss_leaves_no_step_and_no_remembered_pairs(fit, tmp_path, monkeypatch, capsys, more, step):
    whole, batches, remembered = CLIP4Clip.losses, [0], []

    def losses(self, pairs):
        batches[0] += 1
        terms = whole(self, pairs)
        return {name: term * math.nan for name, term in terms.items()} if batches[0] == BROKEN + 1 else terms

    monkeypatch.setattr(CLIP4Clip, "losses", losses)
    monkeypatch.setattr(CLIP4Clip, "update_state", lambda self, pairs: remembered.append(self.global_step))
    assert main([*fit, *more]) == 1
    message = f"step {step}: the loss is not finite: info_nce = nan; the batch's videos are video"
    assert message in capsys.readouterr().err
    check_saved(tmp_path, step)
    assert remembered == list(range(step)), "pairs are remembered before the step counts"


def test_a_kill_between_a_broken_loss_and_its_detection_keeps_the_previous_step(fit, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    done = forked.tvr(fit, tmp_path, program=tmp_path / "killed.py")
    assert done.returncode == -signal.SIGKILL, done.stderr
    check_saved(tmp_path, BROKEN)


def test_a_loss_and_the_sum_of_its_terms_are_checked_by_the_next_loss_at_the_latest():
    losses = LossCheck()
    losses.start({"a": torch.tensor(1.0), "b": torch.tensor(math.inf)}, 7, ["v1", "v2"])
    with pytest.raises(UserError, match=r"step 7: .* b = inf; the batch's videos are v1, v2\."):
        losses.start({"a": torch.tensor(1.0)}, 8, ["v3"])
    losses = LossCheck()
    losses.start({"a": torch.tensor(3e38), "b": torch.tensor(3e38)}, 0, ["v"])
    with pytest.raises(UserError, match="the sum of a, b"):
        losses.finish()
