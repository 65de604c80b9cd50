"""Storage of models between visits: in memory, or in mapped files that the system may write to disk."""

import mmap
import tempfile
from pathlib import Path

import torch

from hetperm.params import Keep, Params

ALIGNED = 64  # bytes; the last bit of a matrix product depends on the alignment of its memory


def in_memory(params: Params) -> Params:
    """Return the model itself: it stays where it is."""
    return params


def on_disk(folder: Path | None) -> Keep:
    """A function that moves a model to a mapped file without a name. The file goes when its last tensor does.

    Args:
        folder: where the files are; None means the system's temporary folder.
    """

    def keep(params: Params) -> Params:
        sizes = [x.numel() * x.element_size() for x in params.values()]
        padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        # The mapping outlives the closed file. The file has no name, so even a killed run leaves nothing behind.
        with tempfile.TemporaryFile(dir=folder) as file:
            # A file of no bytes cannot be mapped.
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
