"""What a user types wrong about recipes ends in a sentence that names it; null is null wherever it is written."""

from pathlib import Path

import pytest

from tvr_lightning.recipe import RecipeCLI

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.parametrize("written", ["=null", " null", "recipe"])
@pytest.mark.parametrize("part", ["encoder", "audio_encoder"])
def test_null_weights_are_random_ones_wherever_they_are_written(part, written, tmp_path, monkeypatch):
    monkeypatch.setattr(RecipeCLI, "before_instantiate_classes", lambda cli: None)
    monkeypatch.setattr(RecipeCLI, "instantiate_classes", lambda cli: None)
    arguments = [f"--config={RECIPES / 'gaid.yaml'}", "--model.init_args.audio_encoder=WhisperEncoder"]
    option = f"--model.init_args.{part}.init_args.weights"
    if written == "recipe":
        recipe = tmp_path / "null.yaml"
        recipe.write_text(f"model: {{init_args: {{{part}: {{init_args: {{weights: null}}}}}}}}\n")
        arguments.append(f"--config={recipe}")
    else:
        arguments += f"{option}{written}".split()
    cli = RecipeCLI(args=arguments, run=False)
    assert cli.config.model.init_args[part].init_args.weights is None
