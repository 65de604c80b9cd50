"""A run from beginning to end: data, model, algorithm, rivals, evaluation, and the folder it is written to."""

import copy
import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hetperm
from hetperm import data, mixing
from hetperm.client import Client
from hetperm.config import Config
from hetperm.engine import Sequential
from hetperm.evaluate import accuracy, evaluate, summarise
from hetperm.local import Loss, Params, Workbench
from hetperm.methods import ALGORITHMS, check, options_for
from hetperm.randomness import seed_for
from hetperm.report import folder as files
from hetperm.report import pictures
from hetperm.state import State
from hetperm.visits import NotFinite
from submodels import zoo
from submodels.norms import check_batch, recalibrate

Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> mean over the batch; the larger the better
OnEpoch = Callable[[str, Mapping[str, Any]], object]  # (method, row of the metrics)
Scores = tuple[tuple[float, ...], tuple[float, ...]]  # accuracy and loss of every client
OWN = "own"  # the data set of fit
TIER = "full"  # every client holds the whole model


@dataclass(frozen=True)
class Trained:
    """What one method came to.

    Attributes:
        history: one row per epoch.
        accuracy, loss: of each client's model on its test data; nan for a client that has none.
    """

    method: str
    state: State
    history: tuple[Mapping[str, Any], ...]
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Result:
    """What a run came to; accuracies are those of the models that clients would deploy, on test data.

    Attributes:
        alpha: (N, N) who learns from whom; None for algorithms without mixing weights.
        accuracy: mean over clients; `tiers`: by size of model; `clients`: one row each.
        folder: where it was written; None if it was not.
        history: the metrics, one row per epoch.
        summary: what summary.json holds; `baselines`: the rivals; `setting`: what all of them had in common.
    """

    alpha: Tensor | None
    accuracy: float
    tiers: Mapping[str, Mapping[str, Any]]
    clients: tuple[Mapping[str, Any], ...]
    folder: Path | None
    history: tuple[Mapping[str, Any], ...]
    state: State
    summary: Mapping[str, Any]
    baselines: Mapping[str, Trained]
    setting: "Setting"

    def model(self, i: int) -> nn.Module:
        """Client i's own model, in evaluation mode."""
        bench, client = self.setting.bench, self.setting.clients[i]
        _put(bench, self.state.deployed[i], client)
        return copy.deepcopy(bench.module).eval()


@dataclass(frozen=True)
class Setting:
    """What all methods of a run have in common."""

    clients: tuple[Client, ...]
    bench: Workbench
    start: Params
    metric: Metric
    dataset: str
    config: Config

    @property
    def groups(self) -> tuple[int, ...] | None:
        groups = tuple(client.group for client in self.clients)
        return None if None in groups else groups

    @property
    def description(self) -> str:
        """One line: the data, the model and where it is trained."""
        config, size = self.config, sum(x.numel() for x in self.start.values())
        data, model = self.dataset, type(self.bench.module).__name__
        if self.dataset != OWN:
            data, model = f"{data} {config.partition}", zoo.resolve(config.model)
        return f"{data}; {model} with {size:,} parameters; {config.dtype} on {config.device}"


def run(config: Config, *, on_epoch: OnEpoch | None = None) -> Result:
    """The result of one run with one seed, written to a folder.

    Args:
        on_epoch: called with the method and the row of metrics after every epoch of every method.
    """
    if config.seeds:
        raise ValueError(f"run takes one seed and seeds is {list(config.seeds)}; call sweep for several")
    check(config)
    folder = files.free(config.out, run_name(config))
    setting = prepare(config)
    return _execute(setting, files.create(folder), on_epoch)


