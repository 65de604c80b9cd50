"""The small federation that all tests of the core share: clients, models, options, and how to compare results."""

import functools
from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.algorithms import perm
from hetperm.algorithms.base import Algorithm
from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.sequential import Sequential
from hetperm.methods import METHODS
from hetperm.server.federation import Federation
from hetperm.server.presence import EVERYBODY, Presence
from hetperm.server.slicer import Slicer
from hetperm.server.visits import Visiting
from hetperm.state import State
from submodels import ScalableModel

INPUTS, HIDDEN, CLASSES = 5, (8, 6), 3
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
HEADS = NAMES[4:]
WIDTHS = (1.0, 0.5, 0.5, 0.25)
FULL = (1.0, 1.0, 1.0, 1.0)
SIZES = (9, 7, 12, 8, 6)
KEYS = (7, 3, 11, 5, 2)
SEED = 3

PARTIAL = ("heterofl", "feddropout", "fedrolex", "fjord")
OTHERS = ("ditto", "fedrep", "heterofl-clustered", "heterofl-clustered-ft")
SIZED = ("perm", "perm-two-stage", "local", *PARTIAL, *(f"{name}-ft" for name in PARTIAL), *OTHERS)  # train parts
LOOPS = ("perm", "perm-two-stage")

PERM = {
    "epochs": 2,
    "local_steps": 3,
    "batch_size": 4,
    "personal_lr": 0.5,
    "global_lr": 0.4,
    "global_batch": 6,
    "warmup_rounds": 2,
    "noise_batches": 3,
    "share": 0.5,
    "tail_average": 0.0,
}
# A budget of steps per client instead of rounds and epochs, as by default, so small that tours are cut in the middle.
BUDGET = {"steps": 60, "warmup": "ordered", "warmup_rounds": None, "step_cap": 0.1, "alpha_every": 2, "epochs": 5}
RIVAL = {"epochs": 2, "local_steps": 3, "batch_size": 4, "lr": 0.4, "tail_average": 0.0}
ROUND_STEPS = 12  # what a rival may spend on rounds, unless a test says how much in all
TUNE = {"fine_tune_steps": 5, "fine_tune_lr": 0.3}

# Options of PERM, off their defaults in every way that changes what hosts are handed.
VARIANTS = {
    "plain": {},
    "odd": {"extraction": "random", "nested": "random", "discrepancy": "masked", "participation": 0.8, "final_lr": 0.1},
    "mixed": {"server_mix": "alpha", "inplace_kd": 0.5, "tail_average": 0.5, "projection": 1.0, "vc_weight": 0.5},
    "rolling": {"nested": "rolling", "extraction": "rolling"},
    "skip": {"nested": "skip", "final_lr": 0.1},
    "raw": {"discrepancy": "masked", "vc_weight": "raw", "regularization": 40.0},
    "parallel": {"visits": "parallel", "nested": "rolling", "participation": 0.8},
    "away": {"participation": 0.6},
    "denoised": {"denoise": True, "early_report": 0.5, "participation": 0.8, "share": 0.1},
    "smallest": {"personal_width": "smallest", "inplace_kd": 0.5},
}


# Models


