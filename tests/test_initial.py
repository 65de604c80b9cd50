"""New models for clients that train alone."""

import torch
from federation import CLASSES, INPUTS, equal, mlp, scalable, start
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.device.bench import Workshop
from hetperm.server.initial import fresh_model
from hetperm.server.slicer import Slicer


class Scaled(nn.Module):
    """A parameter outside of layers that can be reset."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.scale * self.one(x).relu())


def test_a_fresh_model_does_not_depend_on_what_was_trained_before():
    """The global model's module may be a workbench too, and holds what was trained on it last."""
    slicer = Slicer(scalable(Scaled))
    bench = Workshop(slicer.scalable.model, F.cross_entropy, slicer.scalable).full
    once = fresh_model(slicer, 0.5, start(Scaled), seed=0)
    bench.load({name: torch.full_like(x, 9.0) for name, x in start(Scaled).items()})
    again = fresh_model(slicer, 0.5, start(Scaled), seed=0)
    assert equal(once, again)
    assert torch.equal(again["scale"], start(Scaled)["scale"][:4])
    assert not torch.equal(again["one.weight"], start(Scaled)["one.weight"][:4])


def test_who_holds_the_whole_model_begins_at_the_start():
    assert fresh_model(Slicer(scalable()), 1.0, start(), seed=0) is start()
    assert fresh_model(Slicer(), 0.5, start(), seed=0) is start()  # nothing can be cut


def test_fresh_weights_are_as_large_as_those_of_a_layer_of_their_own_size():
    """Weights are drawn up to one over the root of the inputs: 1/2 for the four units of a part, not 1/sqrt(8)."""
    weights = fresh_model(Slicer(scalable()), 0.5, start(), seed=0)["2.weight"]
    assert weights.shape == (3, 4) and 8**-0.5 < float(weights.abs().max()) <= 4**-0.5


def test_fresh_models_differ_by_seed_and_are_the_same_for_clients_of_one_size():
    slicer = Slicer(scalable(mlp))
    one = fresh_model(slicer, 0.5, start(), seed=0)
    assert equal(one, fresh_model(slicer, 0.49, start(), seed=0))
    assert not equal(one, fresh_model(slicer, 0.5, start(), seed=1))


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    fresh_model(Slicer(scalable()), 0.5, start(), seed=0)
    assert torch.equal(before, torch.get_rng_state())
