"""Tuning: which weights of the encoder are trained, at which rate, under every method."""

from pathlib import Path

import pytest
import torch

from tvr_lightning.encoders import BitFit, Encoder, Frozen, Full, LastBlocks, TinyClipEncoder, Tuning
from tvr_lightning.errors import UserError
from tvr_lightning.methods import XPool
from tvr_lightning.testing.small import method_recipes, random_pairs, small
from tvr_lightning.training.optim import OptimizerConfig, parameter_groups

RECIPES = Path(__file__).parents[2] / "recipes"
OVERLAYS = {path.stem: f"--config={path}" for path in sorted((RECIPES / "tuning").glob("*.yaml"))}


def method(tuning: Tuning | None, **options: object) -> XPool:
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=4, vision_layers=4, **options)
    return XPool(encoder, tuning=tuning, frames=4, words=12)


def trained(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def rates(tuning: Tuning | None) -> dict[str, float]:
    groups = parameter_groups(method(tuning), OptimizerConfig(lr=1.0, encoder_lr=0.1))
    return {group["name"].partition(",")[0]: group["lr"] for group in groups}


def test_full_trains_what_freeze_says():
    everything = {name for name, _ in method(None).encoder.named_parameters()}
    assert trained(method(None).encoder) == trained(method(Full()).encoder) == everything
    assert trained(method(Full(), freeze="conv1").encoder) == everything - {"clip.visual.conv1.weight"}
    assert rates(Full()) == {"method": 1.0, "encoder": 0.1}


def test_frozen_trains_only_the_method():
    assert trained(method(Frozen()).encoder) == set()
    assert trained(method(Frozen())) == {n for n in trained(method(None)) if not n.startswith("encoder.")}


def test_bitfit_trains_the_biases_at_the_rate_of_the_method():
    assert trained(method(BitFit()).encoder) == {n for n in trained(method(None).encoder) if n.endswith("bias")}
    assert rates(BitFit()) == {"method": 1.0, "encoder": 0.1, "tuning": 1.0}  # encoder: the logit scale


@pytest.mark.parametrize("blocks", [1, 3, 9])
def test_last_blocks_trains_the_end_of_each_tower(blocks):
    found, allowed = trained(method(LastBlocks(blocks)).encoder), trained(method(None, freeze="clip4clip").encoder)
    for tower in ("clip.transformer", "clip.visual.transformer"):
        first = {n for n in allowed for i in range(4 - blocks) if n.startswith(f"{tower}.resblocks.{i}.")}
        assert len(first) == 12 * max(4 - blocks, 0)
        allowed -= first
    assert found == allowed
    assert {"clip.ln_final.weight", "clip.text_projection", "clip.visual.proj"} <= found
    assert rates(LastBlocks(blocks)) == {"method": 1.0, "encoder": 0.1}


def test_wrong_options_are_refused():
    with pytest.raises(UserError, match=r"LastBlocks.blocks is 0; it must be at least 1"):
        LastBlocks(0)


def test_an_encoder_without_blocks_or_biases_is_refused():
    class Bare(TinyClipEncoder):
        blocks = Encoder.blocks

    with pytest.raises(UserError, match="Bare names no transformer blocks"):
        LastBlocks(1).apply(Bare(width=64, image_size=32, text_layers=1, vision_layers=1))


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_trains_what_it_says_for_one_step(name):
    check_one_step(RECIPES / "xpool.yaml", name)


@pytest.mark.slow
@pytest.mark.parametrize("title", method_recipes(RECIPES))
def test_every_method_takes_every_overlay(title):
    for name in OVERLAYS:
        check_one_step(method_recipes(RECIPES)[title], name)


def check_one_step(recipe: Path, overlay: str) -> None:
    """Train one step with an overlay: the features start as without it, and only the trained weights change."""
    plain, _ = small(recipe)
    tuned, _ = small(recipe, OVERLAYS[overlay])
    pairs = random_pairs(tuned, 4)
    with torch.no_grad():
        for mine, other in zip(encoded(tuned.eval(), pairs), encoded(plain.eval(), pairs), strict=True):
            assert torch.equal(mine, other)
    tuned.train()
    before = {name: parameter.detach().clone() for name, parameter in tuned.named_parameters()}
    torch.stack([*tuned.losses(tuned.pair_features(pairs)).values()]).sum().backward()
    optimizer = torch.optim.SGD(parameter_groups(tuned, OptimizerConfig(lr=1.0, encoder_lr=1.0)))
    optimizer.step()
    changed = {name for name, parameter in tuned.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed <= trained(tuned)
    if overlay != "frozen":
        assert any(name.startswith("encoder.") for name in changed)


def encoded(module, pairs) -> tuple[torch.Tensor, ...]:
    found = module.pair_features(pairs)
    return found.text.sentence, found.video.frames, module.score(found.text, found.video).similarity
