"""Where a checkpoint comes from: what it says of its run, and whether it fits the one that is to be resumed."""

import hashlib
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import hetperm
from hetperm.client import Client
from hetperm.methods import METHODS
from hetperm.plugins import digests
from hetperm.runs import checkpoint
from hetperm.runs.checkpoint import Saved
from hetperm.runs.functions import are_same, known_by
from hetperm.runs.setting import Setting
from hetperm.shards import Shard, Stored, known_labels, read, size_of, taken, tensors_of
from hetperm.state import State

NO_NUMBER = ("name", "data_dir", "download", "baselines")  # settings in config.toml that decide no number of a method
SCORES = ("score", "loss")  # the keys in the extra values of a finished checkpoint: one number per client each
SIMULATED = "simulated_seconds"  # the key of the simulated clock, in metrics and in the extra values of a checkpoint
EVALUATION = "evaluation_seconds"  # the key in the extra values of a checkpoint of the time that scoring took
COUNTS = ("epoch", "finished", "epoch_visits", "epoch_rounds", SIMULATED)  # in a row of the history, beside the work
SAMPLES, MOST_SAMPLED = 8, 64  # of a client, and clients, whose inputs a checkpoint knows
DIVERGED = "diverged"  # the key in the extra values of a checkpoint that says when a method went non-finite


def origin_of(setting: Setting, method: str) -> dict[str, Any]:
    """What a checkpoint says of where it comes from: with another method, version or setting it is of no use."""
    settings = tomllib.loads(setting.config.to_toml())
    return {
        "method": method,
        "hetperm": hetperm.__version__,
        "config": {key: value for key, value in settings.items() if key not in NO_NUMBER},
        "setting": _fingerprint(setting),
        "inputs": [] if setting.nodes is not None else sampled(setting.clients),
        "functions": [known_by(one) for one in (setting.shop.loss, setting.metric.score, setting.shop.augment)],
        **({"plugins": digests(setting.config.plugins)} if setting.config.plugins else {}),
    }


def refusal(ours: Mapping[str, Any], was: Mapping[str, Any]) -> str | None:
    """Why a checkpoint of one origin cannot be used where another is wanted, and what to do; None if it can."""
    method, version, config = (was.get(key) for key in ("method", "hetperm", "config"))
    if method != ours["method"]:
        return f"it holds {method!r} and not {ours['method']!r}; {remedy(ours['method'])}, or put the right file back"
    if version != ours["hetperm"]:
        wrote = f"hetperm {version} wrote it and this is {ours['hetperm']}"
        return f"{wrote}; go on with that version, or {remedy(method)}"
    different = checkpoint.changed(config if isinstance(config, dict) else {}, ours["config"])
    if different:
        return different
    if was.get("plugins") != ours.get("plugins"):
        return "a plugin has changed since; bring it back as it was, or start another run with --out"
    if was.get("setting") != ours["setting"]:
        what = "it has other clients, labels or another model (or trace)"
        return f"{what}; bring those back, or start another run with --out"
    # Earlier checkpoints do not say.
    if "inputs" in was and not are_near(was["inputs"], ours["inputs"]):
        return "its clients had other inputs; bring those back, or start another run with --out"
    if "functions" in was and not are_same(was["functions"], ours["functions"]):
        return "it has another loss, metric or augment; bring those back, or start another run with --out"
    return None


def are_near(was: Any, now: list[float]) -> bool:
    """Whether numbers are the same but for what two machines make of the same preparation."""
    if not isinstance(was, list) or len(was) != len(now) or not all([isinstance(x, float) for x in was]):
        return False
    return all([math.isclose(x, y, rel_tol=1e-3, abs_tol=1e-3) for x, y in zip(was, now, strict=True)])


def remedy(method: str) -> str:
    """What to do about a checkpoint that is of no use."""
    return f"remove it to train {method} from the start with --resume"


def misfit(saved: Saved, setting: Setting, method: str) -> str | None:
    """The part of a checkpoint that does not fit the clients and epochs of its run; None if all does."""
    state, extra, count = saved.state, saved.extra, len(setting.clients)
    is_diverged = DIVERGED in extra
    fits = {
        "the number of epochs": state.r <= setting.config.epochs and len(saved.history) == state.r,
        "the history": [row.get("epoch") for row in saved.history] == list(range(1, len(saved.history) + 1))
        and all([_is_row(row, setting, counts={*state.work.figures, *COUNTS}) for row in saved.history]),
        "whether it is finished": saved.finished == (is_diverged or state.r == setting.config.epochs),
        "the time it took": "seconds" in extra
        and all([_is_time(extra[key]) for key in ("seconds", EVALUATION, SIMULATED) if key in extra]),
        "the mixing weights": (is_diverged or not METHODS[method].mixes)
        if state.alpha is None
        else _is_mixing(state.alpha, count),
        "the global model": is_diverged
        or METHODS[method].one_size
        or (_alike(state.w, setting.start) and (not METHODS[method].mixes or state.w.keys() >= setting.start.keys())),
        "the models": is_diverged or _models_fit(state, setting, method),
        "the scores": not saved.finished or all([_are_scores(extra.get(key), setting, is_diverged) for key in SCORES]),
    }
    return next((part for part, right in fits.items() if not right), None)


