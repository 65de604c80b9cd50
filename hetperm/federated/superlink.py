"""Flower's SuperLink with a gate: from other machines only nodes get in. A program: ``python -m`` runs it.

A SuperLink has three interfaces on one port. That of nodes asks for their signatures. The other two start programs and
register nodes, and ask nobody who they are: here they answer only to this machine. Bodies have a size that is checked
before they are read.
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from hetperm.device.limits import LARGEST, SLACK

log = logging.getLogger("hetperm.gate")

NODES = "/v1/fleet/"  # the only interface that other machines may use
START = "/v1/control/start-run"  # asked for when keys are registered
MOST = 1000  # strangers that get a line each in the log, which must not grow without end


class Gate:
    """An ASGI application that lets requests through or refuses them.

    Args:
        app: the application behind the gate.
        own: addresses of this machine.
        ready: whether keys are registered; if not, nodes are put off until the first run is started.
    """

    def __init__(self, app: Any, own: Sequence[str], largest: int = LARGEST + SLACK, *, ready: bool = True):
        self.ready = ready
        self.app, self.own, self.largest = app, {*own, "127.0.0.1", "::1"}, largest
        self._told: set[tuple[str, bytes]] = set()  # who was refused, by address and key: nodes try again for ever

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            status, reason = self.refusal(scope)
            if status:
                log.warning("refused %s from %s: %s", scope["path"], (scope["client"] or ("?",))[0], reason)
            elif not self.ready and scope["path"].startswith(NODES):
                status, reason = 503, "not ready yet"
            if status:
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": reason.encode()})
                return
        await self.app(scope, receive, self._watched(scope, send))

    def _watched(self, scope: dict[str, Any], send: Any) -> Any:
        """What sends an answer, and notes the start of a run and, once, that the application does not know a node."""

        async def watched(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start" and scope["path"] == START and message["status"] < 400:
                self.ready = True
            if message["type"] == "http.response.start" and _is_unknown(scope["path"], message["status"]):
                host = (scope["client"] or ("?",))[0]
                who = host, b"".join(value for name, value in scope["headers"] if b"public-key" in name)
                if who not in self._told and len(self._told) < MOST:
                    log.warning("refused a node at %s: its key is not in server/nodes, or its clock is wrong", host)
                    self._told.add(who)
            await send(message)

        return watched

    def refusal(self, scope: dict[str, Any]) -> tuple[int, str]:
        """The status and the reason of a refusal; 0 if the request may pass.

        Example:
            >>> gate = Gate(None, own=["10.0.0.1"], largest=100)
            >>> request = {"path": "/v1/control/start-run", "client": ("10.0.0.7", 5), "headers": []}
            >>> gate.refusal(request)
            (403, 'only nodes may come from other machines')
            >>> gate.refusal({**request, "client": ("10.0.0.1", 5)})
            (0, '')
        """
        host = (scope.get("client") or ("",))[0]
        if not scope["path"].startswith(NODES) and host not in self.own:
            return 403, "only nodes may come from other machines"
        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        # Flower's clients always say how long a body is; one that does not could send without end.
        if scope.get("method") == "POST" and not (len(sizes) == 1 and sizes[0].isdigit()):
            return 411, "a body without a length"
        if sizes and int(sizes[0]) > self.largest:
            return 413, f"a body of {int(sizes[0]):,} bytes; {self.largest:,} are allowed"
        return 0, ""


def _is_unknown(path: str, status: int) -> bool:
    """Whether an answer says to a node that it is not known: it may not enter, or its signature is not valid."""
    return path.startswith(NODES) and (status == 401 or (path.endswith("activate-node") and 400 <= status < 500))


def main() -> None:
    """Run a SuperLink behind the gate, with the arguments of `flower-superlink`, until the parent ends."""
    import uvicorn

    from hetperm.federated.flower_private import flower_superlink

    if sys.platform == "linux":
        # If the server is killed, the SuperLink goes too; otherwise it would hold the port.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)  # not to the root: Flower would tell it of every request
    run = uvicorn.run

    def gated(app: Any, host: str, **options: Any) -> None:
        # Without the access log: nodes ask several times a second, and every line would be the same.
        run(app=Gate(app, own=[host], ready=False), host=host, **{**options, "access_log": False, "reload": False})

    uvicorn.run = gated
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    flower_superlink()


if __name__ == "__main__":
    main()
