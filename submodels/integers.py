"""Integers that remember what they measure, and where modules store theirs."""

import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from submodels.axes import Axis

Attribute = tuple[str | int, ...]  # (module path, attribute, then keys and positions inside it)
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
COMPARISONS = {"==": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class Traced(int):
    """An integer that remembers what it measures: an axis, a module attribute, or a formula of such integers."""

    axis: Axis | None
    source: Attribute | None
    formula: tuple[str, int, int] | None
    owner: object

    def __new__(cls, value: int, *, axis=None, source=None, formula=None, owner=None):
        self = int.__new__(cls, value)
        self.axis, self.source, self.formula, self.owner = axis, source, formula, owner
        return self

    def __ne__(self, other):
        return not self == other

    __hash__ = int.__hash__

    def __reduce__(self):
        return int, (int(self),)  # copies and pickles are plain: what was traced does not outlive the run


def _arithmetic(name: str, symbol: str, swap: bool):
    compute = getattr(int, name)

    def operation(self, other):
        value = compute(self, other)
        if type(value) is not int:
            return value  # NotImplemented, or a float
        pair = (other, self) if swap else (self, other)
        return Traced(value, formula=(symbol, *pair), owner=self.owner)

    return operation


for _symbol, _function in ARITHMETIC.items():
    _name = _function.__name__
    setattr(Traced, f"__{_name}__", _arithmetic(f"__{_name}__", _symbol, swap=False))
    setattr(Traced, f"__r{_name}__", _arithmetic(f"__r{_name}__", _symbol, swap=True))
Traced.__neg__ = lambda self: Traced(-int(self), formula=("-", 0, self), owner=self.owner)


def _comparison(symbol: str):
    compute = getattr(int, f"__{COMPARISONS[symbol].__name__}__")

    def compare(self, other):
        answer = compute(self, other)
        if type(answer) is bool:  # else NotImplemented: the other is no integer
            self.owner.compared(symbol, self, other, answer)
        return answer

    return compare


for _symbol in COMPARISONS:
    setattr(Traced, f"__{COMPARISONS[_symbol].__name__}__", _comparison(_symbol))


class TracedShape(tuple):
    """A shape of traced integers."""

    def numel(self) -> int:
        """The product of the sizes, as a traced integer."""
        total = 1
        for size in self:
            total = total * size
        return total


_DEPTH = 3  # how far plain objects are looked into: self.config.attention.heads


def change_integers(model: nn.Module, change: Callable[[int, Attribute], int]) -> None:
    """Replace the integers that modules store, also in tuples, lists, dicts and plain objects such as a config.

    Plain objects are changed in place, and once if several modules share them: give a copy of the model.

    Args:
        change: (integer, where it is stored) -> the integer to store instead.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_"):
                vars(module)[key] = _changed(value, (path, key), change, seen)


def _changed(value: Any, source: Attribute, change: Callable[[int, Attribute], int], seen: set[int]) -> Any:
    if type(value) is int:  # not a bool
        return change(value, source)
    if len(source) - 2 >= _DEPTH:
        return value
    if type(value) in (tuple, list):
        items = [_changed(item, (*source, i), change, seen) for i, item in enumerate(value)]
        return type(value)(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if type(value) is dict or is_plain_object(value):
        inside = value if type(value) is dict else vars(value)
        if id(inside) not in seen:
            seen.add(id(inside))
            for key, item in inside.items():
                if type(key) is str and not key.startswith("_"):
                    inside[key] = _changed(item, (*source, key), change, seen)
    return value


def is_plain_object(value: Any) -> bool:
    """Whether a value is an object that just holds values: a dataclass, a namespace, a config."""
    special = isinstance(value, nn.Module | Tensor | type | ModuleType) or callable(value)
    return hasattr(value, "__dict__") and not special and not type(value).__module__.startswith("torch")


def replace_integer(value: Any, places: Attribute, new: int) -> Any:
    """The value with the integer at those keys and positions inside it replaced; plain objects change in place."""
    if not places:
        return new
    first, *rest = places
    if type(value) in (tuple, list):
        return type(value)(replace_integer(item, rest, new) if i == first else item for i, item in enumerate(value))
    inside = value if type(value) is dict else vars(value)
    inside[first] = replace_integer(inside[first], rest, new)
    return value
