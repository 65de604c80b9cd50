"""ScalableModel: the laws of cutting, embedding and writing back, and what a sub-model is."""

import copy
import io
import itertools
import math
import pickle

import modules
import pytest
import torch
from reference import slicing_loops as loops
from safetensors.torch import load_model, save_model
from torch import nn

from submodels import Importance, Random, Rolling, ScalableModel, Static, zoo

EXTRACTORS = {"static": Static(), "rolling": Rolling(), "random": Random(3)}
WIDTHS = (0.0625, 0.25, 0.5, 1.0)


def _images(*, dtype=torch.float64, seed=0):
    return torch.randn(modules.IMAGE, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def _scalable(build, *, dtype=torch.float64):
    """A copy that a test may change; to copy is faster than to trace."""
    scalable = copy.deepcopy(modules.traced(build))
    scalable.model.to(dtype)
    return scalable


def _snapshot(module):
    return {name: x.detach().clone() for name, x in [*module.named_parameters(), *module.named_buffers()]}


@torch.no_grad()
def _restore(module, snapshot):
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        x.copy_(snapshot[name])


def _group(axis_map, name, axis=0):
    return next(group.id for group in axis_map.groups if (name, axis) in group.members)


def _train(module, x, seed=0):
    """A step that moves every parameter that matters."""
    torch.manual_seed(seed)
    out = module.train()(x)
    out = out if isinstance(out, torch.Tensor) else out[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    nn.functional.cross_entropy(out, torch.arange(len(x)) % 10).backward()
    optimizer.step()


@pytest.fixture(params=modules.CUTTABLE)
def scalable(request):
    """Every module, for laws of how tensors are cut; a test that writes to the model is undone."""
    scalable = modules.traced(request.param)
    before = _snapshot(scalable.model)
    yield scalable
    _restore(scalable.model, before)


@pytest.fixture(params=modules.VARIED)
def varied(request):
    """A few modules, for laws that do not depend on the module; a test that writes to the model is undone."""
    scalable = modules.traced(request.param)
    before = _snapshot(scalable.model)
    yield scalable
    _restore(scalable.model, before)


# Extract and embed


def test_extract_and_embed_are_adjoint(scalable):
    generator = torch.Generator().manual_seed(1)
    w = scalable.tensors()
    for width, extractor in itertools.product(WIDTHS, EXTRACTORS.values()):
        sub = scalable.extract(width, extractor, round=5, client=2)
        u = {name: torch.randn(x.shape, dtype=torch.float64, generator=generator) for name, x in sub.tensors().items()}
        inside = math.fsum((x.double() * u[name]).sum().item() for name, x in sub.tensors().items())
        outside = math.fsum((w[name].double() * x).sum().item() for name, x in scalable.embed(u, sub.index).items())
        scale = math.fsum((x.double() * u[name]).abs().sum().item() for name, x in sub.tensors().items())
        assert abs(inside - outside) <= 1e-12 * scale
        assert scale > 0


def test_what_is_embedded_is_the_masked_model(scalable):
    sub = scalable.extract(0.5, Random(1))
    got = scalable.embed(sub.tensors(), sub.index)
    for name, x in scalable.tensors().items():
        assert got[name].dtype == x.dtype
        assert torch.equal(got[name], x * sub.index.mask(name)), name


def test_a_state_dict_can_be_embedded_under_all_its_names():
    scalable = _scalable(modules.TiedWeights)
    sub = scalable.extract(0.5)
    got = scalable.embed(sub.module.state_dict(), sub.index)
    assert torch.equal(got["shared.weight"], got["loop.weight"])
    assert got["shared.weight"].shape == scalable.model.loop.weight.shape


def test_full_width_gives_the_same_parameters_and_the_same_output_to_the_bit(scalable):
    sub = scalable.extract(1.0)
    for (name, a), (other, b) in zip(sub.module.state_dict().items(), scalable.model.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
    whole, x = copy.deepcopy(scalable.model).eval(), _images(seed=1)
    for parameter in whole.parameters():  # a transposed weight is added up in another order
        parameter.data = parameter.data.contiguous()
    assert torch.equal(sub.module.eval()(x), whole(x))


def test_a_sub_model_keeps_ceil_of_width_times_size_and_at_least_one():
    scalable = modules.traced(modules.DenselyConnected)
    for width in (1e-9, 0.1, 1 / 3, 0.5, 0.7, 0.999, 1.0):
        sub = scalable.extract(width)
        for size, kept in zip(scalable.sizes, sub.sizes, strict=True):
            exact = next(k for k in range(1, size + 1) if k >= width * size - 1e-9)
            assert kept == exact


def test_seven_hundredths_of_a_hundred_channels_are_seven():
    scalable = ScalableModel(nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2)), torch.zeros(2, 4))
    assert math.ceil(0.07 * 100) == 8  # the product of floating-point numbers is a little more than 7
    assert [scalable.extract(width).sizes for width in (0.07, 0.14, 0.55, 0.141)] == [(7,), (14,), (55,), (15,)]


def test_inputs_and_outputs_are_never_cut(varied):
    x = _images()
    for width in WIDTHS:
        out = varied.extract(width, Random()).module.eval()(x)
        assert out.shape == (2, 10)


# Coupled groups


@pytest.fixture(scope="module")
def resnet():
    model = loops.enliven(zoo.build("resnet18-cifar", in_channels=3, num_classes=10, image_size=8))
    return ScalableModel(model, torch.zeros(2, 3, 8, 8))


def test_random_draws_agree_across_all_members_of_a_group(resnet):
    scalable, model, seed = resnet, resnet.model, 1
    sub = scalable.extract(0.25, Random(seed), round=seed)
    whole, part = model.state_dict(), sub.module.state_dict()
    for stage, channels in enumerate((64, 128, 256, 512)):
        at = f"stages.{stage}"
        stream = sub.index.kept[_group(scalable.axis_map, f"{at}.0.conv2.weight")]
        before = sub.index.kept[
            _group(scalable.axis_map, "conv1.weight" if stage == 0 else f"stages.{stage - 1}.0.conv2.weight")
        ]
        assert len(stream) == channels // 4
        # Everything that adds into the residual stream, or reads it, keeps the same channels in the same order.
        for block in (0, 1):
            inner = sub.index.kept[_group(scalable.axis_map, f"{at}.{block}.conv1.weight")]
            enter = before if block == 0 else stream
            for name, rows, columns in (("conv1", inner, enter), ("conv2", stream, inner)):
                weight = whole[f"{at}.{block}.{name}.weight"]
                assert torch.equal(part[f"{at}.{block}.{name}.weight"], weight[rows][:, columns])
            for norm, rows in (("bn1", inner), ("bn2", stream)):
                for kind in ("weight", "bias", "running_mean", "running_var"):
                    assert torch.equal(part[f"{at}.{block}.{norm}.{kind}"], whole[f"{at}.{block}.{norm}.{kind}"][rows])
        if stage:
            weight = whole[f"{at}.0.shortcut.conv.weight"]
            assert torch.equal(part[f"{at}.0.shortcut.conv.weight"], weight[stream][:, before])
            assert torch.equal(part[f"{at}.0.shortcut.bn.weight"], whole[f"{at}.0.shortcut.bn.weight"][stream])
    assert torch.equal(part["fc.weight"], whole["fc.weight"][:, stream])
    assert torch.equal(part["fc.bias"], whole["fc.bias"])


@pytest.mark.parametrize("extractor", EXTRACTORS.values(), ids=EXTRACTORS)
def test_an_attention_head_is_kept_or_dropped_as_a_whole(extractor):
    scalable = _scalable(modules.EinopsAttention)
    sub = scalable.extract(0.5, extractor, round=3)
    assert sub.module.heads == 2
    whole, part = scalable.model.state_dict(), sub.module.state_dict()
    stream = sub.index.kept[_group(scalable.axis_map, "embed.0.weight")]
    for layer in (0, 1):
        heads = sub.index.kept[_group(scalable.axis_map, f"qkv.{layer}.weight")].tolist()
        assert len(heads) == 2
        for t in range(3):  # query, key and value: rows (t h d), 4 heads of 8
            for new, old in enumerate(heads):
                rows = whole[f"qkv.{layer}.weight"][32 * t + 8 * old : 32 * t + 8 * old + 8]
                assert torch.equal(
                    part[f"qkv.{layer}.weight"][16 * t + 8 * new : 16 * t + 8 * new + 8], rows[:, stream]
                )
        for new, old in enumerate(heads):
            columns = whole[f"out.{layer}.weight"][:, 8 * old : 8 * old + 8]
            assert torch.equal(part[f"out.{layer}.weight"][:, 8 * new : 8 * new + 8], columns[stream])


@pytest.mark.slow
def test_the_heads_of_a_vision_transformer_survive_in_query_key_and_value_alike():
    model = zoo.build("timm:vit_tiny_patch16_224", in_channels=3, num_classes=10, image_size=32, depth=2)
    scalable = ScalableModel(loops.enliven(model), torch.zeros(2, 3, 32, 32))
    sub = scalable.extract(0.6, Random(3), round=2)
    whole, part = model.state_dict(), sub.module.state_dict()
    stream = sub.index.kept[_group(scalable.axis_map, "patch_embed.proj.weight")]
    for block in (0, 1):
        at = f"blocks.{block}.attn"
        heads = sub.index.kept[_group(scalable.axis_map, f"{at}.qkv.weight")].tolist()
        assert len(heads) == 2  # of 3, of 64 channels each
        for t, (new, old) in itertools.product(range(3), enumerate(heads)):
            here, there = (
                slice(128 * t + 64 * new, 128 * t + 64 * new + 64),
                slice(192 * t + 64 * old, 192 * t + 64 * old + 64),
            )
            assert torch.equal(part[f"{at}.qkv.weight"][here], whole[f"{at}.qkv.weight"][there][:, stream])
            assert torch.equal(part[f"{at}.qkv.bias"][here], whole[f"{at}.qkv.bias"][there])
        assert sub.module.blocks[block].attn.num_heads == 2
        assert sub.module.blocks[block].attn.head_dim == 64


def test_heads_can_be_narrowed_instead():
    torch.manual_seed(0)
    model = loops.enliven(modules.EinopsAttention().double())
    scalable = ScalableModel(model, _images(), heads="dim")
    sub = scalable.extract(0.5)
    assert sub.module.heads == 4
    assert sub.module.qkv[0].weight.shape == (3 * 4 * 4, 16)
    rows = [32 * t + 8 * h + d for t in range(3) for h in range(4) for d in range(4)]
    assert torch.equal(sub.module.qkv[0].weight, model.qkv[0].weight[rows][:, :16])


# Sub-models of sub-models


def test_a_sub_model_of_a_sub_model_is_the_one_of_the_composed_index_set(varied):
    for first, second in ((Random(0), Random(1)), (Rolling(), Random(2)), (Random(3), Rolling())):
        outer = varied.extract(0.75, first, round=3)
        inner = outer.extract(0.3, second, round=2)
        composed = outer.index.compose(inner.inner)
        assert inner.index == composed
        direct = varied.cut(composed).module.state_dict()
        got = inner.module.state_dict()
        assert got.keys() == direct.keys()
        assert all(torch.equal(got[name], direct[name]) for name in got)


def test_a_sub_model_of_a_sub_model_holds_the_outer_ones_present_weights(varied):
    outer = varied.extract(0.75)
    with torch.no_grad():
        for parameter in outer.module.parameters():
            parameter.add_(1)
    inner = outer.extract(0.5)
    for name, x in outer.tensors().items():
        assert torch.equal(inner.tensors()[name], inner.inner.gather(name, x)), name


def test_width_is_a_fraction_of_the_global_model_for_a_sub_model_too():
    scalable = ScalableModel(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 2)), torch.zeros(2, 4))
    half = scalable.extract(0.5)
    assert half.sizes == (32,)
    assert half.extract(0.25).sizes == (16,)  # not 8
    assert half.extract(0.5).sizes == (32,)
    assert half.extract(1.0).sizes == (32,)  # it cannot give more than it has
    assert half.extract(0.25).width == 0.25


