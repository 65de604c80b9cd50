"""From a run, on disk or in memory, to verified files for its clients' devices, each with a manifest."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetperm import __version__
from hetperm import config as configuration
from hetperm.advice import did_you_mean
from hetperm.config import OWN, Config
from hetperm.metrics import ACCURACY, metric_of
from hetperm.runs import checkpoint, client_models, files
from hetperm.runs.export import formats
from hetperm.runs.export.options import FOLDER, Options
from hetperm.runs.export.package import Data, Subject, subject_of
from hetperm.runs.export.verify import Check, Runtime, blocked_by, check
from hetperm.runs.origin import are_near, sampled
from hetperm.runs.placement import one_thread
from hetperm.runs.setting import problem_of
from hetperm.runs.training import checkpoint_file, checkpoint_folder
from hetperm.texts import shown

FORMAT = 1  # of the manifest

log = logging.getLogger(__name__)
OnClient = Callable[["Exported"], object]


@dataclass(frozen=True, eq=False)
class Exported:
    """What became of a client's model.

    Attributes:
        path: the file that was written; None if it is not good, which `check.fault` explains.
        size: bytes of the file.
        metric: the name of what `check` scored it by.
    """

    client: int
    tier: str
    width: float
    size: int
    check: Check
    path: Path | None
    metric: str = ACCURACY


def export_folder(
    folder: str | Path, options: Options, on_client: OnClient | None = None, data: Data | None = None
) -> list[Exported]:
    """Export models of a run's folder, or of a node's.

    Args:
        on_client: called after every client.
        data: those to verify on; each client's are made again from the run's configuration unless given.
    """
    folder = Path(folder)
    formats.check_extra(options.format)
    manifests = _chosen(folder, options)
    data = _data(folder, manifests, options) if data is None else data
    models = client_models.load_clients(folder, manifests)
    subjects = (subject_of(module, manifests[i], data, options) for i, module in models)
    return _export(subjects, options, options.out or folder / FOLDER, on_client)


def export_result(result: Any, manifest_of: Callable[[int], Mapping[str, Any]], options: Options) -> list[Exported]:
    """Export models of a `Result`, with the clients' data that it holds.

    Args:
        manifest_of: the manifest of a client's model.
    """
    formats.check_extra(options.format)
    out = options.out or (result.folder and result.folder / FOLDER)
    if out is None:
        raise ValueError("this result has no folder to write files to; name one: result.export(out=...)")
    setting = result.setting
    mask = setting.clients[0].classes  # all clients have one, or none
    num_classes = 0 if mask is None else len(mask)
    data = Data(setting.clients, setting.metric, num_classes, setting.preparation, setting.class_names)
    joined = _joined(result.folder, len(setting.clients))
    tiers = dict(enumerate(setting.tiers)) | {i: str(manifest.get("tier")) for i, manifest in joined.items()}

    def models() -> Iterator[tuple[nn.Module, Mapping[str, Any]]]:
        for i in _select(tiers, options, "this run"):
            if i in joined:
                whole = setting.shop.scalable or setting.shop.full.module
                yield client_models.load_client(result.folder, i, whole), joined[i]
            else:
                yield result.model(i).cpu(), {**manifest_of(i), "client": i}

    return _export((subject_of(*model, data, options) for model in models()), options, out)


def _joined(folder: Path | None, trained: int) -> dict[int, Mapping[str, Any]]:
    """Client -> the manifest of its model, of the clients that joined the run in a folder after it had ended."""
    if folder is None:
        return {}
    return {i: client_models.read_manifest(folder, i) for i in client_models.clients(folder) if i >= trained}


# Which models, and the data that belong to them


def _chosen(folder: Path, options: Options) -> dict[int, Mapping[str, Any]]:
    """Client -> the manifest of its model, of the clients that the options name."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; name the folder of a run, such as runs/digits-perm")
    numbers = client_models.clients(folder)
    if not numbers:
        seeds = sorted(path.parent.name for path in folder.glob("seed-*/models"))
        if seeds:
            raise ValueError(f"{folder} holds a run for each of {len(seeds)} seeds; name one: {folder / seeds[0]}")
        remedy = "name the folder of a run, such as runs/digits-perm"
        if (folder / "federation.json").is_file():
            remedy = "each node of a federation has its own: give `hetperm export` the folder of a node, on its machine"
        elif (folder / "node.toml").is_file():
            remedy = "this node gets one when its federation ends"
        elif (folder / "config.toml").is_file():
            remedy = f"finish the run: hetperm train --config {folder}/config.toml --out {folder} --resume"
        raise FileNotFoundError(f"there are no clients' models in {folder}; {remedy}")
    if options.client:  # the files of others need not be there
        return {i: client_models.read_manifest(folder, i) for i in options.client}
    manifests = {i: client_models.read_manifest(folder, i) for i in numbers}
    chosen = _select({i: str(manifest.get("tier")) for i, manifest in manifests.items()}, options, str(folder))
    return {i: manifests[i] for i in chosen}


