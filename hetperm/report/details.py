"""The large files of a run folder, which only its page and a comparison need: histories, weights, curves of clients."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hetperm.report.contents import Contents, read_figures, read_settings, read_summary, seed_folders
from hetperm.report.fields import table
from hetperm.report.summary import Row, Rows, Summary
from hetperm.texts import shown

CLOCK = "timing.json"
CHOSEN = ("personal_lr", "global_lr")  # settings that a run fills in where a sweep leaves them open
OF_A_SEED = {"name", "out", "seed", "seeds"}  # settings that differ between a sweep and its seeds


@dataclass(frozen=True)
class Run:
    """One run, with one seed, as its folder holds it; a field is empty if the folder lacks the file.

    Attributes:
        histories: method -> its metrics, one row per epoch, the algorithm first.
        weights: (N, N) the mixing weights as (rows, columns, values) of those above zero; None if there are none.
        curves: one row per epoch and client.
        outlook: one row per candidate of the look ahead.
        clients: one row per client.
        warnings: what was odd about clients and their sizes.
        about: what timing.json says of the machine and the versions.
        models: client -> names of the files of its model, relative to the folder.
    """

    folder: Path
    summary: Summary
    histories: Mapping[str, Rows] = field(default_factory=dict)
    weights: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    curves: Rows = ()
    outlook: Rows = ()
    clients: Rows = ()
    warnings: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: Row = field(default_factory=dict)
    models: Mapping[int, Sequence[str]] = field(default_factory=dict)


def runs_of(folder: Path, contents: Contents) -> list[Run]:
    """The runs in a folder: itself, or one for each seed whose folder is there."""
    if contents.summary is None:
        return []
    if not contents.summary.seeds:
        return [read_run(folder, contents.summary, contents.settings)]
    homes = [home for home in seed_folders(folder, contents.summary) if (home / "summary.json").is_file()]
    summaries = [_of_this_sweep(home, read_summary(home), contents) for home in homes]
    # The configuration of a seed has its step sizes; that of the sweep has them only if they were given.
    pairs = zip(homes, summaries, strict=True)
    return [read_run(home, summary, read_settings(home) or contents.settings) for home, summary in pairs]


def _of_this_sweep(home: Path, summary: Summary, contents: Contents) -> Summary:
    """The summary of a seed's folder; an error if that holds another run than the one that the sweep tells of."""
    wanted = int(home.name.rpartition("-")[2])
    if summary.seed != wanted:
        raise ValueError(f"{home} holds a run with seed {summary.seed}; put back the one with seed {wanted}")
    settings, of_sweep = read_settings(home), contents.settings
    names = settings.keys() & of_sweep.keys()
    if "algorithm" in names:  # whole configurations, in which what is not set is left out
        names = (settings.keys() | of_sweep.keys()) - {name for name in CHOSEN if name not in of_sweep}
    for name in sorted(names - OF_A_SEED):
        if settings.get(name) != of_sweep.get(name):
            raise ValueError(
                f"{home} holds a run with {name} {shown(settings.get(name))}, and that of the sweep is "
                f"{shown(of_sweep.get(name))}; put back the one of this sweep"
            )
    return summary


def read_run(folder: Path, summary: Summary, settings: Mapping[str, Any]) -> Run:
    """The files of one run; a ValueError of one sentence names a file that cannot be read."""
    return Run(
        folder,
        summary,
        histories=_histories(folder, summary.algorithm),
        weights=_weights(folder, summary.num_clients),
        curves=read_figures(folder / "client_metrics.csv"),
        outlook=read_figures(folder / "look-ahead.csv"),
        clients=read_figures(folder / "clients.csv"),
        warnings=_lines(folder / "warnings.txt"),
        settings=settings,
        about=_about(folder / CLOCK),
        models=_models(folder, summary.num_clients),
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it or run again") from error


def _histories(folder: Path, algorithm: str) -> dict[str, Rows]:
    histories: dict[str, list[Row]] = {}
    for row in read_figures(folder / "metrics.csv"):
        histories.setdefault(algorithm, []).append(row)
    for row in read_figures(folder / "baselines.csv"):
        # The row of a method that diverged says so and has no figures.
        if not row.get("diverged"):
            histories.setdefault(str(row.get("method")), []).append(row)
    return histories


def _weights(folder: Path, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    dense, sparse = folder / "alpha.npy", folder / "alpha.npz"
    path = dense if dense.is_file() else sparse
    if not path.is_file():
        return None
    try:
        if path is dense:
            with path.open("rb") as file:  # np.load takes any other file for a pickle, and says how to trust it
                alpha = np.lib.format.read_array(file, allow_pickle=False)
            i, j = np.nonzero(alpha)
            shape, values = alpha.shape, alpha[i, j]
        else:
            from scipy.sparse import load_npz

            alpha = load_npz(path).tocoo()
            shape, i, j, values = alpha.shape, alpha.row, alpha.col, alpha.data
    except (ValueError, TypeError, IndexError, EOFError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it or run again") from error
    # Clients that joined later stand at the end, and are no part of the run.
    if len(shape) == 2 and shape[0] == shape[1] > count:
        here = (i < count) & (j < count)
        shape, i, j, values = (count, count), i[here], j[here], values[here]
    if shape != (count, count) or not np.issubdtype(values.dtype, np.floating) or not np.isfinite(values).all():
        raise ValueError(f"{path} holds no mixing weights of {count} clients; remove it or run again")
    return i, j, values.astype(float)


def _about(path: Path) -> Row:
    """What does not depend on the clock: equal runs on one machine have equal pages."""
    if not path.is_file():
        return {}
    try:
        content = table(json.loads(path.read_text(encoding="utf-8-sig")), "the whole file")
        flat = {key: content.get(key) for key in ("engine", "device")}
        flat |= table(content.get("machine", {}), "machine") | table(content.get("versions", {}), "versions")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it or run again") from error
    return {key: str(value) for key, value in flat.items() if value is not None}


def _models(folder: Path, count: int) -> dict[int, list[str]]:
    """client -> its model, its manifest, and what was exported of it."""
    files = [*folder.glob("models/*"), *folder.glob("export*/**/*")]
    by_name: dict[str, list[str]] = {}
    for path in sorted(path for path in files if path.is_file()):
        by_name.setdefault(path.name.partition(".")[0], []).append(path.relative_to(folder).as_posix())
    names = {i: f"client_{i:03d}" for i in range(count)}
    return {i: by_name[name] for i, name in names.items() if name in by_name}
