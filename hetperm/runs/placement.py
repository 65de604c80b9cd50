"""Where a run computes: its device and precision, torch's threads, and the engine that its workers have memory for."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from hetperm.client import Client
from hetperm.config import ALGORITHMS, Config
from hetperm.device.bench import Workshop
from hetperm.engine.choice import choose
from hetperm.memory import GB, available_bytes
from hetperm.methods import METHODS
from hetperm.runs.local_steps import recipe_of, step_of
from hetperm.server.federation import own_widths
from hetperm.shards import Shard, Stored, mapped
from hetperm.texts import shown


def device_of(name: str | torch.device, *, hollow: bool = False) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one, else the CPU.

    Args:
        hollow: whether it may be the meta device, which holds no numbers.
    """
    if not isinstance(name, str | torch.device):
        raise TypeError(f"the device is {shown(name)}; it must be a name such as 'cpu' or 'cuda:0'")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cpu" and device.index:
            raise RuntimeError("a machine has one CPU device")
        if device.type == "meta" and not hollow:
            raise RuntimeError("it holds no numbers")
        # A name can be valid and the device missing; only an allocation shows it.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ValueError(f"device {shown(str(name))} is not there; use 'auto' or 'cpu'") from error
    return device


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch uses one thread: models are small, and sums come out the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def placed(model: nn.Module, config: Config) -> nn.Module:
    """The model on the device and in the precision of a run."""
    for name, p in model.named_parameters():
        if p.is_meta:
            raise ValueError(f"{name} of the model is on the meta device, which holds no numbers; build it on the CPU")
    return model.to(device_of(config.device), getattr(torch, config.dtype))


def moved(client: Client, config: Config) -> Client:
    """The client with its shard on the device of a run. Validation and test data are moved later, batch by batch."""
    device, dtype = device_of(config.device), getattr(torch, config.dtype)
    train = client.train
    if isinstance(train, Stored):
        train = replace(train, device=device, dtype=dtype)
    else:
        train = tuple(mapped(lambda x: x.to(device, dtype if x.is_floating_point() else None), part) for part in train)
    shards = {"train": train, "val": client.val, "test": client.test}
    return replace(client, **{part: _bounded(shard, config.batch_size) for part, shard in shards.items()})


def _bounded(shard: Shard | None, most: int) -> Shard | None:
    """The shard, of which at most so many samples are in memory at once if it is a Dataset."""
    return replace(shard, most=most) if isinstance(shard, Stored) else shard


def check_memory(shop: Workshop, clients: Sequence[Client], config: Config) -> None:
    """Raise an error if the models of all clients cannot be in memory at once.

    Only what no run can do without is counted, for what would fit must not be refused.
    """
    available, method = available_bytes(), METHODS[config.algorithm]
    # Who is there by a trace, and what an algorithm of a plugin keeps, is not known here.
    unknown = config.trace or config.algorithm not in ALGORITHMS
    if available is None or unknown or shop.full.slots[0].device.type != "cpu":
        return
    smallest = min(client.width for client in clients)
    # In a round all clients that are there send a model or a gradient, of at least the smallest width.
    sent = config.participation * len(clients) * _model_bytes(shop, smallest)
    if method.mixes and config.sketch and config.warmup_rounds == 0:
        sent = 0.0  # sketches only
    kept = 0.0
    if method.mixes and config.idle_models == "memory":
        widths = Counter(own_widths(clients, config.personal_width))
        # Twice: an epoch makes new models of the old ones, which stay until it is over.
        kept = 2 * config.participation * sum(count * _model_bytes(shop, width) for width, count in widths.items())
    if max(sent, kept) > available:
        disk = "--idle-models disk, " if sent <= available else ""
        raise ValueError(
            f"the models of {len(clients)} clients need at least {max(sent, kept) / GB:.2g} GB, and "
            f"{available / GB:.2g} GB of memory are free; take fewer clients, {disk}or a smaller model"
        )


def _model_bytes(shop: Workshop, width: float) -> int:
    """The bytes of the trained parameters at a width."""
    if shop.scalable is None:
        return sum(p.nbytes for p in shop.full.slots)
    axis_map = shop.scalable.axis_map
    counts = axis_map.counts(width)
    slots = zip(shop.full.names, shop.full.slots, strict=True)
    return sum(math.prod(axis_map.shape(name, counts)) * p.element_size() for name, p in slots)


def engine_for(shop: Workshop, clients: Sequence[Client], config: Config) -> str:
    """The engine of a run; an error if its workers need more memory than there is."""
    recipe, available = recipe_of(config, own_augment=shop.augment is not None), available_bytes()
    engine = choose(config.engine, config.workers, clients, shop, recipe)
    if config.workers == 1 or engine not in ("threads", "processes") or available is None:
        return engine
    need = _worker_bytes(shop, clients, config)
    if config.workers * need > available:
        raise ValueError(
            f"{config.workers} workers need about {need / GB:.2g} GB each to train this model, and "
            f"{available / GB:.2g} GB are free; take --workers {max(1, available // need)}, or a smaller model or batch"
        )
    return engine


def _worker_bytes(shop: Workshop, clients: Sequence[Client], config: Config) -> int:
    """The memory that a worker needs for a step of the widest client's model."""
    if shop.scalable is None:  # a model that was never traced: its weights, their gradients, and a model that travels
        return 3 * sum(p.nbytes for p in shop.full.slots)
    size = min(config.batch_size, max(client.n_train for client in clients))
    step = step_of(config) | {"batch_size": size, "accumulate": min(config.accumulate, size)}
    return shop.scalable.cost(max(client.width for client in clients), **step).train_bytes
