"""Updates that send back gradients or losses instead of a trained model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetperm.device.bench import CHUNK, Shard, Workbench
from hetperm.mixing import discrepancy
from hetperm.params import Params, flat

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
        x, y = shard
        bench.load(params)
        batch = torch.randperm(len(x), generator=generator)[: self.batch_size]
        return dict(zip(bench.names, bench.mean_gradient(x[batch], y[batch], self.chunk), strict=True))

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
        return flat(bench.mean_gradient(*shard, self.chunk))

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
    x, y = shard
    m = min(batches, max(1, len(x) // (2 if bench.norms else 1)))
    # Random pieces: those of a shard sorted by class would differ too much and overstate the noise.
    pieces = torch.randperm(len(x), generator=generator).tensor_split(m)
    return bench.gradients(x, y, pieces, chunk), [len(piece) for piece in pieces]


@dataclass(frozen=True)
class MeanLoss:
    """The mean loss () of a model on the whole shard. It draws no random numbers.

    Attributes:
        chunk: samples run at once.
    """

    chunk: int = CHUNK

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Tensor:
        """() the loss."""
        x, y = shard
        bench.load(params)
        # Equal pieces: a short last one would give a batch norm poor statistics, or a single sample.
        pieces = math.ceil(len(x) / self.chunk)
        with torch.no_grad():
            return sum(
                bench.value(piece_x, piece_y) * (len(piece_x) / len(x))
                for piece_x, piece_y in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)
            )

    def samples(self, n: int) -> int:
        """The whole shard."""
        return n
