"""Register an algorithm, data set, model or metric of one's own under a name, for flags, files and `fit`.

The names that come with hetperm cannot be replaced; one's own can be, so that a cell of a notebook may run twice.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from hetperm import config, data, mixing
from hetperm.advice import did_you_mean
from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.partial_training import own_parts
from hetperm.algorithms.perm import LOOK_AHEAD
from hetperm.algorithms.steps import RivalOptions
from hetperm.checks import flag
from hetperm.data import Problem, Wanted
from hetperm.methods import KINDS, METHODS, Method, leaf_types
from hetperm.metrics import METRICS, Metric, Score
from hetperm.params import NotFinite, Params, check_finite
from hetperm.server.federation import Federation
from hetperm.state import DTYPES, IN_PARTS, State, Work, can_be_kept, has_values, is_model, is_whole, strange_count
from hetperm.texts import one_line, shown, words_of
from submodels import zoo

_OURS = {kind: frozenset(table) for kind, table in {
    "algorithm": METHODS, "dataset": data.DATASETS, "model": zoo.MODELS, "metric": METRICS
}.items()}  # fmt: skip
_SIZES = ("in_channels", "num_classes", "image_size")  # what data decide of a model
_NAMES = "a name must be a text that a file can hold"
_OUTLOOK = {"shares", "losses", "partners", "chosen"}  # in PERM's memory of what it saw


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
    make = _watched(name, make, one_size=one_size)
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
    zoo.MODELS[name] = _asked_first(name, _bordered("model", name, build, nn.Module))


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
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # a user's code can raise anything
            words = one_line(words_of(error))
            if words and isinstance(
                error, ValueError | OSError | NotFinite
            ):  # it says what is wrong with what was given
                raise
            reason = f"{type(error).__name__}: {words}" if words else type(error).__name__
            other = NotFinite if isinstance(error, NotFinite) else ValueError
            raise other(
                f"{kind} {name!r}, which is not hetperm's, failed ({reason}); HETPERM_TRACEBACK=1 shows where"
            ) from error
        if not isinstance(returned, result):
            raise ValueError(f"{kind} {name!r} returned {shown(returned)}; it must be of {result.__name__}")
        return returned

    return called


def _asked_first(name: str, build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The function that builds a user's model, called only with what it takes."""

    @functools.wraps(build, updated=())
    def called(**options: Any) -> nn.Module:
        try:
            parameters = inspect.signature(build).parameters.values()
        except (TypeError, ValueError):  # of a function that was written in C
            return build(**options)
        takes = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        strange = [option for option in options if option not in takes]
        if not strange or any([one.kind == one.VAR_KEYWORD for one in parameters]):
            return build(**options)
        lacks = next((size for size in _SIZES if size in strange), None)
        if lacks:
            raise ValueError(f"model {name!r} takes no {lacks}; its function must take {', '.join(_SIZES)} by name")
        own = [option for option in takes if option not in _SIZES]
        advice = did_you_mean(strange[0], own, f"it takes {', '.join(own) or 'none'}")
        raise ValueError(f"model {name!r} has no option {strange[0]}; {advice}")

    return called


def _watched(name: str, make: Callable[..., Algorithm], *, one_size: bool) -> Callable[..., Algorithm]:
    """The function that makes a user's algorithm, whose states are held against what a run can go on with."""
    made = _bordered("algorithm", name, make, Algorithm)

    @functools.wraps(make, updated=())
    def called(federation: Federation, start: Params, options: Any) -> Algorithm:
        # Copies, because all methods begin with the same tensors.
        start = {name: x.clone() for name, x in start.items()}
        whole = dict(start)  # the algorithm may add to its own
        begin, epoch, finish = made(federation, start, options)
        parts = own_parts(federation, whole)
        if one_size:
            whole = {}  # its checkpoints may have a global model of any size

        def checked(function: Callable[..., State], r: int, when: str, *before: State) -> State:
            state = _bordered("algorithm", name, function, State)(*before)
            if not is_whole(state.r) or state.r != r:
                wrong = f"whose r is {shown(state.r)} {when}; it must be {r}"
            else:
                wrong = _wrong_with(state, parts, whole)
            if wrong:
                raise ValueError(f"algorithm {name!r}, which is not hetperm's, returned a State {wrong}")
            _check_finite(state, whole)
            return state

        def next_epoch(before: State) -> State:
            return checked(epoch, before.r + 1, f"after epoch {before.r}", before)

        def at_the_end(before: State) -> State:
            return checked(finish, before.r, "at the end", before)

        return Algorithm(partial(checked, begin, 0, "at the beginning"), next_epoch, finish and at_the_end)

    return called


def _wrong_with(state: State, parts: Sequence[Params], whole: Params) -> str:
    """What makes a state useless to a run, as the end of a sentence; empty if nothing does.

    What passes can be written to a checkpoint, read again and shown in tables (`hetperm.runs.origin.misfit`).

    Args:
        parts: (N,) models of the sizes that clients' models must have.
        whole: the tensors that a global model may have, in their sizes; others in it can be of any.
    """
    return (
        _wrong_models(state, parts)
        or _wrong_tables(state, whole)
        or _wrong_work(state.work, len(parts))
        or _wrong_alpha(state.alpha, len(parts))
    )


