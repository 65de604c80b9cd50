"""What a federation of real processes refuses: lies, strangers, old certificates, sizes. ``make test-federation``."""

import contextlib
import json
import re
import socket
import ssl
import time
from pathlib import Path

import pytest
from real_federation import LIAR, PORT, Watch, deployed, end, final, odd_node, served

from hetperm.federated import certificates, local
from hetperm.federated.places import RUN, server_place
from hetperm.federated.serve import LOG, superlink

pytestmark = pytest.mark.filterwarnings("default")  # Flower and what it imports warn of their own


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return deployed(tmp_path_factory.mktemp("federation"))


@pytest.fixture(scope="module")
def nodes(place):
    with local.nodes(place, range(4)) as running:
        yield running


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


def test_nodes_without_a_registered_key_or_with_a_wrong_clock_are_refused_with_one_line(place, nodes, tmp_path):
    stranger = tmp_path / "nodes" / "9"
    stranger.mkdir(parents=True)
    for name in ("ca.crt", "node.toml", RUN):
        (stranger / name).write_bytes((place / "nodes" / "0" / name).read_bytes())
    certificates.node_key(stranger / "node.key", tmp_path / "9.pub")
    end(nodes, 3)
    said, log = tmp_path / "ahead.log", place / "server" / LOG
    begin = log.stat().st_size if log.is_file() else 0
    odd = local.start_node(tmp_path, 9), odd_node(place, 3, "ahead", said)
    try:
        served(place, "stranger", wait=30.0, changes={"steps": 12, "epochs": 1})
    finally:
        for process in odd:
            process.kill()
            process.wait()
        nodes[3] = local.start_node(place, 3)
    lines = (stranger / "node.log").read_text()
    assert lines.count("does not know this node") == 1
    served_by = log.read_bytes()[begin:].decode()
    assert served_by.count("refused a node at 127.0.0.1: its key is not in server/nodes, or its clock is wrong") == 2
    (line,) = [line for line in said.read_text().splitlines() if "clock" in line]
    assert re.match(r"the clock of this device is 6[0-3] s ahead of that of the server .*; set the clock", line)


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
        assert said.count("has expired; make a new one with `hetperm deploy --renew` (this device's clock says 20") == 1


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
