"""The connection of a node to the server: Flower's Fleet interface, in the node's own process. Needs `flwr`.

Flower's own SuperNode starts a process for every message, which takes seconds to import torch. A node here stays: it
holds the data and the model, and asks for the next message as soon as it has answered. It listens nowhere.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.supercore.error import FlowerError
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from hetperm.device.packet import LARGEST
from hetperm.engine.flower_grid import content_of, packet_of
from hetperm.texts import one_line

log = logging.getLogger(__name__)

QUICK, SLOW = 0.05, 1.0  # seconds between two looks for a message: after one has come, and after a long silence
AGAIN = 2.0  # seconds before a lost connection is tried again
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
    keys = generate_key_pairs() if address.key is None else _keys(address.key)
    said = ""
    while True:
        try:
            with _client(address, keys) as client:
                node = _enter(client, keys, own_key=address.key is None)
                said = ""
                _stay(client, node, handle)
        except (httpx.HTTPError, OSError) as error:
            reason = explained(error, address)
            if reason != said:
                log.warning("%s; trying again every %g s", reason, AGAIN)
                said = reason
        time.sleep(AGAIN)


def explained(error: Exception, address: Address) -> str:
    """Why the server could not be reached, in one line."""
    where = f"the server {address.server}"
    if isinstance(error, httpx.HTTPStatusError):
        known = FlowerError.from_json(error.response.text)
        if error.response.status_code in UNKNOWN or (known and known.code in UNKNOWN):
            return f"{where} does not know this node; is its key in server/nodes there?"
        return f"{where} answers: {one_line(known.message) if known else f'status {error.response.status_code}'}"
    text = one_line(str(error)) or type(error).__name__
    if "certificate has expired" in text:
        return f"the certificate of {where} has expired; make a new one with `hetperm deploy --renew`"
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return f"the certificate of {where} is not one that {address.certificate} has signed ({text})"
    return f"{where} cannot be reached ({text})"


def _client(address: Address, keys: tuple[Any, Any]) -> FleetHttpClient:
    client = FleetHttpClient.from_server_address(
        address.server,
        address.certificate is None,
        None if address.certificate is None else str(address.certificate),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(*keys)],
    )
    # Called before the body of a response is read.
    client._client.event_hooks["response"].append(_bounded)
    return client


def _bounded(response: httpx.Response) -> None:
    """Refuse a response that is too large, before there is memory for it."""
    size = response.headers.get("content-length", "0")
    if not size.isdigit() or int(size) > LARGEST:
        raise httpx.RequestError(f"it sends {size} bytes and {LARGEST:,} are allowed", request=response.request)


def _enter(client: FleetHttpClient, keys: tuple[Any, Any], *, own_key: bool) -> NodeProto:
    """Say who this node is, so that messages can come."""
    public = public_key_to_bytes(keys[1])
    if own_key:  # without authentication a node registers itself
        client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
    node = NodeProto(node_id=client.ActivateNode(request).node_id)
    log.info("connected as node %d", node.node_id)
    return node


def _stay(client: FleetHttpClient, node: NodeProto, handle: Callable[[bytes], bytes]) -> None:
    """Answer messages until the connection is lost."""

    def beat() -> bool:
        try:
            asked = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            return client.SendNodeHeartbeat(asked).success
        except httpx.HTTPError:
            return False  # the main loop finds out what it is

    heart = HeartbeatSender(beat)
    heart.start()
    pause = QUICK
    try:
        while True:
            answered = _answer(client, node, handle)
            pause = QUICK if answered else min(1.5 * pause, SLOW)
            if not answered:
                time.sleep(pause)
    except KeyboardInterrupt:
        # Asked to go: the server need not wait for a heartbeat that does not come.
        with contextlib.suppress(httpx.HTTPError):
            client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
        raise
    finally:
        heart.stop()


def _answer(client: FleetHttpClient, node: NodeProto, handle: Callable[[bytes], bytes]) -> bool:
    """Take the next message, if there is one, and answer it; return whether there was one."""
    response = client.PullMessages(PullMessagesRequest(node=node))
    if not response.messages_list:
        return False
    try:
        _exchange(client, node, handle, response)
    except (ObjectPullError, ObjectPushError) as error:
        # The server gave up on this message, or ended, in the meantime.
        log.info("a message was given up by the server (%s)", one_line(str(error))[:100])
    return True


def _exchange(
    client: FleetHttpClient, node: NodeProto, handle: Callable[[bytes], bytes], response: PullMessagesResponse
) -> None:
    began = time.perf_counter()
    message, tree = message_from_proto(response.messages_list[0]), response.message_object_trees[0]
    run, number = message.metadata.run_id, message.metadata.message_id
    contents = pull_objects(
        [one.object_id for one in iterate_object_tree(tree)],
        make_pull_object_fn_protobuf(client.PullObject, node, run),
    )
    make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run)(number)
    # The content is inflated; the metadata that came with it are those of the message that is answered.
    full = inflate_object_from_contents(number, contents)
    full.metadata.__dict__["_message_id"] = number
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node.node_id, 0
    reply = Message(content_of(handle(packet_of(full.content))), reply_to=full)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        asked = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[time.perf_counter() - began],
            )
        )
        push_objects(
            get_all_nested_objects(reply),
            make_push_object_fn_protobuf(client.PushObject, node, run, asked.session_id),
            object_ids_to_push=set(asked.objects_to_push),
        )


def _keys(path: Path) -> tuple[Any, Any]:
    """The private and the public key in a file."""
    try:
        private = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ValueError(f"{path}: the key of the node cannot be read ({error.strerror})") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path}: is not the private key of a node; `hetperm deploy` writes one") from error
    return private, private.public_key()
