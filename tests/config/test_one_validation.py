"""A wrong value of an option gives the same sentence wherever it is given."""

import json

import pytest
import torch

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import nested
from tvr_lightning.data import MSRVTT
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.methods.gare.options import Bottleneck, GapIncrement, GAREOptions, TextPooling
from tvr_lightning.training.optim import OptimizerConfig

GARE, POOLING = "model.init_args.gare", "model.init_args.gare.pooling"
WRONG = [
    (f"{GARE}.temporal_layers", GAREOptions, -1),
    (f"{GARE}.temporal_layers", GAREOptions, 1.5),
    (f"{GARE}.mask_frames", GAREOptions, "maybe"),
    (f"{GARE}.fixed_temperature", GAREOptions, 0.001),
    (f"{GARE}.bottleneck.weight", Bottleneck, -1e-3),
    (f"{GARE}.bottleneck.anchor", Bottleneck, "audio"),
    (f"{GARE}.bottleneck.prior", Bottleneck, None),
    (f"{POOLING}.init_args.temperature", TextPooling, 0),
    (f"{GARE}.increment.init_args.sign", GapIncrement, 2),
    ("model.init_args.evaluation.recall", EvaluationConfig, [1, "five"]),
    ("model.init_args.evaluation.audit", EvaluationConfig, 2),
    ("model.init_args.optimizer.betas", OptimizerConfig, [0.9, 1.5]),
    ("data.init_args.words", MSRVTT, 2),
    ("data.init_args.sampling", MSRVTT, "middle"),
]
RECIPES = ["gare", "model: {init_args: {gare: {pooling: TextPooling, increment: GapIncrement}}}"]


@pytest.fixture(scope="module")
def saved():
    plain = Recipe.parse([*RECIPES, "fixture"]).plain()
    sections = {"hyper_parameters": plain["model"], "datamodule_hyper_parameters": plain["data"]}
    return {name: {"_class_path": value["class_path"], **value["init_args"]} for name, value in sections.items()}


@pytest.mark.parametrize(("option", "kind", "value"), WRONG)
def test_a_wrong_value_gives_the_same_sentence_in_four_places(option, kind, value, saved, tmp_path):
    checkpoint = {"state_dict": {}, **json.loads(json.dumps(saved))}
    section, _, *names, last = option.split(".")
    part = checkpoint["hyper_parameters" if section == "model" else "datamodule_hyper_parameters"]
    for name in names:
        part[name] = part[name] or {}
        part = part[name]
    part[last] = value
    torch.save(checkpoint, tmp_path / "wrong.ckpt")
    needed = {"split": "9k"} if kind is MSRVTT else {}
    ways = [
        lambda: Recipe.parse(RECIPES, [f"--{option}={json.dumps(value).strip(chr(34))}"]),
        lambda: Recipe.parse([*RECIPES, json.dumps(nested(option, value))]),
        lambda: Recipe.parse([], checkpoint=tmp_path / "wrong.ckpt"),
        lambda: kind(**needed, **{last: value}),
    ]
    sentences = set()
    for way in ways:
        with pytest.raises(UserError, match=rf"{last} is .*; expected ") as refused:
            way()
        sentences.add(str(refused.value).rpartition(f"{last} is ")[2])
    assert len(sentences) == 1
