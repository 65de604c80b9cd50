"""Modules of this package that are timed in a process of their own, whose answer is a line of JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def answer_of(module: str, *args: str) -> Any:
    """What a module prints when it is run as a program with these arguments."""
    # The child must find this very package, also in a checkout that is not installed.
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-m", module, *args], capture_output=True, text=True, env=env)
    if done.returncode:
        command = " ".join((module, *args))
        raise RuntimeError(f"{command} ended with status {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])
