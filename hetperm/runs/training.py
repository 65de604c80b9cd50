"""One method from beginning to end: its epochs, the scores of its models after each, and its checkpoints."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from hetperm import mixing
from hetperm.algorithms import perm
from hetperm.algorithms.base import Algorithm
from hetperm.config import ALGORITHMS, Config
from hetperm.device.recipe import PLAIN, Recipe
from hetperm.engine import choice
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Engine
from hetperm.methods import METHODS, options_for
from hetperm.params import Keep, NotFinite
from hetperm.runs import checkpoint, clock
from hetperm.runs.checkpoint import Saved
from hetperm.runs.counted import Counted
from hetperm.runs.files import GrowingCsv
from hetperm.runs.origin import DIVERGED, EVALUATION, SCORES, SIMULATED, misfit, origin_of, refusal, remedy
from hetperm.runs.scores import Scores, by_tier, figures, scores
from hetperm.runs.scoring import TAIL, Wanted, wanted_after
from hetperm.runs.setting import Setting
from hetperm.server.federation import Federation
from hetperm.server.pace import Pace
from hetperm.server.store import in_memory, on_disk
from hetperm.state import State
from hetperm.texts import one_line

BY_CLIENT = "client_scores"  # the key in the history of the scores of all clients, a list
MOST_CURVES = 1000  # clients up to which each has a curve of its own


@dataclass(frozen=True)
class Trained:
    """A method after its last epoch.

    Attributes:
        widths: (N,) the widths of the personal models.
        history: one row of metrics per epoch.
        score: (N,) the metric of each client's deployed model on its test data; nan for a client that has none.
        loss: (N,) the loss, likewise.
        seconds: time of training, including the time before the run was resumed.
        seconds_before_resume: the part of `seconds` before the run was resumed.
        trained_here: whether this process trained any epoch of it; otherwise all came from a checkpoint.
        diverged: when it went non-finite, such as "diverged at epoch 3"; empty if it finished. What diverged has no
            scores, and its state and history are those of its last good epoch.
        evaluation_seconds: the part of `seconds` in which models were scored.
    """

    method: str
    setting: Setting
    widths: tuple[float, ...]
    state: State
    history: tuple[dict[str, Any], ...]
    score: tuple[float, ...]
    loss: tuple[float, ...]
    seconds: float
    seconds_before_resume: float
    trained_here: bool
    diverged: str = ""
    evaluation_seconds: float = 0.0


def default_steps(config: Config) -> int:
    """The steps of each client before PERM has run: those in the configuration, or those of PERM with all visits."""
    rounds = perm.WARMUP_ROUNDS if config.warmup_rounds is None else config.warmup_rounds
    return config.steps or (rounds + config.epochs * config.num_clients) * config.local_steps


def steps_taken(state: State) -> int:
    """The steps per client that a method took, rounded up: the budget of its rivals."""
    return math.ceil(state.work.client_steps / len(state.v))


# Epochs


def algorithm_for(setting: Setting, name: str, engine: Engine, *, steps: int, keep: Keep = in_memory) -> Algorithm:
    """The algorithm of a method in a setting. Each client may compute ``steps`` mini-batch gradients."""
    method, config = METHODS[name], setting.config
    options, recipe = options_for(name, config, steps=steps), setting.recipe
    if method.mixes:
        options, recipe = _for_recipe(options, recipe, setting)
    pace = None if recipe == PLAIN else Pace(recipe, total=len(setting.clients) * (config.steps or steps))
    # Only where they are needed: a user's model may return anything.
    finds_heads = method.finds_heads or getattr(options, "scaler", False)
    heads = setting.found_heads() if finds_heads else setting.heads
    federation = Federation(
        setting.clients,
        engine,
        setting.slicer,
        config.seed,
        heads,
        keep,
        cache(setting.macs),
        setting.presence,
        pace=pace,
        batch_size=config.batch_size,
    )
    algorithm = method.make(federation, setting.start, options)
    if pace is None:
        return algorithm
    finish = algorithm.finish and pace.from_state(algorithm.finish)
    return Algorithm(algorithm.begin, pace.from_state(algorithm.epoch), finish)


def check_steps(setting: Setting) -> None:
    """Raise an error if the steps of the run are too few for a single round of one of its methods.

    Nothing is trained. A method of a plugin is not asked: making it may do anything.
    """
    config = setting.config
    for name in (config.algorithm, *config.baselines) if config.steps else ():  # else rivals get what PERM takes
        if METHODS[name].mixes and setting.nodes is None:
            _check_reports(setting, name)
        if not METHODS[name].mixes and name in ALGORITHMS:
            with _naming(name):
                algorithm_for(setting, name, Sequential(setting.clients, setting.shop), steps=config.steps)


def _check_reports(setting: Setting, name: str) -> None:
    """Raise an error if the reports from which alpha is estimated take more steps than the run has."""
    config = setting.config
    reports = 2 if options_for(name, config, steps=config.steps).early_round else 1
    samples = sum([client.n_train for client in setting.clients]) / len(setting.clients)
    least = reports * samples / config.batch_size
    if config.steps < least:
        raise ValueError(
            f"{name}: a budget of {config.steps} steps a client, and to report gradients takes {math.ceil(least)}; "
            "raise --steps"
        )


def _for_recipe(options: perm.Options, recipe: Recipe, setting: Setting) -> tuple[perm.Options, Recipe]:
    """PERM's options and the recipe of its local steps, if these are not plain SGD.

    PERM has one step size for local steps in the warm-up and for plain gradient steps: of w and of the look ahead. An
    optimizer needs another for its own steps. So the options get the plain one, and the recipe scales local steps back.
    """
    if recipe.changes_steps:
        options = replace(options, decay="none")  # a schedule takes its place
    scale = options.global_lr / setting.plain_lr if recipe.optimizer != "sgd" else 1.0
    if scale == 1:
        return options, recipe
    visiting = replace(options.visiting, personal_lr=options.visiting.personal_lr / scale)
    return replace(options, global_lr=setting.plain_lr, visiting=visiting), replace(recipe, scale=scale)


def setting_of(setting: Setting, name: str) -> Setting:
    """The setting in which a method is trained and scored: with masked classes if its table says so."""
    table = setting.config.rivals.get(name, {})
    return setting.masked() if table.get("masked_loss") else setting


def states(algorithm: Algorithm, epochs: int, *, after: State | None = None) -> Iterator[State]:
    """Yield the state before the first epoch and after each; with ``after``, that state and those that follow it."""
    state = algorithm.begin() if after is None else after
    yield state
    while state.r < epochs:
        state = algorithm.epoch(state)
        yield state


def epochs(
    setting: Setting,
    name: str,
    *,
    steps: int,
    saved: Saved | None = None,
    folder: Path | None = None,
    on_steps: Callable[[float], None] | None = None,
) -> Iterator[Saved]:
    """Train a method; yield a checkpoint before its first epoch and after each.

    Args:
        steps: mini-batch gradients that each client may compute. PERM ignores it and takes what its visits need.
        saved: the checkpoint to resume from; if it is finished, nothing is trained.
        folder: where models are stored that wait on disk; None means the system's temporary folder.
        on_steps: called after every round with the part of all steps that is spent, if their number is known.
    """
    if saved is not None and saved.finished:
        yield saved
        return
    setting = setting_of(setting, name)
    config, method = setting.config, METHODS[name]
    # The time before the run was resumed counts too.
    began = time.perf_counter() - (0.0 if saved is None else saved.extra["seconds"])
    scoring = 0.0 if saved is None else saved.extra.get(EVALUATION, 0.0)
    origin = origin_of(setting, name)

    def extra() -> dict[str, Any]:
        return {**origin, "seconds": time.perf_counter() - began, EVALUATION: scoring, SIMULATED: watch.seconds}

    # Trained at one size, but scored in the setting of all methods: `_row` gets that one.
    sized = setting.one_size() if method.one_size else setting
    keep = on_disk(folder) if method.mixes and config.idle_models == "disk" else in_memory
    with (
        _naming(name, resumed=saved is not None),
        _opened(sized, base=min(setting.model_widths(name)) if method.one_size else 1.0) as engine,
    ):
        budget = config.steps or (0 if method.mixes else steps)
        if on_steps is not None and budget and setting.nodes is None:
            spent = 0.0 if saved is None else saved.state.work.client_steps
            engine = Counted(engine, sized, budget, spent, on_steps)
        watch = _watch(sized, engine, saved)
        algorithm = algorithm_for(sized, name, watch if setting.devices else engine, steps=steps, keep=keep)
        rows = [] if saved is None else list(saved.history)
        before = None
        for state in states(algorithm, config.epochs, after=None if saved is None else saved.state):
            # The first state is the beginning, or a checkpoint whose row is in the history already: no new row for it.
            if before is not None:
                is_last, seconds = state.r == config.epochs, watch.seconds
                watch.uploads = False  # a model that is fine-tuned by its client stays there
                done = _done(algorithm, state, config)
                watch.uploads = True
                wanted = wanted_after(setting, name, done or state, rows, finished=done is not None)
                asked = time.perf_counter()
                row, scores = _row(setting, name, done or state, wanted)
                scoring += time.perf_counter() - asked
                row["finished"] = int(done is not None)
                if name == config.algorithm and wanted and len(setting.clients) <= MOST_CURVES:
                    row[BY_CLIENT] = [round(value, 4) for value in scores[0]]
                if setting.devices:
                    row[SIMULATED] = watch.seconds
                if not is_last:
                    watch.seconds = seconds  # training continues from before the fine-tuning
                rows.append(row | _visit_counts(config, before, state))
                if is_last:
                    last = {**extra(), **{key: list(values) for key, values in zip(SCORES, scores, strict=True)}}
                    yield Saved(done or state, tuple(rows), finished=True, extra=last)
                else:
                    # Training continues from the state itself, not from the one that would be deployed.
                    yield Saved(state, tuple(rows), finished=False, extra=extra())
            elif saved is None:
                yield Saved(state, (), finished=False, extra=extra())
            before = state


def _watch(setting: Setting, engine: Engine, saved: Saved | None) -> clock.Clock:
    """A simulated clock around an engine, which goes on where the checkpoint left off."""
    watch = clock.Clock(
        engine,
        tiers=setting.devices,
        samples=[client.n_train for client in setting.clients],
        macs=cache(setting.macs),
        speed=clock.ASSUMED,
    )
    watch.seconds = 0.0 if saved is None else saved.extra.get(SIMULATED, 0.0)
    return watch


def _opened(setting: Setting, base: float) -> AbstractContextManager[Engine]:
    """A context with the engine of a setting: that of its nodes, or one of this machine."""
    if setting.nodes is not None:
        return closing(setting.nodes.engine(setting, base))
    config = setting.config
    return choice.opened(setting.engine, config.workers, setting.clients, setting.shop, address=config.address)


def _done(algorithm: Algorithm, state: State, config: Config) -> State | None:
    """The state that the method would deploy if it ended here; None if it is the same, or is not evaluated."""
    wanted = state.r == config.epochs or (config.eval_finished and state.r % config.eval_finished == 0)
    return algorithm.finish(state) if algorithm.finish and wanted else None


@contextmanager
def _naming(method: str, *, resumed: bool = False) -> Iterator[None]:
    """A context that adds the name of the method to errors.

    What a method remembers is known to it alone: of one that was resumed, an error of its lookups says that its
    checkpoint holds something else.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        if not resumed:
            raise
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(
            f"{method}: its checkpoint cannot be resumed from ({type(error).__name__}: {reason}); {remedy(method)}"
        ) from error
    except (NotFinite, RuntimeError, ValueError) as error:
        # Of the base kind: a subclass may not be made from a message alone.
        kind = next(kind for kind in (NotFinite, RuntimeError, ValueError) if isinstance(error, kind))
        raise kind(f"{method}: {one_line(str(error))}") from error