def prepare(config: Config) -> Setting:
    """The data and the model of a run, ready to be trained."""
    problem = data.load(
        config.dataset,
        num_clients=config.num_clients,
        partition=config.partition,
        samples_per_client=config.samples_per_client,
        validation_share=config.validation_share,
        seed=config.seed,
        data_dir=config.data_dir,
        download=config.download,
        image_size=config.image_size,
    )
    model = build(config, problem)
    return _setting(model, problem.clients, config, loss=None, metric=None, dataset=problem.name)


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
        clients: their shards; a client without test data is trained and not scored.
        config: how to train; what it says about data and model is not used.
        loss: (outputs, labels) -> mean loss of the batch; cross-entropy unless given.
        metric: (outputs, labels) -> mean over the batch, the larger the better; accuracy unless given.
        on_epoch: called with the method and the row of metrics after every epoch of every method.
    """
    config = config or Config()
    if config.seeds:
        raise ValueError(f"fit takes one seed and seeds is {list(config.seeds)}; call it once for each")
    if not clients:
        raise ValueError("there are no clients; give at least one")
    check(config)
    config = config.override(num_clients=len(clients), dataset=OWN)
    folder = None if config.out is None else files.free(config.out, "")
    setting = _setting(model, clients, config, loss=loss, metric=metric, dataset=OWN)
    return _execute(setting, None if folder is None else files.create(folder), on_epoch)


def sweep(config: Config, *, on_epoch: OnEpoch | None = None) -> tuple[dict[str, Any], list[Result]]:
    """The aggregate of one run per seed, and the runs; each is in a folder of its own inside the one of all."""
    if not config.seeds:
        raise ValueError("sweep takes several seeds and seeds is empty; call run for one")
    check(config)
    folder = files.free(config.out, run_name(config))
    results = []
    for seed in config.seeds:
        one = config.override(seed=seed, seeds=(), out=folder / f"seed-{seed}")
        results.append(run(one, on_epoch=on_epoch))
        files.write(folder / "config.toml", config.override(device=results[0].setting.config.device).to_toml())
    summary = aggregate(results, config)
    files.write_json(folder / "summary.json", summary)
    files.write_csv(folder / "seeds.csv", [_seed_row(result) for result in results])
    pictures.save(_accuracy_picture(results, config.num_clients), folder / "accuracy.png")
    return summary, results


def aggregate(results: Sequence[Result], config: Config) -> dict[str, Any]:
    """The summary of several runs: the mean of every figure, and under ``spread`` its standard deviation over seeds."""
    summaries = [{key: value for key, value in result.summary.items() if key != "seed"} for result in results]
    mean, spread = files.mean_and_spread(summaries)
    return {**mean, "seeds": list(config.seeds), "spread": spread}


def _seed_row(result: Result) -> dict[str, Any]:
    summary = result.summary
    methods = {summary["algorithm"]: summary, **summary["baselines"]}
    return {"seed": summary["seed"], **{name: method["accuracy"]["mean"] for name, method in methods.items()}}


def run_name(config: Config) -> str:
    """The name of a run's folder in runs/."""
    return config.name or f"{config.dataset}-{config.algorithm}"


# What a run is about


def build(config: Config, problem: data.Problem) -> nn.Module:
    """The model of a run, with weights that the seed decides."""
    sizes = {name: getattr(problem, name) for name in ("in_channels", "num_classes", "image_size")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "model"))
        try:
            return zoo.build(config.model, **sizes, **config.model_options)
        except TypeError as error:
            raise ValueError(f"model {config.model!r} does not take these model_options ({error})") from error


def device_of(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} is not there; use 'auto' or 'cpu'") from error
    return device


def _setting(
    model: nn.Module,
    clients: Sequence[Client],
    config: Config,
    *,
    loss: Loss | None,
    metric: Metric | None,
    dataset: str,
) -> Setting:
    device, dtype = device_of(config.device), getattr(torch, config.dtype)
    clients = tuple(_numbered(clients))
    for i, client in enumerate(clients):
        if client.width != 1:
            raise ValueError(f"client {i} has width {client.width:g}; {config.algorithm} trains models of one size")
        check_batch(model, client.n_train)
    module = copy.deepcopy(model).to(device, dtype)
    bench = Workbench(module, F.cross_entropy if loss is None else loss)
    if not bench.slots:
        raise ValueError("the model has no parameters to train; set requires_grad on some")
    clients = tuple(_moved(client, device, dtype) for client in clients)
    metric = accuracy if metric is None else metric
    return Setting(clients, bench, bench.take(), metric, dataset, config.override(device=str(device)))


def _numbered(clients: Sequence[Client]) -> Iterator[Client]:
    """The clients, each with a key: its own, or its place."""
    keys = [i if client.key is None else client.key for i, client in enumerate(clients)]
    for i, (client, key) in enumerate(zip(clients, keys)):
        if keys.index(key) != i:
            raise ValueError(f"clients {keys.index(key)} and {i} have the same key {key}; keys tell clients apart")
        yield replace(client, key=key)


def _moved(client: Client, device: torch.device, dtype: torch.dtype) -> Client:
    """The client with its shard where models are trained; what it is scored on moves batch by batch."""
    train = tuple(x.to(device, dtype if x.is_floating_point() else None) for x in client.train)
    return replace(client, train=train)


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch computes on one thread: models are small, and sums come out the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The run


def _execute(setting: Setting, folder: Path | None, on_epoch: OnEpoch | None) -> Result:
    config, began = setting.config, time.perf_counter()
    if folder:
        files.write(folder / "config.toml", config.to_toml())

    def show(method: str, rows: list[Mapping[str, Any]]) -> None:
        if folder and method == config.algorithm:
            files.write_csv(folder / "metrics.csv", rows)
        if on_epoch:
            on_epoch(method, rows[-1])

    with one_thread():
        main = train(setting, config.algorithm, steps=budget(config), show=show)
        taken = math.ceil(main.state.work.client_steps / len(setting.clients))
        steps = taken if config.steps is None else config.steps
        result = _result(setting, main, {}, folder)
        for name in config.baselines:
            _write(result, folder)  # a rival that fails takes nothing with it
            result = _result(
                setting, main, {**result.baselines, name: train(setting, name, steps=steps, show=show)}, folder
            )
    _write(result, folder)
    _draw(result, folder)
    if folder:
        files.write_json(folder / "timing.json", _timing(result, main, time.perf_counter() - began))
    return result


