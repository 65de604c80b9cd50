"""A client that was not there joins a finished run: a width, a row of mixing weights, a model made of its partners'.

Nobody else does anything: the reports and the models of the others are in the run folder.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm import config as configuration
from hetperm import mixing
from hetperm.checks import path
from hetperm.checks import whole as whole_number
from hetperm.client import Client
from hetperm.config import Config
from hetperm.device.bench import Loss, Workshop
from hetperm.device.gradients import Report, ReportGradient
from hetperm.device.updates import Sgd
from hetperm.metrics import METRICS, Metric, Score, metric_of
from hetperm.mixing import complexity, discrepancy
from hetperm.params import Params, check_finite
from hetperm.randomness import generator_for, seed_for
from hetperm.report import contents, details, page
from hetperm.report.contents import read_clients, read_summary
from hetperm.runs import blend, client_models, files, joined, newcomer, rehearsal, server_file, setting
from hetperm.runs.building import build, cost_of_step
from hetperm.runs.joined import Record
from hetperm.runs.placement import one_thread
from hetperm.runs.scores import load_for_evaluation, score, score_one
from hetperm.runs.server_file import Server
from hetperm.runs.setting import Setting
from hetperm.server.estimate import kept_row
from hetperm.texts import shown
from submodels import WHOLE, Budget, ScalableModel
from submodels.budget import largest
from submodels.cost import Cost


@dataclass(frozen=True)
class Run:
    """A finished run, as far as a client that joins needs it.

    Attributes:
        setting: what its methods shared; of its clients nothing is used.
        server: the global model and the reports, of clients that joined before too.
        widths: (N,) the widths of the personal models.
        tiers: (N,) the tiers.
        sample: the shape of one input.
        model_of: client -> the parameters of its deployed model.
    """

    setting: Setting
    server: Server
    widths: Sequence[float]
    tiers: Sequence[str]
    sample: Sequence[int]
    model_of: Callable[[int], Params]


@dataclass(frozen=True)
class Joined:
    """A client that joined.

    Attributes:
        client: its number in the run.
        alpha: (N + 1,) whom it learns from; the last is its weight on itself.
        made_of: the partners whose models its own is the mean of, before it takes steps.
        model: its model, in evaluation mode.
        score, loss: the metric of the run and the loss on its test data; nan if it has none.
        row: its line of clients.csv.
        report: its gradient at the probe, or a sketch of it, and the noise.
        channels: what its manifest says of the channels it keeps, and of the classes it knows.
        metric: the name of what it is scored by.
    """

    client: int
    width: float
    alpha: Tensor
    made_of: list[int]
    model: nn.Module
    score: float
    loss: float
    row: dict[str, Any]
    report: Report
    channels: dict[str, Any]
    metric: str = "accuracy"

    @property
    def accuracy(self) -> float:
        """The same as `score`, under the name that most runs have for it."""
        return self.score


def join(
    folder: str | Path,
    client: Client,
    *,
    budget: Budget | None = None,
    steps: int = 0,
    model: nn.Module | ScalableModel | None = None,
    loss: Loss | None = None,
    metric: str | Metric | Score | None = None,
) -> Joined:
    """Let a client join the run in a folder, and write it as one more client of it.

    Args:
        folder: of a finished run of perm or perm-two-stage.
        client: its data, as the run's model takes them, and its width.
        budget: what its device can afford; its width is then the largest of the run's that fits.
        steps: SGD steps that it takes on its own data at the end.
        model: the model at full width, if the run was one of `fit`; others are built by name.
        loss, metric: those of the run, if it had its own.
    """
    if not isinstance(folder, str | Path):
        raise TypeError(f"the folder is {shown(folder)}; it must be a path")
    _check_is_client(client)
    if not isinstance(model, nn.Module | ScalableModel | None):
        raise TypeError(f"the model is {shown(model)}; it must be an nn.Module at full width")
    if not (loss is None or callable(loss)):
        raise TypeError(f"loss is {shown(loss)}; it must be a function, or None")
    folder = path("the folder", folder)
    _check_folder(folder)
    with files.locked(folder):
        run = read_run(folder, model=model, loss=loss, metric=metric)
        new = added(run, client, budget=budget, steps=steps)
        write(folder, new)
        return new


# The newcomer


def _check_is_client(client: Client) -> None:
    if not isinstance(client, Client):
        raise TypeError(f"the client is {shown(client)}; wrap its shard: hetperm.Client(train=(x, y))")


def added(run: Run, client: Client, *, budget: Budget | None = None, steps: int = 0) -> Joined:
    """The client that joins; nothing is written. See `join` for the arguments."""
    _check_is_client(client)
    steps = whole_number(0, 1_000_000)("steps", steps)
    if not isinstance(budget, Budget | None):
        raise TypeError(f"the budget is {shown(budget)}; give a submodels.Budget, or None for the width of the client")
    number, config = len(run.widths), run.setting.config
    newcomer.check(client, run.setting, run.sample)
    width = client.width if budget is None else width_for(run, client, budget)
    client = replace(client, key=number if client.key is None else client.key, width=width)
    _check_width(run, width)
    (client,) = setting.prepared([client], run.setting)
    with one_thread():
        report = _report(run, client)
        alpha = row_of(run, client, report)
        params, made_of = model_for(run, client, alpha, report)
        bench = run.setting.shop.at(width)
        bench.classes = client.classes
        if steps:
            update = Sgd(steps, config.batch_size, config.personal_lr, config.step_cap)
            params = update(bench, params, client.train, generator_for(config.seed, "join", client.key))
            check_finite(params, f"client {number}, which joins", "; take fewer steps")
        own = replace(run.setting, clients=(client,))
        (metric,), (loss,) = score(own, [params], [width], "test", where="joining")
        load_for_evaluation(bench, params, client)
        model = copy.deepcopy(bench.module).eval()
    row = {
        "client": number,
        "tier": _tier(run, width),
        "width": width,
        "params": run.setting.num_params(width),
        "group": client.group,
        "n_train": client.n_train,
        "n_val": client.n_val,
        run.setting.metric.name: None if math.isnan(metric) else metric,
        "loss": None if math.isnan(loss) else loss,
        "effective_partners": float(1 / alpha.square().sum()),
        "joined": 1,
    }
    index = run.setting.slicer.index(width)
    channels = {} if index is WHOLE else client_models.channels(index)
    if client.classes is not None:
        channels["classes"] = client.classes.nonzero().flatten().tolist()
    return Joined(number, width, alpha, made_of, model, metric, loss, row, report, channels, run.setting.metric.name)


def width_for(run: Run, client: Client, budget: Budget) -> float:
    """The largest width in use in the run whose training fits a budget."""
    shop, size = run.setting.shop, run.setting.config.batch_size

    def cost(width: float) -> Cost:
        if shop.scalable is None:
            return cost_of_step(shop.full.module, client, batch_size=size)
        return shop.scalable.cost(width, batch_size=size)

    return largest(cost, budget, sorted(set(run.widths)))


def _report(run: Run, client: Client) -> Report:
    """The newcomer's report at the probe and at the early model, if there is one, made as all others were."""
    config, server, slicer = run.setting.config, run.server, run.setting.slicer
    bench, seed = run.setting.shop.at(server.width), seed_for(config.seed, "sketch")
    bench.classes = client.classes
    update = ReportGradient(config.noise_batches, config.sketch, seed, chunk=config.batch_size)
    probes = [slicer.cut(server.w, slicer.index(server.width)), *([server.early] if server.early else [])]
    size, gradients, noise = server.gradient.shape[1] // len(probes), [], 0.0
    for k, (probe, unit) in enumerate(zip(probes, server.units.tolist(), strict=True)):
        generator = generator_for(config.seed, "report of a newcomer", client.key, *([k] if k else []))
        report = update(bench, probe, client.train, generator)
        check_finite({"the gradient": report.gradient}, f"client {len(run.widths)}, which joins")
        if not math.isfinite(report.noise) and not math.isnan(report.noise):  # nan: too few samples to tell
            raise ValueError(
                f"client {len(run.widths)}, which joins: the spread of its gradients is {report.noise:g}; its inputs "
                "are too large, so prepare them as those of the run"
            )
        gradients.append(kept_row(report.gradient, size, seed) / math.sqrt(unit))
        noise += report.noise / unit
    return Report(torch.cat(gradients), noise)


