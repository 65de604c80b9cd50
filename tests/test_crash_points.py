"""A run that crashes while it changes a file ends byte-identical; `python tests/crash_points.py` tries every step."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_that_crashes_at_steps_of_every_kind_ends_byte_identical(warm):
    """In a process of its own, because torch may use threads in this one, and threads do not survive a fork."""
    done = warm.run(str(ROOT / "tests" / "crash_points.py"), "--some", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(": 5 ended byte-identical")
    assert {line.split()[0] for line in lines[:-1]} == {"mkdir", "open", "write", "fsync", "rename"}
