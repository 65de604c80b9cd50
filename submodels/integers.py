"""Integers that remember what they measure, and what a forward asked about them."""

import operator

from submodels.axes import Axis

Attribute = tuple[str | int, ...]  # (module path, attribute name, position in a tuple, ...)
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
