"""Timing side by side: both candidates run in turn in one process, so that they see the same machine."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

LEAST = 0.1  # seconds: shorter work is repeated until this much time has passed
RUN = 5.0  # seconds: a run of several repetitions adds more until this much time has passed

Time = tuple[float, float]  # seconds of one call: wall, and CPU of the whole process


def seconds(work: Callable[[], object], least: float = 0.0) -> Time:
    """The time of one call, averaged over as many calls as fill ``least`` seconds."""
    calls, wall, cpu = 0, time.perf_counter(), time.process_time()
    while calls == 0 or time.perf_counter() - wall < least:
        work()
        calls += 1
    return (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls


@dataclass(frozen=True)
class Comparison:
    """Times of a reference and of ours, run by run, each the median of a run's repetitions.

    Attributes:
        ratios: how many times faster ours was, for each run: the median over its repetitions, in each of which both are
            timed one right after the other. So a machine that is slow for some seconds is slow for both.
    """

    reference: Sequence[Time]
    ours: Sequence[Time]
    ratios: Sequence[float]

    @property
    def ratio(self) -> float:
        """How many times faster ours is: the median of the runs."""
        return statistics.median(self.ratios)

    def row(self, reference: str, ours: str) -> dict[str, float]:
        """The seconds of both under their names, medians over the runs, wall and CPU."""
        named = {reference: self.reference, ours: self.ours}
        kinds = {"seconds": 0, "cpu_seconds": 1}
        return {
            f"{name}_{kind}": statistics.median(time[k] for time in times)
            for name, times in named.items()
            for kind, k in kinds.items()
        }


def compare(reference: Callable, ours: Callable, *, runs: int, repeats: int) -> Comparison:
    """Time both in turn, ``repeats`` times a run (more if they are short), after a call of each that does not count."""
    reference(), ours()  # caches are filled and kernels chosen
    return Comparison(*zip(*(_run(reference, ours, repeats) for _ in range(runs))))


def _run(reference: Callable, ours: Callable, repeats: int) -> tuple[Time, Time, float]:
    began, times = time.perf_counter(), []
    # A single repetition is meant as a quick look, and is not extended.
    while len(times) < repeats or (repeats > 1 and time.perf_counter() - began < RUN):
        times.append((seconds(reference, LEAST), seconds(ours, LEAST)))
    first, second = zip(*times)
    # The median of the ratios, not the ratio of the medians: only the two of a pair saw the same machine.
    return median(first), median(second), statistics.median(a / b for (a, _), (b, _) in times)


def median(times: Sequence[Time]) -> Time:
    """The median of wall and of CPU time."""
    wall, cpu = zip(*times)
    return statistics.median(wall), statistics.median(cpu)


def cores() -> list[int]:
    """The cores that this process may use; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def pinned(count: int) -> Iterator[None]:
    """A context in which the process keeps to ``count`` cores, if the system lets it, and torch to one thread."""
    before, threads = cores(), torch.get_num_threads()
    # With several cores, it is the workers of an engine that use them, not threads inside torch.
    torch.set_num_threads(1)
    if before:
        os.sched_setaffinity(0, before[-count:])  # the first core has most of the system's own work
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
