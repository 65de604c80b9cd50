"""Evaluation of a model on one client's data, and the figures of a run over all clients."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hetperm.device.bench import outputs_of
from hetperm.device.layout import channels_last, prefers_channels_last
from hetperm.runs.loss_checks import tried
from hetperm.shards import Inputs, Shard, batches_of, mapped, size_of
from hetperm.texts import shown

SAMPLES = 512  # run at once
IMAGES = 64  # run at once, with channels last


def summarise(values: Sequence[float] | Tensor, n: Sequence[int] | Tensor, *, largest_is_worst: bool = False) -> dict:
    """The figures of a run: mean, mean weighted by n, standard deviation, worst client, mean of the worst tenth.

    Args:
        values: (N,) one figure per client.
        n: (N,) training samples of each client.
        largest_is_worst: True for losses.

    Example:
        >>> summarise([1.0, 0.5], n=[30, 10])
        {'mean': 0.75, 'weighted': 0.875, 'std': 0.25, 'worst': 0.5, 'bottom_decile': 0.5}
    """
    values, n = (torch.as_tensor(column, dtype=torch.float64).cpu() for column in (values, n))
    if len(values) == 0 or len(values) != len(n):
        raise ValueError(f"{len(values)} values and {len(n)} sample counts: give one of each for every client")
    worst_first = values.sort(descending=largest_is_worst).values
    figures = {
        "mean": values.mean(),
        "weighted": (values * n).sum() / n.sum(),
        "std": values.std(correction=0),
        "worst": worst_first[0],
        # Rounded up, so that the worst tenth of fewer than ten clients is one client.
        "bottom_decile": worst_first[: -(-len(values) // 10)].mean(),
    }
    return {name: figure.item() for name, figure in figures.items()}


def evaluate(
    model: nn.Module | Callable[[Tensor], Tensor],
    pair: Shard | None,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    metric: Callable[[Tensor, Tensor], Tensor],
    batch_size: int | None = None,
) -> tuple[float, float]:
    """(loss, metric) of a model on one client's data, both averaged over samples.

    A module is put into evaluation mode and back again. Data are moved to its device and precision.

    Args:
        pair: inputs (n, ...) and labels (n, ...); views and stored samples are read batch by batch.
        loss: (outputs, labels) -> mean over the batch.
        metric: (outputs, labels) -> mean over the batch.
        batch_size: samples run at once; unless given, as many as are fast.
    """
    if pair is None or size_of(pair) == 0:
        raise ValueError("there is no data to evaluate on; this client has no val or test set")
    totals, count = [0.0, 0.0], 0
    # Each part has its own flag: a module in training mode may hold parts that are frozen in evaluation mode.
    flags = [(part, part.training) for part in model.modules()] if isinstance(model, nn.Module) else []
    # Laid out as in training; such images are fastest while a batch fits into the cache of a core.
    last = isinstance(model, nn.Module) and prefers_channels_last(model)
    batch_size = batch_size or (IMAGES if last else SAMPLES)
    home = next(model.parameters(), None) if isinstance(model, nn.Module) else None  # gives device and precision
    try:
        for part, _ in flags:
            part.training = False
        with torch.inference_mode():
            for x, y in batches_of(pair, batch_size):
                x, y = _at_home(x, home), _at_home(y, home)
                outputs = outputs_of(model, channels_last(x) if last else x)
                for k, (name, figure) in enumerate((("loss", loss), ("metric", metric))):
                    # Weighted by size, because the last batch may be smaller.
                    # The loss gets a copy, because it may work in place and the metric comes after it.
                    own = outputs.clone() if name == "loss" else outputs
                    totals[k] += _one_number(figure, own, y, name) * len(y)
                count += len(y)
    finally:
        for part, flag in flags:
            part.training = flag
    return totals[0] / count, totals[1] / count


def _one_number(figure: Callable[[Tensor, Tensor], Any], outputs: Tensor, y: Tensor, name: str) -> float:
    what = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(y.shape)}"
    value = tried(name, figure, (outputs, y), what)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"the {name} of a batch has shape {tuple(value.shape)} and must be one number; take the mean over samples"
        )
    if not isinstance(value, Tensor | Real):
        raise ValueError(f"the {name} of a batch is {shown(value)}; it must be one number")
    return float(value)


def _at_home(inputs: Inputs, home: Tensor | None) -> Inputs:
    """The inputs on the device of the model, floats in its precision; whole numbers keep their type."""
    if home is None:
        return inputs
    return mapped(lambda x: x.to(home.device, home.dtype if x.is_floating_point() else None), inputs)
