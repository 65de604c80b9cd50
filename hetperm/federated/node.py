"""Node: one client on its own machine. It takes packets, trains what they hold on its own data, and answers.

Data never leave it. It builds the model from the configuration of the run, finds the width that its memory allows, and
refuses whatever is wider.
"""

import logging
import secrets
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it at the first trace, for seconds: here, no server waits for that

import hetperm
from hetperm.client import Client
from hetperm.config import Config, from_text
from hetperm.device import packet, wire
from hetperm.device.bench import Workshop
from hetperm.device.limits import LARGEST
from hetperm.device.packet import BadPacket, Missing, Shelf, digests_of
from hetperm.engine.sequential import run_task
from hetperm.engine.task import Failure, Task
from hetperm.federated import shard as shards
from hetperm.federated.places import node_place
from hetperm.federated.shard import Shard
from hetperm.metrics import metric_of
from hetperm.params import Params
from hetperm.plugins import load_installed
from hetperm.runs import client_models
from hetperm.runs.building import build, example_of
from hetperm.runs.local_steps import step_of
from hetperm.runs.placement import moved, placed
from hetperm.runs.scores import load_for_evaluation, score_one
from hetperm.server.slicer import Slicer
from hetperm.shards import first, labels_of, read, size_of
from hetperm.texts import one_line
from submodels import WHOLE, Budget, ScalableModel

log = logging.getLogger(__name__)

WIDTHS = tuple(2.0**-k for k in range(7))  # those that a memory limit chooses from: few, so that clients share them
SERVERS = 1000  # whose packets are told from replayed ones: every run has a server of its own


class TooWide(ValueError):
    """A task with a model that is wider than the device can train."""


@dataclass(frozen=True)
class Limits:
    """What a device can afford.

    Attributes:
        width: of the global model; None: as `device_mb` allows, or all of it.
        device_mb: memory for a step of training, in MiB.
        largest: bytes of a packet that it reads.
    """

    width: float | None = None
    device_mb: float | None = None
    largest: int = LARGEST


@dataclass
class Model:
    """The model of a run, as this device builds and holds it."""

    id: str
    config: Config
    shop: Workshop
    client: Client
    width: float
    architecture: Mapping[str, Any]


