"""Axes stated by hand, in the language `AxisMap.describe` prints.

A declaration maps a tensor name (``*`` stands for one part of a path and may be used as ``{0}``, ``{1}`` ...) to one
pattern per axis, or ``module.attribute`` to the axis that integer measures::

    {"blocks.*.attn.qkv.weight": "(3 h{0} 64) e",   # product: heads of layer {0}, kept or dropped as wholes
     "blocks.*.attn.num_heads": "h{0}",
     "head.weight": ". e"}                           # a dot keeps the axis whole
"""

import math
import re
from collections.abc import Mapping

from torch import nn

from submodels.axes import Axis, concat, fixed, product
from submodels.integers import Attribute, change_integers
from submodels.skeleton import named_tensors
from submodels.texts import shown
from submodels.trace import Declared

_TOKEN = re.compile(r"[()+]|[^\s()+]+")


class _Names:
    """Axis names -> sizes, filled in while patterns are read; a name means the same axis everywhere."""

    def __init__(self):
        self.sizes: dict[str, int] = {}
        self._axes: dict[str, Axis] = {}

    def axis(self, name: str) -> Axis:
        """The axis of a name; pinned, so that what the run cannot explain does not freeze it."""
        if name not in self._axes:
            self._axes[name] = Axis(self.sizes[name], pinned=True)
        return self._axes[name]


def declare(model: nn.Module, patterns: Mapping[str, str]) -> Declared:
    """The declared axes of a model's tensors and attributes.

    Args:
        patterns: see the module's documentation. A pattern that matches nothing is an error.
    """
    if not isinstance(model, nn.Module) or not isinstance(patterns, Mapping):
        raise TypeError(f"declare takes a module and a table of patterns and got {shown(model)} and {shown(patterns)}")
    shapes = {name: tuple(x.shape) for name, x in named_tensors(model, aliases=True)}
    integers = _integers(model)
    sources = {".".join(map(str, source)).lstrip("."): source for source in integers}
    names, tensors, attributes = _Names(), [], []
    for key, pattern in patterns.items():
        if not (isinstance(key, str) and isinstance(pattern, str)):
            raise TypeError(f"declare: {shown(key)} is {shown(pattern)}; both must be texts, as in 'fc.weight': 'c .'")
        matches = _matches(key, shapes)
        for name, captured in matches:
            tensors.append((name, _parse(_fill(pattern, captured, key), name), shapes[name]))
        if not matches:  # not a tensor: an integer, perhaps
            matches = _matches(key, sources)
            for path, captured in matches:
                attributes.append((path, _parse(_fill(pattern, captured, key), path), (integers[sources[path]],)))
        if not matches:
            raise ValueError(f"declare: {key!r} names no parameter, buffer or integer attribute of this model")
    _solve_sizes([*tensors, *attributes], names)
    axes = {name: [_axis(t, n, names) for t, n in zip(terms, shape, strict=True)] for name, terms, shape in tensors}
    measured = {sources[path]: _axis(terms[0], shape[0], names) for path, terms, shape in attributes}
    return Declared(_under_every_name(model, axes), measured)


def _under_every_name(model: nn.Module, axes: dict[str, list[Axis]]) -> dict[str, list[Axis]]:
    """The axes of tied tensors under all their names, if they were declared under one."""
    by_tensor = {id(x): axes[name] for name, x in named_tensors(model, aliases=True) if name in axes}
    return {name: by_tensor[id(x)] for name, x in named_tensors(model, aliases=True) if id(x) in by_tensor}


def _integers(model: nn.Module) -> dict[Attribute, int]:
    """Where it is stored -> its value, for every integer stored in a module."""
    integers: dict[Attribute, int] = {}

    def collect(value: int, source: Attribute) -> int:
        integers[source] = value
        return value

    change_integers(model, collect)
    return integers


def _matches(key: str, names: Mapping[str, object]) -> list[tuple[str, tuple[str, ...]]]:
    pattern = re.compile(re.escape(key).replace(r"\*", r"([^.]+)"))
    return [(name, match.groups()) for name in names if (match := pattern.fullmatch(name))]


def _fill(pattern: str, captured: tuple[str, ...], key: str) -> str:
    try:
        return pattern.format(*captured)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(f"declare: pattern {pattern!r} of {key!r} uses a placeholder that no '*' fills") from error


