"""Copies of a module's structure: what they keep, what they do not share, and that tracing leaves no trace."""

import functools

import einops.einops
import pytest
import torch
import torch.nn.functional as F
from modules import CUTTABLE, IMAGE, EinopsAttention, TiedWeights
from torch import nn
from torch.nn.utils import parametrizations

from submodels import AxisMap, ScalableModel
from submodels.skeleton import Skeleton, loose_tensors, named_tensors, on_meta, rebuild, tensors_in

torch.set_num_threads(1)

CACHED = einops.einops._reconstruct_from_shape


def _cloned(model):
    return rebuild(model, {id(x): x.detach().clone() for _, x in named_tensors(model)})


class Keeper(nn.Module):
    """Attributes of every kind."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)
        self.sizes, self.nested, self.names = [4, 4], [[1], [2]], {"a": 1}
        self.cache = {"grid": torch.ones(3)}
        self.order, self.mask = (1, (2, 3)), torch.ones(16, 16)
        self.several = [torch.zeros(2), torch.ones(2)]
        self.also = [self.conv]
        self.act = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.method = self.pool
        self.register_buffer("steps", torch.tensor(3), persistent=False)

    def pool(self, x):
        return self.head(x.mean((2, 3)))

    def forward(self, x):
        return self.method(self.act(self.norm(self.also[0](x))) * self.mask)


# Copies


@pytest.mark.parametrize("module", [*CUTTABLE, Keeper])
def test_a_copy_with_the_same_tensors_computes_the_same(module):
    model = module().eval()
    x = torch.randn(IMAGE)
    copy = _cloned(model)
    assert type(copy) is type(model) and not copy.training
    assert str(copy) == str(model)
    with torch.no_grad():
        assert torch.equal(copy(x), model(x))
    assert [(n, p.requires_grad) for n, p in copy.named_parameters()] == [
        (n, p.requires_grad) for n, p in model.named_parameters()
    ]


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight, model[3] = model[0].weight, model[2]
    copy = _cloned(model)
    assert copy[2].weight is copy[0].weight and copy[3] is copy[2]
    assert copy[0].weight is not model[0].weight


def test_tied_weights_stay_tied_in_a_sub_model():
    small = ScalableModel(TiedWeights(), torch.zeros(IMAGE)).extract(0.5).module
    assert small.shared is small.loop
    small.loop.weight.data.zero_()
    assert not small.shared.weight.any()


def test_tied_buffers_stay_tied():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[1].running_mean = model[0].running_mean
    copy = _cloned(model)
    assert copy[1].running_mean is copy[0].running_mean


def test_parameters_stay_parameters_and_keep_requires_grad():
    model = Keeper()
    model.conv.weight.requires_grad_(False)
    copy = _cloned(model)
    assert isinstance(copy.conv.weight, nn.Parameter) and not copy.conv.weight.requires_grad
    assert copy.head.weight.requires_grad
    assert not copy.norm.running_mean.requires_grad


def test_tensors_that_are_not_handed_in_are_copied():
    model = Keeper()
    copy = rebuild(model, {})
    copy.conv.weight.data.zero_()
    assert model.conv.weight.any()
    assert copy.also[0] is copy.conv


def test_a_copy_has_the_state_of_the_original_and_what_is_not_saved_stays_unsaved():
    model = Keeper()
    copy = _cloned(model)
    assert list(copy.state_dict()) == list(model.state_dict())
    assert "steps" not in copy.state_dict() and int(copy.steps) == 3
    copy.load_state_dict(model.state_dict())


def test_copies_share_nothing_that_can_change():
    model = Keeper()
    copy = _cloned(model)
    copy.sizes.append(9)
    copy.nested[0].append(9)
    copy.names["b"] = 2
    copy.mask.zero_()
    copy.several[0].fill_(7)
    copy.conv.extra = 1
    copy._buffers["new"] = None
    assert model.sizes == [4, 4] and model.nested == [[1], [2]] and model.names == {"a": 1}
    assert model.mask.all() and not model.several[0].any()
    assert not hasattr(model.conv, "extra") and "new" not in model._buffers


def test_what_refers_to_a_module_refers_to_its_copy():
    model = Keeper()
    copy = _cloned(model)
    assert copy.also[0] is copy.conv
    assert copy.method.__self__ is copy
    assert copy.act.keywords == model.act.keywords


def test_caches_come_back_empty():
    model = Keeper()
    assert _cloned(model).cache == {} and list(model.cache) == ["grid"]


class Writer(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.box, self.conv = box, nn.Conv2d(3, 8, 1)

    def forward(self, x):
        self.box[:] = [self.conv(x)]
        return self.box[0]


class Reader(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.box, self.head = box, nn.Linear(8, 10)

    def forward(self, x):
        return self.head((x + self.box[0]).mean((2, 3)))


@pytest.mark.parametrize("content", [[], [1]])
def test_a_list_that_two_modules_share_is_shared_by_their_copies(content):
    model = nn.Sequential(Writer(content), Reader(content))
    copy = _cloned(model)
    assert copy[0].box is copy[1].box
    assert copy[0].box is not content
    assert ScalableModel(model, torch.zeros(IMAGE)).sizes == (8,)


def test_hooks_are_copied_and_not_shared():
    model, calls = Keeper().eval(), []
    handle = model.conv.register_forward_hook(lambda *_: calls.append(1))
    copy = _cloned(model)
    handle.remove()
    with torch.no_grad():
        model(torch.zeros(IMAGE))
        assert not calls
        copy(torch.zeros(IMAGE))
    assert calls == [1]
    copy.conv.register_forward_hook(lambda *_: None)
    assert not model.conv._forward_hooks


def test_one_skeleton_builds_many_copies():
    model = Keeper()
    skeleton = Skeleton(model)
    first, second = skeleton.build({}), skeleton.build({})
    assert first.sizes is not second.sizes and first.conv.weight is not second.conv.weight
    assert first.also[0] is first.conv and second.also[0] is second.conv


# Copies without storage


def test_a_copy_on_the_meta_device_has_shapes_and_no_storage():
    model = Keeper()
    meta = on_meta(model)
    assert {x.device.type for _, x in named_tensors(meta)} == {"meta"}
    assert {x.device.type for x in loose_tensors(meta)} == {"meta"}
    assert [x.shape for _, x in named_tensors(meta)] == [x.shape for _, x in named_tensors(model)]
    assert model.mask.device.type == "cpu" and model.conv.weight.device.type == "cpu"
    assert not meta.steps.is_floating_point()


def test_names_come_once_or_under_every_alias():
    model = TiedWeights()
    assert "shared.weight" not in dict(named_tensors(model))
    assert dict(named_tensors(model, aliases=True))["shared.weight"] is model.loop.weight


def test_plain_tensors_are_found_alone_and_in_lists():
    model = Keeper()
    assert [id(x) for x in loose_tensors(model)] == [id(model.mask), *map(id, model.several)]


class Masked(nn.Module):
    """A plain tensor that meets no channel axis, and one beside a channel axis."""

    def __init__(self, where):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3), nn.Linear(12, 10)
        self.window, self.gain, self.where = torch.rand(6, 6), [torch.rand(8, 1, 1)], where

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = x * (self.window if self.where == "space" else self.gain[0])
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize(("where", "sizes"), [("space", (8, 12)), ("channels", (12,))])
def test_plain_tensors_survive_in_a_sub_model_whole_and_as_their_own(where, sizes):
    model = Masked(where)
    scalable = ScalableModel(model, torch.zeros(2, 3, 8, 8))
    assert scalable.sizes == sizes
    assert scalable.verify([0.5]).exact
    small = scalable.extract(0.5).module
    assert torch.equal(small.window, model.window)
    small.window.zero_()
    assert model.window.any()


# The user's model


def _picture(model):
    """All that tracing could change, in comparable form."""
    return {
        "state": {name: (x.data_ptr(), x.clone()) for name, x in model.state_dict().items()},
        "grad": [p.grad for p in model.parameters()],
        "flags": [(path, part.training) for path, part in model.named_modules()],
        "types": [
            (p, k, type(v), v) for p, m in model.named_modules() for k, v in vars(m).items() if type(v) is not dict
        ],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
    }


def _same_picture(a, b):
    assert a["state"].keys() == b["state"].keys()
    for name, (place, x) in a["state"].items():
        assert b["state"][name][0] == place and torch.equal(b["state"][name][1], x), name
    assert [(p, k, t) for p, k, t, _ in a["types"]] == [(p, k, t) for p, k, t, _ in b["types"]]
    for (*where, before), (*_, after) in zip(a["types"], b["types"], strict=True):
        assert before is after, where
    assert all(a[key] == b[key] for key in ("grad", "flags", "hooks"))


class ValueDependent(nn.Module):
    """Reads a value, so it cannot run on the meta device."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(self.drop(x).mean((2, 3)) * (2 if x.max().item() > 1e9 else 1))


