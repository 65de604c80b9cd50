"""Recurrent layers on the meta device: two steps say as much about axes and shapes as two hundred, and cost less."""

from collections.abc import Callable
from typing import Any

import torch
from torch import _VF, Tensor
from torch.overrides import TorchFunctionMode

_STEPS = 2  # the first step begins with the given state, the second with what the first returned

# Layers that unroll; the last argument says whether the batch comes first.
RECURRENT: frozenset[Callable] = frozenset({_VF.lstm, _VF.gru, _VF.rnn_tanh, _VF.rnn_relu})


class TwoSteps(TorchFunctionMode):
    """Runs recurrent layers on the first two steps of sequences without values, and returns as many as were given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is _VF._pad_packed_sequence and not kwargs:
            return _pad_packed(*args)
        if func not in RECURRENT or kwargs or not _is_padded_batch(args):
            return func(*args, **(kwargs or {}))
        x, batch_first = args[0], args[-1]
        time = 1 if batch_first else 0
        steps = x.shape[time]
        if not x.is_meta or steps <= _STEPS:
            return func(*args)
        out, *states = func(x.narrow(time, 0, _STEPS), *args[1:])
        every = torch.zeros(steps, dtype=torch.long, device="meta")  # no values, so any of the two steps will do
        return out.index_select(time, every), *states


def _pad_packed(data: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
    """What torch's function computes, from operations that say which features are which.

    Args:
        data: (steps of all sequences, features), step by step; `sizes`: (steps,) sequences that have each step.
    """
    counts = sizes.tolist()
    rows, start = [], 0
    for count in counts + [0] * (total - len(counts)):
        rows += [start + i if i < count else len(data) for i in range(counts[0])]  # the row after the last is padding
        start += count
    padded = torch.cat([data, torch.full_like(data[:1], value)])[torch.tensor(rows)]
    padded = padded.unflatten(0, (-1, counts[0]))
    lengths = torch.tensor([sum(count > i for count in counts) for i in range(counts[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _is_padded_batch(args: tuple[Any, ...]) -> bool:
    """Whether a call is (sequences, state, ...) and not (packed words, their numbers, ...)."""
    return isinstance(args[0], Tensor) and isinstance(args[-1], bool) and args[0].dim() == 3
