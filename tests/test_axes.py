"""Unification of axes: what follows from axes being equal, cut, joined and regrouped."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from submodels.axes import (
    Axis,
    aligned,
    choose_factors,
    concat,
    cut,
    factors,
    find,
    fixed,
    freeze,
    growth,
    is_frozen,
    leaves,
    product,
    reason,
    regroup,
    segments,
    split_factor,
    tag,
    unify,
)
from submodels.axismap import AxisMap
from submodels.trace import Trace

torch.set_num_threads(1)


def _same(a, b):
    return find(a) is find(b)


def _compiled(rows):
    return AxisMap._compiled(nn.Identity(), Trace(rows, {}))


# Axes by themselves


def test_an_axis_prints_as_the_pattern_it_is():
    heads = product([fixed(3, "qkv"), Axis(4), fixed(64, "head_dim")])
    assert repr(heads) == "(3! 4 64!)"
    assert repr(concat([Axis(2), fixed(5, "kept")])) == "(2 + 5!)"


def test_an_axis_of_one_position_or_none_has_nothing_to_drop():
    assert is_frozen(Axis(1)) and is_frozen(Axis(0)) and not is_frozen(Axis(2))
    assert reason(Axis(1)) == "size 1"


def test_the_reason_of_a_frozen_axis_is_the_first_that_says_more_than_its_size():
    assert reason(concat([Axis(1), fixed(3, "kernel"), fixed(2, "spatial")])) == "kernel"


def test_an_axis_is_frozen_only_if_all_of_it_is():
    half = concat([fixed(2, "kernel"), Axis(3)])
    assert not is_frozen(half)
    freeze(half, "for the test")
    assert is_frozen(half) and reason(half) == "kernel"


def test_the_first_reason_stays():
    axis = Axis(4)
    freeze(axis, "first")
    freeze(axis, "second", force=True)
    assert reason(axis) == "first"


def test_a_declared_axis_resists_freezing_unless_forced():
    axis = Axis(4, pinned=True)
    freeze(axis, "an operation")
    assert not is_frozen(axis)
    freeze(axis, "model output", force=True)
    assert is_frozen(axis) and reason(axis) == "model output"


def test_a_tag_reaches_every_atom():
    a, b = Axis(2), Axis(3)
    tag(product([a, b]), "heads", "op:mean")
    assert a.tags == b.tags == {"heads", "op:mean"}


# Products and sums


def test_a_product_is_flat_and_leaves_out_single_positions():
    a, b, c = Axis(2), Axis(3), Axis(4)
    axis = product([a, product([b, Axis(1)]), Axis(1), c])
    assert axis.size == 24 and factors(axis) == [a, b, c]


def test_a_concatenation_is_flat():
    a, b, c = Axis(2), Axis(3), Axis(4)
    axis = concat([concat([a, b]), c])
    assert axis.size == 9 and segments(axis) == [a, b, c]


def test_a_composite_of_one_part_is_that_part():
    a = Axis(4)
    assert product([a]) is a and product([Axis(1), a]) is a and concat([a]) is a


def test_a_product_of_nothing_has_one_position():
    assert product([]).size == 1 and is_frozen(product([Axis(1)]))


def test_a_composite_of_frozen_parts_is_one_frozen_run():
    axis = product([fixed(2, "kernel"), fixed(3, "spatial")])
    assert axis.kind is None and axis.size == 6 and reason(axis) == "kernel"
    assert concat([fixed(2, "kernel"), fixed(3, "spatial")]).kind is None


def test_a_product_inside_a_sum_stays_a_product():
    pair = product([Axis(2), Axis(3)])
    assert segments(concat([pair, Axis(4)]))[0] is pair
    both = concat([Axis(2), Axis(3)])
    assert factors(product([both, Axis(4)]))[0] is both


# Factors


def test_an_atom_splits_into_two_factors_and_is_their_product_from_then_on():
    axis = Axis(12)
    tag(axis, "op:mean")
    lead, rest = split_factor(axis, 3)
    assert (lead.size, rest.size) == (3, 4) and factors(axis) == [lead, rest]
    assert lead.tags == rest.tags == {"op:mean"}


def test_the_factors_of_a_frozen_or_declared_atom_are_frozen_or_declared():
    assert all(map(is_frozen, split_factor(fixed(12, "kernel"), 3)))
    lead, rest = split_factor(Axis(12, pinned=True), 3)
    assert lead.pinned and rest.pinned


def test_a_factor_of_one_or_of_all_positions_costs_nothing():
    axis = Axis(12)
    lead, rest = split_factor(axis, 1)
    assert lead.size == 1 and rest is axis
    lead, rest = split_factor(axis, 12)
    assert lead is axis and rest.size == 1
    assert axis.kind is None


def test_a_product_splits_between_or_within_its_factors():
    a, b = Axis(4), Axis(6)
    axis = product([a, b])
    lead, rest = split_factor(axis, 4)
    assert lead is a and rest is b
    lead, rest = split_factor(axis, 2)  # a becomes (2 2)
    assert [f.size for f in factors(axis)] == [2, 2, 6]
    assert lead is factors(a)[0] and [f.size for f in factors(rest)] == [2, 6]


def test_a_sum_of_equal_runs_is_their_number_times_one_run():
    a, b = Axis(4), Axis(4)
    lead, rest = split_factor(concat([a, b]), 2)
    assert is_frozen(lead) and lead.size == 2
    assert _same(a, b) and _same(rest, a)


def test_a_factor_that_cuts_a_factor_in_two_cannot_be_expressed():
    assert split_factor(concat([product([Axis(3), Axis(4)]), Axis(4)]), 8) is None
    assert split_factor(product([Axis(3), Axis(4)]), 2) is None


# Reshapes


def test_merging_axes_makes_a_product():
    a, b = Axis(3), Axis(4)
    (merged,) = regroup([a, b], [12])
    assert factors(merged) == [a, b]


def test_merging_and_splitting_gives_the_axes_back():
    a, b = Axis(3), Axis(4)
    (merged,) = regroup([a, b], [12])
    assert regroup([merged], [3, 4]) == [a, b]


def test_splitting_an_atom_refines_it_everywhere():
    a = Axis(12)
    one, two = regroup([a], [3, 4])
    assert factors(a) == [one, two]
    assert regroup([a], [3, 4]) == [one, two]


def test_a_reshape_may_regroup_across_axes():
    a, b, c = Axis(2), Axis(3), Axis(4)
    left, right = regroup([a, product([b, c])], [6, 4])
    assert factors(left) == [a, b] and right is c


def test_a_reshape_may_add_and_drop_single_positions():
    a = Axis(6)
    got = regroup([Axis(1), a], [6, 1])
    assert got[0] is a and got[1].size == 1


def test_neighbouring_frozen_factors_may_be_cut_anywhere():
    c = Axis(5)
    left, right, inner = regroup([fixed(4, "a"), fixed(6, "b"), c], [3, 8, 5])
    assert (left.size, right.size) == (3, 8) and is_frozen(left) and is_frozen(right) and inner is c


def test_a_reshape_across_factors_cannot_be_expressed():
    assert regroup([Axis(3), Axis(4)], [4, 3]) is None
    assert regroup([Axis(3), Axis(4)], [2, 6]) is None
    assert regroup([Axis(6)], [5]) is None
    assert regroup([Axis(6)], [3]) is None
    assert regroup([Axis(6)], [6, 2]) is None


def test_a_reshape_of_a_frozen_axis_is_frozen_for_the_same_reason():
    assert [(axis.size, reason(axis)) for axis in regroup([fixed(12, "kernel")], [4, 3])] == [
        (4, "kernel"),
        (3, "kernel"),
    ]


# Cuts


def test_an_atom_cut_in_two_is_the_sum_of_its_runs():
    axis = Axis(10, pinned=True)
    tag(axis, "op:mean")
    a, b = cut(axis, [4, 6])
    assert segments(axis) == [a, b] and (a.size, b.size) == (4, 6)
    assert a.tags == {"op:mean"} and a.pinned and b.pinned


def test_an_axis_cut_once_is_itself():
    axis = Axis(10)
    assert cut(axis, [10]) == [axis] and axis.kind is None


def test_a_sum_is_cut_at_and_within_its_segments():
    a, b = Axis(4), Axis(6)
    axis = concat([a, b])
    assert cut(axis, [4, 6]) == [a, b]
    left, right = cut(axis, [7, 3])
    assert segments(left) == [a, segments(b)[0]] and right is segments(b)[1]


def test_a_product_is_cut_along_its_first_factor():
    lead, tail = fixed(3, "query, key, value"), Axis(8)
    q, k, v = cut(product([lead, tail]), [8, 8, 8])
    assert q is k is v is tail
    a, b = cut(product([Axis(6), tail]), [16, 32])
    assert [f.size for f in factors(a)] == [2, 8] and [f.size for f in factors(b)] == [4, 8]


def test_a_cut_within_the_inner_factor_cannot_be_expressed():
    assert cut(product([Axis(3), Axis(4)]), [6, 6]) is None


def test_a_cut_of_a_frozen_axis_is_frozen_for_the_same_reason():
    assert [reason(piece) for piece in cut(fixed(6, "kernel"), [2, 4])] == ["kernel", "kernel"]


def test_an_aligned_axis_falls_apart_without_being_refined():
    a, b, c = Axis(2), Axis(3), Axis(4)
    first, rest = aligned(product([a, b, c]), [6, 4], "product")
    assert factors(first) == [a, b] and rest is c
    assert aligned(product([a, b, c]), [3, 8], "product") is None
    assert aligned(concat([a, b]), [2, 3], "sum") == [a, b]
    assert aligned(concat([a, b]), [2], "sum") is None
    atom = Axis(6)
    assert aligned(atom, [2, 3], "product") is None and aligned(atom, [2, 4], "sum") is None and atom.kind is None


# Equal axes


def test_equal_axes_become_one_and_share_what_was_known_of_either():
    a, b = Axis(8, pinned=True), Axis(8)
    tag(a, "heads")
    tag(b, "op:mean")
    assert unify(a, b)
    assert _same(a, b) and find(a).pinned and find(a).tags == {"heads", "op:mean"}


def test_equality_is_transitive():
    a, b, c, d = (Axis(8) for _ in range(4))
    unify(a, b)
    unify(c, d)
    unify(b, d)
    assert len({id(find(axis)) for axis in (a, b, c, d)}) == 1


def test_what_equals_a_frozen_axis_is_frozen_for_the_same_reason():
    for swap in (False, True):
        a, b = Axis(8), fixed(8, "kernel")
        assert unify(b, a) if swap else unify(a, b)
        assert is_frozen(a) and reason(a) == "kernel"


def test_an_atom_that_equals_a_composite_takes_its_structure():
    for swap in (False, True):
        a, pair = Axis(12, pinned=True), product([Axis(3), Axis(4)])
        tag(a, "op:mean")
        assert unify(pair, a) if swap else unify(a, pair)
        assert [f.size for f in factors(a)] == [3, 4]
        assert all(leaf.pinned and leaf.tags == {"op:mean"} for leaf in leaves(pair))


def test_equal_products_have_equal_factors():
    a, b, c, d = Axis(3), Axis(4), Axis(3), Axis(4)
    assert unify(product([a, b]), product([c, d]))
    assert _same(a, c) and _same(b, d)


def test_the_longer_factor_is_refined():
    a, b, c = Axis(2), Axis(3), Axis(6)
    d = Axis(4)
    assert unify(product([a, b, d]), product([c, Axis(4)]))
    assert factors(c) == [a, b] or [find(f) for f in factors(c)] == [find(a), find(b)]


def test_a_product_read_in_two_orders_has_equal_factors():
    a, b = Axis(2), Axis(4)
    assert unify(product([a, b]), product([b, a]))
    assert all(_same(factor, a) for factor in factors(b)) and len(factors(b)) == 2


def test_equal_sums_have_equal_runs():
    a, b, c = Axis(4), Axis(6), Axis(10)
    assert unify(concat([a, b, Axis(5)]), concat([c, Axis(5)]))
    assert list(map(find, segments(c))) == [find(a), find(b)]


def test_a_sum_equals_a_product_run_by_run():
    a, b, tail = Axis(4), Axis(4), Axis(4)
    assert unify(concat([a, b]), product([fixed(2, "halves"), tail]))
    assert _same(a, tail) and _same(b, tail)


def test_axes_that_do_not_fit_are_both_frozen():
    a, b = product([Axis(2), Axis(3)]), product([Axis(3), Axis(2)])
    assert not unify(a, b)
    assert is_frozen(a) and is_frozen(b) and reason(a) == reason(b) == "axes do not fit"
    c, d = concat([Axis(5), Axis(7)]), product([Axis(3), Axis(4)])
    assert not unify(c, d)
    assert is_frozen(c) and is_frozen(d)


def test_axes_of_different_sizes_cannot_be_equal():
    with pytest.raises(AssertionError, match="different sizes"):
        unify(Axis(3), Axis(4))
    with pytest.raises(AssertionError, match="different sizes"):
        unify(fixed(3, "kernel"), Axis(4))


def test_an_axis_that_would_hold_itself_is_frozen_and_not_followed_forever():
    a = Axis(4)
    holder = concat([a, Axis(0)])
    assert not unify(a, holder)
    assert is_frozen(a) and is_frozen(holder)
    b = Axis(4)
    assert not unify(concat([b, Axis(0)]), b)


def test_a_declared_axis_that_meets_a_frozen_one_stays_free():
    a, b = Axis(8, pinned=True), fixed(8, "op:unknown")
    assert unify(a, b)
    assert not is_frozen(a)


# What scales


def test_of_the_free_factors_of_a_product_the_leading_one_scales():
    a, b, c = Axis(3), Axis(4), Axis(5)
    choose_factors(product([fixed(2, "qkv"), a, b, c]), "whole")
    assert not is_frozen(a) and is_frozen(b) and is_frozen(c)
    assert reason(b) == "inner factor of a product"


def test_narrow_heads_scale_the_last_factor_of_attention_only():
    heads, inner = Axis(3), Axis(4)
    tag(heads, "heads")
    choose_factors(product([heads, inner]), "dim")
    assert is_frozen(heads) and not is_frozen(inner)
    groups, inner = Axis(3), Axis(4)
    choose_factors(product([groups, inner]), "dim")
    assert not is_frozen(groups) and is_frozen(inner)


def test_the_choice_is_made_in_every_part_and_for_declared_axes_too():
    a, b = Axis(3, pinned=True), Axis(4, pinned=True)
    choose_factors(concat([Axis(5), product([a, b])]), "whole")
    assert not is_frozen(a) and is_frozen(b)
    c, d, e = Axis(3), Axis(2), Axis(5)
    choose_factors(product([fixed(2, "halves"), concat([product([c, d]), e])]), "whole")
    assert not is_frozen(c) and is_frozen(d) and not is_frozen(e)


def test_an_atom_keeps_its_freedom_when_factors_are_chosen():
    axis = Axis(4)
    choose_factors(axis, "whole")
    assert not is_frozen(axis)


def test_axes_of_equal_growth_by_hand():
    c = Axis(8)
    twice = {(8,): 2}
    assert growth(product([fixed(2, "halves"), c])) == twice
    assert growth(concat([Axis(8), Axis(8)])) == twice
    assert growth(product([Axis(8), fixed(2, "halves")])) == twice
    assert growth(concat([c, fixed(8, "kept")])) == {(8,): 1, (): 8}
    assert growth(product([Axis(8), Axis(4)])) == {(4, 8): 1}
    assert growth(fixed(16, "kept")) == {(): 16}
    assert growth(product([concat([Axis(8), fixed(3, "kept")]), fixed(2, "halves")])) == {(8,): 2, (): 6}


# Laws


_SIZES = st.sampled_from([2, 3, 4, 6])


@st.composite
def _axes(draw, depth=2):
    kind = (
        draw(st.sampled_from(["atom", "fixed", "product", "sum"]))
        if depth
        else draw(st.sampled_from(["atom", "fixed"]))
    )
    if kind == "atom":
        return Axis(draw(_SIZES))
    if kind == "fixed":
        return fixed(draw(_SIZES), "kept")
    parts = [draw(_axes(depth - 1)) for _ in range(2)]
    return product(parts) if kind == "product" else concat(parts)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(_axes(), st.floats(0.01, 1))
def test_growth_is_the_size_at_every_width(axis, width):
    axis_map = _compiled({"x": [axis]})
    kept = {size: max(1, math.ceil(width * size - 1e-9)) for size in (2, 3, 4, 6)}
    polynomial = sum(n * math.prod(kept[size] for size in sizes) for sizes, n in growth(axis).items())
    assert polynomial == axis_map.dims["x"][0].size(axis_map.counts(width))


def _index(row, kept, sizes):
    return [term.index(kept, sizes) for term in row]


def _take(x, index):
    for dim, positions in enumerate(index):
        x = x.index_select(dim, positions)
    return x


class _Journey:
    """One tensor of labels and its axes, moved together; steps can be walked again with another tensor.

    A step is a function of a tensor and of `size`, which says how many positions an axis has; so the same step moves a
    smaller tensor.
    """

    def __init__(self, sizes):
        self.start = [Axis(n) for n in sizes]
        self.axes, self.x = list(self.start), torch.arange(math.prod(sizes)).reshape(sizes)
        self.steps = []

    def go(self, axes, step):
        self.steps.append((list(axes), step))
        self.axes = list(axes)
        self.x = step(self.x, lambda axis: axis.size)
        assert tuple(axis.size for axis in self.axes) == tuple(self.x.shape)

    def reshape(self, first, count, sizes):
        block = regroup(self.axes[first : first + count], sizes)
        if block is not None:
            axes = [*self.axes[:first], *block, *self.axes[first + count :]]
            self.go(axes, lambda x, size: x.reshape([size(axis) for axis in axes]))

    def permute(self, order):
        self.go([self.axes[i] for i in order], lambda x, size: x.permute(*order))

    def swap(self, dim, edge):
        """The two runs of an axis in the other order: split, then cat."""
        pieces = cut(self.axes[dim], [edge, self.axes[dim].size - edge])
        if pieces is not None:
            axes = [*self.axes[:dim], concat(pieces[::-1]), *self.axes[dim + 1 :]]
            self.go(axes, lambda x, size: torch.cat(x.split([size(piece) for piece in pieces], dim)[::-1], dim))

    def double(self, dim):
        axes = [*self.axes[:dim], concat([self.axes[dim]] * 2), *self.axes[dim + 1 :]]
        self.go(axes, lambda x, size: torch.cat([x, x], dim))


@st.composite
def _journeys(draw):
    journey = _Journey(draw(st.lists(_SIZES, min_size=1, max_size=3)))
    for _ in range(draw(st.integers(1, 5))):
        shape = [axis.size for axis in journey.axes]
        dim = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(["merge", "split", "reshape", "permute", "swap", "double", "freeze"]))
        if kind == "merge" and dim + 1 < len(shape):
            journey.reshape(dim, 2, [shape[dim] * shape[dim + 1]])
        elif kind in ("split", "reshape"):
            count = 2 if kind == "reshape" and dim + 1 < len(shape) else 1
            whole = math.prod(shape[dim : dim + count])
            lead = draw(st.sampled_from([n for n in range(1, whole + 1) if whole % n == 0]))
            journey.reshape(dim, count, [lead, whole // lead])
        elif kind == "permute":
            journey.permute(draw(st.permutations(range(len(shape)))))
        elif kind == "swap" and shape[dim] > 1:
            journey.swap(dim, draw(st.integers(1, shape[dim] - 1)))
        elif kind == "double" and journey.x.numel() < 500:
            journey.double(dim)
        elif kind == "freeze":
            freeze(journey.axes[dim], "for the test")
    return journey


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(_journeys(), st.sampled_from([None, "whole", "dim"]), st.data())
def test_moving_the_kept_labels_is_keeping_of_the_moved_labels(journey, heads, data):
    rows = {"start": journey.start, "end": journey.axes} | {str(i): axes for i, (axes, _) in enumerate(journey.steps)}
    if heads:
        for axis in [axis for row in rows.values() for axis in row]:
            choose_factors(axis, heads)
    pieces = {id(axis): axis for row in rows.values() for axis in row}
    pieces |= {id(leaf): leaf for axis in list(pieces.values()) for leaf in _within(axis)}
    axis_map = _compiled({**rows, **{f"piece {key}": [axis] for key, axis in pieces.items()}})
    kept = []
    for size in axis_map.sizes:
        order = data.draw(st.permutations(range(size)))
        kept.append(torch.tensor(order[: data.draw(st.integers(1, size))]))
    counts = [len(k) for k in kept]

    def size(axis):
        return _compiled_size(axis, axis_map, counts)

    whole = torch.arange(math.prod(a.size for a in journey.start)).reshape([a.size for a in journey.start])
    x = _take(whole, _index(axis_map.dims["start"], kept, axis_map.sizes))
    survivors = x.flatten()
    for _, step in journey.steps:
        x = step(x, size)
    index = _index(axis_map.dims["end"], kept, axis_map.sizes)
    assert torch.equal(x, _take(journey.x, index))
    predicted = torch.zeros(journey.x.shape, dtype=torch.bool)
    predicted[torch.meshgrid(*index, indexing="ij")] = True
    assert torch.equal(predicted, torch.isin(journey.x, survivors))


def _within(axis):
    axis = find(axis)
    yield axis
    for part in axis.parts:
        yield from _within(part)


def _compiled_size(axis, axis_map, counts):
    """The size of an axis with so many channels kept, read off its compiled atoms."""
    axis = find(axis)
    if f"piece {id(axis)}" in axis_map.dims:
        return axis_map.dims[f"piece {id(axis)}"][0].size(counts)
    assert is_frozen(axis) or axis.kind, "every atom of the journey is compiled"
    parts = [_compiled_size(part, axis_map, counts) for part in axis.parts]
    return axis.size if is_frozen(axis) else (math.prod if axis.kind == "product" else sum)(parts)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_nothing_frozen_is_ever_free_again(data):
    pool = [data.draw(_axes()) for _ in range(4)]
    frozen: list[Axis] = []
    for _ in range(8):
        a = data.draw(st.sampled_from(pool))
        b = data.draw(st.sampled_from([axis for axis in pool if axis.size == a.size]))
        kind = data.draw(st.sampled_from(["unify", "cut", "regroup", "freeze", "choose"]))
        if kind == "unify":
            equal = unify(a, b)
            assert is_frozen(a) == is_frozen(b)
            assert equal or is_frozen(a)
        elif kind == "cut":
            edge = data.draw(st.integers(1, a.size - 1))
            pool += cut(a, [edge, a.size - edge]) or []
        elif kind == "regroup":
            lead = data.draw(st.sampled_from([n for n in range(1, a.size + 1) if a.size % n == 0]))
            pool += regroup([a], [lead, a.size // lead]) or []
        elif kind == "freeze":
            freeze(a, "for the test")
        else:
            choose_factors(a, "whole")
        pool = [axis for axis in pool if axis.size > 1]
        assert all(map(is_frozen, frozen))
        frozen = [leaf for axis in pool for leaf in _within(axis) if is_frozen(leaf)]
        assert all(sum(p.size for p in x.parts) == x.size for axis in pool for x in _within(axis) if x.kind == "sum")
        assert all(
            math.prod(p.size for p in x.parts) == x.size for axis in pool for x in _within(axis) if x.kind == "product"
        )
