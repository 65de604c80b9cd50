"""Randomness: every use has its own stream, the same everywhere."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetperm.checks import LARGEST_SEED
from hetperm.randomness import generator_for, seed_for

KEYS = st.lists(st.integers(-3, 10) | st.text("ab'\", 1", max_size=3), max_size=3).map(tuple)


def test_the_same_key_gives_the_same_stream():
    one, two = (torch.rand(4, generator=generator_for(7, "visit", 3, 1)) for _ in range(2))
    assert torch.equal(one, two)


def test_seeds_are_the_same_in_every_process_and_on_every_machine():
    """The first 63 bits of the SHA-256 of the key as text: a number that nothing but the key decides."""
    digest = hashlib.sha256(b"(7, 'visit', 3, 'client')").hexdigest()
    assert seed_for(7, "visit", 3, "client") == int(digest[:16], 16) // 2 == 2832201483634653795


@given(KEYS, KEYS)
def test_different_keys_have_different_seeds(one, two):
    assert (seed_for(0, *one) == seed_for(0, *two)) == (one == two)


def test_the_seed_the_order_and_the_kind_of_a_key_all_count():
    seeds = [seed_for(0, "a", 1), seed_for(1, "a", 1), seed_for(0, 1, "a"), seed_for(0, "a", "1"), seed_for(0, "a1")]
    assert all(a != b for a, b in itertools.combinations(seeds, 2))


@given(st.integers(-LARGEST_SEED, LARGEST_SEED), KEYS)
def test_every_seed_fits_torch_and_numpy(seed, key):
    assert 0 <= seed_for(seed, *key) < 2**63


@pytest.mark.parametrize("seed", (2**64, -(2**64), 10**400))
def test_a_seed_that_no_flag_can_give_is_refused(seed):
    with pytest.raises(ValueError, match="it must be below 2\\^64"):
        seed_for(seed, "a")


def test_whole_numbers_of_numpy_and_torch_count_as_python_ones():
    assert seed_for(np.int64(2), np.int32(5), torch.tensor(6)) == seed_for(2, 5, 6)


def test_drawing_from_one_stream_leaves_the_others_and_the_global_one_alone():
    state = torch.get_rng_state()
    expected = torch.rand(3, generator=generator_for(0, "b"))
    torch.rand(100, generator=generator_for(0, "a"))
    assert torch.equal(torch.rand(3, generator=generator_for(0, "b")), expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("part", [1.5, None, (1, 2)])
def test_a_key_of_another_kind_is_refused(part):
    with pytest.raises(TypeError, match="whole numbers and strings"):
        seed_for(0, "visit", part)
