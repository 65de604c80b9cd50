"""Checks for use in annotations, such as ``epochs: Annotated[int, whole(1)]``. Imports no torch.

A check is a function (name, value) -> the value in its type. It raises an error that says what was received and what
is right. Plain annotations need no check: `Literal` lists the choices, ``| None`` allows None, and `bool`, `str` and
`Path` are checked by type.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hetperm.advice import did_you_mean
from hetperm.texts import shown

Check = Callable[[str, Any], Any]
COMMAS = "separated by commas"  # marks a list that is written as one word, such as local,apfl
Names = Annotated[tuple[str, ...], COMMAS]


def check_fields(settings: Any, label: str = "{}") -> None:
    """Convert every field of a frozen dataclass to its type, or raise an error for the first wrong one.

    Args:
        label: what an error calls the field {}, such as "--{}" for a flag.
    """
    for name, hint in hints_of(type(settings)).items():
        called = label.format(name if label == "{}" else name.replace("_", "-"))  # flags have dashes
        object.__setattr__(settings, name, checked(hint, called, getattr(settings, name)))


def checked(hint: Any, name: str, value: Any) -> Any:
    """The value in its type; an error if the annotation `hint` does not allow it.

    Example:
        >>> checked(Annotated[float | None, number(lambda x: x > 0, "a number above 0")], "lr", 1)
        1.0
    """
    base, notes = unwrapped(hint)
    choices = choices_of(base)
    # These pass before any check, so that a check for numbers need not know about None or words such as "raw".
    if (value is None and NoneType in members(base)) or (isinstance(value, str) and value in choices):
        return value
    check = next((note for note in notes if callable(note)), None)
    if check is None:
        check = _one_of(choices) if choices else next(_BY_TYPE[kind] for kind in members(base) if kind in _BY_TYPE)
    return check(name, value)


# Annotations


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """Field -> its annotation, with the notes that `Annotated` puts beside the type."""
    return get_type_hints(kind, include_extras=True)


def unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type inside an annotation, and the notes beside it."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def members(base: Any) -> tuple[Any, ...]:
    """The types that a union is made of; any other type is its only member."""
    return get_args(base) if get_origin(base) in (Union, UnionType) else (base,)


def choices_of(base: Any) -> tuple[str, ...]:
    """The words of the `Literal` in a type.

    Example:
        >>> choices_of(float | Literal["noise", "level"])
        ('noise', 'level')
    """
    return tuple(word for kind in members(base) if get_origin(kind) is Literal for word in get_args(kind))


# Checks for annotations


LARGEST = 10**9  # of whole numbers that have no bound of their own
MOST = 1e100  # of numbers that are multiplied with one another: their products are finite too
LARGEST_SEED = 2**64 - 1
MOST_IN_LIST = 100_000  # values of a setting that is a list
MOST_PARTS = 250  # folders inside each other
LONGEST_PART = 255  # bytes of the name of a file or folder, on every usual file system


def whole(low: int, high: int = LARGEST) -> Check:
    """A check for whole numbers from `low` to `high`."""

    def check(name: str, value: Any) -> int:
        # Python takes True for an int, but a user never means it as one. Numbers of numpy are numbers too.
        if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
            raise ValueError(f"{name} is {shown(value)}; it must be a whole number of at least {low}")
        if value > high:
            raise ValueError(f"{name} is {shown(value)}; it must be at most {high:,}")
        return int(value)

    return check


def number(good: Callable[[float], bool], wanted: str) -> Check:
    """A check for finite numbers that are `good`; `wanted` describes them in words."""

    def check(name: str, value: Any) -> float:
        if not _is_finite(value) or not good(value):
            raise ValueError(f"{name} is {shown(value)}; it must be {wanted}")
        return float(value)

    return check


def _is_finite(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    # Compared and not converted: a whole number may be larger than any float.
    return abs(int(value)) <= sys.float_info.max if isinstance(value, Integral) else math.isfinite(value)


def several(check: Check) -> Check:
    """A check for lists in which no value comes twice; a text is split at commas."""

    def check_all(name: str, values: Any) -> tuple:
        values = split(values) if isinstance(values, str) else values
        if not isinstance(values, tuple | list | range):
            raise ValueError(f"{name} is {shown(values)}; it must be a list, empty for none")
        if len(values) > MOST_IN_LIST:
            raise ValueError(f"{name} lists {len(values):,} values; it must be at most {MOST_IN_LIST:,}")
        found: dict[Any, None] = {}
        for value in values:
            value = check(name, value)
            if value in found:
                raise ValueError(f"{name} names {shown(value)} twice; once is enough")
            found[value] = None
        return tuple(found)

    return check_all


def split(text: str) -> tuple[str, ...]:
    """The words between commas.

    Example:
        >>> split("local, apfl")
        ('local', 'apfl')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def text(name: str, value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {shown(value)}; it must be a name, in quotes")
    return value


def path(name: str, value: Any) -> Path:
    """A path."""
    # No file system takes a zero byte, and Python's own words about it do not say where it is.
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        given = str(value) if isinstance(value, Path) else value
        raise ValueError(f"{name} is {shown(given)}; it must be a path, in quotes")
    if any([len(part.encode(errors="replace")) > LONGEST_PART for part in Path(value).parts]):
        raise ValueError(f"{name} is {shown(str(value))}; no name in a path may be longer than {LONGEST_PART} bytes")
    if len(Path(value).parts) > MOST_PARTS:
        raise ValueError(f"{name} is {shown(str(value))}; no more than {MOST_PARTS} folders may be inside each other")
    return Path(value)


def takes(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise an error if a function cannot be called with so many arguments, as far as it says.

    Args:
        arguments: what each of them is, in words.

    Example:
        >>> takes("on_epoch", lambda row: None, ["the method", "its row"])
        Traceback (most recent call last):
        TypeError: on_epoch takes (row); it is called with the method and its row
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some functions of C do not say
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} takes {signature}; it is called with {' and '.join(arguments)}") from error


def flag(name: str, value: Any) -> bool:
    """True or false, and not 1 or 0."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; it must be true or false")
    return value


def table(name: str, value: Any) -> dict[str, Any]:
    """A table of options that can be written to a TOML file and read again."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {shown(value)}; it must be a table of options")
    for key, item in value.items():
        if not isinstance(key, str) or not key:
            raise ValueError(f"{name} has the key {shown(key)}; it must be the name of an option, in quotes")
        if not _is_plain(item):
            raise ValueError(
                f"{name}: {key} is {shown(item)}; it must be a finite number, a text, true, false or a list"
            )
    return dict(value)


def _is_plain(value: Any) -> bool:
    """Whether an option's value can be written to a TOML file."""
    if isinstance(value, list | tuple):
        return all([_is_plain(item) for item in value])
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, bool | int | str)


def _one_of(choices: tuple[str, ...]) -> Check:
    def check(name: str, value: Any) -> str:
        # Only wrong values get here: `checked` has let the choices pass.
        advice = did_you_mean(value, choices, f"write {' or '.join(map(repr, choices))}")
        raise ValueError(f"unknown {name} {shown(value)}; {advice}")

    return check


_BY_TYPE: dict[Any, Check] = {bool: flag, str: text, Path: path}
