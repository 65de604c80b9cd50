"""Budgets: what they accept, what fits, and the largest width that does."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from submodels.budget import Budget, largest
from submodels.cost import MB, Cost

WIDTHS = [k / 16 for k in range(1, 17)]


def cost_of(width: float) -> Cost:
    """A model of 16 channels: 10 MB of weights and 20 MB of activations at full width."""
    kept = math.ceil(width * 16 - 1e-9) / 16
    return Cost(
        params=int(1e6 * kept**2),
        macs=int(8e6 * kept**2),
        train_bytes=int((10 * kept**2 + 20 * kept) * MB),
        wire_bytes=int(4e6 * kept**2),
    )


def test_a_cost_equal_to_the_limit_fits_and_one_byte_more_does_not():
    budget = Budget(train_mb=2)
    assert budget.fits(Cost(1, 1, 2 * MB, 1))
    assert not budget.fits(Cost(1, 1, 2 * MB + 1, 1))


def test_every_limit_is_held_and_only_the_given_ones():
    cost = Cost(params=10**9, macs=3_000_000, train_bytes=5 * MB, wire_bytes=7 * MB)
    assert Budget(train_mb=5, mmacs=3, wire_mb=7).fits(cost)
    assert not Budget(train_mb=5, mmacs=2.9, wire_mb=7).fits(cost)
    assert Budget(wire_mb=7).fits(cost)


def test_the_excess_names_the_broken_limits_and_by_how_much():
    cost = Cost(params=1, macs=3_000_000, train_bytes=5 * MB, wire_bytes=7 * MB)
    assert Budget(train_mb=4, mmacs=3, wire_mb=5.5).excess(cost) == {"train_mb": 1.0, "wire_mb": 1.5}
    assert Budget(train_mb=5).excess(cost) == {}


@pytest.mark.parametrize("name", ("train_mb", "mmacs", "wire_mb"))
@pytest.mark.parametrize("limit", (0, -1, math.nan, math.inf, True, "24"))
def test_a_limit_that_is_no_positive_number_is_refused_by_name_and_value(name, limit):
    with pytest.raises(ValueError, match=f"{name} {limit!r} is no limit; give a positive finite number"):
        Budget(**{name: limit})


@pytest.mark.parametrize(
    "limit",
    (10**400, -(10**400), 10**5000, Fraction(10**400)),
    ids=["large", "small", "not to be written", "a fraction"],
)
def test_a_limit_larger_than_any_float_is_refused(limit):
    with pytest.raises(ValueError, match=r"^train_mb .* is no limit"):
        Budget(train_mb=limit)


def test_a_budget_without_limits_is_refused():
    with pytest.raises(ValueError, match="give at least one of train_mb, mmacs, wire_mb"):
        Budget()


def test_numpy_numbers_are_numbers():
    assert Budget(train_mb=np.float32(2), mmacs=np.int64(3)).fits(Cost(1, 1, MB, 1))


def test_the_largest_width_of_a_grid_in_any_order_is_found():
    # 10 w^2 + 20 w MB: 12.5 at one half, 20.6 at three quarters.
    assert largest(cost_of, Budget(train_mb=16), [1.0, 0.25, 0.75, 0.5, 0.5]) == 0.5


def test_the_narrowest_of_several_limits_decides():
    assert largest(cost_of, Budget(train_mb=16, mmacs=0.5), WIDTHS) == 0.25


def test_a_budget_that_holds_everything_gives_the_full_width():
    assert largest(cost_of, Budget(train_mb=30), WIDTHS) == 1.0


@given(st.floats(1.3, 40), st.lists(st.floats(1 / 16, 1), max_size=60))
def test_the_search_finds_what_looking_at_every_width_finds(train_mb, more):
    budget, widths = Budget(train_mb=train_mb), [1 / 16, *more]
    found = largest(cost_of, budget, widths)
    assert found == max(width for width in widths if budget.fits(cost_of(width)))


def test_few_of_many_widths_are_priced_and_the_answer_is_one_of_them():
    priced = []

    def watched(width: float) -> Cost:
        priced.append(width)
        return cost_of(width)

    found = largest(watched, Budget(train_mb=16), [k / 1000 for k in range(1, 1001)])
    assert len(priced) <= 12
    assert found in priced


def test_a_budget_nothing_fits_is_refused_with_the_smallest_need_and_the_remedy():
    with pytest.raises(ValueError) as refused:
        largest(cost_of, Budget(train_mb=1, mmacs=5), WIDTHS)
    assert str(refused.value) == (
        "no width fits train_mb=1: the smallest sub-model (width 0.0625) needs 1.29 MB of training memory; "
        "raise train_mb to 1.3 or lower the batch size"
    )


def test_fractions_are_written_as_the_decimals_they_are():
    refusals = []
    for half, sixteenth in ((0.5, 0.0625), (Fraction(1, 2), Fraction(1, 16))):
        with pytest.raises(ValueError) as refused:
            largest(cost_of, Budget(train_mb=half), [sixteenth])
        refusals.append(str(refused.value))
    assert refusals[0].startswith("no width fits train_mb=0.5: the smallest sub-model (width 0.0625)")
    assert refusals[1] == refusals[0]


def test_following_the_remedy_helps():
    assert largest(cost_of, Budget(train_mb=1.3), WIDTHS) == 1 / 16


def test_every_broken_limit_is_named():
    with pytest.raises(ValueError) as refused:
        largest(cost_of, Budget(train_mb=1, mmacs=0.01), WIDTHS)
    assert str(refused.value) == (
        "no width fits train_mb=1 and mmacs=0.01: the smallest sub-model (width 0.0625) needs 1.29 MB of training "
        "memory and 0.0312 million multiply-adds a sample; raise train_mb to 1.3 and mmacs to 0.032"
    )


@pytest.mark.parametrize("width", (0, -0.5, 1.5, math.nan, math.inf, True, "0.5"))
def test_a_width_outside_the_unit_interval_is_refused(width):
    with pytest.raises(ValueError, match=r"width .* is outside \(0, 1\]"):
        largest(cost_of, Budget(train_mb=16), [0.5, width])


def test_an_empty_grid_is_refused():
    with pytest.raises(ValueError, match="no widths to choose from"):
        largest(cost_of, Budget(train_mb=16), [])
