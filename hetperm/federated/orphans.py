"""Processes that must not outlive the one that started them: a parent that is killed cannot end them itself."""

import os
import signal
import threading
import time
from collections.abc import Callable

PARENT = "HETPERM_PARENT"  # the variable that tells a node with which process it ends
LOOK = 0.5  # seconds between two looks at the parent


def end_with_parent(parent: int, end: Callable[[], object]) -> None:
    """Call ``end``, from another thread, as soon as the parent of this process is not that one any more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        end()

    threading.Thread(target=watch, daemon=True).start()


def end_with_named_parent() -> None:
    """End this process as SIGTERM does when the one is gone that started it, if that one said so."""
    parent = os.environ.pop(PARENT, "")
    if parent.isdigit():
        end_with_parent(int(parent), lambda: os.kill(os.getpid(), signal.SIGTERM))
