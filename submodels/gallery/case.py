"""A row of the gallery, and inputs for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model and an example of what it takes, both made when asked for.

    Attributes:
        build: makes the model.
        inputs: makes its example inputs, as `ScalableModel` takes them.
        options: further arguments of `ScalableModel`.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def words(*shape: int, vocabulary: int = 50) -> Callable[[], Tensor]:
    """Word numbers of a shape."""
    return lambda: torch.randint(0, vocabulary, shape)


def numbers(*shape: int) -> Callable[[], Tensor]:
    """Random numbers of a shape."""
    return lambda: torch.randn(shape)


def first(out: Any) -> Any:
    """The first of what a model returns: its logits."""
    return out[0]
