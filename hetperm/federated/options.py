"""Flags of the commands for federations. Imports no torch, for --help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hetperm.checks import Check, check_fields, number, path, text, whole

SECONDS = number(lambda x: 0 < x < 1e6, "a number of seconds above 0")
WIDTH = number(lambda x: 0 < x <= 1, "a number above 0, at most 1")
PORT = 8000


def each(check: Check) -> Check:
    """A check of a list, of which every item must pass; items may be equal."""
    return lambda name, values: tuple(check(name, value) for value in values)


@dataclass(frozen=True)
class NodeOptions:
    """Take part in a federation with the data of this machine. Data stay here; models come, are trained, and go."""

    folder: Annotated[Path, path] = Path(".")
    """Folder of this node that `hetperm deploy` wrote: node.toml, its key, the server's certificate."""
    data: str | None = None
    """Data of this node: npz:PATH, imagefolder:PATH, another data set, or module:function, which returns a
    hetperm.Client; None: the share that the run's configuration deals to this client."""
    width: Annotated[float | None, WIDTH] = None
    """Share of the model's channels that this device trains; None: that of node.toml, or as --device-mb allows."""
    device_mb: Annotated[float | None, number(lambda x: x > 0, "a number of MiB above 0")] = None
    """Memory for training on this device, in MiB: the width is the largest of 1, 1/2, 1/4, ... 1/64 that fits."""
    client: Annotated[int | None, whole(0, 2**31 - 1)] = None
    """Number of this client, which no other may have; None: that of node.toml."""
    server: str | None = None
    """Address of the server, host:port; None: that of node.toml."""
    out: Annotated[Path | None, path] = None
    """Folder for the personal model; None: the node's folder."""
    largest_mb: Annotated[int, whole(1, 512)] = 512
    """Largest packet that is read, in MiB."""
    threads: Annotated[int, whole(1, 1024)] = 1
    """Threads of training; one gives the numbers of a simulation."""
    insecure: bool = False
    """Connect without TLS and without a key; only to this machine."""

    def __post_init__(self):
        check_fields(self, "--{}")


@dataclass(frozen=True)
class ServeOptions:
    """Serve a federation: start Flower's SuperLink, wait for the nodes, run the job, write its folder."""

    folder: Annotated[Path, path] = Path("federation")
    """Folder that `hetperm deploy` wrote."""
    config: str | None = None
    """Configuration of the run, a TOML file or the name of one that comes with hetperm; None: the folder's run.toml."""
    nodes: Annotated[int | None, whole(1, 10_000)] = None
    """Number of nodes to wait for; None: as many as were deployed."""
    out: Annotated[Path | None, path] = None
    """Folder of the run; None: run/ in the folder."""
    resume: bool = False
    """Go on with the run in that folder where it stopped."""
    quorum: Annotated[float, number(lambda x: 0 < x <= 1, "a number above 0, at most 1")] = 0.5
    """Share of the nodes that must be there; with fewer the run stops, and --resume goes on."""
    deadline: Annotated[float, SECONDS] = 300.0
    """Seconds that a node has for an answer; then it is absent until it answers again."""
    patience: Annotated[float, SECONDS] = 120.0
    """Seconds that a lost node has to come back before it counts as absent."""
    tries: Annotated[int, whole(1, 100)] = 3
    """How often a task is sent to a node that fails or sends back nonsense."""
    wait: Annotated[float, SECONDS] = 600.0
    """Seconds to wait for the nodes at the beginning."""
    insecure: bool = False
    """Without TLS and without keys of nodes; only on this machine."""
    quiet: bool = False
    """Print no progress."""

    def __post_init__(self):
        check_fields(self, "--{}")


@dataclass(frozen=True)
class DeployOptions:
    """Write everything that a federation needs: certificates, a key for every node, the Flower app, start commands."""

    folder: Annotated[Path, path] = Path("federation")
    """Folder to write, which must not exist."""
    config: str = "digits"
    """Configuration of the run, a TOML file or the name of one that comes with hetperm."""
    nodes: Annotated[int, whole(1, 10_000)] = 4
    """Number of nodes."""
    address: str = f"127.0.0.1:{PORT}"
    """Address at which nodes reach the server, host:port; the default is only on this machine."""
    names: Annotated[tuple[str, ...], each(text)] = ()
    """Further names or addresses of the server that the certificate is for."""
    widths: Annotated[tuple[float, ...], each(WIDTH)] = ()
    """Width of each node; empty: each finds its own (hetperm node --width or --device-mb)."""
    days: Annotated[int, whole(1, 3650)] = 365
    """Days that certificates are valid."""
    renew: bool = False
    """Only write a new certificate of the server, into a folder that exists."""

    def __post_init__(self):
        check_fields(self, "--{}")


@dataclass(frozen=True)
class FederateOptions:
    """Show a federation on this machine: a SuperLink and several node processes over loopback with TLS, and the job."""

    nodes: Annotated[int, whole(1, 64)] = 4
    """Number of node processes."""
    config: str = "digits"
    """Configuration of the run, a TOML file or the name of one that comes with hetperm."""
    out: Annotated[Path | None, path] = None
    """Folder to write, which must not exist; None: federation, or federation-2 and so on if it exists."""
    algorithm: str = "perm"
    """Method; any of `hetperm train`."""
    widths: Annotated[tuple[float, ...], each(WIDTH)] = (1.0, 0.5, 0.25, 0.25)
    """Widths of the nodes; from the first again if there are more nodes."""
    steps: Annotated[int, whole(1)] = 120
    """Mini-batch gradients that each client computes."""
    epochs: Annotated[int, whole(1, 1000)] = 3
    """Epochs of personalised training."""
    port: Annotated[int, whole(1024, 65535)] = PORT
    """Port of the server, on loopback."""

    def __post_init__(self):
        check_fields(self, "--{}")
