"""A federation of two machines that share nothing but a wire: network namespaces joined by a veth pair.

What the README of a deployment says is done literally. ``make test-federation``; needs Linux and the right to make
network namespaces.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from real_federation import PORT, config_of, final, heeding_interrupts, same, small

from hetperm.runs import experiment
from hetperm.runs.setting import from_config

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Flower and what it imports warn of their own
    pytest.mark.skipif(
        not (shutil.which("ip") and shutil.which("nsenter"))
        or subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode != 0,
        reason="network namespaces cannot be made here (they need Linux, iproute2, util-linux and root)",
    ),
]
SERVER, OTHER = "10.77.0.1", "10.77.0.2"
ASK = """
import http.client, ssl, sys
host, port, authority = sys.argv[1:]
context = ssl.create_default_context(cafile=authority)
connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=10)
connection.request("POST", "/v1/control/start-run", body=b"")
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""  # what starts programs on the server


class Machine:
    """A network namespace, which ends with the process that holds it."""

    def __init__(self, address: str, path: Path):
        self.address, self.path = address, path
        self.holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        mine = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self.holder.pid}/ns/net").readlink() == mine:
            time.sleep(0.05)

    def command(self, command: Sequence[str | Path]) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-n", *map(str, command)]

    def run(self, *command: str | Path) -> str:
        return subprocess.run(self.command(command), check=True, capture_output=True, text=True).stdout

    def start(self, line: str, cwd: Path) -> subprocess.Popen:
        """Start what a user would type, in a folder."""
        env = {**os.environ, "PATH": f"{self.path}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.Popen(
            self.command(["sh", "-c", f"exec {line}"]), cwd=cwd, env=env, stderr=subprocess.PIPE, text=True
        )

    def listeners(self) -> set[str]:
        return {line.split()[3] for line in self.run("ss", "-Hltn").splitlines()}


heeded = pytest.fixture(autouse=True, scope="module")(heeding_interrupts)


@pytest.fixture
def machines(tmp_path) -> Iterator[tuple[Machine, Machine]]:
    bin_ = tmp_path / "bin"  # `hetperm` on the path, as in an environment that it is installed in
    bin_.mkdir()
    (bin_ / "hetperm").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hetperm "$@"\n')
    (bin_ / "hetperm").chmod(0o755)
    one, other = Machine(SERVER, bin_), Machine(OTHER, bin_)
    try:
        pair = ["ip", "link", "add", "wire", "netns", str(one.holder.pid), "type", "veth"]
        subprocess.run([*pair, "peer", "name", "wire", "netns", str(other.holder.pid)], check=True)
        for machine in (one, other):
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "wire")
            for name in ("lo", "wire"):
                machine.run("ip", "link", "set", name, "up")
        yield one, other
    finally:
        for machine in (one, other):
            machine.holder.kill()
            machine.holder.wait()


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_two_machines_that_follow_the_readme_end_with_the_bits_of_a_simulation(machines, tmp_path):
    one, other = machines
    home, far = tmp_path / "home", tmp_path / "far"
    (tmp_path / "simulation").mkdir()
    for folder in (home, far):
        folder.mkdir()
    # Rounds of half of the nodes and a recipe, as a user may have them.
    config = small(home, participation=0.5, optimizer="adamw", augment="flip-crop", model="cnn", steps=24)
    widths = [client.width for client in from_config(config).clients]
    (home / "my-run.toml").write_text(config.to_toml())
    line = f"hetperm deploy fed --nodes 4 --address {SERVER}:{PORT} --config my-run.toml"
    deploying = one.start(line, home)
    deploying.communicate(timeout=60)
    assert deploying.returncode == 0
    said = (home / "fed" / "README").read_text()
    assert "hetperm serve --folder FOLDER --out RUN" in said and "nodes/K/start.sh --data" in said
    # 1. server/ and run.toml to the server, into one folder. 2. nodes/K to node K.
    for name in ("server", "run.toml"):
        source = home / "fed" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, made(home / "FOLDER") / name)
    hosts = {0: (one, home), 1: (other, far), 2: (other, far), 3: (other, far)}
    for k, (_, folder) in hosts.items():
        shutil.copytree(home / "fed" / "nodes" / str(k), made(folder / "nodes") / str(k))
    shutil.rmtree(home / "fed")

    running = {
        k: machine.start(f"nodes/{k}/start.sh --width {widths[k]}", folder) for k, (machine, folder) in hosts.items()
    }
    heard: dict[str, set[str]] = {SERVER: set(), OTHER: set()}
    try:
        server = one.start("hetperm serve --folder FOLDER --out RUN", home)
        asked = False
        while server.poll() is None:
            for machine in machines:
                heard[machine.address] |= machine.listeners()
            if not asked and heard[SERVER]:
                time.sleep(1)
                refused = other.run(sys.executable, "-c", ASK, SERVER, str(PORT), home / "FOLDER" / "server" / "ca.crt")
                asked = True
            time.sleep(0.2)
        said = server.communicate()[1]
        print(said)
        assert server.returncode == 0, said
    finally:
        for process in running.values():
            process.send_signal(signal.SIGINT)
        ends = [process.communicate(timeout=30)[1] for process in running.values()]
    assert all([lines.splitlines()[-1] == "left the federation" for lines in ends]), ends
    assert heard == {SERVER: {f"{SERVER}:{PORT}"}, OTHER: set()}
    # The far machine may speak as a node, and not start programs.
    assert refused == "403 only nodes may come from other machines\n"
    simulation = experiment.run(config_of(home / "FOLDER", out=tmp_path / "simulation" / "run"))
    assert same(final(home / "RUN", "perm"), simulation.state)
    for k, (_, folder) in hosts.items():
        name = f"client_00{k}.safetensors"
        kept = folder / "nodes" / str(k) / "models" / name
        assert kept.read_bytes() == (simulation.folder / "models" / name).read_bytes()