def row_of(run: Run, client: Client, report: Report) -> Tensor:
    """(N + 1,) the mixing weights of the newcomer, as if it had reported with the others; the last is its own.

    Clients whose report is not known have none.
    """
    config, server = run.setting.config, run.server
    known = server.known.nonzero().flatten()
    zeta, q, n = compared(server, client.n_train, report)
    as_others = config.denoise and isinstance(config.regularization, str) and config.discrepancy == "probe"
    if as_others and q is not None and len(zeta) <= discrepancy.DENSE_UP_TO:
        zeta = mixing.denoised(zeta, q, n)
    widths = [run.widths[j] for j in known.tolist()] + [client.width]
    row = mixing.weights(
        zeta,
        q,
        n,
        regularization=config.regularization,
        vc=complexity.vc_of_widths(run.setting.shop.scalable, widths),
        vc_weight=config.vc_weight,
        alpha_steps=config.alpha_steps,
        share=server.share,
    )[-1]
    alpha = torch.zeros(len(run.widths) + 1, dtype=torch.float64)
    alpha[known], alpha[-1] = row[:-1], row[-1]
    return alpha


def compared(server: Server, samples: int, report: Report) -> tuple[Tensor, Tensor | None, Tensor]:
    """(zeta, q, n) of the clients whose reports are known and, last, of a newcomer with this many samples."""
    known = server.known
    if report.gradient.shape != server.gradient[0].shape:
        raise ValueError(
            f"reports of {len(report.gradient)} numbers cannot be compared with those of the run, which have "
            f"{server.gradient.shape[1]}; its config.toml or {server_file.NAME} was changed"
        )
    gradients = torch.cat([server.gradient[known], report.gradient[None].to(server.gradient)])
    n = torch.cat([server.samples[known].double(), torch.tensor([float(samples)], dtype=torch.float64)])
    q = torch.cat([server.noise[known], torch.tensor([report.noise], dtype=torch.float64)])
    q = None if q.isnan().all() else discrepancy.fill_noise(q, n)
    return discrepancy.pairwise(gradients).double(), q, n


