"""State: the tail average and the count of work, by hand."""

import math

import pytest
import torch

from hetperm.state import State, Work, tail_begins


def scalar(value):
    return {"x": torch.tensor(float(value), dtype=torch.float64)}


def after_epoch(state, r, *values):
    """The state at the end of epoch r with other personal models."""
    return State(r, state.w, tuple(map(scalar, values)), tail=state.tail, tail_count=state.tail_count)


def in_memory(params):
    return params


def test_the_tail_average_of_five_epochs_is_their_mean():
    """1, 3, 8, 0, 13 have the mean 5; halves of the last and of what was there before would give 8.125."""
    state, means = State(0, scalar(0), (scalar(0), scalar(0))), []
    for r, value in enumerate((1, 3, 8, 0, 13), start=1):
        state = after_epoch(state, r, value, 10 * value).averaged(1, in_memory)
        means.append([float(params["x"]) for params in state.deployed])
    assert state.tail_count == 5
    for mean, expected in zip(means, (1, 2, 4, 3, 5), strict=True):
        assert mean == pytest.approx([expected, 10 * expected], abs=1e-14)


def test_epochs_before_the_tail_begins_are_not_in_it():
    state = State(0, scalar(0), (scalar(0),))
    for r, value in enumerate((100, 200, 1, 3, 8, 0), start=1):
        state = after_epoch(state, r, value).averaged(3, in_memory)
        assert state.tail_count == max(0, r - 2)
        if r < 3:
            assert state.tail is None and state.deployed is state.v
    assert float(state.deployed[0]["x"]) == pytest.approx(3, abs=1e-14)
    assert float(state.v[0]["x"]) == 0


def test_averages_wait_where_they_are_told_to():
    kept = []

    def keep(params):
        kept.append(params)
        return scalar(-1)

    state = after_epoch(State(0, scalar(0), ()), 1, 4).averaged(1, keep)
    state = after_epoch(state, 2, 6).averaged(1, keep)
    assert [float(params["x"]) for params in kept] == [5.0]
    assert float(state.tail[0]["x"]) == -1


def test_averaging_changes_no_state_that_was_given():
    first = after_epoch(State(0, scalar(0), ()), 1, 4).averaged(1, in_memory)
    second = after_epoch(first, 2, 8).averaged(1, in_memory)
    assert float(first.tail[0]["x"]) == 4 and float(second.tail[0]["x"]) == 6


@pytest.mark.parametrize(
    ("share", "epochs", "begins"),
    [(0.0, 10, math.inf), (0.5, 10, 6), (0.5, 5, 3), (1.0, 4, 1), (0.01, 4, 4), (0.6, 3, 2)],
)
def test_the_tail_takes_in_its_share_of_the_epochs_rounded_up(share, epochs, begins):
    assert tail_begins(share, epochs) == begins


def test_work_adds_up_field_by_field():
    assert Work(1, 2, 3, 4, 5, 6) + Work(bytes_up=10, skipped=1) == Work(1, 2, 3, 4, 15, 7)
