"""Federations of real processes: a SuperLink, four nodes over TLS, faults. Minutes long; ``make test-federation``.

Not part of the suite (its name says so to pytest): it needs Flower, and it starts, stops and kills processes.
"""

import csv
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from real_federation import PORT, Watch, config_of, deployed, end, final, odd_node, restart, same, served

from hetperm.federated import local
from hetperm.federated.places import RUN
from hetperm.federated.serve import EVENTS, events
from hetperm.runs import experiment

pytestmark = pytest.mark.filterwarnings("default")  # Flower and what it imports warn of their own
METHODS = ("perm", "perm-two-stage", "heterofl-ft", "fjord-ft")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return deployed(tmp_path_factory.mktemp("federation"))


@pytest.fixture(scope="module")
def nodes(place):
    with local.nodes(place, range(4)) as running:
        yield running


def listeners() -> list[str]:
    """Local addresses on which anything listens."""
    table = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    return [line.split()[3] for line in table.splitlines()]


def test_four_methods_end_with_the_bits_of_a_simulation(place, nodes, tmp_path):
    heard: set[str] = set()
    stop = threading.Event()

    def listen():
        while not stop.wait(0.2):
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
    # Lost if Flower misses its heartbeat first, restarted if it is back before that.
    assert re.search(r" at host 1: it was (lost|restarted)", watch.of("failed")[0]["detail"])
    assert same(final(run, "perm"), simulated.state)


@pytest.mark.parametrize("when", ["in a visit", "in mid-upload"])
def test_a_node_that_is_stopped_past_the_deadline_is_absent_and_comes_back(place, nodes, when):
    def stop() -> None:
        nodes[2].send_signal(signal.SIGSTOP)
        watch.fits, watch.then = is_away, wake

    def is_away(event) -> bool:
        return event["event"] == "absent" and event["host"] == 2

    def wake() -> None:
        nodes[2].send_signal(signal.SIGCONT)

    if when == "in a visit":
        watch = Watch(visit_at(2), stop)
    else:
        end(nodes, 2)
        nodes[2] = odd_node(place, 2, "halts")  # it stops itself
        watch = Watch(is_away, wake)
    try:
        run = served(place, f"stopped {when}", watch, deadline=25.0, changes={"epochs": 6, "steps": 180})
    finally:
        restart(place, nodes, 2)
    assert [(event["host"], event["detail"]) for event in watch.of("absent")] == [(2, "no answer within 25 s")]
    (back,) = [k for k, event in enumerate(watch.seen) if event["event"] == "back" and event["host"] == 2]
    assert [event for event in watch.seen[back:] if event["event"] == "done" and event["host"] == 2]
    told = json.loads((run / "federation.json").read_text())["nodes"][2]
    assert told["events"]["absent"] == 1 and "no answer within 25 s" in told["reasons"][-1] and not told["absent_now"]


def test_a_server_that_is_killed_goes_on_with_the_same_bits(place, nodes, simulated):
    command = [sys.executable, "-m", "hetperm", "serve", "--folder", str(place), "--out", str(place / "again")]
    path = place / "server" / EVENTS
    begin = path.stat().st_size if path.exists() else 0
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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


def test_a_node_that_dies_in_the_warm_up_is_absent_in_every_phase(place, nodes):
    end(nodes, 1)
    nodes[1], watch = odd_node(place, 1, "dies"), Watch()
    try:
        run = served(place, "dead", watch, patience=5.0)
    finally:
        restart(place, nodes, 1)
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
    run = served(place, "late", watch, wait=30.0, changes=changes)
    assert watch.of("back")[0] | {"time": 0} == {"event": "back", "host": 3, "detail": "it came late", "time": 0}
    table = json.loads((run / "federation.json").read_text())["nodes"][3]
    assert table["n_train"] == 30 and table["events"]["done"] > 0 and not table["absent_now"]
