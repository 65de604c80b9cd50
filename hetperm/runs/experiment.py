"""A run from beginning to end: the algorithm, its rivals, and the run folder with all results."""

import copy
import logging
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hetperm.checks import takes
from hetperm.client import Client
from hetperm.config import OWN, Config
from hetperm.config import read as read_toml
from hetperm.device.augment import Augment
from hetperm.device.bench import Loss
from hetperm.methods import METHODS, check_method_tables
from hetperm.metrics import ACCURACY, Metric, Score, metric_of
from hetperm.params import NotFinite
from hetperm.report import page
from hetperm.runs import checkpoint, client_models, files, joined, output, server_file, tensorboard, training
from hetperm.runs.coverage import coverage_of
from hetperm.runs.placement import one_thread
from hetperm.runs.progress import progress
from hetperm.runs.result import Result, server_of
from hetperm.runs.setting import Setting, from_config, from_model
from hetperm.runs.summary import aggregate, client_rows, summary_of
from hetperm.runs.training import Trained

log = logging.getLogger(__name__)
OVERSPENT = 1.05  # times its budget: more is worth a warning

OnEpoch = Callable[[str, Mapping[str, Any]], object]  # (method, row of the metrics)
OnStart = Callable[[Setting], object]
HOOKS = {"on_epoch": ("the method", "its row of metrics"), "on_start": ("the setting",)}  # what each is called with


class Diverged(NotFinite):
    """The algorithm of a run went non-finite; `when` says at which epoch."""

    def __init__(self, message: str, when: str):
        super().__init__(message)
        self.when = when


def run(
    config: Config,
    *,
    on_epoch: OnEpoch | None = None,
    on_start: OnStart | None = None,
    settle: Callable[[Config], Setting] | None = None,
) -> Result:
    """Run once, with one seed, and write everything to the run folder.

    Args:
        on_epoch: called with the method and the row of metrics after every epoch of every method.
        on_start: called once with the setting, before anything is trained.
        settle: makes the setting; from the configuration unless given.
    """
    if _checked(config).seeds:
        raise ValueError(f"run takes one seed and seeds is {list(config.seeds)}; call sweep for several")
    _check_functions(on_epoch=on_epoch, on_start=on_start, settle=settle)
    name = _name_once_checked(config)
    setting = (settle or from_config)(config)
    if not isinstance(setting, Setting):
        raise TypeError(f"settle returns a {type(setting).__name__}; it must return a Setting")
    training.check_steps(setting)
    with _opened(setting.config, name) as folder, _shown(config, on_epoch, on_start) as hooks:
        return execute(setting, folder, *hooks)


