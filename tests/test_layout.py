"""Memory layouts: channels last changes no gradient but by rounding, and is used only where torch computes it well."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetperm.device.bench import Workbench
from hetperm.device.layout import channels_last, prefers_channels_last
from submodels import ScalableModel, zoo

WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)


def image_model(name: str, channels: int, width: float) -> nn.Module:
    torch.manual_seed(0)
    model = zoo.build(name, in_channels=channels, num_classes=10, image_size=8).double()
    x = torch.zeros(2, channels, 8, 8, dtype=torch.float64)
    return model if width == 1 else ScalableModel(model, x).extract(width).module


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "width"), [*(("cnn", width) for width in WIDTHS), *(("resnet18-cifar", width) for width in WIDTHS[-2:])]
)
def test_a_bench_computes_the_gradients_of_the_plain_layout(name, width, channels):
    module = image_model(name, channels, width)
    bench, plain = Workbench(module, F.cross_entropy), Workbench(module, F.cross_entropy)
    plain.channels_last = False
    x, y = torch.randn(3, channels, 8, 8, dtype=torch.float64), torch.randint(10, (3,))
    for g, expected in zip(bench.gradient(x, y), plain.gradient(x, y), strict=True):
        assert torch.allclose(g, expected, atol=1e-12) and g.is_contiguous()


@pytest.mark.parametrize(("width", "used"), [(1.0, True), (0.125, True), (0.0625, False)])
def test_a_cnn_is_run_with_channels_last_unless_it_is_too_narrow_to_gain(width, used):
    bench, seen = Workbench(image_model("cnn", 3, width), F.cross_entropy), []
    bench.module[-1].register_forward_hook(lambda *_: None)  # after the choice: it decides nothing now
    bench.module.conv2.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    bench.gradient(torch.zeros(2, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1]))
    assert bench.channels_last == used
    assert seen[0].is_contiguous(memory_format=torch.channels_last) == used


class Viewing(nn.Sequential):
    def forward(self, x):
        return super().forward(x).view(len(x), -1)


CONV = nn.Conv2d(3, 8, 3)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(CONV, nn.Conv2d(8, 16, 1, stride=2)),  # its backward pass corrupts memory on some CPUs
        nn.Sequential(CONV, nn.Conv2d(8, 16, 3, stride=2)),
        nn.Sequential(CONV, nn.Conv2d(8, 8, 3, groups=8)),
        nn.Sequential(CONV, nn.BatchNorm2d(8)),
        Viewing(CONV),
        nn.Sequential(nn.Conv2d(3, 8, 3, device="meta")),  # any device but the CPU
    ],
)
def test_other_models_keep_the_plain_layout(module):
    assert not prefers_channels_last(module)


def test_hooks_keep_the_plain_layout():
    module = nn.Sequential(nn.Conv2d(3, 8, 3))
    assert prefers_channels_last(module)
    module[0].register_forward_hook(lambda *_: None)
    assert not prefers_channels_last(module)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_laid_out_by_pixels_and_everything_else_stays(channels):
    x = torch.randn(2, channels, 4, 5)
    laid = channels_last(x)
    assert laid.stride() == (20 * channels, 1, 5 * channels, channels) and torch.equal(laid, x)
    for other in (torch.zeros(2, 3), (x, x), {"x": x}):
        assert channels_last(other) is other
