"""The server of a federation: the setting of a run whose clients are nodes, and what it asks of them beside tasks."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from hetperm.client import Client
from hetperm.config import Config
from hetperm.device.bench import Workshop
from hetperm.engine.flower import Flower, Scored
from hetperm.engine.flower_jobs import Job, Step
from hetperm.engine.flower_mail import Mail
from hetperm.engine.flower_post import OnEvent, Post, Rules
from hetperm.engine.flower_roster import NOBODY
from hetperm.engine.task import Absent
from hetperm.federated.members import Member, member
from hetperm.methods import METHODS
from hetperm.metrics import metric_of
from hetperm.params import Params
from hetperm.plugins import load_installed
from hetperm.runs.building import build, scalable_of
from hetperm.runs.local_steps import with_rates
from hetperm.runs.placement import placed
from hetperm.runs.setting import Setting, presence_of
from hetperm.server.initial import nested_start
from hetperm.server.slicer import Slicer
from submodels import zoo

log = logging.getLogger(__name__)

LONGEST = 10 * 2**20  # letters of a list of classes


class Machines:
    """The nodes of a run, as `Setting.nodes`: where tasks run, models are scored and personal models are kept."""

    def __init__(self, mail: Mail):
        self.mail = mail
        self.last: dict[int, float] = {}  # host -> the last score on its test data
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
                self.last[host] = one[1]
        return found

    def hand_over(self, setting: Setting, models: Sequence[Params], widths: Sequence[float], method: str) -> None:
        """Give every client its personal model, to keep."""
        facts = [
            {
                "algorithm": method,
                "dataset": setting.dataset,
                "seed": setting.config.seed,
                "tier": setting.tiers[i],
                "score": self.last.get(i),
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
    load_installed()
    first = members[0]
    num_classes = max(one.num_classes for one in members)
    sizes = {"in_channels": first.in_channels, "num_classes": num_classes, "image_size": first.image_size}
    config = config.override(num_clients=len(members), device="cpu", engine="sequential", workers=1)
    model = placed(build(config, sizes), config)
    config = with_rates(config, model)
    architecture = {"name": zoo.resolve(config.model), **sizes, "options": dict(config.model_options)}
    # A node runs no code that a server names: plugins are those of its own run.toml.
    setup = {"config": config.override(plugins=()).to_toml(), "sizes": sizes, "architecture": architecture}
    setup["id"] = hashlib.sha256(json.dumps(setup).encode()).hexdigest()[:16]
    mail = Mail(post, [one.node for one in members], setup, rules, on_event)
    widths, classes = _joined(mail, members, widths)
    # A list: who comes late replaces what stands for it.
    clients = [
        replace(_blank(one, config), width=width, classes=_mask(own, sizes["num_classes"]))
        for one, width, own in zip(members, widths, classes, strict=True)
    ]
    mail.roster.newcomer = partial(_take_in, clients, config, replace(first, num_classes=num_classes))
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
        metric=metric_of(config.metric or first.metric),
        dataset=config.dataset,
        config=config,
        tiers=tuple(f"{width:g}" for width in widths),
        engine="flower",
        heads=tuple(zoo.classifier(model, sizes["num_classes"])) if config.label_mask else (),
        architecture=architecture,
        presence=presence_of(config),
        nodes=Machines(mail),
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


def _take_in(
    clients: list[Client], config: Config, like: Member, node: int, table: Mapping[str, Any], missing: Collection[int]
) -> int:
    """The client that a node which came late is; an error if it is none of those that are missing.

    Args:
        like: what its samples must be like, with the number of classes that the model has.
    """
    one = member(node, table)
    host = next((i for i, client in enumerate(clients) if client.key == one.key), None)
    if host is None:
        raise ValueError(f"it says that it is client {one.key}, and the run has none")
    if host not in missing:
        raise ValueError(f"another node is client {one.key}")
    if one.kind != like.kind:
        raise ValueError(f"its samples are of another kind ({one.kind}) than those of the others ({like.kind})")
    if one.num_classes > like.num_classes:
        raise ValueError(f"it has {one.num_classes} classes and the model {like.num_classes}")
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

    count = max(one.num_classes for one in members)
    jobs = [Job("join", f"client {one.key} joins", {"join": True}, {}, partial(_not_joined, count)) for one in members]
    mail.deliver([Step(i, lambda job=job: job, partial(put, i)) for i, job in enumerate(jobs) if i not in late])
    for one, outcome in zip(members, found, strict=True):
        if isinstance(outcome, Absent):
            raise RuntimeError(f"client {one.key} cannot take part: {outcome}")
    return [outcome[0] for outcome in found], [outcome[1] for outcome in found]


def _not_joined(count: int, value: Any) -> str | None:
    fine = isinstance(value, tuple) and len(value) == 2 and type(value[0]) is float and 0 < value[0] <= 1
    if not fine:
        return f"a width that is none ({value!r:.50})"
    words = [] if value[1] is None else str(value[1])[:LONGEST].split(",")
    known = all([re.fullmatch("[0-9]{1,9}", word) and int(word) < count for word in words])
    return None if known else f"classes that are none ({value[1]!r:.50})"


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
