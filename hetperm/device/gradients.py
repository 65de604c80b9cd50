"""Updates that send back gradients or losses instead of a trained model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetperm.device.bench import CHUNK, Workbench
from hetperm.mixing import discrepancy
from hetperm.params import Params, flat, unflatten
from hetperm.shards import Batch, Shard, first, mapped, parts, size_of, taken

FORWARD = 1 / 3  # what a forward pass takes of a gradient: the backward pass takes twice as much
DIRECTIONS = "directions"  # the key in params of the directions (C, d) that a model may take
OWN_SHARE = "own share"  # the key in params of the weight (C,) of the client's own gradient in each direction
POSITIONS = "positions"  # the key in params that says where the coordinates of a part lie in the whole model


@dataclass(frozen=True)
class BatchGradient:
    """The gradient of one large mini-batch, by parameter name (Algorithm 3, the step of the global model).

    Attributes:
        chunk: samples run at once.
    """

    batch_size: int
    chunk: int = CHUNK

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The gradient, parameter by parameter."""
        bench.load(params)
        batch = torch.randperm(size_of(shard), generator=generator)[: self.batch_size]
        return dict(zip(bench.names, bench.mean_gradient(taken(shard, batch), self.chunk), strict=True))

    def samples(self, n: int) -> int:
        """The samples of the mini-batch."""
        return min(self.batch_size, n)


@dataclass(frozen=True)
class FullGradient:
    """The gradient (d,) of the mean loss over the whole shard. It draws no random numbers.

    Attributes:
        chunk: samples run at once.
    """

    chunk: int = CHUNK

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Tensor:
        """(d,) the gradient."""
        bench.load(params)
        return flat(bench.mean_gradient(shard, self.chunk))

    def samples(self, n: int) -> int:
        """The whole shard."""
        return n


@dataclass(frozen=True)
class Report:
    """What a client sends: its gradient (d,) or a sketch of it, and the variance of that gradient."""

    gradient: Tensor
    noise: float


@dataclass(frozen=True)
class ReportGradient:
    """The gradient of the mean loss over the whole shard, from micro-batches whose spread gives its noise.

    Attributes:
        batches: the number of micro-batches into which the shard is split, if it has enough samples.
        sketch: how many numbers of a sketch are sent instead of the gradient; None sends the gradient.
        sketch_seed: the seed of the sketch, the same for all clients.
        chunk: samples run at once.
        whole_size: the number of coordinates of the whole model, if the client's gradient is compared in its space:
            ``params["positions"]`` says where the client's coordinates lie, and all others are zero. None compares the
            gradients as they are.
    """

    batches: int
    sketch: int | None = None
    sketch_seed: int = 0
    chunk: int = CHUNK
    whole_size: int | None = None

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Report:
        """The report of one client."""
        # The micro-batches cover the shard: their weighted mean is the full gradient, and their spread is free.
        gradients, sizes = micro_gradients(
            bench, params, shard, batches=self.batches, chunk=self.chunk, generator=generator
        )
        mean, noise = discrepancy.mean_and_noise(gradients, sizes)
        if self.whole_size is not None:
            mean = mean.new_zeros(self.whole_size).index_copy_(0, params[POSITIONS].to(mean.device), mean)
        # Sketched after the zeros are filled in: sketches of different parts must agree on the places of coordinates.
        sent = mean if self.sketch is None else discrepancy.sketch(mean, self.sketch, self.sketch_seed)
        return Report(sent, noise)

    def samples(self, n: int) -> int:
        """The whole shard."""
        return n


