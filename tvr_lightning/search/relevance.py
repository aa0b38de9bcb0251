"""How well the best match of a query matches, by what queries get that were not meant for this index.

Cosines of unrelated texts and videos differ from model to model and from index to index, so that no number is high or
low by itself. A hundred everyday sentences tell where the scale begins: the best cosine that each finds in the index.
Some of them may well describe a video that is there; the median and the spread below it do not notice these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from tvr_lightning.search.results import Answer

THRESHOLD = 0.9
"""Relevance of a good match, unless said otherwise: better than nine of ten unrelated queries would do."""
LEAST_SPREAD = 1e-3
"""Of cosines, where an index is too small to tell."""

NOTHING = "nothing here matches well"

_SENTENCES = """
    a man mows the lawn behind a house
    children throw snowballs in a park
    a nurse bandages a wounded arm
    a fox crosses a forest path at dawn
    an orchestra tunes before a concert
    a potter shapes a bowl on a wheel
    workers lay bricks on a scaffold
    a grandmother knits by the window
    a goalkeeper saves a penalty
    a ferry leaves the harbour in fog
    a farmer milks cows in a barn
    a teenager rides a skateboard down stairs
    hot lava flows into the sea
    a carpenter saws a wooden plank
    a judge speaks in a courtroom
    bees fly around a hive
    a couple argues in a restaurant
    a helicopter lands on a roof
    a tailor measures a jacket
    commuters wait for the underground
    a magician pulls a rabbit out of a hat
    a camel walks through the desert
    a student sleeps in the library
    a firefighter climbs a ladder
    a gymnast swings on the bars
    a baker takes bread out of the oven
    a puppy chews a shoe
    rain runs down a window pane
    a rocket rises from the launch pad
    two boxers fight in a ring under lights
    a bride throws her flowers
    a mechanic changes a tyre
    a parrot repeats a word
    a girl plays the violin at home
    a bus stops in front of a school
    sheep run across a country road
    a man shaves in front of a mirror
    a tennis player serves
    someone pours coffee into a cup
    a crane lifts a container from a ship
    a family eats dinner at a table
    an elephant drinks from a river
    a politician waves to reporters
    a climber hangs from a cliff
    a woman tries on hats in a shop
    a spider builds its web
    a fisherman pulls in a net
    dancers rehearse in a studio
    a robot arm welds a car door
    a waiter carries plates through a crowd
    a sailing boat leans in the wind
    a boy feeds ducks at a pond
    a priest lights candles in a church
    an old man reads a newspaper on a bench
    a drone films a waterfall from above
    a woman does yoga on a roof
    cyclists race up a mountain
    a kitten plays with a ball of wool
    a dentist examines a patient
    a clown juggles in the street
    a news presenter talks about the weather
    a soldier marches across a square
    a jellyfish drifts through dark water
    a customer pays at the till
    a child draws with crayons
    a truck gets stuck in the mud
    an astronaut floats inside a station
    a gardener cuts a hedge
    a drummer hits the cymbals
    a snake sheds its skin
    a lawyer signs a contract
    tourists photograph a palace
    a glass falls and breaks
    a runner crosses the finishing line
    a hand writes a letter with a pen
    a lion rests under a tree
    a bartender shakes a cocktail
    a woman waters plants on a balcony
    a plumber repairs a tap
    a steam train crosses a bridge
    a skier jumps over a ramp
    friends play cards around a table
    a butterfly opens its wings
    a scientist looks through a microscope
    a wave carries a surfer
    a market seller weighs tomatoes
    a moon rises over the hills
    a referee shows a red card
    a swan swims across a lake
    a pianist plays without looking
    a man falls off a ladder
    a pan of soup boils over
    a tent stands under the stars
    a shopkeeper closes the shutters
    a squirrel hides a nut
    a boat is rowed along a canal
    a presenter opens an envelope
    a diver jumps from a high board
    a wolf howls in the snow
    a hairdresser dries long hair
"""
BACKGROUND = tuple(line.strip() for line in _SENTENCES.strip().splitlines())
"""A hundred sentences of everyday sights, each about something else."""


@dataclass(frozen=True)
class Scale:
    """Where relevance begins in one index.

    Attributes:
        middle: median, over the background, of the best cosine in the index.
        spread: standard deviation that the lower half of them would have as the half of a normal distribution.
    """

    middle: float
    spread: float

    @classmethod
    def of(cls, best: Tensor) -> Scale:
        """Return the scale of an index whose best cosines with the sentences are (B,)."""
        middle = float(best.median())
        below = middle - best[best < middle]
        spread = float(below.median()) / NormalDist().inv_cdf(0.75) if len(below) else 0.0
        return cls(middle, max(spread, LEAST_SPREAD))

    def relevance(self, cosine: float) -> float:
        """Return the share of unrelated queries whose best match would be weaker, 0 to 1, were they normal."""
        return NormalDist(self.middle, self.spread).cdf(cosine)


def best_cosines(background: Tensor, blocks: Iterable[Tensor]) -> Tensor | None:
    """Measure an index."""
    best: Tensor | None = None
    for vectors in blocks:
        here = (background @ vectors.T).amax(1)
        best = here if best is None else torch.maximum(best, here)
    return best


def judge(answer: Answer, scale: Scale | None, threshold: float | None) -> None:
    """Say how well the results of a query in words match, and keep those that match well enough.

    Args:
        answer: its results' relevance, its threshold, its notes and whether it is weak are set.
        scale: of the index; None where it was not measured, and nothing is said.
        threshold: relevance that results have at least; None keeps all.
    """
    if scale is None or not answer.results or answer.nearest is None:
        return
    for result in answer.results:
        result.relevance = scale.relevance(result.cosine)
    answer.threshold = THRESHOLD if threshold is None else threshold
    answer.weak = scale.relevance(answer.nearest) < answer.threshold
    if threshold is not None:
        answer.results = [r for r in answer.results if (r.relevance or 0.0) >= threshold]
        for rank, each in enumerate(answer.results, 1):
            each.rank = rank
    if answer.weak:
        answer.notes.append(NOTHING + ("; these are the closest" if answer.results else ""))
