"""Discrepancies: pairwise distances, sketches and the noise of gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import perm_maths
from torch.utils._python_dispatch import TorchDispatchMode

from hetperm.mixing import discrepancy

torch.set_num_threads(1)


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _gradients(N, d, spread=0.01, seed=0, dtype=torch.float32):
    """A common gradient, and a small part of each client's own."""
    generator = _generator(seed)
    own = torch.randn(N, d, generator=generator, dtype=dtype)
    return torch.randn(d, generator=generator, dtype=dtype) + spread * own


def _distances(g):
    """In float64, pair by pair."""
    g = g.double()
    return torch.stack([torch.stack([(a - b).square().sum() for b in g]) for a in g])


class Allocations(TorchDispatchMode):
    """Notes the entries of every tensor that an operation gives, views of ``given`` apart."""

    def __init__(self, given):
        super().__init__()
        self.given, self.entries = given.untyped_storage().data_ptr(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.given:
            self.entries.append(out.numel())
        return out


# Distances


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 1000))
def test_distances_are_those_of_the_reference(N, d, seed):
    g = torch.randn(N, d, generator=_generator(seed), dtype=torch.float64)
    expected = torch.tensor(perm_maths.pairwise(g.tolist()), dtype=torch.float64)
    assert torch.allclose(discrepancy.pairwise(g), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("N", "d"), [(20, 3_000), (12, 50_000)])
def test_what_gradients_share_does_not_swallow_their_differences(N, d):
    g = _gradients(N, d)
    expected, off = _distances(g), ~torch.eye(N, dtype=torch.bool)
    error = (discrepancy.pairwise(g).double() - expected).abs()[off] / expected[off]
    assert error.max() <= 1e-6
    plain = (g @ g.T).double()
    naive = plain.diagonal()[:, None] + plain.diagonal() - 2 * plain
    assert (naive - expected).abs().max() > 1e-4 * expected.max()  # what the centring is for


def test_distances_are_symmetric_with_a_zero_diagonal_and_never_negative():
    g = _gradients(30, 500, spread=1e-7)
    g[7] = g[3]
    zeta = discrepancy.pairwise(g)
    assert torch.equal(zeta, zeta.T)
    assert (zeta.diagonal() == 0).all() and (zeta >= 0).all()
    assert zeta[3, 7] <= 1e-6 * zeta.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_relabelling_clients_relabels_their_distances_exactly(dtype):
    g = _gradients(23, 1000, spread=1.0, dtype=torch.float64).to(dtype)
    g[5], g[7, :500] = g[11], g[8, :500]
    whole, order = discrepancy.pairwise(g), torch.randperm(23, generator=_generator(1))
    assert torch.equal(discrepancy.pairwise(g[order]), whole[order][:, order])
    chunks = g.split([0, 300, 700], dim=1)
    relabelled = discrepancy.pairwise(chunk[order] for chunk in chunks)
    assert torch.equal(relabelled, discrepancy.pairwise(chunks)[order][:, order])


@pytest.mark.parametrize("seed", range(6))
def test_relabelling_is_exact_where_some_chunks_do_not_tell_clients_apart(seed):
    """Whether two equal rows change places is a matter of the labels; that they round alike is one of the processor."""
    g = _gradients(23, 900, spread=1.0, seed=seed)
    g[4], g[9, :500], g[13, :300], g[:, 300:400] = g[2], g[8, :500], g[12, :300], 0
    order = torch.randperm(23, generator=_generator(seed))
    zeta = discrepancy.pairwise(g.split(300, dim=1))
    assert torch.equal(discrepancy.pairwise(g[order].split(300, dim=1)), zeta[order][:, order])
    assert torch.equal(zeta[4], zeta[2]) and zeta[2, 4] == 0


def test_relabelling_is_exact_where_only_late_coordinates_differ(monkeypatch):
    monkeypatch.setattr(discrepancy, "COLUMNS", 16)
    g = _gradients(9, 3000, spread=1.0)
    g[:, :2000] = 0
    order = torch.randperm(9, generator=_generator(2))
    assert torch.equal(discrepancy.pairwise(g[order]), discrepancy.pairwise(g)[order][:, order])


def test_chunks_of_coordinates_add_up():
    g = _gradients(6, 20_000, dtype=torch.float64)
    whole = discrepancy.pairwise(g)
    chunks = g.split([1, 12_000, 0, 7_999], dim=1)
    assert torch.allclose(discrepancy.pairwise(list(chunks)), whole, rtol=1e-12)
    assert torch.allclose(discrepancy.pairwise(chunk for chunk in chunks), whole, rtol=1e-12)


def test_moving_all_gradients_alike_moves_no_distance():
    g = _gradients(5, 100, spread=1.0, dtype=torch.float64)
    assert torch.allclose(discrepancy.pairwise(g + 10.0), discrepancy.pairwise(g), rtol=1e-10)