def model_for(run: Run, client: Client, alpha: Tensor, report: Report) -> tuple[Params, list[int]]:
    """The newcomer's first model, made of its partners' (`blended`), and those that it is made of.

    A client without partners has no other model to begin with. It tries those of the nearest clients instead, and gets
    its part of the global model if that has the lowest loss on its data.
    """
    slicer, new = run.setting.slicer, len(run.widths)
    partners = alpha[:-1].argsort(descending=True, stable=True)[: blend.MOST].tolist()
    weights = {j: float(alpha[j]) for j in partners if alpha[j] > 0}
    tried = weights or dict.fromkeys(nearest(run, client, report), 1.0)
    models = {j: run.model_of(j) for j in tried} | {new: slicer.cut(run.server.w, slicer.index(client.width))}

    def loss(params: Params) -> float:
        value, _ = score_one(run.setting.shop, run.setting.metric, client, params, client.width, "train")
        return value if math.isfinite(value) else math.inf

    params, made_of = blend.blended(slicer, models, [*run.widths, client.width], tried, loss)
    if not weights and loss(models[new]) <= loss(params):
        return models[new], []
    return params, made_of


def nearest(run: Run, client: Client, report: Report) -> list[int]:
    """The clients whose gradients are nearest to the newcomer's, as many as it may try models of."""
    known = run.server.known.nonzero().flatten()
    zeta, _, _ = compared(run.server, client.n_train, report)
    return known[zeta[-1, :-1].argsort(stable=True)[: blend.MOST]].tolist()


