"""Setting: what all methods of a run share: clients and their widths, data, the model and where it is trained."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm import data, profile, trace
from hetperm.client import Client
from hetperm.config import OWN, Config
from hetperm.data import Problem
from hetperm.data.images import Preparation
from hetperm.device.augment import Augment
from hetperm.device.bench import Loss, Workshop, logits_of
from hetperm.device.recipe import Recipe
from hetperm.engine.task import Engine
from hetperm.methods import METHODS
from hetperm.metrics import ACCURACY, Metric, metric_of
from hetperm.mixing import complexity
from hetperm.params import Params
from hetperm.plugins import load_installed
from hetperm.profile import Profile, Tier
from hetperm.randomness import seed_for
from hetperm.runs import data_checks, rehearsal
from hetperm.runs.building import build, cost_of_step, num_outputs, scalable_of
from hetperm.runs.local_steps import RATES, kind_of, recipe_of, step_of, with_rates
from hetperm.runs.placement import check_memory, device_of, engine_for, moved, placed
from hetperm.server.federation import own_widths
from hetperm.server.initial import fresh_model, nested_start
from hetperm.server.presence import EVERYBODY, Presence, absentees
from hetperm.server.slicer import Slicer
from hetperm.shards import labels_of
from hetperm.texts import one_line
from submodels import ScalableModel, zoo

log = logging.getLogger(__name__)


class Nodes(Protocol):
    """Real machines that hold the clients' data (`hetperm.federated`)."""

    def engine(self, setting: "Setting", base: float) -> Engine:
        """The engine that runs tasks at the nodes; ``base`` is the width of the setting's model in that of the run."""

    def score(
        self, setting: "Setting", wanted: Sequence[tuple[int, Params, float, str]]
    ) -> list[tuple[float, float] | None]:
        """(loss, metric) of (host, model, width, part): on that part of the host's data; None if it is absent."""

    def hand_over(self, setting: "Setting", models: Sequence[Params], widths: Sequence[float], method: str) -> None:
        """Give every client its personal model, to keep."""


