"""Freed memory is kept for the next tensors, unless the user has settings of their own."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from hetperm.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        blocks = [bytes([1]) * 2**20 for _ in range(20)]  # 20 MB, of the allocator that tensors come from
        del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kind: str, **env: str) -> int:
    """The pages that the system had to clear for twice 20 MB, after it had done so twice."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, kind], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_reused_and_settings_of_the_user_are_left_alone():
    settings = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    assert faults("keep") < 100
    assert faults("keep", **settings) > 1_000
