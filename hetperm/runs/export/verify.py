"""Verification of an exported file: it is run in its own runtime, in a process that cannot import what made it."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetperm.runs.export import standalone
from hetperm.runs.export.options import Options
from hetperm.runs.export.package import Subject
from hetperm.texts import one_line

MAKERS = ("hetperm", "submodels", "timm", "torchvision")  # packages that no exported file may need
BATCH = 32  # samples of a call, where any number is allowed
# The largest difference of an output, as a share of the largest output. What int8 may cost is an option.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}


@dataclass(frozen=True, eq=False)
class Check:
    """What running a file showed.

    Attributes:
        difference: the largest difference of an output from that of the client's model.
        scale: the largest output of the client's model.
        before, after: the metric of the client's model and of the file, on the samples that it was run on.
        ms: milliseconds that the file takes for one sample, on one thread.
        fault: why the file is not good; None if it is.
    """

    difference: float = float("nan")
    scale: float = float("nan")
    before: float = float("nan")
    after: float = float("nan")
    ms: float = float("nan")
    fault: str | None = None


class Runtime:
    """A context with a process that runs files of a format. One that crashes is started anew for the next file.

    Args:
        blocked: packages that the process cannot import.
    """

    def __init__(self, kind: str, blocked: Sequence[str]):
        self._command = [sys.executable, "-I", standalone.__file__, kind, ",".join(blocked)]
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Runtime":
        self._folder = tempfile.TemporaryDirectory()
        self._log = open(Path(self._folder.name, "log"), "w+b", buffering=0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._log.close()
        self._folder.cleanup()

    def outputs(self, file: bytes, x: np.ndarray, batches: Sequence[int]) -> tuple[np.ndarray, float]:
        """The outputs of a file for x (n, ...), and milliseconds for one sample; an error says what went wrong."""
        folder = Path(self._folder.name)
        job = {name: str(folder / name) for name in ("file", "inputs.npy", "outputs.npy")}
        job = {name.partition(".")[0]: path for name, path in job.items()}
        Path(job["file"]).write_bytes(file)
        np.save(job["inputs"], np.ascontiguousarray(x))
        answer = self._ask(job | {"batches": list(batches)})
        if "error" in answer:
            raise RuntimeError(f"{one_line(answer['error'])}{self._operators()}")
        return np.load(job["outputs"]), answer["ms"]

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
            self._process = subprocess.Popen(self._command, text=True, **pipes)
        self._log.seek(0)  # the process writes where this file stands
        self._log.truncate()
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self._process.communicate()
        status, self._process = self._process.returncode, None
        return {"error": f"the runtime crashed with status {status} {self._last_words()}".strip()}

    def _operators(self) -> str:
        """The operators that a runtime complains of in its log."""
        self._log.seek(0)
        missing = re.findall(r"Missing operator: \[\d+\] (\S+)", self._log.read().decode(errors="replace"))
        return f" (it has no {', '.join(dict.fromkeys(missing))})" if missing else ""

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return f"({one_line(lines[-1])})" if lines else ""


def blocked_by(module: nn.Module, kind: str) -> tuple[str, ...]:
    """The packages that may not be needed to run a file of this module: those its classes come from, and ours."""
    classes = {type(part).__module__.partition(".")[0] for part in module.modules()}
    needed = {"torch", "__main__", "builtins"}
    return tuple(sorted({*MAKERS, *classes} - needed | ({"torch"} if kind == "onnx" else set())))


def check(file: bytes, subject: Subject, options: Options, runtime: Runtime) -> Check:
    """Run a file on a client's samples and compare it with the client's model."""
    expected, stored = subject.outputs(), subject.stored
    try:
        raw, ms = runtime.outputs(file, stored.numpy(), batches(len(stored), options.batch))
    except RuntimeError as error:
        return Check(fault=f"it does not run: {error}")
    outputs = torch.from_numpy(raw)
    if outputs.shape != expected.shape:
        return Check(fault=f"its outputs have shape {tuple(outputs.shape)} instead of {tuple(expected.shape)}")
    if not outputs.isfinite().all():
        return Check(ms=ms, fault="its outputs are not finite")
    difference, scale = _difference(outputs, expected, subject.classes)
    before, after = subject.score(expected), subject.score(outputs)
    fault = None
    if options.precision == "int8":
        metric = subject.metric
        if (after - before if metric.lower_is_better else before - after) > options.accuracy_loss:
            moved = f"from {before:.3f} to {after:.3f}"
            fault = f"validation {metric.name} goes {moved}, by more than {options.accuracy_loss:g}"
    elif not difference <= TOLERANCE[options.precision] * scale:
        fault = f"its outputs differ by {difference:.2g}, and the largest is {scale:.2g}"
    return Check(difference, scale, before, after, ms, fault)


def batches(n: int, batch: str) -> list[int]:
    """The sizes of the batches that n samples are run in.

    Example:
        >>> batches(3, "one"), batches(40, "dynamic")
        ([1, 1, 1], [1, 32, 7])
    """
    if batch == "one":
        return [1] * n
    rest = n - 1  # first a batch of one: a file that allows any number must allow it
    return [1, *[BATCH] * (rest // BATCH), *[rest % BATCH] * (rest % BATCH > 0)]


def _difference(outputs: Tensor, expected: Tensor, classes: Tensor | None) -> tuple[float, float]:
    """The largest difference of an output, and the largest output of a class that the client has."""
    present = expected if classes is None else expected[:, classes.cpu()]
    return float((outputs - expected).abs().max()), float(present.abs().max())