def _tier(run: Run, width: float) -> str:
    """The tier of the run whose clients have this width; the width itself if there is none."""
    return next((tier for tier, own in zip(run.tiers, run.widths, strict=True) if own == width), f"{width:g}")


def _check_width(run: Run, width: float) -> None:
    """Raise an error if a client of this width cannot join the run."""
    slicer, probe = run.setting.slicer, run.server.width
    if width < probe and slicer.index(width, within=probe) is not WHOLE:
        raise ValueError(
            f"width {width:g} is below {probe:g}, the smallest of the run, at which its clients compare "
            "gradients; train another run with such clients in it"
        )
    if width < 1 and run.setting.shop.scalable is None:
        raise ValueError(f"width {width:g}: all clients of the run hold the whole model; join with width 1")


# The run folder


def _check_folder(folder: Path) -> None:
    """Raise an error unless the folder holds a finished run."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; name the folder of a run")
    if (folder / "seeds.csv").is_file():
        raise ValueError(f"{folder} holds several seeds; name the folder of one of them, such as {folder}/seed-0")
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{folder} holds no config.toml; name the folder of a run")
    if not client_models.clients(folder):
        raise ValueError(f"{folder} has no clients' models in models/; finish the run first, or train it again")
    server_file.load(folder)  # called for its error, which says more than that of the checksums
    if not files.is_whole(folder):
        raise ValueError(
            f"{folder} is no finished run, or a file of it was changed (checksums.txt); "
            f"`hetperm train --resume --out {folder}` with its settings finishes or mends it"
        )
    # Likewise: mixing weights and page are written when the client has joined.
    joined.read_alpha(folder)
    details.runs_of(folder, contents.read(folder))


def read_run(
    folder: Path,
    *,
    model: nn.Module | ScalableModel | None = None,
    loss: Loss | None = None,
    metric: str | Metric | Score | None = None,
) -> Run:
    """The run in a folder."""
    config = configuration.load(folder / "config.toml")
    if config.discrepancy != "probe":
        raise ValueError(
            f"{folder}: clients were compared with discrepancy {config.discrepancy!r}, each at its own part of the "
            "model; only a run with discrepancy 'probe' can be joined"
        )
    rows = read_clients(folder)
    server = joined.server_of(folder, len(rows))
    manifests = [client_models.read_manifest(folder, row["client"]) for row in rows]
    if "dataset" not in manifests[0]:
        raise ValueError(f"{folder}/models: the manifest of client 0 lacks 'dataset'; copy it again from the run")
    widths = [manifest["width"] for manifest in manifests]
    if model is None:
        full = _built(config, manifests[0])
        remedy = f"copy {server_file.NAME} again from the run"
    else:
        full = copy.deepcopy(model.model if isinstance(model, ScalableModel) else model)
        remedy = "give the one that it was trained with, at full width"
    _check_model(full, server.w, remedy)
    own = _setting_of(config, manifests[0], full, cut=any([width < 1 for width in widths]))
    shop = Workshop(own.shop.full.module, F.cross_entropy if loss is None else loss, own.shop.scalable)
    own = replace(own, shop=shop, metric=_metric(folder, metric))
    whole = own.shop.scalable or own.shop.full.module
    client_models.load_client(folder, rows[0]["client"], model=whole)  # called for its error, if this is another model

    def model_of(j: int) -> Params:
        module = client_models.load_client(folder, j, model=whole)
        return {name: p.detach() for name, p in module.named_parameters() if name in server.w}

    return Run(own, server, widths, [str(row["tier"]) for row in rows], manifests[0]["input"], model_of)


def _metric(folder: Path, given: Metric | Score | str | None) -> Metric:
    """What the run was scored by; a function of the user's own must be given again."""
    summary = read_summary(folder)
    if given is None and summary.metric not in METRICS:
        raise ValueError(
            f"{folder} was scored by {summary.metric!r}, which is no metric by name here; join in Python and give it: "
            "hetperm.join(folder, client, metric=...)"
        )
    metric = METRICS[summary.metric] if given is None else metric_of(given)
    known = isinstance(given, Metric | str) or (given is not None and summary.metric in METRICS)
    if known and metric.name != summary.metric:
        raise ValueError(f"{folder} was scored by {summary.metric!r} and metric is {metric.name!r}; give the run's")
    return replace(metric, name=summary.metric, better=summary.better)


