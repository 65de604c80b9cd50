"""Complexity of architectures: VC dimension, layers, and the term of the mixing problem."""

import math

import pytest
import torch
from torch import nn

from hetperm.mixing import complexity


def test_vc_by_hand():
    assert complexity.vc(256, 2) == 256 * 2 * 8
    assert complexity.vc(1, 1) == 0


@pytest.mark.parametrize(
    ("units", "params", "vc"),
    [(200, 199_210, 1.05e7), (100, 89_610, 4.4e6), (50, 42_310, 1.95e6), (25, 20_535, 8.8e5), (13, 10_527, 4.2e5)],
)
def test_an_mlp_at_five_widths(units, params, vc):
    mlp = nn.Sequential(
        nn.Flatten(), nn.Linear(784, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 10)
    )
    assert complexity.vc_of(mlp) == complexity.vc(params, 3) == pytest.approx(vc, rel=0.01)


def test_layers_are_modules_that_own_a_matrix():
    block = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    assert complexity.num_layers(block) == 1
    assert complexity.num_layers(nn.Sequential(block, nn.Flatten(), nn.Linear(4, 4), nn.LayerNorm(4))) == 2
    assert complexity.num_layers(nn.MultiheadAttention(8, 2)) == 2  # one owns the joint input projection


def test_a_module_used_twice_is_one_layer():
    shared = nn.Linear(4, 4)
    assert complexity.num_layers(nn.Sequential(shared, nn.ReLU(), shared)) == 1


def test_only_the_architecture_counts():
    with torch.device("meta"):
        meta = nn.Linear(10, 10)
    assert complexity.vc_of(meta) == complexity.vc_of(nn.Linear(10, 10))


def test_the_term_falls_with_samples_and_grows_with_the_architecture():
    h = complexity.term(torch.tensor([100.0, 100.0, 400.0]), torch.tensor([1, 4, 4]))
    assert h.tolist() == [10.0, 5.0, 10.0]
    assert complexity.term([complexity.vc(256, 2)], [16]).tolist() == [math.sqrt(256)]


def test_nothing_to_learn_with_is_an_error():
    with pytest.raises(ValueError, match="0 parameters in 1 layers"):
        complexity.vc(0, 1)
    with pytest.raises(ValueError, match="has no VC dimension"):
        complexity.vc_of(nn.ReLU())
    with pytest.raises(ValueError, match="vc >= 0 and n > 0"):
        complexity.term(torch.tensor([4.0]), torch.tensor([0]))
