"""Helpers of the fuzz suite: one oracle for all inputs, and values that are wrong in as many ways as we know."""

import contextlib
import io
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hetperm.cli.main import _dispatch, guarded

LONGEST = 20  # seconds of CPU time, or thrice as many by the clock: whatever takes longer counts as a hang
EXAMPLES = int(os.environ.get("HETPERM_FUZZ", "0"))  # of every kind; 0: a small sample, the same every time

# Small enough that an input which works is trained in a moment.
SMALL = {"dataset": "synthetic", "num-clients": 2, "samples-per-client": 8, "epochs": 1, "local-steps": 1, "steps": 0}
SMALL |= {"warmup-rounds": 1, "batch-size": 4, "model": "logistic", "capacity-profile": "homogeneous", "baselines": ""}


def tiny(*without: str) -> list[str]:
    """The flags of a run of a moment, but for some."""
    return ["--quiet", *(f"--{name}={value}" for name, value in SMALL.items() if name not in without)]


def fuzzed(few: int) -> Callable:
    """The settings of a test: ``few`` examples in the suite, and as many as asked for in `make fuzz`."""
    return settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Hang(BaseException):
    """An input that took too long; no handler of the package may catch it."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """A context that ends with `Hang` if it takes too long."""

    def stop(number: int, frame: Any) -> None:
        raise Hang

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, LONGEST), (signal.ITIMER_REAL, signal.SIGALRM, 3 * LONGEST))
    before = [signal.signal(number, stop) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    except Hang:
        raise AssertionError("it hangs") from None  # as a failure, of which hypothesis looks for a smaller example
    finally:
        for (timer, number, _), answer in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, answer)


def judged(*words: str) -> tuple[int, str]:
    """Run a command. It must work, or end with status 2 and one sentence that somebody wrote; return both."""
    said, printed = io.StringIO(), io.StringIO()
    with in_time(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        status = guarded(_dispatch, words)
    sentence = said.getvalue()
    assert status in (0, 2), (status, sentence)
    if status == 2:
        assert re.fullmatch(r"error: .+\n", sentence), sentence
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", sentence[:-1]), sentence
        # The outermost handler is a net: what falls into it has no sentence of its own.
        assert "HETPERM_TRACEBACK" not in sentence and "Traceback" not in sentence, sentence
    return status, sentence


def refused_or_fine(action: Callable[[], Any]) -> None:
    """Call a function of the library: it must work, or raise an error of one line that somebody wrote."""
    with in_time():
        try:
            action()
        except (ValueError, TypeError) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            assert last.line.startswith("raise "), f"{error!r} comes from {last.filename}:{last.lineno}: {last.line}"
            assert "\n" not in str(error) and str(error)


# Values

WORDS = ("", " ", "None", "nan", "-inf", "1e3", "0x10", "1_0", "٣", "True", "a,b", "--", "\x1b[2J", "=1+1", "../..")
NUMBERS = (-1, 0, 1, 2, 3, 10**26, -(10**26), 10**400)
FRACTIONS = (0.0, -0.0, 1e-320, 1e-13, 1e-7, 0.5, 1.0, 1e38, 1e308, float("inf"), float("nan"), -1.0)

texts = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
scalars = st.one_of(texts, st.sampled_from(NUMBERS), st.sampled_from(FRACTIONS), st.booleans())
jsonish = st.recursive(
    st.one_of(scalars, st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
# TOML has no null, and its whole numbers have 64 bits for most writers.
tomlish = st.recursive(
    st.one_of(scalars, st.just(date(2024, 2, 29))),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
