"""Programs in a process of their own that need not import torch again: children of one process that has done so.

A test whose subject is not how Python starts uses it in place of `subprocess.run`, by the fixture `warm`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SERVER = """
import json, os, runpy, sys, traceback
import torch, torch._dynamo
import hetperm.runs.experiment

torch.set_num_threads(1)  # threads do not survive a fork
answers = os.fdopen(os.dup(1), "w")

def work(job):
    for number, path in enumerate((os.devnull, job["out"], job["err"])):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.environ.update(job["variables"])
    sys.argv = job["argv"]
    if job["code"] is None:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        exec(compile(job["code"], "a program", "exec"), {"__name__": "__main__"})

for line in sys.stdin:
    child = os.fork()
    if not child:
        status = 1
        try:
            work(json.loads(line))
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""


def environment() -> dict[str, str]:
    """The environment of a program: this checkout, on one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Warm:
    """A process that has imported torch and hetperm, and forks itself for each program."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def run(self, *words: str, code: str | None = None, **variables: str) -> subprocess.CompletedProcess:
        """Run a program with some words and variables: its text, or else the script that the first word names."""
        if not hasattr(os, "fork"):
            command = [sys.executable, *([] if code is None else ["-c", code]), *words]
            return subprocess.run(command, capture_output=True, text=True, env=environment() | variables, cwd=ROOT)
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            argv = [*words] if code is None else ["-c", *words]
            job = {"argv": argv, "code": code, "out": out.name, "err": err.name, "variables": variables}
            server = self._started()
            print(json.dumps(job), file=server.stdin, flush=True)
            status = server.stdout.readline()
            assert status, "the process from which programs are forked has ended"
            return subprocess.CompletedProcess(argv, int(status), out.read(), err.read())

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen([sys.executable, "-c", SERVER], **pipes, env=environment(), cwd=ROOT)
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
