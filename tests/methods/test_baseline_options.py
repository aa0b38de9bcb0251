"""Options in recipes: one kind laid over another."""

import json

import pytest

from tvr_lightning.layers.aggregation import MeanAggregation, SoftmaxAggregation
from tvr_lightning.layers.patch_selector import PatchSelection
from tvr_lightning.layers.temporal import MeanP, SeqLSTM, SeqTransf
from tvr_lightning.methods.clip4clip import TightTransf
from tvr_lightning.methods.dpdv.options import AveragePatches, EveryPatch, PatchMerging, SelectedPatches
from tvr_lightning.methods.drl import DotProduct, NoDecorrelation, TokenWise
from tvr_lightning.training.options import plain_options


@pytest.mark.parametrize(
    ("name", "option", "kinds"),
    [
        ("clip4clip", "similarity_header", [MeanP(), SeqLSTM(), TightTransf()]),
        ("ncl", "similarity_header", [SeqTransf()]),
        ("xclip", "similarity_header", [SeqLSTM()]),
        ("xclip", "similarity_aggregation", [SoftmaxAggregation(), MeanAggregation()]),
        ("drl", "interaction", [TokenWise(), DotProduct()]),
        ("drl", "temporal_encoder", [MeanP(), SeqLSTM()]),
        ("drl", "decorrelation", [NoDecorrelation()]),
        (
            "dpdv",
            "patch_reduction",
            [AveragePatches(), EveryPatch(), SelectedPatches(PatchSelection(kept=2)), PatchMerging(ratio=0.75)],
        ),
    ],
)
def test_one_kind_over_another_has_its_own_options(recipe, tmp_path, name, option, kinds):
    for kind in kinds:
        section = {option: {"class_path": type(kind).__name__, "init_args": plain_options(kind)["init_args"]}}
        if option == "interaction":
            section["decorrelation"] = {"init_args": {"tokens": "matched"}}
        overlay = tmp_path / "overlay.yaml"
        overlay.write_text(json.dumps({"model": {"init_args": {"clip4clip" if name == "ncl" else name: section}}}))
        assert getattr(recipe(name, overlay)[0].options, option) == kind
