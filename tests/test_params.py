"""Parameters by name: the arithmetic of models, by hand."""

import pytest
import torch

from hetperm import params
from hetperm.params import NotFinite


def model(*values):
    return {"a": torch.tensor(values[:2], dtype=torch.float64), "b": torch.tensor([values[2:]], dtype=torch.float64)}


def as_lists(tensors):
    return {name: x.tolist() for name, x in tensors.items()}


def test_a_mixture_is_the_weighted_sum_of_models_and_leaves_them_alone():
    one, other = model(1, 2, 3), model(10, 20, 30)
    assert as_lists(params.mixed((one, 0.5), (other, 0.25), (one, 2))) == {"a": [5.0, 10.0], "b": [[15.0]]}
    assert as_lists(one) == {"a": [1.0, 2.0], "b": [[3.0]]} and as_lists(other) == {"a": [10.0, 20.0], "b": [[30.0]]}


def test_a_step_goes_down_the_gradient():
    assert as_lists(params.subtract(model(1, 2, 3), model(1, -1, 2), 0.5)) == {"a": [0.5, 2.5], "b": [[2.0]]}


def test_the_distance_of_models_is_that_of_all_their_numbers():
    assert float(params.distance(model(0, 0, 0), model(2, 3, 6))) == 7


def test_a_model_outside_the_ball_is_drawn_to_its_surface_and_one_inside_stays():
    centre, away = model(0, 0, 0), model(2, 3, 6)
    inside = params.project(away, centre, 7.0)
    assert inside is away
    projected = params.project(away, centre, 3.5)
    assert as_lists(projected) == {"a": [1.0, 1.5], "b": [[3.0]]}


def test_bytes_are_counted_by_the_kind_of_number():
    assert params.num_bytes({"a": torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.float64)}) == 6 * 4 + 2 * 8


def test_a_flat_model_comes_back_in_its_shapes():
    like = {"a": torch.zeros(2, 3), "b": torch.zeros(()), "c": torch.zeros(0, 4)}
    vector = torch.arange(7.0)
    back = params.unflatten(vector, like)
    assert as_lists(back) == {"a": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "b": 6.0, "c": []}
    assert torch.equal(params.flat(list(back.values())), vector)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_model_that_is_not_finite_is_refused_by_name_and_place(value):
    with pytest.raises(NotFinite, match=r"^epoch 3: model 1: b is not finite; lower the learning rate"):
        params.check_finite(model(1, 2, value), "epoch 3: model 1")


def test_large_finite_numbers_whose_sum_overflows_are_finite():
    large = {"a": torch.full((4,), torch.finfo(torch.float32).max)}
    assert params.check_finite(large, "here") is large
