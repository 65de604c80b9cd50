"""The first model of a client that joins: which of its partners' models it is the mean of."""

import pytest
import torch
from torch import nn

from hetperm.runs.blend import OUTSIDE, blended
from hetperm.server.slicer import Slicer
from submodels import ScalableModel


@pytest.fixture(scope="module")
def slicer() -> Slicer:
    """A slicer of a network with eight hidden units."""
    return Slicer(ScalableModel(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 2)))


def filled(slicer: Slicer, width: float, value: float) -> dict:
    """A model of a width whose every number is the same."""
    whole = {name: torch.full_like(x, value) for name, x in slicer.scalable.model.named_parameters()}
    return slicer.cut(whole, slicer.index(width))


def made(slicer, values, widths, weights, wanted):
    """What is made of partners with these numbers for a client whose loss is the distance from the wanted one."""
    models = {j: filled(slicer, widths[j], value) for j, value in enumerate(values)}

    def loss(params):
        return float(sum((x - wanted).square().sum() for x in params.values()))

    return blended(slicer, models, widths, weights, loss)


def test_partners_that_make_the_mean_worse_are_left_out(slicer):
    """Of 3, 0 and 5 the mean of the first and the last is nearest to 4; the 0 pulls it away."""
    model, made_of = made(slicer, [3.0, 0.0, 5.0, 9.0], [1.0] * 4, {0: 0.25, 1: 0.5, 2: 0.25}, wanted=4.0)
    assert made_of == [0, 2]
    assert all([bool((x == 4.0).all()) for x in model.values()])


def test_the_mean_is_by_the_weights(slicer):
    model, made_of = made(slicer, [3.0, 7.0, 9.0], [1.0] * 3, {0: 0.75, 1: 0.25}, wanted=4.0)
    assert made_of == [0, 1] and all([bool((x == 4.0).all()) for x in model.values()])


def test_where_no_partner_reaches_the_global_model_counts_half(slicer):
    """A partner of half the width has four of eight hidden units."""
    model, made_of = made(slicer, [3.0, 8.0], [0.5, 1.0], {0: 1.0}, wanted=3.0)
    assert made_of == [0] and OUTSIDE == 0.5
    first, bias = model["0.weight"], model["2.bias"]
    assert bool((first[:4] == 3.0).all() and (first[4:] == 4.0).all() and (bias == 3.0).all())


def test_a_wide_partner_that_fits_is_preferred_to_a_narrow_one(slicer):
    """The narrow one leaves the outer units to the global model, which is far off; the mean brings that back in."""
    _, made_of = made(slicer, [3.0, 3.5, 90.0], [0.5, 1.0, 1.0], {0: 0.9, 1: 0.1}, wanted=3.0)
    assert made_of[-1] == 1


def test_without_partners_it_is_the_part_of_the_global_model(slicer):
    model, made_of = made(slicer, [3.0, 8.0], [1.0, 0.5], {}, wanted=0.0)
    assert made_of == [] and all([bool((x == 8.0).all()) for x in model.values()])


def test_a_partner_whose_model_overflows_is_left_out(slicer):
    models = {0: filled(slicer, 1.0, 3.0), 1: filled(slicer, 1.0, 4.0), 2: filled(slicer, 1.0, 0.0)}
    model, made_of = blended(
        slicer, models, [1.0] * 3, {0: 0.5, 1: 0.5}, lambda params: float("inf") if params["2.bias"][0] > 3 else 1.0
    )
    assert made_of == [0] and bool((model["2.bias"] == 3.0).all())
