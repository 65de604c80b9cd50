"""Values on their way to another process: tensors as plain bytes, where torch would share each of them by a file."""

import pickle
from typing import Any

import torch
from torch import Tensor


class TensorPickler(pickle.Pickler):
    """Writes tensors as they lie in memory, in the file or, with a buffer callback, beside it; `pickle.load` reads."""

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is put together again; everything else as pickle has it."""
        # A parameter must stay one: its own recipe holds a plain tensor, which comes by here.
        if type(value) is not Tensor:
            return NotImplemented
        value = value.detach().cpu()
        row = value.contiguous().reshape(-1)
        raw = row.as_strided(row.shape, (1,)).view(torch.uint8).numpy()  # one number may have any stride
        return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)
