"""report.html: what a run's folder holds on one page that needs nothing else, no network and no other file."""

import base64
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from hetperm.report import grid as grids
from hetperm.report import tables
from hetperm.report.tables import MB, Rows, Summary
from hetperm.runs import files
from hetperm.runs.files import missing

NAME = "report.html"
RESOURCES = "resources.json"


@dataclass(frozen=True)
class Contents:
    """What a run's folder holds; empty where it holds nothing.

    Attributes:
        config: the text of config.toml; `settings`: what it says.
        runs: the rows of clients.csv, seed by seed if the folder is that of several.
        metrics: one row per epoch.
        profile: one row per tier: what its devices have to bear.
        seeds: one row per seed, and `pages`: the address of each seed's own page, if it is there.
        images: name -> bytes of each PNG, in the order in which they are shown.
        resources: what the resource benchmark found (resources.json).
    """

    summary: Summary
    config: str
    settings: Mapping[str, Any]
    runs: Sequence[Rows]
    metrics: Rows
    profile: Rows
    seeds: Rows
    pages: Mapping[Any, str]
    images: Mapping[str, bytes]
    resources: Mapping[str, Any]

    @property
    def several(self) -> bool:
        return "seeds" in self.summary


def write(folder: Path | str) -> Path:
    """The path of report.html, written from the files of a run's folder, or of the folder of several seeds.

    The same files give the same bytes. What the folder does not hold is left out; without summary.json there is no run,
    but there may be a resource benchmark.
    """
    folder = Path(folder)
    alone = (folder / RESOURCES).is_file() and not (folder / "summary.json").is_file()
    files.write(folder / NAME, resources_page(folder) if alone else page(read(folder)))
    return folder / NAME


# What the folder holds


def read(folder: Path) -> Contents:
    """What there is to report; an error of one sentence if the folder holds no run."""
    summary = _summary(folder)
    config = folder / "config.toml"
    seeds = summary.get("seeds", [])
    of_seeds = [folder / f"seed-{seed}" for seed in seeds]
    pages = {seed: f"{each.name}/{NAME}" for seed, each in zip(seeds, of_seeds) if (each / NAME).is_file()}
    return Contents(
        summary=summary,
        config=_parsed(config, str, otherwise=""),
        settings=_parsed(config, tomllib.loads, otherwise={}),
        runs=_by_seed(_rows(folder / "clients.csv")),
        metrics=_rows(folder / "metrics.csv"),
        profile=next(filter(None, map(_profile, [folder, *of_seeds])), []),
        seeds=_rows(folder / "seeds.csv"),
        pages=pages,
        images=_images(folder),
        resources=_parsed(folder / RESOURCES, json.loads, otherwise={}),
    )


def _images(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"), key=_place)}


def _summary(folder: Path) -> Summary:
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no summary.json; name the folder of a run that has ended")
    summary = _parsed(path, json.loads, otherwise={})
    absent = [key for key in ("algorithm", "dataset", "num_clients", "accuracy", "cost") if key not in summary]
    if absent:
        raise ValueError(f"{path} has no {absent[0]!r}; it is not the summary of a run")
    return summary


def _parsed(path: Path, parse: Callable[[str], Any], *, otherwise: Any) -> Any:
    """What a file says, or ``otherwise`` if it is not there."""
    try:
        return parse(path.read_text(encoding="utf-8")) if path.is_file() else otherwise
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it or run again") from error


def _rows(path: Path) -> Rows:
    return files.read_csv(path) if path.is_file() else []


def _by_seed(rows: Rows) -> list[Rows]:
    runs: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row.get("seed"), []).append(row)
    return list(runs.values())


def _profile(folder: Path) -> Rows:
    """The rows of profile.json (a list, or under "tiers" a list or a table by name), or else of profile.csv."""
    found = _parsed(folder / "profile.json", json.loads, otherwise=None)
    if found is None:
        return _rows(folder / "profile.csv")
    found = found.get("tiers", []) if isinstance(found, Mapping) else found
    return [{"tier": name, **tier} for name, tier in found.items()] if isinstance(found, Mapping) else found


# The page


def page(run: Contents) -> str:
    """The whole page."""
    title = f"{run.summary['algorithm']} on {run.summary['dataset']}"
    return _document(title, about(run), (section for make in SECTIONS for section in make(run)))


def resources_page(folder: Path) -> str:
    """The whole page of a folder that holds a resource benchmark and no run."""
    found = _parsed(folder / RESOURCES, json.loads, otherwise={})
    run = Contents({}, "", {}, [], [], [], [], {}, images=_images(folder), resources=found)
    return _document(found.get("title", "Resources"), RESOURCES_LEAD, [*_resources(run), *_pictures(run)])