@dataclass(frozen=True)
class Setting:
    """What all methods of a run share.

    Attributes:
        shop: the workbenches on which models are trained, one for every width.
        start: the global model before training.
        tiers: (N,) the tier of every client.
        engine: the name of the engine that runs the tasks; never "auto".
        heads: names of the classifier's parameters, if clients mask classes; `found_heads` looks for them.
        profile: what each tier can afford, one row per tier; empty if clients came with their own widths.
        devices: (N,) the tier of every client as its profile has it; empty if clients came with their own widths.
        warnings: what was odd about the clients and their sizes, one sentence each.
        architecture: the description from which `load_client` builds the model.
        partition: how the data were divided among clients; None if they came divided.
        presence: who is there in which round.
        preparation: how stored values became inputs of the model; None if they are inputs as they are.
        class_names: the name of every class; empty if the data have none.
        nodes: the machines that hold the data; None if this one does. With nodes, `clients` hold as many zeros.
    """

    clients: tuple[Client, ...]
    shop: Workshop
    start: Params
    metric: Metric
    dataset: str
    config: Config
    tiers: tuple[str, ...]
    engine: str
    heads: tuple[str, ...] = ()
    profile: tuple[Mapping[str, Any], ...] = ()
    devices: tuple[Tier, ...] = ()
    warnings: tuple[str, ...] = ()
    architecture: Mapping[str, Any] = field(default_factory=dict)
    partition: str | None = None
    presence: Presence = EVERYBODY
    preparation: Preparation | None = None
    class_names: tuple[str, ...] = ()
    nodes: Nodes | None = None

    def with_config(self, config: Config) -> "Setting":
        """The same data and model under another configuration, which must ask for the same data and model."""
        config = config.override(device=self.config.device)
        return replace(self, config=with_rates(config, self.shop.full.module), presence=presence_of(config))

    @property
    def slicer(self) -> Slicer:
        """The slicer for models of this architecture."""
        return Slicer(self.shop.scalable)

    @property
    def groups(self) -> tuple[int, ...] | None:
        """(N,) the group of every client; None if some client has none."""
        groups = tuple(client.group for client in self.clients)
        return None if None in groups else groups

    @property
    def tier_names(self) -> list[str]:
        """The tiers that have clients, the widest first."""
        width = dict(zip(self.tiers, [client.width for client in self.clients], strict=True))
        return sorted(width, key=lambda tier: -width[tier])

    @property
    def description(self) -> str:
        """One line about the data, the model, its widths and the device."""
        config, size = self.config, self.num_params(1.0)
        data, model = self.dataset, type(self.shop.full.module).__name__
        if self.dataset != OWN:
            data, model = f"{data} {self.partition or ''}".strip(), zoo.resolve(config.model)
        widths = sorted({client.width for client in self.clients}, reverse=True)
        sizes = "" if widths == [1.0] else f", trained at widths {', '.join(f'{width:g}' for width in widths)}"
        return f"{data}; {model} with {size:,} parameters{sizes}; {config.dtype} on {config.device}"

    @property
    def recipe(self) -> Recipe:
        """How local steps are taken."""
        return recipe_of(self.config, own_augment=self.shop.augment is not None)

    @property
    def plain_lr(self) -> float:
        """The step size of plain gradient steps of the server: that of local steps, if these are SGD."""
        if self.config.optimizer == "sgd":
            return self.config.global_lr
        return RATES[kind_of(self.shop.full.module)]

    def num_params(self, width: float) -> int:
        """The number of parameters of a model of this width."""
        if self.shop.scalable is None:
            return sum(p.numel() for p in self.shop.full.module.parameters())
        return complexity.num_params(self.shop.scalable, width)

    def macs(self, width: float) -> int:
        """The multiply-adds of the forward pass of one sample at this width."""
        if self.shop.scalable is None:
            return cost_of_step(self.shop.full.module, self.clients[0], batch_size=2).macs
        # They do not depend on the batch: where the profile was priced, the same step is not counted again.
        step = step_of(self.config) if self.profile else {"batch_size": 2}
        return self.shop.scalable.cost(width, **step).macs

    def model_widths(self, name: str) -> list[float]:
        """(N,) the width of every client's personal model under a method."""
        method = METHODS[name]
        if method.one_size:
            return own_widths(self.clients, "smallest")
        return own_widths(self.clients, self.config.personal_width if method.mixes else "own")

    def one_size(self) -> "Setting":
        """The setting for methods that need one size: all clients have the model of the smallest client."""
        widths = {client.width for client in self.clients}
        if widths == {1.0}:
            return self
        bench = self.shop.at(min(widths))
        return replace(
            self,
            # The smallest model is the global model of these methods, so all clients hold all of it.
            clients=tuple(replace(client, width=1.0) for client in self.clients),
            shop=Workshop(copy.deepcopy(bench.module), bench.loss, augment=self.shop.augment),
            start=fresh_model(self.slicer, min(widths), self.start, seed=self.config.seed),
        )

    def masked(self) -> "Setting":
        """The setting in which each client trains and predicts only the classes that it has."""
        if self.config.label_mask:
            return self
        clients, heads = _masked(self.clients, self.shop.full.module)
        return replace(self, clients=clients, heads=tuple(heads))

    def found_heads(self) -> tuple[str, ...]:
        """Names of the classifier's trained parameters; empty if the model has no linear layer for its outputs."""
        module = self.shop.full.module
        heads = zoo.classifier(module, num_outputs(module, self.clients[0]))
        return tuple(name for name in heads if name in self.start)


def from_config(config: Config, tiers: Profile | None = None) -> Setting:
    """The setting of a run, from its configuration: data are loaded and the model is built.

    Args:
        config: the configuration.
        tiers: the capacity profile; the one that the configuration names unless given.
    """
    load_installed()
    tiers = profile.load(config.capacity_profile) if tiers is None else tiers
    presence_of(config)  # called for its error, before the data are read
    problem = problem_of(config)
    sizes = {name: getattr(problem, name) for name in ("in_channels", "num_classes", "image_size")}
    model = placed(build(config, sizes), config)
    loss, metric = problem.loss or F.cross_entropy, metric_of(config.metric or problem.metric)
    rehearsal.check_weights(model, remedy="--model must build one with other weights")
    remedy = f"{problem.name} does not go with --model {config.model} and --metric {metric.name}; change one of them"
    rehearsal.rehearse(model, problem.clients, loss, metric, remedy=remedy)
    tiers, assigned, scalable = _tiers_for(config, tiers, model, problem)
    clients = [replace(client, width=tiers.tiers[k].width) for client, k in zip(problem.clients, assigned, strict=True)]
    empty = profile.empty_tiers(tiers, assigned)
    warnings = [f"tier {name} of profile {tiers.name} has none of the {len(clients)} clients" for name in empty]
    untrained = profile.uncovered([client.width for client in clients], config.extraction)
    if untrained:
        warnings.append(untrained)
    step = step_of(config)
    whole = cost_of_step(model, clients[0], **step) if scalable is None else None
    table = profile.table(tiers, assigned, scalable, whole=whole, **step)
    warnings += profile.over_budget(table)
    for warning in warnings:
        log.warning("%s", warning)
    shop = Workshop(model, loss, scalable)
    setting = _setting(shop, clients, config, metric, [tiers.tiers[k].name for k in assigned], problem.name)
    if config.start == "nested":
        widths = [client.width for client in setting.clients]
        setting = replace(setting, start=nested_start(setting.slicer, widths, setting.start, seed=config.seed))
    return replace(
        setting,
        profile=tuple(table),
        devices=tuple(tiers.tiers[k] for k in assigned),
        warnings=tuple(warnings),
        architecture={"name": zoo.resolve(config.model), **sizes, "options": dict(config.model_options)},
        partition=problem.partition,
        preparation=problem.preparation,
        class_names=problem.class_names,
    )


