"""The memory that is free on this machine, as far as the system tells, and how it is reused. Imports no torch."""

import ctypes
import os
from functools import cache
from pathlib import Path

GB = 2**30
CGROUP = Path("/sys/fs/cgroup")  # of a container: the limit of its own group
KEPT = 2**30  # bytes of freed memory that a process keeps for its next tensors
_TRIM, _MMAP = -1, -3  # names of glibc's mallopt (malloc.h)
_LARGEST = 2**25  # bytes of a block that glibc can keep


@cache
def keep_freed_memory() -> None:
    """Let this process reuse freed memory up to `KEPT` bytes, where its allocator is glibc's; else do nothing.

    Every step frees what the next one asks for. By default glibc gives much of it back to the system, which then clears
    it page by page: up to a tenth of the time of a round. Settings of the user's own (``MALLOC_...``) are left alone.
    """
    if any([name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ]):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return
    mallopt(_TRIM, KEPT)
    mallopt(_MMAP, _LARGEST)


def available_bytes() -> int | None:
    """Bytes that processes started now could use; None if the system does not tell.

    Example:
        >>> (available_bytes() or 2**30) > 2**20
        True
    """
    limits = [limit for limit in (_free(), _left_in_group(), _left_to_process()) if limit is not None]
    return min(limits, default=None)


def _free() -> int | None:
    """Memory that the system would give without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    table = dict(line.split(":", 1) for line in lines)
    return int(table["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in table else None


def _left_in_group() -> int | None:
    """What the limit of the control group leaves, without files that the system can drop."""
    try:
        most = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        table = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) - used + int(table.get("file", 0))


def _left_to_process() -> int | None:
    """What the limits of this process leave (`ulimit -v`, `ulimit -d`); None if it has none."""
    try:
        import resource

        lines = Path("/proc/self/status").read_text().splitlines()
    except (ImportError, OSError):
        return None
    table = dict(line.split(":", 1) for line in lines)
    left = []
    for limit, counted in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            left.append(max(0, most - int(table[counted].split()[0]) * 1024))
    return min(left, default=None)
