"""The simplex: projection and water-filling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import perm_maths

from hetperm.mixing.simplex import project, water_fill

ROWS = st.lists(st.floats(-5, 5) | st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8)


def _double(x):
    return torch.tensor(x, dtype=torch.float64)


def test_by_hand():
    x = torch.tensor([[3.0, 0.0, 0.0], [0.5, 0.5, 0.5], [1.0, 0.5, -2.0]])
    assert torch.allclose(project(x), torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.75, 0.25, 0.0]]))


@settings(max_examples=60)
@given(ROWS)
def test_the_projection_is_that_of_the_reference(x):
    assert torch.allclose(project(_double(x)), _double(perm_maths.project(x)), rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(ROWS)
def test_projecting_twice_is_projecting_once(x):
    once = project(_double(x))
    assert (once >= 0).all() and abs(float(once.sum()) - 1) < 1e-12
    assert torch.allclose(project(once), once, rtol=0, atol=1e-15)


@settings(max_examples=60)
@given(ROWS, st.randoms(use_true_random=False))
def test_relabelling_relabels_exactly(x, random):
    order = list(range(len(x)))
    random.shuffle(order)
    assert torch.equal(project(_double(x)[order]), project(_double(x))[order])


def test_nearer_than_any_other_point_of_the_simplex(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    other = -torch.rand(1000, 1, 5, generator=generator, dtype=torch.float64).log()
    other /= other.sum(-1, keepdim=True)
    assert ((other - x).norm(dim=-1) >= (project(x) - x).norm(dim=-1) - 1e-12).all()


def test_rows_of_a_batch_are_projected_one_by_one_in_any_shape():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    out = project(x)
    assert out.shape == x.shape and out.dtype == torch.float32
    assert all(torch.equal(out[a, b], project(x[a, b])) for a in range(2) for b in range(3))
    assert project(torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("scale", [1e-300, 1e-8, 1e8, 1e300])
def test_extreme_rows_stay_on_the_simplex(scale):
    out = project(_double([0.3, -0.7, 1.0, 1.0]) * scale)
    assert abs(float(out.sum()) - 1) < 1e-12 and (out >= 0).all()
    assert out[2] == out[3] == out.max()


def test_broad_columns_take_more_water_and_high_ones_none():
    out = water_fill(_double([[0.0, 0.0, 5.0], [0.0, 1.0, 1.0]]), _double([1.0, 3.0, 1.0]))
    assert torch.allclose(out, _double([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]))
    assert out[0, 2] == 0


def test_whole_numbers_are_projected_as_floats():
    assert project(torch.tensor([2, 0])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.zeros(3, 0)])
def test_no_row_is_an_error(x):
    with pytest.raises(ValueError, match="no row to project"):
        project(x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_an_error(value):
    with pytest.raises(ValueError, match="nan or inf"):
        project(torch.tensor([0.0, value]))
