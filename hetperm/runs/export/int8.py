"""Dynamic int8 in plain ATen operations, so that a .pt2 file needs torch alone.

Weights are stored as int8 with a scale for every output channel. The inputs of a layer are rounded to 255 levels, with
a scale for every sample (of linear layers: every row) that is found when it runs. Products are exact sums of whole
numbers in floats, as an integer kernel would have them.
"""

import copy

import torch
from torch import Tensor, nn

LEVELS = 127
CONVOLUTIONS = {nn.Conv1d: nn.functional.conv1d, nn.Conv2d: nn.functional.conv2d, nn.Conv3d: nn.functional.conv3d}


class Int8Layer(nn.Module):
    """A linear layer or convolution with weights in int8.

    Args:
        layer: an `nn.Linear`, `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True).clamp_min(1e-12) / LEVELS
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.linear = isinstance(layer, nn.Linear)
        # As outputs have them: channels last after a linear layer, second after a convolution.
        self.register_buffer("scale", scale.flatten() if self.linear else scale.view(-1, *[1] * (weight.dim() - 2)))
        bias = None if layer.bias is None else layer.bias.detach().view(self.scale.shape).clone()
        self.register_buffer("bias", bias)
        if not self.linear:
            self.convolve = CONVOLUTIONS[type(layer)]
            self.options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of the layer for x (n, ...)."""
        over = (-1,) if self.linear else tuple(range(1, x.dim()))
        step = x.abs().amax(dim=over, keepdim=True).clamp_min(1e-12) / LEVELS
        whole, weight = (x / step).round(), self.weight.to(x.dtype)
        y = nn.functional.linear(whole, weight) if self.linear else self.convolve(whole, weight, **self.options)
        y = y * (step * self.scale)
        return y if self.bias is None else y + self.bias


def quantized(module: nn.Module) -> nn.Module:
    """A copy of the module whose linear layers and convolutions hold int8 weights.

    Subclasses of these layers stay as they are: their code may read the weights in its own way.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> layer.weight.data = torch.tensor([[1.0, -0.5]])
        >>> quantized(layer).weight
        tensor([[127, -64]], dtype=torch.int8)
    """
    module = copy.deepcopy(module)
    if _fits(module):
        return Int8Layer(module)
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if _fits(layer):
                setattr(parent, name, Int8Layer(layer))
    return module


def _fits(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or (type(layer) in CONVOLUTIONS and layer.padding_mode == "zeros")