@pytest.mark.slow
def test_no_temporary_is_larger_than_a_chunk_or_the_distances():
    g = _gradients(40, 3 * discrepancy.COLUMNS)
    with Allocations(g) as seen:
        discrepancy.pairwise(g)
    assert max(seen.entries) == 40 * discrepancy.COLUMNS


@pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_distances_come_in_the_dtype_of_the_gradients_or_float32(dtype, result):
    assert discrepancy.pairwise(torch.eye(3, dtype=dtype)).dtype == result


def test_one_client_is_at_no_distance_from_itself():
    assert discrepancy.pairwise(torch.ones(1, 4)).tolist() == [[0.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_an_error_that_names_the_client(value):
    g = torch.ones(4, 3)
    g[2, 1] = value
    with pytest.raises(ValueError, match="the gradient of client 2 is not finite"):
        discrepancy.pairwise(g)


def test_gradients_whose_squares_overflow_are_an_error():
    with pytest.raises(ValueError, match=r"too large to compare in torch\.float32"):
        discrepancy.pairwise(torch.tensor([[1e30], [-1e30]]))


def test_gradients_of_another_shape_are_an_error():
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        discrepancy.pairwise([torch.ones(3), torch.ones(3)])
    with pytest.raises(ValueError, match=r"shape \(3, 2\).*2 clients"):
        discrepancy.pairwise([torch.ones(2, 2), torch.ones(3, 2)])
    with pytest.raises(ValueError, match=r"shape \(0, 2\)"):
        discrepancy.pairwise(torch.ones(0, 2))
    for nothing in ([], torch.ones(2, 0)):
        with pytest.raises(ValueError, match="no gradients"):
            discrepancy.pairwise(nothing)


# Sketches


def test_a_sketch_is_linear():
    a, b = torch.randn(2, 1000, generator=_generator(), dtype=torch.float64)
    mixed = discrepancy.sketch(2 * a - 3 * b, 32, 5)
    assert torch.allclose(mixed, 2 * discrepancy.sketch(a, 32, 5) - 3 * discrepancy.sketch(b, 32, 5), atol=1e-12)


def test_every_coordinate_lands_once_with_a_sign():
    basis = discrepancy.sketch(torch.eye(50), 16, 3)
    assert (basis.abs().sum(1) == 1).all() and (basis.abs().amax(1) == 1).all()
    assert (basis.sum(0) != 0).any() and {-1.0, 1.0} <= set(basis.flatten().tolist())


def test_a_batch_is_sketched_row_by_row():
    g = torch.randn(2, 3, 100, generator=_generator())
    assert torch.equal(discrepancy.sketch(g, 8, 1)[1, 2], discrepancy.sketch(g[1, 2], 8, 1))
    assert discrepancy.sketch(g, 8).shape == (2, 3, 8) and discrepancy.sketch(torch.zeros(0, 4), 8).shape == (0, 8)


def test_squared_lengths_are_right_on_average_over_seeds():
    x = torch.randn(300, generator=_generator(), dtype=torch.float64)
    ratio = torch.stack([discrepancy.sketch(x, 64, seed).square().sum() for seed in range(500)]) / x.square().sum()
    assert abs(ratio.mean() - 1) < 4 * math.sqrt(2 / 64) / math.sqrt(500)
    assert ratio.std() == pytest.approx(math.sqrt(2 / 64), rel=0.15)


def test_distances_of_sketches_are_off_by_a_tenth():
    g = _gradients(20, 5000)
    exact = discrepancy.pairwise(g)
    error = (discrepancy.pairwise(discrepancy.sketch(g)) / exact - 1)[~torch.eye(20, dtype=torch.bool)]
    assert error.square().mean().sqrt() < 1.5 * math.sqrt(2 / 256)
    assert error.abs().max() < 0.4


def test_size_and_seed_are_part_of_a_sketch():
    x = torch.randn(100, generator=_generator())
    assert torch.equal(discrepancy.sketch(x, seed=2), discrepancy.sketch(x, seed=2))
    assert not torch.equal(discrepancy.sketch(x, seed=2), discrepancy.sketch(x, seed=3))
    with pytest.raises(ValueError, match="size is 0"):
        discrepancy.sketch(x, size=0)


# Noise


def test_noise_by_hand():
    assert discrepancy.noise(torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]])) == pytest.approx(8 / 6)


