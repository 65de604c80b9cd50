"""Break the code in every way that tests/mutants.toml lists, and see that the tests notice.

    python tests/mutants.py                     all mutants (minutes)
    python tests/mutants.py noise-sign probe    those whose names begin like this
    python tests/mutants.py --jobs 4            four at a time
    python tests/mutants.py --list              the names, and what each of them breaks

A mutant is a sentence that says what it breaks, a file, a text in it and what takes its place, and the tests of which
one must fail. It is tried in a copy of the project. One that no test notices has SURVIVED. A text that no longer occurs
exactly once is an error, and so are tests that cannot be run, or that fail with nothing broken.
"""

import argparse
import compileall
import contextlib
import io
import multiprocessing
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.toml"
QUIETLY = ("-x", "-q", "-p", "no:cacheprovider")
# What takes longest to import, and is not of this project: workers are forked from a process that has it. No plugins of
# pytest, which it wants to import itself.
PRELOADED = ["pytest", "torch", "safetensors.torch"]


@dataclass(frozen=True)
class Mutant:
    """A way to break the code.

    Attributes:
        breaks: what is broken, as a sentence.
        file: the file, from the root of the project.
        old: a text that occurs in it once.
        new: what takes its place.
        tests: the tests of which one must fail, as pytest names them.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The text of the file, broken; an error if it no longer has the place to break, or has several."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}; correct {LIST.name}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "caught", "SURVIVED" or "ERROR", and by which test or why."""

    name: str
    word: str
    detail: str
    seconds: float


def read(path: Path = LIST) -> list[Mutant]:
    """The mutants of a list."""
    tables = tomllib.loads(path.read_text())
    return [Mutant(name, **{**table, "tests": tuple(table["tests"])}) for name, table in tables.items()]


def copy_project(folder: Path, root: Path = ROOT) -> None:
    """Copy what git tracks or would track, and compile it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.split("\0")
    for name in filter(None, names):
        if (root / name).is_file():  # it may have been removed since
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    # Known by the hash of its source, so that a broken file is compiled anew, however quickly it was changed.
    compileall.compile_dir(folder, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def tried(mutant: Mutant, project: Path) -> Verdict:
    """Break the project and run the tests of a mutant."""
    began = time.perf_counter()
    try:
        broken = mutant.applied((project / mutant.file).read_text())
    except (OSError, ValueError) as error:
        return Verdict(mutant.name, "ERROR", str(error), 0.0)
    status, failed = run_tests(mutant.tests, project, {mutant.file: broken})
    seconds = time.perf_counter() - began
    if status == 1:
        return Verdict(mutant.name, "caught", failed[0], seconds)
    if status == 0:
        return Verdict(mutant.name, "SURVIVED", mutant.breaks, seconds)
    return Verdict(mutant.name, "ERROR", f"its tests cannot be run (pytest ended with status {status})", seconds)


def passed(file: str, tests: Sequence[str], project: Path) -> Verdict:
    """Run tests of a file with nothing broken: a test that fails anyway catches nothing."""
    began = time.perf_counter()
    status, failed = run_tests(tests, project, {})
    detail = f"fails with nothing broken: {', '.join(failed) or f'pytest ended with status {status}'}"
    seconds = time.perf_counter() - began
    return Verdict(file, "ERROR", detail, seconds) if status else Verdict(file, "passed", "", seconds)


def run_tests(tests: Sequence[str], project: Path, broken: Mapping[str, str]) -> tuple[int, list[str]]:
    """The status of pytest in a copy of the project with some other files, and the tests that failed.

    They are run in this process, which must have imported nothing of the project before.
    """
    import pytest

    failed: list[str] = []

    class Watcher:
        def pytest_runtest_logreport(self, report):
            if report.failed:
                failed.append(report.nodeid)

    with tempfile.TemporaryDirectory() as name:
        copy = Path(shutil.copytree(project, Path(name) / "project"))
        for file, text in broken.items():
            (copy / file).write_text(text)
        sys.path.insert(0, str(copy))
        os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}  # for processes that tests start
        silence = io.StringIO()
        with contextlib.chdir(copy), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            status = pytest.main([*QUIETLY, *tests], plugins=[Watcher()])
    return int(status), failed


def try_all(mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """Try mutants, ``jobs`` at a time, each in a process of its own; print and return what became of them."""
    context = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
    if hasattr(os, "fork"):
        context.set_forkserver_preload(PRELOADED)
    verdicts = []
    with tempfile.TemporaryDirectory() as name:
        project = Path(name) / "project"
        copy_project(project)
        with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
            waiting = [pool.submit(tried, mutant, project) for mutant in mutants]
            waiting += [pool.submit(passed, file, tests, project) for file, tests in by_file(mutants).items()]
            try:
                for done in as_completed(waiting):
                    verdict = done.result()
                    verdicts.append(verdict)
                    print(f"{verdict.word:8} {verdict.name:32} {verdict.seconds:5.1f} s  {verdict.detail}", flush=True)
            except BaseException:  # Ctrl-C too: do not try the rest first
                pool.shutdown(cancel_futures=True)
                raise
    return verdicts


def by_file(mutants: Sequence[Mutant]) -> dict[str, list[str]]:
    """File -> the tests in it that are to catch some mutant."""
    files: dict[str, list[str]] = {}
    for test in sorted({test for mutant in mutants for test in mutant.tests}):
        files.setdefault(test.partition("::")[0], []).append(test)
    return files


def main(words: Sequence[str] | None = None) -> int:
    """Print a line per mutant; return 1 if one survived or could not be tried."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of the names of mutants; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants that are tried at a time")
    parser.add_argument("--list", action="store_true", help="print the names and what they break, and try none")
    flags = parser.parse_args(words)
    mutants = [mutant for mutant in read() if not flags.names or mutant.name.startswith(tuple(flags.names))]
    if not mutants:
        parser.error(f"no mutant of {LIST.name} is called {' or '.join(flags.names)}")
    if flags.list:
        print(*(f"{mutant.name:32} {mutant.breaks}" for mutant in mutants), sep="\n")
        return 0
    began = time.perf_counter()
    verdicts = try_all(mutants, flags.jobs)
    bad = [verdict for verdict in verdicts if verdict.word not in ("caught", "passed")]
    caught = sum(verdict.word == "caught" for verdict in verdicts)
    print(f"{caught} of {len(mutants)} mutants caught in {time.perf_counter() - began:.0f} s")
    for verdict in bad:
        print(f"{verdict.word:8} {verdict.name}: {verdict.detail}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
