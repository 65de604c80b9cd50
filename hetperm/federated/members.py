"""Members: the nodes of a federation as they introduce themselves, and what the server knows of their data."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import hetperm
from hetperm.device import packet
from hetperm.engine.flower_post import Lost, OnEvent, Post
from hetperm.engine.flower_roster import NOBODY
from hetperm.metrics import METRICS

log = logging.getLogger(__name__)

ASKING = 0.2  # seconds between two looks for nodes
LARGEST_MODEL = 2**17  # classes, or channels, that a model is made for
LARGEST_SAMPLE = 2**28  # numbers in a sample


@dataclass(frozen=True)
class Member:
    """A node that introduced itself: what the server knows of a client.

    Attributes:
        node: its number at Flower.
        input: the shape of a sample.
        in_channels, image_size, num_classes: what a model for its data must have; see `hetperm.data.Problem`.
        metric: what it scores models by.
    """

    node: int
    key: int
    n_train: int
    n_val: int
    n_test: int
    input: tuple[int, ...]
    input_dtype: str
    in_channels: int
    image_size: int | tuple[int, ...] | None
    num_classes: int
    metric: str

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all nodes must have in common."""
        return self.input_dtype, self.input, self.in_channels, self.image_size, self.metric


def member(node: int, table: Mapping[str, Any]) -> Member:
    """The member that an introduction describes; an error if it cannot be one."""
    if table.get("hetperm") != hetperm.__version__:
        raise ValueError(f"it runs hetperm {table.get('hetperm')!r} and the server {hetperm.__version__}; use one")
    counts = {name: table.get(name) for name in ("key", "n_train", "n_val", "n_test", "num_classes", "in_channels")}
    for name, value in counts.items():
        if type(value) is not int or not (name == "key" or 0 <= value < 2**40):
            raise ValueError(f"it says {name} {value!r}; that must be a whole number")
    for name in ("num_classes", "in_channels"):  # the model is made for these: a lie must not fill the memory
        if counts[name] > LARGEST_MODEL:
            raise ValueError(f"it says {name} {counts[name]:,}; more than {LARGEST_MODEL:,} are not taken")
    shape, kind, sides, metric = (table.get(name) for name in ("input", "input_dtype", "image_size", "metric"))
    if not _are_sides(shape) or math.prod(shape) > LARGEST_SAMPLE:
        raise ValueError(f"it says that samples have shape {shape!r}")
    if not (sides is None or _are_sides(sides if isinstance(sides, list) else [sides])):
        raise ValueError(f"it says that images have sides {sides!r}")
    if metric not in METRICS:
        raise ValueError(f"it scores models by {metric!r}; known are {', '.join(METRICS)}")
    if kind not in ("float16", "bfloat16", "float32", "float64", "int64"):
        raise ValueError(f"it says that samples are {kind!r}")
    if not counts["n_train"]:
        raise ValueError("it has no training samples")
    sides = tuple(sides) if isinstance(sides, list) else sides
    return Member(node, input=tuple(shape), input_dtype=kind, image_size=sides, metric=metric, **counts)


def _are_sides(value: Any) -> bool:
    return isinstance(value, list) and all([type(side) is int and 0 < side < 2**20 for side in value])


def gather(post: Post, count: int, *, wait: float, on_event: OnEvent, least: int | None = None) -> list[Member]:
    """The members of a federation, sorted by key, as soon as all are there.

    Args:
        count: how many there are.
        wait: seconds to wait for them.
        least: how many suffice after that; all unless given.
    """
    began, asked, found, odd = time.monotonic(), {}, {}, {}
    hello = packet.write({"kind": "hello"})
    while len(found) < count and time.monotonic() - began < wait:
        # A node that was asked and is gone is asked again when it is back.
        online = post.online()
        for node in online - found.keys() - asked.keys() - odd.keys():
            dispatch = post.push(node, hello, ttl=wait)
            if dispatch:
                asked[node] = dispatch
        asked = {node: dispatch for node, dispatch in asked.items() if node in online}
        by_dispatch = {dispatch: node for node, dispatch in asked.items()}
        for dispatch, answer in (post.pull(list(by_dispatch)) if by_dispatch else {}).items():
            node = by_dispatch[dispatch]
            del asked[node]
            try:
                if isinstance(answer, Lost):
                    raise ValueError(str(answer))
                found[node] = member(node, packet.read(answer)[0])
                on_event("joined", len(found) - 1, f"client {found[node].key}: {found[node].n_train} samples")
            except ValueError as error:
                if not isinstance(answer, Lost):
                    odd[node] = str(error)
                log.warning("node %d cannot take part: %s", node, error)
        time.sleep(ASKING)
    if len(found) < (count if least is None else least):
        reasons = "".join(f"; node {node}: {reason}" for node, reason in odd.items())
        raise RuntimeError(
            f"{len(found)} of {count} nodes came within {wait:g} s{reasons}; start the others, or wait longer (--wait)"
        )
    members = sorted(found.values(), key=lambda one: one.key)
    _check_members(members)
    # Who is not there yet counts from the beginning, under the numbers that were deployed.
    late = [key for key in range(count) if key not in {one.key for one in members}][: count - len(members)]
    members += [replace(members[0], node=NOBODY, key=key, n_train=1, n_val=0, n_test=0) for key in late]
    return sorted(members, key=lambda one: one.key)


def _check_members(members: Sequence[Member]) -> None:
    first = members[0]
    for before, one in pairwise(members):
        if one.key == before.key:
            raise ValueError(f"two nodes say that they are client {one.key}; give each its own --client")
    for one in members:
        odd = next(((a, b) for a, b in zip(one.kind, first.kind, strict=True) if a != b), None)
        if odd:
            raise ValueError(
                f"samples of client {one.key} are of another kind than those of client {first.key} ({odd[0]} and "
                f"{odd[1]}); all nodes need the same shape and type of samples, and the same metric"
            )
