"""A deployed federation of real processes, and what tests do to it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from flower_loopback import WIDTHS

from hetperm.config import Config, load
from hetperm.federated import local
from hetperm.federated.options import ServeOptions
from hetperm.federated.places import RUN
from hetperm.federated.serve import serve
from hetperm.runs import checkpoint
from hetperm.runs.setting import from_config

PORT = int(os.environ.get("HETPERM_PORT", "18800"))
LIAR = Path(__file__).with_name("lying_node.py")


def small(folder: Path, **settings) -> Config:
    (folder / "widths.toml").write_text(WIDTHS)
    given = {"algorithm": "perm", "baselines": (), "num_clients": 4, "samples_per_client": 30, "model": "mlp"}
    given |= {"capacity_profile": str(folder / "widths.toml"), "engine": "sequential", "steps": 40, "epochs": 2}
    return Config(**(given | settings))


def deployed(base: Path) -> Path:
    """A deployed federation of four nodes of three widths."""
    config = small(base)
    widths = tuple(client.width for client in from_config(config).clients)
    return local.place_for(config, base / "deployed", f"127.0.0.1:{PORT}", widths)


def end(nodes: dict[int, subprocess.Popen], k: int) -> None:
    """End a node as a crash would (kill -9)."""
    nodes[k].kill()
    nodes[k].wait()


def restart(place: Path, nodes: dict[int, subprocess.Popen], k: int) -> None:
    end(nodes, k)
    nodes[k] = local.start_node(place, k)


def odd_node(place: Path, k: int, what: str, log: Path | None = None) -> subprocess.Popen:
    """Start a node that lies, is slow, or has a wrong clock; what it says goes to a file, if one is named."""
    with contextlib.nullcontext() if log is None else log.open("wb") as output:
        return subprocess.Popen([sys.executable, str(LIAR), str(place / "nodes" / str(k)), what], stderr=output)


def heeding_interrupts() -> Iterator[None]:
    """Let processes that are started heed Ctrl-C, also if these tests run where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Watch:
    """Collects events, and calls a function once when one fits."""

    def __init__(self, fits: Callable[[dict], bool] = lambda event: False, then: Callable[[], None] = lambda: None):
        self.seen: list[dict] = []
        self.fits, self.then = fits, then

    def __call__(self, event) -> None:
        self.seen.append(dict(event))
        if self.then and self.fits(event):
            act, self.then = self.then, None
            act()

    def of(self, what: str) -> list[dict]:
        return [event for event in self.seen if event["event"] == what]


def served(place: Path, out: str, watch: Watch | None = None, changes: dict | None = None, **options) -> Path:
    watch = watch or Watch()
    try:
        return serve(ServeOptions(folder=place, out=place / out, **{"wait": 300.0, **options}), watch, changes=changes)
    finally:
        lines = [event for event in watch.seen if event["event"] not in ("sent", "done")]
        print(out, *lines, sep="\n  ")


def final(folder: Path, method: str):
    return checkpoint.load(folder / "checkpoint" / f"{method}.safetensors", "cpu").state


def same(one, other) -> bool:
    pairs = zip(one.deployed, other.deployed, strict=True)
    return all([torch.equal(a[name], b[name]) for a, b in pairs for name in a])


def config_of(place: Path, **changes) -> Config:
    return load(place / RUN).override(**changes)
