"""Help and options of this project's commands, read from their source code, so that showing them imports no torch."""

from __future__ import annotations

import argparse
import ast
import copy
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tvr_lightning.places import Place
from tvr_lightning.ranges import Range

PACKAGE = Path(__file__).parent.parent

LONGEST_CHOICES = 60
"""Maximum number of characters of choices shown next to an option, since argparse does not wrap them."""


@dataclass(frozen=True)
class Parameter:
    """Parameter of a command's function.

    Attributes:
        name: Name in Python.
        kind: Type in the source code, with named choices replaced by their values.
        default: Default in the source code, or None if a value is required.
        help: Description in the docstring.
        limits: Ranges of numbers and requirements of paths in the annotation.
    """

    name: str
    kind: str
    default: str | None
    help: str
    limits: tuple[Range | Place, ...] = ()

    @property
    def option(self) -> str:
        """Option on the command line, without the underscore after a Python keyword."""
        return f"--{self.name.rstrip('_')}"

    @property
    def expected(self) -> str:
        """Description of the expected value."""
        shown = _shown(self.kind)
        if "{" in shown:
            *others, last = shown.strip("[{}]").split(",")
            return f"{', '.join(others)} or {last}"
        return {"N": "a whole number", "X": "a number", "PATH": "a path", "TEXT": "text"}.get(shown, shown)

    @property
    def many(self) -> bool:
        """True if the parameter takes several values."""
        return self.kind.startswith(("list[", "Sequence["))

    @property
    def item(self) -> str:
        """Type of one value, without None."""
        kind = self.kind.removesuffix(" | None")
        return kind.partition("[")[2].removesuffix("]") if self.many else kind

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values; empty if the parameter is not a choice."""
        kind = self.item.partition(" | ")[0]
        return tuple(map(str, ast.literal_eval(f"[{kind[8:-1]}]"))) if kind.startswith("Literal[") else ()

    @property
    def switch(self) -> bool:
        """True if the option takes no value."""
        return self.kind == "bool" and self.default == "False"


@dataclass(frozen=True)
class Written:
    """Docstring and parameters of a command's function."""

    description: str
    parameters: tuple[Parameter, ...]


def verb_help(words: str, run: str, positional: tuple[str, ...], repeated: tuple[str, ...], epilog: str | None) -> str:
    """Return the help of a command.

    Args:
        words: Name of the command, such as `data synth`.
        run: Function of the command, as "module:function".
        positional: Parameters given without `--name`.
        repeated: Options that can be repeated, in addition to `--config`.
        epilog: Last paragraph.
    """
    written = read_verb(run)
    parser = argparse.ArgumentParser(f"tvr {words}", description=written.description, epilog=epilog)
    for parameter in written.parameters:
        if parameter.name == "overrides":
            continue
        said, kind = without_period(parameter.help), _shown(parameter.kind)
        if parameter.name in positional:
            count = ("*" if parameter.default is not None else "+") if parameter.many else None
            named = any(re.search(rf"\b{re.escape(choice)}\b", said) for choice in parameter.choices)
            choices = f": {kind[1:-1].replace(',', ', ')}" if kind.startswith("{") and not named else ""
            parser.add_argument(parameter.name, nargs=count, help=_escaped(said + choices))
            continue
        if parameter.switch:
            parser.add_argument(parameter.option, action="store_true", help=_escaped(said))
            continue
        if parameter.name in ("config", *repeated) and "repeated" not in said:
            said = f"{said}; can be repeated"
        default = [] if parameter.default in (None, "None", "()", "") else [f"default: {parameter.default}"]
        if more := [*default, *(limit.words for limit in parameter.limits if isinstance(limit, Range))]:
            said = f"{said} ({', '.join(more)})"
        needed = parameter.default is None
        if kind.startswith("{") and len(kind) > LONGEST_CHOICES:
            said, kind = f"{said}; one of {kind[1:-1].replace(',', ', ')}", "NAME"
        parser.add_argument(parameter.option, metavar=kind, help=_escaped(said), required=needed)
    return parser.format_help()


