"""What a run writes to its folder: tables, models, pictures, and what depends on the clock."""

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hetperm
from hetperm.algorithms.perm import LOOK_AHEAD
from hetperm.report import page, pictures
from hetperm.report.summary import Summary
from hetperm.runs import client_models, files, memory, training
from hetperm.runs.machine import machine
from hetperm.runs.result import Result, manifest_of
from hetperm.runs.setting import Setting
from hetperm.runs.training import Trained
from hetperm.texts import one_line


def write_profile(setting: Setting, folder: Path) -> None:
    """Write the table of tiers, and what was odd about clients and sizes, if there is any."""
    if setting.profile:
        files.write_csv(folder / "profile.csv", setting.profile)
    if setting.warnings:
        files.write(folder / "warnings.txt", "".join(f"{one_line(text)}\n" for text in setting.warnings))


def write_tables(result: Result) -> None:
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


def _matrix(alpha: Tensor) -> Any:
    """Mixing weights as a numpy array, or as a scipy array if they are sparse."""
    alpha = _readable(alpha)
    if not alpha.is_sparse:
        return alpha.numpy()
    from scipy import sparse

    alpha = alpha.coalesce()
    return sparse.csr_array((alpha.values().numpy(), tuple(alpha.indices().numpy())), shape=tuple(alpha.shape))


def _readable(alpha: Tensor) -> Tensor:
    """Mixing weights in memory, without a gradient and in a precision that numpy and scipy have."""
    alpha = alpha.detach().cpu()
    lacks = alpha.dtype == torch.bfloat16 or (alpha.is_sparse and alpha.dtype == torch.float16)
    return alpha.float() if lacks else alpha


def save_models(result: Result) -> None:
    """Write every personal model to models/, with its manifest."""
    with files.synced_together():  # waiting for the disk after each of very many small files takes minutes
        for i in range(len(result.clients)):
            client_models.save_client(result.folder, i, result.model(i), manifest_of(result, i))


def draw(result: Result) -> None:
    """Write the pictures of a run."""
    folder, setting = result.folder, result.setting
    title = _title(result.summary)
    if result.alpha is not None:
        by = {"title": f"who learns from whom: {title}", "tiers": setting.tiers, "largest_first": setting.tier_names}
        alpha = _readable(result.alpha)
        if len(alpha) > pictures.LARGEST_MAP:
            weights = (alpha if alpha.is_sparse else alpha.to_sparse()).coalesce()
            entries = (*weights.indices().numpy(), weights.values().numpy())
            figure = pictures.neighbour_map(entries, setting.groups, **by)
        else:
            figure = pictures.alpha_map(alpha.to_dense().numpy(), setting.groups, **by)
        files.write(folder / "alpha.png", pictures.png(figure))
    table = result.state.memory.get(LOOK_AHEAD)
    if table is not None:
        shares, losses = table["shares"].tolist(), table["losses"].cpu().numpy()
        rows = _outlook_rows(shares, losses, table["partners"].tolist(), int(table["chosen"]))
        files.write_csv(folder / "look-ahead.csv", rows)
        figure = pictures.look_ahead(shares, losses, int(table["chosen"]), title=f"how much to share: {title}")
        files.write(folder / "look-ahead.png", pictures.png(figure))
    files.write(folder / f"{setting.metric.name}.png", pictures.png(_score_picture([result])))
    tiers = pictures.tiers(Summary.from_json(result.summary), result.clients, title=title)
    files.write(folder / "tiers.png", pictures.png(tiers))


def _outlook_rows(
    shares: Sequence[float], losses: np.ndarray, partners: Sequence[float], chosen: int
) -> list[dict[str, Any]]:
    """The rows of look-ahead.csv: for each candidate the mean loss, and how much more it is than alone.

    Args:
        losses: (C, M) the loss of each client that was asked, for every candidate.
        partners: (C,) their effective partners.
    """
    gains = losses - losses[:1]
    errors = gains.std(1) / np.sqrt(losses.shape[1])
    return [
        {
            "share": share,
            "partners": effective,
            "loss": loss,
            "minus_alone": gain,
            "standard_error": error,
            "chosen": int(k == chosen),
        }
        for k, (share, effective, loss, gain, error) in enumerate(
            zip(shares, partners, losses.mean(1).tolist(), gains.mean(1).tolist(), errors.tolist(), strict=True)
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


def timing(result: Result, seconds: float, pictures: float) -> dict[str, Any]:
    """The content of timing.json: everything that depends on the clock and the machine.

    Args:
        seconds: what the run took in this process.
        pictures: the part of it in which pictures were drawn.
    """
    config = result.setting.config
    methods = {result.main.method: result.main, **result.baselines}
    return {
        # The clock of this process misses the time before the run was resumed.
        "seconds": seconds + sum(method.seconds_before_resume for method in methods.values()),
        "seconds_by_method": {name: method.seconds for name, method in methods.items()},
        "evaluation_seconds_by_method": {name: method.evaluation_seconds for name, method in methods.items()},
        "picture_seconds": pictures,
        "peak_memory_mb": memory.peak_bytes() / memory.MB,
        "engine": result.setting.engine,
        "workers": config.workers,
        "device": config.device,
        "command": sys.argv,
        "machine": machine(),
        "versions": {"hetperm": hetperm.__version__, "python": platform.python_version(), "torch": torch.__version__},
    }


def write_sweep(folder: Path, summary: Mapping[str, Any], results: Sequence[Result], lost: Mapping[int, str]) -> None:
    """Write the tables and pictures over all seeds.

    Args:
        lost: when each seed without a result diverged, by seed.
    """
    files.write_json(folder / "summary.json", summary)
    rows = {result.summary["seed"]: _seed_row(result) for result in results}
    rows |= {seed: {"seed": seed, summary["algorithm"]: when} for seed, when in lost.items()}
    files.write_csv(folder / "seeds.csv", [rows[seed] for seed in summary["seeds"]])
    files.write_csv(folder / "clients.csv", [{"seed": r.summary["seed"], **row} for r in results for row in r.clients])
    files.write(folder / f"{summary['metric']}.png", pictures.png(_score_picture(results)))
    tiers = pictures.tiers(Summary.from_json(summary), title=_title(summary))
    files.write(folder / "tiers.png", pictures.png(tiers))
    files.write(folder / page.NAME, page.render(folder))
    files.write_checksums(folder)  # the last file, as in every run


def _seed_row(result: Result) -> dict[str, Any]:
    summary = result.summary
    methods = {summary["algorithm"]: summary, **summary["baselines"]}
    metric = summary["metric"]
    figures = {name: method.get("diverged") or method[metric]["mean"] for name, method in methods.items()}
    return {"seed": summary["seed"], **figures}
