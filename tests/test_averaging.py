"""average: every coordinate over the sub-models that cover it."""

import itertools
import pkgutil
import types

import modules
import pytest
import torch
from reference import slicing_loops as loops
from torch import nn

import submodels
from submodels import IndexSet, Random, Rolling, ScalableModel, Static, average


@pytest.fixture
def scalable():
    """Groups of 8 and 6 channels, a batch norm between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    return ScalableModel(model.double(), torch.zeros(2, 4).double())


def _filled(sub, value):
    """The tensors of a sub-model, all of them holding one value."""
    return {name: torch.full_like(x, value) if x.is_floating_point() else x for name, x in sub.tensors().items()}


def _random(sub, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype)
        for name, x in sub.tensors().items()
    }


def _clients(scalable, number, seed=0):
    """Updates of clients of mixed widths and extractors, with weights."""
    cuts = itertools.cycle([(0.3, Random(seed)), (0.5, Rolling()), (0.75, Random(seed)), (0.5, Static())])
    updates = []
    for client, (width, extractor) in zip(range(number), cuts):
        sub = scalable.extract(width, extractor, round=3 + client, client=client)
        updates.append((_random(sub, seed + client), sub.index, 1.0 + client))
    return updates


def _averaged(scalable):
    """Names of the tensors that are averaged."""
    return [
        name for name, x in scalable.tensors().items() if not name.startswith("1.running") and x.is_floating_point()
    ]


# By hand


@pytest.mark.parametrize("extractor", [Static(), Rolling(), Random()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_two_clients_holding_0_and_1_average_to_exactly_one_half(scalable, extractor, dtype):
    scalable.model.to(dtype)
    sub = scalable.extract(0.5, extractor, round=6)
    got = average(scalable.tensors(), [(_filled(sub, 0.0), sub.index, 1.0), (_filled(sub, 1.0), sub.index, 1.0)])
    for name in _averaged(scalable):
        assert got[name].dtype == dtype
        assert (got[name][sub.index.mask(name)] == 0.5).all(), name


def test_three_clients_holding_0_1_and_2_average_to_exactly_one(scalable):
    subs = [scalable.extract(0.5, Rolling(), round=round) for round in (0, 0, 0)]
    for order in itertools.permutations(range(3)):
        updates = [(_filled(subs[i], float(i)), subs[i].index, 1.0) for i in order]
        got = average(scalable.tensors(), updates)
        for name in _averaged(scalable):
            assert (got[name][subs[0].index.mask(name)] == 1.0).all(), name


def test_a_coordinate_that_one_of_two_clients_covers_takes_that_clients_value(scalable):
    narrow, wide = scalable.extract(0.25), scalable.extract(0.5)
    got = average(scalable.tensors(), [(_filled(narrow, 0.0), narrow.index, 1), (_filled(wide, 1.0), wide.index, 1)])
    both, one = narrow.index.mask("3.weight"), wide.index.mask("3.weight")
    assert (got["3.weight"][both] == 0.5).all()
    assert (got["3.weight"][one & ~both] == 1.0).all()


def test_a_coordinate_nobody_covers_keeps_its_value_to_the_bit(scalable):
    w = scalable.tensors()
    subs = [scalable.extract(0.25, Rolling(), round=round) for round in (1, 2)]
    got = average(w, [(_filled(sub, 7.0), sub.index, 3.0) for sub in subs])
    for name in _averaged(scalable):
        covered = subs[0].index.mask(name) | subs[1].index.mask(name)
        assert torch.equal(got[name][~covered], w[name][~covered]), name
        assert (got[name][covered] == 7.0).all(), name
    assert not (subs[0].index.mask("3.weight") | subs[1].index.mask("3.weight")).all()


def test_a_value_that_is_not_finite_is_kept_too_where_nobody_covers_it(scalable):
    w = {name: torch.full_like(x, torch.inf) if x.is_floating_point() else x for name, x in scalable.tensors().items()}
    sub = scalable.extract(0.5)
    got = average(w, [(_filled(sub, 1.0), sub.index, 1.0)])
    for name in _averaged(scalable):
        mask = sub.index.mask(name)
        assert (got[name][mask] == 1).all()
        assert got[name][~mask].isposinf().all()


def test_weights_are_the_clients_shares(scalable):
    sub = scalable.extract(0.5, Random())
    got = average(scalable.tensors(), [(_filled(sub, 0.0), sub.index, 30), (_filled(sub, 1.0), sub.index, 10)])
    for name in _averaged(scalable):
        assert (got[name][sub.index.mask(name)] == 0.25).all()


def test_a_client_of_weight_zero_has_no_say(scalable):
    w = scalable.tensors()
    sub, other = scalable.extract(0.5), scalable.extract(1.0)
    got = average(w, [(_filled(sub, 1.0), sub.index, 1.0), (_filled(other, torch.nan), other.index, 0.0)])
    for name in _averaged(scalable):
        mask = sub.index.mask(name)
        assert (got[name][mask] == 1).all()
        assert torch.equal(got[name][~mask], w[name][~mask])


def test_when_every_weight_is_zero_nothing_changes(scalable):
    w = scalable.tensors()
    sub = scalable.extract(0.5)
    got = average(w, [(_filled(sub, 1.0), sub.index, 0.0)] * 2)
    assert all(torch.equal(got[name], w[name]) for name in w)


def test_without_updates_the_model_comes_back(scalable):
    w = scalable.tensors()
    got = average(w, [])
    assert got.keys() == w.keys()
    assert all(torch.equal(got[name], w[name]) for name in w)


def test_a_tensor_that_a_client_leaves_out_is_averaged_over_the_others(scalable):
    sub = scalable.extract(0.5)
    partial = {name: x for name, x in _filled(sub, 0.0).items() if name != "3.weight"}
    got = average(scalable.tensors(), [(partial, sub.index, 1.0), (_filled(sub, 1.0), sub.index, 1.0)])
    assert (got["3.weight"][sub.index.mask("3.weight")] == 1.0).all()
    assert (got["0.weight"][sub.index.mask("0.weight")] == 0.5).all()


def test_running_statistics_and_counters_come_back_as_they_were(scalable):
    w = scalable.tensors()
    sub = scalable.extract(1.0)
    got = average(w, [(_filled(sub, 5.0), sub.index, 1.0)])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(got[name], w[name])
    assert (got["1.weight"] == 5.0).all()


def test_a_tied_weight_is_averaged_once():
    scalable = ScalableModel(modules.TiedWeights().double(), torch.zeros(modules.IMAGE).double())
    sub = scalable.extract(0.5)
    got = average(scalable.tensors(), [(_filled(sub, 0.0), sub.index, 1), (_filled(sub, 1.0), sub.index, 1)])
    assert got.keys() == scalable.tensors().keys()
    assert (got["loop.weight"][sub.index.mask("loop.weight")] == 0.5).all()


# Laws


def test_at_full_width_it_is_the_plain_mean(scalable):
    subs = [scalable.extract(1.0, Rolling(), round=round) for round in range(5)]
    updates = [(_random(sub, i), sub.index, 1.0) for i, sub in enumerate(subs)]
    got = average(scalable.tensors(), updates)
    for name in _averaged(scalable):
        wholes = [scalable.embed({name: tensors[name]}, index)[name] for tensors, index, _ in updates]
        torch.testing.assert_close(got[name], torch.stack(wholes).mean(0), rtol=1e-14, atol=1e-14)


def test_the_order_of_clients_does_not_matter(scalable):
    updates = _clients(scalable, 4)
    expected = average(scalable.tensors(), updates)
    for order in itertools.permutations(updates):
        got = average(scalable.tensors(), list(order))
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=1e-12)


def test_sorted_by_client_the_average_is_equal_to_the_bit(scalable):
    numbered = list(enumerate(_clients(scalable, 6)))
    expected = average(scalable.tensors(), [update for _, update in numbered])
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        arrived = [numbered[i] for i in torch.randperm(6, generator=generator)]
        got = average(scalable.tensors(), [update for _, update in sorted(arrived, key=lambda pair: pair[0])])
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_common_factor_of_the_weights_does_not_matter(scalable):
    updates = _clients(scalable, 4)
    expected = average(scalable.tensors(), updates)
    got = average(scalable.tensors(), [(tensors, index, 1000 * weight) for tensors, index, weight in updates])
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=1e-12)


def test_averaging_untrained_sub_models_changes_nothing(scalable):
    subs = [scalable.extract(w, Random(), client=i) for i, w in enumerate((0.25, 0.5, 0.75, 1.0))]
    w = scalable.tensors()
    got = average(w, [(sub.tensors(), sub.index, 1.0) for sub in subs])
    for name in w:
        torch.testing.assert_close(got[name], w[name], rtol=1e-14, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_loops_over_coordinates(scalable, seed):
    w, updates = scalable.tensors(), _clients(scalable, 5, seed)
    rows = torch.rand(5, 3, generator=torch.Generator().manual_seed(seed)) < 0.5
    got = average(w, updates, rows={"5.weight": rows, "5.bias": rows})
    first, second = (
        next(g.id for g in scalable.axis_map.groups if (n, 0) in g.members) for n in ("0.weight", "3.weight")
    )
    for name, groups in {
        "0.weight": (first, 4),
        "0.bias": (first,),
        "1.weight": (first,),
        "3.weight": (second, first),
        "5.weight": (3, second),
        "5.bias": (3,),
    }.items():
        by_hand = []
        for tensors, index, weight in updates:
            whole = [None if i > 1 else index.kept[i].tolist() for i in groups]
            positions = [list(range(i)) if kept is None else kept for i, kept in zip(groups, whole, strict=True)]
            by_hand.append((tensors[name], positions, weight))
        expected = loops.average(w[name], by_hand, rows if name.startswith("5") else None)
        torch.testing.assert_close(got[name], expected, rtol=1e-14, atol=1e-14)


def test_half_precision_is_summed_in_single_and_rounded_once(scalable):
    scalable.model.to(torch.bfloat16)
    sub = scalable.extract(1.0)
    updates = [(_filled(sub, value), sub.index, 1.0) for value in (1.0, 3.0) for _ in range(300)]
    got = average(scalable.tensors(), updates)  # in bfloat16 a sum of ones stops at 256
    assert got["3.weight"].dtype == torch.bfloat16
    assert (got["3.weight"] == 2.0).all()


# Rows: who may vote on which class


def test_a_row_is_averaged_over_the_clients_that_may_vote_on_it(scalable):
    w = scalable.tensors()
    sub = scalable.extract(0.5, Random())
    rows = torch.tensor([[True, True, False], [True, False, False]])
    updates = [(_filled(sub, 0.0), sub.index, 1.0), (_filled(sub, 1.0), sub.index, 3.0)]
    got = average(w, updates, rows={"5.weight": rows, "5.bias": rows})
    mask = sub.index.mask("5.weight")
    assert (got["5.weight"][0][mask[0]] == 0.75).all()
    assert (got["5.weight"][1][mask[1]] == 0.0).all()
    assert torch.equal(got["5.weight"][2], w["5.weight"][2])
    assert got["5.bias"].tolist() == [0.75, 0.0, w["5.bias"][2].item()]
    assert (got["3.weight"][sub.index.mask("3.weight")] == 0.75).all()  # other tensors are not concerned


def test_one_list_of_rows_holds_for_every_client(scalable):
    w = scalable.tensors()
    sub = scalable.extract(0.5)
    updates = [(_filled(sub, 0.0), sub.index, 1.0), (_filled(sub, 1.0), sub.index, 1.0)]
    got = average(w, updates, rows={"5.bias": torch.tensor([True, False, True])})
    assert got["5.bias"].tolist() == [0.5, w["5.bias"][1].item(), 0.5]


def test_rows_stay_with_their_client_when_another_has_weight_zero(scalable):
    sub = scalable.extract(1.0)
    rows = torch.tensor([[True, True, True], [True, False, False], [False, True, False]])
    updates = [(_filled(sub, v), sub.index, p) for v, p in ((9.0, 0.0), (1.0, 1.0), (2.0, 1.0))]
    w = scalable.tensors()
    got = average(w, updates, rows={"5.bias": rows})
    assert got["5.bias"].tolist() == [1.0, 2.0, w["5.bias"][2].item()]


def test_a_row_a_client_may_not_vote_on_has_no_say_whatever_it_holds(scalable):
    sub = scalable.extract(1.0)
    rows = torch.tensor([[True, False, True], [True, True, True]])
    diverged = _filled(sub, 1.0)
    diverged["5.bias"][1] = torch.nan
    got = average(
        scalable.tensors(), [(diverged, sub.index, 1.0), (_filled(sub, 3.0), sub.index, 1.0)], rows={"5.bias": rows}
    )
    assert got["5.bias"].tolist() == [2.0, 3.0, 2.0]


# Memory


def test_the_result_shares_no_memory_with_the_updates_and_changes_neither_side(scalable):
    w = {name: x.clone() for name, x in scalable.tensors().items()}
    before = {name: x.clone() for name, x in w.items()}
    sub = scalable.extract(1.0)
    updates = [(_random(sub, i), sub.index, 1.0) for i in range(3)]
    copies = [{name: x.clone() for name, x in tensors.items()} for tensors, _, _ in updates]
    for number in (1, 3):  # a single client must not be handed back
        got = average(w, updates[:number])
        theirs = {x.untyped_storage().data_ptr() for tensors, _, _ in updates for x in tensors.values()}
        assert all(x.untyped_storage().data_ptr() not in theirs for x in got.values())
        for name in _averaged(scalable):
            got[name].zero_()
    assert all(torch.equal(w[name], before[name]) for name in w)
    for (tensors, _, _), saved in zip(updates, copies, strict=True):
        assert all(torch.equal(tensors[name], saved[name]) for name in saved)


def test_updates_that_carry_gradients_give_a_result_that_does_not(scalable):
    sub = scalable.extract(0.5)
    got = average(scalable.tensors(), [(dict(sub.module.named_parameters()), sub.index, 1.0)])
    assert not any(x.requires_grad for x in got.values())


def test_updates_may_come_one_at_a_time(scalable):
    updates = _clients(scalable, 3)
    expected = average(scalable.tensors(), updates)
    got = average(scalable.tensors(), (update for update in updates))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


# What is refused


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_weight_is_refused(scalable, weight):
    sub = scalable.extract(0.5)
    with pytest.raises(ValueError, match=f"weight of an update is {weight}") as caught:
        average(scalable.tensors(), [(sub.tensors(), sub.index, 1.0), (sub.tensors(), sub.index, weight)])
    assert "\n" not in str(caught.value)


def test_a_tensor_the_global_model_does_not_have_is_refused(scalable):
    sub = scalable.extract(0.5)
    with pytest.raises(ValueError, match=r"'9\.weight'") as caught:
        average(scalable.tensors(), [({**sub.tensors(), "9.weight": torch.zeros(1)}, sub.index, 1.0)])
    assert "\n" not in str(caught.value)


def test_rows_of_a_tensor_the_global_model_does_not_have_are_refused(scalable):
    sub = scalable.extract(0.5)
    with pytest.raises(ValueError, match=r"'fc\.weight'") as caught:
        average(scalable.tensors(), [(sub.tensors(), sub.index, 1.0)], rows={"fc.weight": torch.ones(3)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("extractor", [Static(), Random()])
def test_tensors_of_another_width_are_refused(scalable, extractor):
    sub, other = scalable.extract(0.5, extractor), scalable.extract(1.0, extractor)
    with pytest.raises(ValueError, match="shape"):
        average(scalable.tensors(), [(other.tensors(), sub.index, 1.0)])


def test_a_global_tensor_of_another_shape_is_refused(scalable):
    sub = scalable.extract(0.5)
    with pytest.raises(ValueError, match="shape"):
        average({**scalable.tensors(), "3.weight": torch.zeros(5, 8)}, [(sub.tensors(), sub.index, 1.0)])


# The door


def test_public_names_are_what_they_say_whatever_was_imported_before():
    # Importing a module sets an attribute of its package: a module called as a public name would hide it.
    assert not {module.name for module in pkgutil.iter_modules(submodels.__path__)} & set(submodels.__all__)
    for name in submodels.__all__:
        assert not isinstance(getattr(submodels, name), types.ModuleType), name


def test_an_index_set_made_by_hand_will_do(scalable):
    index = IndexSet(scalable.axis_map, tuple(torch.tensor([size - 1]) for size in scalable.sizes), scalable.sizes)
    got = average(scalable.tensors(), [({"3.weight": torch.tensor([[4.0]])}, index, 1.0)])
    assert got["3.weight"][5, 7] == 4.0
    assert int((got["3.weight"] != scalable.tensors()["3.weight"]).sum()) == 1


class Complex(nn.Module):
    """A complex weight between two real layers."""

    def __init__(self):
        super().__init__()
        self.i, self.w = nn.Linear(12, 16), nn.Parameter(torch.randn(16, 16, dtype=torch.cfloat))
        self.h, self.o = nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.o(self.h((self.i(x).to(torch.cfloat) @ self.w).real).relu())


def test_complex_weights_are_cut_and_written_back():
    torch.manual_seed(0)
    model, x = Complex(), torch.randn(4, 12)
    scalable = ScalableModel(model, x)
    before = model.w.detach().clone()
    sub = scalable.extract(0.5)
    assert sub.module.w.shape == (8, 8)
    sub.module(x).pow(2).sum().backward()
    torch.optim.SGD(sub.module.parameters(), 0.1).step()
    scalable.write(sub)
    changed = model.w != before
    assert changed[:8, :8].all() and not changed[8:].any() and not changed[:, 8:].any()
    assert torch.equal(model.w[:8, :8], sub.module.w)


def test_complex_weights_average_as_real_ones_do():
    scalable = ScalableModel(Complex(), torch.zeros(4, 12))
    subs = [scalable.extract(width) for width in (0.25, 0.5, 1.0)]
    values = (1j, 2 + 2j, 6.0)
    updates = [({"w": torch.full_like(sub.module.w, v).detach()}, sub.index, 1.0) for v, sub in zip(values, subs)]
    w = average(scalable.tensors(), updates)["w"]
    assert w[0, 0] == (8 + 3j) / 3 and w[5, 5] == 4 + 1j and w[9, 9] == 6 and w.dtype == torch.cfloat
    w = average(scalable.tensors(), updates[:2])["w"]
    assert w[0, 0] == 1 + 1.5j and w[9, 9] == scalable.tensors()["w"][9, 9]
