"""Checks of what a node sends back: names, shapes and types as the update returns them, and finite numbers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetperm.device.bench import Workbench
from hetperm.device.gradients import FullGradient, MeanLoss, Report, ReportGradient, StepLosses
from hetperm.device.packet import all_finite
from hetperm.device.rival_updates import Envelope, Mixture, Proximal
from hetperm.device.updates import Update
from hetperm.params import Params

ONE = torch.empty((), dtype=torch.float64)


def fault(update: Update, params: Params, bench: Workbench, value: Any) -> str | None:
    """What is wrong with the answer of a host to an update, or None.

    Args:
        params: the model that it was handed.
        bench: of the width of that model.
        value: the answer.
    """
    # Templates: tensors without content, of the shapes and types that the answer must have.
    model = {name: torch.empty_like(p, device="meta") for name, p in zip(bench.names, bench.slots, strict=True)}
    size = sum(x.numel() for x in model.values())
    kind = next(iter(model.values())).dtype
    match update:
        case Envelope() | Proximal():
            wanted: Any = (model, model)
        case Mixture():
            wanted = (model, model, {"mix": ONE})
        case FullGradient():
            wanted = torch.empty(size, dtype=kind, device="meta")
        case ReportGradient():
            sent = update.sketch or update.whole_size or size
            wanted = Report(torch.empty(sent, dtype=kind, device="meta"), 0.0)
        case MeanLoss():
            return _misfit(torch.empty((), dtype=kind, device="meta"), value)  # a loss may be infinite
        case StepLosses():
            shape = (update.candidates, len(update.etas))
            return _misfit(torch.empty(shape, dtype=torch.float64, device="meta"), value)  # the same
        case _:
            wanted = model
    return _misfit(wanted, value) or (None if all_finite(value) else "numbers that are not finite")


def _misfit(wanted: Any, value: Any, name: str = "") -> str | None:
    """How a value differs from its template; None if it does not."""
    of = f" of {name}" if name else ""
    if isinstance(wanted, Tensor):
        if not isinstance(value, Tensor):
            return f"a {type(value).__name__} where a tensor was due{of}"
        if value.shape != wanted.shape:
            return f"shape {tuple(value.shape)}{of} where {tuple(wanted.shape)} was due"
        return None if value.dtype == wanted.dtype else f"type {value.dtype}{of} where {wanted.dtype} was due"
    if isinstance(wanted, Report):
        if not isinstance(value, Report):
            return f"a {type(value).__name__} where a report was due"
        return _misfit(wanted.gradient, value.gradient, "the gradient")
    if isinstance(wanted, Mapping):
        if not isinstance(value, Mapping):
            return f"a {type(value).__name__} where a model was due"
        if list(value) != list(wanted):
            odd = next((key for key in [*value, *wanted] if key not in wanted or key not in value), "their order")
            return f"other names than the model's ({odd!r})"
        return next((wrong for key in wanted if (wrong := _misfit(wanted[key], value[key], key))), None)
    if not isinstance(value, tuple) or len(value) != len(wanted):
        return f"a {type(value).__name__} where {len(wanted)} models were due"
    return next((wrong for a, b in zip(wanted, value, strict=True) if (wrong := _misfit(a, b))), None)