@pytest.mark.parametrize("module", [*CUTTABLE, Keeper, ValueDependent])
def test_tracing_and_cutting_leave_the_model_as_it_was_and_all_integers_plain(module):
    model = module()
    next(model.children()).eval()  # flags that differ
    before = _picture(model)
    scalable = ScalableModel(model, torch.ones(IMAGE))
    small = scalable.extract(0.5).module
    _same_picture(before, _picture(model))
    for part in [*model.modules(), *small.modules()]:
        for name, value in vars(part).items():
            assert all(type(n) in (int, bool) for n in _integers(value)), name


def test_verifying_leaves_the_model_as_it_was():
    model = Keeper()
    before = _picture(model)
    ScalableModel(model, torch.ones(IMAGE)).verify([0.5])
    _same_picture(before, _picture(model))


def _integers(value):
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _integers(item)


def test_switches_of_the_libraries_are_put_back():
    assert torch.backends.mha.get_fastpath_enabled()
    AxisMap.trace(EinopsAttention(), torch.zeros(IMAGE))
    assert einops.einops._reconstruct_from_shape is CACHED
    assert torch.backends.mha.get_fastpath_enabled()


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        self.stem(x)
        raise KeyError("not today")


def test_a_forward_that_fails_puts_everything_back_and_its_own_error_is_told():
    model = Failing()
    before = _picture(model)
    with pytest.raises(ValueError, match=r"Failing does not run on the example inputs .*not today"):
        ScalableModel(model, torch.zeros(IMAGE))
    _same_picture(before, _picture(model))
    assert einops.einops._reconstruct_from_shape is CACHED
    assert torch.ones(2).shape == (2,) and type(torch.ones(2).shape[0]) is int  # no observer is left on


