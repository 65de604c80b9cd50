"""report.html: a run folder on one page that needs no network and no other file."""

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from hetperm.report import advice, charts, sentences, tables
from hetperm.report.contents import Contents, read, seed_folders
from hetperm.report.details import Run, runs_of
from hetperm.report.grid import transposed
from hetperm.report.summary import MB, Row, Rows, Summary, deployed, is_blank, tier_columns
from hetperm.report.tiles import of_run, of_tiers

NAME = "report.html"


def render(folder: Path | str) -> str:
    """The page of a run folder, of the folder of several seeds, or of a resource benchmark.

    The same files give the same text. A section is left out if the folder lacks its file.
    """
    folder = Path(folder)
    contents = read(folder)
    parts = {**EMPTY, **_resource_parts(contents), "pictures": list(_pictures(contents))}
    if contents.summary is not None:
        # Last, so that the title of a run wins over that of a benchmark in the same folder.
        parts |= _run_parts(contents, runs_of(folder, contents))
        parts["seed_pages"] = _seed_pages(folder, contents.summary)
    return filled("page.html", parts)


def filled(template: str, parts: Mapping[str, Any]) -> str:
    """A template of this folder with its parts, the style and the script filled in."""
    script = _text("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = [
        (name, label) for name, label in SECTIONS.items() if any(parts.get(part) for part in NEEDS.get(name, [name]))
    ]
    frame = {"style": Markup(_text("page.css")), "script": Markup(script), "script_hash": digest, "sections": sections}
    # JSON can spell halves of characters, which no file can hold.
    parts = {**frame, **parts, "data": _finite(parts["data"])}
    return _environment().get_template(template).render(parts).encode(errors="replace").decode()


