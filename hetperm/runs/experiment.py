"""A run from beginning to end: the algorithm, its rivals, and the run folder with all results."""

import copy
import logging
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hetperm
from hetperm.algorithms.perm import LOOK_AHEAD, chosen_share
from hetperm.client import Client
from hetperm.config import OWN, Config
from hetperm.config import read as read_toml
from hetperm.device.augment import Augment
from hetperm.device.bench import Loss
from hetperm.methods import METHODS, check_method_tables
from hetperm.metrics import ACCURACY, Metric, Score, metric_of
from hetperm.params import NotFinite
from hetperm.report import page, pictures
from hetperm.report.advice import Evidence, lines
from hetperm.report.contents import Summary
from hetperm.runs import checkpoint, client_models, files, join, joined, memory, server_file, tensorboard, training
from hetperm.runs.coverage import coverage_of
from hetperm.runs.export.export import Exported, export_result
from hetperm.runs.export.options import Options as ExportOptions
from hetperm.runs.join import Joined
from hetperm.runs.machine import machine
from hetperm.runs.progress import progress
from hetperm.runs.scores import load_for_evaluation
from hetperm.runs.server_file import Server
from hetperm.runs.setting import Setting, from_config, from_model, one_thread
from hetperm.runs.summary import aggregate, client_rows, summary_of
from hetperm.runs.training import Trained
from hetperm.server.estimate import NEVER, REPORTS
from hetperm.shards import first, read
from hetperm.state import State
from hetperm.texts import one_line, shown
from submodels import WHOLE, Budget

log = logging.getLogger(__name__)

OnEpoch = Callable[[str, Mapping[str, Any]], object]  # (method, row of the metrics)
OnStart = Callable[[Setting], object]


class Diverged(NotFinite):
    """The algorithm of a run went non-finite; `when` says at which epoch."""

    def __init__(self, message: str, when: str):
        super().__init__(message)
        self.when = when


