"""Crash a run at every step that changes a file, resume it, and compare the folder with that of a run left alone.

    python tests/crash_points.py                 every step of a run with two rivals (minutes)
    python tests/crash_points.py --some 10       about ten of them, of every kind
    python tests/crash_points.py --slice 2/6     the second of six parts
    python tests/crash_points.py --seeds         a run with several seeds
    python tests/crash_points.py --twice         the resumed run crashes too, at another step

A step is: a folder made, a file opened, half of a write, a file or folder synced, a file renamed. The process is ended
there by SIGKILL, so that nothing of its own can clean up.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tiny_run import contents, tiny, without_what_others_test

from hetperm.runs import experiment, files, output
from hetperm.runs.result import Result

Step = tuple[str, str]  # (what is done, the name of the file)
WRITING = os.O_WRONLY | os.O_RDWR


class Crash:
    """Counts the steps that change files in a folder, and ends the process at one of them.

    Args:
        folder: only files in it count.
        at: the number of the step; None for none.
    """

    def __init__(self, folder: Path, at: int | None):
        self.folder, self.at = str(folder), at
        self.steps: list[Step] = []
        self._paths: dict[int, str] = {}  # of the files that are open

    def install(self) -> None:
        """Take the place of the functions of os that change files."""
        self._open, self._fdopen = os.open, os.fdopen
        self._mkdir, self._fsync, self._replace = os.mkdir, os.fsync, os.replace
        os.open, os.fdopen = self.open, self.fdopen
        os.mkdir, os.fsync, os.replace = self.mkdir, self.fsync, self.replace

    def reached(self, kind: str, path: object) -> bool:
        """Count a step; whether it is the one to end at."""
        if not str(path).startswith(self.folder):
            return False
        name = Path(str(path)).name
        if name.startswith("."):
            name = name[1:].rpartition(".")[0].rpartition(".")[0]  # as it will be called when it is complete
        self.steps.append((kind, name))
        return len(self.steps) - 1 == self.at

    def end_at(self, kind: str, path: object) -> None:
        """Count a step, and end the process if it is the one."""
        if self.reached(kind, path):
            os.kill(os.getpid(), signal.SIGKILL)

    def mkdir(self, path, *args, **options):
        self.end_at("mkdir", path)
        return self._mkdir(path, *args, **options)

    def open(self, path, flags, *args, **options):
        if flags & WRITING:
            self.end_at("open", path)
        handle = self._open(path, flags, *args, **options)
        self._paths[handle] = str(path)
        return handle

    def fsync(self, handle):
        self.end_at("fsync", self._paths.get(handle, ""))
        return self._fsync(handle)

    def replace(self, fresh, path):
        self.end_at("rename", path)
        return self._replace(fresh, path)

    def fdopen(self, handle, *args, **options):
        file = self._fdopen(handle, *args, **options)
        write, path, left = file.write, self._paths.get(handle, ""), [2]

        def half(content):
            left[0] -= 1  # a checkpoint has a write for every tensor, and one of them is like the other
            if left[0] >= 0 and self.reached("write", path):
                write(bytes(content)[: len(content) // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return write(content)

        file.write = half
        return file


def draw_quickly(result: Result) -> None:
    """Write a picture as a run does, without drawing it."""
    files.write(result.folder / "accuracy.png", b"a picture")


def one_run(out: Path, *, resume: bool) -> None:
    """Run the tiny run."""
    experiment.run(tiny(out=out, resume=resume))


def several_seeds(out: Path, *, resume: bool) -> None:
    """Run it with two seeds, and with less of everything."""
    experiment.sweep(tiny(out=out, resume=resume, seeds=(0, 1), epochs=1, baselines=("local",), num_clients=5))


Job = Callable[..., None]


def in_child(job: Job, out: Path, *, resume: bool = False, at: int | None = None) -> tuple[int, list[Step]]:
    """Do a job in a process of its own; return the signal that ended it (0 for none) and the steps it took."""
    log = out.with_suffix(".steps")
    pid = os.fork()
    if not pid:
        status = 1
        try:
            crash = Crash(out, at)
            crash.install()
            job(out, resume=resume)
            log.write_text(json.dumps(crash.steps))
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"the run in {out} failed: see its message above")
    return os.WTERMSIG(status), [tuple(step) for step in json.loads(log.read_text())] if status == 0 else []


def differences(folder: Path, whole: Path) -> list[str]:
    """The files that only one of two folders has, or that differ."""
    ours, theirs = contents(folder), contents(whole)
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


def crash_and_resume(job: Job, folder: Path, whole: Path, points: Sequence[int], *, twice: bool) -> dict[int, list]:
    """Number of the step -> the files in which the resumed run differs from one that was left alone."""
    result = {}
    for k in points:
        out = folder / f"run-{k}"
        ended, _ = in_child(job, out, at=k)
        assert ended == signal.SIGKILL, f"the run did not reach step {k}"
        if twice:
            in_child(job, out, resume=True, at=k * 7 % 23)
        in_child(job, out, resume=True)
        result[k] = differences(out, whole)
    return result


def prepared(job: Job, folder: Path) -> tuple[Path, list[Step]]:
    """The folder of a run that was left alone, and its steps."""
    torch.set_num_threads(1)  # threads do not survive a fork
    job(folder / "first", resume=False)  # here, so that what is computed once is computed for all children
    ended, steps = in_child(job, folder / "whole")
    assert not ended and steps
    return folder / "whole", steps


def one_of_each(steps: Sequence[Step], count: int) -> list[int]:
    """The numbers of about ``count`` steps, all kinds and many files among them, spread over the run."""
    kinds = list(dict.fromkeys(kind for kind, _ in steps))
    chosen = []
    for k, kind in enumerate(kinds):
        of_kind = [number for number, step in enumerate(steps) if step[0] == kind]
        each = max(1, count // len(kinds))
        shift = (k + 0.5) / len(kinds)  # so that kinds are not all crashed at the same moments
        chosen += [of_kind[int((i + shift) / each * len(of_kind))] for i in range(each)]
    return sorted(set(chosen))


def part(text: str) -> slice:
    """What ``--slice 2/6`` takes of all steps: every sixth, from the second on."""
    try:
        number, parts = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 2/6") from None
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"there is no part {number} of {parts}")
    return slice(number - 1, None, parts)


def main() -> int:
    """Print a line per kind of step and file; return 1 if a resumed run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--some", type=int, help="crash at about so many steps, of every kind; default: all")
    parser.add_argument("--slice", type=part, default=slice(None), help="one part of them, as 2/6; default: all")
    parser.add_argument("--seeds", action="store_true", help="a run with several seeds")
    parser.add_argument("--twice", action="store_true", help="the resumed run crashes too")
    flags = parser.parse_args()
    job = several_seeds if flags.seeds else one_run
    with tempfile.TemporaryDirectory() as name, without_what_others_test():
        output.draw = draw_quickly
        whole, steps = prepared(job, Path(name))
        points = one_of_each(steps, flags.some) if flags.some else range(len(steps))
        points = points[flags.slice]
        result = crash_and_resume(job, Path(name), whole, points, twice=flags.twice)
    wrong = Counter(steps[k] for k, different in result.items() if different)
    for (kind, file), count in sorted(Counter(steps[k] for k in points).items()):
        print(f"{kind:8} {file:24} {count:4} crashes, {wrong[kind, file]} of them with another end")
    print(f"{len(points)} crashes at {len(steps)} steps: {len(points) - wrong.total()} ended byte-identical")
    return int(any(result.values()))


if __name__ == "__main__":
    sys.exit(main())