def test_no_pair_of_widths_keeps_more_than_the_narrower_one_allows():
    scalable = modules.traced(modules.DenselyConnected)
    for first, second in itertools.product((0.0625, 0.2, 0.3, 0.5, 0.9, 1.0), repeat=2):
        inner = scalable.extract(first, Random()).extract(second, Random())
        for size, kept, group in zip(scalable.sizes, inner.sizes, inner.index.kept, strict=True):
            assert kept == len(group) == max(1, math.ceil(min(first, second) * size - 1e-9))


def test_sub_models_can_be_cut_three_deep():
    scalable = _scalable(modules.DenselyConnected)
    outer = scalable.extract(0.8, Random(1))
    middle = outer.extract(0.6, Random(2))
    inner = middle.extract(0.3, Random(3))
    assert inner.index == outer.index.compose(middle.inner.compose(inner.inner))
    for name, x in scalable.tensors().items():
        assert torch.equal(inner.tensors()[name], inner.index.gather(name, x))


# Writing back


def test_writing_back_changes_exactly_the_masked_coordinates(scalable):
    before = _snapshot(scalable.model)
    untouched = {
        name for name in before if name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
    }
    for extractor in EXTRACTORS.values():
        sub = scalable.extract(0.5, extractor, round=7)
        with torch.no_grad():
            for x in [*sub.module.parameters(), *sub.module.buffers()]:
                x.add_(1)
        scalable.write(sub)
        for name, x in _snapshot(scalable.model).items():
            mask = sub.index.mask(name)
            changed = 0 if name in untouched or not x.is_floating_point() else 1
            assert torch.equal(x[~mask], before[name][~mask]), name
            assert torch.equal(x[mask], before[name][mask] + changed), name
        _restore(scalable.model, before)


