"""The contract of models: one table, and what a sub-model of every row must do. A newcomer joins by adding a row.

Library models are made shallow where their constructors allow, and see the smallest images they take.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import modules
import pytest
import torch
from reference import slicing_loops as loops
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from submodels import Random, Rolling, ScalableModel, Static, norms, zoo
from submodels.resnet import ResNet


@dataclass(frozen=True)
class Row:
    """A model of the table.

    Attributes:
        share: the most that half the width may have of the parameters.
        plain: no operation looks at all channels at once, so a missing channel is the same as a zero one, as it is.
    """

    build: Callable[[], nn.Module]
    share: float = 0.4
    image: tuple[int, ...] = modules.IMAGE[1:]
    plain: bool = True


def _library(name: str, image: int | tuple[int, ...] = 32, **options) -> Callable[[], nn.Module]:
    return functools.partial(zoo.build, name, in_channels=3, num_classes=10, image_size=image, **options)


def _resnet18_cifar() -> nn.Module:
    return ResNet(3, 10, channels=(16, 32, 64, 128), blocks=2)  # with a quarter of the channels


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer  # mixer_s32_224 does not let its depth be chosen

    return MlpMixer(num_classes=10, img_size=64, patch_size=16, num_blocks=2, embed_dim=64)


def _shufflenet() -> nn.Module:
    from torchvision.models import ShuffleNetV2  # shufflenet_v2_x0_5 with two units a stage instead of 4, 8 and 4

    return ShuffleNetV2([2, 2, 2], [24, 48, 96, 192, 1024], num_classes=10)


def _regnety() -> nn.Module:
    from timm.models.regnet import RegNet, RegNetCfg  # regnety_002 with seven blocks instead of 13

    return RegNet(RegNetCfg(w0=24, wa=36.44, wm=2.49, group_size=8, depth=7, se_ratio=0.25), num_classes=10)


def _poolformer() -> nn.Module:
    from timm.models.metaformer import GroupNorm1, MetaFormer  # poolformer_s12 with one block a stage

    options = {"mlp_act": nn.GELU, "mlp_bias": True, "norm_layers": GroupNorm1, "downsample_norm": None}
    scales = {"layer_scale_init_values": 1e-5, "res_scale_init_values": None}
    return MetaFormer(depths=(1, 1, 1, 1), num_classes=10, use_mlp_head=False, **options, **scales)


CROSS_CHANNEL = {modules.LayerScale, modules.TransformerEncoder}
WRITTEN = {build.__name__: Row(build, share=0.45, plain=build not in CROSS_CHANNEL) for build in modules.CUTTABLE}
WRITTEN["TiedWeights"] = Row(modules.TiedWeights, share=0.6)  # mostly input and output, which are never cut
ZOO = {
    "mlp": Row(_library("mlp", 16), image=(3, 16, 16), share=0.45),
    "cnn": Row(_library("cnn", 16), image=(3, 16, 16)),
    "har-cnn": Row(_library("har-cnn", (32,)), image=(3, 32)),
    "resnet18-cifar": Row(_resnet18_cifar, image=(3, 16, 16), share=0.26),
}
SMALL, LARGER, SWIN = (3, 32, 32), (3, 64, 64), (3, 56, 56)
LIBRARY = {
    "resnet18": Row(_library("timm:resnet18", layers=(1, 1, 1, 1)), image=SMALL, share=0.27),
    "mobilenetv3": Row(_library("timm:mobilenetv3_small_050"), image=SMALL, share=0.28),
    "efficientnet": Row(_library("timm:test_efficientnet"), image=SMALL, share=0.28),
    "densenet121": Row(_library("timm:densenet121", block_config=(2, 2, 2, 2)), image=SMALL, share=0.28),
    "convnext_atto": Row(_library("timm:convnext_atto", depths=(1, 1, 1, 1)), image=SMALL, share=0.28, plain=False),
    "vit_tiny": Row(_library("timm:vit_tiny_patch16_224", depth=2), image=SMALL, share=0.32, plain=False),
    "swin_tiny": Row(
        _library("timm:swin_tiny_patch4_window7_224", 56, embed_dim=48, depths=(2, 2)),
        image=SWIN,
        share=0.28,
        plain=False,
    ),
    "mixer": Row(_mixer, image=LARGER, share=0.4, plain=False),
    "resnext50": Row(_library("timm:resnext50_32x4d", layers=(1, 1, 1, 1)), image=SMALL, share=0.28),
    "regnety": Row(_regnety, image=SMALL, share=0.3),
    "poolformer": Row(_poolformer, image=SMALL, share=0.26, plain=False),
    "shufflenet_v2": Row(_shufflenet, image=SMALL, share=0.33),
}
MODELS = {**WRITTEN, **ZOO, **LIBRARY}
SLOW = {*LIBRARY, "resnet18-cifar"}


def _rows(*, plain_only: bool = False) -> list:
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, row in MODELS.items()
        if row.plain or not plain_only
    ]


# Every extractor and every width: all fifteen pairs for small models, one width for each extractor for slow ones.
WIDTHS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
ALL = [(extractor, width) for extractor in (Static(), Rolling(), Random(2)) for width in WIDTHS]
SOME = [ALL[i] for i in (3, 6, 12)]


@functools.cache
def _scalable(name: str) -> ScalableModel:
    """The model in float64, with random weights everywhere; tests do not change it."""
    if name in WRITTEN:
        return modules.traced(MODELS[name].build)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = loops.enliven(MODELS[name].build()).double()
    return ScalableModel(model, _images(name)[:2])


def _images(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, *MODELS[name].image, dtype=torch.float64, generator=generator)


def _outputs(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [y for y in tree_leaves(module(x)) if isinstance(y, Tensor)]


def _assert_close(got: Tensor, expected: Tensor, scale: float, what: str) -> None:
    error = float((got.detach() - expected.detach()).abs().max()) if got.numel() else 0.0
    assert error <= 1e-9 * scale, f"{what}: off by {error:.1e} of {scale:.1e}"  # NaN fails


def _largest(tensors) -> float:
    return max(float(x.detach().abs().max()) for x in tensors if x.numel())


@pytest.mark.parametrize("name", _rows())
def test_sub_models_compute_what_the_masked_model_computes(name):
    # A slow model without norms over channels meets three more widths in training, below.
    widths = (0.25, 0.5, 1.0) if name not in SLOW else (0.5,) if MODELS[name].plain else (0.25, 0.5)
    report = _scalable(name).verify(widths)
    assert report.exact, str(report)
    assert report.explained_by == ()


@pytest.mark.parametrize("name", _rows())
def test_half_the_width_has_no_more_than_its_share_of_the_parameters(name):
    scalable = _scalable(name)
    sub = scalable.extract(0.5)
    counted = sum(p.numel() for p in sub.module.parameters()) / sum(p.numel() for p in scalable.model.parameters())
    assert scalable.axis_map.share(0.5) == pytest.approx(counted)
    assert counted <= MODELS[name].share
    assert not scalable.axis_map.notes


# Library models are compared in training, below, and in evaluation by `verify`, above.
@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.plain and name not in SLOW])
def test_without_norms_over_channels_extracted_and_masked_agree_as_they_are(name):
    scalable, x = _scalable(name), _images(name)
    for extractor, width in ALL:
        sub = scalable.extract(width, extractor, round=5, client=1)
        with torch.no_grad():
            got = _outputs(sub.module.eval(), x)
            expected = _outputs(loops.masked(scalable.model, sub.index).eval(), x)
        assert len(got) == len(expected)
        for y, z in zip(got, expected, strict=True):
            assert y.shape == z.shape
            _assert_close(y, z, _largest([z]), f"{extractor} {width}")


@pytest.mark.parametrize("name", _rows(plain_only=True))
def test_in_training_outputs_gradients_and_running_statistics_agree(name):
    scalable, x = _scalable(name), _images(name)
    for extractor, width in SOME if name in SLOW else ALL:
        sub = scalable.extract(width, extractor, round=5, client=1)
        masked = loops.masked(scalable.model, sub.index)
        generator = torch.Generator().manual_seed(2)
        outputs = [_outputs(module.train(), x) for module in (sub.module, masked)]
        cotangents = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in outputs[0]]
        for got, expected in zip(*outputs, strict=True):
            _assert_close(got, expected, _largest([expected]), f"{extractor} {width}: output")
        for ys in outputs:
            torch.autograd.backward([(y * c).sum() for y, c in zip(ys, cotangents, strict=True)])
        whole = dict(masked.named_parameters())
        scale = _largest([p.grad for p in whole.values()])
        for part, p in sub.module.named_parameters():
            expected = sub.index.gather(part, whole[part].grad)
            _assert_close(p.grad, expected, scale, f"{extractor} {width}: gradient of {part}")
        buffers = dict(masked.named_buffers())
        for part, buffer in sub.module.named_buffers():
            if part in norms.statistics(sub.module):
                expected = sub.index.gather(part, buffers[part])
                _assert_close(buffer, expected, 1 + _largest([expected]), f"{extractor} {width}: {part}")


@pytest.mark.parametrize("name", _rows())
def test_at_full_width_channels_in_any_order_compute_what_the_model_computes(name):
    scalable, x = _scalable(name), _images(name)

    def shuffled(group, kept, *, round, client):
        return torch.randperm(group.size, generator=torch.Generator().manual_seed(group.id))[:kept]

    with torch.no_grad():
        got = _outputs(scalable.extract(1.0, shuffled).module.eval(), x)
        expected = _outputs(copy.deepcopy(scalable.model).eval(), x)
    for y, z in zip(got, expected, strict=True):
        _assert_close(y, z, _largest([z]), "output")


@pytest.mark.parametrize("name", _rows())
def test_a_sub_model_trains_a_step(name):
    sub = _scalable(name).extract(1 / 16, Random(), round=1)
    module = sub.module.float().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in module.parameters()]
    outputs = _outputs(module, _images(name).float())
    loss = sum(nn.functional.cross_entropy(y, torch.arange(4)) for y in outputs)
    loss.backward()
    assert torch.isfinite(loss)
    for part, p in module.named_parameters():
        assert p.grad is not None, part
        assert torch.isfinite(p.grad).all(), part
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert any(not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))


def test_the_zoo_is_in_the_table_but_for_logistic_regression_which_has_nothing_to_cut():
    # The table has images; char-lstm takes characters, and is proved exact in test_zoo.py.
    assert set(zoo.MODELS) - set(ZOO) == {"logistic", "char-lstm"}
    with torch.device("meta"):  # the row has fewer channels, and the same parts
        whole, row = _library("resnet18-cifar", 16)(), _resnet18_cifar()
    assert [(name, type(part)) for name, part in whole.named_modules()] == [
        (name, type(part)) for name, part in row.named_modules()
    ]
    with pytest.raises(ValueError, match="nothing in Sequential can be cut"):
        ScalableModel(_library("logistic", 16)(), torch.zeros(2, 3, 16, 16))


def test_auxiliary_outputs_are_computed_in_training_alone():
    module, x = _scalable("AuxiliaryHead").extract(0.25, Random()).module, _images("AuxiliaryHead")
    assert len(_outputs(module.train(), x)) == 2
    assert len(_outputs(module.eval(), x)) == 1