@pytest.mark.parametrize("module", [Keeper, ValueDependent])
def test_making_a_map_draws_no_random_numbers(module):
    model = module()
    before = torch.get_rng_state()
    ScalableModel(model, torch.ones(IMAGE))
    assert torch.equal(torch.get_rng_state(), before)


# Parametrized modules: they work or stay whole


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_layers_are_cut_exactly_or_stay_whole(kind):
    torch.manual_seed(0)
    wrap = getattr(parametrizations, kind)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), wrap(nn.Linear(16, 12)), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)
    )
    before = {name: x.clone() for name, x in model.state_dict().items()}
    scalable = ScalableModel(model, torch.zeros(2, 6))
    assert 9 in scalable.sizes
    assert scalable.verify([0.5]).exact
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    small = scalable.extract(0.5).module
    assert list(small.state_dict()) == list(model.state_dict())
    small(torch.zeros(2, 6)).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    for name, places in scalable.axis_map.unknown.items():
        assert places > 0 and any(why == f"op:{name}" for why in scalable.axis_map.frozen_by.values())


def test_objects_that_refer_to_one_another_are_looked_into_once():
    class Cache:
        def __init__(self, x):
            self.x, self.parent = x, self

    x = torch.zeros(2)
    assert [id(y) for y in tensors_in({"cache": Cache(x)})] == [id(x)]


def test_what_cannot_be_copied_is_shared():
    import threading

    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    assert rebuild(model, {}).lock is model.lock


class Borrowing(nn.Module):
    """Runs its layers by functions that it made when it was made: a variable, a default, one in a list, a hook."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.scale = nn.Linear(4, 1)
        self.first = lambda x: self.b(self.a(x).relu())
        self.rest = [lambda x, layer=self.c: layer(x).relu(), torch.tanh, lambda x, *, layer=self.d: layer(x)]
        self.d.register_forward_hook(lambda _layer, inputs, out: out * self.gain)
        self.again = lambda x, n=2: x if n == 0 else self.again(x, n - 1)

    def forward(self, x):
        self.gain = self.scale(x)
        x = self.again(self.first(x))
        for function in self.rest:
            x = function(x)
        return x


def test_functions_that_hold_layers_run_those_of_the_copy():
    model = Borrowing()
    scalable = ScalableModel(model, torch.zeros(2, 4))
    assert scalable.sizes == (16, 16, 16) and scalable.verify().exact
    sub = scalable.extract(0.5)
    sub.module(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in sub.module.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert sub.module.rest[1] is torch.tanh