def test_integer_buffers_and_statistics_of_a_trained_sub_model_stay_out():
    scalable = _scalable(modules.SqueezeExcite)
    before = _snapshot(scalable.model)
    sub = scalable.extract(0.5)
    _train(sub.module, _images())
    assert sub.module.norm.num_batches_tracked == 1
    scalable.write(sub)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(scalable.model.norm, name), before[f"norm.{name}"])
    assert not torch.equal(scalable.model.norm.weight, before["norm.weight"])


def test_writing_back_an_untrained_sub_model_changes_nothing(varied):
    before = _snapshot(varied.model)
    for extractor in EXTRACTORS.values():
        varied.write(varied.extract(0.5, extractor, round=7))
        outer = varied.extract(0.75, extractor, round=3)
        outer.write(outer.extract(0.3, extractor))
    assert all(torch.equal(x, before[name]) for name, x in _snapshot(varied.model).items())


def test_a_sub_model_of_a_sub_model_is_written_into_it_or_into_the_global_model():
    scalable = _scalable(modules.DenselyConnected)
    outer = scalable.extract(0.75, Random(1))
    inner = outer.extract(0.4, Random(2))
    whole, part = _snapshot(scalable.model), _snapshot(outer.module)
    with torch.no_grad():
        for parameter in inner.module.parameters():
            parameter.add_(1)
        for buffer in inner.module.buffers():
            buffer.add_(1)
    outer.write(inner)
    assert all(torch.equal(x, whole[name]) for name, x in _snapshot(scalable.model).items())
    for name, x in _snapshot(outer.module).items():
        mask = inner.inner.mask(name)
        changed = 1 if name in dict(outer.module.named_parameters()) else 0
        assert torch.equal(x[mask], part[name][mask] + changed), name
        assert torch.equal(x[~mask], part[name][~mask]), name
    scalable.write(inner)
    for name, x in _snapshot(scalable.model).items():
        mask = inner.index.mask(name)
        changed = 1 if name in dict(outer.module.named_parameters()) else 0
        assert torch.equal(x[mask], whole[name][mask] + changed), name
        assert torch.equal(x[~mask], whole[name][~mask]), name


