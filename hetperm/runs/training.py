"""One method from beginning to end: its epochs, what its models are worth after each, and where to go on from."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetperm import mixing
from hetperm.client import Client
from hetperm.config import Config
from hetperm.device.bench import Params, Workbench, masked
from hetperm.engine import engine_for
from hetperm.methods import ALGORITHMS, ONE_SIZE, options_for
from hetperm.runs import checkpoint
from hetperm.runs.evaluate import evaluate, summarise
from hetperm.runs.setting import Setting
from hetperm.server.slicer import Parts, own_widths
from hetperm.server.store import on_disk
from hetperm.server.visits import NotFinite
from hetperm.state import State
from submodels.norms import recalibrate

Show = Callable[[str, Sequence[Mapping[str, Any]]], object]  # (method, rows of the metrics so far)
Scores = tuple[tuple[float, ...], tuple[float, ...]]  # accuracy and loss of every client


@dataclass(frozen=True)
class Trained:
    """What one method came to.

    Attributes:
        widths: (N,) of the clients' own models.
        history: one row per epoch.
        accuracy, loss: of each client's model on its test data; nan for a client that has none.
        seconds: it took; `earlier`: those of them that passed before the run was resumed.
    """

    method: str
    setting: Setting
    widths: tuple[float, ...]
    state: State
    history: tuple[Mapping[str, Any], ...]
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    seconds: float
    earlier: float


def budget(config: Config) -> int:
    """Steps of each client if PERM does not run to say how many: those of PERM with every visit."""
    return config.steps or (config.warmup_rounds + config.epochs * config.num_clients) * config.local_steps


def train(
    setting: Setting,
    method: str,
    *,
    steps: int,
    show: Show = lambda method, rows: None,
    folder: Path | None = None,
    saved: checkpoint.Saved | None = None,
) -> Trained:
    """What a method comes to with ``steps`` gradients a client (PERM takes as many as its visits need).

    Args:
        folder: where a checkpoint is kept; None: nowhere.
        saved: what `checkpoints` found of the method, to go on from.
    """
    earlier = 0.0 if saved is None else saved.extra["seconds"]
    try:
        if saved is None or not saved.finished:
            saved = _epochs(setting, method, steps=steps, show=show, folder=folder, saved=saved, earlier=earlier)
        else:
            show(method, saved.history)
    except NotFinite as error:
        raise NotFinite(f"{method}: {error}") from error
    except RuntimeError as error:
        raise RuntimeError(f"{method}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from error
    return Trained(
        method,
        setting,
        tuple(model_widths(setting, method)),
        saved.state,
        tuple(saved.history),
        accuracy=tuple(saved.extra["accuracy"]),
        loss=tuple(saved.extra["loss"]),
        seconds=saved.extra["seconds"],
        earlier=earlier,
    )


def checkpoints(setting: Setting, methods: Sequence[str], folder: Path) -> dict[str, checkpoint.Saved]:
    """method -> where it stopped, of those that have a checkpoint; an error if one is damaged or of another run."""
    found = {}
    for method in methods:
        path = _file(folder, method)
        if path.exists():
            found[method] = checkpoint.load(path, device=setting.config.device)
            if found[method].extra["setting"] != _fingerprint(setting):
                raise ValueError(
                    f"{path} is of a run with other clients, labels or another model; bring those back to go on with "
                    "it, or start another with --out"
                )
    return found


def _file(folder: Path, method: str) -> Path:
    return folder / f"{method}.safetensors"


def _fingerprint(setting: Setting) -> str:
    """The same for two settings only if a run that began in one can go on in the other.

    Parameters count by shape and inputs not at all: their last bits may depend on the machine.
    """
    total = hashlib.sha256(repr([(name, tuple(x.shape)) for name, x in setting.start.items()]).encode())
    for client in setting.clients:
        x, y = client.train
        total.update(repr((client.key, client.width, tuple(x.shape), y.dtype)).encode())
        total.update(y.detach().cpu().numpy().tobytes())
    return total.hexdigest()


def _epochs(
    setting: Setting,
    method: str,
    *,
    steps: int,
    show: Show,
    folder: Path | None,
    saved: checkpoint.Saved | None,
    earlier: float,
) -> checkpoint.Saved:
    """The last state and the whole history, from the beginning or from a checkpoint on."""
    config, began, fingerprint = setting.config, time.perf_counter() - earlier, _fingerprint(setting)
    make, _ = ALGORITHMS[method]
    options = options_for(method, config, steps=steps)
    sized, arguments = (setting.one_size(), {}) if method in ONE_SIZE else (setting, {"parts": setting.parts})
    if arguments and config.idle_models == "disk":
        arguments["parts"] = Parts(setting.parts.scalable, setting.parts.heads, keep=on_disk(folder))

    def keep(state: State, rows: Sequence[Mapping[str, Any]], **more: Any) -> checkpoint.Saved:
        extra = {"setting": fingerprint, "seconds": time.perf_counter() - began, **more}
        now = checkpoint.Saved(state, tuple(rows), finished=bool(more), extra=extra)
        if folder is not None:
            checkpoint.save(_file(folder, method), now.state, now.history, finished=now.finished, extra=now.extra)
        return now

    with engine_for(config.engine, config.workers, sized.clients, sized.shop) as engine:
        begin, epoch, finish = make(sized.clients, engine, sized.start, options, **arguments)
        saved = keep(begin(), []) if saved is None else saved
        state, rows = saved.state, list(saved.history)
        for r in range(state.r + 1, config.epochs + 1):
            before, state = state, epoch(state)
            last = r == config.epochs
            done = finish(state) if last or (config.eval_finished and r % config.eval_finished == 0) else state
            evaluated = last or r % config.eval_every == 0 or done is not state
            row, (accuracies, losses) = _row(setting, method, done, r, evaluated=evaluated)
            row["finished"] = int(done is not state)
            rows.append(row | _visits(config, before, state))
            saved = keep(done, rows, accuracy=list(accuracies), loss=list(losses)) if last else keep(state, rows)
            show(method, rows)
    return saved


def model_widths(setting: Setting, method: str) -> list[float]:
    """(N,) the width of every client's personal model under a method."""
    personal = setting.config.personal_width if method.startswith("perm") else "own"
    return own_widths(setting.clients, "smallest" if method in ONE_SIZE else personal)