def fit(
    model: nn.Module,
    clients: Sequence[Client],
    config: Config | None = None,
    *,
    loss: Loss | None = None,
    metric: str | Metric | Score | None = None,
    augment: Augment | None = None,
    on_epoch: OnEpoch | None = None,
) -> Result:
    """Run with your own model, shards, loss and metric. Write a run folder if the config names one.

    On a terminal it shows its progress, unless the config is quiet.

    Args:
        model: any module that returns a tensor, or an object with ``logits``; training begins from its weights, and the
            module itself is not changed.
        clients: their shards and widths. A client without test data is trained but not scored.
        config: how to train. Its settings of data, model and capacity profile are not used, nor written.
        loss: (outputs, labels) -> mean loss of the batch; cross-entropy unless given.
        metric: accuracy, mae, perplexity, dice or another by name; a `Metric`; or a function (outputs, labels) -> mean
            over the batch, of which more is better. Unless given, that of the config, or accuracy.
        augment: (inputs, labels, generator) -> both, changed at random, for local steps only. It draws from the
            generator of the task, or from torch's own, which is seeded for the task.
        on_epoch: called with the method and the row of metrics after every epoch of every method.
    """
    config = _checked(Config() if config is None else config)
    _check_functions(loss=loss, augment=augment, on_epoch=on_epoch)
    if config.seeds:
        raise ValueError(f"fit takes one seed and seeds is {list(config.seeds)}; call it once for each")
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}; fit takes an nn.Module")
    if not isinstance(clients, Sequence):
        raise TypeError(f"clients is a {type(clients).__name__}; fit takes a list of hetperm.Client")
    if not clients:
        raise ValueError("there are no clients; give at least one")
    strange = [client for client in clients if not isinstance(client, Client)]
    if strange:
        raise TypeError(f"a client is a {type(strange[0]).__name__}; wrap its shard: hetperm.Client(train=(x, y))")
    check_method_tables(config)
    tensorboard.check(config.log, has_folder=config.out is not None)
    metric = metric_of((config.metric or ACCURACY) if metric is None else metric)
    own = {"dataset": OWN, "model": type(model).__name__, "metric": metric.name}
    config = config.override(num_clients=len(clients), **own)
    if config.out is not None:
        files.run_folder(config.out, "", resume=config.resume)  # called for its error
    setting = from_model(model, clients, config, loss=loss, metric=metric, augment=augment)
    if all([client.test is None for client in clients]):
        log.warning("no client has test data: models are trained, and no figure says how good they are")
    training.check_steps(setting)
    with (
        nullcontext() if config.out is None else _opened(setting.config) as folder,
        _shown(config, on_epoch) as hooks,
    ):
        return execute(setting, folder, *hooks)


def sweep(
    config: Config, *, on_epoch: OnEpoch | None = None, on_start: OnStart | None = None
) -> tuple[dict[str, Any], list[Result]]:
    """Run once per seed, each in a folder inside the common one; return the aggregate and the results.

    A seed with which the algorithm diverges has no result: the aggregate is that of the others, and says so.
    """
    if not _checked(config).seeds:
        raise ValueError("sweep takes several seeds and seeds is empty; call run for one")
    _check_functions(on_epoch=on_epoch, on_start=on_start)
    name = _name_once_checked(config)
    seeds = [config.override(seed=seed, seeds=()) for seed in config.seeds]
    # The first setting tells which device "auto" is, which the configuration records.
    first, results, lost = from_config(seeds[0]), [], {}
    training.check_steps(first)
    with (
        _opened(config.override(device=first.config.device), name) as folder,
        _shown(config, on_epoch, on_start) as (on_epoch, on_start),
    ):
        for of_seed in seeds:
            begun = bool(results or lost)
            setting = from_config(of_seed) if begun else first
            with _opened(setting.config.override(out=folder / f"seed-{of_seed.seed}")) as inner:
                try:
                    results.append(execute(setting, inner, on_epoch, None if begun else on_start))
                except Diverged as error:
                    lost[of_seed.seed] = error.when
                    log.warning("%s (seed %d %s; the other seeds go on)", error, of_seed.seed, error.when)
                    last = error
        if not results:
            raise NotFinite(f"no seed is left, as each of {list(config.seeds)} diverged; the last one: {last}")
        summary = aggregate([result.summary for result in results], config.seeds, lost)
        output.write_sweep(folder, summary, results, lost)
    return summary, results


def _checked(config: Any) -> Config:
    if not isinstance(config, Config):
        raise TypeError(f"the configuration is a {type(config).__name__}; give a hetperm.Config")
    return config


def _check_functions(**functions: Any) -> None:
    for name, function in functions.items():
        if not (function is None or callable(function)):
            raise TypeError(f"{name} is a {type(function).__name__}; it must be a function, or None")
        if function is not None and name in HOOKS:
            takes(name, function, HOOKS[name])


def _name_once_checked(config: Config) -> str:
    """The name of the run folder; an error, before the data are read, if methods, log or folder cannot be as asked."""
    check_method_tables(config)
    tensorboard.check(config.log)
    name = run_name(config)
    files.run_folder(config.out, name, resume=config.resume)  # called for its error
    return name


