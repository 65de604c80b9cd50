"""The memory of this process, as the operating system counts it. Imports no torch."""

import math
import sys
from pathlib import Path

MB = 2**20


def status() -> dict[str, int]:
    """name -> bytes, from the lines of /proc/self/status about memory; empty on systems without that file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(text.split()[0]) * 1024 for name, text in (line.split(":", 1) for line in lines) if "kB" in text}


def peak_bytes() -> float:
    """The largest resident memory of this process so far, in bytes; nan where the system does not tell.

    Example:
        >>> peak_bytes() > 10 * MB
        True
    """
    # getrusage also counts the memory of the parent before it started this program, so /proc is preferred.
    counted = status()
    if "VmHWM" in counted:
        return counted["VmHWM"]
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
