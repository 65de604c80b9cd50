"""The machine and the code that figures were taken with; no names of hosts, users or folders."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """The machine that the figures were taken on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The name of the processor, as well as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of this checkout, with a plus if files differ from it; None without git or outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        # Files that git does not track are left out: runs and notes are no code.
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changed else head


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()
