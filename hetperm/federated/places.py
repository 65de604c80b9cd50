"""The folders of a federation: what `hetperm deploy` writes, and what the server and the nodes read of it.

Imports no torch: a server process needs none.

::

    FOLDER/README            what to copy where
    FOLDER/run.toml          the configuration of the run
    FOLDER/ca.crt, ca.key    the authority that signed the server's certificate; its key stays with who deploys
    FOLDER/server/           for the server: server.toml, server.pem, server.key, ca.crt, nodes/*.pub, app/
    FOLDER/nodes/0/          for node 0: node.toml, node.key, ca.crt, run.toml, start.sh
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetperm import config as configuration
from hetperm.config import Config, read
from hetperm.federated.options import NodeOptions
from hetperm.texts import shown

NODE, SERVER = "node.toml", "server.toml"
RUN = "run.toml"
COSTS = "federation.json"  # the file of the run folder that says who took part and what it cost
LONGEST_HOST = 253  # characters, as names on networks are


@dataclass(frozen=True)
class NodePlace:
    """What node.toml says.

    Attributes:
        server: host:port.
        client: the number of the client.
        width: of its models; None if it finds its own.
        data: as `--data`.
    """

    folder: Path
    server: str
    client: int | None = None
    width: float | None = None
    device_mb: float | None = None
    data: str | None = None

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return configuration.load(self.folder / RUN)

    @property
    def certificate(self) -> Path:
        """The certificate that the server's must be signed with."""
        return self.folder / "ca.crt"

    @property
    def key(self) -> Path:
        """The private key of the node."""
        return self.folder / "node.key"


@dataclass(frozen=True)
class ServerPlace:
    """What server.toml says: the address to listen on, the number of nodes that were deployed, and their widths."""

    folder: Path
    address: str
    nodes: int
    widths: tuple[float, ...] = ()


def node_place(folder: Path) -> NodePlace:
    """The place of a node; an error if the folder is none."""
    table = _table(folder / NODE, f"{folder} is not the folder of a node")
    known = ("server", "client", "width", "device_mb", "data")
    odd = next((key for key in table if key not in known), None)
    if odd or not isinstance(table.get("server"), str):
        raise ValueError(f"{folder / NODE}: {f'unknown key {odd!r}' if odd else 'no server'}; it has {known}")
    split_address(table["server"])
    try:
        options = NodeOptions(**table)
    except ValueError as error:
        raise ValueError(f"{folder / NODE}: {str(error).removeprefix('--')}") from error
    return NodePlace(folder, **{key: getattr(options, key) for key in table})


def server_place(folder: Path) -> ServerPlace:
    """The place of the server; an error if the folder is none."""
    table = _table(folder / "server" / SERVER, f"{folder} is not the folder of a federation")
    if not (isinstance(table.get("address"), str) and isinstance(table.get("nodes"), int)):
        raise ValueError(f"{folder / 'server' / SERVER}: needs address and nodes")
    return ServerPlace(folder / "server", table["address"], table["nodes"], tuple(table.get("widths", ())))


def _table(path: Path, noun: str) -> Mapping[str, Any]:
    if not path.is_file():
        raise ValueError(f"{noun}: it has no {path.name}; `hetperm deploy FOLDER` writes one")
    return read(path, noun="it")


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of an address.

    Example:
        >>> split_address("127.0.0.1:8000"), split_address("[::1]:80")
        (('127.0.0.1', 8000), ('::1', 80))
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise ValueError(f"address {shown(address)} is not host:port, such as 127.0.0.1:8000")
    return check_host(host), int(port)


def check_host(host: str) -> str:
    """The host, which must be an IP address or the name of a machine."""
    if _ip(host) is None:
        labels = host.removesuffix(".").split(".")
        # The last label of a name is never a number; four numbers that are no address are a mistyped one.
        named = all([re.fullmatch(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", label) for label in labels])
        if not named or labels[-1].isdigit() or len(host) > LONGEST_HOST:
            raise ValueError(
                f"{shown(host)} is no IP address or name of a machine; a name has letters, digits, hyphens and dots"
            )
    return host


def check_one_address(host: str) -> None:
    """Raise an error if a server that listens there would listen on every address of its machine."""
    if _ip(host) in (ipaddress.IPv4Address(0), ipaddress.IPv6Address(0)):
        raise ValueError(f"{host} stands for every address of a machine; name the one at which nodes reach the server")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, if the host is given by one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine only."""
    host, _ = split_address(address)
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def check_insecure(address: str) -> None:
    """Raise an error if a connection without TLS would leave this machine."""
    if not is_loopback(address):
        raise ValueError(f"--insecure is for this machine only, and {address} is another; leave it out")