def budget(config: Config) -> int:
    """Steps of each client if PERM does not run to say how many: those of PERM with every visit."""
    return config.steps or (config.warmup_rounds + config.epochs * config.num_clients) * config.local_steps


def train(
    setting: Setting,
    method: str,
    *,
    steps: int,
    show: Callable[[str, list[Mapping[str, Any]]], object] = lambda method, rows: None,
) -> Trained:
    """What a method comes to with ``steps`` gradients a client (PERM takes as many as its visits need)."""
    began = time.perf_counter()
    config, rows = setting.config, []
    algorithm, _ = ALGORITHMS[method]
    engine = Sequential(setting.clients, setting.bench)
    begin, epoch, finish = algorithm(setting.clients, engine, setting.start, options_for(method, config, steps=steps))
    try:
        state = begin()
        for r in range(1, config.epochs + 1):
            before, state = state, epoch(state)
            last = r == config.epochs
            done = finish(state) if last or (config.eval_finished and r % config.eval_finished == 0) else state
            row, scores = _row(setting, done, r, evaluated=last or r % config.eval_every == 0 or done is not state)
            row["finished"] = int(done is not state)
            rows.append(row | _visits(config, before, state))
            show(method, rows)
    except NotFinite as error:
        raise NotFinite(f"{method}: {error}") from error
    except RuntimeError as error:
        raise RuntimeError(f"{method}: {error}") from error
    return Trained(method, done, tuple(rows), *scores, seconds=time.perf_counter() - began)


def score(setting: Setting, models: Sequence[Params], part: str, *, place: str) -> Scores:
    """(accuracies, losses) of every client's model on its own ``part``, "val" or "test"; nan where it has none."""
    accuracies, losses = [], []
    for i, (client, params) in enumerate(zip(setting.clients, models, strict=True)):
        pair = getattr(client, part)
        if pair is None:
            loss = metric = math.nan
        else:
            _put(setting.bench, params, client)
            loss, metric = evaluate(setting.bench.module, pair, loss=setting.bench.loss, metric=setting.metric)
            if not (math.isfinite(loss) and math.isfinite(metric)):
                found = f"{part} loss {loss:g}, metric {metric:g}"
                raise NotFinite(f"{place}: client {i}: {found}; lower the learning rate (personal_lr, global_lr)")
        accuracies.append(metric)
        losses.append(loss)
    return tuple(accuracies), tuple(losses)


def _put(bench: Workbench, params: Params, client: Client) -> None:
    """A client's model on the bench, ready to be evaluated: norms use the statistics of the client's own shard."""
    bench.load(params)
    pieces = math.ceil(client.n_train / 512)
    recalibrate(bench.module, client.train[0].tensor_split(pieces))


def _row(setting: Setting, state: State, r: int, *, evaluated: bool) -> tuple[dict[str, Any], Scores]:
    """The metrics of an epoch, and how each client's deployed model does on test data.

    Work so far, and figures of the iterate and of the tail average once it has begun, on test and validation data.
    """
    row, test = {"epoch": r, **vars(state.work)}, ((), ())
    if not evaluated:
        return row, test
    models = {"": state.v} | ({"tail_": state.tail} if state.tail is not None else {})
    for prefix, v in models.items():
        parts = {part: score(setting, v, part, place=f"after epoch {r}") for part in ("test", "val")}
        test = parts["test"]
        for label, scores in (("", parts["test"]), ("val_", parts["val"])):
            for quantity, figures in _figures(setting, *scores).items():
                row |= {f"{prefix}{label}{quantity}_{name}": figure for name, figure in figures.items()}
        row[f"{prefix}accuracy_tier_{TIER}"] = row[f"{prefix}accuracy_mean"]
    return row, test


def _visits(config: Config, before: State, after: State) -> dict[str, int]:
    """The visits of one epoch, and the rounds they took: as many as the largest degree, or N on the ring."""
    if before.alpha is None:
        return {}
    pairs = before.alpha > 0
    degree = int(torch.maximum(pairs.sum(0), pairs.sum(1)).max())
    rounds = degree if config.schedule == "colour" else len(pairs)
    return {"epoch_visits": after.work.visits - before.work.visits, "epoch_rounds": rounds}


