"""The rule "noise": every client shares with those whose difference noise explains, however many the others are."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import perm_maths

from hetperm import mixing
from hetperm.mixing import discrepancy, solver

SHARES = st.sampled_from([0.1, 0.35, 0.7, 1.4, 5.6, 45.0])


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@st.composite
def reports(draw, most=7, tied=None):
    """(zeta, q, n, vc) of N clients, with ties in everything or with none."""
    N, stream = draw(st.integers(2, most)), generator(draw(st.integers(0, 10_000)))
    if draw(st.booleans()) if tied is None else tied:
        g = torch.randint(3, (N, 2), generator=stream).double()
        q = torch.randint(1, 4, (N,), generator=stream) / 4
        n, vc = 10 ** torch.randint(3, (N,), generator=stream), 100 * torch.randint(1, 3, (N,), generator=stream)
    else:
        g = 2 * torch.randn(N, 3, generator=stream, dtype=torch.float64)
        q = 3 * torch.rand(N, generator=stream, dtype=torch.float64)
        n = torch.randint(1, 1000, (N,), generator=stream)
        vc = 1e6 * torch.rand(N, generator=stream, dtype=torch.float64) + 1
    return (g[:, None] - g).square().sum(-1), q.double(), n, vc


def costs(zeta, q, n, vc, vc_weight):
    """(N, N) costs by the reference, as lists."""
    extra = perm_maths.complexity_cost(vc.tolist(), n.tolist(), q.tolist(), vc_weight)
    D = perm_maths.debias(zeta.tolist(), q.tolist())
    return [[D_ij + e for D_ij, e in zip(row, extra, strict=True)] for row in D]


def rooms(zeta, q, n, share):
    return [2 * share * noise for noise in perm_maths.own_noise(zeta.tolist(), q.tolist(), n.tolist())]


def is_clear(row, n, room):
    """Whether no client lies so near a level that rounding decides whether it belongs."""
    order = sorted(range(len(n)), key=lambda j: row[j])
    levels = [perm_maths.level_of(order[: k + 1], row, n, room) for k in range(len(n))]
    return all(abs(level - cost) > 1e-9 * level for level in levels for cost in row)


def zeta_of(D, q):
    """The distances from which noise makes the costs D."""
    zeta = D + q[:, None] + q
    return zeta.fill_diagonal_(0)


def support(alpha):
    return [set(row.nonzero().flatten().tolist()) for row in alpha]


# By hand


def test_by_hand():
    """Level 1 of the first alone lets the second in, 1.25 of the two the third, and 47/30 of the three nobody else."""
    D = double([[0.0, 0.5, 1.2, 9.0], [0.5, 0.0, 1.2, 9.0], [1.2, 1.2, 0.0, 9.0], [9.0, 9.0, 9.0, 0.0]])
    alpha = mixing.weights(zeta_of(D, torch.ones(4).double()), torch.ones(4), torch.full((4,), 5), share=0.5)
    assert alpha[0].tolist() == pytest.approx([47 / 90, 32 / 90, 11 / 90, 0.0], abs=1e-15)
    found, lam = mixing.noise(zeta_of(D, torch.ones(4).double()), torch.ones(4), torch.full((4,), 5), share=0.5)
    assert torch.allclose(found, D, atol=1e-15) and lam[0] == pytest.approx(0.5 * 1 * 15)


def test_the_noise_of_a_client_is_the_mean_of_its_own_and_of_one_that_is_typical_by_samples():
    """Typical is (10 * 1 + 30 * 3) / 40 = 2.5; clients that are all alone have lam = share * noise * own samples."""
    zeta = double([[0.0, 90.0], [90.0, 0.0]])
    _, lam = mixing.noise(zeta, double([1.0, 3.0]), torch.tensor([10, 30]), share=0.5)
    assert lam.tolist() == [0.5 * 1.75 * 10, 0.5 * 2.75 * 30]


def test_a_client_of_very_many_samples_is_no_partner_for_being_large():
    """Counted with it, the mean distance would be nearly its own, and a stranger at any distance would be let in."""
    D = double([[0.0, 100.0], [100.0, 0.0]])
    alpha = mixing.weights(zeta_of(D, torch.ones(2).double()), torch.ones(2), torch.tensor([1, 1_000_000]))
    assert torch.equal(alpha, torch.eye(2).double())


# Against loops


@settings(max_examples=60)
@given(reports(), SHARES, st.sampled_from([0.0, 0.05, 1.0]))
def test_weights_are_those_of_the_reference(given_, share, vc_weight):
    zeta, q, n, vc = given_
    rows, room = costs(*given_, vc_weight), rooms(zeta, q, n, share)
    assume(all(is_clear(row, n.tolist(), each) for row, each in zip(rows, room, strict=True)))
    alpha = mixing.weights(zeta, q, n, vc=vc, vc_weight=vc_weight, share=share)
    expected = perm_maths.weights(zeta.tolist(), q.tolist(), n.tolist(), vc.tolist(), vc_weight, share)
    assert (alpha - double(expected)).abs().max() <= 1e-12
    D, lam = mixing.noise(zeta, q, n, share)
    assert (D - double(perm_maths.debias(zeta.tolist(), q.tolist()))).abs().max() <= 1e-12
    if vc_weight == 0:
        expected = perm_maths.noise_lam(zeta.tolist(), q.tolist(), n.tolist(), share)
        assert torch.allclose(lam, double(expected), rtol=1e-12, atol=0)


@settings(max_examples=60)
@given(reports(), SHARES, st.sampled_from([0.0, 0.5]))
def test_partners_are_the_smallest_set_of_clients_below_its_own_level(given_, share, vc_weight):
    zeta, q, n, vc = given_
    alpha = mixing.weights(zeta, q, n, vc=vc, vc_weight=vc_weight, share=share)
    for row, cost, room in zip(support(alpha), costs(*given_, vc_weight), rooms(zeta, q, n, share), strict=True):
        assume(is_clear(cost, n.tolist(), room))
        sets = perm_maths.consistent_sets(cost, n.tolist(), room)
        assert row in sets and all(row <= other for other in sets)


def test_there_can_be_several_such_sets():
    """One client at 0 and nine at 1, room 0.4: alone it has level 0.4, and all together they have 1.3."""
    cost, n = [0.0] + [1.0] * 9, [1] * 10
    sets = perm_maths.consistent_sets(cost, n, 0.4)
    assert {0} in sets and set(range(10)) in sets
    D = torch.maximum(double([cost]), double([cost]).T).fill_diagonal_(0)
    assert support(mixing.weights(zeta_of(D, torch.ones(10).double()), torch.ones(10), torch.ones(10), share=0.2))[
        0
    ] == {0}


@settings(max_examples=40)
@given(reports(), SHARES)
def test_the_weights_are_the_minimiser_of_the_mixing_problem_with_the_lam_it_names(given_, share):
    zeta, q, n, _ = given_
    D, lam = mixing.noise(zeta, q, n, share)
    alpha = mixing.weights(zeta, q, n, share=share)
    assert (alpha - mixing.solve(D, n, lam)).abs().max() <= 1e-9
    for row, cost, each in zip(alpha.tolist(), D.tolist(), lam.tolist(), strict=True):
        assert perm_maths.kkt_violation(row, cost, n.tolist(), each) <= 1e-9 * max(1.0, each)


def test_a_long_descent_ends_there():
    zeta, q, n = (
        zeta_of(double([[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]]), torch.ones(3).double()),
        torch.ones(3),
        torch.tensor([2, 6, 3]),
    )
    exact, walked = mixing.weights(zeta, q, n), mixing.weights(zeta, q, n, alpha_steps=300)
    assert (exact - walked).abs().max() <= 1e-8


# Laws


@settings(max_examples=40)
@given(reports(most=12), SHARES, st.sampled_from([0.0, 0.05]), st.randoms(use_true_random=False))
def test_relabelling_clients_relabels_the_weights_to_the_bit(given_, share, vc_weight, random):
    zeta, q, n, vc = given_
    order = list(range(len(n)))
    random.shuffle(order)
    alpha = mixing.weights(zeta, q, n, vc=vc, vc_weight=vc_weight, share=share)
    other = mixing.weights(zeta[order][:, order], q[order], n[order], vc=vc[order], vc_weight=vc_weight, share=share)
    assert torch.equal(other, alpha[order][:, order])
    lam, other = mixing.noise(zeta, q, n, share)[1], mixing.noise(zeta[order][:, order], q[order], n[order], share)[1]
    assert torch.equal(other, lam[order])


def test_relabelling_many_clients_with_ties_in_everything_is_exact():
    stream = generator(1)
    D = (torch.randint(4, (200, 200), generator=stream) / 3).double().fill_diagonal_(0)
    D = torch.maximum(D, D.T)
    q, n = torch.randint(1, 4, (200,), generator=stream) / 3, torch.randint(1, 4, (200,), generator=stream) * 0.7
    order, zeta = torch.randperm(200, generator=stream), zeta_of(D, q.double())
    for share in (0.2, 0.4, 0.7):
        other = mixing.weights(zeta[order][:, order], q[order], n[order], share=share)
        assert torch.equal(other, mixing.weights(zeta, q, n, share=share)[order][:, order])


@settings(max_examples=40)
@given(reports(), SHARES, st.sampled_from([0.0, 0.05]))
def test_clients_of_equal_cost_are_all_partners_or_none_is(given_, share, vc_weight):
    alpha = mixing.weights(*given_[:3], vc=given_[3], vc_weight=vc_weight, share=share)
    for row, cost in zip(alpha.tolist(), costs(*given_, vc_weight), strict=True):
        for price in set(cost):
            assert len({a > 0 for a, c in zip(row, cost, strict=True) if c == price}) == 1


@settings(max_examples=30)
@given(reports(), SHARES, st.sampled_from([0.0, 0.05]), st.sampled_from([-40, -3, 1, 60]))
def test_gradients_of_another_scale_have_the_same_weights(given_, share, vc_weight, power):
    zeta, q, n, vc = given_
    alpha = mixing.weights(zeta, q, n, vc=vc, vc_weight=vc_weight, share=share)
    scaled = mixing.weights(2.0**power * zeta, 2.0**power * q, n, vc=vc, vc_weight=vc_weight, share=share)
    assert torch.equal(scaled, alpha)


def test_so_they_have_where_all_gradients_are_equal():
    n, vc, zeta = torch.tensor([10, 20]), double([1e5, 1e4]), torch.zeros(2, 2)
    one, other = (mixing.weights(zeta, torch.full((2,), q), n, vc=vc, vc_weight=1.0) for q in (1.0, 2.0**-30))
    assert torch.equal(one, other) and one[0, 0] < 10 / 30


@settings(max_examples=30)
@given(reports(), SHARES)
def test_of_ten_copies_of_everybody_each_gets_a_tenth(given_, share):
    """So a client leans on its group as much as before, whether the group is small or large."""
    zeta, q, n, _ = given_
    D = double(perm_maths.debias(zeta.tolist(), q.tolist()))
    rows = D.tolist()
    assume(all(is_clear(row, n.tolist(), room) for row, room in zip(rows, rooms(zeta, q, n, share), strict=True)))
    copies = torch.arange(len(n)).repeat(10)
    many = mixing.weights(zeta_of(D[copies][:, copies], q[copies]), q[copies], n[copies], share=share)
    once = mixing.weights(zeta_of(D, q), q, n, share=share)
    assert (many - once[copies][:, copies] / 10).abs().max() <= 1e-12


@settings(max_examples=20)
@given(reports(), SHARES)
def test_a_client_in_two_halves_is_as_good_as_the_whole(given_, share):
    zeta, q, n, _ = given_
    D = double(perm_maths.debias(zeta.tolist(), q.tolist()))
    assume(all(is_clear(r, n.tolist(), room) for r, room in zip(D.tolist(), rooms(zeta, q, n, share), strict=True)))
    halves = torch.tensor([*range(len(n)), len(n) - 1])
    shares = n.double()[halves]
    shares[-2:] /= 2
    split = mixing.weights(zeta_of(D[halves][:, halves], q[halves]), q[halves], shares, share=share)
    whole = mixing.weights(zeta_of(D, q), q, n, share=share)
    assert (split[:-1, :-2] - whole[:, :-1]).abs().max() <= 1e-12
    assert (split[:-1, -2:].sum(1) - whole[:, -1]).abs().max() <= 1e-12


@pytest.mark.parametrize("samples", [8, 1_000_000])
def test_a_thousand_clients_far_away_change_no_bit_of_a_row(samples):
    stream = generator(5)
    D = (torch.randint(12, (30, 30), generator=stream) / 8).double().fill_diagonal_(0)
    D = torch.maximum(D, D.T)
    far = torch.full((1030, 1030), 50.0).double()
    far[:30, :30] = D
    q, n = torch.full((1030,), 0.5).double(), torch.full((1030,), samples)
    n[:30] = torch.randint(1, 50, (30,), generator=stream)
    for share in (0.35, 0.7, 1.4):
        few = mixing.weights(zeta_of(D, q[:30]), q[:30], n[:30], share=share)
        many = mixing.weights(zeta_of(far, q), q, n, share=share)
        assert torch.equal(many[:30, :30], few) and not many[:30, 30:].any()


@settings(max_examples=30)
@given(reports(most=10), st.sampled_from([0.0, 0.05]))
def test_with_a_larger_share_no_partner_is_lost(given_, vc_weight):
    zeta, q, n, vc = given_
    shares = (0.01, 0.1, 0.35, 0.7, 1.4, 2.8, 5.6, 11.0, 45.0, 1e6, math.inf)
    sets = [support(mixing.weights(zeta, q, n, vc=vc, vc_weight=vc_weight, share=share)) for share in shares]
    assert all(a <= b for less, more in pairwise(sets) for a, b in zip(less, more, strict=True))
    assert sets[-1] == [set(range(len(n)))] * len(n)


@settings(max_examples=20)
@given(reports(), st.sampled_from([0.0, 0.05]), st.sampled_from([None, 3]))
def test_a_share_of_nothing_is_alone_and_one_without_end_goes_by_samples(given_, vc_weight, alpha_steps):
    zeta, q, n, vc = given_
    options = {"vc": vc, "vc_weight": vc_weight, "alpha_steps": alpha_steps}
    assert torch.equal(mixing.weights(zeta, q, n, share=0.0, **options), torch.eye(len(n)).double())
    everybody = mixing.weights(zeta, q, n, share=math.inf, **options)
    assert (everybody - n / n.sum().double()).abs().max() <= 1e-15
    if alpha_steps is None:
        assert (mixing.weights(zeta, q, n, share=1e12, **options) - everybody).abs().max() <= 1e-6


# How far apart partners are


@settings(max_examples=30)
@given(reports(), SHARES)
def test_the_spread_of_partners_is_that_of_the_reference_dense_or_sparse(given_, share):
    zeta, q, n, _ = given_
    alpha = mixing.weights(zeta, q, n, share=share)
    D, rows = perm_maths.debias(zeta.tolist(), q.tolist()), alpha.tolist()
    everybody = range(len(n))
    expected = [sum(row[j] * row[k] * D[j][k] for j in everybody for k in everybody) / 2 for row in rows]
    assert torch.allclose(mixing.spread(alpha, zeta, q), double(expected), rtol=1e-12, atol=1e-12)
    assert torch.allclose(mixing.spread(mixing.sparse(alpha), zeta, q), double(expected), rtol=1e-12, atol=1e-12)


# Blocks, sparse form, sketches


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7, 20.0, math.inf])
def test_weights_in_blocks_of_rows_and_sparse_ones_are_the_whole(share, monkeypatch):
    stream = generator(7)
    g = torch.randn(20, 3, generator=stream, dtype=torch.float64)
    zeta, q, n = (g[:, None] - g).square().sum(-1), torch.rand(20, generator=stream), torch.arange(1, 21)
    options = {"share": share, "vc": torch.arange(1, 21) ** 2, "vc_weight": 0.05}
    whole = mixing.weights(zeta, q, n, **options)
    monkeypatch.setattr(solver, "ENTRIES", 60)
    parts = list(mixing.weights_by_rows(zeta, q, n, **options))
    assert [part.shape for part in parts] == [(3, 20)] * 6 + [(2, 20)]
    assert torch.equal(torch.cat(parts), whole) and torch.equal(mixing.weights(zeta, q, n, **options), whole)
    assert torch.equal(mixing.sparse_weights(zeta, q, n, **options).to_dense(), whole)
    some = [7, 0, 19, 7, 3]
    assert torch.equal(mixing.weights_of(some, zeta, q, n, **options), whole[some])


@pytest.mark.parametrize("share", [0.2, 0.7, 20.0])
def test_distances_row_by_row_give_the_weights_of_the_matrix(share, monkeypatch):
    stream = generator(7)
    g = torch.randn(20, 3, generator=stream, dtype=torch.float64)
    q, n = torch.rand(20, generator=stream), torch.arange(1, 21)
    dense, lazy = discrepancy.pairwise(g), discrepancy.Distances(g)
    monkeypatch.setattr(solver, "ENTRIES", 60)
    whole = mixing.weights(dense, q, n, share=share)
    alpha = mixing.sparse_weights(lazy, q, n, share=share)
    torch.testing.assert_close(alpha.to_dense(), whole, rtol=1e-9, atol=1e-12)
    assert torch.equal(mixing.weights_of([3, 17], lazy, q, n, share=share), alpha.to_dense()[[3, 17]])
    spread = mixing.spread(whole, dense, q)
    for zeta in (dense, lazy):
        torch.testing.assert_close(mixing.spread(alpha, zeta, q), spread, rtol=1e-9, atol=1e-12)


def test_groups_of_ten_are_told_apart_however_many_they_are_by_gradients_and_by_sketches():
    stream = generator(6)
    for groups in (3, 40):
        group = torch.arange(10 * groups) % groups
        centre = torch.randn(groups, 300, generator=stream, dtype=torch.float64)
        g = centre[group] + torch.randn(10 * groups, 300, generator=stream, dtype=torch.float64) / 3
        q, n = torch.full((len(g),), 300 / 9).double(), torch.full((len(g),), 50)
        for sent, right in ((g, 1.0), (discrepancy.sketch(g, 256), 0.99)):
            alpha = mixing.weights(discrepancy.pairwise(sent), q, n)
            assert mixing.same_group_mass(alpha, group) >= right
            assert mixing.effective_partners(alpha).min() > (8 if right == 1 else 4)


# Errors


@pytest.mark.parametrize("share", [-0.1, math.nan, -math.inf])
def test_a_share_below_nothing_is_an_error(share):
    for call in (mixing.weights, mixing.weights_by_rows, mixing.sparse_weights, mixing.noise):
        with pytest.raises(ValueError, match=f"share is {share}; it must be a number of at least 0, or inf"):
            call(torch.zeros(2, 2), torch.ones(2), torch.ones(2), share=share)
