"""The connection of a node to the server: Flower's Fleet interface, in the node's own process. Needs `flwr`.

Flower's own SuperNode starts a process for every message, which takes seconds to import torch. A node here stays: it
holds the data and the model, and asks for the next message as soon as it has answered. It listens nowhere.
"""

import contextlib
import datetime
import email.utils
import logging
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.app import Message

from hetperm.device.limits import LARGEST
from hetperm.engine.flower_grid import content_of, packet_of
from hetperm.federated import flower_private as flower
from hetperm.texts import one_line

log = logging.getLogger(__name__)

QUICK, SLOW = 0.05, 1.0  # seconds between two looks for a message, at least and at most
PART = 0.25  # of the time since the last message is the time until the next look
AGAIN = 2.0  # seconds before a lost connection is tried again
AHEAD, BEHIND = 4.0, 300.0  # seconds by which a clock may differ from the server's; Flower refuses 5 and 305
UNKNOWN = 401, 2004  # the status and the code of Flower by which a server refuses a node that it does not know


@dataclass(frozen=True)
class Address:
    """Where the server is, and how it and the node know each other.

    Attributes:
        server: host:port.
        certificate: the certificate that the server's must be signed with; None without TLS.
        key: the private key of the node; None without TLS.
    """

    server: str
    certificate: Path | None
    key: Path | None


def attend(handle: Callable[[bytes], bytes], address: Address) -> None:
    """Answer the messages of a server until the process ends. A lost connection is made again, as often as it takes.

    Args:
        handle: packet -> its answer.
    """
    keys = flower.generate_key_pairs() if address.key is None else _keys(address.key)
    if address.certificate is not None:
        _check_certificate(address.certificate)
    said = ""
    while True:
        try:
            with _client(address, keys) as client:
                node = _enter(client, keys, own_key=address.key is None)
                said = ""
                Connection(client, node, handle).stay()
        except Exception as error:  # what Flower cannot read of an answer raises anything; the node must live on
            reason = explained(error, address)
            kind = re.sub(r"\d+", "", reason)  # a clock that is 61 s ahead, then 62, is told once
            if kind != said:
                log.warning("%s; trying again every %g s", reason, AGAIN)
                said = kind
        time.sleep(AGAIN)


def explained(error: Exception, address: Address) -> str:
    """Why the server could not be reached, in one line."""
    where = f"the server {address.server}"
    if isinstance(error, httpx.HTTPStatusError):
        known = flower.FlowerError.from_json(error.response.text)
        if error.response.status_code in UNKNOWN or (known and known.code in UNKNOWN):
            ahead = seconds_ahead(error.response)
            if not -BEHIND < ahead < AHEAD:
                told = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} that of"
                return f"the clock of this device is {told} {where}, which refuses it; set the clock"
            return f"{where} does not know this node; is its key in server/nodes there?"
        if error.response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return f"{where} is not ready yet"
        return f"{where} answers: {one_line(known.message) if known else f'status {error.response.status_code}'}"
    if not isinstance(error, httpx.HTTPError | OSError):
        return f"{where} sent what Flower cannot read ({type(error).__name__})"
    text = one_line(str(error)) or type(error).__name__
    clock = f"this device's clock says {now():%Y-%m-%d %H:%M} UTC"
    if "certificate has expired" in text:
        return f"the certificate of {where} has expired; make a new one with `hetperm deploy --renew` ({clock})"
    if "certificate is not yet valid" in text:
        return f"the certificate of {where} is not valid yet; set the clock ({clock})"
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return f"the certificate of {where} is not one that {address.certificate} has signed ({text})"
    return f"{where} cannot be reached ({text})"


