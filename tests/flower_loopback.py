"""Nodes in this process, and a carrier of packets that can lose, delay and change them."""

from collections.abc import Callable

import torch

from hetperm.config import Config
from hetperm.device import packet
from hetperm.engine.flower_post import Lost, Rules
from hetperm.federated import shard
from hetperm.federated.members import gather
from hetperm.federated.node import Limits, Node
from hetperm.federated.record import Record
from hetperm.federated.server import settle
from hetperm.runs import training
from hetperm.runs.placement import one_thread
from hetperm.runs.setting import Setting, from_config, problem_of
from hetperm.state import State

WIDTHS = "[tiers.a]\nshare = 1\nwidth = 1.0\n[tiers.b]\nshare = 1\nwidth = 0.5\n[tiers.c]\nshare = 2\nwidth = 0.25\n"
FIRST = 100  # the number of the first node


class Loopback:
    """Hands packets to nodes of this process when answers are asked for.

    Args:
        change: (node, answer) -> what arrives of it: the answer, other bytes, a `Lost`, or None for nothing at all.
    """

    def __init__(self, nodes: list[Node], change: Callable | None = None):
        self.nodes = dict(enumerate(nodes, FIRST))
        self.change = change or (lambda node, answer: answer)
        self.waiting: dict[str, tuple[int, bytes]] = {}
        self.away: set[int] = set()
        self.sent = 0

    def push(self, node: int, content: bytes, ttl: float) -> str:
        self.sent += 1
        self.waiting[str(self.sent)] = (node, content)
        return str(self.sent)

    def pull(self, ids) -> dict[str, bytes | Lost]:
        answers = {}
        for name in [name for name in ids if name in self.waiting]:
            node, content = self.waiting.pop(name)
            answer = None if node in self.away else self.change(node, self.nodes[node].handle(content))
            if answer is not None:
                answers[name] = answer
        return answers

    def online(self) -> set[int]:
        return set(self.nodes) - self.away


def tasks_in(answer: bytes) -> bool:
    """Whether a packet answers tasks with tensors, which is what lies are told about."""
    table, tensors = packet.read(answer)
    return table["kind"] == "answer" and bool(tensors)


def changed(answer: bytes, change: Callable[[torch.Tensor], torch.Tensor]) -> bytes:
    """An answer whose tensors are changed, and consistent in itself: a lie, not a damage."""
    table, tensors = packet.read(answer)
    new = {name: change(x) for name, x in tensors.items()}
    names = {name: packet.digest(x) for name, x in new.items()}

    def renamed(value):
        if isinstance(value, dict):
            return {key: renamed(one) for key, one in value.items()}
        if isinstance(value, list):
            return [renamed(one) for one in value]
        return names.get(value, value) if isinstance(value, str) else value

    return packet.write(renamed(table), {names[name]: x for name, x in new.items()})


def small(folder, **settings) -> Config:
    """A run of four clients of three widths that takes a second."""
    path = folder / "widths.toml"
    path.write_text(WIDTHS)
    given = {"algorithm": "perm", "baselines": (), "num_clients": 4, "samples_per_client": 24, "model": "mlp"}
    given |= {"capacity_profile": str(path), "engine": "sequential", "steps": 40, "epochs": 2, "partition": "iid"}
    return Config(**(given | settings))


def nodes_of(config: Config, out=None) -> list[Node]:
    """The nodes that hold what a simulation deals to its clients."""
    problem, clients = problem_of(config), from_config(config).clients
    return [
        Node(shard.of_problem(problem, i, i), Limits(width=one.width), out and out / f"node-{i}")
        for i, one in enumerate(clients)
    ]


def settled(config: Config, post, rules: Rules | None = None, record: Record | None = None) -> Setting:
    record = record or Record(None)
    return settle(config, gather(post, config.num_clients, wait=5, on_event=record), post, rules or Rules(), record)


def trained(setting: Setting, method: str | None = None) -> State:
    """What a method ends in."""
    method = method or setting.config.algorithm
    with one_thread():
        *_, last = training.epochs(setting, method, steps=setting.config.steps)
    return last.state


def same_models(one: State, other: State) -> bool:
    pairs = list(zip(one.deployed, other.deployed, strict=True))
    return all([list(a) == list(b) and all([torch.equal(a[name], b[name]) for name in a]) for a, b in pairs])
