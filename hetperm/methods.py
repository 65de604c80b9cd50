"""The methods by name, and what each needs to know: from the configuration, its own table, and defaults."""

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from hetperm.advice import did_you_mean
from hetperm.algorithms import apfl, fedavg, ifca, local_only, perfedavg, perm, pfedme
from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.budget import FineTuneOptions, RivalOptions
from hetperm.algorithms.partial_training import partial_training, partial_training_ft
from hetperm.config import FIELDS, Config, check_field

Maker = Callable[..., Algorithm]  # (clients, engine, start, options), and parts if models may differ in size

ALGORITHMS: dict[str, tuple[Maker, type]] = {
    "perm": (perm.single_loop, perm.Options),
    "perm-two-stage": (perm.two_stage, perm.Options),
    "local": (local_only.local_only, RivalOptions),
    "fedavg": (fedavg.fedavg, RivalOptions),
    "fedavg-ft": (fedavg.fedavg_ft, FineTuneOptions),
    "perfedavg": (perfedavg.perfedavg, perfedavg.Options),
    "pfedme": (pfedme.pfedme, pfedme.Options),
    "apfl": (apfl.apfl, apfl.Options),
    "ifca": (ifca.ifca, ifca.Options),
    "heterofl": (partial(partial_training, extraction="static"), RivalOptions),
    "heterofl-ft": (partial(partial_training_ft, extraction="static"), FineTuneOptions),
    "feddropout": (partial(partial_training, extraction="random"), RivalOptions),
    "feddropout-ft": (partial(partial_training_ft, extraction="random"), FineTuneOptions),
    "fedrolex": (partial(partial_training, extraction="rolling"), RivalOptions),
    "fedrolex-ft": (partial(partial_training_ft, extraction="rolling"), FineTuneOptions),
    "fjord": (partial(partial_training, extraction="static", ordered=True), RivalOptions),
    "fjord-ft": (partial(partial_training_ft, extraction="static", ordered=True), FineTuneOptions),
}

# These need one architecture: where clients differ in size they run at the size of the smallest.
ONE_SIZE = ("fedavg", "fedavg-ft", "perfedavg", "pfedme", "apfl", "ifca")

# Where neither the configuration nor a method's table says anything. Step sizes are PERM's.
FINE_TUNE_STEPS = 300
DEFAULTS: dict[str, dict[str, Any]] = {
    "perfedavg": {"variant": "first-order"},
    "pfedme": {"prox": 1.0, "inner_steps": 5, "server_step": 1.0},
    "apfl": {"mix": 0.5, "adaptive": True},
    "ifca": {"clusters": 2},
}
OF_THE_RUN = ("seed", "epochs", "steps")  # the same for all methods, so not for a table


def options_for(method: str, config: Config, *, steps: int) -> Any:
    """The options of a method: what its table says, else the configuration, else its defaults.

    Args:
        steps: gradients that each client may compute; fine-tuning takes at most half of them.
    """
    _, kind = ALGORITHMS[method]
    given = {name: _checked(method, name, value, kind) for name, value in config.rivals.get(method, {}).items()}
    known = {**DEFAULTS.get(method, {}), **vars(config), **given, "steps": steps}
    known.setdefault("lr", config.personal_lr)
    for rate in ("fine_tune_lr", "inner_lr"):
        known.setdefault(rate, known["lr"])
    known["fine_tune_steps"] = min(known.get("fine_tune_steps", FINE_TUNE_STEPS), steps // 2)
    return kind(**{each.name: known[each.name] for each in fields(kind) if each.name in known})


def check(config: Config) -> None:
    """Nothing, or an error if the table of some method says what that method does not understand."""
    for method in config.rivals:
        options_for(method, config, steps=10**6)


def _checked(method: str, name: str, value: Any, kind: type) -> Any:
    types = {each.name: each.type for each in fields(kind) if each.name not in OF_THE_RUN}
    if name not in types:
        advice = did_you_mean(name, types, f"it takes {', '.join(types)}")
        raise ValueError(f"[{method}]: unknown key {name!r}; {advice}")
    if name in FIELDS:
        return check_field(name, value, f"[{method}]: {name}")
    good, wanted = _KINDS[types[name]]
    if not good(value):
        raise ValueError(f"[{method}]: {name} is {value!r}; it must be {wanted}")
    return float(value) if types[name] is float else value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


_KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    float: (_number, "a number of at least 0"),
    int: (lambda value: _number(value) and isinstance(value, int), "a whole number of at least 0"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    str: (lambda value: isinstance(value, str), "a text, in quotes"),
}
