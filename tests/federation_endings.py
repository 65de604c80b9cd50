"""How a federation of real processes ends when it is stopped: nobody is left behind. ``make test-federation``."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_federation import PORT, deployed, heeding_interrupts, restart

from hetperm.federated import local
from hetperm.federated.serve import EVENTS, events

pytestmark = pytest.mark.filterwarnings("default")  # Flower and what it imports warn of their own
ENDING = 30.0  # seconds until nobody may be left
heeded = pytest.fixture(autouse=True, scope="module")(heeding_interrupts)


def processes_of(folder: Path) -> dict[int, str]:
    """Number -> command of all processes that name a folder in their command or environment, but this one."""
    found, name = {}, os.fsencode(folder)
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes()
            if command and name in command + (place / "environ").read_bytes():
                found[int(place.name)] = command.replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended
    return found


def nobody_left(folder: Path) -> bool:
    until = time.monotonic() + ENDING
    while processes_of(folder) and time.monotonic() < until:
        time.sleep(0.2)
    print(*processes_of(folder).values(), sep="\n")
    return not processes_of(folder)


def begun(command: list[str], folder: Path, what: str = "epoch") -> subprocess.Popen:
    """A command in a process group of its own, as a shell starts it, when the first such event has been told."""
    path = folder / "server" / EVENTS
    begin = path.stat().st_size if path.exists() else 0
    process = subprocess.Popen(
        [sys.executable, "-m", "hetperm", *command],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 200
    while not any([event["event"] == what for event in events(path, begin)]):
        assert process.poll() is None and time.monotonic() < until, process.stderr.read()
        time.sleep(0.1)
    return process


def last_line(process: subprocess.Popen) -> str:
    said = process.communicate(timeout=ENDING)[1]
    assert "Traceback" not in said, said
    return said.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_a_demonstration_that_is_stopped_or_killed_leaves_no_process(tmp_path, number):
    folder = tmp_path / "shown"
    command = ["federate", "--out", str(folder), "--port", str(PORT), "--nodes", "2", "--epochs", "30"]
    process = begun([*command, "--steps", "300"], folder)
    assert len(processes_of(folder)) >= 5  # itself, the SuperLink, the ServerApp and two nodes
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal sends Ctrl-C: to all of them
    else:
        process.send_signal(number)
    if number != signal.SIGKILL:
        assert last_line(process) == f"stopped, and all processes ended; {folder} has what they wrote"
    assert process.wait(ENDING) == (-number if number == signal.SIGKILL else 128 + number)
    process.stderr.close()
    assert nobody_left(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return deployed(tmp_path_factory.mktemp("federation"))


@pytest.fixture(scope="module")
def nodes(place):
    with local.nodes(place, range(4)) as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_a_server_that_is_stopped_leaves_only_the_nodes_and_goes_on(place, nodes, number):
    command = ["serve", "--folder", str(place), "--out", str(place / number.name)]
    process = begun(command, place)
    os.killpg(process.pid, number)
    said = "stopped; the same command with --resume goes on after the last epoch that was finished"
    assert last_line(process) == said and process.returncode == 128 + number
    until = time.monotonic() + ENDING
    ours = {node.pid for node in nodes.values()}
    while processes_of(place).keys() - ours and time.monotonic() < until:
        time.sleep(0.2)
    assert processes_of(place).keys() == ours
    if number == signal.SIGTERM:  # once is enough
        return
    again = subprocess.run([sys.executable, "-m", "hetperm", *command, "--resume"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert (place / number.name / "report.html").exists()


def test_a_node_that_is_stopped_says_so_and_the_server_knows_at_once(place, nodes):
    log = place / "nodes" / "2" / "node.log"
    begin = log.stat().st_size
    nodes[2].send_signal(signal.SIGINT)
    assert nodes[2].wait(ENDING) == 0
    assert log.read_bytes()[begin:].decode().splitlines()[-1] == "left the federation"
    restart(place, nodes, 2)


def test_a_server_whose_port_is_taken_says_so_and_starts_nothing(place, tmp_path):
    with socket.create_server(("127.0.0.1", PORT)):
        for command in (
            ["serve", "--folder", str(place), "--out", str(tmp_path / "run")],
            ["federate", "--port", str(PORT)],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "hetperm", *command], capture_output=True, text=True, cwd=tmp_path, check=False
            )
            assert done.returncode == 2
            assert f"cannot listen on 127.0.0.1:{PORT} (Address already in use); " in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())
