"""Unification of axes: type inference for widths.

While a model is traced every tensor axis is an `Axis`: an atom, a product of axes (a reshape) or a sum of axes (a
concatenation). Operations declare axes equal (`unify`); what cannot be expressed is frozen, which keeps the axis
whole and is always safe. Axes found equal share one representative (union-find).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence


class Axis:
    """One axis of one tensor; `frozen_by` says why it must stay whole, `pinned` that the user declared it."""

    __slots__ = ("frozen_by", "kind", "parts", "pinned", "size", "tags", "target")

    def __init__(self, size: int, frozen_by: str | None = None, pinned: bool = False):
        self.size = int(size)
        self.kind: str | None = None  # None (an atom), "product" or "sum"
        self.parts: list[Axis] = []
        self.target: Axis | None = None
        self.frozen_by = frozen_by if self.size > 1 else "size 1"
        self.pinned = pinned
        self.tags: set[str] = set()

    def __repr__(self) -> str:
        axis = find(self)
        if axis.kind:
            return f"({(' ' if axis.kind == 'product' else ' + ').join(map(repr, axis.parts))})"
        return f"{axis.size}{'!' if axis.frozen_by else ''}"


def find(axis: Axis) -> Axis:
    """The representative of an axis."""
    root = axis
    while root.target is not None:
        root = root.target
    while axis.target is not None:
        axis.target, axis = root, axis.target  # path compression
    return root


def fixed(size: int, why: str) -> Axis:
    """An axis that stays whole, for a stated reason."""
    return Axis(size, frozen_by=why)


def leaves(axis: Axis) -> Iterator[Axis]:
    """The atoms an axis is made of."""
    axis = find(axis)
    if axis.kind is None:
        yield axis
    for part in axis.parts:
        yield from leaves(part)


def is_frozen(axis: Axis) -> bool:
    """True if nothing in the axis can shrink."""
    return all(leaf.frozen_by for leaf in leaves(axis))


def free_leaves(axis: Axis) -> list[Axis]:
    """The atoms of an axis that can shrink."""
    return [leaf for leaf in leaves(axis) if not leaf.frozen_by]


def reason(axis: Axis) -> str:
    """Why a frozen axis is whole: the first reason that says more than 'size 1'."""
    reasons = [leaf.frozen_by for leaf in leaves(axis) if leaf.frozen_by]
    return next((why for why in reasons if why != "size 1"), "size 1")


def _first_reason(axes: Sequence[Axis]) -> str:
    return next((why for why in map(reason, axes) if why != "size 1"), "size 1")


def freeze(axis: Axis, why: str, *, force: bool = False) -> None:
    """Keep the axis whole; atoms the user declared resist unless forced."""
    for leaf in leaves(axis):
        if leaf.frozen_by is None and (force or not leaf.pinned):
            leaf.frozen_by = why


def tag(axis: Axis, *labels: str) -> None:
    """Remember what an axis is used for: heads, groups, or the name of an operation that mixes its channels."""
    for leaf in leaves(axis):
        leaf.tags.update(labels)


def product(parts: Sequence[Axis]) -> Axis:
    """The axis that runs over all combinations of the parts, the last one fastest."""
    # Factors of one position change nothing, and without them equal products have equal lists of factors.
    flat = [factor for part in parts for factor in factors(part) if factor.size != 1]
    return _composite("product", flat, math.prod(factor.size for factor in flat))


def concat(parts: Sequence[Axis]) -> Axis:
    """The axis that runs over the parts one after the other."""
    flat = [segment for part in parts for segment in segments(part)]
    return _composite("sum", flat, sum(segment.size for segment in flat))


def _composite(kind: str, parts: list[Axis], size: int) -> Axis:
    if len(parts) == 1:
        return parts[0]
    if not parts or all(map(is_frozen, parts)):
        return fixed(size, _first_reason(parts))
    axis = Axis(size)
    axis.kind, axis.parts = kind, parts
    return axis


def factors(axis: Axis) -> list[Axis]:
    """The factors of a product, flattened; the axis itself if it is none."""
    return _flatten(axis, "product")


def segments(axis: Axis) -> list[Axis]:
    """The parts of a concatenation, flattened; the axis itself if it is none."""
    return _flatten(axis, "sum")


def _flatten(axis: Axis, kind: str) -> list[Axis]:
    axis = find(axis)
    return [axis] if axis.kind != kind else [leaf for part in axis.parts for leaf in _flatten(part, kind)]


def _bind(atom: Axis, kind: str, parts: list[Axis]) -> None:
    """Refine an atom into a composite; its tags, pin and reason pass to the parts."""
    for part in parts:
        for leaf in leaves(part):
            leaf.tags |= atom.tags
            leaf.pinned |= atom.pinned
            leaf.frozen_by = leaf.frozen_by or atom.frozen_by
    atom.kind, atom.parts = kind, parts


def split_factor(axis: Axis, lead: int) -> tuple[Axis, Axis] | None:
    """(lead, rest) with axis == product(lead, rest), or None when that cannot be expressed."""
    axis = find(axis)
    rest = axis.size // lead
    if lead == 1:
        return fixed(1, "size 1"), axis
    if rest == 1:
        return axis, fixed(1, "size 1")
    if axis.kind is None:
        pair = Axis(lead, axis.frozen_by), Axis(rest, axis.frozen_by)
        _bind(axis, "product", list(pair))
        return pair
    if axis.kind == "product":
        got = regroup([axis], [lead, rest])
        return (got[0], got[1]) if got else None
    # A concatenation of `lead` equal runs is the product of `lead` and one run.
    runs = cut(axis, [rest] * lead)
    if runs is None or not all([unify(runs[0], run) for run in runs[1:]]):
        return None
    return fixed(lead, "equal parts"), runs[0]


def regroup(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis] | None:
    """The axes of a row-major reshape of ``axes`` into ``sizes``, or None when that cannot be expressed."""
    if all(map(is_frozen, axes)):
        return [fixed(size, _first_reason(axes)) for size in sizes]
    todo = _merge_frozen([factor for axis in axes for factor in factors(axis) if factor.size != 1])
    out = []
    for size in sizes:
        taken = _take_factors(todo, size)
        if taken is None:  # stop here: going on would refine axes to no avail
            return None
        out.append(taken)
    return out if not todo else None


def _take_factors(todo: list[Axis], size: int) -> Axis | None:
    """The axis of ``size`` positions made of the leading factors, which leave ``todo``; None if they do not fit."""
    taken = []
    while size > 1:
        if not todo:
            return None
        factor = find(todo.pop(0))
        if factor.kind == "product":  # refined since it was listed
            todo[:0] = factors(factor)
        elif size % factor.size == 0:
            taken.append(factor)
            size //= factor.size
        elif factor.size % size == 0 and (pair := split_factor(factor, size)):
            taken.append(pair[0])
            todo.insert(0, pair[1])
            size = 1
        else:
            return None
    return product(taken)


def _merge_frozen(parts: list[Axis]) -> list[Axis]:
    """Neighbouring frozen factors as one, so that a reshape may cut them anywhere."""
    out: list[Axis] = []
    for part in parts:
        if out and is_frozen(part) and is_frozen(out[-1]):
            out[-1] = fixed(out[-1].size * part.size, reason(out[-1]))
        else:
            out.append(part)
    return out


def cut(axis: Axis, sizes: Sequence[int]) -> list[Axis] | None:
    """The axis cut into consecutive runs of the given sizes, or None when that cannot be expressed."""
    axis = find(axis)
    if len(sizes) == 1:
        return [axis]
    if is_frozen(axis):
        return [fixed(size, reason(axis)) for size in sizes]
    if axis.kind is None:
        parts = [Axis(size, axis.frozen_by) for size in sizes]
        _bind(axis, "sum", parts)
        return parts
    if axis.kind == "product":
        return _cut_product(axis, sizes)
    return _cut_sum(axis, sizes)


def _cut_product(axis: Axis, sizes: Sequence[int]) -> list[Axis] | None:
    # Only the slowest factor can be cut into runs, and only at multiples of what it steps over.
    lead, *tail = factors(axis)
    inner = math.prod(factor.size for factor in tail)
    if any(size % inner for size in sizes):
        return None
    leads = cut(lead, [size // inner for size in sizes])
    return None if leads is None else [product([piece, *tail]) for piece in leads]


def _cut_sum(axis: Axis, sizes: Sequence[int]) -> list[Axis] | None:
    todo, out = segments(axis), []
    for size in sizes:
        taken = _take_segments(todo, size)
        if taken is None:
            return None
        out.append(taken)
    return out


def _take_segments(todo: list[Axis], size: int) -> Axis | None:
    """The axis of ``size`` positions made of the leading segments, which leave ``todo``; None if they do not fit."""
    taken = []
    while size > 0:
        segment = find(todo.pop(0))
        if segment.kind == "sum":  # refined since it was listed
            todo[:0] = segments(segment)
        elif segment.size <= size:
            taken.append(segment)
            size -= segment.size
        elif pair := cut(segment, [size, segment.size - size]):
            taken.append(pair[0])
            todo.insert(0, pair[1])
            size = 0
        else:
            return None
    return concat(taken)


def unify(a: Axis, b: Axis) -> bool:
    """Make a and b the same axis; where that cannot be expressed both are frozen and False comes back."""
    a, b = find(a), find(b)
    if a is b:
        return True
    assert a.size == b.size, f"axes of different sizes cannot be equal: {a} and {b}"
    # A frozen axis needs no structure: freezing the other is all that equality asks, however either is composed.
    if is_frozen(a) or is_frozen(b):
        why = reason(a) if is_frozen(a) else reason(b)
        freeze(a, why)
        freeze(b, why)
        return True
    if _unify(a, b):
        return True
    freeze(a, "axes do not fit")
    freeze(b, "axes do not fit")
    return False


def _unify(a: Axis, b: Axis) -> bool:
    if a.kind is not None and b.kind is None:
        a, b = b, a
    if a.kind is None:
        if any(leaf is a for leaf in leaves(b)):  # an axis that contains itself has no finite size
            return False
        for leaf in leaves(b):
            leaf.tags |= a.tags
            leaf.pinned |= a.pinned
        a.target = b
        return True
    if a.kind == b.kind == "product":
        return _unify_parts(factors(a), factors(b), "product")
    if a.kind == b.kind == "sum":
        return _unify_parts(segments(a), segments(b), "sum")
    # A sum and a product: the product is cut where the sum's parts end.
    total, other = (a, b) if a.kind == "sum" else (b, a)
    parts = segments(total)
    pieces = cut(other, [part.size for part in parts])
    return pieces is not None and all([unify(piece, part) for piece, part in zip(pieces, parts, strict=True)])


def _unify_parts(left: list[Axis], right: list[Axis], kind: str) -> bool:
    """Unify two lists of factors (or segments) from the front, refining whichever piece is longer."""
    while left and right:
        x, y = find(left.pop(0)), find(right.pop(0))
        if x.kind == kind or y.kind == kind:  # refined since it was listed
            left, right = _flatten(x, kind) + left, _flatten(y, kind) + right
            continue
        if x.size != y.size:  # cut the longer one to the length of the other and keep the rest for the next turn
            long, short, rest = (x, y, left) if x.size > y.size else (y, x, right)
            if kind == "sum":
                pair = cut(long, [short.size, long.size - short.size])
            else:
                pair = split_factor(long, short.size) if long.size % short.size == 0 else None
            if pair is None:
                return False
            rest.insert(0, pair[1])
            x, y = pair[0], short
        if not unify(x, y):
            return False
    return not left and not right


def aligned(axis: Axis, sizes: Sequence[int], kind: str) -> list[Axis] | None:
    """The axis as parts of the given sizes if it already falls into them; unlike `cut`, nothing is refined."""
    todo, out = _flatten(axis, kind), []
    for size in sizes:
        taken, got = [], 1 if kind == "product" else 0
        while got < size and todo:
            taken.append(todo.pop(0))
            got = got * taken[-1].size if kind == "product" else got + taken[-1].size
        if got != size:
            return None
        out.append(product(taken) if kind == "product" else concat(taken))
    return out if not todo else None


def choose_factors(axis: Axis, heads: str) -> None:
    """Of the free factors of a product let exactly one scale: the leading one (whole heads, whole groups).

    With ``heads="dim"`` attention keeps all its heads and narrows them: there the last free factor scales.
    """
    axis = find(axis)
    if axis.kind == "product":
        # If two factors scaled, the axis would shrink with the square of the width.
        free = [factor for factor in factors(axis) if not is_frozen(factor)]
        narrow_heads = heads == "dim" and any("heads" in leaf.tags for leaf in leaves(axis))
        for factor in free[:-1] if narrow_heads else free[1:]:
            freeze(factor, "inner factor of a product", force=True)
    for part in axis.parts:
        choose_factors(part, heads)


def growth(axis: Axis) -> Counter[tuple[int, ...]]:
    """How the size of an axis depends on the width: a polynomial in the kept channels of groups of each size.

    Groups of equal size keep equally many channels, so axes with equal growth have equal sizes at every width:
    `(2 c1)`, `(c2 + c3)` and `(c4 2)` with 8 channels each all give ``{(8,): 2}``.
    """
    axis = find(axis)
    if is_frozen(axis):
        return Counter({(): axis.size})
    if axis.kind is None:
        return Counter({(axis.size,): 1})
    terms = [growth(part) for part in axis.parts]
    if axis.kind == "sum":
        return sum(terms, Counter())
    total = Counter({(): 1})
    for term in terms:
        total = _times(total, term)
    return total


def _times(left: Counter, right: Counter) -> Counter:
    out: Counter[tuple[int, ...]] = Counter()
    for (a, x), (b, y) in itertools.product(left.items(), right.items()):
        out[tuple(sorted((*a, *b)))] += x * y
    return out