def test_what_is_written_is_what_is_extracted_next(varied):
    sub = varied.extract(0.5, Random(1))
    _train(sub.module, _images())
    varied.write(sub)
    again = varied.extract(0.5, Random(1))
    for (name, a), b in zip(again.module.named_parameters(), sub.module.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("extractor", EXTRACTORS.values(), ids=EXTRACTORS)
def test_a_sub_model_trained_in_half_precision_is_written_in_the_models_own(extractor):
    model = zoo.build("mlp", in_channels=4, num_classes=3, image_size=None)
    scalable = ScalableModel(model, torch.zeros(2, 4))
    sub = scalable.extract(0.5, extractor)
    sub.module.to(torch.bfloat16)
    with torch.no_grad():
        sub.module.fc2.weight.fill_(2.5)
    scalable.write(sub)
    assert model.fc2.weight.dtype == torch.float32
    assert int((model.fc2.weight == 2.5).sum()) == 100 * 100


def test_tied_weights_stay_tied_and_are_written_once():
    scalable = _scalable(modules.TiedWeights)
    sub = scalable.extract(0.5)
    assert sub.module.shared is sub.module.loop
    with torch.no_grad():
        sub.module.loop.weight.fill_(3.0)
    scalable.write(sub)
    assert scalable.model.shared is scalable.model.loop
    assert int((scalable.model.loop.weight == 3.0).sum()) == 12 * 12


# What a sub-model shares with the model: nothing


def test_a_sub_model_shares_no_memory_with_the_model_or_its_siblings(varied):
    def storages(module):
        return {x.untyped_storage().data_ptr() for x in [*module.parameters(), *module.buffers()]}

    for width, extractor in itertools.product((0.5, 1.0), EXTRACTORS.values()):
        subs = [varied.extract(width, extractor) for _ in range(2)]
        inner = subs[0].extract(width, extractor)
        theirs = [storages(module) for module in (varied.model, *(sub.module for sub in (*subs, inner)))]
        assert sum(map(len, theirs)) == len(set.union(*theirs))


def test_training_a_sub_model_leaves_the_model_and_its_siblings_alone(varied):
    before = _snapshot(varied.model)
    sub, sibling = varied.extract(0.5), varied.extract(0.5)
    theirs = _snapshot(sibling.module)
    _train(sub.module, _images())
    assert any(not torch.equal(x, theirs[name]) for name, x in _snapshot(sub.module).items())
    assert all(torch.equal(x, before[name]) for name, x in _snapshot(varied.model).items())
    assert all(torch.equal(x, theirs[name]) for name, x in _snapshot(sibling.module).items())
    assert all(p.grad is None for p in varied.model.parameters())


def test_lists_kept_by_a_module_are_not_shared_either():
    scalable = _scalable(modules.SplitByStoredSize)
    sub = scalable.extract(0.5)
    assert sub.module.sizes == [4, 8]
    sub.module.sizes[0] = 99
    assert scalable.model.sizes == [8, 16]
    assert scalable.extract(0.5).module.sizes == [4, 8]


def test_wrapping_cutting_and_verifying_leave_the_model_and_the_global_generator_alone():
    torch.manual_seed(0)
    model = loops.enliven(modules.SqueezeExcite()).train()
    before, state = _snapshot(model), torch.get_rng_state()
    names = set(vars(model))
    scalable = ScalableModel(model, torch.zeros(modules.IMAGE))
    scalable.extract(0.5, Random())
    scalable.extract(0.5, Importance.of(scalable))
    scalable.verify()
    scalable.cost(0.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in _snapshot(model).items())
    assert set(vars(model)) == names
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# What a sub-model keeps of the model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_precision_is_the_models(dtype):
    scalable = _scalable(modules.SqueezeExcite, dtype=dtype)
    module = scalable.extract(0.5, Random()).module
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert module.norm.running_mean.dtype == dtype
    assert module.norm.num_batches_tracked.dtype == torch.long
    assert module(_images(dtype=dtype)).dtype == dtype


def test_a_model_moved_to_another_precision_gives_sub_models_of_that_precision():
    scalable = _scalable(modules.SqueezeExcite)
    scalable.extract(0.5)
    scalable.model.to(torch.bfloat16)
    assert {p.dtype for p in scalable.extract(0.5).module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("extractor", EXTRACTORS.values(), ids=EXTRACTORS)
def test_the_device_is_the_models(extractor):
    scalable = ScalableModel(modules.DenselyConnected().to("meta"), torch.zeros(modules.IMAGE, device="meta"))
    module = scalable.extract(0.5, extractor).module
    assert {x.device.type for x in [*module.parameters(), *module.buffers()]} == {"meta"}


def test_parameters_that_need_no_gradient_need_none_in_the_sub_model():
    model = modules.SqueezeExcite()
    model.conv1.requires_grad_(False)
    scalable = ScalableModel(model, torch.zeros(modules.IMAGE))
    module = scalable.extract(0.5).module
    assert [name for name, p in module.named_parameters() if not p.requires_grad] == ["conv1.weight", "conv1.bias"]
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in module.parameters())


def test_freezing_a_layer_later_freezes_it_in_later_sub_models():
    scalable = _scalable(modules.SqueezeExcite)
    sub = scalable.extract(0.5)
    scalable.model.conv1.requires_grad_(False)
    later = scalable.extract(0.5)
    assert [name for name, p in later.module.named_parameters() if not p.requires_grad] == [
        "conv1.weight",
        "conv1.bias",
    ]
    sub.module.requires_grad_(False)
    assert not any(p.requires_grad for p in sub.extract(0.25).module.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_the_training_flag_is_the_models(training):
    scalable = _scalable(modules.SqueezeExcite)
    scalable.model.train(training)
    assert all(part.training == training for part in scalable.extract(0.5).module.modules())


def test_the_training_flag_is_the_models_present_one():
    scalable = _scalable(modules.SqueezeExcite)
    for training in (True, False, True):
        scalable.model.train(training)
        assert scalable.extract(0.5).module.training == training
    scalable.model.norm.eval()
    assert not scalable.extract(0.5).module.norm.training


def test_the_training_flag_of_a_sub_model_is_handed_on():
    sub = _scalable(modules.SqueezeExcite).extract(0.5)
    for training in (True, False):
        sub.module.train(training)
        assert sub.extract(0.25).module.training == training


def test_buffers_that_are_not_saved_stay_so():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
            self.register_buffer("scale", torch.rand(16), persistent=False)
            self.names = nn.ParameterDict({"shift": nn.Parameter(torch.rand(16))})

        def forward(self, x):
            return self.head(self.up(x) * self.scale + self.names["shift"])

    scalable = ScalableModel(Positions(), torch.zeros(2, 4))
    module = scalable.extract(0.5, Random()).module
    assert list(module.state_dict()) == list(scalable.model.state_dict())
    assert module.scale.shape == module.names["shift"].shape == (8,)


def test_a_tensor_kept_as_a_plain_attribute_is_no_obstacle():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = torch.tensor([0.4, 0.5, 0.6])
            self.conv, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 10)

        def forward(self, x):
            return self.head(self.conv(x - self.mean[:, None, None]).mean((2, 3)))

    scalable = ScalableModel(Normalised(), torch.zeros(modules.IMAGE))
    sub = scalable.extract(0.5)
    assert sub.sizes == (8,)
    assert torch.equal(sub.module.mean, scalable.model.mean)
    assert sub.module.mean is not scalable.model.mean
    assert scalable.verify().exact


# A sub-model is a plain module


def test_it_is_of_the_same_class_and_says_its_own_sizes():
    module = _scalable(modules.ConvFlattenLinear).extract(0.25).module
    assert type(module) is modules.ConvFlattenLinear
    assert repr(module) == (
        "ConvFlattenLinear(\n"
        "  (conv1): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))\n"
        "  (conv2): Conv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))\n"
        "  (fc1): Linear(in_features=96, out_features=8, bias=True)\n"
        "  (fc2): Linear(in_features=8, out_features=10, bias=True)\n"
        ")"
    )


def test_layers_of_every_kind_say_their_own_sizes():
    groups = _scalable(modules.GroupNorms).extract(0.5).module
    assert (groups.norm.num_groups, groups.norm.num_channels) == (4, 16)
    assert (groups.grouped.in_channels, groups.grouped.out_channels, groups.grouped.groups) == (16, 32, 2)
    assert (groups.up_grouped.in_channels, groups.up_grouped.out_channels, groups.up_grouped.groups) == (16, 24, 2)
    scaled = _scalable(modules.LayerScale).extract(0.5).module
    assert (scaled.norm.normalized_shape, scaled.depthwise.groups) == ((10,), 10)
    assert _scalable(modules.SqueezeExcite).extract(0.5).module.norm.num_features == 8
    attention = _scalable(modules.MultiheadAttention).extract(0.5).module.attention
    assert (attention.embed_dim, attention.num_heads, attention.head_dim) == (12, 2, 6)
    assert _scalable(modules.Recurrent).extract(0.5).module.rnn.hidden_size == 10
    assert _scalable(modules.ChunkedGLU).extract(0.5).module.act.num_parameters == 12


@pytest.mark.filterwarnings("ignore:The tensor attributes self.rnn._flat_weights")  # so it warns of any LSTM
def test_it_can_be_exported(varied):
    x = _images(seed=1)
    module = varied.extract(0.5, Random()).module
    _train(module, x)
    program = torch.export.export(module.eval(), (x,))
    torch.testing.assert_close(program.module()(x), module(x), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("timm:resnet18", {"layers": (1, 1, 1, 1)}), ("timm:vit_tiny_patch16_224", {"depth": 2})],
)
def test_a_sub_model_of_a_timm_model_can_be_exported(name, options):
    model = zoo.build(name, in_channels=3, num_classes=10, image_size=32, **options)
    scalable = ScalableModel(model, torch.zeros(2, 3, 32, 32))
    module = scalable.extract(0.25, Rolling(), round=3).module.eval()
    x = torch.randn(2, 3, 32, 32)
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), module(x))


