"""Weights from the few clients that are near: equal to the bit to those from all, whatever the distances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetperm import mixing
from hetperm.mixing import discrepancy, near


def problem(seed: int, N: int, groups: int) -> dict[str, torch.Tensor]:
    """Clients in groups, some with equal gradients, equal samples or no noise."""
    stream = torch.Generator().manual_seed(seed)
    centre = torch.randn(groups, 5, generator=stream) * float(torch.rand((), generator=stream)) * 6
    g = centre[torch.arange(N) % groups] + torch.randn(N, 5, generator=stream)
    g[torch.randint(N, (N // 4,), generator=stream)] = g[0].clone()
    q = torch.rand(N, generator=stream, dtype=torch.float64) * torch.randint(3, (N,), generator=stream)
    return {
        "g": g,
        "q": q,
        "n": torch.randint(1, 4, (N,), generator=stream) ** 3,
        "vc": torch.randint(1, 9, (N,), generator=stream) * 100,
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())


@settings(max_examples=80)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from([0.0, 1e-3, 0.1, 0.7, 2.8, 1e6, math.inf]),
    st.sampled_from(["noise", "level", 10.0]),
    st.sampled_from([0.0, 0.05, "raw"]),
)
def test_sparse_weights_are_the_dense_ones_to_the_bit(seed, N, groups, share, regularization, vc_weight):
    x = problem(seed, N, groups)
    options = {"share": share, "regularization": regularization, "vc": x["vc"], "vc_weight": vc_weight}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discrepancy, "BLOCK", 7)
        for zeta in (discrepancy.pairwise(x["g"]), discrepancy.Distances([x["g"][:, :2], x["g"][:, 2:]])):
            whole = mixing.sparse(mixing.weights(zeta, x["q"], x["n"], **options))
            assert same(mixing.sparse_weights(zeta, x["q"], x["n"], **options), whole)


def test_a_client_beyond_the_first_bound_is_found_when_the_level_rises_above_it():
    """Ten partners at 1.33 raise the level of client 0 from 1.4 to 2.61; one at 2.38 lay beyond 1.25 times 1.4."""
    q = torch.ones(12, dtype=torch.float64)
    D = torch.zeros(12, 12, dtype=torch.float64)
    D[0, 1:11] = D[1:11, 0] = 1.33
    D[11, :11] = D[:11, 11] = 2.38
    zeta = D + q + q[:, None]
    zeta.fill_diagonal_(0.0)
    alpha = mixing.sparse_weights(zeta, q, torch.ones(12), share=0.7).to_dense()[0]
    height = 1.4 + (10 * 1.33 + 2.38) / 12  # with all twelve below it
    expected = (height - D[0]).clamp_min(0)
    torch.testing.assert_close(alpha, expected / expected.sum())
    assert alpha[11] > 0


def test_relabelling_very_many_clients_relabels_their_weights_to_the_bit(monkeypatch):
    monkeypatch.setattr(discrepancy, "BLOCK", 7)
    x, order = problem(1, 40, 4), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    one = mixing.sparse_weights(discrepancy.Distances(x["g"]), x["q"], x["n"])
    other = mixing.sparse_weights(discrepancy.Distances(x["g"][order]), x["q"][order], x["n"][order])
    assert torch.equal(other.to_dense(), one.to_dense()[order][:, order])


def test_far_clients_are_not_looked_at(monkeypatch):
    x = problem(2, 200, 20)
    g = torch.arange(20).repeat(10)[:, None] * 20 + x["g"] / 10
    looked = []
    at = discrepancy.Products.at
    monkeypatch.setattr(
        discrepancy.Products, "at", lambda self, *where: looked.append(len(where[0])) or at(self, *where)
    )
    zeta, q, n = discrepancy.Distances(g), torch.full((200,), 1.0), torch.full((200,), 50)
    monkeypatch.setattr(discrepancy.Distances, "max", None)  # nor is there a pass for the largest distance
    alpha = mixing.sparse_weights(zeta, q, n)
    assert mixing.same_group_mass(alpha, torch.arange(20).repeat(10)) == pytest.approx(1)
    assert sum(looked) <= 200 * 10
    mixing.spread(alpha, zeta, q)
    assert sum(looked) <= 200 * 10 + 200 * 10 * 10


@pytest.mark.parametrize("wide", [0, 10**9])
def test_the_spread_over_pairs_is_that_over_rows(wide, monkeypatch):
    monkeypatch.setattr(near, "WIDE", wide)
    monkeypatch.setattr(near, "ENTRIES", 50)
    x = problem(3, 30, 3)
    for zeta in (discrepancy.pairwise(x["g"]).double(), discrepancy.Distances(x["g"])):
        alpha = mixing.weights(zeta, x["q"], x["n"])
        found = mixing.spread(mixing.sparse(alpha), zeta, x["q"])
        torch.testing.assert_close(found, mixing.spread(alpha, zeta, x["q"]), rtol=1e-12, atol=1e-12)


def test_rows_that_are_asked_for_again_are_not_computed_again(monkeypatch):
    x = problem(4, 30, 3)
    zeta, asked = discrepancy.Distances(x["g"]), [3, 20, 7]
    first = mixing.weights_of(asked, zeta, x["q"], x["n"], share=0.7)
    monkeypatch.setattr(discrepancy.Distances, "_products", None)
    assert torch.equal(mixing.weights_of(asked, zeta, x["q"], x["n"], share=0.7), first)


def test_products_that_would_overflow_are_an_error():
    for gradients in (torch.eye(3) * 1e19, [torch.ones(3, 2), torch.eye(3) * 1e19]):
        with pytest.raises(ValueError, match=r"up to 1.0e\+19 are too large to compare"):
            discrepancy.Distances(gradients)
