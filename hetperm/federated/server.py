"""The server of a federation: who is there, what it may know of them, and the setting of a run made from that."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import hetperm
from hetperm.client import Client
from hetperm.config import Config
from hetperm.data import image_size_of
from hetperm.device import packet
from hetperm.device.bench import Workshop
from hetperm.engine.flower import Flower, Scored
from hetperm.engine.flower_mail import NOBODY, Job, Lost, Mail, OnEvent, Post, Rules, Step
from hetperm.engine.task import Absent
from hetperm.methods import METHODS
from hetperm.metrics import ACCURACY, metric_of
from hetperm.params import Params
from hetperm.runs import files
from hetperm.runs.setting import Setting, build, placed, scalable_of, with_rates
from hetperm.server.initial import nested_start
from hetperm.server.slicer import Slicer
from submodels import zoo

log = logging.getLogger(__name__)

ASKING = 0.2  # seconds between two looks for nodes
COSTS = "federation.json"  # the file of the run folder that says who took part and what it cost


@dataclass(frozen=True)
class Member:
    """A node that introduced itself: what the server knows of a client.

    Attributes:
        node: its number at Flower.
        input: the shape of a sample.
    """

    node: int
    key: int
    n_train: int
    n_val: int
    n_test: int
    input: tuple[int, ...]
    input_dtype: str
    num_classes: int


def member(node: int, table: Mapping[str, Any]) -> Member:
    """The member that an introduction describes; an error if it cannot be one."""
    if table.get("hetperm") != hetperm.__version__:
        raise ValueError(f"it runs hetperm {table.get('hetperm')!r} and the server {hetperm.__version__}; use one")
    counts = {name: table.get(name) for name in ("key", "n_train", "n_val", "n_test", "num_classes")}
    for name, value in counts.items():
        if type(value) is not int or not (name == "key" or 0 <= value < 2**40):
            raise ValueError(f"it says {name} {value!r}; that must be a whole number")
    shape, kind = table.get("input"), table.get("input_dtype")
    if not (isinstance(shape, list) and all([type(side) is int and 0 < side < 2**20 for side in shape])):
        raise ValueError(f"it says that samples have shape {shape!r}")
    if kind not in ("float16", "bfloat16", "float32", "float64", "int64"):
        raise ValueError(f"it says that samples are {kind!r}")
    if not counts["n_train"]:
        raise ValueError("it has no training samples")
    return Member(node, input=tuple(shape), input_dtype=kind, **counts)


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
        if (one.input, one.input_dtype) != (first.input, first.input_dtype):
            raise ValueError(
                f"samples of client {one.key} are {one.input_dtype} of shape {one.input}, those of client {first.key} "
                f"{first.input_dtype} of shape {first.input}; all nodes need data of one kind"
            )


class Machines:
    """The nodes of a run, as `Setting.nodes`: where tasks run, models are scored and personal models are kept."""

    def __init__(self, mail: Mail, facts: Mapping[str, Any], members: Sequence[Member]):
        self.mail, self.facts, self.members = mail, facts, members
        self.accuracy: dict[int, float] = {}
        self.at_end: Callable[[], None] = lambda: None  # called when all is done but the report

    def engine(self, setting: Setting, base: float) -> Flower:
        """The engine that runs tasks at the nodes."""
        return Flower(setting.clients, setting.shop, self.mail, base)

    def score(
        self, setting: Setting, wanted: Sequence[tuple[int, Params, float, str]]
    ) -> list[tuple[float, float] | None]:
        """(loss, metric) of (host, model, width, part): on that part of the host's data; None if it is absent."""
        scored = self.engine(setting, 1.0).score(wanted)
        found = [(one.loss, one.metric) if isinstance(one, Scored) else None for one in scored]
        for (host, _, _, part), one in zip(wanted, found, strict=True):
            if part == "test" and one:  # the last is that of the model which is deployed
                self.accuracy[host] = one[1]
        return found

    def hand_over(self, setting: Setting, models: Sequence[Params], widths: Sequence[float], method: str) -> None:
        """Give every client its personal model, to keep."""
        facts = [
            {
                "algorithm": method,
                "dataset": setting.dataset,
                "seed": setting.config.seed,
                "tier": setting.tiers[i],
                "accuracy": self.accuracy.get(i),
            }
            for i in range(len(models))
        ]
        self.engine(setting, 1.0).hand_over(models, widths, facts)
        self.at_end()


def settle(
    config: Config,
    members: Sequence[Member],
    post: Post,
    rules: Rules,
    on_event: OnEvent,
    widths: Sequence[float] = (),
) -> Setting:
    """The setting of a run whose clients are nodes: the model is built, and every node says which width it has.

    Args:
        widths: (N,) those that were deployed, for nodes that come later; empty if nobody knows.
    """
    _check_config(config)
    first = members[0]
    sizes = {
        "in_channels": first.input[0],
        "num_classes": max(one.num_classes for one in members),
        "image_size": image_size_of((1, *first.input)),
    }
    config = config.override(num_clients=len(members), device="cpu", engine="sequential", workers=1)
    model = placed(build(config, sizes), config)
    config = with_rates(config, model)
    architecture = {"name": zoo.resolve(config.model), **sizes, "options": dict(config.model_options)}
    setup = {"config": config.to_toml(), "sizes": sizes, "architecture": architecture}
    setup["id"] = hashlib.sha256(json.dumps(setup).encode()).hexdigest()[:16]
    mail = Mail(post, [one.node for one in members], setup, rules, on_event)
    widths, classes = _joined(mail, members, widths)
    # A list: who comes late replaces what stands for it.
    clients = [
        replace(_blank(one, config), width=width, classes=_mask(own, sizes["num_classes"]))
        for one, width, own in zip(members, widths, classes, strict=True)
    ]
    mail.newcomer = partial(_take_in, clients, config, first)
    # If no client needs a part, the model need not be traced, and may be one that cannot be cut.
    scalable = scalable_of(model, clients[0], "nodes of width 1") if min(widths) < 1 else None
    shop = Workshop(model, F.cross_entropy, scalable)
    start = shop.full.take()
    if config.start == "nested":
        start = nested_start(Slicer(scalable), widths, start, seed=config.seed)
    return Setting(
        clients=clients,
        shop=shop,
        start=start,
        metric=metric_of(ACCURACY),
        dataset=config.dataset,
        config=config,
        tiers=tuple(f"{width:g}" for width in widths),
        engine="flower",
        heads=tuple(zoo.classifier(model, sizes["num_classes"])) if config.label_mask else (),
        architecture=architecture,
        nodes=Machines(mail, setup, members),
    )


