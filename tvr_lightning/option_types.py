"""Options that validate themselves: numbers in a range, words from a list, and variants with their own options.

An options dataclass extends `Options`, and its types define the valid values, as in `weight: Positive = 1.0`.
"""

import dataclasses
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from tvr_lightning.errors import UserError

K = TypeVar("K", bound="ConfigVariant")
KINDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "null": ("null", (types.NoneType,)), "boolean": ("true or false", (bool,)), "integer": ("a whole number", (int,)),
    "number": ("a number", (float, int)), "string": ("text", (str,)), "array": ("a list", (list, tuple)),
    "object": ("named options", (dict,)),
}  # fmt: skip
"""Types of JSON: in words, and as types of Python."""
BOUNDS = {"above": "exclusiveMinimum", "at_least": "minimum", "below": "exclusiveMaximum", "at_most": "maximum"}
COMPARISONS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


@dataclass(frozen=True)
class Range:
    """Range of valid numbers; None means no bound."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds by name."""
        return {name: bound for name, bound in vars(self).items() if bound is not None}

    def __contains__(self, value: float) -> bool:
        return all(COMPARISONS[name](value, bound) for name, bound in self.bounds.items())

    def __str__(self) -> str:
        """Return the range in words, such as `at least 0 and below 1`."""
        return " and ".join(f"{name.replace('_', ' ')} {bound:g}" for name, bound in self.bounds.items())


class Role(Enum):
    """Effect of an option of a recipe, as declared in its annotation. An option without a role affects scores.

    The roles of a section, such as `optimizer`, apply to all its options without their own. Roles decide which options
    may change when a checkpoint is tested or a run is resumed, and which ones are carried over to other data or
    published.
    """

    SCORE = "scores of a trained method"
    TRAINING = "training only"
    EVALUATION = "results made of the scores"
    READING = "reading of videos and texts, which must be as in training on the same dataset"
    DATASET = "one dataset, so that others do not inherit it"
    MACHINE = "speed and memory"
    FILE = "in addition, a file or folder that other machines do not have"


Roles = frozenset[Role]
NONE: Roles = frozenset()
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Dropout = Annotated[float, Range(at_least=0, below=1), Role.TRAINING]
Share = Annotated[float, Range(at_least=0, at_most=1)]
Count = Annotated[int, Range(at_least=1)]
Layers = Annotated[int, Range(at_least=0)]
Workers = Annotated[int, Range(at_least=0), Role.MACHINE]
WeightFile = Annotated[str | None, Role.FILE]
SupportWeight = Annotated[float, Range(at_least=0), Role.TRAINING]

