"""One method from beginning to end: its epochs, what its models are worth after each, and where to go on from."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetperm import mixing
from hetperm.algorithms.base import Algorithm
from hetperm.config import Config
from hetperm.engine import choice
from hetperm.engine.task import Engine
from hetperm.methods import METHODS, options_for
from hetperm.params import Keep, NotFinite
from hetperm.runs import checkpoint
from hetperm.runs.checkpoint import Saved
from hetperm.runs.scores import Scores, by_tier, figures, score
from hetperm.runs.setting import Setting
from hetperm.server.federation import Federation
from hetperm.server.store import in_memory, on_disk
from hetperm.state import State


@dataclass(frozen=True)
class Trained:
    """A method after its last epoch.

    Attributes:
        widths: (N,) of the clients' own models.
        history: one row per epoch.
        accuracy, loss: of each client's model on its test data; nan for a client that has none.
        seconds: of training, those before the run was resumed included.
        seconds_before_resume: of these, those that passed before.
        trained_here: whether any epoch of it was trained in this process; otherwise all came from a checkpoint.
    """

    method: str
    setting: Setting
    widths: tuple[float, ...]
    state: State
    history: tuple[dict[str, Any], ...]
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    seconds: float
    seconds_before_resume: float
    trained_here: bool


def default_steps(config: Config) -> int:
    """Steps of each client if PERM does not run to say how many: those of PERM with every visit."""
    return config.steps or (config.warmup_rounds + config.epochs * config.num_clients) * config.local_steps


def steps_taken(state: State) -> int:
    """Steps of each client that a method took, rounded up: what rivals may take too."""
    return -(-state.work.client_steps // len(state.v))


# Epochs


def algorithm_for(setting: Setting, name: str, engine: Engine, *, steps: int, keep: Keep = in_memory) -> Algorithm:
    """The algorithm of a method in a setting; ``steps`` are the gradients that each client may compute."""
    federation = Federation(setting.clients, engine, setting.slicer, setting.config.seed, setting.heads, keep)
    return METHODS[name].make(federation, setting.start, options_for(name, setting.config, steps=steps))


def states(algorithm: Algorithm, epochs: int, *, after: State | None = None) -> Iterator[State]:
    """The state before the first epoch and after every one; with ``after``, that state and those that follow it."""
    state = algorithm.begin() if after is None else after
    yield state
    while state.r < epochs:
        state = algorithm.epoch(state)
        yield state


def epochs(
    setting: Setting, name: str, *, steps: int, saved: Saved | None = None, folder: Path | None = None
) -> Iterator[Saved]:
    """A method before its first epoch and after every one, each as training can go on from it.

    Args:
        steps: gradients that each client may compute (PERM takes as many as its visits need).
        saved: where to go on from; nothing is trained if it is finished.
        folder: where models wait that are not in memory; None is the system's temporary one.
    """
    if saved is not None and saved.finished:
        yield saved
        return
    config, method = setting.config, METHODS[name]
    began = time.perf_counter() - (0.0 if saved is None else saved.extra["seconds"])
    fingerprint = _fingerprint(setting)

    def extra() -> dict[str, Any]:
        return {"setting": fingerprint, "seconds": time.perf_counter() - began}

    sized = setting.one_size() if method.one_size else setting
    keep = on_disk(folder) if method.mixes and config.idle_models == "disk" else in_memory
    with _naming(name), choice.opened(sized.engine, config.workers, sized.clients, sized.shop) as engine:
        algorithm = algorithm_for(sized, name, engine, steps=steps, keep=keep)
        rows = [] if saved is None else list(saved.history)
        before = None
        for state in states(algorithm, config.epochs, after=None if saved is None else saved.state):
            # The first state is the beginning, or the checkpoint, which has been saved and shown before.
            if before is not None:
                is_last, done = state.r == config.epochs, _done(algorithm, state, config)
                evaluated = is_last or state.r % config.eval_every == 0 or done is not None
                row, scores = _row(setting, name, done or state, evaluated=evaluated)
                row["finished"] = int(done is not None)
                rows.append(row | _visit_counts(config, before, state))
                if is_last:
                    accuracy, loss = scores
                    last = {**extra(), "accuracy": list(accuracy), "loss": list(loss)}
                    yield Saved(done or state, tuple(rows), finished=True, extra=last)
                else:
                    # Training goes on from the state itself, not from what would be deployed.
                    yield Saved(state, tuple(rows), finished=False, extra=extra())
            elif saved is None:
                yield Saved(state, (), finished=False, extra=extra())
            before = state


def _done(algorithm: Algorithm, state: State, config: Config) -> State | None:
    """What the method would deploy if it ended here; None if that is the state itself, or nobody wants to know."""
    wanted = state.r == config.epochs or (config.eval_finished and state.r % config.eval_finished == 0)
    return algorithm.finish(state) if algorithm.finish and wanted else None


@contextmanager
def _naming(method: str) -> Iterator[None]:
    """A context whose errors say which method they are about."""
    try:
        yield
    except (NotFinite, RuntimeError, ValueError) as error:
        kind = next(kind for kind in (NotFinite, RuntimeError, ValueError) if isinstance(error, kind))
        raise kind(f"{method}: {error}") from error


def trained(setting: Setting, name: str, saved: Saved, before: Saved | None) -> Trained:
    """What a method came to, from its last checkpoint and the one it went on from."""
    return Trained(
        name,
        setting,
        tuple(setting.model_widths(name)),
        saved.state,
        saved.history,
        accuracy=tuple(saved.extra["accuracy"]),
        loss=tuple(saved.extra["loss"]),
        seconds=saved.extra["seconds"],
        seconds_before_resume=0.0 if before is None else before.extra["seconds"],
        trained_here=saved is not before,
    )


# Checkpoints


def checkpoints(setting: Setting, methods: Sequence[str], folder: Path) -> dict[str, Saved]:
    """method -> where it stopped, of those that have a checkpoint; an error if one is damaged or of another run."""
    found = {}
    for method in methods:
        path = checkpoint_file(folder, method)
        if path.exists():
            found[method] = checkpoint.load(path, device=setting.config.device)
            if found[method].extra["setting"] != _fingerprint(setting):
                raise ValueError(
                    f"{path} is of a run with other clients, labels or another model; bring those back to go on with "
                    "it, or start another with --out"
                )
    return found


def checkpoint_file(folder: Path, method: str) -> Path:
    """Where the checkpoint of a method is."""
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


# Rows of the metrics


def _row(setting: Setting, method: str, state: State, *, evaluated: bool) -> tuple[dict[str, Any], Scores]:
    """The metrics of an epoch, and how each client's deployed model does on test data.

    Work so far, and figures of the iterate and of the tail average once it has begun; in the last epoch also on
    validation data, which is what tuning reads.
    """
    r = state.r
    row, test = {"epoch": r, **vars(state.work)}, ((), ())
    if not evaluated:
        return row, test
    widths, where = setting.model_widths(method), f"after epoch {r}"
    models = {"": state.v} | ({"tail_": state.tail} if state.tail is not None else {})
    for prefix, v in models.items():
        test = score(setting, v, widths, "test", where=where)
        scores = {"": test}
        if r == setting.config.epochs:
            scores["val_"] = score(setting, v, widths, "val", where=where)
        for label, scored in scores.items():
            for quantity, table in figures(setting, *scored).items():
                row |= {f"{prefix}{label}{quantity}_{name}": figure for name, figure in table.items()}
        for tier, mean in by_tier(setting, test[0]).items():
            row[f"{prefix}accuracy_tier_{tier}"] = mean
    return row, test


def _visit_counts(config: Config, before: State, after: State) -> dict[str, int]:
    """The visits of one epoch, and the rounds they took: as many as the largest degree, or N on the ring."""
    if before.alpha is None:
        return {}
    rounds = len(before.alpha)
    if config.schedule == "colour":
        rounds = max(int(mixing.nonzero(alpha).max()) for alpha in (before.alpha, before.alpha.T))
    return {"epoch_visits": after.work.visits - before.work.visits, "epoch_rounds": rounds}
