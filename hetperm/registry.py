"""Register an algorithm, data set, model or metric of one's own under a name, for flags, files and `fit`.

The names that come with hetperm cannot be replaced; one's own can be, so that a cell of a notebook may run twice.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from hetperm import config, data
from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.partial_training import own_parts
from hetperm.algorithms.steps import RivalOptions
from hetperm.checks import flag
from hetperm.data import Problem, Wanted
from hetperm.methods import KINDS, METHODS, Method, leaf_types
from hetperm.metrics import METRICS, Metric, Score
from hetperm.params import NotFinite, Params
from hetperm.server.federation import Federation
from hetperm.state import State, Work, is_count, is_model
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
    make = _watched(name, make)
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
        except (ValueError, OSError, MemoryError, NotFinite):  # they say what is wrong with what was given
            raise
        except (Exception, SystemExit) as error:  # a user's code can raise anything
            reason = f"{type(error).__name__}: {one_line(str(error))}"
            raise ValueError(
                f"{kind} {name!r}, which is not hetperm's, failed ({reason}); HETPERM_TRACEBACK=1 shows where"
            ) from error
        if not isinstance(returned, result):
            raise ValueError(f"{kind} {name!r} returned {shown(returned)}; it must be of {result.__name__}")
        return returned

    return called


def _watched(name: str, make: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """The function that makes a user's algorithm, whose states are held against what a run can go on with."""
    made = _bordered("algorithm", name, make, Algorithm)

    @functools.wraps(make, updated=())
    def called(federation: Federation, start: Params, options: Any) -> Algorithm:
        # Copies, because all methods begin with the same tensors.
        start = {name: x.clone() for name, x in start.items()}
        begin, epoch, finish = made(federation, start, options)
        parts = own_parts(federation, start)

        def checked(function: Callable[..., State], *before: State) -> State:
            state = _bordered("algorithm", name, function, State)(*before)
            wrong = _wrong_with(state, parts, before)
            if wrong:
                raise ValueError(f"algorithm {name!r}, which is not hetperm's, returned a State {wrong}")
            return state

        def next_epoch(before: State) -> State:
            state = checked(epoch, before)
            if state.r != before.r + 1:
                raise ValueError(
                    f"algorithm {name!r}, which is not hetperm's, returned a State whose r is {shown(state.r)} after "
                    f"epoch {before.r}; it must be {before.r + 1}"
                )
            return state

        return Algorithm(partial(checked, begin), next_epoch, finish and partial(checked, finish))

    return called


def _wrong_with(state: State, parts: Sequence[Params], before: Sequence[State]) -> str:
    """What makes a state useless to a run, as the end of a sentence; empty if nothing does.

    Args:
        parts: (N,) models of the sizes that clients' models must have.
        before: the state before it; none at the beginning.
    """
    N = len(parts)
    if not before and state.r != 0:
        return f"whose r is {shown(state.r)} at the beginning; it must be 0"
    if state.v == () and not state.r:
        return ""  # models may come with the first epoch
    if not isinstance(state.v, tuple) or len(state.v) != N:
        many = f"{len(state.v)} of them" if isinstance(state.v, tuple) else f"a {type(state.v).__name__}"
        return f"whose v is {many}; it must be a tuple of {N} models, one for each client"
    if not isinstance(state.tail, tuple | None) or len(state.deployed) != N:
        return f"whose tail is not None, nor a tuple of {N} models, one for each client"
    for i, (model, part) in enumerate(zip(state.deployed, parts, strict=True)):
        for key, x in part.items():
            own = model.get(key) if isinstance(model, Mapping) else None
            if not isinstance(own, Tensor) or (own.shape, own.dtype) != (x.shape, x.dtype):
                got = f"{own.dtype} of shape {tuple(own.shape)}" if isinstance(own, Tensor) else "no tensor"
                return f"in which {key} of client {i}'s model is {got}; it must be {x.dtype} of {tuple(x.shape)}"
    if not is_model(state.w):
        return f"whose w is {shown(state.w)}; it must be a model, a table of tensors"
    if not isinstance(state.memory, Mapping) or not all([is_model(model) for model in state.memory.values()]):
        return "whose memory is no table of models, tables of tensors by name"
    if not isinstance(state.work, Work) or not all([is_count(x) for x in state.work.figures.values()]):
        return f"whose work is {shown(state.work)}; it must be a Work of numbers from 0"
    if state.alpha is not None and not (isinstance(state.alpha, Tensor) and state.alpha.shape == (N, N)):
        return f"whose alpha is {shown(state.alpha)}; it must be None or a tensor of shape ({N}, {N})"
    return ""
