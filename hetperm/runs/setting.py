"""Setting: what all methods of a run share: clients and their widths, data, the model and where it is trained."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm import data, profile, trace
from hetperm.client import Client
from hetperm.config import Config
from hetperm.data import Problem
from hetperm.device.bench import Loss, Workshop
from hetperm.engine.choice import choose
from hetperm.memory import GB, available_bytes
from hetperm.methods import METHODS
from hetperm.mixing import complexity
from hetperm.params import Params
from hetperm.profile import Profile, Tier
from hetperm.randomness import seed_for
from hetperm.runs.evaluate import accuracy
from hetperm.server.federation import own_widths
from hetperm.server.initial import fresh_model, nested_start
from hetperm.server.presence import EVERYBODY, Presence
from hetperm.server.slicer import Slicer
from hetperm.texts import one_line, shown
from submodels import ScalableModel, zoo
from submodels.cost import count
from submodels.norms import check_batch, has_batch_norm

log = logging.getLogger(__name__)

Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> mean over the batch; larger is better
OWN = "own"  # the name of the data set in `fit`
# Step sizes of the global model: of linear layers only, with convolutions over time, and of all others.
RATES = {"linear": 0.5, "time": 0.3, "other": 0.1}
PERSONAL = 0.6  # of it is the step size of the personal models


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
        presence: who is there in which round.
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
    presence: Presence = EVERYBODY

    def with_config(self, config: Config) -> "Setting":
        """The same data and model under another configuration, which must ask for the same data and model."""
        config = config.override(device=self.config.device)
        return replace(self, config=with_rates(config, self.shop.full.module), presence=_presence(config))

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
            data, model = f"{data} {config.partition}", zoo.resolve(config.model)
        widths = sorted({client.width for client in self.clients}, reverse=True)
        sizes = "" if widths == [1.0] else f", trained at widths {', '.join(f'{width:g}' for width in widths)}"
        return f"{data}; {model} with {size:,} parameters{sizes}; {config.dtype} on {config.device}"

    def num_params(self, width: float) -> int:
        """The number of parameters of a model of this width."""
        if self.shop.scalable is None:
            return sum(p.numel() for p in self.shop.full.module.parameters())
        return complexity.num_params(self.shop.scalable, width)

    def macs(self, width: float) -> int:
        """The multiply-adds of the forward pass of one sample at this width."""
        if self.shop.scalable is None:
            return count(self.shop.full.module, _example(self.shop.full.module, self.clients[0]), batch_size=2).macs
        return self.shop.scalable.cost(width, batch_size=2).macs

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
            shop=Workshop(copy.deepcopy(bench.module), bench.loss),
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
        module, x = self.shop.full.module, self.clients[0].train[0]
        heads = zoo.classifier(module, _num_outputs(module, x))
        return tuple(name for name in heads if name in self.start)


def from_config(config: Config, tiers: Profile | None = None) -> Setting:
    """The setting of a run, from its configuration: data are loaded and the model is built.

    Args:
        config: the configuration.
        tiers: the capacity profile; the one that the configuration names unless given.
    """
    tiers = profile.load(config.capacity_profile) if tiers is None else tiers
    _presence(config)  # called for its error, before the data are read
    problem = data.load(
        config.dataset,
        num_clients=config.num_clients,
        partition=config.partition,
        samples_per_client=config.samples_per_client,
        validation_share=config.validation_share,
        seed=config.seed,
        data_dir=config.data_dir,
        download=config.download,
        image_size=config.image_size,
    )
    sizes = {name: getattr(problem, name) for name in ("in_channels", "num_classes", "image_size")}
    model = _placed(build(config, sizes), config)
    tiers, assigned, scalable = _tiers_for(config, tiers, model, problem)
    clients = [replace(client, width=tiers.tiers[k].width) for client, k in zip(problem.clients, assigned, strict=True)]
    empty = profile.empty_tiers(tiers, assigned)
    warnings = [f"tier {name} of profile {tiers.name} has none of the {len(clients)} clients" for name in empty]
    untrained = profile.uncovered([client.width for client in clients], config.extraction)
    if untrained:
        warnings.append(untrained)
    for warning in warnings:
        log.warning("%s", warning)
    shop = Workshop(model, F.cross_entropy, scalable)
    setting = _setting(shop, clients, config, accuracy, [tiers.tiers[k].name for k in assigned], problem.name)
    size = config.batch_size
    whole = count(model, _example(model, clients[0]), batch_size=size) if scalable is None else None
    if config.start == "nested":
        widths = [client.width for client in setting.clients]
        setting = replace(setting, start=nested_start(setting.slicer, widths, setting.start, seed=config.seed))
    return replace(
        setting,
        profile=tuple(profile.table(tiers, assigned, scalable, batch_size=size, whole=whole)),
        devices=tuple(tiers.tiers[k] for k in assigned),
        warnings=tuple(warnings),
        architecture={"name": zoo.resolve(config.model), **sizes, "options": dict(config.model_options)},
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
    scalable = _scalable(model, problem.clients[0], remedy)
    if by_budget:
        tiers = profile.solved(tiers, scalable, batch_size=config.batch_size)
    return tiers, assigned, scalable


def from_model(
    model: nn.Module, clients: Sequence[Client], config: Config, *, loss: Loss | None, metric: Metric | None
) -> Setting:
    """The setting of a run with a user's own model and shards. Every width is a tier."""
    _check_weights(model)
    kind, model = type(model), _placed(copy.deepcopy(model), config)
    loss, metric = F.cross_entropy if loss is None else loss, accuracy if metric is None else metric
    _rehearse(model, clients, loss, metric)
    # If no client needs a part, the model need not be traced, and may be one that cannot be cut.
    cut = any([client.width < 1 for client in clients])
    scalable = _scalable(model, clients[0], "clients of width 1") if cut else None
    shop = Workshop(model, loss, scalable)
    tiers = [f"{client.width:g}" for client in clients]
    setting = _setting(shop, clients, config, metric, tiers, OWN)
    return replace(setting, architecture={"class": f"{kind.__module__}.{kind.__qualname__}"})