@dataclass(frozen=True)
class Result:
    """The result of a run. Scores are those of the deployed models on test data.

    Attributes:
        main: the trained algorithm.
        baselines: its rivals by name.
        clients: one row per client.
        summary: the content of summary.json.
        folder: the run folder; None if nothing was written.
    """

    main: Trained
    baselines: Mapping[str, Trained]
    clients: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    folder: Path | None

    @property
    def alpha(self) -> Tensor | None:
        """(N, N) the mixing weights, sparse from a thousand clients on; None if the algorithm has none."""
        return self.state.alpha

    @property
    def score(self) -> float:
        """The mean over clients of the metric of the run; `summary` has its name, and whether more is better."""
        return self.summary[self.summary["metric"]]["mean"]

    @property
    def accuracy(self) -> float:
        """The same as `score`, under the name that most runs have for it."""
        return self.score

    @property
    def tiers(self) -> Mapping[str, Mapping[str, Any]]:
        """tier -> number of clients, width, parameters and the mean of the metric."""
        return self.summary["tiers"]

    @property
    def setting(self) -> Setting:
        """What all methods of the run shared."""
        return self.main.setting

    @property
    def state(self) -> State:
        """The last state of the algorithm."""
        return self.main.state

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """The metrics of the algorithm, one row per epoch."""
        return self.main.history

    @property
    def advice(self) -> list[str]:
        """What seems to have gone wrong and what to try, one sentence each; empty if nothing did."""
        return lines([self.evidence])

    @property
    def evidence(self) -> Evidence:
        """What advice is given by."""
        trained = {self.main.method: self.main, **self.baselines}
        return Evidence(
            summary=Summary.from_json(self.summary),
            histories={name: one.history for name, one in trained.items()},
            clients=self.clients,
            settings=tomllib.loads(self.setting.config.to_toml()),
        )

    def join(self, client: Client, *, budget: Budget | None = None, steps: int = 0) -> Joined:
        """Let a client join that was not there: it gets a model made of those it learns from, and nobody else is asked.

        If the run has a folder, the client is written as one more of its clients.

        Args:
            client: its data, and its width.
            budget: what its device can afford; its width is then the largest of the run's that fits.
            steps: SGD steps that it takes on its own data at the end.
        """
        if self.folder is not None:
            shop = self.setting.shop
            return join.join(
                self.folder,
                client,
                budget=budget,
                steps=steps,
                model=shop.full.module,
                loss=shop.loss,
                metric=self.setting.metric,
            )
        server = _server(self)
        if server is None or self.setting.config.discrepancy != "probe":
            raise ValueError(
                "the run has no reports at a common model; perm with discrepancy 'probe' has, if it estimates weights"
            )
        inputs, widths = read(first(self.setting.clients[0].train, 1))[0], self.main.widths
        if not isinstance(inputs, Tensor):
            raise ValueError("the model of the run takes several inputs, and clients join only models that take one")
        sample = inputs.shape[1:]
        run = join.Run(self.setting, server, widths, self.setting.tiers, sample, self.state.deployed.__getitem__)
        return join.added(run, client, budget=budget, steps=steps)

    def model(self, i: int) -> nn.Module:
        """Client i's personal model, a plain module in evaluation mode."""
        clients = len(self.setting.clients)
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < clients:
            raise ValueError(f"there is no client {shown(i)}; they are numbered from 0 to {clients - 1}")
        bench = self.setting.shop.at(self.main.widths[i])
        # On one thread, so that the statistics of its norms are those that it was scored with.
        with one_thread():
            load_for_evaluation(bench, self.state.deployed[i], self.setting.clients[i])
        # A copy, because the bench is used again for every model of this width.
        return copy.deepcopy(bench.module).eval()

    def export(self, **options: Any) -> list[Exported]:
        """Write clients' models as files that devices run, each verified on that client's validation data.

        Args:
            options: those of `hetperm.runs.export.options.Options`, such as ``format="onnx", client=7``; all clients
                unless `client` or `tier` names some. Files go to `out`, or to exports/ in the run's folder.
        """
        return export_result(self, partial(_manifest, self), ExportOptions(**options))


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
    check_method_tables(config)
    tensorboard.check(config.log)
    name = run_name(config)
    files.run_folder(config.out, name, resume=config.resume)  # called for its error, before the data are read
    setting = (settle or from_config)(config)
    with _opened(setting.config, name) as folder, _shown(config, on_epoch, on_start) as hooks:
        return _execute(setting, folder, *hooks)


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
    for name, function in {"loss": loss, "augment": augment, "on_epoch": on_epoch}.items():
        if not (function is None or callable(function)):
            raise TypeError(f"{name} is a {type(function).__name__}; it must be a function, or None")
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
    metric = metric_of(metric or config.metric or ACCURACY)
    own = {"dataset": OWN, "model": type(model).__name__, "metric": metric.name}
    config = config.override(num_clients=len(clients), **own)
    if config.out is not None:
        files.run_folder(config.out, "", resume=config.resume)  # called for its error
    setting = from_model(model, clients, config, loss=loss, metric=metric, augment=augment)
    with (
        nullcontext() if config.out is None else _opened(setting.config) as folder,
        _shown(config, on_epoch) as hooks,
    ):
        return _execute(setting, folder, *hooks)


def sweep(
    config: Config, *, on_epoch: OnEpoch | None = None, on_start: OnStart | None = None
) -> tuple[dict[str, Any], list[Result]]:
    """Run once per seed, each in a folder inside the common one; return the aggregate and the results.

    A seed with which the algorithm diverges has no result: the aggregate is that of the others, and says so.
    """
    if not _checked(config).seeds:
        raise ValueError("sweep takes several seeds and seeds is empty; call run for one")
    check_method_tables(config)
    tensorboard.check(config.log)
    name = run_name(config)
    files.run_folder(config.out, name, resume=config.resume)  # called for its error, before the data are read
    seeds = [config.override(seed=seed, seeds=()) for seed in config.seeds]
    # The first setting tells which device "auto" is, which the configuration records.
    first, results, lost = from_config(seeds[0]), [], {}
    with (
        _opened(config.override(device=first.config.device), name) as folder,
        _shown(config, on_epoch, on_start) as (on_epoch, on_start),
    ):
        for of_seed in seeds:
            begun = bool(results or lost)
            setting = from_config(of_seed) if begun else first
            with _opened(setting.config.override(out=folder / f"seed-{of_seed.seed}")) as inner:
                try:
                    results.append(_execute(setting, inner, on_epoch, None if begun else on_start))
                except Diverged as error:
                    lost[of_seed.seed] = error.when
                    log.warning("%s (seed %d %s; the other seeds go on)", error, of_seed.seed, error.when)
                    last = error
        if not results:
            raise NotFinite(f"no seed is left, as each of {list(config.seeds)} diverged; the last one: {last}")
        summary = aggregate([result.summary for result in results], config.seeds, lost)
        _write_sweep(folder, summary, results, lost)
    return summary, results