DatasetName = Literal["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]
StoreDtype = Literal["float32", "float16"]
FeaturePart = Literal["text", "frames", "patches", "audio", "pixels"]
ExtractEngine = Literal["local", "ray"]
CopiesLike = Literal["clip4clip"]
"""Authors of the copies. CLIP4Clip: 3 frames per second, about 0.4 s late, with small frames enlarged to 224 px."""
CAPTION_MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
CAPTION_PROMPT = "These frames are one part of a video. Describe in one sentence what happens in them."
FrameSampling = Literal[
    "one-fps-uniform", "segment-centers", "segment-random", "head", "tail", "int-fps-uniform", "round-fps-uniform",
    "round-fps-filled", "container-segments", "uniform-floor", "uniform-round", "one-fps-even",
]  # fmt: skip
"""Rules for sampling F frames of a clip, as in docs/protocols.md; those named after released code count its frames."""


def in_words(names: Sequence[str]) -> str:
    """Return `a`, `a or b`, or `a, b, or c`."""
    *others, last = names
    return f"{', '.join(others)}{',' if len(others) > 1 else ''} or {last}" if others else last


@dataclass
class Options:
    """Base of options dataclasses, which `check` themselves. Recipes need no `class_path` for a dataclass."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "variant" in field.metadata and getattr(self, field.name) is None:
                setattr(self, field.name, field.metadata["variant"]())
        check(self)


@dataclass_transform()
class ConfigVariant:
    """Variant of an option with its own options; recipes select it by `class_path`. Subclasses are dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(cls)

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # type: ignore[arg-type]


def variant(default: type[K]) -> K:
    """Return the default of an option with variants; the parser of recipes cannot serialize an instance."""
    return dataclasses.field(default=None, metadata={"variant": default})  # type: ignore[return-value]


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the types of the arguments of a class and its bases by name, with annotations such as `Range`."""
    found: dict[str, Any] = {}
    for each in reversed(inspect.getmro(kind)):
        with suppress(NameError, TypeError):  # names that a class imports only for type checkers
            found |= get_type_hints(each.__init__, include_extras=True)  # type: ignore[misc]
    return found


def parts_of(hint: Any) -> Iterator[Any]:
    """Yield a type and all types and notes within it, such as `int` and the `Range` of a `Count`."""
    yield hint
    for part in get_args(hint):
        yield from parts_of(part)


def dataclass_in(hint: Any) -> type | None:
    """Return the options dataclass that a type consists of or contains, or None."""
    kinds = (part for part in parts_of(hint) if isinstance(part, type) and not issubclass(part, ConfigVariant))
    return next(filter(dataclasses.is_dataclass, kinds), None)


def roles_of(kind: type) -> dict[str, Roles]:
    """Return the declared roles of the arguments of a class; a base class declares them for its subclasses."""
    found: dict[str, Roles] = {}
    for each in reversed(inspect.getmro(kind)):
        for name, hint in hints_of(each).items():
            found[name] = frozenset(part for part in parts_of(hint) if isinstance(part, Role)) or found.get(name, NONE)
    return found


def _instance(hint: Any) -> dict[str, Any]:
    return {"class": hint} if isinstance(hint, type) and hint is not object else {}


def check(options: object, /, **elsewhere: Any) -> None:
    """Raise a UserError if a value is not allowed by the types of a constructor.

    `options` stores the arguments of its constructor under their names, except those in `elsewhere`.
    """
    values = vars(options) | elsewhere
    for name, hint in hints_of(type(options)).items():  # type: ignore[arg-type]
        if name in values:
            check_value(f"{type(options).__name__}.{name}", schema_of(hint), values[name])


def schema_of(hint: Any, of_class: Callable[[Any], dict[str, Any]] = _instance) -> dict[str, Any]:
    """Return the values that a type allows as a JSON schema; `of_class` returns that of a class or an unusual type."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        node = schema_of(arguments[0], of_class)
        ranges = [note for note in arguments[1:] if isinstance(note, Range)]
        for each in alternatives(node) if ranges else ():
            if each.get("type") in ("integer", "number"):
                each |= {BOUNDS[name]: bound for name, bound in ranges[0].bounds.items()}
        return node
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(argument, of_class) for argument in arguments]}
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": schema_of(arguments[0], of_class)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [schema_of(argument, of_class) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], of_class)}
    kind = next((kind for kind, (_, types) in KINDS.items() if hint in types), None)
    return {"type": kind} if kind else of_class(hint)


def alternatives(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the alternatives of a JSON schema, or itself if it has none."""
    if "anyOf" not in node:
        yield node
    for each in node.get("anyOf", ()):
        yield from alternatives(each)


def check_value(where: str, node: dict[str, Any], value: Any) -> None:
    """Raise a UserError that begins with the name of an option if a JSON schema does not allow its value."""
    if (found := _mismatch(node, value)) is not None:
        wrong, expected = found
        raise UserError(f"{where} is {'null' if wrong is None else repr(wrong)}; expected {expected}")


def _mismatch(node: dict[str, Any], value: Any) -> tuple[Any, str] | None:
    """Return the part of a value that a schema does not allow, and what it allows in words."""
    inside = None
    for each in alternatives(node):
        if _has_type(each, value):
            wrong = [found for inner, item in _parts(each, value) if (found := _mismatch(inner, item)) is not None]
            if not wrong:
                return None
            inside = inside or wrong[0]
    words = dict.fromkeys(word for each in alternatives(node) for word in _words(each))
    return inside or (value, in_words(sorted(words, key=lambda word: word == "null")))


def _has_type(node: dict[str, Any], value: Any) -> bool:
    if "enum" in node:
        return value in node["enum"]
    if "class" in node:
        return isinstance(value, node["class"])
    kind = node.get("type")
    if kind is None:
        return "$ref" not in node
    if not isinstance(value, KINDS[kind][1]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    return kind not in ("integer", "number") or value in _range(node)


def _parts(node: dict[str, Any], value: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the items of a list or the values of a dictionary with their schemas."""
    if isinstance(value, list | tuple):
        yield from zip(node.get("prefixItems") or [node.get("items") or {}] * len(value), value, strict=False)
    elif isinstance(value, dict):
        yield from ((node.get("additionalProperties") or {}, item) for item in value.values())


def _range(node: dict[str, Any]) -> Range:
    return Range(**{name: node.get(key) for name, key in BOUNDS.items()})


def _words(node: dict[str, Any]) -> list[str]:
    if "enum" in node:
        return [str(choice) for choice in node["enum"]]
    if "class" in node or "$ref" in node:
        name = node["class"].__name__ if "class" in node else node["$ref"].rpartition("/")[2]
        return [f"{'an' if name[0] in 'AEIO' else 'a'} {name}"]
    name = KINDS[node["type"]][0]
    limits = str(_range(node))
    return [f"{name} ({limits})" if limits else name]