class Node:
    """A client on its own machine.

    Args:
        shard: its data; the client's key tells it from other clients.
        out: folder in which it keeps its personal model; None keeps none.
        stateless: it is made anew for every packet, so that the server must send everything every time.
    """

    def __init__(
        self,
        shard: Shard,
        limits: Limits | None = None,
        out: Path | None = None,
        *,
        stateless: bool = False,
    ):
        self.shard, self.limits, self.out = shard, limits or Limits(), out
        self.session, self.stateless = secrets.token_hex(8), stateless
        self.shelf = Shelf()
        self.model: Model | None = None
        self._last: dict[str, int] = {}  # server -> the number of its last packet

    def handle(self, content: bytes) -> bytes:
        """The answer to a packet. It never fails: what is wrong is part of the answer."""
        try:
            table, tensors = packet.read(content, self.limits.largest)
            match table.get("kind"):
                case "hello":
                    return self._packet({"kind": "hello", **self.introduction()})
                case "ping":
                    return self._packet({"kind": "pong"})
                case "tasks":
                    return self._tasks(table, tensors)
            raise BadPacket(f"a packet of kind {table.get('kind')!r}")
        except Missing as missing:
            return self._packet({"kind": "need", "setup": False, "missing": missing.digests})
        except Exception as error:  # whatever a packet holds, the node must live on
            log.warning("refused: %s", one_line(f"{type(error).__name__}: {error}"))
            told = one_line(str(error)) if isinstance(error, BadPacket) else type(error).__name__
            return self._packet({"kind": "refused", "reason": told[:500]})

    def introduction(self) -> dict[str, Any]:
        """What the server is told of this client: counts and shapes, nothing of the data."""
        shard, client = self.shard, self.shard.client
        x, _ = read(first(client.train, 1))
        return {
            "key": client.key,
            "n_train": client.n_train,
            "n_val": client.n_val,
            "n_test": 0 if client.test is None else size_of(client.test),
            "input": list(x.shape[1:]),
            "input_dtype": str(x.dtype).removeprefix("torch."),
            "in_channels": shard.in_channels,
            "image_size": shard.image_size,
            "num_classes": shard.num_classes,
            "metric": shard.metric,
            "hetperm": hetperm.__version__,
        }

    def _packet(self, table: Mapping[str, Any], tensors: Params | None = None) -> bytes:
        known = {"stateless": True} if self.stateless else {"session": self.session}
        return packet.write({**table, **known}, tensors)

    def _tasks(self, table: Mapping[str, Any], tensors: Params) -> bytes:
        server, number = table["server"], int(table["number"])
        if number <= self._last.get(server, -1):
            raise BadPacket(f"packet {number} of this server came before: it is replayed")
        self._last[server] = number
        if len(self._last) > SERVERS:
            del self._last[next(iter(self._last))]
        if "setup" in table and (self.model is None or self.model.id != table["setup"]["id"]):
            self.model = self._build(table["setup"])
        if self.model is None or self.model.id != table["setup_id"]:
            return self._packet({"kind": "need", "setup": True, "missing": []})
        plain = [task["params"] for task in table["tasks"]]
        held = self.shelf.take(set().union(*map(digests_of, plain)), tensors)
        self.shelf.put({name: held[name] for one in plain for name in _in_order(one)})
        made: Params = {}
        outcomes = [self._outcome(task, held, made) for task in table["tasks"]]
        # The server still has what it sent, so what did not change is not sent back.
        new = {name: x for name, x in made.items() if name not in held}
        self.shelf.put(new)
        return self._packet({"kind": "answer", "outcomes": outcomes}, new)

    def _outcome(self, task: Mapping[str, Any], held: Params, made: Params) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            value = self._work(task, packet.put_together(task["params"], held))
        except Exception as error:  # an update, a model or a shard can raise anything; the node lives on
            log.warning("%s: %s", task.get("label", "a task"), one_line(f"{type(error).__name__}: {error}"))
            # The message of an error may quote data or paths of this device: only its kind leaves.
            told = str(error) if isinstance(error, TooWide) else f"{type(error).__name__}, see the log of the node"
            return {"error": told}
        return {"value": packet.taken_apart(value, made), "seconds": time.perf_counter() - began}

    def _work(self, task: Mapping[str, Any], params: Params) -> Any:
        model, width = self.model, float(task["width"]) if "width" in task else 0.0
        if width > model.width:
            raise TooWide(f"a model of width {width:g} is wider than this device's {model.width:g}")
        client = model.client if task.get("masked") else replace(model.client, classes=None)
        match task:
            case {"join": True}:
                classes = model.client.classes
                return model.width, None if classes is None else ",".join(map(str, classes.nonzero()[:, 0].tolist()))
            case {"score": "val" | "test" as part}:
                metric = metric_of(model.config.metric or self.shard.metric)
                return tuple(map(float, score_one(model.shop, metric, client, params, width, part)))
            case {"keep": dict(facts)}:
                return self._keep(params, width, client, facts)
            case {"update": dict(update), "seed": int(seed), "part": "train" | "val" as part}:
                label = str(task.get("label", "a task"))
                job = Task(wire.read(update), params, host=0, seed=seed, width=width, label=label, part=part)
                outcome = run_task(job, [client], model.shop)
                if isinstance(outcome, Failure):
                    raise outcome.error
                return outcome
        raise BadPacket("a task that is none")

    def _build(self, setup: Mapping[str, Any]) -> Model:
        """The model of a run, from its configuration."""
        config = from_text(without_plugins(setup["config"]), "the run's configuration")
        load_installed()
        sizes = {name: setup["sizes"][name] for name in ("in_channels", "num_classes", "image_size")}
        if isinstance(sizes["image_size"], list):
            sizes["image_size"] = tuple(sizes["image_size"])
        module = placed(build(config, sizes), config)
        client = moved(self.shard.client, config)
        limits = self.limits
        try:
            scalable = ScalableModel(module, example_of(module, client))
        except ValueError:
            if (limits.width or 1.0) < 1 or limits.device_mb is not None:
                raise
            scalable = None  # a model that cannot be cut, whole
        width = limits.width or 1.0
        if limits.device_mb is not None:
            size = min(config.batch_size, client.n_train)
            step = step_of(config) | {"batch_size": size, "accumulate": min(config.accumulate, size)}
            fits = scalable.fit(Budget(train_mb=limits.device_mb), widths=WIDTHS, **step)
            width = fits if limits.width is None else min(limits.width, fits)
        if config.label_mask:
            classes = torch.zeros(sizes["num_classes"], dtype=torch.bool)
            classes[labels_of(client.train).unique()] = True
            client = replace(client, classes=classes)
        shop = Workshop(module, self.shard.loss, scalable)
        log.info("built %s at width %g for run %s", config.model, width, setup["id"][:8])
        return Model(setup["id"], config, shop, replace(client, width=width), width, setup["architecture"])

    def _keep(self, params: Params, width: float, client: Client, facts: Mapping[str, Any]) -> None:
        """Keep the personal model: with the statistics of norms on this device's data, as a file of its own."""
        if self.out is None:
            return
        bench = self.model.shop.at(width)
        load_for_evaluation(bench, params, client)
        index = Slicer(self.model.shop.scalable).index(width)
        manifest = {"architecture": self.model.architecture, "width": width}
        if index is not WHOLE:
            manifest |= client_models.channels(index)
        manifest |= client_models.input_of(read(first(client.train, 1))[0])
        if client.classes is not None:
            manifest["classes"] = client.classes.nonzero().flatten().tolist()
        self.out.mkdir(parents=True, exist_ok=True)
        manifest |= {key: facts.get(key) for key in ("algorithm", "dataset", "seed", "tier", "score")}
        manifest[self.model.config.metric or self.shard.metric] = manifest.pop("score")
        manifest |= {"n_train": client.n_train, "data": self.shard.source}
        client_models.save_client(self.out, client.key, bench.module, manifest)
        log.info("kept the personal model of width %g in %s", width, self.out / "models")


def from_folder(folder: Path, *, stateless: bool = False) -> Node:
    """The node of a folder that `hetperm deploy` wrote, with its data."""
    place = node_place(folder)
    found = shards.load(place.data, place.config, place.client)
    return Node(found, Limits(place.width, place.device_mb), folder, stateless=stateless)


def without_plugins(config: str) -> str:
    """The configuration that a server sent, unless it names code to run: that is for the owner of a device to say."""
    if tomllib.loads(config).get("plugins"):
        raise BadPacket("a configuration that names plugins; a node runs only those of its own run.toml")
    return config


def _in_order(plain: Any) -> list[str]:
    """The digests of a model, in its order."""
    return list(plain["model"].values()) if isinstance(plain, dict) and "model" in plain else sorted(digests_of(plain))