@settings(max_examples=30)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(0, 1000))
def test_noise_is_that_of_the_reference(m, d, seed):
    g = torch.randn(m, d, generator=_generator(seed), dtype=torch.float64)
    assert discrepancy.noise(g) == pytest.approx(perm_maths.noise(g.tolist()), rel=1e-12)
    assert discrepancy.noise(g, torch.full((m,), 7)) == pytest.approx(perm_maths.noise(g.tolist()), rel=1e-12)


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [13, 1, 1, 1], [9, 4, 2, 1]])
def test_noise_is_the_variance_of_the_mean_gradient_whatever_the_sizes(sizes):
    """16 samples of unit variance in 10 dimensions: the mean has variance 10 / 16."""
    samples = torch.randn(2000, 16, 10, generator=_generator(), dtype=torch.float64)
    micro = torch.stack([part.mean(1) for part in samples.split(sizes, dim=1)], 1)
    q = torch.tensor([discrepancy.noise(g, torch.tensor(sizes)) for g in micro])
    assert q.mean() == pytest.approx(10 / 16, abs=4 * float(q.std()) / math.sqrt(len(q)))


def test_noise_of_equal_gradients_is_zero():
    assert discrepancy.noise(torch.ones(4, 3)) == 0


def test_one_micro_batch_tells_nothing_and_the_others_fill_it_in():
    assert math.isnan(discrepancy.noise(torch.ones(1, 3)))
    q = discrepancy.fill_noise(torch.tensor([0.1, math.nan, 0.3, math.nan]), torch.tensor([10, 1, 10, 2]))
    assert torch.allclose(q, torch.tensor([0.1, 2.0, 0.3, 1.0]))


def test_known_noise_is_left_as_it_is():
    q = torch.tensor([0.1, 0.0])
    assert torch.equal(discrepancy.fill_noise(q, torch.ones(2)), q)


def test_noise_that_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match="no client has two samples"):
        discrepancy.fill_noise(torch.tensor([math.nan, math.nan]), torch.ones(2))


def test_micro_batches_without_samples_are_an_error():
    with pytest.raises(ValueError, match=r"sizes \[3.0, 0.0\]"):
        discrepancy.noise(torch.ones(2, 3), torch.tensor([3, 0]))
    with pytest.raises(ValueError, match="each of the 2"):
        discrepancy.noise(torch.ones(2, 3), torch.tensor([3, 1, 1]))
    with pytest.raises(ValueError, match=r"\(batches, coordinates\)"):
        discrepancy.noise(torch.ones(3))


# Distances of very many clients, row by row


def many_gradients(dtype=torch.float64):
    """Eleven gradients, of which three are equal, as two chunks."""
    g = torch.randn(11, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 100
    g[4] = g[9] = g[1]
    return g.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 4, 256])
def test_distances_row_by_row_are_those_of_the_matrix(dtype, block, monkeypatch):
    monkeypatch.setattr(discrepancy, "BLOCK", block)
    g = many_gradients(dtype)
    literal = (g.double()[:, None] - g.double()).square().sum(-1)
    lazy = discrepancy.Distances([g[:, :3], g[:, 3:]])
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for rows in (slice(None), slice(2, 7), torch.tensor([10, 0, 4, 4])):
        torch.testing.assert_close(lazy[rows], literal[rows], rtol=tolerance, atol=tolerance)
    assert lazy.shape == (11, 11) and len(lazy) == 11
    assert lazy.max() == float(lazy[:].max())
    same = torch.tensor([1, 4, 9])
    assert not lazy[:].diagonal().any() and not lazy[same][:, same].any()


def test_relabelling_clients_relabels_distances_row_by_row_to_the_bit(monkeypatch):
    monkeypatch.setattr(discrepancy, "BLOCK", 4)
    g, order = many_gradients(torch.float32), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    lazy = discrepancy.Distances(g)
    assert torch.equal(discrepancy.Distances(g[order])[:], lazy[:][order][:, order])
    assert torch.equal(discrepancy.reordered(lazy, order)[:], lazy[:][order][:, order])
    assert torch.equal(discrepancy.reordered(lazy[:], order), lazy[:][order][:, order])
    some = torch.tensor([3, 8])
    assert torch.equal(lazy[some], lazy[:][some])


def test_from_so_many_clients_on_distances_are_no_matrix(monkeypatch):
    monkeypatch.setattr(discrepancy, "DENSE_UP_TO", 10)
    assert isinstance(discrepancy.distances([many_gradients()], 11), discrepancy.Distances)
    matrix = discrepancy.distances([many_gradients()[:10]], 10)
    assert torch.equal(matrix, discrepancy.pairwise(many_gradients()[:10]))


def test_distances_row_by_row_refuse_what_the_matrix_refuses():
    bad = many_gradients()
    bad[3, 2] = math.inf
    for gradients, words in ((bad, "client 3 is not finite"), (torch.zeros(3, 0), "no gradients")):
        with pytest.raises(ValueError, match=words):
            discrepancy.Distances(gradients)


def test_short_gradients_of_several_models_are_compared_in_one_product():
    one, other = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    both = discrepancy.Distances([one, other])
    assert len(both._pieces) == 1
    assert torch.equal(both[:], discrepancy.Distances(torch.cat([one, other], 1))[:])
