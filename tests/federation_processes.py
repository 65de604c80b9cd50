"""Federations of real processes: a SuperLink, four nodes over TLS, faults. Minutes long; ``make test-federation``.

Not part of the suite (its name says so to pytest): it needs Flower, and it starts, stops and kills processes.
"""

import contextlib
import csv
import json
import os
import re
import signal
import socket
import ssl
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
from hetperm.federated.places import RUN, server_place
from hetperm.federated.serve import EVENTS, LOG, events, serve, superlink
from hetperm.runs import experiment
from hetperm.runs.checkpoint import load
from hetperm.runs.setting import from_config

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
    config = small(base)
    widths = tuple(client.width for client in from_config(config).clients)
    return local.place_for(config, base / "deployed", f"127.0.0.1:{PORT}", widths)


@pytest.fixture(scope="module")
def nodes(place) -> Iterator[dict[int, subprocess.Popen]]:
    with local.nodes(place, range(4)) as running:
        yield running


def end(nodes: dict[int, subprocess.Popen], k: int) -> None:
    """End a node as a crash would (kill -9)."""
    nodes[k].kill()
    nodes[k].wait()


def restart(place: Path, nodes: dict[int, subprocess.Popen], k: int) -> None:
    end(nodes, k)
    nodes[k] = local.start_node(place, k)


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
    print("listening before:", sorted(before), "and while it ran:", sorted(heard - before))
    assert new == {f"127.0.0.1:{PORT}"}
    assert not [address for address in heard - before if re.match(r"(0\.0\.0\.0|\*|\[::\]):", address)]
    print("\n".join(local.costs(run)))


def test_a_model_with_batch_norms_ends_with_the_same_bits_at_the_nodes(place, nodes, tmp_path):
    changes = {"model": "timm:test_resnet", "image_size": 16, "steps": 12, "epochs": 1, "warmup_rounds": 1}
    for folder in (place / "nodes").iterdir():  # the size of images is the nodes' to know
        (folder / RUN).write_text(config_of(place, **changes).to_toml())
    for k in nodes:
        restart(place, nodes, k)
    changes["baselines"] = METHODS[1:]
    run = served(place, "normed", changes=changes)
    simulation = experiment.run(config_of(place, **changes, out=tmp_path / "simulation"))
    for method in METHODS:
        assert same(final(run, method), final(simulation.folder, method)), method
    for k in range(4):
        name = f"client_00{k}.safetensors"
        kept = place / "nodes" / str(k) / "models" / name
        assert kept.read_bytes() == (simulation.folder / "models" / name).read_bytes()
    for folder in (place / "nodes").iterdir():
        (folder / RUN).write_text((place / RUN).read_text())
    for k in nodes:
        restart(place, nodes, k)


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


def odd_node(place: Path, k: int, what: str) -> subprocess.Popen:
    """Start a node that lies, or is slow."""
    return subprocess.Popen([sys.executable, str(LIAR), str(place / "nodes" / str(k)), what])


def test_a_node_that_is_killed_in_a_visit_and_comes_back_costs_nothing(place, nodes, simulated):
    end(nodes, 1)
    nodes[1] = odd_node(place, 1, "slow")
    working, killed = place / "nodes" / "1" / "working", []

    def kill() -> None:
        until = time.monotonic() + 400
        while not working.exists() and time.monotonic() < until:
            time.sleep(0.1)
        killed.append(working.exists())
        restart(place, nodes, 1)

    thread = threading.Thread(target=kill)
    thread.start()
    watch = Watch()
    run = served(place, "killed", watch, deadline=200.0, patience=200.0)
    thread.join()
    assert killed == [True]  # in the midst of a visit
    assert watch.of("restarted")[0]["host"] == 1 and not watch.of("absent")
    assert " at host 1: it was restarted" in watch.of("failed")[0]["detail"]
    assert same(final(run, "perm"), simulated.state)


def test_a_node_that_is_stopped_past_the_deadline_is_absent_and_comes_back(place, nodes):
    def stop() -> None:
        nodes[2].send_signal(signal.SIGSTOP)
        watch.fits = lambda event: event["event"] == "absent" and event["host"] == 2
        watch.then = lambda: nodes[2].send_signal(signal.SIGCONT)

    watch = Watch(visit_at(2), stop)
    run = served(place, "stopped", watch, deadline=45.0, changes={"epochs": 6, "steps": 180})
    assert [(event["host"], event["detail"]) for event in watch.of("absent")] == [(2, "no answer within 45 s")]
    (back,) = [k for k, event in enumerate(watch.seen) if event["event"] == "back" and event["host"] == 2]
    assert [event for event in watch.seen[back:] if event["event"] == "done" and event["host"] == 2]
    told = json.loads((run / "federation.json").read_text())["nodes"][2]
    assert told["events"]["absent"] == 1 and "no answer within 45 s" in told["reasons"][-1] and not told["absent_now"]


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


LIES = {"nan": "not finite", "shape": "was due", "width": "was due", "garbage": "the message cannot be read"}


@pytest.mark.parametrize("lie", LIES)
def test_a_node_that_lies_is_left_out_and_the_run_ends(place, nodes, lie):
    end(nodes, 3)
    liar, watch = odd_node(place, 3, lie), Watch()
    try:
        run = served(place, f"lie-{lie}", watch, tries=2, changes={"steps": 20, "epochs": 1})
    finally:
        liar.kill()
        liar.wait()
        nodes[3] = local.start_node(place, 3)
    assert watch.of("absent")[0]["host"] == 3 and {event["host"] for event in watch.of("failed")} == {3}
    reasons = json.loads((run / "federation.json").read_text())["nodes"][3]["reasons"]
    assert all([LIES[lie] in reason for reason in reasons]), reasons
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


