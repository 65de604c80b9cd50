"""The command ``hetperm bench``: what is run, in which size, and where the figures go. Help needs no torch."""

import difflib
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetperm.cli.main import UsageError, parse, say
from hetperm.config import Names

WORKLOADS = ("W1", "W2", "W3", "W4")
PARTS = ("workloads", "peers", "perm_rounds", "epochs", "alpha", "scaling")


@dataclass(frozen=True)
class Flags:
    """Time rounds and epochs side by side with a bare torch loop, the paper's literal epoch and installed peers."""

    out: Path = Path("bench")
    """Folder that results.json, table.md and speed.png are written to."""
    parts: Names = PARTS
    """What is run: workloads (against a bare loop), peers, perm_rounds (against FedAvg), epochs (against literal ones),
    alpha (what it costs), scaling (over the number of clients)."""
    workloads: Names = WORKLOADS
    """W1 logistic, W2 MLP, W3 cnn, W4 resnet18 in five widths."""
    clients: int | None = None
    """Clients of a round; None: 50 for W1 and W2, 6 for W3, where 50 would take half a minute a round, 10 for W4."""
    repeats: int = 3
    """Times that both sides are timed in turn, in each run."""
    runs: int = 3
    """Runs of so many repeats; their spread is told."""
    data_dir: Path | None = None
    """Folder of MNIST, for the epochs; None: digits, which come with hetperm but are fewer."""
    sizes: tuple[int, ...] = (10, 30, 100, 300, 1000)
    """Numbers of clients of the scaling curve."""
    engine: Literal["auto", "sequential", "batched", "threads", "processes"] = "auto"
    """Engine of hetperm on one core; on two cores W3 runs on threads."""
    workers: int = 1
    """Cores of the epochs, literal or not."""
    quick: bool = False
    """A look at everything in small: few clients, one run, figures that mean little."""


def main(args: Sequence[str]) -> None:
    """Nothing; the benchmark is run, part by part, and what is done so far is in the folder."""
    flags = parse(Flags, args, prog="hetperm bench", default=Flags())
    check(flags)
    import torch

    from hetperm.bench.speed import output
    from hetperm.report import pictures
    from hetperm.runs import files as folder

    results: dict[str, Any] = {
        "command": _plain_command(flags, args),
        "taken": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "runs": 1 if flags.quick else flags.runs,
        "repeats": 1 if flags.quick else flags.repeats,
    }
    for part, found in run(flags, runs=results["runs"], repeats=results["repeats"]):
        results[part] = found
        folder.write_json(flags.out / "results.json", results)
    folder.write(flags.out / "table.md", output.tables(results))
    figure = output.picture(results)
    if figure:
        folder.write(flags.out / "speed.png", pictures.png(figure))
    say(output.tables(results))
    say(f"written to {flags.out}: results.json, table.md{', speed.png' * bool(figure)}")


def check(flags: Flags) -> None:
    """Nothing, or an error if flags make no sense, the folder cannot be made or data are not there: at once."""
    for name, known in (("parts", PARTS), ("workloads", WORKLOADS)):
        for given in getattr(flags, name):
            if given not in known:
                close = difflib.get_close_matches(given, known, n=1)
                advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise UsageError(f"--{name}: unknown {given!r}; {advice}")
        if not getattr(flags, name):
            raise UsageError(f"--{name} is empty; name some of {', '.join(known)}")
    counts = {"clients": flags.clients, "repeats": flags.repeats, "runs": flags.runs, "workers": flags.workers}
    for name, value in [*counts.items(), *(("sizes", size) for size in flags.sizes)]:
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; it must be a whole number of at least 1")
    try:
        flags.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {flags.out} ({error.strerror}); name another with --out") from error
    if flags.data_dir and {"epochs", "alpha"} & set(flags.parts):
        from hetperm.bench.speed.epochs import PARTITIONS

        problem(flags).setting(PARTITIONS[0])