def seconds_ahead(response: httpx.Response) -> float:
    """By how much this device's clock is ahead of the one of a server that has answered; 0 if it does not say."""
    try:
        return (now() - email.utils.parsedate_to_datetime(response.headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return 0.0


def now() -> datetime.datetime:
    """The time by the clock of this device."""
    return datetime.datetime.now(datetime.UTC)


def _client(address: Address, keys: tuple[Any, Any]) -> Any:
    """Flower's client of the interface of nodes, which signs every request."""
    client = flower.FleetHttpClient.from_server_address(
        address.server,
        address.certificate is None,
        None if address.certificate is None else str(address.certificate),
        interceptors=[
            flower.RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            flower.NodeAuthHttpInterceptor(*keys),
        ],
    )
    # Called before the body of a response is read.
    client._client.event_hooks["response"].append(_bounded)
    return client


def _bounded(response: httpx.Response) -> None:
    """Refuse a response that is too large, before there is memory for it."""
    size = response.headers.get("content-length", "0")
    if not size.isdigit() or int(size) > LARGEST:
        raise httpx.RequestError(f"it sends {size} bytes and {LARGEST:,} are allowed", request=response.request)


def _enter(client: Any, keys: tuple[Any, Any], *, own_key: bool) -> Any:
    """Say who this node is, so that messages can come; return what Flower knows it by."""
    public = flower.public_key_to_bytes(keys[1])
    if own_key:  # without authentication a node registers itself
        client.RegisterNode(flower.RegisterNodeFleetRequest(public_key=public))
    request = flower.ActivateNodeRequest(public_key=public, heartbeat_interval=flower.HEARTBEAT_DEFAULT_INTERVAL)
    node = flower.Node(node_id=client.ActivateNode(request).node_id)
    log.info("connected as node %d", node.node_id)
    return node


class Connection:
    """A node that has entered.

    Args:
        client, node: Flower's client, and what Flower knows the node by.
        handle: packet -> its answer.
    """

    def __init__(self, client: Any, node: Any, handle: Callable[[bytes], bytes]):
        self.client, self.node, self.handle = client, node, handle

    def stay(self) -> None:
        """Answer messages until the connection is lost."""
        heart = flower.HeartbeatSender(self._beat)
        heart.start()
        last = time.monotonic()
        try:
            while True:
                if self._answer():
                    last = time.monotonic()
                else:
                    time.sleep(min(max(QUICK, PART * (time.monotonic() - last)), SLOW))
        except KeyboardInterrupt:
            # Asked to go: the server need not wait for a heartbeat that does not come.
            with contextlib.suppress(httpx.HTTPError):
                self.client.DeactivateNode(flower.DeactivateNodeRequest(node_id=self.node.node_id))
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # it has stopped by itself
                heart.stop()

    def _beat(self) -> bool:
        interval = flower.HEARTBEAT_DEFAULT_INTERVAL
        try:
            asked = flower.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=interval)
            return self.client.SendNodeHeartbeat(asked).success
        except httpx.HTTPError:
            return False  # the main loop finds out what it is

    def _answer(self) -> bool:
        """Take the next message, if there is one, and answer it; return whether there was one."""
        response = self.client.PullMessages(flower.PullMessagesRequest(node=self.node))
        if not response.messages_list:
            return False
        began = time.perf_counter()
        try:
            message = self._taken(response.messages_list[0], response.message_object_trees[0])
            content = packet_of(message.content)
        except (flower.ObjectPullError, ValueError) as error:
            # Nonsense, or the server gave up on this message, or ended, in the meantime.
            log.warning("refused a message: %s", one_line(str(error))[:200])
            return True
        reply = Message(content_of(self.handle(content)), reply_to=message)
        try:
            self._send(reply, time.perf_counter() - began)
        except flower.ObjectPushError as error:
            log.info("an answer was not waited for (%s)", one_line(str(error))[:100])
        return True

    def _taken(self, announced: Any, tree: Any) -> Message:
        """The message that was announced, object by object."""
        known = flower.message_from_proto(announced).metadata
        run, number = known.run_id, known.message_id
        contents = flower.readable(
            [one.object_id for one in flower.iterate_object_tree(tree)],
            flower.make_pull_object_fn_protobuf(self.client.PullObject, self.node, run),
        )
        flower.make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, self.node, run)(number)
        message = flower.inflate_object_from_contents(number, contents)
        message.metadata.__dict__["_message_id"] = number
        # A reply takes its sender and its run from there.
        flower.TaskIdentity.run_id, flower.TaskIdentity.node_id, flower.TaskIdentity.task_id = run, self.node.node_id, 0
        return message

    def _send(self, reply: Message, seconds: float) -> None:
        with flower.no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            announced = self.client.PushMessages(
                flower.PushMessagesRequest(
                    node=self.node,
                    messages_list=[flower.message_to_proto(flower.remove_content_from_message(reply))],
                    message_object_trees=[flower.get_object_tree(reply)],
                    clientapp_runtime_list=[seconds],
                )
            )
            run, session = reply.metadata.run_id, announced.session_id
            flower.push_objects(
                flower.get_all_nested_objects(reply),
                flower.make_push_object_fn_protobuf(self.client.PushObject, self.node, run, session),
                object_ids_to_push=set(announced.objects_to_push),
            )


def _check_certificate(path: Path) -> None:
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else "it cannot be read"
        raise ValueError(f"{path}: the server's certificate is checked by this one, and {reason}") from error


def _keys(path: Path) -> tuple[Any, Any]:
    """The private and the public key in a file."""
    try:
        private = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ValueError(f"{path}: the key of the node cannot be read ({error.strerror})") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path}: is not the private key of a node; `hetperm deploy` writes one") from error
    return private, private.public_key()
