"""What all tests share: torch computes on one thread, which is faster for small models and rounds alike everywhere."""

import gc
import logging
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from warm import Warm

pytest.register_assert_rewrite("federation", "reference_inputs", "engine_models")
# Programs of federations, which import Flower and what it brings.
OF_FLOWER = [
    "federation_endings.py",
    "federation_machines.py",
    "federation_processes.py",
    "federation_refusals.py",
    "hostile_server.py",
    "lying_node.py",
    "real_federation.py",
]
collect_ignore = [] if find_spec("flwr") else OF_FLOWER

gc.disable()  # until all is imported: what modules hold is never garbage, and looking for it takes a tenth of the time
MEMORY = Path("/dev/shm")  # a file system in memory, on Linux
ROOM = 2**30
# Memory of workers in pages of 2 MB, where glibc can: clearing small ones takes a tenth of the time.
TUNABLES, LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def pytest_configure(config: pytest.Config) -> None:
    """Put the folders of tests into memory where there is room: runs sync what they write, and disks take their time.

    Workers and the processes that tests start inherit it.
    """
    usable = "TMPDIR" not in os.environ and MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    if usable and shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)
    if hasattr(config, "workerinput"):
        if os.environ.get(TUNABLES) == LARGE_PAGES:
            del os.environ[TUNABLES]  # read when this process began; those that tests start measure memory
    elif config.getoption("numprocesses", None):
        os.environ.setdefault(TUNABLES, LARGE_PAGES)
        return  # this process hands tests to workers and runs none
    untimed()


def untimed() -> None:
    """Let no test fail because the machine is slow or busy: without this, hypothesis allows 0.2 seconds an example."""
    from hypothesis import settings

    settings.register_profile("untimed", settings(), deadline=None)
    settings.load_profile("untimed")


# Files whose tests take seconds each: first, so that the last tests to be shared among workers are short ones.
LONG = {
    f"test_{name}.py" for name in "same_bytes crash_points examples docs how_to portability export cli_main".split()
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long; the order is otherwise as it was."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Spare what every test would pay for; look for garbage again, less often than Python does in small programs."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()
    # pytest listens, before and after every test, to each logger that does not hand on what it is told: fifty of torch.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_sessionfinish() -> None:
    """Let hypothesis find who refers to its generators, if it is imported only now, to write its summary."""
    if "hypothesis" not in sys.modules:
        gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch  # not above: the process that hands tests to workers runs none

    from hetperm.memory import keep_freed_memory

    keep_freed_memory()  # as every run does
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def runs_share_what_they_trace():
    """See `traced.traced_once`; nothing is imported for tests that start no run."""
    if "hetperm.runs.building" not in sys.modules:
        yield
        return
    from traced import traced_once

    with traced_once():
        yield


@pytest.fixture(scope="session")
def warm():
    """Runs programs in processes of their own that have imported torch already; see `warm.Warm`."""
    server = Warm()
    yield server
    server.close()


@pytest.fixture(scope="module")
def undrawn():
    """A module in which figures are made and not painted: that takes half of a small run, and others look at them."""
    from hetperm.report import pictures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "png", lambda figure: b"a picture")
        yield
