"""Axis terms: which positions of an axis belong to which channels."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import axes_literal

from submodels.terms import Fixed, Group, Product, Sum, owners, renumber, scales, without

torch.set_num_threads(1)

QKV = Product((Fixed(3), Group(0), Fixed(64)))  # (3 h 64): query, key and value, each of heads of 64 features


def _kept(*channels):
    return [torch.tensor(c, dtype=torch.long) for c in channels]


# By hand


def test_a_head_keeps_its_rows_of_query_key_and_value():
    rows = QKV.index(_kept([1]), sizes=[3])
    assert rows.tolist() == [*range(64, 128), *range(256, 320), *range(448, 512)]


def test_kept_heads_come_in_the_order_they_are_kept_in():
    assert Product((Group(0), Fixed(2))).index(_kept([2, 0]), sizes=[3]).tolist() == [4, 5, 0, 1]


def test_the_last_factor_runs_fastest():
    assert Product((Fixed(2), Group(0))).index(_kept([1, 2]), sizes=[3]).tolist() == [1, 2, 4, 5]
    assert Product((Group(0), Fixed(2))).index(_kept([1, 2]), sizes=[3]).tolist() == [2, 3, 4, 5]


def test_a_sum_offsets_each_part_by_the_whole_of_those_before_it():
    term = Sum((Group(0), Fixed(2), Group(1)))  # (c0 + 2 + c1): 4, 2 and 3 positions
    assert term.index(_kept([3], [0, 2]), sizes=[4, 3]).tolist() == [3, 4, 5, 6, 8]


def test_a_product_may_hold_a_sum_and_a_sum_a_product():
    interleaved = Product((Sum((Group(0), Group(1))), Fixed(2)))  # ((c0 + c1) 2)
    assert interleaved.index(_kept([1], [0]), sizes=[2, 2]).tolist() == [2, 3, 4, 5]
    joined = Sum((Product((Fixed(2), Group(0))), Group(1)))  # ((2 c0) + c1)
    assert joined.index(_kept([0], [1]), sizes=[3, 2]).tolist() == [0, 3, 7]


def test_a_group_may_appear_twice():
    term = Sum((Group(0), Group(0)))  # the two halves of a gated unit
    assert term.index(_kept([1]), sizes=[4]).tolist() == [1, 5]
    assert term.size([4]) == 8


def test_a_group_of_which_nothing_is_kept_leaves_no_position():
    assert QKV.index(_kept([]), sizes=[3]).tolist() == []
    assert Sum((Group(0), Fixed(2))).index(_kept([]), sizes=[3]).tolist() == [3, 4]


def test_the_index_of_every_kind_of_term_counts_in_whole_numbers():
    for term in (Fixed(3), Group(0), QKV, Sum((Fixed(3), Group(0)))):
        assert term.index(_kept([0]), sizes=[2]).dtype == torch.long


@pytest.mark.parametrize(
    ("term", "size"), [(Fixed(5), 5), (Group(1), 4), (QKV, 3 * 2 * 64), (Sum((Group(1), Fixed(3), Group(1))), 11)]
)
def test_sizes_follow_from_the_number_of_channels(term, size):
    assert term.size([2, 4]) == size


@pytest.mark.parametrize(
    ("term", "text"),
    [
        (Fixed(5), "5"),
        (Group(1), "c1"),
        (QKV, "(3 h0 64)"),
        (Sum((Group(0), Group(1))), "(h0 + c1)"),
        (Product((Sum((Group(0), Fixed(7))), Fixed(2))), "((h0 + 7) 2)"),
    ],
)
def test_terms_are_shown_as_einops_writes_them(term, text):
    assert term.show(["h0", "c1"]) == text


def test_owners_by_hand():
    assert owners(Product((Fixed(2), Group(0), Fixed(2))), 0, [2]).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert owners(Sum((Group(0), Fixed(1), Group(1))), 1, [2, 3]).tolist() == [-1, -1, -1, 0, 1, 2]
    assert owners(Group(0), 1, [2, 3]).tolist() == [-1, -1]
    assert owners(Fixed(2), 0, [2]).tolist() == [-1, -1]


def test_a_group_without_its_freedom_is_a_fixed_run_and_fixed_runs_melt_together():
    assert without(QKV, {0}, [3]) == Fixed(3 * 3 * 64)
    term = Sum((Group(0), Product((Group(1), Fixed(2)))))
    assert without(term, {0}, [3, 4]) == Sum((Fixed(3), Product((Group(1), Fixed(2)))))
    assert without(term, {1}, [3, 4]) == Sum((Group(0), Fixed(8)))
    assert without(term, {0, 1}, [3, 4]) == Fixed(11)
    assert without(term, set(), [3, 4]) == term


def test_renumbering_reaches_every_group():
    term = Sum((Group(0), Product((Group(2), Fixed(2))), Fixed(3)))
    assert renumber(term, {0: 1, 2: 0}) == Sum((Group(1), Product((Group(0), Fixed(2))), Fixed(3)))


def test_a_term_scales_if_a_group_is_in_it():
    assert scales(QKV) and scales(Sum((Fixed(2), Group(0))))
    assert not scales(Fixed(8)) and not scales(Product((Fixed(2), Fixed(4))))


def test_equal_terms_are_one_key():
    assert len({QKV, Product((Fixed(3), Group(0), Fixed(64))), Product((Fixed(3), Group(1), Fixed(64)))}) == 2


# Laws and reference


@st.composite
def _trees(draw, groups=(0, 1, 2), depth=2):
    """Trees in which a product never holds a group twice."""
    leaf = st.builds(lambda n: ("fixed", n), st.integers(1, 3))
    if groups:
        leaf |= st.builds(lambda g: ("group", g), st.sampled_from(groups))
    kind = draw(st.sampled_from(["leaf", "product", "sum"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaf)
    if kind == "sum":
        return "sum", draw(st.lists(_trees(groups, depth - 1), min_size=2, max_size=3))
    edge = draw(st.integers(0, len(groups)))
    return "product", [draw(_trees(groups[:edge], depth - 1)), draw(_trees(groups[edge:], depth - 1))]


def _term(tree):
    kind, content = tree
    if kind in ("fixed", "group"):
        return (Fixed if kind == "fixed" else Group)(content)
    return (Product if kind == "product" else Sum)(tuple(map(_term, content)))


@st.composite
def _cases(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))
    kept = [
        draw(st.permutations(range(size)))[: draw(st.integers(0, size))] for size in sizes
    ]  # in any order, as rolling windows lie
    return draw(_trees()), sizes, kept


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(_cases())
def test_the_index_of_a_term_is_that_of_the_axis_spelled_out(case):
    tree, sizes, kept = case
    assert _term(tree).index(_kept(*kept), sizes).tolist() == axes_literal.positions(tree, kept, sizes)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(_cases())
def test_positions_are_distinct_and_as_many_as_the_size_says(case):
    tree, sizes, kept = case
    term = _term(tree)
    index = term.index(_kept(*kept), sizes)
    assert len(index) == len(index.unique()) == term.size([len(k) for k in kept])
    assert term.index([torch.arange(n) for n in sizes], sizes).tolist() == list(range(term.size(sizes)))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(_cases(), st.integers(0, 2))
def test_the_owner_of_a_position_is_the_channel_it_goes_with(case, group):
    tree, sizes, _ = case
    term = _term(tree)
    owner = owners(term, group, sizes)
    assert owner.tolist() == [axes_literal.owner(x, group) for x in axes_literal.labels(tree, list(map(range, sizes)))]
    everything = set(range(term.size(sizes)))
    for channel in range(sizes[group]):
        rest = [torch.arange(n) for n in sizes]
        rest[group] = rest[group][rest[group] != channel]
        gone = everything - set(term.index(rest, sizes).tolist())
        assert gone == set((owner == channel).nonzero().flatten().tolist())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(_cases(), st.sets(st.integers(0, 2)))
def test_freezing_groups_is_keeping_all_their_channels(case, frozen):
    tree, sizes, kept = case
    kept = [list(range(n)) if i in frozen else k for i, (n, k) in enumerate(zip(sizes, kept, strict=True))]
    term = without(_term(tree), frozen, sizes)
    assert term.index(_kept(*kept), sizes).tolist() == axes_literal.positions(tree, kept, sizes)
    assert not frozen & set(term.groups())