def _check_config(config: Config) -> None:
    """Raise an error for what only a simulation can do."""
    for name, table in config.rivals.items():
        if table.get("masked_loss"):
            raise ValueError(f"[{name}]: masked_loss needs the labels of all clients; use label_mask with nodes")
    if config.seeds:
        raise ValueError(f"a federation takes one seed and seeds is {list(config.seeds)}; run it once for each")
    if config.algorithm not in METHODS:
        raise ValueError(f"unknown algorithm {config.algorithm!r}")


def _take_in(clients: list[Client], config: Config, like: Member, node: int, table: Mapping[str, Any]) -> int | None:
    """The client that a node which came late is; None if it is none that was waited for."""
    one = member(node, table)
    host = next((i for i, client in enumerate(clients) if client.key == one.key), None)
    if host is None or (one.input, one.input_dtype) != (like.input, like.input_dtype):
        return None
    clients[host] = replace(_blank(one, config), width=clients[host].width, classes=clients[host].classes)
    return host


def _joined(mail: Mail, members: Sequence[Member], deployed: Sequence[float]) -> tuple[list[float], list[str | None]]:
    """(N,) the width of every node and, if classes are masked, those that it has; an error if one does not say.

    Args:
        deployed: (N,) the widths of those that come later; empty if nobody knows.
    """
    late = [i for i, one in enumerate(members) if one.node == NOBODY]
    if late and not deployed:
        raise RuntimeError(
            f"client {members[late[0]].key} is not there, and nobody knows its width; start it, or let the run begin "
            "without it by deploying with --widths"
        )
    found: list[Any] = [(deployed[i], None) if i in late else None for i in range(len(members))]

    def put(i: int, outcome: Any) -> None:
        found[i] = outcome

    jobs = [Job("join", f"client {one.key} joins", {"join": True}, {}, _not_joined) for one in members]
    mail.deliver([Step(i, lambda job=job: job, partial(put, i)) for i, job in enumerate(jobs) if i not in late])
    for one, outcome in zip(members, found, strict=True):
        if isinstance(outcome, Absent):
            raise RuntimeError(f"client {one.key} cannot take part: {outcome}")
    return [outcome[0] for outcome in found], [outcome[1] for outcome in found]


def _not_joined(value: Any) -> str | None:
    fine = isinstance(value, tuple) and len(value) == 2 and type(value[0]) is float and 0 < value[0] <= 1
    fine = fine and (value[1] is None or isinstance(value[1], str))
    return None if fine else f"a width that is none ({value!r:.50})"


def _blank(one: Member, config: Config) -> Client:
    """A client as the server has it: as many zeros as it has samples, which take no memory and tell nothing."""

    def pair(count: int) -> Any:
        kind = getattr(torch, config.dtype if one.input_dtype != "int64" else "int64")
        x = torch.zeros((), dtype=kind).expand(count, *one.input)
        return (x, torch.zeros((), dtype=torch.int64).expand(count)) if count else None

    return Client(pair(one.n_train), pair(one.n_val), pair(one.n_test), key=one.key)


def _mask(classes: str | None, count: int) -> torch.Tensor | None:
    if classes is None:
        return None
    mask = torch.zeros(count, dtype=torch.bool)
    mask[[int(word) for word in classes.split(",")]] = True
    return mask


# The record of a federation


class Record:
    """Everything that happened, line by line in a file, and what it cost. Also told to ``also``, such as a display."""

    def __init__(self, path: Path | None, also: Callable[[Mapping[str, Any]], None] | None = None):
        self.path, self.also = path, also
        self.counts: dict[int, dict[str, int]] = {}
        self.reasons: dict[int, list[str]] = {}

    def __call__(self, what: str, host: int, detail: str) -> None:
        """Note an event."""
        counts = self.counts.setdefault(host, {})
        counts[what] = counts.get(what, 0) + 1
        if what in ("failed", "absent", "restarted"):
            self.reasons.setdefault(host, []).append(detail or what)
        self.tell({"event": what, "host": host, "detail": detail})

    def tell(self, event: Mapping[str, Any]) -> None:
        """Write an event, with the time."""
        event = {"time": round(time.time(), 3), **event}
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(event) + "\n")
        if self.also:
            self.also(event)

    def write(self, folder: Path, machines: Machines) -> None:
        """Write who took part, what failed and why, and what each kind of job cost."""
        nodes = [
            {
                "client": one.key,
                "n_train": one.n_train,
                "absent_now": machines.mail.absent.get(i, ""),
                "events": self.counts.get(i, {}),
                "reasons": self.reasons.get(i, [])[-20:],
            }
            for i, one in enumerate(machines.members)
        ]
        costs = {kind: asdict(cost) for kind, cost in machines.mail.costs.items()}
        files.write_json(folder / COSTS, {"nodes": nodes, "costs": costs})
