"""The tuning of docs/adding-a-method.md: what it trains under a method, and its start without effect."""

from pathlib import Path

import torch

from tvr_lightning.testing import random_pairs, small

RECIPE = Path(__file__).parents[2] / "recipes" / "tcmgc.yaml"


def test_only_the_factors_are_trained_and_the_scores_start_unchanged():
    scores = []
    for tuning in ("FineTuning", "examples.scaled_outputs.ScaledOutputs"):
        method = small(RECIPE, f"--model.init_args.tuning={tuning}")[0].eval()
        with torch.no_grad():
            pairs = method.pair_features(random_pairs(method, 4))
            scores.append(method.score(pairs.text, pairs.video).similarity)
    torch.testing.assert_close(*scores)
    trained = [name for name, parameter in method.encoder.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(name.endswith("factors") for name in trained)