def _write_sweep(folder: Path, summary: Mapping[str, Any], results: Sequence[Result], lost: Mapping[int, str]) -> None:
    files.write_json(folder / "summary.json", summary)
    rows = {result.summary["seed"]: _seed_row(result) for result in results}
    rows |= {seed: {"seed": seed, summary["algorithm"]: when} for seed, when in lost.items()}
    files.write_csv(folder / "seeds.csv", [rows[seed] for seed in summary["seeds"]])
    files.write_csv(folder / "clients.csv", [{"seed": r.summary["seed"], **row} for r in results for row in r.clients])
    files.write(folder / f"{summary['metric']}.png", pictures.png(_score_picture(results)))
    tiers = pictures.tiers(Summary.from_json(summary), title=_title(summary))
    files.write(folder / "tiers.png", pictures.png(tiers))
    files.write(folder / page.NAME, page.render(folder))


def _seed_row(result: Result) -> dict[str, Any]:
    summary = result.summary
    methods = {summary["algorithm"]: summary, **summary["baselines"]}
    metric = summary["metric"]
    figures = {name: method.get("diverged") or method[metric]["mean"] for name, method in methods.items()}
    return {"seed": summary["seed"], **figures}


def _checked(config: Any) -> Config:
    if not isinstance(config, Config):
        raise TypeError(f"the configuration is a {type(config).__name__}; give a hetperm.Config")
    return config


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
                call(method, row)

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


def _execute(
    setting: Setting, folder: Path | None, on_epoch: OnEpoch | None, on_start: OnStart | None = None
) -> Result:
    """Train the algorithm, then its rivals with as many steps. Write every result as soon as it is known.

    A rival that diverges is part of the result; the algorithm that does so is an error.
    """
    config, began = setting.config, time.perf_counter()
    saved = {}
    if folder is not None:
        saved = training.checkpoints(setting, (config.algorithm, *config.baselines), _checkpoints(folder))
    if on_start:
        on_start(setting)
    if folder and not saved:
        _write_profile(setting, folder)  # a resumed run has the file already
    with one_thread():
        # The algorithm is first, because its rivals get as many steps as its visits took.
        main = _train(setting, config.algorithm, training.default_steps(config), folder, saved, on_epoch)
        steps = config.steps or training.steps_taken(main.state)
        result = _result(main, {}, folder)
        for name in config.baselines:
            if not (name in saved and saved[name].finished):
                _write(result)  # so that finished results are kept if a rival fails
            rival = _train(setting, name, steps, folder, saved, on_epoch, may_diverge=True)
            result = _result(main, {**result.baselines, name: rival}, folder)
        if folder is None or _is_complete(result):
            return result
        _write_profile(setting, folder)
        _write(result)
        if setting.nodes is None:
            _save_models(result)
        else:  # statistics of norms are of private data: only the devices have whole models
            setting.nodes.hand_over(setting, main.state.deployed, main.widths, main.method)
        server = _server(result)
        if server is not None:
            server_file.save(folder, server)
        joined.extend_tables(folder, trained=len(result.clients))  # clients may have joined before a file was lost
        blocks = coverage_of(main)
        if blocks is not None:
            files.write_csv(folder / "coverage.csv", blocks)
    _draw(result)
    files.write_json(folder / files.CLOCK, _timing(result, time.perf_counter() - began))
    files.write(folder / page.NAME, page.render(folder))
    if not (folder / "config.toml").exists():
        raise FileNotFoundError(f"{folder} was emptied while the run was writing to it; start another run with --out")
    files.write_checksums(folder)  # the last file: it says what all others are
    return result


def _write_profile(setting: Setting, folder: Path) -> None:
    if setting.profile:
        files.write_csv(folder / "profile.csv", setting.profile)
    if setting.warnings:
        files.write(folder / "warnings.txt", "".join(f"{one_line(text)}\n" for text in setting.warnings))


