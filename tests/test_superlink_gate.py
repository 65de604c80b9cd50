"""The gate before the SuperLink: who gets through, and how much."""

import asyncio

import pytest

from hetperm.federated.superlink import Gate


def answers(path: str, host: str, *headers: tuple[bytes, bytes], method: str = "POST") -> tuple[int, bool, list[str]]:
    """(status, whether the application was asked) of a request, and whether its body was read."""
    sent, asked, read = [], [], []

    async def app(scope, receive, send):
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        read.append("body")

    async def send(message):
        sent.append(message)

    gate = Gate(app, own=["10.0.0.1"], largest=100)
    scope = {"type": "http", "path": path, "client": (host, 4), "headers": list(headers), "method": method}
    asyncio.run(gate(scope, receive, send))
    return sent[0]["status"], bool(asked), read


SHORT = (b"content-length", b"10")


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/v1/fleet/pull-messages", "10.0.0.7", 200),
        ("/v1/control/start-run", "10.0.0.7", 403),
        ("/v1/runtime/acquire-task", "10.0.0.7", 403),
        ("/v1/fleetish", "10.0.0.7", 403),
        ("/docs", "10.0.0.7", 403),
        ("/v1/control/start-run", "127.0.0.1", 200),
        ("/v1/runtime/acquire-task", "10.0.0.1", 200),
    ],
)
def test_only_the_interface_of_nodes_is_open_to_other_machines(path, host, status):
    assert answers(path, host, SHORT) == (status, status == 200, [])


def test_a_body_that_is_too_large_or_has_no_length_is_refused_before_it_is_read(caplog):
    path, host = "/v1/fleet/push-object", "10.0.0.7"
    assert answers(path, host, (b"content-length", b"101")) == (413, False, [])
    assert answers(path, host, (b"transfer-encoding", b"chunked")) == (411, False, [])
    assert answers(path, host, (b"content-length", b"1"), (b"content-length", b"999")) == (411, False, [])
    assert len(caplog.records) == 3  # one line each


def test_a_node_that_is_not_known_is_logged_once(caplog):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": scope["status"], "headers": []})

    async def send(message):
        sent.append(message["status"])

    sent, gate = [], Gate(app, own=["10.0.0.1"])
    enter, pull = "/v1/fleet/activate-node", "/v1/fleet/pull-messages"
    tried = [(enter, 412, b"a"), (enter, 412, b"a"), (pull, 401, b"b"), (pull, 200, b"c"), (pull, 404, b"d")]
    for path, status, key in tried:
        headers = [(b"x-public-key", key), SHORT]
        scope = {"type": "http", "path": path, "client": ("10.0.0.7", 4), "headers": headers, "method": "POST"}
        asyncio.run(gate(scope | {"status": status}, None, send))
    assert sent == [412, 412, 401, 200, 404]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["refused a node at 10.0.0.7"] * 2


def test_nodes_are_put_off_until_their_keys_are_registered(caplog):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message.get("status"))

    sent, gate = [], Gate(app, own=["10.0.0.1"], ready=False)
    enter = "/v1/fleet/activate-node"
    for path in (enter, "/v1/control/register-node", enter, "/v1/control/start-run", enter):
        scope = {"type": "http", "path": path, "client": ("10.0.0.1", 4), "headers": [SHORT], "method": "POST"}
        asyncio.run(gate(scope, None, send))
    assert [status for status in sent if status] == [503, 200, 503, 200, 200] and not caplog.records
