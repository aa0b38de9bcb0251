"""Ten training steps of the released codes, made by our modules, optimizers and Trainer options."""

import itertools
import json
import zlib

import numpy
import pytest
import torch
from lightning.pytorch import Callback
from parity.case import read
from parity.training import NAMES, batches_of, family, import_case, media_of, part_of, recipe_of, released_names
from torch.utils.data import DataLoader

from tvr_lightning.layers.patch_selector import PatchSelector
from tvr_lightning.testing.processes import quiet_trainer

STEPS = (1, 2, 10)
TOLERANCE = {"ucofia": 1e-4}
"""Largest difference, as a share of the norm of the authors' movement; 1e-5 for the others."""

NOISE = 1e-12
"""Norm of a movement that is rounding alone: the exact gradient of a softmax for a bias of all its inputs is 0."""


class Recorder(Callback):
    """Losses, norms of all gradients and rates of every step, and the weights after some of them."""

    def __init__(self, weights):
        self.losses, self.norms, self.rates, self.weights, self.now = [], [], [], {}, weights

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
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
    method = metadata["method"]
    module = import_case(method, case, json.loads(metadata["config"]), path)
    if family(method) == "ucofia":
        give_noise(monkeypatch)

    def state():
        return released_names(case, NAMES[family(method)], module.state_dict())

    start, recorder = state(), Recorder(state)
    trainer = quiet_trainer(
        max_epochs=1, precision="32-true" if method.endswith("_float16") else "64-true", callbacks=[recorder],
        gradient_clip_val=recipe_of(family(method))["trainer"]["gradient_clip_val"],
    )  # fmt: skip
    trainer.fit(module.train(), DataLoader(list(batches_of(case)), batch_size=None))
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
    case, metadata = read(steps_case)
    recorder, moved = train(case, metadata, steps_case, monkeypatch)
    assert relative(recorder.rates, case["expected.rates"]) < 1e-12
    half = metadata["method"].endswith("_float16")
    assert relative(recorder.losses, case["expected.loss"]) <= (1e-2 if half else 1e-6)
    assert relative(recorder.norms, case["expected.gradient_norm"]) <= (1e-2 if half else 1e-4)
    (check_float16 if half else check_float64)(case, metadata, moved, steps_case)


def movement_of(case, name, row):
    """Return the authors' movement of a tensor whose values the case has."""
    return case[f"expected.value.{name}"][row].double() - case[f"checkpoint.{name}"].double()


def check_float64(case, metadata, moved, path):
    limit = TOLERANCE.get(family(metadata["method"]), 1e-5)
    wrong, changes = [], part_of(case, "expected.change.")
    for (name, change), (row, step) in itertools.product(changes.items(), enumerate(STEPS)):
        norm, ours = float(change[row, 0]), moved[step].get(name)
        if ours is None:
            if norm:
                wrong.append(f"{name} is not ours, but moves")
            continue
        if norm < NOISE:
            if ours.norm() > (NOISE if change[:, 0].any() else 0):
                wrong.append(f"{name} moves by step {step}")
            continue
        found = torch.cat([ours.norm().reshape(1), signs(name, ours.numel(), int(metadata["seed"])) @ ours.flatten()])
        difference = float((found - change[row]).abs().max()) / norm
        if f"expected.value.{name}" in case:
            difference = max(difference, float((ours - movement_of(case, name, row)).norm()) / norm)
        if difference > limit:
            wrong.append(f"{name} after step {step}: {difference:.1e}")
    print(f"{path}: {len(wrong)} differ, of {len(changes)} tensors after {STEPS} steps")
    if wrong:
        pytest.fail(f"{path}: {len(wrong)} differ: {'; '.join(wrong[:8])}", pytrace=False)


def check_float16(case, metadata, moved, path):
    changes = part_of(case, "expected.change.")
    half = {name for name in changes if case[f"checkpoint.{name}"].dtype == torch.float16}

    def together(step, row):
        ours = torch.stack([moved[step][name].norm() for name in half]).norm()
        theirs = torch.stack([changes[name][row, 0].double() for name in half]).norm()
        return float(ours / theirs)

    each = max(abs(float(moved[10][name].norm() / changes[name][2, 0]) - 1) for name in half if changes[name][2, 0])
    stored = [name for name in half if f"expected.value.{name}" in case]
    ours = torch.cat([moved[10][name].flatten() for name in stored])
    theirs = torch.cat([movement_of(case, name, 2).flatten() for name in stored])
    cosine = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    print(f"{path}: each moved as far within {each:.3f}, cosine {cosine:.4f}, over {len(half)} tensors")
    assert abs(together(2, 1) - 1) < 0.03
    assert abs(together(10, 2) - 1) < 0.03
    assert each < 0.2
    assert cosine > 0.98


def test_padded_frames(padded_case):
    """Videos that lack frames are padded as the released loaders pad them."""
    case, metadata = read(padded_case)
    method = metadata["method"]
    module = import_case(method, case, json.loads(metadata["config"]), padded_case).eval()
    media = media_of(case["input.pixels"], case["input.video_mask"])
    with torch.no_grad():
        text = module.encode_text(module.encoder.encode_tokens(case["input.input_ids"].long(), case["input.text_mask"]))
        video = module.encode_video(module.encoder.encode_video(media, patches=module.needs_patches))
        similarity = module.score(text, video).similarity
        if method != "gare":  # a cosine; other scores have the factor exp(logit_scale) of about 100
            similarity = module.logits(similarity)
    difference = float((similarity - case["expected.similarity"].double()).abs().max())
    assert difference <= (1e-6 if method == "gare" else 1e-4)
