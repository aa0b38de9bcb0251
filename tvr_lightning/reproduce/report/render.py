"""Templates of the report; whatever is put into one is escaped, unless a template made it."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def _environment() -> Environment:
    loader = PackageLoader("tvr_lightning.reproduce.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(template: str, **values: Any) -> Markup:
    """Return a template of this package, filled in.

    Args:
        template: name of its file in `templates`.
        values: that it names.
    """
    return Markup(_environment().get_template(template).render(values))
