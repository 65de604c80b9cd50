"""How much memory this process takes, as the operating system counts it. Imports no torch."""

import sys
from pathlib import Path

MB = 2**20


def status() -> dict[str, int]:
    """name -> bytes, of the lines of /proc/self/status that count memory; empty where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(text.split()[0]) * 1024 for name, text in (line.split(":", 1) for line in lines) if "kB" in text}


def peak_bytes() -> int:
    """The most memory that was resident at once so far.

    Example:
        >>> peak_bytes() > 10 * MB
        True
    """
    # getrusage also counts what the parent held before it loaded this program: it is asked only without /proc.
    counted = status()
    if "VmHWM" in counted:
        return counted["VmHWM"]
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