def problem_of(config: Config) -> Problem:
    """The clients' data that a configuration asks for."""
    return data.load(
        config.dataset,
        num_clients=config.num_clients,
        partition=config.partition,
        samples_per_client=config.samples_per_client,
        validation_share=config.validation_share,
        seed=config.seed,
        data_dir=config.data_dir,
        download=config.download,
        image_size=config.image_size,
        max_test_samples=config.max_test_samples,
    )


def _tiers_for(
    config: Config, tiers: Profile, model: nn.Module, problem: Problem
) -> tuple[Profile, list[int], ScalableModel | None]:
    """The tiers with their final widths, the tier of every client, and the scalable model if parts are needed."""
    groups = [client.group for client in problem.clients]
    assigned = profile.assign(
        tiers, len(groups), groups=None if None in groups else groups, seed=seed_for(config.seed, "tiers")
    )
    by_budget = config.widths_from == "budget"
    # If no client needs a part, the model need not be traced, and may be one that cannot be cut.
    if not by_budget and all([tiers.tiers[k].width == 1 for k in assigned]):
        return tiers, assigned, None
    remedy = "--capacity-profile homogeneous" + (" --widths-from profile" if by_budget else "")
    scalable = scalable_of(model, problem.clients[0], remedy)
    if by_budget:
        tiers = profile.solved(tiers, scalable, **step_of(config))
    return tiers, assigned, scalable


def from_model(
    model: nn.Module,
    clients: Sequence[Client],
    config: Config,
    *,
    loss: Loss | None,
    metric: Metric | None,
    augment: Augment | None = None,
) -> Setting:
    """The setting of a run with a user's own model and shards. Every width is a tier."""
    if augment is not None and config.augment != "none":
        raise ValueError(f"augment is a function and {config.augment!r} in the configuration; give one of them")
    rehearsal.check_weights(model)
    kind, model = type(model), placed(_copied(model), config)
    loss, metric = F.cross_entropy if loss is None else loss, metric_of(metric or config.metric or ACCURACY)
    outputs = rehearsal.rehearse(model, clients, loss, metric, augment)
    # If no client needs a part, the model need not be traced, and may be one that cannot be cut.
    cut = any([client.width < 1 for client in clients])
    # Of an object with logits these stay whole, and hidden states beside them may shrink.
    whole = None if isinstance(outputs, Tensor) else logits_of
    scalable = scalable_of(model, clients[0], "clients of width 1", whole) if cut else None
    shop = Workshop(model, loss, scalable, augment=augment)
    tiers = [f"{client.width:g}" for client in clients]
    setting = _setting(shop, clients, config, metric, tiers, OWN)
    architecture = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    return replace(setting, architecture=architecture, warnings=_odd_widths(setting))


def _odd_widths(setting: Setting) -> tuple[str, ...]:
    """Warn of widths of a user's clients that leave parts untrained or cannot be met; the sentences."""
    widths = [client.width for client in setting.clients]
    untrained = profile.uncovered(widths, setting.config.extraction)
    scalable = setting.shop.scalable
    # The narrowest is met worst; profiles have such notes for every tier.
    coarse = [] if scalable is None else scalable.axis_map.coarse(min(widths))
    warnings = (*([untrained] if untrained else []), *coarse)
    for warning in warnings:
        log.warning("%s", warning)
    return warnings


