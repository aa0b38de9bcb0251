"""Roles of the options of a recipe, as their classes declare them."""

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any, get_type_hints

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.encoders import Encoder
from tvr_lightning.encoders.base import FeatureEncoder
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.option_types import NONE, Role, Roles, dataclass_in, hints_of, roles_of
from tvr_lightning.training.module import RecipeModule

FOLLOWS_DATA = {name for name, roles in roles_of(RetrievalModule).items() if Role.READING in roles}
"""Options of a method that are those of its data."""
FOLLOWS_ENCODER = hints_of(TextVideoDataModule).keys() & get_type_hints(Encoder).keys()
"""Options of the data that are attributes of the encoder."""


MACHINE_OF_TRAINER = (
    "accelerator", "default_root_dir", "devices", "enable_model_summary", "enable_progress_bar", "limit_test_batches",
    "log_every_n_steps", "logger", "num_nodes", "profiler", "strategy",
)  # fmt: skip
"""Options that Lightning declares and that have the role `MACHINE`."""


def recipe_roles(recipe: Mapping[str, Any]) -> dict[str, Roles]:
    """Return the roles of all options of a recipe by their dotted names."""
    of_run = ("checkpoints", "config", "results", *(f"trainer.{name}" for name in MACHINE_OF_TRAINER))
    found: dict[str, Roles] = dict.fromkeys(of_run, frozenset({Role.MACHINE}))
    for section in ("model", "data"):
        found |= option_roles(recipe[section], section)
    return found


def option_roles(section: Mapping[str, Any], name: str) -> dict[str, Roles]:
    """Return the roles of all options of a section with a class, by their dotted names, which start with `name`."""
    kind = resolve_name(section["class_path"])
    return dict(_roles(kind, section.get("init_args") or {}, f"{name}.init_args.", frozenset({Role.SCORE})))


def _roles(kind: type, options: Mapping[str, Any], prefix: str, outer: Roles) -> Iterator[tuple[str, Roles]]:
    """Yield the options of a class or dataclass, and those within them, which have `outer` roles unless declared."""
    declared = roles_of(kind)
    hints = hints_of(kind)
    for name, value in options.items():
        own = declared.get(name, NONE)
        roles = own if own - {Role.FILE} else own | outer
        yield f"{prefix}{name}", roles
        if not isinstance(value, Mapping):
            continue
        if "class_path" in value:
            named = resolve_name(value["class_path"])
            inner = dict(_roles(named, value.get("init_args") or {}, f"{prefix}{name}.init_args.", roles))
            yield f"{prefix}{name}.class_path", roles.union(*inner.values())
            yield from inner.items()
        if (contained := dataclass_in(hints.get(name))) is not None:
            yield from _roles(contained, value, f"{prefix}{name}.", roles)


def options_with(role: Role) -> set[str]:
    """Return the names of all options with a role, of every model, encoder, and dataset that is imported."""
    found: set[str] = set()
    kinds: list[type] = [RecipeModule, FeatureEncoder, TextVideoDataModule]
    for kind in kinds:
        found |= {name for name, roles in roles_of(kind).items() if role in roles}
        kinds += kind.__subclasses__()
    return found


def roles_of_option(roles: Mapping[str, Roles], option: str) -> Roles:
    """Return the roles of a dotted option, or of the section that contains it if it is not declared itself."""
    while option not in roles and "." in option:
        option = option.rpartition(".")[0]
    return roles.get(option) or frozenset({Role.SCORE})
