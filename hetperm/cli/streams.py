"""Output that never stops a command: a reader that has seen enough, a full disk, an encoding without some letters."""

import codecs
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

PLAIN = {"±": "+-", "×": "x", "µ": "u", "…": "..."}


class Lasting:
    """A text stream that can always be written to. What it cannot pass on is dropped.

    Attributes:
        fault: the error that ended the output; None if all of it was passed on.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self.fault: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        with self._forgiving():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what was written, or drop it."""
        with self._forgiving():
            self._stream.flush()

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a stream that was closed raises a ValueError
            closed = OSError(errno.EBADF, os.strerror(errno.EBADF))
            self.fault = self.fault or (error if isinstance(error, OSError) else closed)
            # All that follows goes nowhere, also what Python still holds back and writes when it exits.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting() -> Iterator[Lasting | None]:
    """A context in which printing cannot fail; it provides the output, or None if the process has none."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="hetperm.plain")
    sys.stdout, sys.stderr = (stream and Lasting(stream) for stream in before)
    try:
        yield sys.stdout
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What stands for letters that the output has no code for."""
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter, "?") for letter in letters), error.end


codecs.register_error("hetperm.plain", _plain)
