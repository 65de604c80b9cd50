"""Distances freed of chance: only directions in which clients differ by more than chance makes them are kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import perm_maths

from hetperm import mixing
from hetperm.mixing import denoise, discrepancy


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noisy(means, noise, seed=0, dimensions=40):
    """(zeta, q) of gradients (N, d) around means (N, k), each with its own noise (N,)."""
    g = (
        noise.sqrt()[:, None]
        / dimensions**0.5
        * torch.randn(len(means), dimensions, generator=generator(seed), dtype=torch.float64)
    )
    g[:, : means.shape[1]] += means
    return discrepancy.pairwise(g), noise


def groups_of(sizes, distance):
    """(N, k) the means of groups whose squared distance is the same for any two, and (N, N) who is in one group."""
    label = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.nn.functional.one_hot(label).double() * (distance / 2) ** 0.5, label[:, None] == label


# By hand


@pytest.mark.parametrize(("far", "kept"), [(9.0, 9.0), (1.6, 1.6), (1.4, 0.0)])
def test_by_hand(far, kept):
    """Distances +1 and -1 within two pairs have the eigenvalues 1/2 and -1/2, d between the pairs has d.

    So three times 1/2 is the edge: 1.4 is chance, 1.6 is not, and of +1 and -1 nothing is left.
    """
    D = double([[0, 1, far, far], [1, 0, far, far], [far, far, 0, -1], [far, far, -1, 0]])
    zeta = (D + 4).fill_diagonal_(0)  # the noise of each is 2
    found = mixing.denoised(zeta, double([2.0] * 4), torch.full((4,), 7))
    expected = double([[0, 0, kept, kept], [0, 0, kept, kept], [kept, kept, 0, 0], [kept, kept, 0, 0]]) + 4
    torch.testing.assert_close(found, expected.fill_diagonal_(0), rtol=0, atol=1e-12)


def test_what_is_not_larger_than_three_times_what_lies_below_zero_is_chance(monkeypatch):
    zeta = (double([[0, 1, 2, 2], [1, 0, 2, 2], [2, 2, 0, -1], [2, 2, -1, 0]]) + 4).fill_diagonal_(0)
    q, n = double([2.0] * 4), torch.ones(4)
    assert float(mixing.denoised(zeta, q, n)[0, 2]) == pytest.approx(6)
    monkeypatch.setattr(denoise, "EDGE", 4.5)
    assert float(mixing.denoised(zeta, q, n)[0, 2]) == pytest.approx(4)


# Against the definition


@st.composite
def reports(draw, most=9):
    """(zeta, q, n) of N clients of unequal noise, around a few means."""
    N, seed = draw(st.integers(1, most)), draw(st.integers(0, 10_000))
    stream = generator(seed)
    means = 2 * torch.randn(draw(st.integers(1, 3)), 3, generator=stream, dtype=torch.float64)
    label = torch.randint(len(means), (N,), generator=stream)
    noise = 0.01 + 2 * torch.rand(N, generator=stream, dtype=torch.float64)
    zeta, q = noisy(means[label], noise, seed, dimensions=draw(st.integers(3, 30)))
    return zeta, q, torch.randint(1, 500, (N,), generator=stream)


def is_clear(zeta, q, n):
    """Whether no eigenvalue lies so near the edge that rounding decides."""
    noise = double(perm_maths.own_noise(zeta.tolist(), q.tolist(), n.tolist()))
    D, w = (zeta - q[:, None] - q).fill_diagonal_(0), (1 / noise) / (1 / noise).sum()
    J = torch.eye(len(q), dtype=torch.float64) - w
    values = torch.linalg.eigvalsh(-(J @ D @ J.T) / 2 / noise.sqrt()[:, None] / noise.sqrt())
    edge = 3 * max(0.0, -float(values[0]))
    return edge > 1e-9 and float((values - edge).abs().min()) > 1e-6 * float(values.abs().max())


@given(reports())
def test_as_the_definition_says(given):
    zeta, q, n = given
    found = mixing.denoised(zeta, q, n)
    if not is_clear(zeta, q, n):
        return
    expected = double(perm_maths.denoised(zeta.tolist(), q.tolist(), n.tolist()))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


# Laws


@given(reports(), st.randoms(use_true_random=False))
def test_relabelling_clients_relabels_distances_to_the_bit(given, random):
    zeta, q, n = given
    order = list(range(len(q)))
    random.shuffle(order)
    rows = torch.tensor(order)
    found = mixing.denoised(zeta, q, n)
    # Taken in the old order, the clients under new labels give the same numbers.
    other = mixing.denoised(zeta[rows][:, rows], q[rows], n[rows], rows.argsort())
    assert torch.equal(other, found[rows][:, rows])


@given(reports(), st.sampled_from([-30, -2, 1, 40]))
def test_the_scale_of_gradients_does_not_matter(given, power):
    zeta, q, n = given
    factor = 2.0**power
    scaled = mixing.denoised(zeta * factor, q * factor, n)
    torch.testing.assert_close(scaled, mixing.denoised(zeta, q, n) * factor, rtol=1e-6, atol=1e-9 * factor)


@given(reports())
def test_the_result_is_distances_that_weights_take(given):
    zeta, q, n = given
    found = mixing.denoised(zeta, q, n)
    assert torch.equal(found, found.T) and bool((found.diagonal() == 0).all())
    assert bool((found + 1e-9 >= (q[:, None] + q).fill_diagonal_(0)).all())  # nothing below what noise explains
    alpha = mixing.weights(found, q, n)
    torch.testing.assert_close(alpha.sum(1), torch.ones(len(q)).double())


# What it is for


@pytest.mark.parametrize("seed", range(5))
def test_groups_nearer_than_noise_are_told_apart_where_many_clients_show_them(seed):
    """Groups of ten half the noise of a gradient apart: in raw distances no share finds them."""
    means, same = groups_of([10, 10], distance=0.5)
    zeta, q = noisy(means, torch.ones(20).double(), seed, dimensions=200)
    n = torch.full((20,), 50)

    def finds_groups(distances, share):
        alpha = mixing.weights(distances, q, n, share=share)
        return float((alpha * same).sum(1).mean()) > 0.98 and float(mixing.effective_partners(alpha).mean()) > 9.5

    assert finds_groups(mixing.denoised(zeta, q, n), 0.05)
    assert not any([finds_groups(zeta, share) for share in (0.02, 0.05, 0.1, 0.2, 0.35, 0.7)])


@pytest.mark.parametrize("seed", range(5))
def test_clients_that_are_all_alike_have_no_distance_left(seed):
    zeta, q = noisy(torch.zeros(20, 1).double(), torch.ones(20).double(), seed, dimensions=400)
    found = mixing.denoised(zeta, q, torch.ones(20))
    torch.testing.assert_close(found, (q[:, None] + q).fill_diagonal_(0))


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_client_does_not_drown_the_others(seed):
    """One client has a hundred times the noise of the others; without units of their noise it alone set the edge."""
    means, same = groups_of([10, 10], distance=1.5)
    noise = torch.ones(20).double().index_fill_(0, torch.tensor([3]), 100.0)
    zeta, q = noisy(means, noise, seed, dimensions=400)
    n = 50 / noise  # few samples make it noisy
    freed = mixing.denoised(zeta, q, n) - (q[:, None] + q)
    others = torch.arange(20) != 3
    assert float(freed[others][:, others][~same[others][:, others]].min()) > 0.7


def test_a_stranger_that_is_far_from_all_stays_far():
    means, _ = groups_of([19, 1], distance=8.0)
    zeta, q = noisy(means, torch.ones(20).double(), dimensions=400)
    freed = mixing.denoised(zeta, q, torch.ones(20)) - (q[:, None] + q)
    assert float(freed[:19, 19].min()) > 6


# Borders


def test_exact_gradients_are_as_they_are():
    zeta = double([[0.0, 4.0, 1.0], [4.0, 0.0, 9.0], [1.0, 9.0, 0.0]])
    assert torch.equal(mixing.denoised(zeta, torch.zeros(3), torch.ones(3)), zeta)


@pytest.mark.parametrize("N", [1, 2])
def test_of_one_client_and_of_two(N):
    zeta = (4 * (1 - torch.eye(N))).double()
    torch.testing.assert_close(mixing.denoised(zeta, torch.ones(N), torch.ones(N)), zeta)
    near = (1 - torch.eye(N)).double()  # nearer than noise makes them: all of it is chance
    torch.testing.assert_close(mixing.denoised(near, torch.ones(N), torch.ones(N)), 2 * near)


@pytest.mark.parametrize(
    ("zeta", "q", "order", "sentence"),
    [
        (torch.eye(2), torch.ones(2), None, "a client does not differ from itself"),
        (double([[0, 1], [2, 0]]), torch.ones(2), None, "give a symmetric matrix"),
        (torch.full((2, 2), torch.nan), torch.ones(2), None, r"zeta\[0, 0\] is nan"),
        (torch.zeros(2, 2), None, None, "the noise q of the gradients is missing"),
        (torch.zeros(2, 2), torch.ones(3), None, "for 2 clients"),
        (torch.zeros(2, 2), torch.ones(2), torch.tensor([0, 2]), "must be from 0 to 1"),
        (torch.zeros(2, 2), torch.ones(2), torch.tensor([1, 1]), "order is .* every client once"),
    ],
)
def test_what_is_no_report_is_refused(zeta, q, order, sentence):
    with pytest.raises(ValueError, match=sentence):
        mixing.denoised(zeta, q, torch.ones(2), order)
