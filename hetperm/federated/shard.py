"""The data of a node: its share of a data set, a set of its own, or whatever a user's function loads."""

import importlib
import os
import sys
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hetperm import data
from hetperm.client import Client
from hetperm.config import Config
from hetperm.data import Problem, image_size_of
from hetperm.data.images import Preparation
from hetperm.device.bench import Loss
from hetperm.metrics import ACCURACY
from hetperm.runs.setting import problem_of
from hetperm.shards import first, known_labels, labels_of, read
from hetperm.texts import one_line, shown


@dataclass(frozen=True)
class Shard:
    """A client with its data, and what a model for them must be like.

    Attributes:
        num_classes: that labels may have.
        in_channels, image_size: as `hetperm.data.Problem` has them.
        loss: (outputs, labels) -> mean loss of a batch.
        metric: the name of what models are scored by, unless the run names another.
        preparation, class_names: as `hetperm.data.Problem` has them, for exported files.
        source: what it was loaded from (`load`).
    """

    client: Client
    num_classes: int
    in_channels: int
    image_size: int | tuple[int, ...] | None
    loss: Loss = F.cross_entropy
    metric: str = ACCURACY
    preparation: Preparation | None = None
    class_names: tuple[str, ...] = ()
    source: str | None = None


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
        problem = problem_of(config)
        if not 0 <= key < len(problem.clients):
            raise ValueError(f"client {key} is not one of the {len(problem.clients)} of this run; they count from 0")
        return of_problem(problem, key, key)
    head, _, tail = source.partition(":")
    if head in data.DATASETS:
        alone = {"num_clients": 1, "partition": "iid", "samples_per_client": None}  # all of it
        return replace(of_problem(problem_of(config.override(dataset=source, **alone)), 0, key), source=source)
    if not tail:
        raise ValueError(f"--data is {source!r}; give a data set ({', '.join(data.DATASETS)}) or module:function")
    return replace(_of_function(head, tail, key), source=source)


def of_problem(problem: Problem, i: int, key: int | None) -> Shard:
    """The shard of a node that holds the data of client i."""
    return Shard(
        # The group is for reports of simulations only.
        replace(problem.clients[i], group=None, key=key),
        problem.num_classes,
        problem.in_channels,
        problem.image_size,
        problem.loss or F.cross_entropy,
        problem.metric,
        problem.preparation,
        problem.class_names,
    )


def of_client(client: Client, num_classes: int | None = None) -> Shard:
    """The shard of a user's own client, whose samples are pictures, windows or vectors with classes.

    Args:
        num_classes: the classes that labels may have; None: up to the largest that occurs.
    """
    x, y = read(first(client.train, 1))
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError("a sample must be one tensor of measurements; models of several inputs have no name yet")
    if x.dim() < 2:
        raise ValueError(f"a sample must have a shape, such as (8,) or (1, 28, 28); inputs are {tuple(x.shape)}")
    if y.is_floating_point() or y.dim() != 1:
        shape = tuple(y.shape[1:]) or "one number"
        raise ValueError(f"labels must be classes, whole numbers from 0; each is {shape} of type {y.dtype}")
    if not (num_classes is None or (isinstance(num_classes, Integral) and num_classes > 0)):
        raise ValueError(f"the number of classes must be a whole number above 0, not {shown(num_classes)}")
    known = [known_labels(part) for part in (client.train, client.val, client.test) if part is not None]
    known = [labels for labels in known if labels is not None]
    if num_classes is None:
        # Of a Dataset all samples are read here.
        num_classes = max(int(labels.max()) for labels in (labels_of(client.train), *known)) + 1
    for labels in known:
        if labels.min() < 0 or labels.max() >= num_classes:
            wrong = f"labels go from {int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"{wrong}; with {num_classes} classes they must be 0 to {num_classes - 1}")
    return Shard(client, int(num_classes), x.shape[1], image_size_of(x.shape))


def _of_function(module: str, name: str, key: int | None) -> Shard:
    where = f"--data {module}:{name}"
    sys.path.insert(0, os.getcwd())  # a user's file is where the command is given
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the file may raise anything
        raise ValueError(f"{where} cannot be loaded ({_told(error)}); is the file in this folder?") from error
    finally:
        sys.path.pop(0)
    try:
        found: Any = function()
        client, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(client, Client):
            raise ValueError(f"it returned a {type(found).__name__}; it must return a hetperm.Client")
        return of_client(replace(client, key=client.key if key is None else key), count)
    except Exception as error:  # and so may the function, and the Dataset that it returns
        raise ValueError(f"{where}: {_told(error)}") from error


def _told(error: Exception) -> str:
    text = one_line(str(error))
    return text if text and isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {text}"
