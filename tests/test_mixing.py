"""Mixing weights: the exact solver, the paper's descent, and the rules that need no tuning."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import perm_maths

from hetperm import mixing
from hetperm.mixing import complexity, solver
from hetperm.mixing.simplex import water_fill


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _double(x):
    return torch.tensor(x, dtype=torch.float64)


@st.composite
def _problems(draw, most=30):
    """Costs with ties, unequal samples with ties, and any lam."""
    N = draw(st.integers(1, 7))
    cost = st.floats(0, 10) | st.sampled_from([0.0, 0.5, 1.0, 4.0])
    c = draw(st.lists(cost, min_size=N, max_size=N))
    n = draw(st.lists(st.integers(1, most) | st.sampled_from([2, most]), min_size=N, max_size=N))
    return c, n, 10 ** draw(st.floats(-3, 4))


@st.composite
def _reports(draw):
    """What N clients in two groups report: distances, noise, samples, VC dimensions."""
    N = draw(st.integers(2, 8))
    generator = _generator(draw(st.integers(0, 10_000)))
    g = torch.randn(N, 5, generator=generator, dtype=torch.float64) + 2.0 * (torch.arange(N) % 2)[:, None]
    zeta = (g[:, None] - g).square().sum(-1)
    q = 3 * torch.rand(N, generator=generator, dtype=torch.float64)
    n = torch.randint(1, 50, (N,), generator=generator)
    vc = 1e6 * torch.rand(N, generator=generator, dtype=torch.float64) + 1
    return zeta, q, n, vc


# The exact solver


def test_by_hand():
    assert mixing.solve(torch.tensor([0.0, 1.0]), torch.ones(2), 1.0).tolist() == [0.75, 0.25]
    assert mixing.solve(torch.tensor([0.0, 2.0]), torch.ones(2), 1.0).tolist() == [1.0, 0.0]
    assert mixing.solve(torch.tensor([1.0, 1.0]), torch.tensor([1, 3]), 1.0).tolist() == [0.25, 0.75]


@settings(max_examples=60)
@given(_problems())
def test_the_solution_fulfils_the_conditions_of_a_minimum(problem):
    c, n, lam = problem
    alpha = mixing.solve(_double(c), torch.tensor(n), lam).tolist()
    assert perm_maths.kkt_violation(alpha, c, n, lam) <= 1e-9
    assert abs(math.fsum(alpha) - 1) <= 1e-12


@settings(max_examples=25)
@given(_problems(most=8))
def test_the_solution_is_where_a_long_projected_descent_ends(problem):
    c, n, lam = problem
    alpha = mixing.solve(_double(c), torch.tensor(n), lam)
    assert (alpha - _double(perm_maths.descend(c, n, lam, steps=200))).abs().max() <= 1e-8


@settings(max_examples=60)
@given(_problems(most=5000))
def test_the_solution_is_that_of_the_reference(problem):
    c, n, lam = problem
    alpha = mixing.solve(_double(c), torch.tensor(n), lam)
    assert (alpha - _double(perm_maths.solve(c, n, lam))).abs().max() <= 1e-8


@settings(max_examples=40)
@given(_problems(), st.randoms(use_true_random=False))
def test_relabelling_clients_relabels_the_solution_and_the_descent_exactly(problem, random):
    c, n, lam = _double(problem[0]), torch.tensor(problem[1]), problem[2]
    order = list(range(len(n)))
    random.shuffle(order)
    assert torch.equal(mixing.solve(c[order], n[order], lam), mixing.solve(c, n, lam)[order])
    assert torch.equal(mixing.descend(c[order], n[order], lam, 3), mixing.descend(c, n, lam, 3)[order])


@settings(max_examples=40)
@given(_problems())
def test_a_descent_that_has_come_to_rest_is_not_gone_on_with_and_ends_in_the_same_bits(problem):
    c, n, lam = _double(problem[0]), torch.tensor(problem[1]).double(), problem[2]
    taken = []

    def counted(*arguments):
        taken.append(1)
        return water_fill(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "water_fill", counted)
        alpha = mixing.descend(c, n, lam, 300)
    factor = (n.min() / (2 * _double(lam))).clamp_max(torch.finfo(torch.float64).max)
    slope, every = (c - c.amin(-1, keepdim=True)) * factor, torch.full_like(c, 1 / len(n))
    for _ in range(300):
        every = water_fill(slope - (1 - n.min() / n) * every, torch.ones_like(n))
    assert torch.equal(alpha, every)
    assert bool((n != n[0]).any()) or len(taken) <= 2  # with equal samples the first step is exact


def test_relabelling_many_clients_with_ties_in_everything_is_exact():
    generator = _generator(1)
    c = torch.randint(4, (200, 200), generator=generator) / 3
    n = torch.randint(1, 4, (200,), generator=generator) * 0.7
    order = torch.randperm(200, generator=generator)
    for lam in (0.1, 1.0, 30.0):
        relabelled = mixing.solve(c.double()[order][:, order], n[order], lam)
        assert torch.equal(relabelled, mixing.solve(c.double(), n, lam)[order][:, order])


@settings(max_examples=30)
@given(_problems())
def test_a_cost_that_all_share_changes_nothing(problem):
    c, n, lam = _double(problem[0]), torch.tensor(problem[1]), problem[2]
    assert (mixing.solve(c + 3.0, n, lam) - mixing.solve(c, n, lam)).abs().max() <= 1e-9


@pytest.mark.parametrize("lam", [1e12, 1e308, math.inf])
def test_a_growing_lam_tends_to_weights_by_samples(lam):
    n = torch.tensor([1, 20, 3])
    assert torch.allclose(mixing.solve(_double([0.0, 5.0, 2.0]), n, lam), n / n.sum().double(), atol=1e-9)


@pytest.mark.parametrize("lam", [1e-12, 1e-300, 5e-324])
def test_a_vanishing_lam_tends_to_the_cheapest_clients_by_samples(lam):
    alpha = mixing.solve(_double([[3.0, 2.0, 9.0], [2.0, 4.0, 2.0]]), torch.tensor([5, 9, 15]), lam)
    assert torch.allclose(alpha, _double([[0.0, 1.0, 0.0], [0.25, 0.0, 0.75]]))
    assert (alpha == 0).sum() == 3


def test_unaffordable_clients_come_out_as_exact_zeros():
    alpha = mixing.solve(_double([0.0, 0.1, 50.0, 60.0]), torch.ones(4), 1.0)
    assert alpha[2:].tolist() == [0.0, 0.0] and (alpha[:2] > 0).all()


def test_each_row_may_have_a_lam_of_its_own():
    c = torch.rand(2, 3, 5, generator=_generator(), dtype=torch.float64)
    n, lam = torch.arange(1, 6), _double([[0.1, 1.0, 10.0], [0.2, 2.0, 20.0]])
    alpha = mixing.solve(c, n, lam)
    for a in range(2):
        for b in range(3):
            assert torch.equal(alpha[a, b], mixing.solve(c[a, b], n, float(lam[a, b])))


def test_blocks_of_rows_are_solved_as_the_whole_with_less_memory(monkeypatch):
    c = torch.rand(30, 30, generator=_generator(), dtype=torch.float64)
    n, lam = torch.arange(1, 31), torch.linspace(0.1, 9, 30)
    whole, sizes = mixing.solve(c, n, lam), []
    water_fill = solver.water_fill
    monkeypatch.setattr(solver, "water_fill", lambda x, n: sizes.append(x.numel()) or water_fill(x, n))
    monkeypatch.setattr(solver, "ENTRIES", 100)
    assert torch.equal(mixing.solve(c, n, lam), whole)
    assert len(sizes) == 10 and max(sizes) == 90


def test_the_result_has_the_dtype_and_shape_of_the_costs():
    for dtype in (torch.float32, torch.float64):
        assert mixing.solve(torch.zeros(2, 3, dtype=dtype), torch.ones(3), 1.0).dtype == dtype
    assert mixing.solve(torch.tensor([0, 0]), torch.ones(2), 1.0).tolist() == [0.5, 0.5]
    assert mixing.solve(torch.zeros(0, 3), torch.ones(3), 1.0).shape == (0, 3)


def test_large_and_small_clients_together_keep_every_digit():
    generator = _generator(2)
    n = torch.randint(1, 100_000, (300,), generator=generator)
    c = torch.rand(20, 300, generator=generator, dtype=torch.float64)
    for lam in (1e-2, 1.0, 1e3, 1e6):
        alpha = mixing.solve(c, n, lam)
        assert (alpha.sum(1) - 1).abs().max() <= 1e-12
        for row, costs in zip(alpha.tolist(), c.tolist(), strict=True):
            assert perm_maths.kkt_violation(row, costs, n.tolist(), lam) <= 1e-9


# The paper's descent


@settings(max_examples=30)
@given(_problems(), st.integers(1, 200))
def test_with_equal_samples_one_step_is_exact(problem, n):
    c, lam = _double(problem[0]), problem[2]
    samples = torch.full(c.shape, n)
    assert (mixing.descend(c, samples, lam, steps=1) - mixing.solve(c, samples, lam)).abs().max() <= 1e-10


@settings(max_examples=30)
@given(_problems(most=8), st.integers(0, 20))
def test_the_descent_is_that_of_the_reference_step_by_step(problem, steps):
    c, n, lam = problem
    expected = _double(perm_maths.descend(c, n, lam, steps))
    assert (mixing.descend(_double(c), torch.tensor(n), lam, steps) - expected).abs().max() <= 1e-10


def test_the_descent_ends_at_the_solution_and_its_steps_never_go_up():
    generator = _generator(3)
    n = torch.randint(50, 2000, (25,), generator=generator)
    c = torch.rand(4, 25, generator=generator, dtype=torch.float64)
    exact = mixing.solve(c, n, 1000.0)
    values = []
    for steps in (0, 1, 10, 100, 1500):
        alpha = mixing.descend(c, n, 1000.0, steps)
        values.append([perm_maths.objective(a, b, n.tolist(), 1000.0) for a, b in zip(alpha.tolist(), c.tolist())])
    assert (alpha - exact).abs().max() <= 1e-8
    assert all(late <= early + 1e-12 for a, b in pairwise(values) for early, late in zip(a, b, strict=True))


def test_no_step_leaves_uniform_weights():
    assert mixing.descend(torch.tensor([0.0, 9.0]), torch.tensor([1, 5]), 1.0, steps=0).tolist() == [0.5, 0.5]


# Rules for lam; the rule "noise" has a file of its own


@settings(max_examples=40)
@given(_reports())
def test_the_level_rule_is_that_of_the_reference(reports):
    zeta, q, n, _ = reports
    expected = _double(perm_maths.level(zeta.tolist(), q.tolist(), n.tolist()))
    assert (mixing.level(zeta, q, n) - expected).abs().max() <= 1e-9
    assert torch.equal(mixing.weights(zeta, q, n, regularization="level"), mixing.level(zeta, q, n))


def test_the_level_rule_solves_the_problem_with_a_lam_for_each_client():
    generator = _generator(4)
    g = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    zeta, q, n = (g[:, None] - g).square().sum(-1), torch.full((10,), 2.0), torch.arange(1, 11)
    D, _ = mixing.noise(zeta, q, n)
    lam = (n * (0.5 * 4.0 - D).clamp_min(0)).sum(1) / 2
    assert torch.allclose(mixing.level(zeta, q, n), mixing.solve(D, n, lam), atol=1e-12)


@pytest.mark.parametrize("regularization", ["noise", "level", 3.0])
@settings(max_examples=30)
@given(reports=_reports(), random=st.randoms(use_true_random=False))
def test_relabelling_clients_relabels_alpha_exactly(regularization, reports, random):
    order = list(range(len(reports[0])))
    random.shuffle(order)
    zeta, q, n, vc = reports
    options = {"regularization": regularization, "vc_weight": 0.05}
    alpha = mixing.weights(zeta, q, n, vc=vc, **options)
    relabelled = mixing.weights(zeta[order][:, order], q[order], n[order], vc=vc[order], **options)
    assert torch.equal(relabelled, alpha[order][:, order])
    assert (alpha >= 0).all() and (alpha.sum(1) - 1).abs().max() <= 1e-12


@pytest.mark.parametrize("regularization", ["noise", "level", 3.0])
def test_relabelling_many_clients_relabels_alpha_exactly(regularization):
    generator = _generator(8)
    g = torch.randn(150, 5, generator=generator, dtype=torch.float64)
    zeta, q = (g[:, None] - g).square().sum(-1), 2 * torch.rand(150, generator=generator, dtype=torch.float64)
    n, order = torch.randint(1, 50, (150,), generator=generator), torch.randperm(150, generator=generator)
    options = {"regularization": regularization, "vc_weight": 0.05}
    alpha = mixing.weights(zeta, q, n, vc=7.0 * n, **options)
    relabelled = mixing.weights(zeta[order][:, order], q[order], n[order], vc=7.0 * n[order], **options)
    assert torch.equal(relabelled, alpha[order][:, order])


def test_two_groups_are_told_apart_without_tuning_at_any_scale():
    generator = _generator(6)
    group = torch.arange(20) % 2
    g = torch.randn(20, 100, generator=generator, dtype=torch.float64) / 10 + group[:, None]
    zeta, q, n = (g[:, None] - g).square().sum(-1), torch.ones(20), torch.full((20,), 50)
    for scale in (1e-6, 1.0, 1e6):
        for rule in ("noise", "level"):
            alpha = mixing.weights(scale * zeta, scale * q, n, regularization=rule)
            assert mixing.same_group_mass(alpha, group) == pytest.approx(1.0)
            assert mixing.effective_partners(alpha).min() > 6


def test_a_number_is_the_paper_with_the_distances_as_they_are():
    zeta, n = _double([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([2, 3])
    assert torch.equal(mixing.weights(zeta, None, n, regularization=2.0), mixing.solve(zeta, n, 2.0))
    noisy = mixing.weights(zeta, torch.ones(2), n, regularization=2.0)
    assert torch.equal(noisy, mixing.solve(zeta, n, 2.0))


def test_steps_of_descent_replace_the_solver():
    zeta, q, n = _double([[0.0, 4.0], [4.0, 0.0]]), torch.ones(2), torch.tensor([2, 6])
    D, lam = mixing.noise(zeta, q, n)
    assert torch.equal(mixing.weights(zeta, q, n, alpha_steps=2), mixing.descend(D, n, lam, 2))
    assert torch.equal(
        mixing.weights(zeta, None, n, regularization=2.0, alpha_steps=2), mixing.descend(zeta, n, 2.0, 2)
    )


def test_alpha_is_float64_whatever_the_distances_are():
    zeta = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert mixing.weights(zeta, torch.ones(2), torch.ones(2)).dtype == torch.float64


# No noise at all


@pytest.mark.parametrize("rule", ["noise", "level"])
def test_without_noise_equal_clients_share_by_samples_and_others_stay_apart(rule):
    zeta = _double([[0.0, 1e-8, 4.0], [1e-8, 0.0, 4.0], [4.0, 4.0, 0.0]])  # equal but for rounding
    alpha = mixing.weights(zeta, torch.zeros(3), torch.tensor([10, 30, 10]), regularization=rule)
    assert torch.allclose(alpha, _double([[0.25, 0.75, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]), atol=0.02)
    assert (alpha == 0).sum() == 4


@pytest.mark.parametrize("rule", ["noise", "level"])
def test_without_noise_and_without_distances_all_share_by_samples(rule):
    alpha = mixing.weights(torch.zeros(3, 3), torch.zeros(3), torch.tensor([1, 2, 5]), regularization=rule)
    assert torch.allclose(alpha, _double([[0.125, 0.25, 0.625]] * 3))


@pytest.mark.parametrize("rule", ["noise", "level", 1.0])
def test_a_single_client_learns_from_itself(rule):
    assert mixing.weights(torch.zeros(1, 1), torch.ones(1), torch.ones(1), regularization=rule).tolist() == [[1.0]]


# Complexity


def test_complex_hosts_are_visited_less():
    n, vc = torch.full((4,), 100), _double([1e7, 1e6, 1e5, 1e4])
    for rule in ("noise", "level"):
        alpha = mixing.weights(torch.zeros(4, 4), torch.ones(4), n, regularization=rule, vc=vc, vc_weight=0.05)
        assert (alpha.diff(dim=1) > 0).all()
    assert torch.equal(
        mixing.weights(torch.zeros(4, 4), torch.ones(4), n, vc=vc), mixing.weights(torch.zeros(4, 4), torch.ones(4), n)
    )


def test_the_complexity_cost_is_in_units_of_the_noise_of_a_distance():
    zeta, q, n, vc = (
        _double([[0.0, 9.0], [9.0, 0.0]]),
        _double([1.0, 3.0]),
        torch.tensor([4, 16]),
        _double([64.0, 64.0]),
    )
    h = complexity.term(vc, n)  # 4 and 2
    cost = zeta + 0.5 * (2 * 2.0) * h / 3.0
    assert torch.allclose(
        mixing.weights(zeta, q, n, regularization=7.0, vc=vc, vc_weight=0.5), mixing.solve(cost, n, 7.0), atol=1e-12
    )


@pytest.mark.parametrize("vc_weight", [0.5, 100.0])
def test_a_large_complexity_cost_leaves_no_row_of_the_level_rule_empty(vc_weight):
    zeta, n = _double([[0.0, 4.0], [4.0, 0.0]]), torch.ones(2)
    alpha = mixing.weights(zeta, torch.ones(2), n, regularization="level", vc=_double([1e6, 1e4]), vc_weight=vc_weight)
    assert (alpha.sum(1) - 1).abs().max() <= 1e-12


def test_architectures_without_complexity_cost_nothing():
    zeta, q, n = torch.zeros(2, 2), torch.ones(2), torch.ones(2)
    assert torch.equal(mixing.weights(zeta, q, n, vc=torch.zeros(2), vc_weight=1.0), mixing.weights(zeta, q, n))


# Blocks, sparse form, summaries


@pytest.mark.parametrize("options", [{}, {"regularization": "level"}, {"regularization": 5.0}, {"alpha_steps": 3}])
def test_alpha_in_blocks_of_rows_is_the_whole_alpha(options, monkeypatch):
    generator = _generator(7)
    g = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    zeta, q, n = (g[:, None] - g).square().sum(-1), torch.rand(20, generator=generator), torch.arange(1, 21)
    options |= {"vc": torch.arange(1, 21) ** 2, "vc_weight": 0.05}
    whole = mixing.weights(zeta, q, n, **options)
    monkeypatch.setattr(solver, "ENTRIES", 60)
    parts = list(mixing.weights_by_rows(zeta, q, n, **options))
    assert [len(part) for part in parts] == [3] * 6 + [2]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(mixing.weights(zeta, q, n, **options), whole)
    assert torch.equal(mixing.sparse(mixing.weights_by_rows(zeta, q, n, **options)).to_dense(), whole)
    some = [7, 0, 19, 7, 3]
    assert torch.equal(mixing.weights_of(some, zeta, q, n, **options), whole[some])


def test_the_sparse_form_holds_the_nonzero_entries_only():
    alpha = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]])
    sparse = mixing.sparse(alpha)
    assert sparse.values().tolist() == [1.0, 0.5, 0.5, 1.0]
    assert torch.equal(sparse.to_dense(), alpha)


def test_what_alpha_says_by_hand():
    alpha = _double([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0], [0.0, 0.2, 0.0, 0.8]])
    assert mixing.effective_partners(alpha).tolist() == pytest.approx([2.0, 4.0, 1.0, 1 / 0.68])
    assert mixing.nonzero(alpha).tolist() == [2, 4, 1, 2]
    for groups in (torch.tensor([0, 0, 1, 1]), ["small", "small", "big", "big"]):
        assert mixing.same_group_mass(alpha, groups) == pytest.approx((1 + 0.5 + 1 + 0.8) / 4)
    with pytest.raises(ValueError, match="2 groups for 4 clients"):
        mixing.same_group_mass(alpha, [0, 1])


# Errors


@pytest.mark.parametrize("lam", [0.0, -1.0, math.nan])
def test_a_lam_that_is_not_positive_is_an_error(lam):
    with pytest.raises(ValueError, match=f"lam is {lam}; .* above zero"):
        mixing.solve(torch.zeros(2), torch.ones(2), lam)
    with pytest.raises(ValueError, match=f"lam is {lam}; "):
        mixing.solve(torch.zeros(2, 2), torch.ones(2), torch.tensor([1.0, lam]))
    with pytest.raises(ValueError, match=f"unknown regularization {lam}; .* above zero"):
        mixing.weights(torch.zeros(2, 2), torch.ones(2), torch.ones(2), regularization=lam)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixing.solve(torch.tensor([[0.0, math.nan]]), torch.ones(2), 1.0), r"cost\[0, 1\] is nan"),
        (lambda: mixing.solve(torch.zeros(2), torch.tensor([1, 0]), 1.0), r"n\[1\] is 0.0; every client must hold"),
        (lambda: mixing.solve(torch.zeros(2), torch.ones(3), 1.0), r"n of shape \(3,\) for 2 clients"),
        (lambda: mixing.solve(torch.zeros(3, 2), torch.ones(2), torch.ones(2)), r"lam of shape \(2,\)"),
        (lambda: mixing.solve(torch.zeros(2, 0), torch.ones(0), 1.0), "no client to learn from"),
        (
            lambda: mixing.descend(torch.zeros(2), torch.ones(2), 1.0, -1),
            "steps is -1; it must be a whole number of at least 0",
        ),
    ],
)
def test_a_problem_that_is_none_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regularization": "nois"}, "unknown regularization 'nois'; use 'noise', 'level' or a number"),
        ({"regularization": "level", "alpha_steps": 5}, "alpha_steps"),
        ({"vc_weight": -0.1}, "vc_weight is -0.1"),
        ({"vc_weight": math.nan}, "vc_weight is nan"),
        ({"q": None}, "noise q of the gradients is missing"),
        ({"q": None, "regularization": 1.0, "vc": torch.ones(2), "vc_weight": 0.05}, "noise q .* is missing"),
        ({"q": torch.tensor([1.0, math.nan])}, r"q\[1\] is nan; .*fill_noise"),
        ({"q": torch.tensor([-1.0, 1.0])}, r"q\[0\] is -1.0"),
        ({"q": torch.ones(3)}, r"q of shape \(3,\) for 2 clients"),
        ({"n": torch.tensor([3, 0])}, r"n\[1\] is 0.0"),
        ({"zeta": torch.ones(2, 3)}, r"zeta has shape \(2, 3\)"),
        ({"zeta": torch.tensor([[0.0, math.inf], [math.inf, 0.0]])}, r"zeta\[0, 1\] is inf"),
    ],
)
def test_reports_that_make_no_sense_are_an_error(options, message):
    given_ = {"zeta": torch.zeros(2, 2), "q": torch.ones(2), "n": torch.ones(2)} | options
    with pytest.raises(ValueError, match=message):
        mixing.weights(given_.pop("zeta"), given_.pop("q"), given_.pop("n"), **given_)
