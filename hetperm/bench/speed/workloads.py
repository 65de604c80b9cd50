"""Four workloads to time, each as a FedAvg round of hetperm and as a bare torch loop of the same steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.device.updates import Sgd
from hetperm.engine.task import Engine
from hetperm.params import Params
from hetperm.randomness import generator_for
from hetperm.server.federation import Federation
from hetperm.server.global_model import local_sgd_round
from hetperm.server.slicer import Slicer
from submodels import ScalableModel, zoo

SEED = 0
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A round in which every client takes K steps.

    Attributes:
        model, sizes: the name of a model of `submodels.zoo`, and its arguments.
        widths: the widths of the clients, repeated in turn.
    """

    about: str
    model: str
    sizes: Mapping[str, Any]
    num_clients: int = 50
    local_steps: int = 20
    batch_size: int = 32
    widths: Sequence[float] = (1.0,)
    lr: float = 0.01

    @property
    def size(self) -> str:
        """Clients, steps and batch in words."""
        return f"{self.num_clients} clients x {self.local_steps} steps x batch {self.batch_size}"

    @property
    def update(self) -> Sgd:
        """The update that every client does."""
        return Sgd(self.local_steps, self.batch_size, self.lr)


FIVE = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
IMAGE = {"in_channels": 3, "image_size": 32}
# W3 has few clients because 50 of them would take half a minute a round.
WORKLOADS = {
    "W1": Workload("logistic regression, 60 features", "logistic", {"in_channels": 60, "image_size": None}),
    "W2": Workload("MLP 784-200-200-10", "mlp", {"in_channels": 1, "image_size": 28}),
    "W3": Workload("cnn, 32x32x3", "cnn", IMAGE, num_clients=6),
    "W4": Workload("resnet18-cifar, widths 1 to 1/16", "resnet18-cifar", IMAGE, 10, 2, 10, FIVE),
}


@dataclass(frozen=True)
class Setup:
    """A workload that is ready to run both ways.

    Attributes:
        modules: width -> the module that the bare loop trains.
        batches: (N, K) the batches that the round draws for every client, cut beforehand, as pairs (x, y).
    """

    workload: Workload
    clients: tuple[Client, ...]
    shop: Workshop
    start: Params
    slicer: Slicer
    modules: Mapping[float, nn.Module]
    batches: Sequence[Sequence[tuple[Tensor, Tensor]]]

    def federation(self, engine: Engine) -> Federation:
        """The clients of the workload, with an engine to run their tasks."""
        return Federation(self.clients, engine, self.slicer, SEED)


def build(workload: Workload, *, dtype: torch.dtype = torch.float32) -> Setup:
    """The clients, models and batches of a workload: random data, with as many samples as the steps of a round take."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = zoo.build(workload.model, num_classes=CLASSES, **workload.sizes).to(dtype)
    clients = tuple(_client(workload, j, dtype) for j in range(workload.num_clients))
    widths = sorted({client.width for client in clients})
    scalable = ScalableModel(model, torch.zeros_like(clients[0].train[0][:1])) if widths != [1.0] else None
    shop = Workshop(model, F.cross_entropy, scalable)
    # Copies: the bare loop keeps training its modules, and must not touch those of the round.
    modules = {width: shop.copy().at(width).module for width in widths}
    pairs = [_batches(client, workload) for client in clients]
    return Setup(workload, clients, shop, shop.full.take(), Slicer(scalable), modules, pairs)


def _client(workload: Workload, j: int, dtype: torch.dtype) -> Client:
    side, n = workload.sizes["image_size"], workload.local_steps * workload.batch_size
    shape = (workload.sizes["in_channels"],) if side is None else (workload.sizes["in_channels"], side, side)
    generator = generator_for(SEED, "bench", j)
    x = torch.randn(n, *shape, generator=generator, dtype=dtype)
    y = torch.randint(CLASSES, (n,), generator=generator)
    return Client((x, y), width=workload.widths[j % len(workload.widths)], key=j)


def _batches(client: Client, workload: Workload) -> list[tuple[Tensor, Tensor]]:
    """The batches that `local_sgd_round` draws in round 0."""
    x, y = client.train
    # Derived as that round derives it, so that both sides take the very same steps.
    generator = generator_for(SEED, "global", 0, client.key)
    return [(x[batch], y[batch]) for batch in workload.update.batches(len(x), generator)]


def fedavg_round(setup: Setup, engine: Engine) -> Params:
    """The global model after one round: parts are cut out, trained for K steps, and averaged."""
    updates = [setup.workload.update] * len(setup.clients)
    w, _ = local_sgd_round(
        setup.federation(engine), setup.start, updates, batch_size=setup.workload.batch_size, round=0
    )
    return w


def bare_loop(setup: Setup) -> None:
    """Take the steps of a round as torch alone would: no client, no server, no copy of a model."""
    lr = setup.workload.lr
    # New ones for every round, as its clients would make them; without momentum there is nothing to carry over.
    optimizers = {width: torch.optim.SGD(module.parameters(), lr=lr) for width, module in setup.modules.items()}
    for client, pairs in zip(setup.clients, setup.batches, strict=True):
        bare_steps(setup.modules[client.width], optimizers[client.width], pairs)


def bare_steps(module: nn.Module, optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Take a step on every batch."""
    for x, y in pairs:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()


def resized(workload: Workload, num_clients: int | None) -> Workload:
    """The workload with another number of clients; None: as it is."""
    return workload if num_clients is None else replace(workload, num_clients=num_clients)