def _parse(pattern: str, name: str) -> list:
    """Nested lists: a string for a name, number or dot, ['*', ...] for a product, ['+', ...] for a sum."""
    stack: list[list] = [[]]
    for token in _TOKEN.findall(pattern):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise ValueError(f"declare: pattern {pattern!r} of {name!r} closes a parenthesis it did not open")
            parts = stack.pop()
            stack[-1].append(_grouped(parts, pattern, name))
        elif token.isdigit() and int(token) == 0:
            raise ValueError(f"declare: pattern {pattern!r} of {name!r} has a part of no positions")
        else:
            stack[-1].append(token)
    if len(stack) > 1:
        raise ValueError(f"declare: pattern {pattern!r} of {name!r} lacks a closing parenthesis")
    if "+" in stack[0]:
        raise ValueError(f"declare: pattern {pattern!r} of {name!r} has a sum outside parentheses; write (a + b)")
    return stack[0]


def _grouped(parts: list, pattern: str, name: str) -> list:
    """What stood in parentheses, as a product or a sum."""
    if "+" not in parts:
        return ["*", *parts]
    if len(parts) % 2 == 0 or any((part == "+") != bool(i % 2) for i, part in enumerate(parts)):
        raise ValueError(f"declare: pattern {pattern!r} of {name!r} mixes a sum and a product; use more parentheses")
    return ["+", *parts[::2]]


def _written(term) -> str:
    """A parsed term as its author wrote it."""
    return term if isinstance(term, str) else f"({(' ' if term[0] == '*' else ' + ').join(map(_written, term[1:]))})"


def _solve_sizes(rows: list[tuple[str, list, tuple[int, ...]]], names: _Names) -> None:
    """Find the size of every name from the shapes; a product or sum determines its one unknown size."""
    for name, terms, shape in rows:
        if len(terms) != len(shape):
            raise ValueError(f"declare: {name!r} has {len(shape)} axes but its pattern has {len(terms)}")
    # A size learnt from one axis may be what another was short of: repeat until nothing new is learnt.
    before = -1
    while before != len(names.sizes):
        before = len(names.sizes)
        for name, terms, shape in rows:
            for term, size in zip(terms, shape, strict=True):
                _learn(term, size, names, name)
    for name, terms, shape in rows:
        for term, size in zip(terms, shape, strict=True):
            total = _size(term, size, names)
            if total is None:
                raise ValueError(
                    f"declare: the sizes in {_written(term)} of {name!r} are not determined; declare the axis alone"
                )
            if total != size:
                raise ValueError(f"declare: an axis of {name!r} has {size} positions but its pattern has {total}")


def _size(term, size: int | None, names: _Names) -> int | None:
    if isinstance(term, str):
        return size if term == "." else int(term) if term.isdigit() else names.sizes.get(term)
    parts = [_size(part, None, names) for part in term[1:]]
    if None in parts:
        return None
    return math.prod(parts) if term[0] == "*" else sum(parts)


def _learn(term, size: int, names: _Names, name: str) -> None:
    if isinstance(term, str):
        if term != "." and not term.isdigit() and names.sizes.setdefault(term, size) != size:
            raise ValueError(
                f"declare: axis {term!r} of {name!r} has {size} positions here and {names.sizes[term]} there"
            )
        return
    sizes = [_size(part, None, names) for part in term[1:]]
    if sizes.count(None) == 1:
        rest = [n for n in sizes if n is not None]
        whole = math.prod(rest) if term[0] == "*" else sum(rest)
        # A product that does not divide is noticed when all sizes are compared in the end.
        missing = size // whole if term[0] == "*" else size - whole
        if missing < 1:
            raise ValueError(f"declare: an axis of {name!r} has {size} positions, fewer than {_written(term)} needs")
        _learn(term[1 + sizes.index(None)], missing, names, name)


def _axis(term, size: int, names: _Names) -> Axis:
    if isinstance(term, str):
        return fixed(size, "declared whole") if term == "." or term.isdigit() else names.axis(term)
    parts = [_axis(part, _size(part, None, names), names) for part in term[1:]]
    return product(parts) if term[0] == "*" else concat(parts)
