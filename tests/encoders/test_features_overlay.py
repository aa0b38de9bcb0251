"""recipes/features.yaml freezes the encoder of a recipe and reads features from a store."""

from pathlib import Path

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.extract.plan import ExtractOptions, source_of_data
from tvr_lightning.extract.run import extract

RECIPES = Path(__file__).parent.parent.parent / "recipes"
LAYERS = [RECIPES / "clip4clip.yaml", RECIPES / "fixture.yaml"]


def test_the_overlay_freezes_the_encoder_and_reads_the_store(msrvtt, tmp_path):
    small = [f"--model.init_args.encoder.init_args.{o}" for o in ("width=64", "image_size=32", "vision_layers=1")]
    options = ["frames=2", "words=8", "batch_size=2", "num_workers=0", f"root={msrvtt}"]
    overrides = [*small, "--model.init_args.frames=2", *(f"--data.init_args.{option}" for option in options)]
    augmented = "--data.init_args.augmentation=crop-flip"
    module, data = from_recipe(LAYERS, [*overrides, augmented])
    assert any(parameter.requires_grad for parameter in module.encoder.parameters())
    extract(source_of_data(data), module.encoder, None, ExtractOptions(str(tmp_path / "store"), num_workers=0))
    store = f"--data.init_args.features={tmp_path / 'store'}"
    frozen, stored = from_recipe([*LAYERS, RECIPES / "features.yaml"], [*overrides, store])
    assert not any(parameter.requires_grad for parameter in frozen.encoder.parameters())
    assert any(parameter.requires_grad for parameter in frozen.parameters())
    assert frozen.encoder.fingerprint() == module.encoder.fingerprint()
    assert stored.augmentation == "none"
    stored.setup("fit")
    assert stored.store is not None
    assert next(iter(stored.train_dataloader())).video.video.frames.shape == (2, 2, 64)
