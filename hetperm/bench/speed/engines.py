"""Engines with several workers: what they add to a task, and a round of convolutions on two cores."""

import importlib.util
import os
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

from hetperm.bench.speed import rounds
from hetperm.bench.speed.timing import LEAST, cores, pinned, seconds
from hetperm.bench.speed.workloads import WORKLOADS, Workload, build, fedavg_round
from hetperm.engine import choice

ENGINES = ("sequential", "threads", "processes", "ray")
SMALL = replace(WORKLOADS["W1"], num_clients=100, local_steps=1)  # tasks of a tenth of a millisecond


def missing(engine: str) -> str | None:
    """Why an engine cannot be timed here; None if it can."""
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        return "not run: Ray is not installed (pip install 'hetperm[ray]')"
    # The cores that this process may use; if the system does not say, all there are.
    if engine != "sequential" and (len(cores()) or os.cpu_count()) < 2:
        return "not run: there is only one core to run on"
    return None


def of_engine(engine: str, workload: Workload, *, runs: int, repeats: int) -> dict[str, Any]:
    """Seconds of a small task on an engine, one after the other on one worker; and a round on two, against bare."""
    why_not = missing(engine)
    if why_not:
        return {"about": workload.about, "skipped": why_not}
    single = per_task(engine, runs=runs, repeats=repeats)
    workers = 1 if engine == "sequential" else 2
    row = rounds.against_bare(workload, engine=engine, workers=workers, runs=runs, repeats=repeats)
    return {**row, "task_seconds": statistics.median(single), "tasks_seconds": single}


def per_task(engine: str, *, runs: int, repeats: int) -> list[float]:
    """Wall seconds of a task of one small step, for each run: the median over its rounds of a hundred tasks."""
    with pinned(1 if engine == "sequential" else 2):
        setup = build(SMALL)
        with choice.opened(engine, 1, setup.clients, setup.shop) as chosen:
            one_round = partial(fedavg_round, setup, chosen)
            one_round()  # shards have travelled
            times = [[seconds(one_round, LEAST)[0] for _ in range(repeats)] for _ in range(runs)]
    return [statistics.median(one) / SMALL.num_clients for one in times]
