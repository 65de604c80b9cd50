"""Register an algorithm, data set, model or metric of one's own under a name, for flags, files and `fit`.

The names that come with hetperm cannot be replaced; one's own can be, so that a cell of a notebook may run twice.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal

from torch import nn

from hetperm import config, data
from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import RivalOptions
from hetperm.checks import flag
from hetperm.data import Problem, Wanted
from hetperm.methods import KINDS, METHODS, Method, leaf_types
from hetperm.metrics import METRICS, Metric, Score
from hetperm.params import Params
from hetperm.server.federation import Federation
from hetperm.texts import one_line, shown
from submodels import zoo

_OURS = {kind: frozenset(table) for kind, table in {
    "algorithm": METHODS, "dataset": data.DATASETS, "model": zoo.MODELS, "metric": METRICS
}.items()}  # fmt: skip


def register_algorithm(
    name: str,
    make: Callable[[Federation, Params, Any], Algorithm],
    options: type = RivalOptions,
    *,
    defaults: Mapping[str, Any] | None = None,
    one_size: bool = False,
    finds_heads: bool = False,
) -> None:
    """Make an algorithm known to ``--algorithm``, ``--baselines``, tables of options and resumed runs.

    Args:
        make: (federation, start, options) -> the algorithm: how to begin, go on and end.
        options: the dataclass of its options; those of a field's name that the configuration has come from there, and
            all can be set in a table ``[name]`` of a file or by ``--option name.key=value``.
        defaults: values of options that neither the configuration nor the table gives; else those of the dataclass.
        one_size: whether all models must have one size; if clients differ, it runs at the width of the smallest.
        finds_heads: whether it must know the classifier's parameters (``federation.heads``).
    """
    _check("algorithm", name, make)
    if not is_dataclass(options):
        raise TypeError(f"algorithm {name!r}: options is {shown(options)}; it must be a dataclass")
    for key, kind in leaf_types(options).items():
        if kind not in KINDS and key not in config.FIELDS:
            kinds = ", ".join(known.__name__ for known in KINDS)
            raise TypeError(f"algorithm {name!r}: option {key} is annotated {shown(kind)}; it must be one of {kinds}")
    if not isinstance(defaults, Mapping | None):
        raise TypeError(f"algorithm {name!r}: defaults is {shown(defaults)}; it must be a table of options, or None")
    for key in defaults or {}:
        if key not in leaf_types(options):
            raise ValueError(f"algorithm {name!r}: {shown(key)} of the defaults is no option of {options.__name__}")
    flag("one_size", one_size)
    flag("finds_heads", finds_heads)
    make = _bordered("algorithm", name, make, Algorithm)
    METHODS[name] = Method(make, options, dict(defaults or {}), one_size=one_size, finds_heads=finds_heads)
    config.ADDED.add(name)


def register_dataset(name: str, load: Callable[[Wanted], Problem], *, takes_path: bool = False) -> None:
    """Make a data set known to ``--dataset``.

    Args:
        load: what a run asks for (`hetperm.data.Wanted`) -> the clients, and the sizes that a model for them must have.
        takes_path: whether it is written ``name:PATH``; ``wanted.path`` is that path.
    """
    _check("dataset", name, load)
    flag("takes_path", takes_path)
    data.DATASETS[name] = _bordered("dataset", name, load, Problem)
    data.WITH_PATH.discard(name)
    if takes_path:
        data.WITH_PATH.add(name)


def register_model(name: str, build: Callable[..., nn.Module]) -> None:
    """Make a model known to ``--model``.

    Args:
        build: ``build(in_channels=, num_classes=, image_size=, **options)`` -> a module; the options are those of
            ``model_options`` and of ``--option model.key=value``. The seed decides the weights that it draws.
    """
    _check("model", name, build)
    zoo.MODELS[name] = _bordered("model", name, build, nn.Module)


def register_metric(
    name: str,
    score: Score,
    *,
    better: Literal["higher", "lower"] = "higher",
    finish: Callable[[float], float] | None = None,
) -> None:
    """Make a metric known to ``--metric`` and ``fit(metric=...)``; the arguments are those of `Metric`."""
    _check("metric", name, score)
    METRICS[name] = Metric(name, score, better, finish)


def _check(kind: str, name: str, function: Any) -> None:
    """Raise an error if a name cannot be given away, or stands for no function."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,99}", name):
        raise ValueError(
            f"{kind} is named {shown(name)}; a name has small letters, digits, hyphens and underscores, as 'my-own'"
        )
    if name in _OURS[kind]:
        raise ValueError(f"{kind} {name!r} comes with hetperm; give yours another name")
    if kind == "algorithm" and (name in config.FIELDS or name == "model"):
        raise ValueError(f"algorithm {name!r}: files have a key of that name; give it another one")
    if not callable(function):
        raise TypeError(f"{kind} {name!r}: {shown(function)} is no function")


def _bordered(kind: str, name: str, function: Callable[..., Any], result: type) -> Callable[..., Any]:
    """The function of a user; what goes wrong inside it, or with what it returns, is said with its name."""

    @functools.wraps(function, updated=())
    def called(*args: Any, **options: Any) -> Any:
        try:
            returned = function(*args, **options)
        except (ValueError, OSError, MemoryError):  # they say what is wrong with what was given
            raise
        except Exception as error:  # a user's code can raise anything
            reason = f"{type(error).__name__}: {one_line(str(error))}"
            raise ValueError(
                f"{kind} {name!r}, which is not hetperm's, failed ({reason}); HETPERM_TRACEBACK=1 shows where"
            ) from error
        if not isinstance(returned, result):
            raise ValueError(f"{kind} {name!r} returned {shown(returned)}; it must be of {result.__name__}")
        return returned

    return called