def _select(tiers: Mapping[int, str], options: Options, where: str) -> list[int]:
    """The clients that the options name, out of client -> tier."""
    for i in options.client:
        if i not in tiers:
            numbers = sorted(tiers)
            raise ValueError(f"there is no client {i} in {where}; it has clients {numbers[0]} to {numbers[-1]}")
    names = list(dict.fromkeys(tiers.values()))
    if options.tier is not None and options.tier not in names:
        advice = did_you_mean(options.tier, names, f"it has {', '.join(names)}")
        raise ValueError(f"there is no tier {shown(options.tier)} in {where}; {advice}")
    if options.client:
        return list(options.client)
    return [i for i, tier in tiers.items() if options.tier in (None, tier)]


def _data(folder: Path, manifests: Mapping[int, Mapping[str, Any]], options: Options) -> Data:
    """The data of a run, made again from its configuration; an error if they are not those it was trained on."""
    path = folder / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.toml, which says what data to verify on; name a run's folder")
    try:
        config = configuration.load(path)
    except ValueError as error:
        wrote = next(iter(manifests.values()))["hetperm"]
        if wrote == __version__:
            raise
        raise ValueError(f"{error}; the run is of hetperm {wrote} and this is {__version__}: use that one") from error
    if config.dataset == OWN:
        raise ValueError(
            f"{folder} is a run of fit, whose data and model are in no file; export it in Python, from its result: "
            f"result.export(format={options.format!r})"
        )
    problem = problem_of(_relocated(config, options))
    for i, manifest in manifests.items():
        if manifest.get("joined"):
            continue  # its data are in no file
        n = problem.clients[i].n_train if i < len(problem.clients) else 0
        if n != manifest.get("n_train"):
            raise ValueError(
                f"client {i} of {folder} had {manifest.get('n_train')} training samples, and {config.dataset} gives it "
                f"{n} here; the data must be those of the run (--data-dir)"
            )
    known = checkpoint.told(checkpoint_file(checkpoint_folder(folder), config.algorithm)).get("inputs")
    if known and not are_near(known, sampled(problem.clients)):
        raise ValueError(
            f"{config.dataset} has other samples here than {folder} was trained on; the data must be those of the run "
            "(--data-dir)"
        )
    metric = metric_of(config.metric or problem.metric)
    return Data(problem.clients, metric, problem.num_classes, problem.preparation, problem.class_names)


def _relocated(config: Config, options: Options) -> Config:
    return config if options.data_dir is None else config.override(data_dir=options.data_dir)


# Files