def empty(model: nn.Module, config: Config, example: Tensor, *, dataset: str, cut: bool) -> Setting:
    """The setting of a run that is over, without its clients.

    Args:
        model: at full width.
        example: a batch of one sample.
        cut: whether some client has a width below 1.
    """
    model = _placed(model, config)
    weight = next(model.parameters())
    example = example.to(weight.device, weight.dtype if example.is_floating_point() else None)
    shop = Workshop(model, F.cross_entropy, ScalableModel(model, example) if cut else None)
    config = with_rates(config.override(device=str(device_of(config.device))), model)
    return Setting((), shop, shop.full.take(), accuracy, dataset, config, (), "sequential")


def check_newcomer(client: Client, setting: Setting, sample: Sequence[int]) -> None:
    """Raise an error if the data of a client that joins a run do not fit the model of the run.

    Args:
        sample: the shape of one input of the run.
    """
    model, x = setting.shop.full.module, client.train[0]
    if tuple(x.shape[1:]) != tuple(sample):
        raise ValueError(
            f"an input of the client that joins has shape {tuple(x.shape[1:])} and the run's model takes "
            f"{tuple(sample)}; prepare its data as those of the run were"
        )
    check_batch(model, client.n_train)
    if setting.shop.loss is not F.cross_entropy:
        return
    outputs = _num_outputs(model, _example(model, client))
    for part in ("train", "val", "test"):
        pair = getattr(client, part)
        labels = torch.zeros(1, dtype=torch.long) if pair is None else pair[1]
        if labels.is_floating_point() or labels.dim() != 1:
            raise ValueError(
                f"the labels of {part} are {labels.dtype} of shape {tuple(labels.shape)}; the run has classes: give "
                "whole numbers, (n,)"
            )
        wrong = [label for label in labels.unique().tolist() if label != IGNORED and not 0 <= label < outputs]
        if wrong:
            raise ValueError(f"the labels of {part} hold {wrong[0]} and the run has classes 0 to {outputs - 1}")


