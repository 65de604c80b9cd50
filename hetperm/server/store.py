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
    """A place in a folder for models, each in a file without a name, which is gone with the last of its tensors.

    Args:
        folder: None is the system's temporary one.
    """

    def keep(params: Params) -> Params:
        sizes = [x.numel() * x.element_size() for x in params.values()]
        places = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(max(1, sum(places)))
            memory = mmap.mmap(file.fileno(), 0)
        kept, first = {}, 0
        for (name, x), place in zip(params.items(), places, strict=True):
            if x.numel():
                there = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=first)
                kept[name] = there.reshape(x.shape).copy_(x)
            else:
                kept[name] = x
            first += place
        return kept

    return keep
