"""The cost of a federation of four node processes over loopback with TLS: seconds, bytes and packets of every job.

    .venv-flower/bin/python bench/federation.py          # after `make test-flower`, which makes the environment

The same job runs twice: with barriers (a round after the other, one job a packet, every tensor sent) and as it is. The
seconds of a job are those from sending to answer, and depend on the machine and its load. CPU seconds of each process,
from the first task to the last epoch, depend on the load much less. Linux only: they are read from /proc.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetperm import config as configuration
from hetperm.federated import local
from hetperm.federated.options import ServeOptions
from hetperm.federated.serve import QUIET, serve

WIDTHS = (1.0, 0.5, 0.25, 0.25)
BARRIERS = """
from functools import partial

from hetperm.engine import flower
from hetperm.federated import apps

apps.Rules = partial(apps.Rules, together=False, lean=False)
del flower.Flower.flow
"""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def child_named(word: str) -> int:
    """The number of a child of this process by a word of its command."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and word in (folder / "cmdline").read_text():
                return int(folder.name)
        except OSError:
            continue  # it has ended
    raise RuntimeError(f"no child with {word!r} in its command")


class Clock:
    """Takes the time of events, and CPU seconds from the first task on."""

    def __init__(self, nodes: list[int]):
        self.began, self.at, self.pids = time.time(), {}, {f"node {k}": pid for k, pid in enumerate(nodes)}
        self.start: dict[str, float] = {}
        self.used: dict[str, float] = {}

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Note an event."""
        self.at.setdefault(event["event"], event["time"] - self.began)
        if event["event"] == "started":
            self.pids |= {"ServerApp": event["pid"], "SuperLink": child_named("hetperm.federated.superlink")}
        if event["event"] == "settled":
            self.start = {name: cpu(pid) for name, pid in self.pids.items()}
        if event["event"] == "epoch":  # the ServerApp ends with the last event
            self.used = {name: cpu(pid) - self.start[name] for name, pid in self.pids.items()}


def measured(folder: Path, config: configuration.Config, port: int, head: str) -> tuple[dict[str, Any], Clock]:
    """What federation.json says of a run, and its times.

    Args:
        head: lines of code that the server runs first.
    """
    place = local.place_for(config, folder, f"127.0.0.1:{port}", WIDTHS)
    app = place / "server" / "app" / "hetperm_app.py"
    app.write_text(head + app.read_text())
    with local.nodes(place, range(len(WIDTHS))) as running:
        clock = Clock([process.pid for process in running.values()])
        run = serve(ServeOptions(folder=place), clock)
    return json.loads((run / "federation.json").read_text())["costs"], clock


def main() -> None:
    """Measure both ways and print the tables of docs/federation.md."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--port", type=int, default=18900)
    options = parser.parse_args()
    os.environ.update(QUIET)
    config = configuration.load("digits").override(
        num_clients=len(WIDTHS), samples_per_client=30, baselines=(), engine="sequential", epochs=options.epochs,
        steps=options.steps, model="mlp", model_options={"hidden": (200, 200)},
    )  # fmt: skip
    print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as base:
        rows = {
            name: measured(Path(base) / name.split()[0], config, options.port, head)
            for name, head in (("with barriers", BARRIERS), ("without", ""))
        }
    print(f"load of the machine after: {os.getloadavg()[0]:.1f}")
    for name, (costs, clock) in rows.items():
        print(f"\n{name}\njob              jobs packets  s each  bare s  model KiB  down KiB  up KiB")
        for kind, cost in costs.items():
            per = cost["jobs"]
            sizes = [cost[key] / per / 1024 for key in ("model_bytes", "bytes_down", "bytes_up")]
            seconds = cost["seconds"] / per, cost["node_seconds"] / per
            print(f"{kind:16} {per:4} {cost['packets']:7} {seconds[0]:7.3f} {seconds[1]:7.4f}"
                  f" {sizes[0]:10.1f} {sizes[1]:9.1f} {sizes[2]:7.1f}")  # fmt: skip
        print("seconds until:", ", ".join(f"{key} {clock.at[key]:.1f}" for key in
              ("started", "joined", "settled", "done", "epoch", "finished")))  # fmt: skip
        print("CPU s after the start:", ", ".join(f"{key} {value:.2f}" for key, value in clock.used.items()))


if __name__ == "__main__":
    main()