def prepared(clients: Sequence[Client], setting: Setting) -> tuple[Client, ...]:
    """The clients with their shards on the device of a setting, and with their classes if these are masked there."""
    config = setting.config
    moved = tuple(_moved(client, device_of(config.device), getattr(torch, config.dtype)) for client in clients)
    return _masked(moved, setting.shop.full.module)[0] if config.label_mask else moved


def build(config: Config, sizes: Mapping[str, Any]) -> nn.Module:
    """Build the model of a run. The seed decides its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "model"))
        try:
            return zoo.build(config.model, **sizes, **config.model_options)
        # Constructors of libraries check little: bad options show as whatever went wrong with them.
        except (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
            reason = one_line(str(error)) or type(error).__name__
            raise ValueError(f"model {config.model!r} does not take these model_options ({reason})") from error


def device_of(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cpu" and device.index:
            raise RuntimeError("a machine has one CPU device")
        # A name can be valid and the device missing; only an allocation shows it.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} is not there; use 'auto' or 'cpu'") from error
    return device


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch uses one thread: models are small, and sums come out the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _placed(model: nn.Module, config: Config) -> nn.Module:
    return model.to(device_of(config.device), getattr(torch, config.dtype))


def _scalable(model: nn.Module, client: Client, remedy: str) -> ScalableModel:
    try:
        return ScalableModel(model, _example(model, client))
    except ValueError as error:
        raise ValueError(f"{error}; a model that cannot be cut needs {remedy}") from error


def _example(model: nn.Module, client: Client) -> Tensor:
    """A batch of one sample, on the device and in the precision of the model."""
    example, weight = torch.zeros_like(client.train[0][:1]), next(model.parameters(), torch.empty(0))
    return example.to(weight.device, weight.dtype if example.is_floating_point() else None)


def with_rates(config: Config, model: nn.Module) -> Config:
    """The configuration with step sizes; those that it does not give suit the kind of the model."""
    trained = [part for part in model.modules() if any(True for _ in part.parameters(recurse=False))]
    # Weights of a convolution act at every position, so their gradients are longer than those of linear layers: the
    # more so, the more axes it runs along.
    kind = "linear" if all([isinstance(part, nn.Linear) for part in trained]) else "other"
    if kind == "other" and all([isinstance(part, nn.Linear | nn.Conv1d) for part in trained]):
        kind = "time"
    global_lr = config.global_lr or RATES[kind]
    return config.override(global_lr=global_lr, personal_lr=config.personal_lr or PERSONAL * global_lr)


def _setting(
    shop: Workshop, clients: Sequence[Client], config: Config, metric: Metric, tiers: Sequence[str], dataset: str
) -> Setting:
    model, device = shop.full.module, device_of(config.device)
    clients = tuple(_numbered(clients))
    _check_samples(clients, model, config)
    _check_labels(clients, shop.loss)
    if not shop.full.slots:
        raise ValueError("the model has no parameters to train; set requires_grad on some")
    # After the checks, so that bad input fails before data are copied to a device.
    clients = tuple(_moved(client, device, getattr(torch, config.dtype)) for client in clients)
    heads: list[str] = []
    if config.label_mask:
        clients, heads = _masked(clients, model)
    return Setting(
        clients=clients,
        shop=shop,
        start=shop.full.take(),
        metric=metric,
        dataset=dataset,
        config=with_rates(config.override(device=str(device)), model),
        tiers=tuple(tiers),
        engine=_engine(shop, clients, config),
        heads=tuple(heads),
        presence=_presence(config),
    )


def _presence(config: Config) -> Presence:
    return Presence(config.participation, trace.load(config.trace) if config.trace else ())


def _engine(shop: Workshop, clients: Sequence[Client], config: Config) -> str:
    """The engine of a run; an error if its workers need more memory than there is."""
    engine, available = choose(config.engine, config.workers, clients, shop), available_bytes()
    if config.workers == 1 or engine not in ("threads", "processes") or available is None:
        return engine
    need = _worker_bytes(shop, clients, config)
    if config.workers * need > available:
        raise ValueError(
            f"{config.workers} workers need about {need / GB:.2g} GB each to train this model, and "
            f"{available / GB:.2g} GB are free; take --workers {max(1, available // need)}, or a smaller model or batch"
        )
    return engine


def _worker_bytes(shop: Workshop, clients: Sequence[Client], config: Config) -> int:
    """The memory that a worker needs for a step of the widest client's model."""
    if shop.scalable is None:  # a model that was never traced: its weights, their gradients, and a model that travels
        return 3 * sum(p.nbytes for p in shop.full.slots)
    size = min(config.batch_size, max(client.n_train for client in clients))
    return shop.scalable.cost(max(client.width for client in clients), size).train_bytes