def trained(setting: Setting, name: str, saved: Saved, before: Saved | None) -> Trained:
    """The trained method, from its last checkpoint and the one that it was resumed from, if any."""
    setting = setting_of(setting, name)
    return Trained(
        name,
        setting,
        tuple(setting.model_widths(name)),
        saved.state,
        saved.history,
        score=tuple(saved.extra["score"]),
        loss=tuple(saved.extra["loss"]),
        seconds=saved.extra["seconds"],
        seconds_before_resume=0.0 if before is None else before.extra["seconds"],
        evaluation_seconds=saved.extra.get(EVALUATION, 0.0),
        trained_here=saved is not before,
        diverged=saved.extra.get(DIVERGED, ""),
    )


def diverged(setting: Setting, name: str, last: Saved | None) -> Saved:
    """The checkpoint of a method that went non-finite: finished, so that resuming does not train it again.

    Args:
        last: its last good checkpoint; None if it has none.
    """
    setting = setting_of(setting, name)
    nan = [math.nan] * len(setting.clients)
    extra = {**origin_of(setting, name), "seconds": 0.0} if last is None else last.extra
    return Saved(
        State(0, setting.start, ()) if last is None else last.state,
        () if last is None else last.history,
        finished=True,
        extra={**extra, **dict.fromkeys(SCORES, nan), DIVERGED: when_diverged(last)},
    )


