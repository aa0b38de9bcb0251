"""Parameter names that identify the released code of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Parameter names of one released code.

    Attributes:
        method: Name of the method on the command line.
        title: Name of the method in the paper.
        marks: Name prefixes; a checkpoint of this family has a name for each of them.
    """

    method: str
    title: str
    marks: tuple[str, ...]

    def matches(self, names: Iterable[str]) -> bool:
        """Return whether each mark is the prefix of at least one name."""
        names = list(names)
        return all(any(name.startswith(mark) for name in names) for mark in self.marks)


FAMILIES = (
    # A family comes before families with a subset of its marks.
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
    """Return the family of a checkpoint with these parameter names, or None if it is unknown."""
    names = list(names)
    return next((family for family in FAMILIES if family.matches(names)), None)
