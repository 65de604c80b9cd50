"""Slicer: which part of a model somebody is handed, and how it comes back."""

import itertools

import pytest
import torch
from federation import (
    CLASSES,
    HIDDEN,
    IMAGE,
    INPUTS,
    NAMES,
    WIDTHS,
    ResNet,
    build,
    equal,
    make_clients,
    make_method,
    make_shop,
    mlp,
    random,
    run,
    scalable,
    start,
)
from reference import hetero
from reference_inputs import as_list, assert_close, kept
from torch import Tensor, nn

from hetperm.server.slicer import Slicer
from submodels import WHOLE


def test_a_part_by_hand():
    """Half of 8 and of 6 units: the first 4 and the first 3."""
    slicer = Slicer(scalable())
    index = slicer.index(0.5)
    assert kept(index) == [[0, 1, 2, 3], [0, 1, 2]]
    part = slicer.cut(start(), index)
    assert [tuple(part[name].shape) for name in NAMES] == [(4, 5), (4,), (3, 4), (3,), (3, 3), (3,)]
    assert torch.equal(part["2.weight"], start()["2.weight"][:3, :4])
    quarter = slicer.index(0.25, within=0.5)
    assert kept(quarter) == [[0, 1], [0, 1]] and quarter.sizes == slicer.index(0.5).counts


def test_rolling_parts_move_on_by_a_channel_a_round_and_wrap_round():
    slicer = Slicer(scalable())
    assert kept(slicer.index(0.5, "rolling", round=0)) == [[0, 1, 2, 3], [0, 1, 2]]
    assert kept(slicer.index(0.5, "rolling", round=1)) == [[1, 2, 3, 4], [1, 2, 3]]
    assert kept(slicer.index(0.5, "rolling", round=6)) == [[6, 7, 0, 1], [0, 1, 2]]
    assert kept(slicer.index(0.25, "rolling", within=0.5, round=3)) == [[3, 0], [0, 1]]


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
def test_what_is_put_back_replaces_the_part_and_nothing_else(extraction):
    slicer, before = Slicer(scalable()), {name: x.clone() for name, x in start().items()}
    index = slicer.index(0.5, extraction, round=2, key=(5,))
    part = slicer.cut(start(), index)
    assert equal(slicer.put(start(), index, part), start())
    marked = slicer.put(start(), index, {name: torch.full_like(x, 9.0) for name, x in part.items()})
    for name, x in start().items():
        assert torch.equal(marked[name] == 9.0, index.mask(name))
        assert torch.equal(marked[name][~index.mask(name)], x[~index.mask(name)])
    assert equal(start(), before)


def test_a_whole_model_is_neither_cut_nor_copied():
    slicer, other = Slicer(scalable()), {"0.bias": torch.zeros(8)}
    for index in (slicer.index(1.0), slicer.index(0.5, "rolling", within=0.25), Slicer().index(0.5)):
        assert index is WHOLE
        assert slicer.cut(start(), index) is start() and slicer.put(start(), index, other) is other


def test_a_width_that_leaves_out_no_channel_is_the_whole():
    slicer = Slicer(scalable())
    assert slicer.index(0.97) is WHOLE and slicer.index(0.97, "random") is WHOLE  # of 8 and 6, rounded up
    assert slicer.index(0.49, within=0.5) is WHOLE
    assert slicer.index(0.87) is not WHOLE


def test_random_parts_are_drawn_anew_for_every_seed_round_and_client():
    slicer, usual = Slicer(scalable()), {"seed": 3, "round": 2, "key": (5,)}
    changes = ({}, {"seed": 4}, {"round": 3}, {"key": (6,)}, {"key": (5, 6)}, {"key": (6, 5)})
    drawn = [kept(slicer.index(0.5, "random", **usual | change)) for change in changes]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))
    assert drawn[0] == kept(Slicer(scalable()).index(0.5, "random", **usual))


def test_an_unknown_extraction_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown extraction 'dense'; use static, random, rolling"):
        Slicer(scalable()).index(0.5, "dense")


# Coupled channels


class Residual(nn.Module):
    """A stream that two branches are added to: its channels are one group through four layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(INPUTS, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.c, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.b(self.a(x).relu())
        return self.head((x + self.c(x)).relu())


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
@pytest.mark.parametrize(("model", "shape"), [(Residual, (INPUTS,)), (ResNet, IMAGE)])
def test_coupled_channels_stay_aligned_whatever_is_extracted(model, shape, extraction):
    """The part at a host gives the outputs of the whole model in which all other channels are zero."""
    slicer, x = Slicer(scalable(model)), random((6, *shape), seed=4)
    w, full, shop = start(model), build(model), make_shop(model)
    for t, (own, host) in itertools.product(range(3), [(1.0, 0.5), (1.0, 0.13), (0.75, 0.3)]):
        outer, index = slicer.index(own), slicer.index(host, extraction, within=own, seed=1, round=t, key=(5,))
        shop.at(host).load(slicer.cut(slicer.cut(w, outer), index))
        inside = index if outer is WHOLE else outer.compose(index)
        full.load_state_dict({name: x * inside.mask(name) for name, x in w.items()}, strict=False)
        torch.testing.assert_close(shop.at(host).outputs(x), full.train()(x), rtol=0, atol=1e-12)


# Parameters that are not trained


def half_frozen() -> nn.Module:
    """A network whose first layer is not trained."""
    model = mlp()
    model[0].requires_grad_(False)
    return model


def test_a_part_has_the_parameters_that_are_not_trained_of_its_own_channels():
    slicer, x = Slicer(scalable(half_frozen)), random((6, INPUTS), seed=4)
    model, whole = start(half_frozen), dict(build(half_frozen).named_parameters())
    bench = make_shop(half_frozen).at(0.25)
    bench.load(slicer.cut(slicer.cut(model, slicer.index(0.5)), slicer.index(0.25, within=0.5)))
    units = hetero.first(0.25, HIDDEN)
    expected = hetero.scores([model.get(name, whole[name]) for name in NAMES], units, x)
    torch.testing.assert_close(bench.outputs(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", ["extraction", "nested"])
def test_parameters_that_are_not_trained_and_cut_are_refused_with_moving_parts(where):
    clients = make_clients()
    for kind in ("random", "rolling"):
        algorithm = make_method("perm", clients, model=half_frozen, **{where: kind})
        with pytest.raises(ValueError) as error:
            algorithm.epoch(algorithm.begin())
        expected = f"0.weight is cut and not trained, so clients hold one part of it; extraction '{kind}' would need "
        assert str(error.value) == expected + "another every round: use 'static', or train it"


def test_with_static_parts_they_are_no_obstacle():
    assert list(run(make_method("perm", make_clients(), model=half_frozen)).w) == list(NAMES[2:])


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
def test_personal_models_begin_as_static_parts_of_the_warm_model(extraction):
    state = make_method("perm", make_clients(), extraction=extraction).begin()
    for params, width in zip(state.v, WIDTHS, strict=True):
        assert_close(params, as_list(state.w), width, atol=0)