def test_its_weights_are_saved_and_loaded_like_any_others(varied, tmp_path):
    sub = varied.extract(0.5, Random())
    _train(sub.module, _images())
    blank = varied.extract(0.5, Static()).module
    file = io.BytesIO()
    torch.save(sub.module.state_dict(), file)
    file.seek(0)
    blank.load_state_dict(torch.load(file, weights_only=True))
    x = _images(seed=1)
    assert torch.equal(blank.eval()(x), sub.module.eval()(x))
    save_model(sub.module, tmp_path / "sub.safetensors")
    other = varied.extract(0.5, Static()).module
    load_model(other, tmp_path / "sub.safetensors")
    assert torch.equal(other.eval()(x), sub.module.eval()(x))


def test_it_can_be_copied_and_pickled(varied):
    module = varied.extract(0.5, Random()).module
    _train(module, _images())
    x, expected = _images(seed=1), module.eval()(_images(seed=1))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert torch.equal(other(x), expected)
        _train(other, x)
    assert torch.equal(module.eval()(x), expected)


def test_it_does_not_hold_on_to_the_model():
    module = _scalable(modules.SqueezeExcite).extract(0.25).module
    whole = sum(x.numel() * 8 for x in modules.SqueezeExcite().parameters())
    assert len(pickle.dumps(module)) < whole


