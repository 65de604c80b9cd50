"""Shuffling: the paper's ring, and schedules of the non-zero visits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import perm_maths

from hetperm import mixing
from hetperm.server import shuffle


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _pairs(alpha):
    return [(i, j) for i, row in enumerate(alpha.tolist()) for j, a in enumerate(row) if a > 0]


@st.composite
def _alphas(draw):
    """Random supports of any density, hubs and unvisited hosts included; every row has a partner."""
    N = draw(st.integers(1, 12))
    rows = [draw(st.sets(st.integers(0, N - 1), min_size=1)) for _ in range(N)]
    alpha = torch.zeros(N, N, dtype=torch.float64)
    for i, partners in enumerate(rows):
        for j in partners:
            alpha[i, j] = 1 / len(partners)
    return alpha


# The ring


@given(st.integers(1, 20), st.integers(0, 100))
def test_rows_and_columns_of_the_ring_are_permutations(N, seed):
    ring = shuffle.ring(N, _generator(seed))
    everyone = list(range(N))
    assert all(sorted(row) == everyone for row in ring.tolist())
    assert all(sorted(column) == everyone for column in ring.T.tolist())


def test_the_ring_is_that_of_the_paper():
    sigma = torch.randperm(7, generator=_generator(3)).tolist()
    assert shuffle.ring(7, _generator(3)).tolist() == perm_maths.ring(sigma)


def test_another_generator_draws_another_ring():
    assert not torch.equal(shuffle.ring(20, _generator(0)), shuffle.ring(20, _generator(1)))


def test_a_ring_of_nobody_is_an_error():
    with pytest.raises(ValueError, match="N is 0; it must be a whole number of at least 1"):
        shuffle.ring(0, _generator())


@given(st.integers(1, 12), st.integers(0, 100))
def test_the_ring_obeys_the_laws_of_a_schedule_of_a_full_alpha(N, seed):
    everyone = [(i, j) for i in range(N) for j in range(N)]
    assert perm_maths.schedule_faults(shuffle.rounds_of(shuffle.ring(N, _generator(seed))), everyone) == []
    assert perm_maths.schedule_faults(shuffle.schedule(torch.ones(N, N) / N, _generator(seed)), everyone) == []


# Schedules


def test_by_hand_two_groups_of_two_need_two_rounds():
    alpha = torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]])
    rounds = shuffle.schedule(alpha, _generator())
    assert [len(visits) for visits in rounds] == [4, 4]


def test_clients_that_learn_alone_need_one_round():
    assert shuffle.schedule(torch.eye(3), _generator()) == [[(0, 0), (1, 1), (2, 2)]]


def test_a_host_that_everybody_visits_needs_a_round_for_each():
    rounds = shuffle.schedule(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), _generator())
    assert sorted(rounds) == [[(0, 0)], [(1, 0)]]


@settings(max_examples=100)
@given(_alphas(), st.integers(0, 1000))
def test_each_nonzero_pair_once_each_round_a_matching_as_many_rounds_as_the_largest_degree(alpha, seed):
    assert perm_maths.schedule_faults(shuffle.schedule(alpha, _generator(seed)), _pairs(alpha)) == []


@pytest.mark.parametrize("kind", ["groups", "circulant", "dense"])
def test_the_laws_hold_where_every_round_must_be_full(kind):
    """Regular supports leave no slack: visits must move between rounds, along long paths."""
    N = 60
    if kind == "groups":
        alpha = torch.block_diag(*[torch.ones(12, 12)] * 5)
    elif kind == "circulant":
        alpha = sum(torch.eye(N).roll(k, 1) for k in (0, 1, 5, 7, 19, 31, 32))
    else:
        alpha = 1 - torch.eye(N)
    for seed in range(3):
        assert perm_maths.schedule_faults(shuffle.schedule(alpha, _generator(seed)), _pairs(alpha)) == []


def test_a_schedule_of_what_the_solver_gives_leaves_out_its_exact_zeros():
    generator = _generator(5)
    c = torch.rand(30, 30, generator=generator)
    alpha = mixing.solve(c.fill_diagonal_(0), torch.ones(30), lam=0.1)
    visits = [visit for visits in shuffle.schedule(alpha, generator) for visit in visits]
    assert len(visits) == int(mixing.nonzero(alpha).sum()) < 30 * 30
    assert all(alpha[i, j] > 0 for i, j in visits)


def test_the_generator_alone_decides():
    alpha = torch.ones(8, 8) / 8
    assert shuffle.schedule(alpha, _generator(1)) == shuffle.schedule(alpha, _generator(1))
    assert shuffle.schedule(alpha, _generator(1)) != shuffle.schedule(alpha, _generator(2))


def test_a_visit_may_fall_into_any_round():
    alpha = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)) / 4
    when = [next(k for k, r in enumerate(shuffle.schedule(alpha, _generator(s))) if (0, 0) in r) for s in range(200)]
    counts = [when.count(k) for k in range(4)]
    assert min(counts) > 25  # 50 expected, standard deviation 6


def test_a_sparse_alpha_gives_the_same_schedule():
    alpha = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    assert shuffle.schedule(mixing.sparse(alpha), _generator()) == shuffle.schedule(alpha, _generator())


def test_a_stored_zero_of_a_sparse_alpha_is_no_visit():
    alpha = torch.sparse_coo_tensor([[0, 1, 1], [0, 0, 1]], [1.0, 0.0, 1.0], (2, 2), check_invariants=True)
    assert shuffle.schedule(alpha, _generator()) == [[(0, 0), (1, 1)]]


def test_a_single_client_visits_itself():
    assert shuffle.schedule(torch.ones(1, 1), _generator()) == [[(0, 0)]]


# Errors


def test_a_row_of_zeros_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"row 1 of alpha is all zero.*simplex"):
        shuffle.schedule(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), _generator())
    with pytest.raises(ValueError, match="row 0 of alpha is all zero or missing"):
        shuffle.schedule(torch.zeros(0, 0), _generator())


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_a_weight_off_the_simplex_is_an_error_that_names_it(value):
    with pytest.raises(ValueError, match=r"alpha\[1, 0\] is "):
        shuffle.schedule(torch.tensor([[1.0, 0.0], [value, 1.0]]), _generator())


def test_an_alpha_that_is_not_square_is_an_error():
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        shuffle.schedule(torch.ones(2, 3), _generator())


def test_a_host_that_everybody_visits_does_not_cost_a_table_of_all_pairs():
    N = 300
    alpha = torch.eye(N)
    alpha[:, 0] = 1
    rounds = shuffle._colour(*(x.tolist() for x in alpha.nonzero(as_tuple=True)), N, N)
    assert sum(len(pairs) for pairs in rounds) == 2 * N - 1