def _document(title: str, lead: str, sections: Iterable[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(lead)}</p>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def about(run: Contents) -> str:
    """What was run, in a sentence."""
    summary, settings = run.summary, run.settings
    profile = summary.get("capacity_profile", settings.get("capacity_profile"))
    rivals = list(summary.get("baselines", {}))
    against = f" against {_listed(rivals)}" if rivals else ""
    seeds = summary["seeds"] if run.several else [summary.get("seed", "-")]
    parts = [
        f"data {summary['dataset']}" + (f" ({settings['partition']})" if "partition" in settings else ""),
        f"{summary['num_clients']} clients",
        f"model {settings['model']}" if "model" in settings else "",
        f"capacity profile {profile}" if profile else "",
        f"{summary['epochs']} epochs" if "epochs" in summary else "",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
    ]
    return f"{summary['algorithm']}{against}: {', '.join(filter(None, parts))}."


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _methods(run: Contents) -> Iterator[str]:
    yield _heading("All methods")
    yield grids.html(tables.closing_grid(run.summary))
    yield _paragraph(
        "Accuracy is that of the models clients would use, on test data of their own kind; worst is the worst client; "
        "steps are local steps per client; MB is all that was sent, down and up."
    )
    lines = tables.paired_lines(run.summary)
    if lines:
        yield _paragraph("Seed by seed on the same data (mean accuracy, ± over seeds):")
        yield _list(lines)


def _tiers(run: Contents) -> Iterator[str]:
    if not tables.tier_names(run.summary):
        return
    yield _heading("By size of model")
    yield grids.html(tables.tier_grid(run.summary, [row for rows in run.runs for row in rows]))
    yield _paragraph(
        "A tier is a kind of device; width is the share of the full model's channels that a client of the tier trains."
    )


def _mixing(run: Contents) -> Iterator[str]:
    methods = tables.methods_of(run.summary).items()
    sentences = [mixing_sentence(name, method["alpha"], run) for name, method in methods if method.get("alpha")]
    if not sentences:
        return
    yield _heading("Who learns from whom")
    yield _paragraph(
        "Every client i has mixing weights alpha(i, j): how much of what it learns comes from client j, itself "
        "included; they sum to one. Effective partners are k if it learns from k clients alike."
    )
    yield _list(sentences)


def mixing_sentence(name: str, alpha: Summary, run: Contents) -> str:
    """What a method's mixing weights come to, beside what weights without any preference would come to."""
    places = [("same_group_mass", "group", "clients with the same kind of data (same-group mass{})")]
    if len(tables.tier_names(run.summary)) > 1:
        places.append(("same_tier_mass", "tier", "clients of the same tier (same-tier mass{})"))
    parts = [
        f"{alpha[key]:.3f} on {where.format(_by_chance(run.runs, column))}"
        for key, column, where in places
        if not missing(alpha.get(key))
    ]
    parts.append(f"{alpha['self_weight']:.3f} on the client itself")
    return (
        f"{name}: weight {_listed(parts)}; a client learns from {alpha['nonzero']:.1f} clients, itself included "
        f"({alpha['effective_partners']:.1f} effective partners)."
    )


def _by_chance(runs: Sequence[Rows], column: str) -> str:
    """The mass that equal weights would have on clients that agree in a column, if clients have it."""
    labels = [[row.get(column) for row in rows] for rows in runs]
    if not labels or any(None in each for each in labels):
        return ""
    mass = mean(sum(count**2 for count in Counter(each).values()) / len(each) ** 2 for each in labels)
    return f"; {mass:.3f} if all weights were equal"


def _pictures(run: Contents) -> Iterator[str]:
    if run.images:
        yield _heading("Pictures")
    for name, content in run.images.items():
        alt, caption = CAPTIONS.get(name, (f"Picture {name}", name))
        data = base64.b64encode(content).decode("ascii")
        yield (
            f'<figure>\n<img alt="{escape(alt)}" src="data:image/png;base64,{data}">\n'
            f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n"
        )


def _devices(run: Contents) -> Iterator[str]:
    if run.profile:
        yield _heading("What devices have to bear")
        yield grids.html(tables.row_grid(run.profile))


def _resources(run: Contents) -> Iterator[str]:
    """What the resource benchmark measured and had the operating system enforce."""
    if not run.resources:
        return
    yield _heading("Whether devices bear it: measured, under enforced limits")
    yield grids.html(tables.row_grid([_plain_row(row) for row in run.resources["tiers"]]))
    yield _list(run.resources["lines"])


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A tier without what the sentences below the table say."""
    return {key: value for key, value in row.items() if key != "reason"}


RESOURCES_LEAD = (
    "What training takes on the devices of a capacity profile: memory predicted and measured above the baseline of "
    "Python and torch, time on one thread, and whether each tier stays within its budget when the operating system "
    "enforces it."
)


def _seeds(run: Contents) -> Iterator[str]:
    if not run.several:
        return
    yield _heading("Seeds")
    if run.seeds:
        yield grids.html(
            tables.row_grid([_as_accuracies(row) for row in run.seeds], title="accuracy, mean over clients")
        )
    links = [f'<a href="{escape(address)}">seed {escape(str(seed))}</a>' for seed, address in run.pages.items()]
    if links:
        yield f"<p>Each seed has a page of its own: {', '.join(links)}.</p>\n"


def _as_accuracies(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if key == "seed" or missing(value) else f"{value:.3f}" for key, value in row.items()}


def _clients(run: Contents) -> Iterator[str]:
    if run.runs and not run.several:
        yield _heading("Clients")
        yield grids.html(tables.row_grid(run.runs[0]))


def _epochs(run: Contents) -> Iterator[str]:
    rows = [_epoch(row) for row in run.metrics]
    if rows:
        note = _paragraph(f"{run.summary['algorithm']}; figures are of the tail average once it has begun.")
        yield _details("Epoch by epoch", note + grids.html(tables.row_grid(rows)))


def _epoch(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of an epoch that a reader looks for first."""
    figures = [key for key in row if key.startswith("accuracy_tier_")]
    shown = {key: row.get(key) for key in ("epoch", "client_steps") if key in row}
    if not missing(row.get("bytes_down")) and not missing(row.get("bytes_up")):
        shown["mb"] = (row["bytes_down"] + row["bytes_up"]) / MB
    for key in ["accuracy_mean", "accuracy_worst", "loss_mean", *(figures if len(figures) > 1 else [])]:
        of_tail = row.get(f"tail_{key}")
        shown[key.replace("_tier_", "_")] = row.get(key) if missing(of_tail) else of_tail
    return shown


def _configuration(run: Contents) -> Iterator[str]:
    if not run.config:
        return
    if run.settings.get("dataset") != "own":  # data and model of one's own are in no file
        yield _heading("Run it again")
        yield "<pre><code>hetperm train --config config.toml</code></pre>\n"
        yield _paragraph("config.toml is the file beside this page; the numbers will be the same.")
    yield _details("Configuration", f"<pre><code>{escape(run.config)}</code></pre>\n")


SECTIONS = (_methods, _tiers, _mixing, _pictures, _devices, _resources, _seeds, _clients, _epochs, _configuration)

# name -> (what it shows, for those who cannot see it; how to read it), in the order in which they are shown
CAPTIONS = {
    "tiers.png": (
        "Bar chart of test accuracy by tier, one bar for each method",
        "Accuracy by tier, the largest models on the left; one bar for each method. Error bars are standard deviations "
        "over the tier's clients, or over seeds if there are several. Mind where the axis starts.",
    ),
    "alpha.png": (
        "Heat map of the mixing weights between all pairs of clients",
        "Who learns from whom: row i is a client, column j whom it learns from, and the brighter the cell, the more. "
        "Bright blocks on the diagonal are clients that learn from each other. If it is known which clients have the "
        "same kind of data (the algorithm never knows), thick lines part these groups and thin lines the tiers within. "
        "Grey strips, if there are several tiers, show a client's: the darker, the larger.",
    ),
    "accuracy.png": (
        "Lines of test accuracy against what was spent on training and on communication",
        "Accuracy against what it cost so far: the further up and to the left, the better. Bands are the spread over "
        "seeds, if there are several. A dashed line is a method that pays nothing of that cost.",
    ),
    "figure.png": (
        "Lines of test accuracy and test loss against what was spent",
        "Accuracy and loss against what they cost so far; for accuracy higher is better, for loss lower. Bands are the "
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
        "and to the left, the better. A round takes as long as its slowest host.",
    ),
}


def _place(path: Path) -> tuple[int, str]:
    names = list(CAPTIONS)
    return (names.index(path.name) if path.name in names else len(names)), path.name


# HTML


def _heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>\n"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>\n" for text in texts)
    return f"<ul>\n{items}</ul>\n"


