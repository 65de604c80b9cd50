"""Federations of real processes: a SuperLink, four nodes over TLS, faults. Minutes long; ``make test-federation``.

Not part of the suite (its name says so to pytest): it needs Flower, and it starts, stops and kills processes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flower_loopback import WIDTHS

from hetperm.config import Config
from hetperm.federated import certificates, local
from hetperm.federated.options import ServeOptions
from hetperm.federated.places import RUN
from hetperm.federated.serve import EVENTS, events, serve
from hetperm.runs import experiment
from hetperm.runs.checkpoint import load

pytestmark = pytest.mark.filterwarnings("default")  # Flower and what it imports warn of their own
METHODS = ("perm", "perm-two-stage", "heterofl-ft", "fjord-ft")
PORT = int(os.environ.get("HETPERM_PORT", "18800"))
LIAR = Path(__file__).with_name("lying_node.py")


def small(folder: Path, **settings) -> Config:
    (folder / "widths.toml").write_text(WIDTHS)
    given = {"algorithm": "perm", "baselines": (), "num_clients": 4, "samples_per_client": 30, "model": "mlp"}
    given |= {"capacity_profile": str(folder / "widths.toml"), "engine": "sequential", "steps": 40, "epochs": 2}
    return Config(**(given | settings))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A deployed federation of four nodes of three widths."""
    base = tmp_path_factory.mktemp("federation")
    return local.place_for(small(base), base / "deployed", f"127.0.0.1:{PORT}")


@pytest.fixture(scope="module")
def nodes(place) -> Iterator[dict[int, subprocess.Popen]]:
    with local.nodes(place, range(4)) as running:
        yield running


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
        return serve(ServeOptions(folder=place, out=place / out, wait=300.0, **options), watch, changes=changes)
    finally:
        lines = [event for event in watch.seen if event["event"] not in ("sent", "done")]
        print(out, *lines, sep="\n  ")


def final(folder: Path, method: str):
    return load(folder / "checkpoint" / f"{method}.safetensors", "cpu").state


def same(one, other) -> bool:
    pairs = zip(one.deployed, other.deployed, strict=True)
    return all([torch.equal(a[name], b[name]) for a, b in pairs for name in a])


def config_of(place: Path, **changes) -> Config:
    from hetperm import config

    return config.load(place / RUN).override(**changes)


def listeners() -> list[str]:
    """Local addresses on which anything listens."""
    table = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    return [line.split()[3] for line in table.splitlines()]


def test_four_methods_end_with_the_bits_of_a_simulation(place, nodes, tmp_path):
    heard: set[str] = set()
    stop = threading.Event()

    def listen():
        while not stop.wait(0.5):
            heard.update(listeners())

    thread = threading.Thread(target=listen)
    before = set(listeners())
    thread.start()
    try:
        run = served(place, "all", changes={"baselines": METHODS[1:]})
    finally:
        stop.set()
        thread.join()
    simulation = experiment.run(config_of(place, baselines=METHODS[1:], out=tmp_path / "simulation"))
    for method in METHODS:
        assert same(final(run, method), final(simulation.folder, method)), method
    for k in range(4):
        name = f"client_00{k}.safetensors"
        kept = place / "nodes" / str(k) / "models" / name
        assert kept.read_bytes() == (simulation.folder / "models" / name).read_bytes()
    new = {address for address in heard - before if address.endswith(f":{PORT}")}
    print("listening while it ran:", sorted(heard - before))
    assert new == {f"127.0.0.1:{PORT}"}
    assert not [address for address in heard - before if re.match(r"(0\.0\.0\.0|\*|\[::\]):", address)]
    print("\n".join(local.costs(run)))


def test_a_model_with_batch_norms_ends_with_the_same_bits_at_the_nodes(place, nodes, tmp_path):
    changes = {"model": "timm:test_resnet", "image_size": 16, "steps": 12, "epochs": 1, "warmup_rounds": 1}
    for folder in (place / "nodes").iterdir():  # the size of images is the nodes' to know
        (folder / RUN).write_text(config_of(place, **changes).to_toml())
    for k in nodes:
        nodes[k].kill()
        nodes[k].wait()
        nodes[k] = local.start_node(place, k)
    run = served(place, "normed", changes=changes)
    simulation = experiment.run(config_of(place, **changes, out=tmp_path / "simulation"))
    assert same(final(run, "perm"), final(simulation.folder, "perm"))
    for k in range(4):
        name = f"client_00{k}.safetensors"
        kept = place / "nodes" / str(k) / "models" / name
        assert kept.read_bytes() == (simulation.folder / "models" / name).read_bytes()
    for folder in (place / "nodes").iterdir():
        (folder / RUN).write_text((place / RUN).read_text())
    for k in nodes:
        nodes[k].kill()
        nodes[k].wait()
        nodes[k] = local.start_node(place, k)