def _built(config: Config, manifest: dict[str, Any]) -> nn.Module:
    """The model of a run, by its name."""
    architecture = manifest["architecture"]
    if "name" not in architecture:
        raise ValueError(
            f"the model of the run is a {architecture.get('class')}, which has no name in the zoo; join in Python and "
            "give it at full width: hetperm.join(folder, client, model=...)"
        )
    return build(config, {key: architecture[key] for key in ("in_channels", "num_classes", "image_size")})


def _check_model(model: nn.Module, w: Params, remedy: str) -> None:
    """Raise an error if a model does not have the trained parameters of the global model."""
    rehearsal.check_weights(model)
    own = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    there = {name: tuple(x.shape) for name, x in w.items()}
    for name in {**own, **there}:
        if own.get(name) != there.get(name):
            here, of_run = (shapes.get(name, "missing") for shapes in (own, there))
            raise ValueError(f"{name} is {here} in the model and {of_run} in the run; {remedy}")


def _setting_of(config: Config, manifest: dict[str, Any], model: nn.Module, *, cut: bool) -> Setting:
    """The setting of a run, without clients, from its configuration, the manifest of a client and the whole model."""
    if not all([isinstance(size, int) for size in manifest["input"]]):
        raise ValueError(
            "the run's model takes several inputs, and clients join only runs whose models take one; train another run "
            "with the newcomers in it"
        )
    dtype = getattr(torch, manifest.get("input_dtype", "float32"))
    example = torch.zeros(1, *manifest["input"], dtype=dtype)
    return setting.empty(model, config, example, dataset=manifest["dataset"], cut=cut)


def write(folder: Path, new: Joined) -> None:
    """Write the newcomer as one more client of the run folder: model, manifest, tables, page and checksums.

    It has joined once joined.safetensors names it. If writing fails before that, nothing of it stays.
    """
    records = joined.read(folder)
    manifest = client_models.read_manifest(folder, 0)
    for key in ("counts", "kept", "classes"):
        manifest.pop(key, None)
    manifest |= {
        "width": new.width,
        "alpha": new.alpha.tolist(),
        "joined": True,
        "made_of": new.made_of,
        **new.channels,
    }
    manifest |= {key: new.row[key] for key in ("tier", "group", "n_train", read_summary(folder).metric)}
    try:
        client_models.save_client(folder, new.client, new.model, manifest)
        joined.write(folder, [*records, Record(new.row, new.alpha, new.report.gradient, new.report.noise)])
    except OSError:
        client_models.remove(folder, new.client)
        raise
    try:
        joined.extend_tables(folder, trained=new.client - len(records))
        files.write(folder / page.NAME, page.render(folder))
        files.write_checksums(folder)  # last, as in every run: until then the folder is not whole
    except OSError as error:
        raise OSError(
            f"client {new.client} has joined {folder}, and not all files that show it could be written ({error}); "
            f"{joined.mending(folder)} completes them, and joining again would make it two clients"
        ) from error
