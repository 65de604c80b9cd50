"""Where a run computes: its device and precision, torch's threads, and the engine that its workers have memory for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from hetperm.client import Client
from hetperm.config import Config
from hetperm.device.bench import Workshop
from hetperm.engine.choice import choose
from hetperm.memory import GB, available_bytes
from hetperm.runs.local_steps import recipe_of, step_of
from hetperm.shards import Shard, Stored, mapped


def device_of(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cpu" and device.index:
            raise RuntimeError("a machine has one CPU device")
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        # A name can be valid and the device missing; only an allocation shows it.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ValueError(f"device {name!r} is not there; use 'auto' or 'cpu'") from error
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
