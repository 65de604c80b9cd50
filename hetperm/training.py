"""One method from beginning to end: its epochs, what its models are worth after each, and where to go on from."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetperm import checkpoint
from hetperm.client import Client
from hetperm.config import Config
from hetperm.engine import engine_for
from hetperm.evaluate import evaluate, summarise
from hetperm.local import Params, Workbench, masked
from hetperm.methods import ALGORITHMS, ONE_SIZE, options_for
from hetperm.partial import own_widths
from hetperm.setting import Setting
from hetperm.state import State
from hetperm.visits import NotFinite
from submodels.norms import recalibrate

Show = Callable[[str, Sequence[Mapping[str, Any]]], object]  # (method, rows of the metrics so far)
Scores = tuple[tuple[float, ...], tuple[float, ...]]  # accuracy and loss of every client


@dataclass(frozen=True)
class Trained:
    """What one method came to.

    Attributes:
        setting: that of the run, or of models of one size.
        history: one row per epoch.
        accuracy, loss: of each client's model on its test data; nan for a client that has none.
    """

    method: str
    setting: Setting
    state: State
    history: tuple[Mapping[str, Any], ...]
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    seconds: float

    @property
    def widths(self) -> list[float]:
        """(N,) the width of every client's model."""
        return model_widths(self.setting, self.method)


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
) -> Trained:
    """What a method comes to with ``steps`` gradients a client (PERM takes as many as its visits need).

    Args:
        folder: where a checkpoint is kept, and gone on from if there is one; None: nowhere.
    """
    began = time.perf_counter()
    setting = setting.one_size() if method in ONE_SIZE else setting
    kept = None if folder is None else folder / f"{method}.safetensors"
    saved = checkpoint.load(kept, device=setting.config.device) if kept and kept.exists() else None
    try:
        if saved is None or not saved.finished:
            saved = _epochs(setting, method, steps=steps, show=show, kept=kept, saved=saved)
        else:
            show(method, saved.history)
    except NotFinite as error:
        raise NotFinite(f"{method}: {error}") from error
    except RuntimeError as error:
        raise RuntimeError(f"{method}: {error}") from error
    scores = (tuple(saved.extra[name]) for name in ("accuracy", "loss"))
    seconds = time.perf_counter() - began
    return Trained(method, setting, saved.state, tuple(saved.history), *scores, seconds=seconds)


def _epochs(
    setting: Setting,
    method: str,
    *,
    steps: int,
    show: Show,
    kept: Path | None,
    saved: checkpoint.Saved | None,
) -> checkpoint.Saved:
    """The last state and the whole history, from the beginning or from a checkpoint on."""
    config = setting.config
    make, _ = ALGORITHMS[method]
    options = options_for(method, config, steps=steps)
    sized = {} if method in ONE_SIZE else {"parts": setting.parts}
    with engine_for(config.engine, config.workers, setting.clients, setting.shop) as engine:
        begin, epoch, finish = make(setting.clients, engine, setting.start, options, **sized)
        state, rows = (begin(), []) if saved is None else (saved.state, list(saved.history))
        if saved is None:
            _keep(kept, state, rows)
        for r in range(state.r + 1, config.epochs + 1):
            before, state = state, epoch(state)
            last = r == config.epochs
            done = finish(state) if last or (config.eval_finished and r % config.eval_finished == 0) else state
            evaluated = last or r % config.eval_every == 0 or done is not state
            row, scores = _row(setting, method, done, r, evaluated=evaluated)
            row["finished"] = int(done is not state)
            rows.append(row | _visits(config, before, state))
            if not last:
                _keep(kept, state, rows)
            show(method, rows)
    extra = {name: list(found) for name, found in zip(("accuracy", "loss"), scores, strict=True)}
    _keep(kept, done, rows, finished=True, extra=extra)
    return checkpoint.Saved(done, tuple(rows), True, extra)


def _keep(kept: Path | None, state: State, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    if kept is not None:
        checkpoint.save(kept, state, rows, **{"finished": False, **more})


def model_widths(setting: Setting, method: str) -> list[float]:
    """(N,) the width of every client's personal model under a method."""
    return own_widths(setting.clients, setting.config.personal_width if method.startswith("perm") else "own")


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

    Work so far, and figures of the iterate and of the tail average once it has begun, on test and validation data.
    """
    row, test = {"epoch": r, **vars(state.work)}, ((), ())
    if not evaluated:
        return row, test
    widths = model_widths(setting, method)
    models = {"": state.v} | ({"tail_": state.tail} if state.tail is not None else {})
    for prefix, v in models.items():
        parts = {part: score(setting, v, widths, part, place=f"after epoch {r}") for part in ("test", "val")}
        test = parts["test"]
        for label, scores in (("", parts["test"]), ("val_", parts["val"])):
            for quantity, found in figures(setting, *scores).items():
                row |= {f"{prefix}{label}{quantity}_{name}": figure for name, figure in found.items()}
        for tier, found in by_tier(setting, test[0]).items():
            row[f"{prefix}accuracy_tier_{tier}"] = found
    return row, test


def _visits(config: Config, before: State, after: State) -> dict[str, int]:
    """The visits of one epoch, and the rounds they took: as many as the largest degree, or N on the ring."""
    if before.alpha is None:
        return {}
    pairs = before.alpha > 0
    degree = int(torch.maximum(pairs.sum(0), pairs.sum(1)).max())
    rounds = degree if config.schedule == "colour" else len(pairs)
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