def visit_at(host: int, number: int = 1) -> Callable[[dict], bool]:
    """Whether an event is the sending of the so-manieth visit to a host."""
    seen = []

    def fits(event) -> bool:
        if event["event"] == "sent" and event["host"] == host and " at host " in event["detail"]:
            seen.append(event)
        return len(seen) == number

    return fits


@pytest.fixture(scope="module")
def simulated(place, tmp_path_factory):
    """What the run of the faults ends in without any."""
    return experiment.run(config_of(place, out=tmp_path_factory.mktemp("plain") / "run"))


def test_a_node_that_is_killed_in_a_visit_and_comes_back_costs_nothing(place, nodes, simulated):
    def kill():
        nodes[1].kill()
        nodes[1].wait()
        nodes[1] = local.start_node(place, 1)

    watch = Watch(visit_at(1), kill)
    run = served(place, "killed", watch, deadline=200.0, patience=200.0)
    assert watch.of("restarted") and not watch.of("absent")
    assert same(final(run, "perm"), simulated.state)


def test_a_node_that_is_stopped_past_the_deadline_is_absent_and_comes_back(place, nodes):
    def stop():
        nodes[2].send_signal(signal.SIGSTOP)
        threading.Timer(60, lambda: nodes[2].send_signal(signal.SIGCONT)).start()

    watch = Watch(visit_at(2), stop)
    run = served(place, "stopped", watch, deadline=30.0, changes={"epochs": 4, "steps": 120})
    assert "no answer within 30 s" in watch.of("absent")[0]["detail"]
    table = json.loads((run / "federation.json").read_text())
    # Hosts are numbered in the order in which they came, which need not be that of the processes.
    assert sum(node["events"].get("absent", 0) for node in table["nodes"]) >= 1
    nodes[2].send_signal(signal.SIGCONT)


def test_a_server_that_is_killed_goes_on_with_the_same_bits(place, nodes, simulated):
    command = [sys.executable, "-m", "hetperm", "serve", "--folder", str(place), "--out", str(place / "again")]
    path = place / "server" / EVENTS
    begin = path.stat().st_size if path.exists() else 0
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until, killed = time.monotonic() + 400, False
    while time.monotonic() < until and not killed:
        for event in events(path, begin):
            if event["event"] == "epoch":
                first.kill()  # the SuperLink and the ServerApp follow by themselves, as after a crash of the machine
                first.wait()
                killed = True
                break
        time.sleep(0.2)
    assert killed
    saved = final(place / "again", "perm").r
    run = served(place, "again", resume=True)
    assert saved >= 1
    assert same(final(run, "perm"), simulated.state)


@pytest.mark.parametrize("lie", ["nan", "shape", "width"])
def test_a_node_that_lies_is_left_out_and_the_run_ends(place, nodes, lie):
    nodes[3].kill()
    nodes[3].wait()
    liar = subprocess.Popen([sys.executable, str(LIAR), str(place / "nodes" / "3"), lie])
    watch = Watch()
    try:
        run = served(place, f"lie-{lie}", watch, tries=2, changes={"steps": 20, "epochs": 1})
    finally:
        liar.kill()
        liar.wait()
        nodes[3] = local.start_node(place, 3)
    assert watch.of("absent")[0]["host"] == 3
    assert json.loads((run / "federation.json").read_text())["nodes"][3]["reasons"]
    state = final(run, "perm")
    assert all([bool(x.isfinite().all()) for v in state.deployed for x in v.values()])


def test_a_node_without_a_registered_key_is_refused_with_one_line(place, nodes, tmp_path):
    stranger = tmp_path / "nodes" / "9"
    stranger.mkdir(parents=True)
    for name in ("ca.crt", "node.toml", RUN):
        (stranger / name).write_bytes((place / "nodes" / "0" / name).read_bytes())
    certificates.node_key(stranger / "node.key", tmp_path / "9.pub")
    process = local.start_node(tmp_path, 9)
    try:
        served(place, "stranger", changes={"steps": 12, "epochs": 1})
    finally:
        process.kill()
        process.wait()
    lines = (stranger / "node.log").read_text()
    assert lines.count("does not know this node") == 1


def test_an_expired_certificate_is_refused_with_one_line(place, nodes):
    server = place / "server"
    kept = {name: (server / name).read_bytes() for name in ("server.pem", "server.key")}
    certificates.server_certificate(server, place, ["127.0.0.1"], days=-1)
    try:
        with pytest.raises(RuntimeError, match="the certificate of the server has expired"):
            served(place, "expired")
    finally:
        for name, content in kept.items():
            (server / name).write_bytes(content)
