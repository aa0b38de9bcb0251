"""Variants of options in recipes: an overlay replaces one by another."""

import json

import pytest

from tvr_lightning.layers.aggregation import SoftmaxAggregation
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.layers.temporal import SeqLSTM, SeqTransf
from tvr_lightning.methods.clip4clip import TightTransf
from tvr_lightning.methods.dpdv.options import SelectedPatches
from tvr_lightning.methods.drl import ChannelDecorrelation, TokenWise
from tvr_lightning.training.options import plain_options


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("clip4clip", {"similarity_header": TightTransf()}),
        ("ncl", {"similarity_header": SeqTransf()}),
        ("xclip", {"similarity_header": SeqLSTM(), "similarity_aggregation": SoftmaxAggregation()}),
        (
            "drl",
            {
                "interaction": TokenWise(), "temporal_encoder": SeqLSTM(),
                "decorrelation": ChannelDecorrelation("matched"),
            },
        ),
        ("dpdv", {"patch_reduction": SelectedPatches(PatchSelection(kept=2))}),
    ],
)  # fmt: skip
def test_a_variant_in_an_overlay_has_only_its_own_options(recipe, tmp_path, name, variants):
    section = {
        option: {"class_path": type(kind).__name__, "init_args": plain_options(kind)["init_args"]}
        for option, kind in variants.items()
    }
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(json.dumps({"model": {"init_args": {"clip4clip" if name == "ncl" else name: section}}}))
    options = recipe(name, overlay)[0].options
    assert {option: getattr(options, option) for option in variants} == variants