def random(shape, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(model, dtype=torch.float64, seed: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model().to(dtype)


def mlp() -> nn.Module:
    one, two = HIDDEN
    return nn.Sequential(nn.Linear(INPUTS, one), nn.Tanh(), nn.Linear(one, two), nn.Tanh(), nn.Linear(two, CLASSES))


def linear() -> nn.Module:
    return nn.Linear(INPUTS, CLASSES)


def without_intercept() -> nn.Module:
    return nn.Linear(INPUTS, CLASSES, bias=False)


class ResNet(nn.Module):
    """A small convolutional network with batch norms and a projected and an identity shortcut."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.norm2 = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.short, self.head = nn.Conv2d(8, 16, 1, stride=2), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (x + self.norm1(self.one(x))).relu()
        x = (self.short(x) + self.norm2(self.two(x))).relu()
        return self.head(x.mean((2, 3)))


IMAGE = (1, 4, 4)


@functools.cache
def scalable(model=mlp, dtype=torch.float64) -> ScalableModel:
    shape = IMAGE if model is ResNet else (INPUTS,)
    return ScalableModel(build(model, dtype), torch.zeros(2, *shape, dtype=dtype))


@functools.cache
def start(model=mlp, dtype=torch.float64) -> dict[str, Tensor]:
    module = build(model, dtype, seed=2)
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def heads_of(model=mlp) -> tuple[str, ...]:
    """The names of the classifier's parameters."""
    return {mlp: HEADS, linear: ("weight", "bias"), ResNet: ("head.weight", "head.bias")}[model]


def part_of(params, width: float, model=mlp):
    """The static part of a model."""
    slicer = Slicer(scalable(model))
    return slicer.cut(params, slicer.index(width))


# Who takes part


def make_clients(
    widths: Sequence[float] = WIDTHS,
    *,
    sizes: Sequence[int] = SIZES,
    shape=(INPUTS,),
    dtype=torch.float64,
    noise: float = 2.0,
    seed: int = 0,
) -> list[Client]:
    """Two groups with other labels for the same inputs, crossed with the sizes of models; unequal, noisy shards."""
    teacher = random((CLASSES, INPUTS), seed=3 + seed)
    clients = []
    for i, (width, n, key) in enumerate(zip(widths, sizes, KEYS, strict=False)):
        x, error = random((n, *shape), seed=3100 + seed + i), random((n, CLASSES), seed=200 + seed + i, scale=noise)
        y = (x.flatten(1)[:, :INPUTS] @ teacher.T + error).argmax(1)
        group = int(i not in (0, 3))
        clients.append(Client(train=(x.to(dtype), (y + group) % CLASSES), width=width, group=group, key=key))
    return clients


def with_classes(clients: Sequence[Client], classes: Sequence[Sequence[int]]) -> list[Client]:
    """The clients with other labels, of the given classes only."""
    out = []
    for client, known in zip(clients, classes, strict=True):
        x, y = client.train
        mask = torch.zeros(CLASSES, dtype=torch.bool)
        mask[list(known)] = True
        out.append(replace(client, train=(x, torch.tensor(known)[y % len(known)]), classes=mask))
    return out


def make_shop(model=mlp, dtype=torch.float64, *, cut: bool = True) -> Workshop:
    """A workshop for models of all sizes, or with ``cut`` false for whole models only."""
    return Workshop(build(model, dtype), F.cross_entropy, scalable(model, dtype) if cut else None)


def make_federation(
    clients: Sequence[Client],
    *,
    model=mlp,
    dtype=torch.float64,
    cut: bool = True,
    shop: Workshop | None = None,
    engine=Sequential,
    seed: int = SEED,
    heads: tuple[str, ...] = (),
    presence: Presence = EVERYBODY,
) -> Federation:
    shop = shop or make_shop(model, dtype, cut=cut)
    slicer = Slicer(scalable(model, dtype) if cut else None)
    return Federation(clients, engine(clients, shop), slicer, seed=seed, heads=heads, presence=presence)


# Methods


def perm_options(**changes) -> perm.Options:
    """Options of PERM from one flat table."""
    values = PERM | changes
    assert set(values) <= _names(perm.Options) | _names(Visiting) | _names(perm.Mixing), values
    visiting = Visiting(**_fields(Visiting, values))
    mixing = perm.Mixing(**_fields(perm.Mixing, values))
    return perm.Options(**_fields(perm.Options, values), visiting=visiting, mixing=mixing)


def rival_options(name: str, **changes):
    """Options of a rival: a few steps, what its row in `METHODS` says, and the changes."""
    method = METHODS[name]
    assert set(changes) <= _names(method.options), changes
    values = {"inner_lr": 0.15, "head_lr": 0.25, **RIVAL, **TUNE, **method.defaults, **method.fixed, **changes}
    values = {
        "steps": ROUND_STEPS + values["fine_tune_steps"] * ("fine_tune_steps" in _names(method.options)),
        **values,
    }
    return method.options(**_fields(method.options, values))


def _names(kind) -> set[str]:
    return {field.name for field in fields(kind)}


def _fields(kind, values):
    return {name: value for name, value in values.items() if name in _names(kind)}


def in_one_table(options: perm.Options, participation: float = 1.0) -> SimpleNamespace:
    """Options of PERM with those that are nested beside the others, and the participation."""
    table = {**vars(options), **vars(options.visiting), **vars(options.mixing), "participation": participation}
    return SimpleNamespace(**table)


def make_method(
    name: str, clients: Sequence[Client], *, model=mlp, dtype=torch.float64, begin=None, setup=None, **changes
):
    """A method by name. ``setup``: arguments of `make_federation`; ``changes``: its options, and its participation."""
    setup = {"presence": Presence(changes.pop("participation", 1.0)), **(setup or {})}
    heads = {"heads": heads_of(model)} if METHODS[name].finds_heads else {}
    federation = make_federation(clients, model=model, dtype=dtype, **heads | setup)
    options = perm_options(**changes) if METHODS[name].mixes else rival_options(name, **changes)
    return METHODS[name].make(federation, begin or start(model, dtype), options)


def run(algorithm: Algorithm, epochs: int = 2) -> State:
    state = algorithm.begin()
    for _ in range(epochs):
        state = algorithm.epoch(state)
    return state if algorithm.finish is None else algorithm.finish(state)


# Comparison


def equal(a, b) -> bool:
    """Whether two models are the same to the last bit."""
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def same(a: State, b: State) -> bool:
    """Whether two states hold the same models and weights, to the last bit."""
    alphas = (a.alpha is None and b.alpha is None) or torch.equal(a.alpha, b.alpha)
    pairs = [(a.w, b.w), *zip(a.v, b.v, strict=True), *zip(a.deployed, b.deployed, strict=True)]
    return alphas and all(equal(x, y) for x, y in pairs)


def apart(a: State, b: State) -> float:
    """How far apart the models of two states are, in the coordinate in which they differ most."""
    pairs = [(a.w, b.w), *zip(a.deployed, b.deployed, strict=True)]
    return max(float((x[name] - y[name]).abs().max()) for x, y in pairs for name in x)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def engine_that_records():
    """An engine, and the list of all tasks that it will have run."""
    tasks = []

    class Recording(Sequential):
        def run(self, more):
            tasks.extend(more)
            return super().run(more)

    return Recording, tasks
