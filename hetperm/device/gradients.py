"""Updates that send back gradients or losses instead of a trained model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetperm.device.bench import CHUNK, Shard, Workbench
from hetperm.mixing import discrepancy
from hetperm.params import Params, flat

POSITIONS = "positions"  # the name in params of where a part's coordinates lie in the whole model


@dataclass(frozen=True)
class BatchGradient:
    """The gradient of one large mini-batch, by name.

    Attributes:
        chunk: samples that are run at once.
    """

    batch_size: int
    chunk: int = CHUNK

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The gradient, as a model."""
        x, y = shard
        bench.load(params)
        batch = torch.randperm(len(x), generator=generator)[: self.batch_size]
        return dict(zip(bench.names, bench.mean_gradient(x[batch], y[batch], self.chunk), strict=True))

    def samples(self, n: int) -> int:
        """Samples of the mini-batch."""
        return min(self.batch_size, n)


@dataclass(frozen=True)
class FullGradient:
    """The gradient (d,) of the client's mean loss, flat, over the whole shard; it draws nothing.

    Attributes:
        chunk: samples that are run at once.
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
    """What a client sends: its gradient (d,) or the sketch of it, and the variance of that gradient."""

    gradient: Tensor
    noise: float


@dataclass(frozen=True)
class ReportGradient:
    """The full gradient of the client's mean loss, from micro-batches whose spread tells how certain it is.

    Attributes:
        batches: micro-batches that make up the shard, as far as it has samples for them.
        sketch: numbers of the sketch that is sent instead of the gradient; None: the gradient.
        sketch_seed: decides the sketch; the same for all clients.
        chunk: samples that are run at once.
        whole_size: coordinates of the whole model if the client holds a part of it: ``params["positions"]`` says where
            its coordinates lie in there, and the gradient is zero in all others. None: the client's model is what is
            compared.
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
        # Micro-batches of the whole shard: their weighted mean is the full gradient, and their spread is free.
        gradients, sizes = micro_gradients(
            bench, params, shard, batches=self.batches, chunk=self.chunk, generator=generator
        )
        mean, noise = discrepancy.mean_and_noise(gradients, sizes)
        if self.whole_size is not None:
            mean = mean.new_zeros(self.whole_size).index_copy_(0, params[POSITIONS].to(mean.device), mean)
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
    """The gradients (d,) of m = min(batches, n) random micro-batches that make up the whole shard, and their sizes.

    A batch norm needs two samples in each: m = min(batches, n // 2).

    Args:
        chunk: samples that are run at once.
    """
    bench.load(params)
    x, y = shard
    m = min(batches, max(1, len(x) // (2 if bench.norms else 1)))
    pieces = torch.randperm(len(x), generator=generator).tensor_split(m)
    return bench.gradients(x, y, pieces, chunk), [len(piece) for piece in pieces]


@dataclass(frozen=True)
class MeanLoss:
    """The mean loss () of a model on the whole shard, in equal pieces that fit in memory; it draws nothing.

    Attributes:
        chunk: samples that are run at once.
    """

    chunk: int = CHUNK

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Tensor:
        """() the loss."""
        x, y = shard
        bench.load(params)
        pieces = math.ceil(len(x) / self.chunk)
        with torch.no_grad():
            return sum(
                bench.value(piece_x, piece_y) * (len(piece_x) / len(x))
                for piece_x, piece_y in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)
            )

    def samples(self, n: int) -> int:
        """The whole shard."""
        return n
