"""Checks of what a file holds: a value of the right kind, or a ValueError that names the field."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any, TypeVar

from hetperm.texts import shown

LARGEST = 1e300  # of numbers in files; what a float cannot hold is no figure of a run
Part = TypeVar("Part")


def table(value: Any, name: str) -> Mapping[str, Any]:
    """A table, which JSON calls an object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name!r} is {shown(value)}; it must be a table")
    return value


def listing(value: Any, name: str) -> Sequence[Any]:
    """A list."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name!r} is {shown(value)}; it must be a list")
    return value


def word(value: Any, name: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {shown(value)}; it must be a text")
    return value


def figure(value: Any, name: str) -> Any:
    """A number; None, nan and infinities stand for one that is missing."""
    good = value is None or (isinstance(value, Real) and not isinstance(value, bool))
    if not good or (isinstance(value, int) and abs(value) > LARGEST):
        raise ValueError(f"{name!r} is {shown(value)}; it must be a number or null")
    return value


def whole(value: Any, name: str, *, low: int = 0) -> int:
    """A whole number of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= LARGEST:
        raise ValueError(f"{name!r} is {shown(value)}; it must be a whole number of at least {low}")
    return value


def part(kind: type[Part], value: Any, name: str, *, called: Mapping[str, str] | None = None) -> Part:
    """A dataclass of figures from a table.

    By field, not by key: a table with fewer or more keys than this version knows can still be read.

    Args:
        called: field -> its key in the table, where they differ.
    """
    own = table(value, name)
    keys = {each.name: (called or {}).get(each.name, each.name) for each in fields(kind)}
    return kind(**{each: figure(own.get(key), f"{name}.{key}") for each, key in keys.items()})
