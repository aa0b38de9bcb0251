"""Ten training steps of the released codes, made by our modules, optimizers and Trainer options."""

import itertools
import json
import zlib

import numpy
import pytest
import torch
from lightning.pytorch import Callback
from parity.training import batches_of, family, import_case, in_float64, loader, recipe_of, released_names
from quick_trainer import quick_trainer
from safetensors import safe_open

from tvr_lightning.layers.patch_selector import PatchSelector

STEPS = (1, 2, 10)
TOLERANCE = {"ucofia": 1e-4}
"""Largest difference, as a share of the norm of the authors' movement; 1e-5 for the others."""

NOISE = 1e-12
"""Norm of a movement that is rounding alone: the exact gradient of a softmax for a bias of all its inputs is 0."""


class Recorder(Callback):
    """Losses, norms of all gradients and rates of every step, and the weights after some of them."""

    def __init__(self, weights):
        self.losses, self.norms, self.rates, self.weights, self.now = [], [], [], {}, weights

    def on_after_backward(self, trainer, module):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        rates = [group["lr"] for group in optimizer.param_groups]
        self.rates.append([min(rates), max(rates)])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        if trainer.global_step in STEPS:
            self.weights[trainer.global_step] = self.now()


def signs(name, count, seed):
    raw = numpy.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(3 * count)
    return torch.from_numpy(numpy.where(raw >> 63, 1.0, -1.0).reshape(3, count))


def train(case, metadata, path, monkeypatch):
    """Train and return what was recorded, with the movements under the authors' names."""
    method, config = metadata["method"], json.loads(metadata["config"])
    half = method.endswith("_float16")
    module, names = import_case(method, case, config, path)
    if not half:
        in_float64(module)
    if family(method) == "ucofia":
        give_noise(monkeypatch)
    state = lambda: released_names(case, names, module.state_dict())  # noqa: E731
    start = state()
    recorder = Recorder(state)
    trainer = quick_trainer(
        max_epochs=1, precision="32-true" if half else "64-true", callbacks=[recorder],
        gradient_clip_val=recipe_of(family(method))["trainer"]["gradient_clip_val"],
    )  # fmt: skip
    trainer.fit(module.train(), loader(batches_of(case)))
    return recorder, {step: {n: w - start[n] for n, w in recorder.weights[step].items()} for step in STEPS}


def give_noise(monkeypatch):
    """Give UCoFiA's selector the noise of the case: that of call i comes from a generator seeded with i."""
    calls, select = itertools.count(1), PatchSelector.forward

    def forward(self, frames, patches):
        videos, count, places, _ = patches.shape
        generator = torch.Generator().manual_seed(next(calls))
        size = (videos * count, self.options.samples, places)
        noise = torch.randn(size, generator=generator, dtype=torch.float64).unflatten(0, (videos, count))
        return select(self, frames, patches, noise)

    monkeypatch.setattr(PatchSelector, "forward", forward)


def relative(ours, theirs):
    theirs = theirs.double()
    return float(((torch.tensor(ours, dtype=torch.float64) - theirs).abs() / theirs.abs().clamp(min=1e-300)).max())


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_training_steps(steps_case, monkeypatch):
    with safe_open(steps_case, "pt") as file:
        metadata = file.metadata()
        case = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    method = metadata["method"]
    recorder, moved = train(case, metadata, steps_case, monkeypatch)
    assert relative(recorder.rates, case["expected.rates"]) < 1e-12
    half = method.endswith("_float16")
    losses, norms = (
        relative(recorder.losses, case["expected.loss"]),
        relative(recorder.norms, case["expected.gradient_norm"]),
    )
    print(f"\n{steps_case}: losses within {losses:.1e}, gradient norms within {norms:.1e}")
    assert losses <= (1e-2 if half else 1e-6)
    assert norms <= (1e-2 if half else 1e-4)
    (check_float16 if half else check_float64)(case, metadata, moved, steps_case)


def expected_changes(case):
    return {k.removeprefix("expected.change."): v for k, v in case.items() if k.startswith("expected.change.")}


def check_float64(case, metadata, moved, path):
    limit = TOLERANCE.get(family(metadata["method"]), 1e-5)
    wrong, largest = [], 0.0
    for name, change in expected_changes(case).items():
        for row, step in enumerate(STEPS):
            norm = float(change[row, 0])
            ours = moved[step].get(name)
            if ours is None:
                if norm:
                    wrong.append(f"{name} is not ours, but moves")
                continue
            if norm < NOISE:
                if ours.norm() > (NOISE if change[:, 0].any() else 0):
                    wrong.append(f"{name} moves by step {step}")
                continue
            found = torch.cat(
                [ours.norm().reshape(1), signs(name, ours.numel(), int(metadata["seed"])) @ ours.flatten()]
            )
            difference = float((found - change[row]).abs().max()) / norm
            value = case.get(f"expected.value.{name}")
            if value is not None:
                theirs = value[row].double() - case[f"checkpoint.{name}"].double()
                difference = max(difference, float((ours - theirs).norm()) / norm)
            largest = max(largest, difference)
            if difference > limit:
                wrong.append(f"{name} after step {step}: {difference:.1e}")
    print(f"{path}: largest difference {largest:.1e} of the movement, over {len(expected_changes(case))} tensors")
    if wrong:
        pytest.fail(f"{path}: {len(wrong)} differ: {'; '.join(wrong[:8])}", pytrace=False)


def check_float16(case, metadata, moved, path):
    half = {name for name in expected_changes(case) if case[f"checkpoint.{name}"].dtype == torch.float16}
    changes = expected_changes(case)

    def together(step, row):
        ours = torch.stack([moved[step][name].norm() for name in half]).norm()
        theirs = torch.stack([changes[name][row, 0].double() for name in half]).norm()
        return float(ours / theirs)

    each = max(abs(float(moved[10][name].norm() / changes[name][2, 0]) - 1) for name in half if changes[name][2, 0])
    stored = [name for name in half if f"expected.value.{name}" in case]
    ours = torch.cat([moved[10][name].flatten() for name in stored])
    theirs = torch.cat(
        [(case[f"expected.value.{n}"][2].double() - case[f"checkpoint.{n}"].double()).flatten() for n in stored]
    )
    cosine = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    first, last = together(2, 1), together(10, 2)
    print(f"{path}: moved {first:.4f} and {last:.4f} times as far, each within {each:.3f}, cosine {cosine:.4f}")
    assert abs(first - 1) < 0.03
    assert abs(last - 1) < 0.03
    assert each < 0.2
    assert cosine > 0.98