def test_a_node_that_dies_in_the_warm_up_is_absent_in_every_phase(place, nodes):
    watch = Watch(lambda event: event["event"] == "sent" and "round 0" in event["detail"], lambda: end(nodes, 1))
    try:
        run = served(place, "dead", watch, patience=5.0)
    finally:
        nodes[1] = local.start_node(place, 1)
    assert "did not come back within 5 s" in watch.of("absent")[0]["detail"]
    with (run / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["accuracy"]) for row in rows] == [True, False, True, True]
    assert [row["absent"] for row in rows] == ["0", rows[1]["asked"], "0", "0"]


def test_a_run_without_a_quorum_stops_and_goes_on_with_the_same_bits_when_nodes_are_back(place, nodes, simulated):
    watch = Watch(lambda event: event["event"] == "epoch", lambda: [end(nodes, k) for k in (0, 2)])
    with pytest.raises(RuntimeError, match=r"2 of 4 nodes are there and the quorum is 3 .*--resume"):
        served(place, "quorum", watch, patience=5.0, quorum=0.75)
    assert not (place / "quorum" / "report.html").exists()
    for k in (0, 2):
        nodes[k] = local.start_node(place, k)
    assert same(final(served(place, "quorum", resume=True), "perm"), simulated.state)


def test_a_node_that_comes_late_is_taken_in(place, nodes):
    def come():
        nodes[3] = local.start_node(place, 3)

    end(nodes, 3)
    watch = Watch(lambda event: event["event"] == "epoch", come)
    changes = {"epochs": 12, "steps": 400, "alpha_every": 1}
    run = served(place, "late", watch, wait=60.0, changes=changes)
    assert watch.of("back")[0] | {"time": 0} == {"event": "back", "host": 3, "detail": "it came late", "time": 0}
    table = json.loads((run / "federation.json").read_text())["nodes"][3]
    assert table["n_train"] == 30 and table["events"]["done"] > 0 and not table["absent_now"]


def test_a_body_that_is_too_large_is_refused_with_one_line_before_it_is_read(place):
    server = server_place(place)
    begin = (server.folder / LOG).stat().st_size
    context = ssl.create_default_context(cafile=str(place / "ca.crt"))
    head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: {server.address}\r\ncontent-length: {2**40}\r\n\r\n"
    with (
        superlink(server),
        socket.create_connection(("127.0.0.1", PORT)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as wire,
    ):
        wire.sendall(head.encode())
        assert wire.recv(4096).startswith(b"HTTP/1.1 413")
    said = (server.folder / LOG).read_bytes()[begin:].decode()
    assert said.count("refused /v1/fleet/push-object from 127.0.0.1: a body of 1,099,511,627,776 bytes") == 1


def test_a_node_refuses_replayed_and_oversized_packets_and_nonsense_with_one_line_each(place, nodes):
    app, log = place / "server" / "app" / "hetperm_app.py", place / "nodes" / "0" / "node.log"
    for k in nodes:
        end(nodes, k)
    nodes[0] = local.start_node(place, 0, "--largest-mb", "1")
    honest, begin, watch = app.read_text(), log.stat().st_size, Watch()
    app.write_text(
        f"import sys\n\nsys.path.insert(0, {str(LIAR.parent)!r})\nfrom hostile_server import client, server\n"
    )
    try:
        served(place, "hostile", watch)
    finally:
        app.write_text(honest)
        end(nodes, 0)
        for k in nodes:
            nodes[k] = local.start_node(place, k)
    first, second, large, last = [event["detail"] for event in watch.of("answered")]
    assert first.startswith("need") and "replayed" in second and "larger than the 1,048,576" in large
    assert last.startswith("pong")  # whatever came, the node lives
    said = log.read_bytes()[begin:].decode()
    lines = [
        "refused a message: a message without a packet",
        "is replayed",
        "larger than the 1,048,576 that are allowed",
    ]
    assert [said.count(line) for line in lines] == [1, 1, 1]


def test_an_expired_certificate_is_refused_with_one_line_by_the_server_and_by_nodes(place, nodes):
    server = place / "server"
    kept = {name: (server / name).read_bytes() for name in ("server.pem", "server.key")}
    certificates.server_certificate(server, place, ["127.0.0.1"], days=-1)
    begin = {k: (place / "nodes" / str(k) / "node.log").stat().st_size for k in nodes}
    try:
        with pytest.raises(RuntimeError, match="the certificate of the server has expired"):
            served(place, "expired")
        listen_for(15, server)
    finally:
        for name, content in kept.items():
            (server / name).write_bytes(content)
    for k in nodes:
        said = (place / "nodes" / str(k) / "node.log").read_bytes()[begin[k] :].decode()
        assert said.count("has expired; make a new one with `hetperm deploy --renew`") == 1


def listen_for(seconds: float, folder: Path) -> None:
    """Accept connections with the certificate in a folder, as somebody would who took the server's place."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    until = time.monotonic() + seconds
    with socket.create_server(("127.0.0.1", PORT)) as listening:
        listening.settimeout(1)
        while time.monotonic() < until:
            with contextlib.suppress(OSError):  # who refuses the certificate breaks off
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(5)
                    context.wrap_socket(connection, server_side=True).close()