def _is_row(row: Mapping[str, Any], setting: Setting, counts: Collection[str]) -> bool:
    """Whether a row of the history holds numbers, and a score that is missing only where some client has no data."""
    for name, value in row.items():
        if name in counts and not (type(value) in (int, float) and 0 <= value < math.inf):
            return False
        part = "val" if "val_" in name else "test"
        unscored = setting.nodes is not None or any([getattr(client, part) is None for client in setting.clients])
        for x in value if isinstance(value, list) else [value]:
            if not isinstance(x, int | float | None):
                return False
            missing = isinstance(x, float) and math.isnan(x) and unscored
            if x is not None and not math.isfinite(x) and not missing:
                return False
    return True


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def _is_mixing(alpha: Tensor, count: int) -> bool:
    """Whether these can be mixing weights of so many clients."""
    numbers = alpha.coalesce().values() if alpha.is_sparse else alpha
    return tuple(alpha.shape) == (count, count) and alpha.is_floating_point() and bool(numbers.isfinite().all())


def _alike(model: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> bool:
    """Whether what a model has in common with the start has its shapes and types, and is finite."""
    pairs = [(x, start[name]) for name, x in model.items() if name in start]
    return all([(x.shape, x.dtype) == (y.shape, y.dtype) and bool(x.isfinite().all()) for x, y in pairs])


def _models_fit(state: State, setting: Setting, method: str) -> bool:
    """Whether every client has a personal model of its width; before the first epoch there may be none."""
    if not state.r and not state.v:
        return True
    benches = [setting.shop.at(width) for width in setting.model_widths(method)]
    wanted = [{name: (p.shape, p.dtype) for name, p in zip(bench.names, bench.slots)} for bench in benches]
    if (state.tail is None) != (state.tail_count == 0) or state.tail_count > state.r:
        return False
    models = [state.v] if state.tail is None else [state.v, state.tail]
    if not all([bool(x.isfinite().all()) for v in models for one in v for x in one.values()]):
        return False
    return all([[{name: (x.shape, x.dtype) for name, x in one.items()} for one in v] == wanted for v in models])


def _are_scores(value: Any, setting: Setting, is_diverged: bool) -> bool:
    """Whether these can be scores of all clients: nan where there are no test data, or after divergence."""
    if not isinstance(value, list) or len(value) != len(setting.clients):
        return False
    all_blank = is_diverged or setting.nodes is not None
    blank = [all_blank or client.test is None for client in setting.clients]
    return all([isinstance(x, float) and (math.isfinite(x) or (math.isnan(x) and no)) for x, no in zip(value, blank)])


def _fingerprint(setting: Setting) -> str:
    """A hash of the clients and the model of a setting, which a configuration does not tell.

    Of parameters only the shapes count, and inputs only by shape, because their last bits may depend on the machine; of
    these `sampled` says more. Of stored samples only their number counts: reading all of them may take an hour.
    """
    total = hashlib.sha256(repr([(name, tuple(x.shape)) for name, x in setting.start.items()]).encode())
    for client in setting.clients:
        if setting.nodes is not None:  # how many samples a node has is known when it comes, which may be later
            total.update(repr((client.key, client.width)).encode())
            continue
        shapes, labels = _shapes(client.train)
        total.update(repr((client.key, client.width, *shapes)).encode())
        total.update(labels)
    if setting.presence.trace:
        total.update(repr(setting.presence.trace).encode())
    return total.hexdigest()


def sampled(clients: Sequence[Client]) -> list[float]:
    """Numbers of some samples of each of the first clients, which change if the data or their preparation do."""
    found: list[float] = []
    for client in clients[:MOST_SAMPLED]:
        for shard in (client.train, client.val, client.test):
            if shard is None or isinstance(shard, Stored):  # stored samples may be drawn anew when they are read
                continue
            n = size_of(shard)
            x, y = read(taken(shard, torch.linspace(0, n - 1, min(n, SAMPLES)).round().long()))
            found += [_place_weighted(one) for one in (*tensors_of(x), y) if one.numel()]
    return found


def _place_weighted(x: Tensor) -> float:
    """A mean that changes with the order of numbers, too."""
    numbers = x.detach().cpu().double().flatten()
    return float((numbers * torch.linspace(1, 2, len(numbers), dtype=numbers.dtype)).mean())


def _shapes(shard: Shard) -> tuple[tuple[Any, ...], bytes]:
    """The shapes of inputs and the type of labels, and the bytes of the labels."""
    if isinstance(shard, Stored):
        known = known_labels(shard)
        return (shard.size,), b"" if known is None else known.numpy().tobytes()
    x, y = shard
    return (*(tuple(one.shape) for one in tensors_of(x)), y.dtype), y.detach().cpu().numpy().tobytes()
