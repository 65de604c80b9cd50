"""A run from beginning to end: the algorithm, its rivals, and the folder that all of it is written to."""

import copy
import math
import platform
import resource
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetperm
from hetperm import config as configuration
from hetperm import mixing
from hetperm.algorithms.partial_training import drawn_widths
from hetperm.client import Client
from hetperm.config import Config
from hetperm.device.bench import Loss
from hetperm.engine import choose
from hetperm.methods import ALGORITHMS, check, options_for
from hetperm.report import page, pictures
from hetperm.report.contents import Summary
from hetperm.runs import checkpoint, files
from hetperm.runs import client_models as models
from hetperm.runs.setting import OWN, Metric, Setting, one_thread, own, prepare
from hetperm.runs.training import Trained, budget, by_tier, checkpoints, figures, put, train
from hetperm.server.slicer import coverage
from hetperm.state import State

OnEpoch = Callable[[str, Mapping[str, Any]], object]  # (method, row of the metrics)
OnStart = Callable[[Setting], object]


@dataclass(frozen=True)
class Result:
    """What a run came to; accuracies are those of the models that clients would deploy, on test data.

    Attributes:
        alpha: (N, N) who learns from whom, sparse from a thousand clients on; None without mixing weights.
        accuracy: mean over clients; `tiers`: by size of model; `clients`: one row each.
        folder: where it was written; None if it was not.
        history: the metrics, one row per epoch.
        summary: what summary.json holds; `main`: the algorithm, `baselines`: its rivals.
    """

    alpha: Tensor | None
    accuracy: float
    tiers: Mapping[str, Mapping[str, Any]]
    clients: tuple[Mapping[str, Any], ...]
    folder: Path | None
    summary: Mapping[str, Any]
    main: Trained
    baselines: Mapping[str, Trained]

    @property
    def setting(self) -> Setting:
        """What all methods had in common."""
        return self.main.setting

    @property
    def state(self) -> State:
        """Where the algorithm ended."""
        return self.main.state

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """The metrics, one row per epoch."""
        return self.main.history

    def model(self, i: int) -> nn.Module:
        """Client i's own model, of its own size, in evaluation mode."""
        bench = self.setting.shop.at(self.main.widths[i])
        with one_thread():
            put(bench, self.state.deployed[i], self.setting.clients[i])
        return copy.deepcopy(bench.module).eval()


def run(config: Config, *, on_epoch: OnEpoch | None = None, on_start: OnStart | None = None) -> Result:
    """The result of one run with one seed, written to a folder.

    Args:
        on_epoch: called with the method and the row of metrics after every epoch of every method.
        on_start: called once with the setting, before anything is trained.
    """
    if config.seeds:
        raise ValueError(f"run takes one seed and seeds is {list(config.seeds)}; call sweep for several")
    check(config)
    folder = files.place(config.out, run_name(config), resume=config.resume)
    setting = prepare(config)
    with _opened(folder, setting.config) as folder:
        return _execute(setting, folder, on_epoch, on_start)


def fit(
    model: nn.Module,
    clients: Sequence[Client],
    config: Config | None = None,
    *,
    loss: Loss | None = None,
    metric: Metric | None = None,
    on_epoch: OnEpoch | None = None,
) -> Result:
    """The result of a run with your own model, shards, loss and metric; written to a folder if the config names one.

    Args:
        model: any module, with the weights to begin from; it is not changed.
        clients: their shards and widths; a client without test data is trained and not scored.
        config: how to train; what it says about data, model and capacity profile is not used.
        loss: (outputs, labels) -> mean loss of the batch; cross-entropy unless given.
        metric: (outputs, labels) -> mean over the batch, the larger the better; accuracy unless given.
        on_epoch: called with the method and the row of metrics after every epoch of every method.
    """
    config = config or Config()
    if config.seeds:
        raise ValueError(f"fit takes one seed and seeds is {list(config.seeds)}; call it once for each")
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}; fit takes an nn.Module")
    if not clients:
        raise ValueError("there are no clients; give at least one")
    strange = next((client for client in clients if not isinstance(client, Client)), None)
    if strange is not None:
        raise TypeError(f"a client is a {type(strange).__name__}; wrap its shard: hetperm.Client(train=(x, y))")
    check(config)
    config = config.override(num_clients=len(clients), dataset=OWN)
    folder = None if config.out is None else files.place(config.out, "", resume=config.resume)
    setting = own(model, clients, config, loss=loss, metric=metric)
    with nullcontext() if folder is None else _opened(folder, setting.config) as folder:
        return _execute(setting, folder, on_epoch)


