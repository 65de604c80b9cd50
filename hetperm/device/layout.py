"""The memory layout of images on a workbench: channels last where that is faster and torch computes it rightly.

It changes the last bits of a sum, so the model alone decides it: it is the same on every engine and machine.
"""

import torch
from torch import Tensor, nn

from hetperm.shards import Inputs

# Plain networks only. A forward method of its own may call `view`, which fails on channels last. And in torch 2.14 the
# backward pass of a channels-last 1x1 convolution of stride 2 writes outside its memory on CPUs without AVX512, and
# that of a batch norm is wrong for images of one pixel.
PLAIN = (
    *(nn.Sequential, nn.Conv2d, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.MaxPool2d, nn.AvgPool2d),
    *(nn.Flatten, nn.Linear, nn.Dropout, nn.Dropout2d),
)
CHANNELS = 8  # a network whose widest convolution has fewer gains nothing


def prefers_channels_last(module: nn.Module) -> bool:
    """Whether images are run with channels last: in sequences of plain convolutions, wide enough, on the CPU.

    Example:
        >>> prefers_channels_last(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)))
        True
        >>> prefers_channels_last(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        False
    """
    parts = list(module.modules())
    convolutions = [part for part in parts if isinstance(part, nn.Conv2d)]
    return (
        all([type(part) in PLAIN and not (part._forward_hooks or part._forward_pre_hooks) for part in parts])
        and all([_is_plain(part) for part in convolutions])
        and max([part.out_channels for part in convolutions], default=0) >= CHANNELS
    )


def _is_plain(part: nn.Conv2d) -> bool:
    return (
        part.weight.device.type == "cpu"
        and min(part.kernel_size) > 1
        and set(part.stride + part.dilation) == {1}
        and part.groups == 1
        and part.padding_mode == "zeros"
    )


def channels_last(x: Inputs) -> Inputs:
    """The images (n, channels, height, width) with channels last in memory; what is no batch of images stays."""
    if not (isinstance(x, Tensor) and x.dim() == 4):
        return x
    # Not `contiguous`: it leaves images of one channel as they are, and convolutions take those for channels first.
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)