def _copied(model: nn.Module) -> nn.Module:
    """A copy of a user's model, which itself is not changed."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module may hold anything
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(
            f"the model cannot be copied ({reason}); take out of it what cannot, such as locks, open files or pruned "
            "weights (torch.nn.utils.prune.remove)"
        ) from error


def empty(model: nn.Module, config: Config, example: Tensor, *, dataset: str, cut: bool) -> Setting:
    """The setting of a run that is over, without its clients.

    Args:
        model: at full width.
        example: a batch of one sample.
        cut: whether some client has a width below 1.
    """
    model = placed(model, config)
    weight = next(model.parameters())
    example = example.to(weight.device, weight.dtype if example.is_floating_point() else None)
    shop = Workshop(model, F.cross_entropy, ScalableModel(model, example) if cut else None)
    config = with_rates(config.override(device=str(device_of(config.device))), model)
    return Setting((), shop, shop.full.take(), metric_of(ACCURACY), dataset, config, (), "sequential")


def prepared(clients: Sequence[Client], setting: Setting) -> tuple[Client, ...]:
    """The clients with their shards on the device of a setting, and with their classes if these are masked there."""
    config = setting.config
    here = tuple(moved(client, config) for client in clients)
    return _masked(here, setting.shop.full.module)[0] if config.label_mask else here


def _setting(
    shop: Workshop, clients: Sequence[Client], config: Config, metric: Metric, tiers: Sequence[str], dataset: str
) -> Setting:
    model, device = shop.full.module, device_of(config.device)
    clients = tuple(_numbered(clients))
    data_checks.check_samples(clients, model, config)
    data_checks.check_labels(clients, shop.loss, metric)
    data_checks.check_inputs(clients)
    data_checks.check_tested(clients)
    data_checks.check_images(clients, config)
    if not shop.full.slots:
        raise ValueError("the model has no parameters to train; set requires_grad on some")
    check_memory(shop, clients, config)
    # After the checks, so that bad input fails before data are copied to a device.
    clients = tuple(moved(client, config) for client in clients)
    heads: list[str] = []
    if config.label_mask:
        clients, heads = _masked(clients, model)
        if all([int(client.classes.sum()) == 1 for client in clients]):
            log.warning("with label_mask each client can only answer its one class: every model is right untrained")
    data_checks.check_masks(clients)
    setting = Setting(
        clients=clients,
        shop=shop,
        start=shop.full.take(),
        metric=metric,
        dataset=dataset,
        config=with_rates(config.override(device=str(device)), model),
        tiers=tuple(tiers),
        engine=engine_for(shop, clients, config),
        heads=tuple(heads),
        presence=presence_of(config),
    )
    _check_sketch(setting)
    never = absentees(setting.clients, setting.presence)
    if never:
        log.warning(
            "client %d is away in every round of the trace (%d such clients): nothing is trained on its data, and its "
            "model is a part of the global one; change the trace",
            never[0], len(never),
        )  # fmt: skip
    return setting


def _check_sketch(setting: Setting) -> None:
    """Warn of a sketch that is no smaller than what it stands for."""
    config = setting.config
    if config.sketch is None or not any([METHODS[name].mixes for name in (config.algorithm, *config.baselines)]):
        return
    compared = 1.0 if config.discrepancy == "masked" else min([client.width for client in setting.clients])
    numbers = setting.num_params(compared)
    if config.sketch >= numbers:
        log.warning(
            "sketch %d is no smaller than the gradients that clients compare, of %d numbers: they send more and their "
            "distances are less accurate; leave sketch out",
            config.sketch, numbers,
        )  # fmt: skip


def presence_of(config: Config) -> Presence:
    """Who is there in which round, under a configuration."""
    return Presence(config.participation, trace.load(config.trace) if config.trace else ())


def _numbered(clients: Sequence[Client]) -> Iterator[Client]:
    """Yield the clients, each with a key: its own, or its position."""
    owners: dict[int, int] = {}  # key -> the first client that has it
    for i, client in enumerate(clients):
        key = i if client.key is None else client.key
        if owners.setdefault(key, i) != i:
            raise ValueError(f"clients {owners[key]} and {i} have the same key {key}; keys tell clients apart")
        yield replace(client, key=key)


def _masked(clients: Sequence[Client], module: nn.Module) -> tuple[tuple[Client, ...], list[str]]:
    """The clients, each with the classes of its shard, and the names of the classifier's parameters."""
    # The model is asked, because a shard may lack the last classes.
    num_classes = num_outputs(module, clients[0])
    # All samples of a Dataset are read here, once: nothing else tells their classes.
    every = [labels_of(client.train) for client in clients]
    for i, labels in enumerate(every):
        if labels.is_floating_point() or labels.dim() != 1 or int(labels.max()) >= num_classes:
            raise ValueError(f"label_mask needs classes as labels, and those of client {i} are not; leave it out")
    masks = [torch.zeros(num_classes, dtype=torch.bool) for _ in clients]
    for mask, labels in zip(masks, every, strict=True):
        mask[labels.unique().cpu()] = True
    return (
        tuple(replace(client, classes=mask) for client, mask in zip(clients, masks, strict=True)),
        zoo.classifier(module, num_classes),
    )
