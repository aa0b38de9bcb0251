"""A loss, gradient, or weight that is not finite stops training before a step or a checkpoint contains it."""

import math
import signal
from pathlib import Path

import forked
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from resume_run import add_callback
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.errors import UserError
from tvr_lightning.methods.clip4clip import CLIP4Clip
from tvr_lightning.runs.run import Run
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import small
from tvr_lightning.training.loss_check import LossCheck

BROKEN = 3
RECIPES = Path(__file__).parents[2] / "recipes"
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
ALONE = "--model.init_args.released_devices=null"


@pytest.fixture
def fit(msrvtt, tmp_path):
    """Options of five steps of two pairs, each with a checkpoint."""
    options = ("--data.init_args.batch_size=2", "--trainer.max_epochs=1", "--checkpoints.every_n_steps=1", ALONE)
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
    assert main([*fit, *more]) == 2
    message = f"step {step}: the loss is not finite: info_nce = nan; the batch's videos are video"
    assert message in capsys.readouterr().err
    check_saved(tmp_path, step)
    assert remembered == list(range(step)), "pairs are remembered before the step counts"


def test_a_kill_between_a_broken_loss_and_its_detection_keeps_the_previous_step(fit, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    done = forked.tvr(fit, tmp_path, program=tmp_path / "killed.py")
    assert done.returncode == -signal.SIGKILL, done.stderr
    check_saved(tmp_path, BROKEN)


@pytest.mark.parametrize("more", [(), ("--trainer.accumulate_grad_batches=2",)])
def test_a_broken_gradient_of_a_finite_loss_leaves_no_step(fit, tmp_path, monkeypatch, capsys, more):
    whole = CLIP4Clip.losses

    def losses(self, pairs):
        scale = self.temperature.logit_scale
        zero = (scale - scale.detach()).square().sqrt()  # its derivative is 0 / 0
        return whole(self, pairs) | ({"zero": zero} if self.global_step == BROKEN - 2 else {})

    monkeypatch.setattr(CLIP4Clip, "losses", losses)
    assert main([*fit, *more]) == 2
    message = "step 1: the loss is finite, but not the gradient of temperature.logit_scale. The step was not taken."
    assert message in capsys.readouterr().err
    check_saved(tmp_path, BROKEN - 2)


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(fit, tmp_path, monkeypatch, capsys):
    """A step may overflow even with a finite gradient."""

    def overflow(trainer, module, *batch):
        if trainer.global_step == BROKEN:
            module.temperature.logit_scale.data.fill_(math.inf)

    monkeypatch.setattr(Run, "build_trainer", Run.build_trainer)  # restored after the test
    add_callback(LambdaCallback(on_train_batch_end=overflow))
    assert main(fit) == 2
    assert f"step {BROKEN}: the weights temperature.logit_scale are not finite, so that no" in capsys.readouterr().err
    check_saved(tmp_path, BROKEN - 1)
    assert not list(tmp_path.rglob("last.ckpt"))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first steps are skipped
def test_a_gradient_scaler_still_skips_steps_with_an_infinite_gradient():
    """Mixed float16 finds its scale this way."""
    method, data = small(RECIPES / "clip4clip.yaml", "--data.init_args.batch_size=2", ALONE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    before = [parameter.detach().clone() for parameter in method.parameters()]
    quiet_trainer(max_steps=2, limit_val_batches=0, plugins=[precision]).fit(method, datamodule=data)
    assert 2.0**14 < scaler.get_scale() < 2.0**17
    assert all(bool(parameter.isfinite().all()) for parameter in method.parameters())
    assert not all(map(torch.equal, before, method.parameters()))


@pytest.fixture
def module():
    module = LightningModule()
    module.encoder, module.head = torch.nn.Linear(100, 90).half(), torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 6e4 if parameter.dtype == torch.float16 else 1e-30)
    return module


def test_a_gradient_whose_norm_exceeds_its_dtype_is_finite(module):
    LossCheck().finish(module, gradients=True)
    module.encoder.bias.grad[1] = math.inf
    LossCheck().finish(module)
    with pytest.raises(UserError, match=r"not the gradient of encoder\.bias\. The"):
        LossCheck().finish(module, gradients=True)


def test_all_pending_losses_and_the_sums_of_their_terms_are_checked(module):
    losses = LossCheck()
    losses.start({"a": torch.tensor(1.0), "b": torch.tensor(math.inf)}, ["v1", "v2"])
    losses.start({"a": torch.tensor(1.0)}, ["v3"])
    with pytest.raises(UserError, match=r"step 0: .* b = inf; the batch's videos are v1, v2\."):
        losses.finish(module)
    losses.finish(module)
    losses.start({"a": torch.tensor(3e38), "b": torch.tensor(3e38)}, ["v"])
    with pytest.raises(UserError, match="the sum of a, b"):
        losses.finish(module)


def test_a_loss_of_broken_weights_does_not_blame_the_videos(module):
    losses = LossCheck()
    losses.start({"a": torch.tensor(math.nan)}, ["v1"])
    module.head.weight.data[0, 0] = math.nan
    with pytest.raises(UserError, match=r"the weights head\.weight are not finite") as raised:
        losses.finish(module)
    assert "v1" not in str(raised.value)
