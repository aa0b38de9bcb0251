"""Whose checkpoint is this? Parameter names by which the released codes can be told apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """The parameter names of one released code.

    Attributes:
        method: name of the method on the command line.
        title: the paper's own name for it.
        marks: beginnings of names; a checkpoint of this family has names with each of them.
    """

    method: str
    title: str
    marks: tuple[str, ...]

    def matches(self, names: Iterable[str]) -> bool:
        """Return whether each mark begins at least one of the names."""
        names = list(names)
        return all(any(name.startswith(mark) for name in names) for mark in self.marks)


FAMILIES = (
    # A family stands before those whose marks it has too.
    Family("gare", "GARE", ("psi.", "weight_fc.")),
    Family("tcmgc", "TC-MGC", ("conditional_transformer.",)),
    Family("gaid", "GAID", ("gate_fc.", "stochastic.")),
    Family("tmass", "T-MASS", ("stochastic.", "pool_frames.")),
    Family("xpool", "X-Pool", ("pool_frames.",)),
    Family("ucofia", "UCoFiA", ("visual_token_selector.",)),
    Family("xclip", "X-CLIP", ("global_mat_weight", "word_mat_weight", "frame_mat_weight")),
    Family("drl", "DRL", ("text_weight_fc.",)),
    Family("clip4clip", "CLIP4Clip", ("clip.",)),
)


def recognize(names: Iterable[str]) -> Family | None:
    """Return the family that a checkpoint with these parameter names belongs to; None where it is none of them."""
    names = list(names)
    return next((family for family in FAMILIES if family.matches(names)), None)