def test_two_inputs_a_keyword_and_nested_outputs_are_handled():
    torch.manual_seed(0)
    model = loops.enliven(modules.TwoInputs()).double()
    x, group = _images(), torch.tensor([1, 4])
    scalable = ScalableModel(model, (x, group), {"gain": 2.0})
    assert scalable.verify().exact
    sub = scalable.extract(0.25, Random())
    assert sub.sizes == (4,)
    got, expected = (m.eval()(x, group, gain=0.7) for m in (sub.module, loops.masked(model, sub.index)))
    assert got.keys() == {"logits", "extra"}
    assert type(got["extra"]) is tuple
    torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got["extra"][0], expected["extra"][0], rtol=1e-12, atol=1e-12)
    (got["logits"].sum() + got["extra"][0].sum()).backward()
    before = _snapshot(model)
    with torch.no_grad():
        for parameter in sub.module.parameters():
            parameter.sub_(parameter.grad)
    scalable.write(sub)
    assert not torch.equal(model.embed.weight, before["embed.weight"])


# Copies of the scalable model itself


@pytest.mark.parametrize("again", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copied", "pickled"])
def test_a_scalable_model_can_be_copied_and_sent_to_another_process(again):
    scalable = _scalable(modules.DenselyConnected)
    sub = scalable.extract(0.5, Random(1))  # whatever is remembered must not come along broken
    scalable.cost(0.5)
    other = again(scalable)
    for width in (0.5, 0.25):
        got, expected = (s.extract(width, Random(1)).module.state_dict() for s in (other, scalable))
        assert all(torch.equal(got[name], expected[name]) for name in expected)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    assert torch.equal(scalable.extract(0.5, Random(1)).module.head.weight, sub.module.head.weight)
    assert not other.extract(0.5).module.head.weight.any()
