"""Memory limits that the operating system enforces: RLIMIT_DATA, or a cgroup where one can be made.

The limit of a tier is baseline + budget + slack. The baseline is what the process holds when its work begins: Python,
torch, and what was handed to it. The slack is for memory other than tensors (`slack`). Imports no torch.
"""

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from hetperm.runs.memory import MB, status

LARGEST_SLACK = 8 * MB  # a limit with more slack than that says nothing about small tiers
RESERVE = MB // 2  # how much more one run may take than another
KINDS = Literal["auto", "cgroup", "rlimit", "none"]


class Unusable(OSError):
    """A kind of limit that this system does not have; the message says why."""


class Limit(Protocol):
    """A kind of limit. The limited process enters it; its parent leaves it once that process has ended."""

    name: str

    def note(self) -> None:
        """Take what this process holds now as the baseline; kernels compiled until `enter` are added to it."""

    def enter(self, allowed: int | None) -> None:
        """Limit this process to ``allowed`` more bytes from now on; None: no limit."""

    def peak(self) -> int:
        """The most bytes that were counted against the limit at once since it was entered."""

    def leave(self, pid: int) -> None:
        """Remove what the limit of an ended process has left behind."""


class DataLimit:
    """RLIMIT_DATA of Linux: a process may reserve a certain amount of private memory, and is refused more.

    It counts what is reserved, used or not. Linux keeps no peak of it, so the peak of the address space (VmPeak) is
    read instead, which grows by the same amount or slightly more.
    """

    name = "RLIMIT_DATA"
    _noted: tuple[dict[str, int], int] | None = None

    def note(self) -> None:
        self._noted = status(), kernels()

    def enter(self, allowed: int | None) -> None:
        import resource

        if self._noted is None:
            self.note()
        before, compiled = self._noted
        more = kernels() - compiled  # kernels of the rehearsal: they stay, and belong to the baseline
        self._before = before["VmSize"] + more
        if allowed is not None:
            # A limit that the process already has stays in force: a process may not raise its hard limit.
            there = [bound for bound in resource.getrlimit(resource.RLIMIT_DATA) if bound != resource.RLIM_INFINITY]
            limit = min([before["VmData"] + more + allowed, *there])
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def peak(self) -> int:
        return status()["VmPeak"] - self._before

    def leave(self, pid: int) -> None:
        """Do nothing: a limit of this kind ends with its process."""


@dataclass(frozen=True)
class Cgroup:
    """A control group (cgroups v2) for each process, which is killed if it uses more than the group allows.

    What a process held before it entered stays charged to the group it came from, so the baseline does not count.

    Attributes:
        parent: the group in which new ones are made.
    """

    parent: Path
    name = "cgroup"

    def note(self) -> None:
        """Do nothing: only memory in use counts here, and kernels use little of what they reserve."""

    def enter(self, allowed: int | None) -> None:
        group = self._group(os.getpid())
        group.mkdir()
        if allowed is not None:
            (group / "memory.max").write_text(str(allowed))
            # Without this the kernel would swap instead of stopping the process.
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
        # Last, so that the process is never in the group before the limit holds.
        (group / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        return int((self._group(os.getpid()) / "memory.peak").read_text())

    def leave(self, pid: int) -> None:
        if self._group(pid).exists():
            self._group(pid).rmdir()

    def _group(self, pid: int) -> Path:
        return self.parent / f"hetperm-{pid}"


def kernels() -> int:
    """Bytes that this process has reserved for code compiled at run time: memory that is writable and executable."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights = line.split()[:2]
        if rights == "rwxp":
            first, last = (int(end, 16) for end in addresses.split("-"))
            total += last - first
    return total


# Which one


def choose(kind: KINDS) -> tuple[Limit | None, str]:
    """A limit that this system has, and a sentence about it; None if there is none, or none was asked for.

    "auto" is a cgroup if one can be made, otherwise RLIMIT_DATA. A kind that is asked for by name must be available.
    """
    if kind == "none":
        return None, "memory is not limited, as asked for"
    reason = ""
    if kind in ("auto", "cgroup"):
        try:
            return Cgroup(cgroup_parent()), "memory is limited by a cgroup for each process"
        except Unusable as error:
            if kind == "cgroup":
                raise Unusable(f"cgroups cannot be used: {error}; use --enforce rlimit, or auto") from error
            reason = f"cgroups cannot be used ({error}): "
    if sys.platform.startswith("linux") and {"VmData", "VmPeak"} <= status().keys():
        return DataLimit(), f"{reason}memory is limited by RLIMIT_DATA of each process"
    why = f"{sys.platform} does not enforce RLIMIT_DATA"
    if kind == "rlimit":
        raise Unusable(f"{why}; use --enforce none to measure without limits, or run this on Linux")
    return None, f"{reason}{why}: memory is measured and not limited"


def cgroup_parent(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Path:
    """The group nearest to this process's own in which groups with a limit on memory can be made.

    Args:
        root: where cgroups v2 are mounted; `own`: the file that names the group of this process.
    """
    if not (root / "cgroup.controllers").is_file():
        raise Unusable(f"cgroups v2 are not mounted at {root}")
    mine = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    if not mine:
        raise Unusable("this process is in no cgroup v2")
    group = root / mine[0]
    above = [parent for parent in (group, *group.parents) if parent.is_relative_to(root)]
    # Only a group that passes the memory controller on to its children can have children with a limit.
    limiting = [parent for parent in above if _limits_memory(parent)]
    if not limiting:
        raise Unusable(f"no group above {group} limits memory")
    writable = [parent for parent in limiting if _is_writable(parent)]
    if not writable:
        raise Unusable(f"no permission to make a group in {limiting[0]}")
    return writable[0]


def _is_writable(group: Path) -> bool:
    return os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK)


def _limits_memory(group: Path) -> bool:
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


# How much


def slack(overheads: Iterable[int]) -> int:
    """Bytes that a limit allows beyond the budget: the most that work took besides its tensors, and a reserve.

    Rounded up to a quarter of a MB. Besides tensors there are the kernels that torch compiles for new shapes, the graph
    of the backward pass, and what the allocator loses to rounding.

    Example:
        >>> slack([2 * MB, 2_300_000]) / MB
        2.75
    """
    needed = max([0, *overheads]) + RESERVE
    return math.ceil(needed / (MB // 4)) * (MB // 4)


def allowed_bytes(budget_mb: float, slack: int, *, baseline: int = 0, device_mb: float | None = None) -> int:
    """Bytes that a process may take on top of its baseline: budget and slack, or what is left of the whole device.

    Args:
        baseline: bytes that Python and torch take; `device_mb`: memory of the whole device; None: no such limit.

    Example:
        >>> allowed_bytes(4, 2 * MB) / MB, allowed_bytes(4, 2 * MB, baseline=300 * MB, device_mb=305) / MB
        (6.0, 5.0)
    """
    own = int(budget_mb * MB) + slack
    if device_mb is None:
        return own
    left = int(device_mb * MB) - baseline
    if left <= 0:
        raise ValueError(
            f"a limit of {device_mb:g} MB is below what Python and torch take by themselves here, {baseline / MB:.0f} "
            f"MB; raise --device-mb, or leave it out: budgets are then counted on top of that"
        )
    return min(own, left)
