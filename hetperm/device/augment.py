"""Augmentation: random changes of a batch before a local step, drawn from the generator of the task."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hetperm.shards import Batch, Inputs

Augment = Callable[[Inputs, Tensor, torch.Generator], Batch]  # (inputs, labels, generator) -> the same, changed

OWN = "own"  # the name of a function that a user gave
PADDING = 8  # an image is moved by up to an eighth of its side


def flip_crop(x: Inputs, y: Tensor, generator: torch.Generator) -> Batch:
    """Images (n, channels, height, width), half of them mirrored, each moved by up to an eighth of its side.

    What comes in at the border is 0: the mean, where pixels were shifted to mean 0. Labels stay.
    """
    if not isinstance(x, Tensor) or x.dim() != 4:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"augment 'flip-crop' is for images (n, channels, height, width); these inputs are {shape}")
    n, _, height, width = x.shape
    # Drawn on the CPU, where the generator is, whatever the device of the images.
    flips = torch.rand(n, generator=generator) < 0.5
    tall, wide = (max(1, side // PADDING) for side in (height, width))
    down, right = (torch.randint(2 * pad + 1, (n,), generator=generator) for pad in (tall, wide))
    x = torch.where(flips.to(x.device)[:, None, None, None], x.flip(3), x)
    padded = F.pad(x, (wide, wide, tall, tall))
    rows = (down[:, None] + torch.arange(height)).to(x.device)
    columns = (right[:, None] + torch.arange(width)).to(x.device)
    image = torch.arange(n, device=x.device)
    return padded.permute(0, 2, 3, 1)[image[:, None, None], rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2), y


AUGMENTS: dict[str, Augment] = {"flip-crop": flip_crop}