# What models are worth


def put(bench: Workbench, params: Params, client: Client) -> None:
    """A client's model on the bench, ready to be evaluated: norms use the statistics of the client's own shard."""
    bench.load(params)
    pieces = math.ceil(client.n_train / 512)
    recalibrate(bench.module, client.train[0].tensor_split(pieces))


def score(setting: Setting, models: Sequence[Params], widths: Sequence[float], part: str, *, place: str) -> Scores:
    """(accuracies, losses) of every client's model on its own ``part``, "val" or "test"; nan where it has none."""
    accuracies, losses = [], []
    for i, (client, params, width) in enumerate(zip(setting.clients, models, widths, strict=True)):
        pair = getattr(client, part)
        if pair is None:
            loss = metric = math.nan
        else:
            bench = setting.shop.at(width)
            put(bench, params, client)
            loss, metric = evaluate(
                bench.module,
                pair,
                loss=lambda out, y, known=client.classes: setting.shop.loss(masked(out, known), y),
                metric=lambda out, y, known=client.classes: setting.metric(masked(out, known), y),
            )
            if not (math.isfinite(loss) and math.isfinite(metric)):
                found = f"{part} loss {loss:g}, metric {metric:g}"
                raise NotFinite(f"{place}: client {i}: {found}; lower the learning rate (personal_lr, global_lr)")
        accuracies.append(metric)
        losses.append(loss)
    return tuple(accuracies), tuple(losses)


def _row(setting: Setting, method: str, state: State, r: int, *, evaluated: bool) -> tuple[dict[str, Any], Scores]:
    """The metrics of an epoch, and how each client's deployed model does on test data.

    Work so far, and figures of the iterate and of the tail average once it has begun; in the last epoch also on
    validation data, which is what tuning reads.
    """
    row, test = {"epoch": r, **vars(state.work)}, ((), ())
    if not evaluated:
        return row, test
    widths = model_widths(setting, method)
    models = {"": state.v} | ({"tail_": state.tail} if state.tail is not None else {})
    for prefix, v in models.items():
        test = score(setting, v, widths, "test", place=f"after epoch {r}")
        scores = {"": test}
        if r == setting.config.epochs:
            scores["val_"] = score(setting, v, widths, "val", place=f"after epoch {r}")
        for label, each in scores.items():
            for quantity, found in figures(setting, *each).items():
                row |= {f"{prefix}{label}{quantity}_{name}": figure for name, figure in found.items()}
        for tier, found in by_tier(setting, test[0]).items():
            row[f"{prefix}accuracy_tier_{tier}"] = found
    return row, test


def _visits(config: Config, before: State, after: State) -> dict[str, int]:
    """The visits of one epoch, and the rounds they took: as many as the largest degree, or N on the ring."""
    if before.alpha is None:
        return {}
    rounds = len(before.alpha)
    if config.schedule == "colour":
        rounds = max(int(mixing.nonzero(alpha).max()) for alpha in (before.alpha, before.alpha.T))
    return {"epoch_visits": after.work.visits - before.work.visits, "epoch_rounds": rounds}


def figures(setting: Setting, accuracies: Sequence[float], losses: Sequence[float]) -> dict[str, dict[str, float]]:
    """Accuracy and loss over the clients that were scored."""
    scored = [i for i, value in enumerate(losses) if not math.isnan(value)]
    n = [setting.clients[i].n_train for i in scored]
    if not scored:
        nothing = dict.fromkeys(summarise([0.0], [1]), math.nan)
        return {"accuracy": nothing, "loss": nothing}
    return {
        "accuracy": summarise([accuracies[i] for i in scored], n),
        "loss": summarise([losses[i] for i in scored], n, largest_is_worst=True),
    }


def by_tier(setting: Setting, values: Sequence[float]) -> dict[str, float]:
    """tier -> the mean over its clients, of those that were scored; nan if none was."""
    found = {}
    for tier in setting.tier_names:
        known = [value for value, name in zip(values, setting.tiers, strict=True) if name == tier]
        known = [value for value in known if not math.isnan(value)]
        found[tier] = sum(known) / len(known) if known else math.nan
    return found
