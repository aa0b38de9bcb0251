"""Checks of a command's numbers, choices, and paths before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvr_lightning.cli.verb_help import Parameter, without_period
from tvr_lightning.errors import UserError
from tvr_lightning.ranges import Range


class PlaceError(UserError):
    """The path does not exist, or is not what the command expects."""


def refused(words: Sequence[str], parameters: Sequence[Parameter], positional: Sequence[str]) -> str | None:
    """Return a sentence about the first invalid value, or None if all are valid.

    Args:
        words: Arguments after the command.
        parameters: Parameters of the command.
        positional: Names of the parameters that are given without an option.

    Raises:
        PlaceError: A path is not what the command expects.
    """
    given = list(_given(words, parameters, positional))
    single = [parameter.name for parameter, _ in given if not parameter.many]
    if twice := next((name for name in single if single.count(name) > 1), None):
        return f"--{twice} is given more than once. Give it once."
    for parameter, value in given:
        if said := _refusal(parameter, value, positional):
            return said
    names = {parameter.name for parameter, _ in given}
    left = [parameter for parameter in parameters if parameter.name not in names]
    absent = [parameter for parameter in left if parameter.default is None]
    if absent:
        shown = [p.name if p.name in positional else p.option for p in absent]
        return f"{' and '.join(shown)} must be given: {without_period(absent[0].help)}"
    # Default paths may not exist.
    told = [(p, p.default) for p in left if p.limits and not p.many and p.default not in (None, "None")]
    return next((said for parameter, value in told if (said := _refusal(parameter, str(value), positional))), None)


def _given(
    words: Sequence[str], parameters: Sequence[Parameter], positional: Sequence[str]
) -> Iterator[tuple[Parameter, str]]:
    """Yield each parameter on a command line with its value."""
    options = {parameter.option: parameter for parameter in parameters if parameter.name not in positional}
    places = [next(p for p in parameters if p.name == name) for name in positional]
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        near = [option for option in options if option.startswith(name)] if word.startswith("--") else []
        parameter = options.get(name) or (options[near[0]] if len(near) == 1 else None)
        if parameter is not None:
            if not parameter.switch:
                yield parameter, value if equals else next(left, "")
        elif word.startswith("--"):  # option of a class, checked by the parser
            if not equals:
                next(left, "")
        elif places:
            yield places[0], word
            if not places[0].many:
                places.pop(0)


def _refusal(parameter: Parameter, value: str, positional: Sequence[str]) -> str | None:
    """Return an error message for a value of a parameter, or None if it is valid."""
    name = parameter.name if parameter.name in positional else parameter.option
    if value in ("", "null") and parameter.kind.endswith("None"):
        return None
    if parameter.choices and value not in parameter.choices and not value.startswith(("[", "-")):
        return f"{name} is {value or 'empty'}; expected {parameter.expected}"
    numbers: list[float] = []
    if parameter.item in ("int", "float"):
        try:
            parts = value.strip("[]").split(",") if parameter.many else [value]
            numbers = [int(part) if parameter.item == "int" else float(part) for part in parts]
        except ValueError:
            return f"{name} is {value or 'empty'}; expected {parameter.expected}"
    for limit in parameter.limits:
        if isinstance(limit, Range):
            said = next((said for number in numbers if (said := limit.refusal(number))), None)
            if said is not None:
                return f"{name} is {value}; it must be {said}"
        elif not value.startswith("["):
            said = limit.refusal(value)
            if said is not None:
                raise PlaceError(said)
    return None