def problem(flags: Flags) -> Any:
    """What the epochs run on."""
    from hetperm.bench.speed.epochs import Problem

    if flags.quick:
        return Problem(flags.data_dir, num_clients=10, warmup_rounds=2, epochs=1)
    return Problem(flags.data_dir, num_clients=50 if flags.data_dir else 20, warmup_rounds=30, epochs=flags.runs)


def run(flags: Flags, *, runs: int, repeats: int) -> Iterator[tuple[str, Any]]:
    """(part, its figures), one after the other."""
    from hetperm.bench.speed import epochs, peers, rounds, scaling, timing
    from hetperm.bench.speed import workloads as known

    few = {"W1": 4, "W2": 4, "W3": 2, "W4": 5} if flags.quick else {}
    chosen = {
        name: known.resized(known.WORKLOADS[name], flags.clients or few.get(name)) for name in sorted(flags.workloads)
    }
    how = {"runs": runs, "repeats": repeats}
    if "workloads" in flags.parts:
        found = {}
        for name, workload in chosen.items():
            _progress(f"{name}: {workload.about}, {workload.size}")
            found[name] = rounds.against_bare(workload, engine=flags.engine, workers=1, **how)
        if "W3" in chosen:
            found["W3 on two cores"] = _on_two_cores(chosen["W3"], timing.cores(), how)
        yield "workloads", found
    if "peers" in flags.parts:
        wanted = {name: each for name, each in chosen.items() if name in peers.PEER_WORKLOADS}
        yield "peers", {name: _peer(name, wanted, runs * repeats) for name in peers.PEERS}
    if "perm_rounds" in flags.parts:
        found = {}
        for name, workload in chosen.items():
            if name != "W4":  # models of several sizes, whose visits train parts: not as many steps of as much work
                _progress(f"visits of {name}")
                found[name] = rounds.against_fedavg(workload, engine=flags.engine, **how)
        yield "perm_rounds", found
    if "epochs" in flags.parts:
        found = {}
        for partition in epochs.PARTITIONS:
            _progress(f"epochs of {partition}")
            found[partition] = epochs.against_literal(
                problem(flags), partition, engine=flags.engine, workers=flags.workers
            )
        yield "epochs", found
    if "alpha" in flags.parts:
        _progress("alpha")
        yield (
            "alpha",
            epochs.price_of_alpha(problem(flags), engine=flags.engine, workers=flags.workers, repeats=repeats),
        )
    if "scaling" in flags.parts:
        sizes = (10, 20) if flags.quick else flags.sizes
        _progress(f"epochs of {', '.join(map(str, sizes))} clients")
        yield "scaling", scaling.curve(sizes, engine=flags.engine)


def _on_two_cores(workload: Any, cores: Sequence[int], how: Mapping[str, int]) -> dict[str, Any]:
    from hetperm.bench.speed import rounds

    if (len(cores) or os.cpu_count()) < 2:
        return {"about": workload.about, "skipped": "not run: there is only one core to run on"}
    _progress("W3 on two cores")
    return rounds.against_bare(workload, engine="threads", workers=2, **how)


def _peer(name: str, workloads: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    from hetperm.bench.speed import peers

    why_not = peers.missing(name)
    if why_not:
        return {"about": peers.PEERS[name], "skipped": why_not}
    found = {}
    for workload, each in workloads.items():
        _progress(f"{workload} by {peers.PEERS[name]}")
        found[workload] = peers.against_bare(name, each, repeats=repeats)
    return {"about": peers.PEERS[name], "workloads": found}


def _progress(what: str) -> None:
    print(f"timing {what} ...", file=sys.stderr, flush=True)


def _plain_command(flags: Flags, args: Sequence[str]) -> str:
    """The command as it is told to others: without the folders of this machine."""
    hidden = {str(flags.data_dir): "DATA"} | ({str(flags.out): flags.out.name} if flags.out.is_absolute() else {})
    for path, name in hidden.items():
        args = [arg.replace(path, name) for arg in args]
    return shlex.join(["hetperm", "bench", *args])


def _processor() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
