"""The data of a node: its share of a data set, a set of its own, or whatever a user's function loads."""

import importlib
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from hetperm import data
from hetperm.client import Client
from hetperm.config import Config


@dataclass(frozen=True)
class Shard:
    """A client with its data, and the number of classes that its labels may have."""

    client: Client
    num_classes: int


def load(source: str | None, config: Config, key: int | None) -> Shard:
    """The shard of a node.

    Args:
        source: ``module:function``, a function without arguments that returns a `Client`, or (client, number of
            classes); the name of a data set, all of which is this node's (``npz:PATH``); None: what the configuration
            deals to client ``key``.
        config: of the run; the data set, the partition and the seed are read of it.
        key: the number of the client.
    """
    if source is None:
        if key is None:
            raise ValueError("which data are this node's? give --data, or --client: its share of the run's data set")
        problem = _problem(config, config.dataset, config.num_clients, config.partition, config.samples_per_client)
        if not 0 <= key < len(problem.clients):
            raise ValueError(f"client {key} is not one of the {len(problem.clients)} of this run; they count from 0")
        # The group is for reports of simulations only.
        return Shard(replace(problem.clients[key], group=None), problem.num_classes)
    head, _, tail = source.partition(":")
    if head in data.DATASETS:
        problem = _problem(config, source, 1, "iid", samples=None)  # all of it
        return Shard(replace(problem.clients[0], group=None, key=key), problem.num_classes)
    if not tail:
        raise ValueError(f"--data is {source!r}; give a data set ({', '.join(data.DATASETS)}) or module:function")
    return _of_function(head, tail, key)


def _problem(config: Config, name: str, clients: int, partition: str, samples: int | None) -> data.Problem:
    return data.load(
        name,
        num_clients=clients,
        partition=partition,
        samples_per_client=samples,
        validation_share=config.validation_share,
        seed=config.seed,
        data_dir=config.data_dir,
        download=config.download,
        image_size=config.image_size,
    )


def _of_function(module: str, name: str, key: int | None) -> Shard:
    sys.path.insert(0, os.getcwd())  # a user's file is where the command is given
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--data {module}:{name} cannot be loaded ({error}); is the file in this folder?") from error
    finally:
        sys.path.pop(0)
    found: Any = function()
    client, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(client, Client):
        raise ValueError(f"{module}:{name} returned a {type(client).__name__}; it must return a hetperm.Client")
    y = client.train[1]
    if y.is_floating_point() or y.dim() != 1:
        raise ValueError(f"{module}:{name}: labels must be classes, whole numbers from 0; they are {y.dtype}")
    if count is None:
        count = int(y.max()) + 1
    return Shard(replace(client, key=client.key if key is None else key), int(count))
