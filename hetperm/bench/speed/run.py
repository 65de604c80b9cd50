"""The speed benchmark part by part."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from hetperm.bench.speed import engines, epochs, hetero, peers, phases, rounds, scaling, timing
from hetperm.bench.speed.options import Options
from hetperm.bench.speed.workloads import WORKLOADS, Workload, resized

Figures = Any  # whatever results.json can hold
Say = Callable[[str], object]
QUICK = {"W1": 4, "W2": 4, "W3": 2, "W4": 5}  # clients of each workload with --quick
TWO_CORES = ("W3", "W4")  # convolutions, which threads run side by side
QUICK_SIZES = (10, 20)


def run(options: Options, *, say: Say) -> Iterator[tuple[str, Figures]]:
    """Run the parts that were asked for, and yield (part, its figures) after each.

    Args:
        say: called with what is timed next.
    """
    for part, measure in MEASURES.items():
        if part in options.parts:
            yield part, measure(options, say)


def check_data(options: Options) -> None:
    """Raise an error, before anything is timed, if the data of the epochs are missing."""
    if options.data_dir and {"epochs", "alpha"} & set(options.parts):
        _case(options).setting(epochs.PARTITIONS[0])


# Parts


def _workloads(options: Options, say: Say) -> Figures:
    chosen, rows = _chosen(options), {}
    for name, workload in chosen.items():
        say(f"{name}: {workload.about}, {workload.size}")
        rows[name] = rounds.against_bare(workload, engine=options.engine, workers=1, **options.repetitions)
    for name in TWO_CORES:
        if name in chosen:
            rows[f"{name} on two cores"] = _on_two_cores(name, chosen[name], options, say, rounds.against_bare)
    return rows


def _hetero(options: Options, say: Say) -> Figures:
    rows = {}
    for name, workload in hetero.CASES.items():
        workload = resized(workload, 5 if options.quick else None)
        say(f"{name}: {workload.about}, {workload.size}")
        rows[name] = hetero.against_steps(workload, engine=options.engine, workers=1, **options.repetitions)
        rows[f"{name} on two cores"] = _on_two_cores(name, workload, options, say, hetero.against_steps)
    return rows


def _on_two_cores(name: str, workload: Workload, options: Options, say: Say, measure: Callable) -> Figures:
    # The cores that this process may use; if the system does not say, all there are.
    if (len(timing.cores()) or os.cpu_count()) < 2:
        return {"about": workload.about, "skipped": "not run: there is only one core to run on"}
    say(f"{name} on two cores")
    return measure(workload, engine="threads", workers=2, **options.repetitions)


def _engines(options: Options, say: Say) -> Figures:
    workload, rows = resized(WORKLOADS["W3"], QUICK["W3"] if options.quick else None), {}
    for engine in engines.ENGINES:
        say(f"engine {engine}")
        rows[engine] = engines.of_engine(engine, workload, **options.repetitions)
    return rows


def _peers(options: Options, say: Say) -> Figures:
    return {name: _peer(name, options, say) for name in peers.PEERS}


def _peer(name: str, options: Options, say: Say) -> Figures:
    about, why_not = peers.PEERS[name], peers.missing(name)
    if why_not:
        return {"about": about, "skipped": why_not}
    # Peers are timed in one go, as often as all runs together: Flower would start anew for each.
    repeats, rows = options.repetitions["runs"] * options.repetitions["repeats"], {}
    for label, workload in _chosen(options).items():
        if label in peers.PEER_WORKLOADS:
            say(f"{label} by {about}")
            rows[label] = peers.against_bare(name, workload, repeats=repeats)
    return {"about": about, "workloads": rows}


def _perm_rounds(options: Options, say: Say) -> Figures:
    rows = {}
    for name, workload in _chosen(options).items():
        if name != "W4":  # models of several sizes, whose visits train parts: not as many steps of as much work
            say(f"visits of {name}")
            rows[name] = rounds.against_fedavg(workload, engine=options.engine, **options.repetitions)
    return rows


def _epochs(options: Options, say: Say) -> Figures:
    case, rows = _case(options), {}
    for partition in epochs.PARTITIONS:
        say(f"epochs of {partition}")
        rows[partition] = epochs.against_literal(case, partition, engine=options.engine, workers=options.workers)
    return rows


def _alpha(options: Options, say: Say) -> Figures:
    say("alpha")
    return epochs.price_of_alpha(
        _case(options), engine=options.engine, workers=options.workers, repeats=options.repetitions["repeats"]
    )


def _scaling(options: Options, say: Say) -> Figures:
    sizes = QUICK_SIZES if options.quick else options.sizes
    say(f"epochs of {', '.join(map(str, sizes))} clients")
    return scaling.curve(sizes, engine=options.engine)


def _train(options: Options, say: Say) -> Figures:
    say("the main job")
    return phases.main_job(runs=options.repetitions["runs"])


MEASURES: dict[str, Callable[[Options, Say], Figures]] = {
    "workloads": _workloads,
    "hetero": _hetero,
    "engines": _engines,
    "peers": _peers,
    "perm_rounds": _perm_rounds,
    "epochs": _epochs,
    "alpha": _alpha,
    "scaling": _scaling,
    "train": _train,
}


# What the parts run on


def _chosen(options: Options) -> dict[str, Workload]:
    """The workloads that were asked for, with the number of clients that was asked for."""
    small = QUICK if options.quick else {}
    return {name: resized(WORKLOADS[name], options.clients or small.get(name)) for name in sorted(options.workloads)}


def _case(options: Options) -> epochs.Case:
    """The data that epochs are timed on."""
    if options.quick:
        return epochs.Case(options.data_dir, num_clients=10, warmup_rounds=2, epochs=1)
    # Digits are fewer, and so are their clients. Every epoch gives one ratio, so epochs are the runs of this part.
    num_clients = 50 if options.data_dir else 20
    return epochs.Case(options.data_dir, num_clients=num_clients, warmup_rounds=30, epochs=options.runs)