def _check_samples(clients: Sequence[Client], model: nn.Module, config: Config) -> None:
    """Raise an error if there are too few samples for batch norms or for the noise of gradients."""
    for i, client in enumerate(clients):
        try:
            check_batch(model, client.n_train)
        except ValueError as error:
            raise ValueError(f"client {i}: {error}") from error
    if min(config.batch_size, config.global_batch) == 1 and has_batch_norm(model):
        raise ValueError("batches of 1 sample cannot train BatchNorm; set batch_size and global_batch to at least 2")
    # The complexity term is a share of the noise too, unless it is raw or there is only one size.
    by_size = len({client.width for client in clients}) > 1 and config.vc_weight not in (0, "raw")
    needs_noise = METHODS[config.algorithm].mixes and (isinstance(config.regularization, str) or by_size)
    # The noise is the spread of at least two micro-batches, and a batch norm needs two samples in each.
    least = 4 if has_batch_norm(model) else 2
    if needs_noise and max(client.n_train for client in clients) < least:
        raise ValueError(
            f"no client has {least} samples, so the noise of their gradients is unknown; "
            f"give regularization as a number{', and vc_weight 0' if by_size else ''}"
        )


IGNORED = -100  # the label that cross-entropy leaves out


def _check_labels(clients: Sequence[Client], loss: Loss) -> None:
    """Raise an error if a client has no label to learn from; warn if all labels of all clients are one class."""
    if loss is not F.cross_entropy:  # what labels mean to another loss is not known here
        return
    classes: set[int] = set()
    for i, client in enumerate(clients):
        y = client.train[1]
        if y.is_floating_point() or y.dim() != 1:
            return
        own = set(y.unique().tolist()) - {IGNORED}
        if not own:
            raise ValueError(
                f"client {i}: all its labels are {IGNORED}, which cross-entropy leaves out; give it others"
            )
        classes |= own
    if len(classes) == 1:
        log.warning("all training samples are of class %d: every model is right, and nothing is learned", *classes)


def _check_weights(model: nn.Module) -> None:
    """Raise an error if a user's model has weights that cannot be copied or trained."""
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"{name} of the model has no size yet; call the model once on a batch before fit")
        if p.is_meta:
            raise ValueError(f"{name} of the model is on the meta device, which holds no numbers; build it on the CPU")
        if not p.is_floating_point():
            raise ValueError(f"{name} of the model is {p.dtype}; weights must be real numbers, such as float32")


