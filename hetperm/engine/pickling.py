"""Pickles for another process, with tensors as plain bytes; torch itself would make a shared file for each."""

import pickle
from typing import Any

import torch
from torch import Tensor


class TensorPickler(pickle.Pickler):
    """Writes tensors as raw bytes into the pickle or, with a buffer callback, beside it. `pickle.load` reads them."""

    def reducer_override(self, value: Any) -> Any:
        """The recipe to rebuild a tensor; everything else is left to pickle."""
        return reduced(value)


def reduced(value: Any) -> Any:
    """What a pickle holds of a tensor: how to rebuild it from raw bytes; NotImplemented for all else."""
    # Only plain tensors: a Parameter must stay one, and the plain tensor inside it comes through here later.
    if type(value) is not Tensor or value.is_meta:
        return NotImplemented
    value = value.detach().cpu()
    row = value.contiguous().reshape(-1)
    raw = row.as_strided(row.shape, (1,)).view(torch.uint8).numpy()  # a single number may have any stride
    return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)
