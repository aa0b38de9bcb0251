"""recipes/features.yaml freezes the encoder of a recipe and reads the store, whatever the recipe said before."""

from pathlib import Path

import pytest

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.extract.plan import ExtractOptions, source_of_data
from tvr_lightning.extract.run import extract

RECIPES = Path(__file__).parent.parent.parent / "recipes"
LAYERS = [RECIPES / "clip4clip.yaml", RECIPES / "fixture.yaml"]


@pytest.fixture
def overrides(msrvtt):
    small = "--model.init_args.encoder.init_args={width: 64, image_size: 32, text_layers: 4, vision_layers: 1}"
    rest = ["frames=2", "words=8", "batch_size=2", "num_workers=0", "augmentation=crop-flip", f"root={msrvtt}"]
    return [small, "--model.init_args.frames=2", *(f"--data.init_args.{option}" for option in rest)]


def test_the_overlay_turns_a_recipe_into_its_frozen_form(overrides, tmp_path):
    module, data = from_recipe(LAYERS, overrides)
    assert any(parameter.requires_grad for parameter in module.encoder.parameters())
    extract(source_of_data(data), module.encoder, None, ExtractOptions(str(tmp_path / "store"), num_workers=0))
    head = [option for option in overrides if "augmentation" not in option and "encoder" not in option]
    small = [f"--model.init_args.encoder.init_args.{o}" for o in ("width=64", "image_size=32", "vision_layers=1")]
    store = f"--data.init_args.features={tmp_path / 'store'}"
    frozen, stored = from_recipe([*LAYERS, RECIPES / "features.yaml"], [*head, *small, store])
    assert not any(parameter.requires_grad for parameter in frozen.encoder.parameters())
    assert any(parameter.requires_grad for parameter in frozen.parameters())
    assert frozen.encoder.fingerprint() == module.encoder.fingerprint()
    assert stored.augmentation == "none"
    stored.setup("fit")
    assert stored.store is not None
    assert next(iter(stored.train_dataloader())).video.video.frames.shape == (2, 2, 64)
