"""What hetperm uses of Flower beyond its public interface: the table below and nothing else.

Flower's own SuperNode starts a process for every message; a node that stays must speak Flower's protocol itself. So
hetperm works with the one version that it was made for, and says so under any other.
"""

import importlib
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from hetperm.device.limits import LARGEST, SLACK

VERSION = "1.41."  # as in pyproject.toml
REMEDY = "install 'hetperm[flower]' in an environment of its own (Flower wants older versions of some packages)"
_INFLATABLE = "flwr.supercore.inflatable"
# Name -> the module of Flower that has it. They are imported when they are asked for: each process needs a few.
USED = {
    # A node that stays: its connection (fleet.py)
    "FleetHttpClient": "flwr.supernode.fleet_http_client",
    "NodeAuthHttpInterceptor": "flwr.supernode.node_auth_http_interceptor",
    "RuntimeVersionHttpInterceptor": "flwr.supercore.interceptors.http.runtime_version",
    "HeartbeatSender": "flwr.supercore.heartbeat",
    "HEARTBEAT_DEFAULT_INTERVAL": "flwr.common.constant",
    "FlowerError": "flwr.supercore.error",
    "generate_key_pairs": "flwr.supercore.primitives.asymmetric",
    "public_key_to_bytes": "flwr.supercore.primitives.asymmetric",
    "ActivateNodeRequest": "flwr.proto.fleet_pb2",
    "DeactivateNodeRequest": "flwr.proto.fleet_pb2",
    "PullMessagesRequest": "flwr.proto.fleet_pb2",
    "PushMessagesRequest": "flwr.proto.fleet_pb2",
    "RegisterNodeFleetRequest": "flwr.proto.fleet_pb2",
    "SendNodeHeartbeatRequest": "flwr.proto.heartbeat_pb2",
    "Node": "flwr.proto.node_pb2",
    # Its messages, object by object
    "message_from_proto": "flwr.common.serde",
    "message_to_proto": "flwr.common.serde",
    "remove_content_from_message": "flwr.app.message",
    "get_all_nested_objects": f"{_INFLATABLE}.inflatable_object",
    "get_object_tree": f"{_INFLATABLE}.inflatable_object",
    "iterate_object_tree": f"{_INFLATABLE}.inflatable_object",
    "no_object_id_recompute": f"{_INFLATABLE}.inflatable_object",
    "make_confirm_message_received_fn_protobuf": f"{_INFLATABLE}.inflatable_protobuf_utils",
    "make_pull_object_fn_protobuf": f"{_INFLATABLE}.inflatable_protobuf_utils",
    "make_push_object_fn_protobuf": f"{_INFLATABLE}.inflatable_protobuf_utils",
    "ObjectPullError": f"{_INFLATABLE}.inflatable_utils",
    "ObjectPushError": f"{_INFLATABLE}.inflatable_utils",
    "inflate_object_from_contents": f"{_INFLATABLE}.inflatable_utils",
    "pull_objects": f"{_INFLATABLE}.inflatable_utils",
    "push_objects": f"{_INFLATABLE}.inflatable_utils",
    "TaskIdentity": "flwr.supercore.task_identity",
    # The server: keys of nodes and the start of a run (serve.py)
    "ControlHttpClient": "flwr.supercore.control",
    "RegisterNodeRequest": "flwr.proto.control_pb2",
    "StartRunRequest": "flwr.proto.control_pb2",
    "Fab": "flwr.supercore.fab",
    "build_fab_from_disk": "flwr.cli.build",
    "fab_to_proto": "flwr.common.serde",
    "user_config_to_proto": "flwr.common.serde",
    # The SuperLink behind a gate (superlink.py)
    "flower_superlink": "flwr.superlink.cli",
    # The ServerApp: answers (server_post.py)
    "PullAppMessagesRequest": "flwr.proto.runtime_pb2",
    "ObjectUnavailableError": f"{_INFLATABLE}.inflatable_utils",
}
# Seconds before an object of a message is asked for again that was announced and has not come; Flower waits 1 and more.
PAUSES = {"initial_backoff": 0.02, "backoff_cap": 0.5}


def __getattr__(name: str) -> Any:
    """What Flower calls by this name."""
    if name not in USED:
        raise AttributeError(name)
    sentence = unfit()
    if sentence:
        raise ImportError(sentence)
    value = globals()[name] = getattr(importlib.import_module(USED[name]), name)
    return value


def unfit() -> str | None:
    """A sentence if the version of Flower that is installed, if any, is not the one that hetperm was made for."""
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        return f"Flower is not installed here; {REMEDY}"
    if found.startswith(VERSION):
        return None
    return f"federations need Flower {VERSION}x and {found} is installed here; {REMEDY}"


def readable(
    object_ids: Sequence[str], pull_object_fn: Callable[[str], bytes], largest: int = LARGEST + SLACK
) -> dict[str, bytes]:
    """The objects of a message by their numbers; an `ObjectPullError` if they are too large or make no message.

    Args:
        object_ids: those of its parts, and its own as the last.
        pull_object_fn: number -> content.
        largest: bytes of all objects together; no more are fetched.
    """
    from hetperm.federated.flower_private import ObjectPullError, inflate_object_from_contents, pull_objects

    sizes: list[int] = []  # appended to by several threads

    def bounded(object_id: str) -> bytes:
        content = pull_object_fn(object_id)
        sizes.append(len(content))
        if sum(sizes) > largest:
            raise ObjectPullError(object_id[:8], f"the message has more than {largest:,} bytes")
        return content

    contents, message = pull_objects(list(object_ids), bounded, **PAUSES), object_ids[-1]
    try:
        inflate_object_from_contents(message, dict(contents))
    except Exception as error:  # the parsers of Flower raise anything
        raise ObjectPullError(message[:8], f"the message cannot be read ({type(error).__name__})") from error
    return contents