def run_name(config: Config) -> str:
    """The name of the run folder in runs/."""
    return config.name or f"{config.dataset.partition(':')[0]}-{config.algorithm}"


@contextmanager
def _shown(
    config: Config, on_epoch: OnEpoch | None = None, on_start: OnStart | None = None
) -> Iterator[tuple[OnEpoch, OnStart]]:
    """A context with a progress bar; provides what is called after every epoch and at the start: the bar, and these."""
    methods, runs = (config.algorithm, *config.baselines), max(1, len(config.seeds))
    with progress(methods, epochs=config.epochs, runs=runs, quiet=config.quiet) as bar:

        def after_epoch(method: str, row: Mapping[str, Any]) -> None:
            for call in filter(None, (bar, on_epoch)):
                call(method, copy.deepcopy(row))  # the row itself is what the run writes

        after_epoch.moved = bar and bar.moved  # called between epochs too, see `_train`

        def at_start(setting: Setting) -> None:
            if on_start:
                on_start(setting)
            if bar:  # second, or lines would be printed into it
                bar.metric = setting.metric.name
                bar.start()

        yield after_epoch, at_start


@contextmanager
def _opened(config: Config, name: str = "") -> Iterator[Path]:
    """A context with the run folder, locked. It is new, or holds the same configuration, or it is an error."""
    folder = files.run_folder(config.out, name, resume=config.resume)
    # The folder must exist before it can be locked; its configuration is read and written only under the lock.
    if not (config.resume and (folder / "config.toml").exists()):
        folder = files.claim(config.out, name, resume=config.resume)
    path, text = folder / "config.toml", config.to_toml()
    with files.locked(folder):
        if path.exists():
            # Downloading changes no data, so it may differ.
            difference = checkpoint.changed(read_toml(path), tomllib.loads(text), ignore=("download",))
            if difference:
                raise ValueError(f"{folder} cannot be resumed: {difference}")
            files.tidy(folder)
        else:
            try:
                files.write(path, text)
            except OSError:
                # An empty folder is no run that can be resumed, and would only block the name.
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    folder.rmdir()
                raise
        yield folder


# The run


def execute(setting: Setting, folder: Path | None, on_epoch: OnEpoch | None, on_start: OnStart | None = None) -> Result:
    """Train the algorithm, then its rivals with as many steps. Write every result as soon as it is known.

    A rival that diverges is part of the result; the algorithm that does so is an error.
    """
    config, began = setting.config, time.perf_counter()
    saved = {}
    if folder is not None:
        saved = training.checkpoints(setting, (config.algorithm, *config.baselines), training.checkpoint_folder(folder))
    if on_start:
        on_start(setting)
    if folder and not saved:
        output.write_profile(setting, folder)  # a resumed run has the file already
    with one_thread():
        # The algorithm is first, because its rivals get as many steps as its visits took.
        main = _train(setting, config.algorithm, training.default_steps(config), folder, saved, on_epoch)
        steps = config.steps or training.steps_taken(main.state)
        result = _result(main, {}, folder)
        for name in config.baselines:
            if not (name in saved and saved[name].finished):
                output.write_tables(result)  # so that finished results are kept if a rival fails
            rival = _train(setting, name, steps, folder, saved, on_epoch, may_diverge=True)
            result = _result(main, {**result.baselines, name: rival}, folder)
        if folder is None or _is_complete(result):
            return result
        output.write_profile(setting, folder)
        output.write_tables(result)
        if setting.nodes is None:
            output.save_models(result)
        else:  # statistics of norms are of private data: only the devices have whole models
            setting.nodes.hand_over(setting, main.state.deployed, main.widths, main.method)
        server = server_of(result)
        if server is not None:
            server_file.save(folder, server)
        joined.remove_strays(folder, trained=len(result.clients))
        joined.extend_tables(folder, trained=len(result.clients))  # clients may have joined before a file was lost
        blocks = coverage_of(main)
        if blocks is not None:
            files.write_csv(folder / "coverage.csv", blocks)
    drawing = time.perf_counter()
    output.draw(result)
    now = time.perf_counter()
    files.write_json(folder / files.CLOCK, output.timing(result, now - began, now - drawing))
    files.write(folder / page.NAME, page.render(folder))
    if not (folder / "config.toml").exists():
        raise FileNotFoundError(f"{folder} was emptied while the run was writing to it; start another run with --out")
    files.write_checksums(folder)  # the last file: it says what all others are
    return result