def sweep(
    config: Config, *, on_epoch: OnEpoch | None = None, on_start: OnStart | None = None
) -> tuple[dict[str, Any], list[Result]]:
    """The aggregate of one run per seed, and the runs; each is in a folder of its own inside the one of all."""
    if not config.seeds:
        raise ValueError("sweep takes several seeds and seeds is empty; call run for one")
    check(config)
    folder = files.place(config.out, run_name(config), resume=config.resume)
    results = []
    with ExitStack() as whole:
        for seed in config.seeds:
            of_seed = files.place(folder / f"seed-{seed}", "", resume=config.resume)
            setting = prepare(config.override(seed=seed, seeds=(), out=of_seed))
            if not results:
                whole.enter_context(_opened(folder, config.override(device=setting.config.device)))
            with _opened(of_seed, setting.config):
                results.append(_execute(setting, of_seed, on_epoch, None if results else on_start))
        summary = aggregate(results, config)
        _write_sweep(folder, summary, results)
    return summary, results


def _write_sweep(folder: Path, summary: Mapping[str, Any], results: Sequence[Result]) -> None:
    files.write_json(folder / "summary.json", summary)
    files.write_csv(folder / "seeds.csv", [_seed_row(result) for result in results])
    files.write_csv(folder / "clients.csv", [{"seed": r.summary["seed"], **row} for r in results for row in r.clients])
    files.write(folder / "accuracy.png", pictures.png(_accuracy_picture(results)))
    tiers = pictures.tiers(Summary.from_json(summary), title=_title(summary))
    files.write(folder / "tiers.png", pictures.png(tiers))
    files.write(folder / page.NAME, page.render(folder))


def aggregate(results: Sequence[Result], config: Config) -> dict[str, Any]:
    """The summary of several runs: the mean of every figure, and its standard deviation over seeds (``spread``).

    ``paired`` holds, for each rival, how far the algorithm is ahead of it, seed by seed.
    """
    summaries = [{key: value for key, value in result.summary.items() if key != "seed"} for result in results]
    mean, spread = files.mean_and_spread(summaries)
    paired = {
        name: _paired([each["accuracy"]["mean"] - each["baselines"][name]["accuracy"]["mean"] for each in summaries])
        for name in mean["baselines"]
    }
    return {**mean, "seeds": list(config.seeds), "spread": spread, "paired": paired}


def _paired(differences: list[float]) -> dict[str, Any]:
    mean, std = files.mean_and_spread(differences)
    return {"mean": mean, "std": std, "differences": differences}


def _seed_row(result: Result) -> dict[str, Any]:
    summary = result.summary
    methods = {summary["algorithm"]: summary, **summary["baselines"]}
    return {"seed": summary["seed"], **{name: method["accuracy"]["mean"] for name, method in methods.items()}}


def run_name(config: Config) -> str:
    """The name of a run's folder in runs/."""
    return config.name or f"{config.dataset.partition(':')[0]}-{config.algorithm}"


@contextmanager
def _opened(folder: Path, config: Config) -> Iterator[Path]:
    """The folder of a run, made, or found with the same configuration in it; no other run gets it meanwhile."""
    known, text = folder / "config.toml", config.to_toml()
    if not (config.resume and known.exists()):
        files.create(folder, resume=config.resume)
    with files.held(folder):
        if known.exists():
            difference = checkpoint.changed(configuration.read(known), tomllib.loads(text), ignore=("download",))
            if difference:
                raise ValueError(f"{folder} cannot be resumed: {difference}")
            files.tidy(folder)
        else:
            try:
                files.write(known, text)
            except OSError:
                folder.rmdir()
                raise
        yield folder


# The run


