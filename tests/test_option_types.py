"""Dataclasses of options check their values."""

from dataclasses import dataclass
from typing import Literal

import pytest

from tvr_lightning.option_types import ConfigVariant, Count, Dropout, NotNegative, Options, Positive, variant


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
