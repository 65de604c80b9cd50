"""A federation on one machine: every node is a process, and all of it goes over loopback with TLS."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetperm import config as configuration
from hetperm.config import Config
from hetperm.federated import deploy
from hetperm.federated.options import DeployOptions, FederateOptions, ServeOptions
from hetperm.federated.orphans import PARENT
from hetperm.federated.places import COSTS, RUN
from hetperm.federated.serve import QUIET, OnTold, check_free, serve

ENDING = 10.0  # seconds that a node has to end


def free_folder(options: FederateOptions) -> Path:
    """The folder of a new demonstration; an error if there is no place for it, or for its server."""
    check_free("127.0.0.1", options.port, "name another --port")
    if options.out is None:
        names = (Path("federation" if k == 1 else f"federation-{k}") for k in itertools.count(1))
        return next(name for name in names if not name.exists())
    if options.out.exists():
        raise ValueError(f"{options.out} exists; name another folder with --out")
    return options.out


def federate(options: FederateOptions, place: Path, on_event: OnTold) -> tuple[Path, list[str]]:
    """Run a federation on this machine, from a folder that is written; return the run folder, and what it cost."""
    began = time.monotonic()
    config = configuration.load(options.config).override(
        num_clients=options.nodes,
        algorithm=options.algorithm,
        baselines=(),
        steps=options.steps,
        epochs=options.epochs,
        engine="sequential",
    )
    if not options.widths:
        raise ValueError("--widths is empty; give one for each node, such as 1 0.5 0.25")
    widths = tuple(options.widths[k % len(options.widths)] for k in range(options.nodes))
    folder = place_for(config, place, f"127.0.0.1:{options.port}", widths)
    with nodes(folder, range(options.nodes)):
        run = serve(ServeOptions(folder=folder, wait=180.0), on_event)
    return run, [*costs(run), f"{time.monotonic() - began:.0f} s in all, starting and ending of processes included"]


def place_for(config: Config, folder: Path, address: str, widths: tuple[float, ...]) -> Path:
    """Deploy a federation whose nodes have these widths, with a configuration as it is."""
    options = DeployOptions(folder=folder, nodes=len(widths), address=address, widths=widths)
    deploy.deploy(options)
    for path in (folder / RUN, *(folder / "nodes").glob(f"*/{RUN}")):
        path.write_text(config.to_toml())
    return folder


@contextlib.contextmanager
def nodes(folder: Path, which: Sequence[int]) -> Iterator[dict[int, subprocess.Popen]]:
    """A context with the processes of nodes, which end with it."""
    running: dict[int, subprocess.Popen] = {}
    try:
        for k in which:
            running[k] = start_node(folder, k)
        yield running
    finally:
        for process in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in running.values():
            try:
                process.wait(ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_node(folder: Path, k: int, *args: str) -> subprocess.Popen:
    """Start the process of node k; what it says goes to node.log in its folder."""
    place = folder / "nodes" / str(k)
    command = [sys.executable, "-m", "hetperm", "node", "--folder", str(place), *args]
    with (place / "node.log").open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **QUIET, PARENT: str(os.getpid())},
        )


def costs(run: Path) -> list[str]:
    """What each kind of job cost, a line each."""
    table = json.loads((run / COSTS).read_text())["costs"]
    lines = []
    for kind, cost in table.items():
        per = cost["jobs"] or 1
        lines.append(
            f"{kind}: {cost['jobs']} jobs in {cost['packets']} packets; each {cost['seconds'] / per:.3f} s, of which "
            f"{cost['node_seconds'] / per:.3f} s at the node; {cost['bytes_down'] / per / 1024:.1f} KiB down, "
            f"{cost['bytes_up'] / per / 1024:.1f} KiB up"
        )
    return lines