def _execute(
    setting: Setting, folder: Path | None, on_epoch: OnEpoch | None, on_start: OnStart | None = None
) -> Result:
    config, began = setting.config, time.perf_counter()
    kept = None if folder is None else folder / "checkpoint"
    saved = {} if kept is None else checkpoints(setting, (config.algorithm, *config.baselines), kept)
    done = [method for method, each in saved.items() if each.finished]
    if on_start:
        on_start(setting)
    if folder and setting.profile and not saved:
        files.write_csv(folder / "profile.csv", setting.profile)

    def show(method: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if folder and method == config.algorithm and method not in done:
            files.write_csv(folder / "metrics.csv", rows)
        if on_epoch:
            on_epoch(method, rows[-1])

    with one_thread():
        before = saved.get(config.algorithm)
        main = train(setting, config.algorithm, steps=budget(config), show=show, folder=kept, saved=before)
        taken = math.ceil(main.state.work.client_steps / len(setting.clients))
        steps = taken if config.steps is None else config.steps
        result = _result(main, {}, folder)
        for name in config.baselines:
            if name not in done:
                _write(result)  # a rival that fails takes nothing with it
            rival = train(setting, name, steps=steps, show=show, folder=kept, saved=saved.get(name))
            result = _result(main, {**result.baselines, name: rival}, folder)
        if folder is None or _complete(result):
            return result
        _write(result)
        _save_models(result)
        _write_coverage(result)
    _draw(result)
    files.write_json(folder / "timing.json", _timing(result, time.perf_counter() - began))
    files.write(folder / page.NAME, page.render(folder))  # the last file: where it is, all others are
    return result


def _complete(result: Result) -> bool:
    """Whether nothing was trained that is not written yet."""
    every = (result.main, *result.baselines.values())
    return all([each.seconds == each.earlier for each in every]) and (result.folder / page.NAME).exists()


# What it came to


def _result(main: Trained, baselines: Mapping[str, Trained], folder: Path | None) -> Result:
    setting = main.setting
    found = _method_summary(main)
    summary = {
        "algorithm": main.method,
        "dataset": setting.dataset,
        "num_clients": len(setting.clients),
        "seed": setting.config.seed,
        "epochs": setting.config.epochs,
        "capacity_profile": setting.config.capacity_profile if setting.profile else None,
        **found,
        "baselines": {name: _method_summary(each) for name, each in baselines.items()},
    }
    return Result(
        alpha=main.state.alpha,
        accuracy=found["accuracy"]["mean"],
        tiers=found["tiers"],
        clients=tuple(_client_rows(main, baselines)),
        folder=folder,
        summary=summary,
        main=main,
        baselines=baselines,
    )


def _client_rows(main: Trained, baselines: Mapping[str, Trained]):
    setting, alpha = main.setting, main.state.alpha
    partners = [None] * len(setting.clients) if alpha is None else mixing.effective_partners(alpha).tolist()
    for i, client in enumerate(setting.clients):
        yield {
            "client": i,
            "tier": setting.tiers[i],
            "width": client.width,
            "params": setting.num_params(main.widths[i]),
            "group": client.group,
            "n_train": client.n_train,
            "n_val": client.n_val,
            "accuracy": main.accuracy[i],
            "loss": main.loss[i],
            "effective_partners": partners[i],
            **{f"accuracy_{name}": each.accuracy[i] for name, each in baselines.items()},
        }


def _method_summary(trained: Trained) -> dict[str, Any]:
    """The figures of one method, as summary.json has them."""
    setting = trained.setting
    found = figures(setting, trained.accuracy, trained.loss)
    accuracies = by_tier(setting, trained.accuracy)
    tiers = {}
    for tier in setting.tier_names:
        members = [i for i, name in enumerate(setting.tiers) if name == tier]
        tiers[tier] = {
            "clients": len(members),
            "width": setting.clients[members[0]].width,
            "params": setting.num_params(trained.widths[members[0]]),
            "accuracy": accuracies[tier],
        }
    return {
        "accuracy": found["accuracy"],
        "loss": found["loss"],
        "tiers": tiers,
        "alpha": _alpha_summary(setting, trained.state.alpha),
        "cost": dict(vars(trained.state.work)),
    }


def _matrix(alpha: Tensor) -> Any:
    """Mixing weights as numpy has them, or scipy if they are sparse."""
    if not alpha.is_sparse:
        return alpha.cpu().numpy()
    from scipy import sparse

    alpha = alpha.cpu().coalesce()
    return sparse.csr_array((alpha.values().numpy(), tuple(alpha.indices().numpy())), shape=tuple(alpha.shape))


def _alpha_summary(setting: Setting, alpha: Tensor | None) -> dict[str, Any] | None:
    if alpha is None:
        return None
    return {
        "effective_partners": float(mixing.effective_partners(alpha).mean()),
        "nonzero": float(mixing.nonzero(alpha).double().mean()),
        "self_weight": mixing.self_weight(alpha),
        "same_tier_mass": mixing.same_group_mass(alpha, setting.tiers),
        "same_group_mass": None if setting.groups is None else mixing.same_group_mass(alpha, setting.groups),
    }


def _write(result: Result) -> None:
    """Nothing; the files of a run, models and pictures excepted, are there."""
    folder = result.folder
    if folder is None:
        return
    files.write_json(folder / "summary.json", result.summary)
    files.write_csv(folder / "metrics.csv", result.history)
    files.write_csv(folder / "clients.csv", result.clients)
    rivals = [{"method": name, **row} for name, each in result.baselines.items() for row in each.history]
    if rivals:
        files.write_csv(folder / "baselines.csv", rivals)
    if result.alpha is not None:
        files.write_alpha(folder, _matrix(result.alpha))


def _write_coverage(result: Result) -> None:
    """Nothing; coverage.csv says how often each block of the global model was trained, if clients trained parts."""
    setting, main = result.setting, result.main
    config, (make, _), drawn = setting.config, ALGORITHMS[main.method], None
    if result.alpha is not None:
        rounds, extraction = config.warmup_rounds + config.epochs * (main.method == "perm"), config.extraction
    else:
        how = getattr(make, "keywords", {})
        rounds, extraction = main.state.work.rounds, how.get("extraction")
        rounds -= main.history[-1]["finished"]  # the fine-tuning
        if how.get("ordered"):
            options = options_for(main.method, config, steps=budget(config))
            drawn = partial(drawn_widths, clients=setting.clients, options=options)
    if setting.parts.scalable is None or extraction is None:
        return
    blocks = coverage(
        setting.parts,
        setting.start,
        setting.clients,
        setting.tiers,
        extraction,
        seed=config.seed,
        rounds=rounds,
        drawn=drawn,
    )
    files.write_csv(result.folder / "coverage.csv", list(blocks))


def _save_models(result: Result) -> None:
    """Nothing; every client's own model is in models/, with what it takes to load it."""
    setting = result.setting
    for i, (client, row) in enumerate(zip(setting.clients, result.clients, strict=True)):
        width, x = result.main.widths[i], client.train[0]
        index = setting.parts.index(width)
        manifest = {
            "architecture": setting.architecture,
            "width": width,
            **({} if index is None else models.channels(index)),
            "input": list(x.shape[1:]),
            **({} if x.is_floating_point() else {"input_dtype": str(x.dtype).removeprefix("torch.")}),
            **({} if client.classes is None else {"classes": client.classes.nonzero().flatten().tolist()}),
            "alpha": None if result.alpha is None else result.alpha[i].to_dense().tolist(),
            "algorithm": result.main.method,
            "dataset": setting.dataset,
            "seed": setting.config.seed,
            **{key: row[key] for key in ("tier", "group", "n_train", "accuracy")},
        }
        models.save_client(result.folder, i, result.model(i), manifest)


def _draw(result: Result) -> None:
    """Nothing; the pictures of a run are there."""
    folder = result.folder
    title = _title(result.summary)
    if result.alpha is not None:
        alpha, tiers = result.alpha.to_dense().cpu().numpy(), result.setting.tiers
        names = result.setting.tier_names
        figure = pictures.alpha_map(
            alpha, result.setting.groups, title=f"who learns from whom: {title}", tiers=tiers, largest_first=names
        )
        files.write(folder / "alpha.png", pictures.png(figure))
    files.write(folder / "accuracy.png", pictures.png(_accuracy_picture([result])))
    tiers = pictures.tiers(Summary.from_json(result.summary), result.clients, title=title)
    files.write(folder / "tiers.png", pictures.png(tiers))


def _title(summary: Mapping[str, Any]) -> str:
    return f"{summary['algorithm']} on {summary['dataset']}, {summary['num_clients']} clients"


def _accuracy_picture(results: Sequence[Result]) -> pictures.Figure:
    return pictures.curves(
        histories(results),
        figures=[("accuracy_mean", "test accuracy, mean over clients")],
        against=[
            ("client_steps", "local steps per client", len(results[0].clients)),
            ("bytes", "MB sent", 2**20),
        ],
        strong=Summary.from_json(results[0].summary).mixing,
        title=_title(results[0].summary),
    )


def histories(results: Sequence[Result]) -> dict[str, list[Sequence[Mapping[str, Any]]]]:
    """method -> its history in each run."""
    first = results[0]
    return {
        first.main.method: [result.history for result in results],
        **{name: [result.baselines[name].history for result in results] for name in first.baselines},
    }


def _timing(result: Result, seconds: float) -> dict[str, Any]:
    """What depends on the clock and the machine."""
    config = result.setting.config
    methods = {result.main.method: result.main, **result.baselines}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "seconds": seconds + sum(each.earlier for each in methods.values()),
        "seconds_by_method": {name: each.seconds for name, each in methods.items()},
        "peak_memory_mb": peak / 2**20,
        "engine": choose(config.engine, config.workers, result.setting.clients, result.setting.shop),
        "workers": config.workers,
        "device": config.device,
        "command": sys.argv,
        "versions": {"hetperm": hetperm.__version__, "python": platform.python_version(), "torch": torch.__version__},
    }
