"""Storage of models between visits: in memory, or in mapped files that the system may write to disk."""

import errno
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from pathlib import Path

import torch

from hetperm.params import Keep, Params

ALIGNED = 64  # bytes; the last bit of a matrix product depends on the alignment of its memory
_ZEROS = 2**20  # bytes written at once where the system cannot reserve room by itself
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # a file system that cannot reserve room


def in_memory(params: Params) -> Params:
    """Return the model itself: it stays where it is."""
    return params


def on_disk(folder: Path | None) -> Keep:
    """A function that moves a model to mapped files without a name. The files go when their last tensor does.

    Args:
        folder: where the files are; None means the system's temporary folder.
    """
    arena = Arena(folder)

    def keep(params: Params) -> Params:
        padded = [-(-x.numel() * x.element_size() // ALIGNED) * ALIGNED for x in params.values()]
        memory = arena.room(sum(padded))
        kept, first = {}, 0
        for (name, x), size in zip(params.items(), padded, strict=True):
            if x.numel():
                # The tensor holds `memory`, so its room is free again when the last tensor of the model is gone.
                mapped = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=first)
                kept[name] = mapped.reshape(x.shape).copy_(x)
            else:
                kept[name] = x
            first += size
        return kept

    return keep


class Arena:
    """Room for many models in few mapped files.

    Every mapping takes a file descriptor, of which a process has about a thousand. So a file holds many models, and
    each new file is half as large as all before it together: their number grows with the logarithm of the models.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._files: list[tuple[memoryview, int]] = []  # (a mapped file, its first byte that was never used)
        self._free: dict[int, list[memoryview]] = defaultdict(list)  # size -> rooms whose model is gone

    def room(self, size: int) -> memoryview:
        """Memory of ``size`` bytes, which is used again once nothing refers to the returned view."""
        free = self._free[size]
        whole = free.pop() if free else self._unused(size)
        view = whole[:]  # another view of the same bytes, whose end tells that the model is gone
        weakref.finalize(view, free.append, whole).atexit = False
        return view

    def _unused(self, size: int) -> memoryview:
        """The next bytes that were never used, in the first file that has so many left, or in a new one."""
        for k, (memory, first) in enumerate(self._files):
            if first + size <= len(memory):
                self._files[k] = (memory, first + size)
                return memory[first : first + size]
        total = sum(len(memory) for memory, _ in self._files)
        memory = memoryview(_mapped_file(self._folder, max(size, total // 2 // ALIGNED * ALIGNED)))
        self._files.append((memory, size))
        return memory[:size]


def _mapped_file(folder: Path | None, size: int) -> mmap.mmap:
    """A mapped file without a name, so that even a killed run leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), max(1, size))  # a file of no bytes cannot be mapped
            return mmap.mmap(file.fileno(), 0)
    except OSError as error:
        raise OSError(
            f"no room for models that wait in {folder or tempfile.gettempdir()} ({error.strerror}); "
            "make room there, or let them wait in memory (idle_models = 'memory')"
        ) from error


def _reserve(file: int, size: int) -> None:
    """Give a file room on the disk. Without it a full disk shows only when memory is written, and kills the process."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    while size > 0:
        size -= os.write(file, bytes(min(size, _ZEROS)))
