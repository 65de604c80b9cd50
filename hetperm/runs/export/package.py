"""What is exported: a client's model with its preprocessing and its classes, and the data it is verified on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetperm.client import Client
from hetperm.data.images import Preparation
from hetperm.device.bench import ABSENT, masked
from hetperm.metrics import Metric
from hetperm.runs.export.options import Options
from hetperm.shards import rows_of, size_of
from hetperm.texts import shown


@dataclass(frozen=True, eq=False)
class Subject:
    """A client's model, and what is needed to export and verify it.

    Attributes:
        client: its position in the run.
        module: its model, in evaluation mode on the CPU.
        model: the manifest of the model: width, tier, input, accuracy and more.
        x: (n, ...) inputs of the model that it is verified on; `y`: their labels.
        part: where they come from: "val", or "train" if the client has no validation data.
        metric: what outputs are scored by.
        preparation: how stored values became inputs; None if they are inputs as they are.
        classes: (num_classes,) bool, the classes that the client predicts; None: all.
        class_names: the name of every class; empty if they have none.
        source: the client that the samples are of, if they are not its own.
    """

    client: int
    module: nn.Module
    model: Mapping[str, Any]
    x: Tensor
    y: Tensor
    part: str
    metric: Metric
    preparation: Preparation | None = None
    classes: Tensor | None = None
    class_names: tuple[str, ...] = ()
    source: int | None = None

    @property
    def stored(self) -> Tensor:
        """(n, ...) the same samples as a device has them: what the exported file takes."""
        if self.preparation is not None:
            return self.preparation.undone(self.x)
        return self.x.float() if self.x.is_floating_point() else self.x

    def outputs(self) -> Tensor:
        """(n, ...) the outputs of the client's model, as it was trained: what a file must agree with."""
        weight = next(self.module.parameters(), self.x)
        x = self.x.to(weight.dtype) if self.x.is_floating_point() else self.x
        with torch.inference_mode():
            return masked(torch.cat([self.module(some) for some in x.split(64)]), self.classes).float()

    def score(self, outputs: Tensor) -> float:
        """What the run's metric says of these outputs."""
        return self.metric.of_client(float(self.metric(outputs, self.y)))


class Packaged(nn.Module):
    """A client's model that takes stored values, normalises them, and never predicts a class the client lacks.

    Args:
        module: the model, in the precision it is exported in.
        dtype: that precision; outputs are float32 all the same.
    """

    def __init__(self, module: nn.Module, subject: Subject, dtype: torch.dtype):
        super().__init__()
        self.module, self.dtype = module, dtype
        self.floating = subject.x.is_floating_point()
        self.prepared, self.masks = subject.preparation is not None, subject.classes is not None
        if self.prepared:
            peak, mean, std = (
                torch.as_tensor(value, dtype=torch.float64)
                for value in (subject.preparation.peak, subject.preparation.mean, subject.preparation.std)
            )
            self.register_buffer("offset", (mean * peak).float())
            self.register_buffer("factor", (1 / (std * peak)).float())
        if self.masks:
            self.register_buffer("absent", ~subject.classes.cpu())

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, num_classes), or what else the model returns, in float32, from stored values (n, ...)."""
        if self.prepared:
            x = (x - self.offset) * self.factor
        y = self.module(x.to(self.dtype) if self.floating else x).float()
        return y.masked_fill(self.absent, ABSENT) if self.masks else y


@dataclass(frozen=True, eq=False)
class Data:
    """The data of a run that its clients' models are verified on.

    Attributes:
        clients: (N,) those that the run was trained with; at a node, its number -> the one that is there.
        metric, preparation, class_names: see `Subject`.
        num_classes: outputs of the model, if clients mask some.
    """

    clients: Sequence[Client] | Mapping[int, Client]
    metric: Metric
    num_classes: int
    preparation: Preparation | None = None
    class_names: tuple[str, ...] = ()


def subject_of(module: nn.Module, model: Mapping[str, Any], data: Data, options: Options) -> Subject:
    """A client's model with what is needed to export it.

    Args:
        module: the model, in evaluation mode.
        model: its manifest.
    """
    source = source_of(model, len(data.clients))
    x, y, part = samples_of(data.clients[source], options.samples)
    if list(x.shape[1:]) != model["input"]:
        raise ValueError(
            f"an input of client {source} has shape {list(x.shape[1:])} and its model was trained on {model['input']}; "
            "bring back the data of the run"
        )
    return Subject(
        client=model["client"],
        module=module,
        model=model,
        x=x,
        y=y,
        part=part,
        metric=data.metric,
        preparation=data.preparation,
        classes=mask_of(model, data.num_classes),
        class_names=data.class_names,
        source=None if source == model["client"] else source,
    )


def source_of(model: Mapping[str, Any], trained: int) -> int:
    """The client whose data a model is verified on: its own or, as a newcomer's are in no file, its closest partner's.

    Args:
        model: the manifest of the model.
        trained: the number of clients that the run was trained with, whose data can be had.

    Example:
        >>> source_of({"client": 2}, 3), source_of({"client": 3, "joined": True, "alpha": [0.1, 0.5, 0.2, 0.2]}, 3)
        (2, 1)
    """
    if not model.get("joined"):
        return model["client"]
    alpha = model.get("alpha")
    if not isinstance(alpha, list) or len(alpha) <= trained or not all(isinstance(a, int | float) for a in alpha):
        raise _damaged(model, "alpha")
    return max(range(trained), key=alpha.__getitem__)


def mask_of(model: Mapping[str, Any], num_classes: int) -> Tensor | None:
    """(num_classes,) bool, the classes that a model predicts, as its manifest says; None: all."""
    classes = model.get("classes")
    if classes is None:
        return None
    if not isinstance(classes, list) or not all([type(k) is int and 0 <= k < num_classes for k in classes]):
        raise _damaged(model, "classes")
    mask = torch.zeros(num_classes, dtype=torch.bool)
    mask[classes] = True
    return mask


def _damaged(model: Mapping[str, Any], key: str) -> ValueError:
    what = shown(model.get(key))
    return ValueError(f"{key} of client {model['client']} is {what}, which no run writes; copy its manifest again")


def samples_of(client: Client, most: int) -> tuple[Tensor, Tensor, str]:
    """At most so many samples (x, y) of a client, evenly spread, and whether they are its "val" or "train" data."""
    part = "train" if client.val is None else "val"
    shard = client.data(part)
    n = size_of(shard)
    x, y = rows_of(shard, torch.linspace(0, n - 1, min(n, most)).round().long())
    if not isinstance(x, Tensor):
        raise ValueError(
            f"the model of this client takes {len(x)} inputs and a file takes one; export a module that wraps it and "
            "takes one tensor"
        )
    return x.cpu(), y.cpu(), part