def _wrong_models(state: State, parts: Sequence[Params]) -> str:
    """What is wrong with the models of clients, and their tail average."""
    N, v, tail = len(parts), state.v, state.tail
    if isinstance(v, tuple) and not v and not state.r and tail is None:
        return ""  # models may come with the first epoch
    if not isinstance(v, tuple) or len(v) != N:
        many = f"{len(v)} of them" if isinstance(v, tuple) else f"a {type(v).__name__}"
        return f"whose v is {many}; it must be a tuple of {N} models, one for each client"
    if not isinstance(tail, tuple | None) or (tail is not None and len(tail) != N):
        return f"whose tail is not None, nor a tuple of {N} models, one for each client"
    for i, part in enumerate(parts):
        for model in (v[i],) if tail is None else (v[i], tail[i]):
            wrong = _wrong_model(f"client {i}'s model", model, part)
            if wrong:
                return wrong
            more = next((key for key in model if key not in part), None)
            if more is not None:
                return f"in which client {i}'s model has {shown(more)}, and none of its size has; keep it in memory"
    return ""


def _wrong_model(owner: str, model: Any, like: Params) -> str:
    """The first tensor of a model that has not the shape and type of the one that it is to be like."""
    for key, x in like.items():
        own = model.get(key) if isinstance(model, Mapping) else None
        if not has_values(own) or own.is_sparse or (own.shape, own.dtype) != (x.shape, x.dtype):
            return (
                f"in which {key} of {owner} is {_kind(own)}; it must be {x.dtype} of {tuple(x.shape)}, a plain tensor"
            )
    return ""


def _wrong_tables(state: State, whole: Params) -> str:
    """What is wrong with the global model, with other models, or with how many are in the tail average."""
    least, most = (0, 0) if state.tail is None else (1, state.r)
    if not is_whole(state.tail_count) or not least <= state.tail_count <= most:
        wanted = "0, as tail is None" if state.tail is None else f"how many of the {state.r} epochs are in tail"
        return f"whose tail_count is {shown(state.tail_count)}; it must be {wanted}"
    if not is_model(state.w):
        return f"whose w is {shown(state.w)}; it must be a model, a table of tensors"
    if not isinstance(state.memory, Mapping) or not all([is_model(model) for model in state.memory.values()]):
        return "whose memory is no table of models, tables of tensors by name"
    strange = next((name for name in state.memory if not _is_name(name)), None)
    if strange is not None:
        return f"whose memory has the name {shown(strange)}; {_NAMES}"
    if LOOK_AHEAD in state.memory and not state.memory[LOOK_AHEAD].keys() >= _OUTLOOK:
        return f"whose memory has {LOOK_AHEAD!r}, where perm keeps what it saw ahead; give it another name"
    wrong = _wrong_model("w", state.w, {key: x for key, x in whole.items() if key in state.w})
    models = {"w": state.w, **{f"memory {name!r}": model for name, model in state.memory.items()}}
    return wrong or next(filter(None, (_unkept(owner, model) for owner, model in models.items())), "")


def _unkept(owner: str, model: Mapping[Any, Tensor]) -> str:
    """The first tensor or name in a model that no checkpoint can hold."""
    for name, x in model.items():
        if not _is_name(name):
            return f"in which {owner} has the name {shown(name)}; {_NAMES}"
        if not can_be_kept(x):
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
            return f"in which {name} of {owner} is {_kind(x)}; it must be a plain or sparse (COO) tensor of {kinds}"
    return ""


def _is_name(value: Any) -> bool:
    # Halves of characters, which no file can hold, are lost when a text is encoded.
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def _kind(value: Any) -> str:
    """What a value is that should be another tensor."""
    if not isinstance(value, Tensor):
        return "no tensor"
    if has_values(value) and not value.is_sparse:
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {value.dtype} ({value.layout} on {value.device})"


def _wrong_work(work: Any, N: int) -> str:
    """What is wrong with the counts of the work."""
    if not isinstance(work, Work):
        return f"whose work is {shown(work)}; it must be a Work of numbers from 0"
    strange = strange_count(work)
    if strange in ("asked", "absent"):
        return f"whose work has {strange} {shown(getattr(work, strange))}; it must be a tuple of whole numbers from 0"
    if strange:
        wanted = "number" if strange in IN_PARTS else "whole number"
        return f"whose work has {strange} {shown(getattr(work, strange))}; it must be a {wanted} from 0"
    asked, absent = work.asked, work.absent
    if len(asked) != len(absent) or len(asked) not in (0, N) or any([k > n for k, n in zip(absent, asked)]):
        return (
            f"whose work has asked {shown(asked)} and absent {shown(absent)}; they must be empty, or hold for each of "
            f"{N} clients how often it was asked, and how often of these it was absent"
        )
    return ""


def _wrong_alpha(alpha: Any, N: int) -> str:
    """What is wrong with the mixing weights."""
    if alpha is None:
        return ""
    if not isinstance(alpha, Tensor):
        return f"whose alpha is {shown(alpha)}; it must be None or a tensor of shape ({N}, {N})"
    # Sparse tensors cannot be made of subclasses.
    plain = can_be_kept(alpha) and type(alpha) in (Tensor, nn.Parameter) and alpha.is_floating_point()
    if not plain or alpha.shape != (N, N):
        return (
            f"whose alpha is {_kind(alpha)}; it must be None or a tensor of shape ({N}, {N}), of floating-point "
            "numbers, plain or sparse (COO)"
        )
    if alpha.is_sparse and alpha.dense_dim():
        return "whose alpha is sparse in one dimension only; make it dense with .to_dense()"
    try:
        mixing.effective_partners(alpha)  # called for its error
    except ValueError as error:
        return f"whose alpha holds no mixing weights: {error}"
    return ""


def _check_finite(state: State, whole: Params) -> None:
    """Raise a NotFinite if a model is not finite: a method that diverges is no error of its author's."""
    models = [("w", {key: x for key, x in state.w.items() if key in whole})]
    for name, own in (("v", state.v), ("tail", state.tail or ())):
        models += [(f"{name} of client {i}", model) for i, model in enumerate(own)]
    for owner, model in models:
        check_finite({key: x.detach() for key, x in model.items()}, f"epoch {state.r}: {owner}")
