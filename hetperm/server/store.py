"""Where models wait between visits: in memory, or in files mapped into it, which the system may write out."""

import mmap
import tempfile
from pathlib import Path

import torch

from hetperm.params import Keep, Params

ALIGNED = 64  # bytes; products of matrices depend on the alignment of their memory in the last bit


def in_memory(params: Params) -> Params:
    """The model itself."""
    return params


def on_disk(folder: Path | None) -> Keep:
    """Keep models in a folder, each in a file without a name, which is gone with the last of its tensors.

    Args:
        folder: None is the system's temporary one.
    """

    def keep(params: Params) -> Params:
        sizes = [x.numel() * x.element_size() for x in params.values()]
        padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        # The mapping outlives the closed file, and the file, which has no name, goes with the mapping.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(max(1, sum(padded)))
            memory = mmap.mmap(file.fileno(), 0)
        kept, first = {}, 0
        for (name, x), size in zip(params.items(), padded, strict=True):
            if x.numel():
                mapped = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=first)
                kept[name] = mapped.reshape(x.shape).copy_(x)
            else:
                kept[name] = x
            first += size
        return kept

    return keep