def _train(
    setting: Setting,
    name: str,
    steps: int,
    folder: Path | None,
    saved: Mapping[str, checkpoint.Saved],
    on_epoch: OnEpoch | None,
    *,
    may_diverge: bool = False,
) -> Trained:
    """Train a method epoch by epoch, from its checkpoint if it has one, and save a checkpoint after each.

    Args:
        may_diverge: whether a method that goes non-finite is a result rather than an error.
    """
    before = now = saved.get(name)
    kept = None if folder is None else training.checkpoint_folder(folder)
    metrics = folder / "metrics.csv" if folder and name == setting.config.algorithm else None
    keep = training.keeper(kept, name, before, metrics)
    moved = getattr(on_epoch, "moved", None)
    on_steps = moved and partial(moved, name)
    log_to = folder if setting.config.log == "tensorboard" else None
    # Closed even after an error: the generator holds an engine whose workers must end.
    with (
        closing(training.epochs(setting, name, steps=steps, saved=before, folder=kept, on_steps=on_steps)) as epochs,
        tensorboard.opened(log_to, name, after=len(before.history) if before else 0) as scalars,
    ):
        try:
            for now in epochs:
                if now is not before:  # what came from a checkpoint is saved already
                    keep(now)
                    scalars(now.history, now.state.alpha)
                if on_epoch and now.history:
                    on_epoch(name, now.history[-1])
        except NotFinite as error:
            if not may_diverge:
                raise Diverged(str(error), training.when_diverged(now)) from error
            now = training.diverged(setting, name, now)
            log.warning("%s (%s; the run goes on)", error, now.extra[training.DIVERGED])
            keep(now)
    _warn_of_work(setting, name, now)
    return training.trained(setting, name, now, before)


def _warn_of_work(setting: Setting, name: str, last: checkpoint.Saved) -> None:
    """Warn if a method trained nothing, or took more steps than it had."""
    work, mixes = last.state.work, METHODS[name].mixes
    if not mixes and work.client_steps == 0 and any(work.absent):
        log.warning("%s took no step, so its models are untrained: no client was there; change the trace", name)
    spent = work.client_steps / len(setting.clients)
    if mixes and setting.config.steps and spent > OVERSPENT * setting.config.steps:
        log.warning(
            "%s took %.1f steps a client of a budget of %d: reports and looks ahead take more; raise --steps",
            name, spent, setting.config.steps,
        )  # fmt: skip
    if mixes and work.visits == 0 and training.DIVERGED not in (last.extra or {}):
        log.warning(
            "%s made no visit, so its models are parts of the global one: nothing was left of the steps for one, or no "
            "host was there; raise --steps or --participation",
            name,
        )


def _is_complete(result: Result) -> bool:
    """Whether everything came from checkpoints and all files are there, as they were written."""
    methods = (result.main, *result.baselines.values())
    if any(method.trained_here for method in methods) or not files.is_whole(result.folder):
        return False
    # With nodes, models may be elsewhere. Others than the run's own are of clients that joined.
    return result.setting.nodes is not None or {*range(len(result.clients))} <= {*client_models.clients(result.folder)}


def _result(main: Trained, baselines: Mapping[str, Trained], folder: Path | None) -> Result:
    return Result(
        main=main,
        baselines=baselines,
        clients=tuple(client_rows(main, baselines)),
        summary=summary_of(main, baselines).to_json(),
        folder=folder,
    )