def when_diverged(last: Saved | None) -> str:
    """When a method went non-finite whose last good checkpoint this is; None if it has none."""
    return "diverged before epoch 1" if last is None else f"diverged at epoch {last.state.r + 1}"


# Checkpoints


def checkpoints(setting: Setting, methods: Sequence[str], folder: Path) -> dict[str, Saved]:
    """method -> its checkpoint, for methods that have one; an error if one is damaged or belongs to another run."""
    found = {}
    for method in methods:
        path = checkpoint_file(folder, method)
        if path.exists():
            own = setting_of(setting, method)
            found[method] = checkpoint.load(
                path, setting.config.device, refuse=partial(refusal, origin_of(own, method))
            )
            wrong = misfit(found[method], own, method)
            if wrong:
                raise ValueError(f"{path} is not of this run (wrong in it: {wrong}); {remedy(method)}")
    return found


def keeper(folder: Path | None, method: str, before: Saved | None, metrics: Path | None) -> Callable[[Saved], None]:
    """A function that writes the checkpoint of an epoch, and its metrics if there is a file for them.

    Args:
        folder: where checkpoints are; with None nothing is written.
        before: the checkpoint that the method is resumed from.
        metrics: the CSV file of the history.
    """
    if folder is None:
        return lambda saved: None
    writer = checkpoint.Writer(checkpoint_file(folder, method), () if before is None else before.history)
    table = None if metrics is None else GrowingCsv(metrics)

    def keep(saved: Saved) -> None:
        writer.save(saved)
        if table and saved.history:
            table.update(metric_rows(saved.history))

    return keep


