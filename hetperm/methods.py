"""The methods by name, and the options of each: from its own table, the configuration and defaults.

`hetperm.register_algorithm` adds to `METHODS` what comes from outside.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from hetperm.advice import did_you_mean
from hetperm.algorithms import apfl, ditto, fedrep, ifca, partial_training, perfedavg, perm, pfedme
from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.local_only import local_only
from hetperm.algorithms.steps import RivalOptions
from hetperm.config import FIELDS, Config, check_field
from hetperm.params import Params
from hetperm.server.federation import Federation
from hetperm.texts import shown

LARGEST = 1_000_000  # of whole numbers in a method's table
FINE_TUNE_STEPS = 100  # unless the method's table says otherwise


@dataclass(frozen=True)
class Method:
    """An algorithm under a name.

    Attributes:
        make: (federation, start, options) -> the algorithm.
        options: the dataclass of its options.
        defaults: values of options that neither the configuration nor the method's table gives.
        fixed: values of options that define the method; no table can change them.
        one_size: whether all models must have one size. If clients differ, it runs at the width of the smallest.
        mixes: whether it is PERM, whose clients learn by mixing weights whom to learn from.
        finds_heads: whether it must know which parameters are the classifier's.
    """

    make: Callable[[Federation, Params, Any], Algorithm]
    options: type
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    one_size: bool = False
    mixes: bool = False
    finds_heads: bool = False


NO_FINE_TUNING = {"fine_tune_steps": 0, "fine_tune_lr": 0.0}
# Options of partial training that belong to some of its methods, and what they are for the others.
OF_HETEROFL = {"scaler": False, "masked_loss": False}
OF_FJORD = {"draws": "step", "distil": 0.0}


def _partial_training(
    *, fine_tune: bool, one_size: bool = False, takes: Mapping[str, Any] | None = None, **fixed: Any
) -> Method:
    """A method that trains parts of one global model.

    Args:
        fine_tune: without it, no table can give the method such steps.
        takes: the options of single methods that this one has, with their defaults.
        fixed: values of options that define the method.
    """
    takes = takes or {}
    others = {key: value for key, value in (OF_HETEROFL | OF_FJORD).items() if key not in takes}
    fixed = {"extraction": "static", "ordered": False, **others, **fixed, **({} if fine_tune else NO_FINE_TUNING)}
    return Method(
        partial_training.partial_training,
        partial_training.Options,
        takes,
        fixed,
        one_size=one_size,
    )


def _clustered(*, fine_tune: bool, one_size: bool = False) -> Method:
    """A method whose clients choose one of several global models."""
    fixed = {} if fine_tune else NO_FINE_TUNING
    return Method(ifca.ifca, ifca.Options, {"clusters": 2}, fixed, one_size=one_size)


METHODS: dict[str, Method] = {
    "perm": Method(perm.single_loop, perm.Options, mixes=True),
    "perm-two-stage": Method(perm.two_stage, perm.Options, mixes=True),
    "local": Method(local_only, RivalOptions),
    "fedavg": _partial_training(fine_tune=False, one_size=True),
    "fedavg-ft": _partial_training(fine_tune=True, one_size=True),
    "perfedavg": Method(perfedavg.perfedavg, perfedavg.Options, {"variant": "first-order"}, one_size=True),
    "pfedme": Method(pfedme.pfedme, pfedme.Options, {"prox": 1.0, "inner_steps": 5, "server_step": 1.0}, one_size=True),
    "apfl": Method(apfl.apfl, apfl.Options, {"mix": 0.5, "adaptive": True}, one_size=True),
    "ifca": _clustered(fine_tune=False, one_size=True),
    "ditto": Method(ditto.ditto, ditto.Options, {"prox": 1.0}),
    "fedrep": Method(fedrep.fedrep, fedrep.Options, {"head_steps": 5, "fine_tune_steps": 0}, finds_heads=True),
    "heterofl": _partial_training(fine_tune=False, takes=OF_HETEROFL),
    "heterofl-ft": _partial_training(fine_tune=True, takes=OF_HETEROFL),
    "heterofl-clustered": _clustered(fine_tune=False),
    "heterofl-clustered-ft": _clustered(fine_tune=True),
    "feddropout": _partial_training(fine_tune=False, extraction="random"),
    "feddropout-ft": _partial_training(fine_tune=True, extraction="random"),
    "fedrolex": _partial_training(fine_tune=False, extraction="rolling"),
    "fedrolex-ft": _partial_training(fine_tune=True, extraction="rolling"),
    "fjord": _partial_training(fine_tune=False, ordered=True, takes=OF_FJORD),
    "fjord-ft": _partial_training(fine_tune=True, ordered=True, takes=OF_FJORD),
}

OF_THE_RUN = ("epochs", "steps")  # the same for all methods, so no table may set them


def options_for(name: str, config: Config, *, steps: int) -> Any:
    """The options of a method: from its table, else from the configuration, else its defaults.

    Args:
        steps: mini-batch gradients that each client may compute; fine-tuning gets at most half of them.
    """
    method = METHODS[name]
    table = {key: _checked(name, key, value) for key, value in config.rivals.get(name, {}).items()}
    # Later entries win: the table over the configuration, and the fixed values over both.
    values = {
        **method.defaults,
        **vars(config),
        **table,
        **method.fixed,
        "steps": config.steps if method.mixes else steps,
    }
    # A rival that sets no step size gets that of PERM's warm-up; its other step sizes follow its own.
    values.setdefault("lr", config.global_lr)
    for rate in ("fine_tune_lr", "inner_lr", "head_lr"):
        values.setdefault(rate, values["lr"])
    # At least half of the steps train the model that is fine-tuned: in a short run 100 would leave nothing to tune.
    values["fine_tune_steps"] = min(values.get("fine_tune_steps", FINE_TUNE_STEPS), steps // 2)
    try:
        return _filled(method.options, values)
    except TypeError as error:  # an own dataclass of which a field has no default
        raise ValueError(
            f"{name}: its options have no value ({error}); give each a default in their dataclass"
        ) from error


def _filled(kind: type, values: Mapping[str, Any]) -> Any:
    """Build a dataclass, and the dataclasses inside it, from one flat table of values."""
    own = {}
    for name, hint in _types(kind).items():
        if is_dataclass(hint):
            own[name] = _filled(hint, values)
        # A field without a value keeps the default of its dataclass.
        elif name in values:
            own[name] = values[name]
    return kind(**own)


def leaf_types(kind: type) -> dict[str, Any]:
    """field -> its type, of a dataclass and of the dataclasses inside it."""
    types: dict[str, Any] = {}
    for name, hint in _types(kind).items():
        types |= leaf_types(hint) if is_dataclass(hint) else {name: hint}
    return types


@cache
def _types(kind: type) -> dict[str, Any]:
    # Resolved: a file that imports annotations from __future__ has texts for types.
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def check_method_tables(config: Config) -> None:
    """Raise an error if the table of a method holds an unknown key or a bad value."""
    for name in config.rivals:
        # Building the options runs every check. The steps of the run are not known yet; any large number will do.
        options_for(name, config, steps=10**6)


def _checked(method: str, name: str, value: Any) -> Any:
    """The value of a key in a method's table; an error if the method has no such key or the value does not fit."""
    record = METHODS[method]
    types = {key: kind for key, kind in leaf_types(record.options).items() if key not in (*OF_THE_RUN, *record.fixed)}
    if name not in types:
        advice = did_you_mean(name, types, f"it takes {', '.join(types)}")
        raise ValueError(f"[{method}]: unknown key {name!r}; {advice}")
    # Keys that the configuration has too obey the same limits there and here.
    if name in FIELDS:
        return check_field(name, value, f"[{method}]: {name}")
    if name == "lr":  # not 0, as PERM's: a rival that does not move would be a line of the table
        return check_field("global_lr", value, f"[{method}]: {name}")
    good, wanted = KINDS[types[name]]
    if not good(value):
        raise ValueError(f"[{method}]: {name} is {shown(value)}; it must be {wanted}")
    return float(value) if types[name] is float else value


def _number(value: Any) -> bool:
    # A bool is an int in Python, and `lr = true` is surely a mistake.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    # What is less than 1e-12 changes nothing, and 0 says so; what is more than 1e38 is infinite in float32.
    float: (
        lambda value: _number(value) and (value == 0 or 1e-12 <= value <= 1e38),
        "0 or a number from 1e-12 to 1e38",
    ),
    int: (
        lambda value: _number(value) and isinstance(value, int) and value <= LARGEST,
        f"a whole number of at least 0 and at most {LARGEST:,}",
    ),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    str: (lambda value: isinstance(value, str), "a text, in quotes"),
}
