"""One run on two nodes of a Ray cluster, each in a network namespace of its own: the bits of the sequential engine,
also if a node is killed in the middle of a round.

Run by `make test-ray-nodes`, as root: the namespaces are joined by a pair of virtual interfaces and by nothing else,
and every node has a temporary folder of its own. Needs the extra `ray`.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("ray", reason="needs the extra ray")

ROOT = Path(__file__).resolve().parent.parent
HEAD, OTHER = "10.77.0.1", "10.77.0.2"  # inside the namespaces only
PORT = 6379
SECONDS = 120  # that anything may take to happen
JOB = (
    *("--model", "cnn", "--num-clients", "6", "--samples-per-client", "60", "--steps", "120", "--epochs", "3"),
    *("--baselines", "", "--seed", "3"),
)


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


def made(*command: str) -> None:
    """Run a command that makes a namespace or an interface; skip all tests here if the system forbids it."""
    done = run(*command)
    if done.returncode:
        pytest.skip(f"no network namespaces can be made here: {' '.join(command)}: {done.stderr.strip()}")


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, f"{what} did not happen within {SECONDS} s"
        time.sleep(0.1)


class Nodes:
    """Two namespaces with an address each, and what runs in them."""

    def __init__(self, folder: Path):
        self.folder, self.names = folder, {HEAD: f"hetperm-a-{os.getpid()}", OTHER: f"hetperm-b-{os.getpid()}"}
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }

    def open(self) -> None:
        """Make the namespaces, and the only way between them."""
        ends = [f"hp{k}-{os.getpid()}"[:15] for k in range(2)]
        for name in self.names.values():
            made("ip", "netns", "add", name)
            made("ip", "-n", name, "link", "set", "lo", "up")
        made("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for (address, name), end in zip(self.names.items(), ends, strict=True):
            made("ip", "link", "set", end, "netns", name)
            made("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            made("ip", "-n", name, "link", "set", end, "up")

    def close(self) -> None:
        """End what runs in the namespaces, and remove them."""
        for address, name in self.names.items():
            self.kill(address)
            run("ip", "netns", "delete", name)

    def pids(self, address: str) -> list[int]:
        return [int(word) for word in run("ip", "netns", "pids", self.names[address]).stdout.split()]

    def kill(self, address: str) -> None:
        """Kill every process of a node, each by its id."""
        for _ in range(20):
            for pid in self.pids(address):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self.pids(address):
                return
            time.sleep(0.2)

    def start(self, address: str) -> None:
        """`ray start` on a node, with one core."""
        where = ["--head", "--port", str(PORT), "--include-dashboard", "false", "--temp-dir", str(self.folder / "ray")]
        own = ""
        if address != HEAD:
            where = ["--address", f"{HEAD}:{PORT}"]
            own = f"mount -t tmpfs tmpfs {self.folder / 'ray'} && "  # what the head has there is on another machine
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--node-ip-address", address, "--num-cpus", "1"]
        command = [*ray, "--object-store-memory", "200000000", "--disable-usage-stats", *where]
        inside = ["unshare", "-m", "sh", "-c", f'{own}exec "$@"', "sh", *command]
        done = subprocess.run(
            ["ip", "netns", "exec", self.names[address], *inside], capture_output=True, text=True, env=self.env
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def train(self, out: Path, *flags: str) -> subprocess.Popen:
        """`hetperm train` on the first node."""
        command = [sys.executable, "-m", "hetperm", "train", *JOB, "--quiet", "--out", str(out), *flags]
        inside = ["ip", "netns", "exec", self.names[HEAD], *command]
        return subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env)

    def actors(self, address: str) -> list[int]:
        """The actors of hetperm on a node."""
        return [pid for pid in self.pids(address) if title(pid).startswith(b"ray::Host")]


def title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def nodes():
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("needs root, ip and unshare, to make network namespaces")
    folder = Path(tempfile.mkdtemp(prefix="hp-"))  # short: paths of sockets may have about 100 characters
    (folder / "ray").mkdir()
    found = Nodes(folder)
    try:
        found.open()
        found.start(HEAD)
        found.start(OTHER)
        yield found
    finally:
        found.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def sequential(nodes) -> Path:
    """The run of the sequential engine."""
    out = nodes.folder / "sequential"
    finished(nodes.train(out, "--engine", "sequential"))
    return out


def finished(process: subprocess.Popen) -> str:
    """What a run that ended well said on stderr."""
    _, said = process.communicate(timeout=10 * SECONDS)
    assert process.returncode == 0, said
    return said


def ray_flags() -> list[str]:
    return ["--engine", "ray", "--address", f"{HEAD}:{PORT}", "--workers", "2"]


def assert_same(a: Path, b: Path) -> None:
    """Two runs have the same models to the bit, and the same metrics."""
    assert (a / "metrics.csv").read_text() == (b / "metrics.csv").read_text()
    files = sorted((a / "models").glob("*.safetensors"))
    assert len(files) == 6
    for file in files:
        one, other = load_file(file), load_file(b / "models" / file.name)
        assert one.keys() == other.keys() and all([torch.equal(one[name], other[name]) for name in one])


def test_two_nodes_share_the_work_and_give_the_bits_of_the_sequential_engine(nodes, sequential):
    out = nodes.folder / "two"
    process = nodes.train(out, *ray_flags())
    until(lambda: nodes.actors(HEAD) and nodes.actors(OTHER), "an actor on each node")
    assert "lost" not in finished(process)
    assert_same(out, sequential)


def test_a_run_completes_with_the_same_bits_when_a_node_is_killed_in_the_middle_of_a_round(nodes, sequential):
    out = nodes.folder / "killed"
    process = nodes.train(out, *ray_flags())
    until(lambda: nodes.actors(OTHER), "an actor on the other node")
    # After the first epoch there are only rounds of visits, one after the other.
    until(lambda: (out / "metrics.csv").exists() or process.poll() is not None, "the first epoch")
    assert process.poll() is None
    nodes.kill(OTHER)
    assert "an actor was lost" in finished(process)
    assert_same(out, sequential)