def _rehearse(model: nn.Module, clients: Sequence[Client], loss: Loss, metric: Metric) -> None:
    """Call a user's model, loss and metric on two samples, so that what does not fit fails before training.

    The model is left as it was, and no random number is drawn from the global generator.
    """
    weight = next(model.parameters(), torch.empty(0))
    x, y = (one[:2] for one in clients[0].train)
    x, y = (one.to(weight.device, weight.dtype if one.is_floating_point() else None) for one in (x, y))
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            outputs = _tried("model", model.eval(), (x,), f"inputs of shape {tuple(x.shape)} and type {x.dtype}")
            if not isinstance(outputs, Tensor):
                raise ValueError(f"the model returns a {type(outputs).__name__}; it must return a tensor")
            pair = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(y.shape)}, {y.dtype}"
            if loss is F.cross_entropy and outputs.dim() == 2:
                _check_range(clients, outputs.shape[1])
            value = _tried("loss", loss, (outputs, y), pair)
            learns = any(p.requires_grad for p in model.parameters())
            if not isinstance(value, Tensor) or value.numel() != 1 or (learns and not value.requires_grad):
                got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
                raise ValueError(f"the loss gives {got}; it must be one number, a tensor made from the model's outputs")
            score = _tried("metric", metric, (outputs.detach(), y), pair)
            if not isinstance(score, Tensor | int | float):
                raise ValueError(f"the metric gives {shown(score)}; it must be one number, larger if better")
    finally:
        for part, training in modes:
            part.training = training


def _tried(noun: str, function: Callable[..., Any], args: tuple[Tensor, ...], what: str) -> Any:
    """What a user's function returns; an error says on what it failed."""
    try:
        return function(*args)
    except Exception as error:  # a user's code can raise anything
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(f"the {noun} fails on {what} ({reason}); give fit one that takes them") from error


def _check_range(clients: Sequence[Client], outputs: int) -> None:
    """Raise an error if a client has a label that is no output of the model."""
    for i, client in enumerate(clients):
        y = client.train[1]
        if y.is_floating_point() or y.dim() != 1:
            return
        wrong = [label for label in y.unique().tolist() if label != IGNORED and not 0 <= label < outputs]
        if wrong:
            raise ValueError(
                f"client {i}: its labels hold {wrong[0]} and the model has {outputs} outputs; number classes from 0 to "
                f"{outputs - 1}, or give the model more outputs"
            )
        if client.classes is not None and len(client.classes) != outputs:
            raise ValueError(
                f"client {i}: classes has {len(client.classes)} values and the model has {outputs} outputs; one each"
            )


def _numbered(clients: Sequence[Client]) -> Iterator[Client]:
    """Yield the clients, each with a key: its own, or its position."""
    keys = [i if client.key is None else client.key for i, client in enumerate(clients)]
    for i, (client, key) in enumerate(zip(clients, keys)):
        if keys.index(key) != i:
            raise ValueError(f"clients {keys.index(key)} and {i} have the same key {key}; keys tell clients apart")
        yield replace(client, key=key)


def _moved(client: Client, device: torch.device, dtype: torch.dtype) -> Client:
    """The client with its shard on the device. Validation and test data are moved later, batch by batch."""
    train = tuple(x.to(device, dtype if x.is_floating_point() else None) for x in client.train)
    return replace(client, train=train)


def _masked(clients: Sequence[Client], module: nn.Module) -> tuple[tuple[Client, ...], list[str]]:
    """The clients, each with the classes of its shard, and the names of the classifier's parameters."""
    # The model is asked, because a shard may lack the last classes.
    num_classes = _num_outputs(module, clients[0].train[0])
    for i, client in enumerate(clients):
        labels = client.train[1]
        if labels.is_floating_point() or labels.dim() != 1 or int(labels.max()) >= num_classes:
            raise ValueError(f"label_mask needs classes as labels, and those of client {i} are not; leave it out")
    masks = [torch.zeros(num_classes, dtype=torch.bool) for _ in clients]
    for mask, client in zip(masks, clients, strict=True):
        mask[client.train[1].unique().cpu()] = True
    return (
        tuple(replace(client, classes=mask) for client, mask in zip(clients, masks, strict=True)),
        zoo.classifier(module, num_classes),
    )


def _num_outputs(module: nn.Module, x: Tensor) -> int:
    """The number of outputs of a module for a sample; 0 if it returns no tensor."""
    # A copy, so that its mode and statistics stay.
    with torch.no_grad():
        outputs = copy.deepcopy(module).eval()(x[:1])
    return outputs.shape[-1] if isinstance(outputs, Tensor) and outputs.dim() else 0