def metric_rows(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metrics.csv: a history without the curves of single clients."""
    return [{key: value for key, value in row.items() if key != BY_CLIENT} for row in history]


def client_curve_rows(history: Sequence[Mapping[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The rows of client_metrics.csv: the metric of every client after every epoch that was evaluated."""
    return [
        {"epoch": row["epoch"], "client": i, metric: value}
        for row in history
        for i, value in enumerate(row.get(BY_CLIENT, ()))
    ]


def checkpoint_folder(run: Path) -> Path:
    """The folder of the checkpoints in the folder of a run."""
    return run / "checkpoint"


def checkpoint_file(folder: Path, method: str) -> Path:
    """The checkpoint file of a method."""
    return folder / f"{method}.safetensors"


# Rows of the metrics


def _row(setting: Setting, method: str, state: State, wanted: Sequence[Wanted]) -> tuple[dict[str, Any], Scores]:
    """The row of metrics of an epoch, and the scores of the deployed models on test data, if these are wanted.

    The row holds the work so far and the figures that are wanted, of v and, if there is one, of the tail average. In
    the last epoch these are also on validation data, which tuning uses.
    """
    r, metric = state.r, setting.metric.name
    row, test = {"epoch": r, **state.work.figures}, ((), ())
    widths, where = setting.model_widths(method), f"after epoch {r}"
    models = {"": state.v, TAIL: state.tail}
    found = scores(setting, [(models[one.prefix], one) for one in wanted], widths, where=where)
    # The tail average comes last, so that `test` ends with the scores of the models that are deployed.
    for prefix, group in groupby(zip(wanted, found, strict=True), key=lambda pair: pair[0].prefix):
        for one, scored in group:
            test = scored if one.part == "test" else test
            for quantity, table in figures(setting, *scored).items():
                row |= {f"{prefix}{one.label}{quantity}_{name}": figure for name, figure in table.items()}
        row |= {f"{prefix}{metric}_tier_{tier}": mean for tier, mean in by_tier(setting, test[0]).items()}
    return row, test


def _visit_counts(config: Config, before: State, after: State) -> dict[str, int]:
    """The visits of one epoch and the rounds they took: N on the ring, else the largest degree of alpha."""
    if before.alpha is None:
        return {}
    rounds = len(before.alpha)
    if config.schedule == "colour":
        rounds = max(int(mixing.nonzero(alpha).max()) for alpha in (before.alpha, before.alpha.T))
    return {"epoch_visits": after.work.visits - before.work.visits, "epoch_rounds": rounds}