def _finite(value: Any) -> Any:
    """What JSON can hold: a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# address on the page -> its name in the list of sections, if the part of that name, or one of those it needs, is there
SECTIONS = {
    "methods": "Methods",
    "tiers": "Tiers",
    "mixing": "Who learns from whom",
    "resources": "Does it fit?",
    "clients": "Clients",
    "cost": "Cost",
    "seeds": "Seeds",
    "pictures": "Pictures",
    "machine": "Machine",
}
NEEDS = {"cost": ["profile", "costs"], "seeds": ["several"]}


@cache
def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    # Names of tiers, methods and datasets come from users: autoescape makes texts of them, never elements.
    # A name that the template misspells is an error, not an empty place on the page.
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        loader=FunctionLoader(_text),
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and keys in their own order
    return environment


# The parts of page.html; an empty one is left out. StrictUndefined wants all of them by name.
EMPTY: Mapping[str, Any] = {
    **dict.fromkeys(
        "metric better methods gains attendance tiers mixing reasons profile costs resources several seeds seed_pages "
        "reason_table outcome tiles clients nodes epochs config advice notes machine".split()
    ),
    "data": {},
    "generator": "hetperm report",
}


def _run_parts(contents: Contents, runs: Sequence[Run]) -> dict[str, Any]:
    summary, several = contents.summary, bool(contents.summary.seeds)
    clients = [row for rows in contents.clients for row in rows]
    metric = summary.metric
    evidence = [evidence_of(run) for run in runs]
    data = charts.of(summary, runs)
    pairs = data["paired"]
    shown = [] if several else charts.shown_clients(clients, summary)
    return {
        "advice": advice.lines(evidence),
        "notes": list(dict.fromkeys(note for run in runs for note in (*run.warnings, *advice.notes(evidence_of(run))))),
        "reasons": sentences.reasons(runs),
        "reason_table": sentences.reason_grid(runs),
        "machine": runs[0].about if runs else None,
        "costs": tables.cost_grid(summary),
        "data": data,
        "title": sentences.title(summary),
        "lead": sentences.about(contents),
        "outcome": sentences.outcome(summary, pairs["rivals"], pairs["over"]),
        "tiles": of_run(summary, pairs["rivals"]),
        "algorithm": summary.algorithm,
        "metric": metric,
        "better": summary.better,
        "methods": tables.closing_grid(summary),
        "gains": sentences.gain_grid(
            pairs["rivals"], ours=summary.algorithm, over=pairs["over"], metric=metric, better=summary.better
        )
        if pairs["rivals"]
        else None,
        "attendance": tables.attendance_lines(summary),
        # Its heading on the page says the rest.
        "tiers": replace(tables.tier_grid(summary, clients), title="± over seeds" if several else "")
        if summary.tier_names
        else None,
        "mixing": [sentences.mixing_sentence(name, alpha, contents) for name, alpha in summary.mixing.items()],
        "profile": tables.row_grid(contents.profile) if contents.profile else None,
        "several": several,
        "seeds": _seed_grid(contents.seeds, metric) if contents.seeds else None,
        "clients": tables.row_grid(_known(shown), title=_worst(clients, shown), metric=metric) if shown else None,
        "nodes": tables.row_grid(contents.nodes) if contents.nodes else None,
        "epochs": _epoch_grid(contents.metrics, metric) if contents.metrics else None,
        "config": contents.config,
        # A user's own data and model, and the data of nodes, are in no file.
        "repeatable": not contents.nodes and tables.OWN not in (summary.dataset, contents.settings.get("dataset")),
    }


def _resource_parts(contents: Contents) -> dict[str, Any]:
    """The section of a resource benchmark, with a title and a lead for a page that shows no run."""
    if not contents.resources:
        return {}
    tiers = contents.resources["tiers"]
    # The verdict first, without reasons, which the lines below the table give; a column for each tier fits a page.
    keys = [key for key in _first(tiers[0], "tier", "width", "verdict") if key != "reason"] if tiers else []
    rows = _known([{key: row.get(key) for key in keys} for row in tiers])
    return {
        "outcome": _verdicts(tiers),
        "tiles": of_tiers(tiers),
        "title": contents.resources.get("title", "Resources"),
        "lead": RESOURCES_LEAD,
        "resources": transposed(tables.row_grid(rows)),
        "resource_lines": contents.resources["lines"],
    }


def _verdicts(tiers: Rows) -> str:
    """Which tiers the model fits, in a sentence."""
    by_verdict: dict[str, list[str]] = {}
    for row in tiers:
        by_verdict.setdefault(str(row.get("verdict")), []).append(str(row.get("tier")))
    if list(by_verdict) == ["fits"]:
        return "The model fits every tier at its width."
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items()) + "."


def _known(rows: Rows) -> list[Row]:
    """The rows without the columns in which none has a value."""
    keys = dict.fromkeys(key for row in rows for key in row)
    keys = [key for key in keys if not all([is_blank(row.get(key)) for row in rows])]
    return [{key: row.get(key) for key in keys} for row in rows]


def _first(row: Row, *keys: str) -> list[str]:
    """The keys of a row, these first."""
    return [*(key for key in keys if key in row), *(key for key in row if key not in keys)]


def _worst(clients: Rows, shown: Rows) -> str:
    if len(shown) == len(clients):
        return ""
    return f"the {len(shown)} worst clients of {len(clients)}; clients.csv has all"


def evidence_of(run: Run) -> advice.Evidence:
    """What advice is given by."""
    return advice.Evidence(run.summary, run.histories, run.clients, run.settings)


RESOURCES_LEAD = (
    "What training takes on the devices of a capacity profile: memory predicted and measured above the baseline of "
    "Python and torch, time on one thread, and whether each tier stays within its budget when the operating system "
    "enforces it."
)


# Seeds and epochs


def _seed_grid(rows: Rows, metric: str) -> tables.Grid:
    return tables.row_grid([_as_scores(row) for row in rows], title=f"{metric}, mean over clients")


def _as_scores(row: Row) -> dict[str, Any]:
    # The columns are called after methods: `tables.cell` could not tell that their numbers are of the metric.
    # A text says that the method diverged.
    return {key: f"{value:.3f}" if key != "seed" and isinstance(value, float) else value for key, value in row.items()}


def _seed_pages(folder: Path, summary: Summary) -> dict[int, str]:
    """seed -> the address of its own page, for the seeds that have one."""
    pairs = zip(summary.seeds, seed_folders(folder, summary))
    return {seed: f"{of_seed.name}/{NAME}" for seed, of_seed in pairs if (of_seed / NAME).is_file()}


def _epoch_grid(rows: Rows, metric: str) -> tables.Grid:
    return tables.row_grid([_epoch(row, metric) for row in rows], metric=metric)


def _epoch(row: Row, metric: str) -> dict[str, Any]:
    """The columns of an epoch that a reader looks for first."""
    shown = {key: row[key] for key in ("epoch", "client_steps") if key in row}
    if not is_blank(row.get("bytes_down")) and not is_blank(row.get("bytes_up")):
        shown["mb"] = (row["bytes_down"] + row["bytes_up"]) / MB
    for column in (f"{metric}_mean", f"{metric}_worst", "loss_mean"):
        shown[column] = deployed(row, column)
    by_tier = tier_columns(row, metric)
    if len(by_tier) > 1:  # of a single tier it would be the mean again
        shown |= {f"{metric}_{tier}": deployed(row, column) for tier, column in by_tier.items()}
    return shown


# Pictures


def _pictures(contents: Contents) -> Iterator[dict[str, str]]:
    """The pictures, the captioned ones first and in the order of their captions."""
    images, summary = contents.images, contents.summary
    metric, better = ("accuracy", "higher") if summary is None else (summary.metric, summary.better)
    words = {"metric": metric, "Metric": metric.capitalize(), "up": "up" if better == "higher" else "down"}
    captions = {name.format(**words): [text.format(**words) for text in pair] for name, pair in CAPTIONS.items()}
    others = [name for name in images if name not in captions]
    for name in [name for name in captions if name in images] + others:
        alt, caption = captions.get(name, (f"Picture {name}", name))
        yield {"alt": alt, "caption": caption, "base64": base64.b64encode(images[name]).decode("ascii")}


# name -> (text for those who cannot see the picture, how to read it), in the order in which they are shown; {metric} is
# what models are scored by
CAPTIONS = {
    "tiers.png": (
        "Bar chart of test {metric} by tier, one bar for each method",
        "{Metric} by tier, the largest models on the left; one bar for each method. Error bars are standard deviations "
        "over the tier's clients, or over seeds if there are several.",
    ),
    "alpha.png": (
        "Heat map of the mixing weights between all pairs of clients",
        "Who learns from whom: row i is a client, column j whom it learns from, and the brighter the cell, the more. "
        "Bright blocks on the diagonal are clients that learn from each other. If it is known which clients have the "
        "same kind of data (the algorithm never knows), thick lines separate these groups and thin lines the tiers "
        "within. Grey strips, if there are several tiers, show a client's tier: the darker, the larger.",
    ),
    "look-ahead.png": (
        "Line of the loss after one step against how much difference is shared",
        "How much to share, judged one step ahead: the mean validation loss of clients after one step with each "
        "candidate, minus the loss of learning alone. The ring is what was chosen: the candidate nearest to 0.7 among "
        "those as good as the lowest or, instead of leaving clients nearly alone, the best with four partners or more, "
        "unless that is worse by more than chance or by 4 %. The band is the standard error over clients.",
    ),
    "{metric}.png": (
        "Lines of test {metric} against what was spent on training and on communication",
        "{Metric} against its cost so far: the further {up} and to the left, the better. Bands are the spread over "
        "seeds, if there are several. A dashed line is a method that pays nothing of that cost.",
    ),
    "figure.png": (
        "Lines of test accuracy and test loss against what was spent",
        "Accuracy and loss against their cost so far; for accuracy higher is better, for loss lower. Bands are the "
        "spread over seeds. A dashed line is a method that pays nothing of that cost.",
    ),
    "resources.png": (
        "Memory, multiply-adds, time and accuracy against the width of the model",
        "What a width costs, and what it is worth. Pink bars are the tiers' budgets, black dashes the limits that were "
        "enforced; measured memory is that of a process above its baseline. A visit's time is simulated from "
        "multiply-adds, the tier's slow factor and its network.",
    ),
    "time_to_accuracy.png": (
        "Lines of test accuracy against simulated seconds and against what was sent",
        "Accuracy against the time that devices of the profile would have taken, and against traffic: the further up "
        "and to the left, the better. A round takes as long as its slowest host. Unless --epochs was raised, these "
        "runs are too short to say which method is best.",
    ),
}
