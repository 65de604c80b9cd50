"""Extractors: which channels of a group a sub-model keeps.

An extractor is called once per coupled group, ``extractor(group, kept, *, round, client)``, and returns the ``kept``
channel numbers in the order the sub-model will hold them. One call per *group* is what keeps residual streams
aligned: every tensor in which the channels appear uses the same answer.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from submodels.axismap import AxisMap, ChannelGroup
from submodels.terms import owners
from submodels.texts import shown

Extractor = Callable[..., Tensor]


@dataclass(frozen=True)
class Static:
    """HeteroFL, FjORD: the first channels, so that narrow sub-models nest in wide ones.

    >>> Static()(ChannelGroup(id=0, size=6), 3, round=5, client=1)
    tensor([0, 1, 2])
    """

    def __call__(self, group: ChannelGroup, kept: int, *, round: int, client: int) -> Tensor:
        return torch.arange(kept)


@dataclass(frozen=True)
class Rolling:
    """FedRolex: a window that advances ``step`` channels a round and wraps round.

    Args:
        step: channels a round; every channel is covered equally over ``size`` rounds with the default 1. A fraction
            below 1 is a share of the group, so that groups of different sizes come round together.

    >>> Rolling()(ChannelGroup(id=0, size=6), 3, round=4, client=1)
    tensor([4, 5, 0])
    """

    step: int | float = 1

    def __post_init__(self):
        number = isinstance(self.step, Real) and not isinstance(self.step, bool) and 0 < self.step <= 1e9
        if not number or (self.step >= 1 and int(self.step) != self.step):
            given = shown(self.step)
            raise ValueError(f"Rolling step {given} is neither a whole number of channels nor a fraction below 1")

    def __call__(self, group: ChannelGroup, kept: int, *, round: int, client: int) -> Tensor:
        # The guard: 0.29 * 100 is 28.999999999999996 in floating point, and means 29.
        shift = round * int(self.step) if self.step >= 1 else math.floor(round * self.step * group.size + 1e-9)
        return (torch.arange(kept) + shift % group.size) % group.size


@dataclass(frozen=True)
class Random:
    """Federated Dropout: a fresh draw for every (seed, round, client, group), in ascending order."""

    seed: int = 0

    def __post_init__(self):
        # It is hashed as a text, and nearly anything has one.
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool) or abs(self.seed) >= 2**64:
            raise TypeError(f"Random seed {shown(self.seed)} is not a whole number below 2^64")

    def __call__(self, group: ChannelGroup, kept: int, *, round: int, client: int) -> Tensor:
        key = f"{self.seed} {round} {client} {group.id}".encode()
        # A hash, so that neighbouring rounds draw independently; sha256, as hash() differs between processes.
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
        return torch.randperm(group.size, generator=torch.Generator().manual_seed(seed))[:kept].sort().values


@dataclass(frozen=True, eq=False)
class Importance:
    """The channels with the largest summed squared weight, in ascending order; ties go to the lower channel."""

    scores: tuple[Tensor, ...]

    def __post_init__(self):
        if not (
            isinstance(self.scores, tuple | list) and all([isinstance(x, Tensor) and x.dim() == 1 for x in self.scores])
        ):
            raise TypeError(f"the scores are {shown(self.scores)}; Importance.of(model) measures them")
        if any([x.isnan().any() for x in self.scores if not x.is_meta]):
            raise ValueError("a score is nan, which no channel can be ranked by; Importance.of(model) measures them")

    @classmethod
    def of(cls, model) -> "Importance":
        """The importance of every channel of a `ScalableModel` or `Submodel`, as its weights are now."""
        if not isinstance(getattr(model, "axis_map", None), AxisMap) or not hasattr(model, "named_parameters"):
            raise TypeError(f"{shown(model)} has no channels to compare; give a ScalableModel or a Submodel")
        axis_map: AxisMap = model.axis_map
        scores = [torch.zeros(size, dtype=torch.float64) for size in model.sizes]
        for name, x in model.named_parameters():
            for i, term in enumerate(axis_map.dims[name]):
                rest = [d for d in range(x.dim()) if d != i]
                squares = x.detach().cpu().double().square()
                energy = squares.sum(rest) if rest else squares
                for group in set(term.groups()):
                    # Every position counts for its channel: all 64 features of a head, all pixels of a flattened map.
                    owner = owners(term, group, model.sizes)
                    scores[group].index_add_(0, owner[owner >= 0], energy[owner >= 0])
        return cls(tuple(scores))

    def __call__(self, group: ChannelGroup, kept: int, *, round: int, client: int) -> Tensor:
        scores = self.scores[group.id] if group.id < len(self.scores) else ()
        if len(scores) != group.size:
            raise ValueError(
                f"Importance was measured on {len(scores)} channels of group {group.name}, which has {group.size} "
                f"here; use Importance.of(the model you extract from)"
            )
        return scores.argsort(descending=True, stable=True)[:kept].sort().values


EXTRACTORS: dict[str, Callable[[], Extractor]] = {"static": Static, "rolling": Rolling, "random": Random}


def as_extractor(extractor: Extractor | str) -> Extractor:
    """The extractor itself, or the one of that name."""
    if isinstance(extractor, str):
        if extractor not in EXTRACTORS:
            raise ValueError(f"unknown extractor {shown(extractor)}; use one of {', '.join(EXTRACTORS)} or an object")
        return EXTRACTORS[extractor]()
    if isinstance(extractor, type) or not callable(extractor):
        raise TypeError(
            f"{shown(extractor)} is not an extractor; use Static(), Rolling(), Random(seed) or Importance.of(model)"
        )
    return extractor
