"""Models that engines must tell apart, and what a method ends in on an engine of a kind."""

import functools

import torch
from federation import (
    CLASSES,
    FULL,
    INPUTS,
    SEED,
    WIDTHS,
    make_clients,
    make_shop,
    perm_options,
    rival_options,
    run,
    scalable,
    start,
)
from torch import nn

from hetperm.engine.choice import opened
from hetperm.methods import METHODS
from hetperm.server.federation import Federation
from hetperm.server.presence import Presence
from hetperm.server.slicer import Slicer


def deep() -> nn.Module:
    one, two = nn.Linear(INPUTS, 16), nn.Linear(16, 8)
    return nn.Sequential(nn.Flatten(), one, nn.ReLU(), two, nn.Tanh(), nn.Linear(8, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, INPUTS)), nn.Conv2d(1, 8, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES)
    )


def dropping() -> nn.Module:
    one = nn.Linear(INPUTS, 16)
    return nn.Sequential(one, nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


VARIANTS = {
    "plain": {},
    "random": {"nested": "random", "extraction": "random", "discrepancy": "masked", "final_lr": 0.1},
    "distilled": {"inplace_kd": 0.5, "server_mix": "alpha"},
    "sketched": {"sketch": 16, "participation": 0.7},
}


@functools.cache
def result(kind, name="perm", *, model=deep, dtype=torch.float64, workers=1, variant="plain"):
    """The state that a method ends in on an engine of a kind."""
    method = METHODS[name]
    clients = make_clients(FULL if method.one_size else WIDTHS, dtype=dtype)
    shop, slicer = make_shop(model, dtype), Slicer(scalable(model, dtype))
    changes = {"tail_average": 0.5, **VARIANTS[variant]}
    presence = Presence(changes.pop("participation", 1.0))
    options = perm_options(**changes) if method.mixes else rival_options(name, **changes)
    with opened(kind, workers, clients, shop) as engine:
        federation = Federation(clients, engine, slicer, seed=SEED, presence=presence)
        return run(method.make(federation, start(model, dtype), options))