def micro_gradients(
    bench: Workbench,
    params: Mapping[str, Tensor],
    shard: Shard,
    *,
    batches: int,
    generator: torch.Generator,
    chunk: int = CHUNK,
) -> tuple[Iterator[Tensor], list[int]]:
    """The gradients (d,) of m = min(batches, n) random micro-batches that cover the shard, and their sizes.

    A batch norm needs two samples in each micro-batch: then m = min(batches, n // 2), but at least 1.

    Args:
        chunk: samples run at once.
    """
    bench.load(params)
    n = size_of(shard)
    m = min(batches, max(1, n // (2 if bench.norms else 1)))
    # Random pieces: those of a shard sorted by class would differ too much and overstate the noise.
    pieces = torch.randperm(n, generator=generator).tensor_split(m)
    return bench.gradients(shard, pieces, chunk), [len(piece) for piece in pieces]


@dataclass(frozen=True)
class MeanLoss:
    """The mean loss () of a model on the shard, or on some of its samples.

    Attributes:
        chunk: samples run at once.
        most: the largest number of samples that the loss is taken on, drawn at random; 0 means all.
    """

    chunk: int = CHUNK
    most: int = 0

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Tensor:
        """() the loss."""
        if 0 < self.most < size_of(shard):
            shard = taken(shard, torch.randperm(size_of(shard), generator=generator)[: self.most])
        bench.load(params)
        n = size_of(shard)
        # Equal pieces: a short last one would give a batch norm poor statistics, or a single sample.
        pieces = parts(shard, math.ceil(n / self.chunk))
        with torch.no_grad():
            return sum(bench.value(x, y) * (len(y) / n) for x, y in pieces)

    def samples(self, n: int) -> float:
        """The samples of the loss, without backward passes."""
        return min(n, self.most or n) * FORWARD


@dataclass(frozen=True)
class StepLosses:
    r"""The losses (C, E) after one step of a model along each direction and with each step size.

    .. math:: L_{ce} = f_i(w - \eta_e d_c)

    ``params["directions"]`` holds the directions (C, d). On validation data they are taken as they are. A client that
    has none holds out one half of its shard at a time. Its own gradient, whose weights in the directions are
    ``params["own share"]`` (C,), is then that of the other half, so that no sample judges a step that it has made.

    A loss that is not finite counts as inf. A client with too few samples to tell has no say: all its losses are 0.

    Attributes:
        etas: (E,) the step sizes. With a step of 0 all directions have one loss, which is taken once.
        most: the largest number of samples that a loss is taken on.
        candidates: C.
        halves: whether the data are the shard itself, of which one half is held out at a time.
    """

    etas: tuple[float, ...]
    most: int
    candidates: int
    halves: bool = False
    chunk: int = CHUNK

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Tensor:
        """(C, E) the losses, in float64."""
        w = {name: params[name] for name in bench.names}
        directions = params[DIRECTIONS]
        order = torch.randperm(size_of(shard), generator=generator)
        drawn = order.tensor_split(2) if self.halves else [order[: self.most]]
        if min(self._judges, *(len(rows) for rows in drawn)) < (2 if bench.norms else 1):
            return torch.zeros(len(directions), len(self.etas), dtype=torch.float64)
        if not self.halves:
            return self._losses(bench, w, directions, taken(shard, drawn[0]))
        bench.load(w)
        pieces = [taken(shard, rows) for rows in drawn]
        gradients = [flat(bench.mean_gradient(piece, self.chunk)) for piece in pieces]
        sizes = [len(rows) for rows in drawn]
        mean = sum(g * (size / sum(sizes)) for g, size in zip(gradients, sizes, strict=True))
        own = params[OWN_SHARE][:, None].to(directions)
        first, second = (
            self._losses(bench, w, directions + own * (other - mean), held_out)
            for held_out, other in zip(pieces, reversed(gradients), strict=True)
        )
        return (first + second) / 2

    @property
    def _judges(self) -> int:
        """The largest number of samples that a loss is taken on at a time."""
        return self.most // 2 if self.halves else self.most

    def samples(self, n: int) -> float:
        """The samples of all losses, which need no backward pass, and with ``halves`` those of a gradient of each."""
        judges = 2 * self._judges if self.halves else self._judges
        return judges * num_losses(self.candidates, self.etas) * FORWARD + (n if self.halves else 0)

    def _losses(self, bench: Workbench, w: Params, directions: Tensor, held_out: Shard) -> Tensor:
        held_out = first(held_out, self._judges)
        n = size_of(held_out)
        table = torch.zeros(len(directions), len(self.etas), dtype=torch.float64)
        with torch.no_grad():
            for batch in parts(held_out, 1):
                x, y = _at(bench, batch)  # validation data, unlike the shard, may still lie elsewhere
                for c, direction in enumerate(directions):
                    step = unflatten(direction, w)
                    for e, eta in enumerate(self.etas):
                        if eta == 0 and c > 0:
                            continue
                        bench.load({name: p - eta * step[name] for name, p in w.items()})
                        table[c, e] += float(bench.value(x, y)) * (len(y) / n)
        for e, eta in enumerate(self.etas):
            if eta == 0:
                table[:, e] = table[0, e]
        return torch.where(table.isfinite(), table, math.inf)


def num_losses(candidates: int, etas: Sequence[float]) -> int:
    """The losses of a table of candidates and step sizes: without a step all candidates are at one place.

    Example:
        >>> num_losses(3, (0.0, 0.5, 1.0))
        7
    """
    standing = sum(eta == 0 for eta in etas)
    return candidates * (len(etas) - standing) + standing


def _at(bench: Workbench, batch: Batch) -> Batch:
    """The batch on the device of the bench, measurements in its precision."""
    home = bench.slots[0]
    return mapped(lambda x: x.to(home.device, home.dtype if x.is_floating_point() else None), batch)