def _checkpoints(folder: Path) -> Path:
    return folder / "checkpoint"


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
    kept = None if folder is None else _checkpoints(folder)
    metrics = folder / "metrics.csv" if folder and name == setting.config.algorithm else None
    keep = training.keeper(kept, name, before, metrics)
    log_to = folder if setting.config.log == "tensorboard" else None
    # Closed even after an error: the generator holds an engine whose workers must end.
    with (
        closing(training.epochs(setting, name, steps=steps, saved=before, folder=kept)) as epochs,
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
    if METHODS[name].mixes and now.state.work.visits == 0 and training.DIVERGED not in (now.extra or {}):
        log.warning(
            "%s made no visit, so its models are parts of the global one: nothing was left of the steps for one, or no "
            "host was there; raise --steps or --participation",
            name,
        )
    return training.trained(setting, name, now, before)


def _is_complete(result: Result) -> bool:
    """Whether everything came from checkpoints and all files are there, as they were written."""
    methods = (result.main, *result.baselines.values())
    return not any(method.trained_here for method in methods) and files.is_whole(result.folder)


# Results


def _result(main: Trained, baselines: Mapping[str, Trained], folder: Path | None) -> Result:
    return Result(
        main=main,
        baselines=baselines,
        clients=tuple(client_rows(main, baselines)),
        summary=summary_of(main, baselines).to_json(),
        folder=folder,
    )


def _matrix(alpha: Tensor) -> Any:
    """Mixing weights as a numpy array, or as a scipy array if they are sparse."""
    if not alpha.is_sparse:
        return alpha.cpu().numpy()
    from scipy import sparse

    alpha = alpha.cpu().coalesce()
    return sparse.csr_array((alpha.values().numpy(), tuple(alpha.indices().numpy())), shape=tuple(alpha.shape))


def _write(result: Result) -> None:
    """Write the tables of a run; models and pictures are written at its end."""
    folder = result.folder
    if folder is None:
        return
    files.write_json(folder / "summary.json", result.summary)
    files.write_csv(folder / "metrics.csv", training.metric_rows(result.history))
    curves = training.client_curve_rows(result.history, result.setting.metric.name)
    if curves:
        files.write_csv(folder / "client_metrics.csv", curves)
    files.write_csv(folder / "clients.csv", result.clients)
    rivals = [{"method": name, **row} for name, rival in result.baselines.items() for row in _epoch_rows(rival)]
    if rivals:
        files.write_csv(folder / "baselines.csv", rivals)
    if result.alpha is not None:
        files.write_alpha(folder, _matrix(result.alpha))


def _epoch_rows(rival: Trained) -> list[Mapping[str, Any]]:
    """The history of a rival, and a last row that says so if it diverged."""
    last = [{"epoch": rival.state.r + 1, "diverged": rival.diverged}] if rival.diverged else []
    return [*rival.history, *last]


def _server(result: Result) -> Server | None:
    """What a client needs that joins later; None if the method collects no reports."""
    state, config = result.state, result.setting.config
    kept = state.memory.get(REPORTS)
    if kept is None:
        return None
    age = config.alpha_every if config.report_age is None else config.report_age
    epoch, since = kept["epoch"], kept["since"]
    return Server(
        state.w,
        kept["gradient"],
        kept["noise"],
        torch.tensor([client.n_train for client in result.setting.clients]),
        (epoch != NEVER) & ((epoch >= since) | (since - epoch <= age)),
        min(client.width for client in result.setting.clients),
        chosen_share(state.memory) if config.share == "look-ahead" else float(config.share),
        result.main.method,
    )


def _save_models(result: Result) -> None:
    """Write every personal model to models/, with its manifest."""
    for i in range(len(result.clients)):
        client_models.save_client(result.folder, i, result.model(i), _manifest(result, i))


def _manifest(result: Result, i: int) -> dict[str, Any]:
    """The manifest of client i's model."""
    setting, row = result.setting, result.clients[i]
    client, width = setting.clients[i], result.main.widths[i]
    index = setting.slicer.index(width)
    manifest: dict[str, Any] = {"architecture": setting.architecture, "width": width}
    if index is not WHOLE:
        manifest |= client_models.channels(index)
    manifest |= client_models.input_of(read(first(client.train, 1))[0])
    if client.classes is not None:
        manifest["classes"] = client.classes.nonzero().flatten().tolist()
    return manifest | {
        "alpha": None if result.alpha is None else result.alpha[i].to_dense().tolist(),
        "algorithm": result.main.method,
        "dataset": setting.dataset,
        "seed": setting.config.seed,
        **{key: row[key] for key in ("tier", "group", "n_train", setting.metric.name)},
    }


def _draw(result: Result) -> None:
    """Write the pictures of a run."""
    folder, setting = result.folder, result.setting
    title = _title(result.summary)
    if result.alpha is not None:
        figure = pictures.alpha_map(
            result.alpha.to_dense().cpu().numpy(),
            setting.groups,
            title=f"who learns from whom: {title}",
            tiers=setting.tiers,
            largest_first=setting.tier_names,
        )
        files.write(folder / "alpha.png", pictures.png(figure))
    table = result.state.memory.get(LOOK_AHEAD)
    if table is not None:
        shares, losses = table["shares"].tolist(), table["losses"].cpu().numpy()
        files.write_csv(folder / "look-ahead.csv", _outlook_rows(shares, losses, int(table["chosen"])))
        figure = pictures.look_ahead(shares, losses, int(table["chosen"]), title=f"how much to share: {title}")
        files.write(folder / "look-ahead.png", pictures.png(figure))
    files.write(folder / f"{setting.metric.name}.png", pictures.png(_score_picture([result])))
    tiers = pictures.tiers(Summary.from_json(result.summary), result.clients, title=title)
    files.write(folder / "tiers.png", pictures.png(tiers))


def _outlook_rows(shares: Sequence[float], losses: np.ndarray, chosen: int) -> list[dict[str, Any]]:
    """The rows of look-ahead.csv: for each candidate the mean loss, and how much more it is than alone.

    Args:
        losses: (C, M) the loss of each client that was asked, for every candidate.
    """
    gains = losses - losses[:1]
    errors = gains.std(1) / np.sqrt(losses.shape[1])
    return [
        {"share": share, "loss": loss, "minus_alone": gain, "standard_error": error, "chosen": int(k == chosen)}
        for k, (share, loss, gain, error) in enumerate(
            zip(shares, losses.mean(1).tolist(), gains.mean(1).tolist(), errors.tolist(), strict=True)
        )
    ]


def _title(summary: Mapping[str, Any]) -> str:
    return f"{summary['algorithm']} on {summary['dataset']}, {summary['num_clients']} clients"


def _score_picture(results: Sequence[Result]) -> pictures.Figure:
    summary = Summary.from_json(results[0].summary)
    label = f"test {summary.metric}, mean over clients" + ("; lower is better" if summary.better == "lower" else "")
    return pictures.curves(
        histories(results),
        figures=[(f"{summary.metric}_mean", label)],
        against=[
            ("client_steps", "local steps per client", len(results[0].clients)),
            ("bytes", "MB sent", 2**20),
        ],
        strong=summary.mixing,
        title=_title(results[0].summary),
    )


def histories(results: Sequence[Result]) -> dict[str, list[Sequence[Mapping[str, Any]]]]:
    """method -> its histories, one for each run that it finished; if it diverged in all, one for each run."""
    first = results[0]
    rivals = {name: [result.baselines[name] for result in results] for name in first.baselines}
    return {
        first.main.method: [result.history for result in results],
        **{name: [one.history for one in _finished(runs)] for name, runs in rivals.items()},
    }


def _finished(runs: Sequence[Trained]) -> Sequence[Trained]:
    return [one for one in runs if not one.diverged] or runs


def _timing(result: Result, seconds: float) -> dict[str, Any]:
    """The content of timing.json: everything that depends on the clock and the machine."""
    config = result.setting.config
    methods = {result.main.method: result.main, **result.baselines}
    return {
        # The clock of this process misses the time before the run was resumed.
        "seconds": seconds + sum(method.seconds_before_resume for method in methods.values()),
        "seconds_by_method": {name: method.seconds for name, method in methods.items()},
        "peak_memory_mb": memory.peak_bytes() / memory.MB,
        "engine": result.setting.engine,
        "workers": config.workers,
        "device": config.device,
        "command": sys.argv,
        "machine": machine(),
        "versions": {"hetperm": hetperm.__version__, "python": platform.python_version(), "torch": torch.__version__},
    }
