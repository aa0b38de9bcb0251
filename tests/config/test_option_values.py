"""Dataclasses of options check their values, and a wrong value gives the same sentence wherever it is given."""

import json
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import nested
from tvr_lightning.data import MSRVTT
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.methods.gare.options import Bottleneck, GapIncrement, GAREOptions, TextPooling
from tvr_lightning.option_types import ConfigVariant, Count, Dropout, NotNegative, Options, Positive, variant
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


class Shape(ConfigVariant):
    pass


class Square(Shape):
    side: Positive = 1.0


class Point(Shape):
    pass


@dataclass
class Drawing(Options):
    shape: Shape = variant(Square)
    count: Count = 1
    dropout: Dropout = 0.0
    weight: NotNegative | None = None
    color: Literal["red", "green"] = "red"
    trials: Count | Literal["mean"] = "mean"
    sides: tuple[Literal["left", "right"], ...] = ("left",)


def test_a_variant_that_is_not_given_is_a_new_default_one():
    assert Drawing().shape == Square(1.0)
    assert Drawing().shape is not Drawing().shape
    assert Drawing(shape=Point()).shape == Point()
    assert Square(2.0) != Square(1.0) != Point()
    assert repr(Square(2.0)) == "Square(side=2.0)"
    drawing = Drawing(Point(), 3, 0.5, 0.0, "green", 20, ("right", "left"))
    assert list(vars(drawing).values()) == [Point(), 3, 0.5, 0.0, "green", 20, ("right", "left")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "square"}, r"Drawing\.shape is 'square'; expected a Shape"),
        ({"dropout": float("nan")}, r"Drawing\.dropout is nan; expected a number \(at least 0 and below 1\)"),
        ({"weight": -0.5}, r"Drawing\.weight is -0\.5; expected a number \(at least 0\) or null"),
        ({"trials": "most"}, r"Drawing\.trials is 'most'; expected a whole number \(at least 1\) or mean"),
        ({"sides": ("left", "top")}, r"Drawing\.sides is 'top'; expected left or right"),
    ],
)
def test_an_invalid_value_is_refused_with_the_name_of_the_option(options, message):
    with pytest.raises(ValueError, match=message):
        Drawing(**options)