def _export(
    subjects: Iterable[Subject], options: Options, out: Path, on_client: OnClient | None = None
) -> list[Exported]:
    """Convert, run, compare and write one model after the other."""
    exported, runtime = [], None
    files.check_place(out)
    _check_apart(out)
    with one_thread(), ExitStack() as stack:
        for subject in subjects:
            file = formats.converted(subject, options)
            if runtime is None:  # one for all files, because its start takes seconds
                runtime = stack.enter_context(Runtime(options.format, blocked_by(subject.module, options.format)))
            verdict = check(file, subject, options, runtime)
            if subject.source is not None:
                log.warning(
                    "client %d joined later; its file was run on data of client %d, from which it learns most",
                    subject.client,
                    subject.source,
                )
            elif subject.part == "train":
                log.warning("client %d has no validation data; its file was run on training data", subject.client)
            path = None if verdict.fault else _write(out, subject, options, file, verdict)
            exported.append(
                Exported(
                    client=subject.client,
                    tier=str(subject.model.get("tier")),
                    width=subject.model["width"],
                    size=len(file),
                    check=verdict,
                    path=path,
                    metric=subject.metric.name,
                )
            )
            if on_client:
                on_client(exported[-1])
    return exported


def _check_apart(out: Path) -> None:
    """Raise an error if a folder holds the files of a run, which no others may be put among."""
    whole = out.resolve()
    home = whole.parent if whole.name in ("models", "checkpoint") else whole
    if (home / "config.toml").is_file():
        raise ValueError(f"{out} holds the files of a run; name another folder, such as {home / FOLDER}")


def name_of(client: int, options: Options) -> str:
    """The name of a client's file.

    Example:
        >>> name_of(7, Options(format="onnx", precision="int8"))
        'client_007.int8.onnx'
    """
    precision = "" if options.precision == "float32" else f".{options.precision}"
    return f"client_{client:03d}{precision}.{formats.ENDING[options.format]}"


def _write(out: Path, subject: Subject, options: Options, file: bytes, verdict: Check) -> Path:
    """Write a file and its manifest; the manifest last, so that whoever finds one finds the file."""
    path = files.made(out) / name_of(subject.client, options)
    beside = path.with_name(f"{path.name}.json")
    beside.unlink(missing_ok=True)  # that of an older file
    files.write(path, file)
    files.write_json(beside, manifest(subject, options, file, verdict))
    return path


def manifest(subject: Subject, options: Options, file: bytes, verdict: Check) -> dict[str, Any]:
    """What a device needs to know about a file, as the manifest beside it holds it."""
    model, stored, prepared = subject.model, subject.stored, subject.preparation
    most = formats.LARGEST_BATCH if options.format == "executorch" else None
    pixels = prepared is not None and stored.dim() == 4
    names = list(subject.class_names) or None
    return {
        "format": FORMAT,
        "kind": options.format,
        "precision": options.precision,
        "hetperm": __version__,
        "torch": str(torch.__version__),
        "client": subject.client,
        **{key: model.get(key) for key in ("tier", "width", "architecture", "algorithm", "dataset", "seed", "group")},
        "input": {
            "name": formats.INPUT,
            "shape": ["n" if options.batch == "dynamic" else 1, *stored.shape[1:]],
            "largest_batch": 1 if options.batch == "one" else most,
            "dtype": str(stored.dtype).removeprefix("torch."),
            "values": {"smallest": 0, "largest": prepared.peak} if pixels else None,
        },
        # Done inside the file; for those who want to do it themselves with the weights of the run.
        "normalisation": None
        if prepared is None
        else {
            "peak": prepared.peak,
            **{key: _plain(getattr(prepared, key)) for key in ("mean", "std")},
        },
        "output": {"name": formats.OUTPUT, "dtype": "float32"},
        "class_names": names,
        "classes": None if subject.classes is None else subject.classes.nonzero().flatten().tolist(),
        subject.metric.name: model.get(subject.metric.name),
        "verified": {
            "on": subject.part,
            "of_client": subject.client if subject.source is None else subject.source,
            "samples": len(stored),
            "largest_difference": verdict.difference,
            "largest_output": verdict.scale,
            f"{subject.metric.name}_before": verdict.before,
            f"{subject.metric.name}_after": verdict.after,
            "ms": verdict.ms,
        },
        "bytes": len(file),
        "sha256": hashlib.sha256(file).hexdigest(),
    }


def _plain(figure: float | Tensor) -> list[float]:
    """The values of a tensor in as many digits as they have."""
    return [float(f"{value:.7g}") for value in torch.as_tensor(figure).flatten().tolist()]