def option_names(run: str, positional: tuple[str, ...]) -> list[str]:
    """Return the options of a command, including `--help` and excluding `overrides`."""
    found = [p.option for p in read_verb(run).parameters if p.name not in (*positional, "overrides")]
    return ["--help", *found]


def read_verb(run: str) -> Written:
    """Read the function of a command from its source file, without importing it."""
    import docstring_parser

    module, name = run.split(":")
    tree = _tree(module)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    said = docstring_parser.parse(ast.get_docstring(function) or "")
    helps = {item.arg_name: " ".join((item.description or "").split()) for item in said.params}
    arguments = function.args.args
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + list(function.args.defaults)
    parameters = []
    for argument, default in zip(arguments, defaults, strict=True):
        assert argument.annotation is not None
        kind, limits = _parted(_resolved(argument.annotation, module))
        written = None if default is None else _value(default, module)
        parameters.append(Parameter(argument.arg, kind, written, helps.get(argument.arg, ""), limits))
    return Written(said.short_description or "", tuple(parameters))


def _parted(annotation: ast.expr) -> tuple[str, tuple[Range | Place, ...]]:
    """Return a type without its annotations, and the annotations."""
    limits: list[Range | Place] = []

    class Part(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            self.generic_visit(node)
            if getattr(node.value, "id", "") != "Annotated" or not isinstance(node.slice, ast.Tuple):
                return node
            inner, *rest = node.slice.elts
            for call in rest:
                assert isinstance(call, ast.Call)
                assert isinstance(call.func, ast.Name)
                made = {"Range": Range, "Place": Place}[call.func.id]
                values = [ast.literal_eval(argument) for argument in call.args]
                limits.append(made(*values, **{str(item.arg): ast.literal_eval(item.value) for item in call.keywords}))
            return inner

    return ast.unparse(Part().visit(annotation)), tuple(limits)


def _value(default: ast.expr, module: str) -> str:
    """Return a default as on the command line: `Path("index")` becomes index."""
    found = _resolved(default, module)
    if isinstance(found, ast.Call) and found.args:
        found = found.args[0]
    return str(found.value) if isinstance(found, ast.Constant) else ast.unparse(found)


def _resolved(expression: ast.expr, module: str) -> ast.expr:
    """Return an expression in which names of this package's constants and choices are replaced by their values."""

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return _meaning(node.id, module) or node

    return Replace().visit(copy.deepcopy(expression))


def _meaning(name: str, module: str) -> ast.expr | None:
    """Return the constant or Literal that a module of this package assigns to a name, or None."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == [name]:
            told = getattr(node.value.value, "id", "") if isinstance(node.value, ast.Subscript) else ""
            if told == "Annotated":
                return _resolved(node.value, module)
            return node.value if told == "Literal" or isinstance(node.value, ast.Constant) else None
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tvr_lightning."):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _meaning(alias.name, str(node.module))
    return None


@lru_cache
def _tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _shown(kind: str) -> str:
    """Return a type as shown in the help: the choices, or a word in capitals."""
    kind = kind.partition(" | ")[0]  # the rest is None or a list of the same type
    if kind.startswith("Literal["):
        return "{" + ",".join(str(choice) for choice in ast.literal_eval(f"[{kind[8:-1]}]")) + "}"
    if kind.startswith("list[Literal["):
        return f"[{_shown(kind[5:-1])}]"
    names = {"int": "N", "float": "X", "str": "TEXT", "list[Path]": "PATH", "list[str]": "TEXT", "list[int]": "[N,N]"}
    return names.get(kind, kind.upper())


def without_period(text: str) -> str:
    """Return a help text without its final period, so that text can be appended; an ellipsis stays."""
    return text if text.endswith("..") else text.removesuffix(".")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