def _figures(setting: Setting, accuracies: Sequence[float], losses: Sequence[float]) -> dict[str, dict[str, float]]:
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


# What it came to


def _result(setting: Setting, main: Trained, baselines: Mapping[str, Trained], folder: Path | None) -> Result:
    config = setting.config
    figures = _method_summary(setting, main)
    summary = {
        "algorithm": config.algorithm,
        "dataset": setting.dataset,
        "num_clients": len(setting.clients),
        "seed": config.seed,
        "epochs": config.epochs,
        **figures,
        "baselines": {name: _method_summary(setting, each) for name, each in baselines.items()},
    }
    alpha = main.state.alpha
    partners = [None] * len(setting.clients) if alpha is None else mixing.effective_partners(alpha).tolist()
    clients = tuple(
        {
            "client": i,
            "tier": TIER,
            "width": client.width,
            "group": client.group,
            "n_train": client.n_train,
            "n_val": client.n_val,
            "accuracy": main.accuracy[i],
            "loss": main.loss[i],
            "effective_partners": partners[i],
        }
        for i, client in enumerate(setting.clients)
    )
    return Result(
        alpha=alpha,
        accuracy=figures["accuracy"]["mean"],
        tiers=figures["tiers"],
        clients=clients,
        folder=folder,
        history=main.history,
        state=main.state,
        summary=summary,
        baselines=baselines,
        setting=setting,
    )


def _method_summary(setting: Setting, trained: Trained) -> dict[str, Any]:
    """The figures of one method, as summary.json has them."""
    figures = _figures(setting, trained.accuracy, trained.loss)
    work = vars(trained.state.work)
    return {
        "accuracy": figures["accuracy"],
        "loss": figures["loss"],
        "tiers": {TIER: {"clients": len(setting.clients), "width": 1.0, "accuracy": figures["accuracy"]["mean"]}},
        "alpha": _alpha_summary(setting, trained.state.alpha),
        "cost": dict(work),
    }


def _alpha_summary(setting: Setting, alpha: Tensor | None) -> dict[str, Any] | None:
    if alpha is None:
        return None
    return {
        "effective_partners": float(mixing.effective_partners(alpha).mean()),
        "nonzero": float(mixing.nonzero(alpha).double().mean()),
        "self_weight": float(alpha.diagonal().mean()),
        "same_tier_mass": mixing.same_group_mass(alpha, [client.width for client in setting.clients]),
        "same_group_mass": None if setting.groups is None else mixing.same_group_mass(alpha, setting.groups),
    }


def _write(result: Result, folder: Path | None) -> None:
    """Nothing; the files of a run, pictures excepted, are there."""
    if folder is None:
        return
    files.write_json(folder / "summary.json", result.summary)
    files.write_csv(folder / "metrics.csv", result.history)
    files.write_csv(folder / "clients.csv", result.clients)
    rivals = [{"method": name, **row} for name, each in result.baselines.items() for row in each.history]
    if rivals:
        files.write_csv(folder / "baselines.csv", rivals)
    if result.alpha is not None:
        files.write_alpha(folder, result.alpha.cpu().numpy())


def _draw(result: Result, folder: Path | None) -> None:
    """Nothing; the pictures of a run are there."""
    if folder is None:
        return
    if result.alpha is not None:
        title = f"who learns from whom: {result.summary['algorithm']} on {result.summary['dataset']}"
        figure = pictures.alpha_map(result.alpha.cpu().numpy(), result.setting.groups, title=title)
        pictures.save(figure, folder / "alpha.png")
    pictures.save(_accuracy_picture([result], len(result.clients)), folder / "accuracy.png")


def _accuracy_picture(results: Sequence[Result], num_clients: int) -> pictures.Figure:
    return pictures.curves(
        histories(results),
        figures=[("accuracy_mean", "test accuracy, mean over clients")],
        against=[("client_steps", "local steps per client", num_clients)],
        title=f"{results[0].summary['dataset']}, {num_clients} clients",
    )


def histories(results: Sequence[Result]) -> dict[str, list[Sequence[Mapping[str, Any]]]]:
    """method -> its history in each run."""
    first = results[0]
    return {
        first.summary["algorithm"]: [result.history for result in results],
        **{name: [result.baselines[name].history for result in results] for name in first.baselines},
    }


def _timing(result: Result, main: Trained, seconds: float) -> dict[str, Any]:
    """What depends on the clock and the machine."""
    methods = {main.method: main, **result.baselines}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "seconds": seconds,
        "seconds_by_method": {name: each.seconds for name, each in methods.items()},
        "peak_memory_mb": peak / 2**20,
        "engine": "sequential",
        "device": result.setting.config.device,
        "command": sys.argv,
        "versions": {"hetperm": hetperm.__version__, "python": platform.python_version(), "torch": torch.__version__},
    }
