"""Chains of linear layers: what is taken for one, and gradients by hand against autograd."""

import pytest
import torch
from engine_models import convolutional, deep, dropping
from federation import CLASSES, INPUTS, build, random
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.device import chain
from hetperm.device.bench import Workshop


class Written(nn.Module):
    """A chain that is written as functions."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(torch.flatten(x, 1))))


class Residual(Written):
    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x.flatten(1))
        return self.two(h + h.relu())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.one(x.flatten(1))))


class Branching(Written):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def hooked() -> nn.Module:
    module = deep()
    module[1].register_forward_hook(lambda module, args, output: 2 * output)
    return module


def frozen() -> nn.Module:
    module = deep()
    module[1].bias.requires_grad_(False)
    return module


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES, bias=False))


NO_CHAINS = {
    "a convolution": convolutional,
    "dropout": dropping,
    "a residual": Residual,
    "a layer used twice": Twice,
    "a branch": Branching,
    "a hook": hooked,
    "a frozen parameter": frozen,
    "an activation at the end": lambda: nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES), nn.ReLU()),
    "two activations": lambda: nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 3)),
    "half a flattening": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(INPUTS, CLASSES)),
    "nothing": nn.Sequential,
    "a norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)),
}


@pytest.mark.parametrize("kind", NO_CHAINS)
def test_what_is_more_than_a_chain_is_not_taken_for_one(kind):
    assert chain.layers_of(NO_CHAINS[kind]()) is None


def by_hand_bench(make) -> chain.Chain:
    module = build(make)
    return chain.Chain(module, F.cross_entropy, layers=chain.layers_of(module, flat=True))


@pytest.mark.parametrize("make", [deep, Written, linear])
def test_gradients_of_a_chain_are_those_of_autograd(make):
    x, y = random((7, INPUTS), seed=1), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    plain, by_hand = Workshop(build(make), F.cross_entropy).full, by_hand_bench(make)
    for a, b in zip(plain.gradient(x, y), by_hand.gradient(x, y), strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)
    pieces = torch.arange(7).tensor_split(3)  # of 3, 2 and 2 samples
    for a, b in zip(plain.gradients((x, y), pieces, 2), by_hand.gradients((x, y), pieces, 2), strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)


def test_so_they_are_where_classes_are_masked():
    x, y = random((7, INPUTS), seed=1), torch.tensor([0, 2, 2, 0, 0, 2, 0])
    plain, by_hand = Workshop(build(deep), F.cross_entropy).full, by_hand_bench(deep)
    plain.classes = by_hand.classes = torch.tensor([True, False, True])
    for a, b in zip(plain.gradient(x, y), by_hand.gradient(x, y), strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)
    assert float(by_hand.gradient(x, y)[-1][1]) == 0


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_so_they_are_for_every_activation(activation):
    make = lambda: nn.Sequential(nn.Linear(INPUTS, 5), activation(), nn.Linear(5, CLASSES))  # noqa: E731
    x, y = random((7, INPUTS), seed=1), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    plain, by_hand = Workshop(build(make), F.cross_entropy).full, by_hand_bench(make)
    for a, b in zip(plain.gradient(x, y), by_hand.gradient(x, y), strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)


def test_a_step_of_logistic_regression_by_hand():
    """One sample (1, 2) of class 0 and weights of zero: the error is (-1/2, 1/2), and so are both steps, times lr."""
    layers = [chain.Layer("w", "b")]
    params = {"w": torch.zeros(1, 2, 2), "b": torch.zeros(1, 2)}
    shard = (torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    chain.descend(layers, params, [shard], [torch.tensor([[0]])], [0.5], [None])
    assert params["w"].tolist() == [[[0.25, 0.5], [-0.25, -0.5]]]
    assert params["b"].tolist() == [[0.25, -0.25]]