def _details(title: str, content: str) -> str:
    return f"<details>\n<summary>{escape(title)}</summary>\n{content}</details>\n"


STYLE = """\
:root { color-scheme: light dark; --link: #0059a8;
  --ink: #1b1b1b; --paper: #ffffff; --faint: #5c5c5c; --line: #d5d5d5; --shade: #f4f4f4; }
@media (prefers-color-scheme: dark) {
  :root { --link: #7cb8f5;
    --ink: #e8e8e8; --paper: #17181a; --faint: #a9a9a9; --line: #3b3d40; --shade: #222427; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem 1.25rem 4rem; }
h1 { margin-bottom: 0.25rem; line-height: 1.2; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
a { color: var(--link); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); padding-bottom: 0.4rem; }
th, td { padding: 0.25rem 0.75rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { white-space: normal; vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0.25rem; }
tbody th { font-weight: normal; }
.strong th, .strong td { font-weight: bold; background: var(--shade); }
.note, figcaption { color: var(--faint); font-size: 0.875rem; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line); border-radius: 4px; }
pre { overflow-x: auto; padding: 0.75rem; background: var(--shade); font-size: 0.8125rem; line-height: 1.4; }
details { margin-top: 2rem; }
details > summary { cursor: pointer; font-weight: bold; }
"""
