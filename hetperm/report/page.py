"""report.html: a run folder on one page that needs no network and no other file."""

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import mean
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from hetperm.report import tables
from hetperm.report.contents import (
    MB,
    Contents,
    Mixing,
    Row,
    Rows,
    Summary,
    deployed,
    is_blank,
    read,
    seed_folders,
    tier_columns,
)

NAME = "report.html"


def render(folder: Path | str) -> str:
    """The page of a run folder, of the folder of several seeds, or of a resource benchmark.

    The same files give the same text. A section is left out if the folder lacks its file.
    """
    folder = Path(folder)
    contents = read(folder)
    parts = {**EMPTY, **_resource_parts(contents), "pictures": list(_pictures(contents.images))}
    if contents.summary is not None:
        # Last, so that the title of a run wins over that of a benchmark in the same folder.
        parts |= _run_parts(contents) | {"seed_pages": _seed_pages(folder, contents.summary)}
    # JSON can spell halves of characters, which no file can hold.
    return _template().render(parts).encode(errors="replace").decode()


@cache
def _template() -> Template:
    # Names of tiers, methods and datasets come from users: autoescape makes texts of them, never elements.
    # A name that the template misspells is an error, not an empty place on the page.
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


# The parts of page.html; an empty one is left out. StrictUndefined wants all of them by name.
EMPTY: Mapping[str, Any] = dict.fromkeys(
    "methods gains attendance tiers mixing profile resources several seeds seed_pages clients epochs config".split()
)


def _run_parts(contents: Contents) -> dict[str, Any]:
    summary, several = contents.summary, bool(contents.summary.seeds)
    clients = [row for rows in contents.clients for row in rows]
    return {
        "title": f"{summary.algorithm} on {summary.dataset}",
        "lead": about(contents),
        "algorithm": summary.algorithm,
        "methods": tables.closing_grid(summary),
        "gains": tables.paired_lines(summary),
        "attendance": tables.attendance_lines(summary),
        "tiers": tables.tier_grid(summary, clients) if summary.tier_names else None,
        "mixing": [mixing_sentence(name, alpha, contents) for name, alpha in summary.mixing.items()],
        "profile": tables.row_grid(contents.profile) if contents.profile else None,
        "several": several,
        "seeds": _seed_grid(contents.seeds) if contents.seeds else None,
        "clients": tables.row_grid(clients) if clients and not several else None,
        "epochs": tables.row_grid([_epoch(row) for row in contents.metrics]) if contents.metrics else None,
        "config": contents.config,
        "repeatable": contents.settings.get("dataset") != "own",  # a user's own data and model are in no file
    }


def _resource_parts(contents: Contents) -> dict[str, Any]:
    """The section of a resource benchmark, with a title and a lead for a page that shows no run."""
    if not contents.resources:
        return {}
    rows = [{key: value for key, value in row.items() if key != "reason"} for row in contents.resources["tiers"]]
    return {
        "title": contents.resources.get("title", "Resources"),
        "lead": RESOURCES_LEAD,
        "resources": tables.row_grid(rows),  # without reasons, which the lines below the table give
        "resource_lines": contents.resources["lines"],
    }


RESOURCES_LEAD = (
    "What training takes on the devices of a capacity profile: memory predicted and measured above the baseline of "
    "Python and torch, time on one thread, and whether each tier stays within its budget when the operating system "
    "enforces it."
)


# Sentences


def about(contents: Contents) -> str:
    """What was run, in a sentence."""
    summary, settings = contents.summary, contents.settings
    against = f" against {_listed(list(summary.baselines))}" if summary.baselines else ""
    seeds = summary.seeds or ["-" if summary.seed is None else summary.seed]
    parts = [
        f"data {summary.dataset}{_divided(contents)}",
        f"{summary.num_clients} clients",
        f"model {settings['model']}" if "model" in settings else "",
        f"capacity profile {summary.capacity_profile}" if summary.capacity_profile else "",
        "" if summary.epochs is None else f"{summary.epochs} epochs",
        f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}",
    ]
    return f"{summary.algorithm}{against}: {', '.join(filter(None, parts))}."


def _divided(contents: Contents) -> str:
    """How the data are divided: the partition, or for a user's own data how many samples there are."""
    if "partition" in contents.settings:
        return f" ({contents.settings['partition']})"
    samples = [row.get("n_train") for rows in contents.clients[:1] for row in rows]
    return f" ({int(sum(samples)):,} training samples)" if samples and None not in samples else ""


def mixing_sentence(method: str, alpha: Mixing, contents: Contents) -> str:
    """A sentence about a method's mixing weights, compared with what equal weights would give."""
    parts = []
    if not is_blank(alpha.same_group_mass):
        chance = _by_chance(contents.clients, "group")
        parts.append(f"{alpha.same_group_mass:.3f} on clients with the same kind of data (same-group mass{chance})")
    if not is_blank(alpha.same_tier_mass) and len(contents.summary.tier_names) > 1:
        chance = _by_chance(contents.clients, "tier")
        parts.append(f"{alpha.same_tier_mass:.3f} on clients of the same tier (same-tier mass{chance})")
    own, others, effective = (
        "-" if is_blank(value) else f"{value:.{digits}f}"
        for value, digits in ((alpha.self_weight, 3), (alpha.nonzero, 1), (alpha.effective_partners, 1))
    )
    parts.append(f"{own} on the client itself")
    return (
        f"{method}: weight {_listed(parts)}; a client learns from {others} clients, itself included "
        f"({effective} effective partners)."
    )


def _by_chance(runs: Sequence[Rows], column: str) -> str:
    """The weight that clients alike in a column would get if all weights were equal; empty if the column is unknown."""
    labels = [[row.get(column) for row in rows] for rows in runs]
    if not labels or any(None in of_run for of_run in labels):
        return ""
    # Each of the n clients with a label has mass n / N on them, and they are n / N of all clients.
    mass = mean(sum(count**2 for count in Counter(of_run).values()) / len(of_run) ** 2 for of_run in labels)
    return f"; {mass:.3f} if all weights were equal"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


# Seeds and epochs


def _seed_grid(rows: Rows) -> tables.Grid:
    return tables.row_grid([_as_accuracies(row) for row in rows], title="accuracy, mean over clients")


def _as_accuracies(row: Row) -> dict[str, Any]:
    # The columns are called after methods: `tables.cell` could not tell that their numbers are accuracies.
    # A text says that the method diverged.
    return {key: f"{value:.3f}" if key != "seed" and isinstance(value, float) else value for key, value in row.items()}


def _seed_pages(folder: Path, summary: Summary) -> dict[int, str]:
    """seed -> the address of its own page, for the seeds that have one."""
    pairs = zip(summary.seeds, seed_folders(folder, summary))
    return {seed: f"{of_seed.name}/{NAME}" for seed, of_seed in pairs if (of_seed / NAME).is_file()}


def _epoch(row: Row) -> dict[str, Any]:
    """The columns of an epoch that a reader looks for first."""
    shown = {key: row[key] for key in ("epoch", "client_steps") if key in row}
    if not is_blank(row.get("bytes_down")) and not is_blank(row.get("bytes_up")):
        shown["mb"] = (row["bytes_down"] + row["bytes_up"]) / MB
    for column in ("accuracy_mean", "accuracy_worst", "loss_mean"):
        shown[column] = deployed(row, column)
    by_tier = tier_columns(row)
    if len(by_tier) > 1:  # of a single tier it would be the mean again
        shown |= {f"accuracy_{tier}": deployed(row, column) for tier, column in by_tier.items()}
    return shown


# Pictures


def _pictures(images: Mapping[str, bytes]) -> Iterator[dict[str, str]]:
    """The pictures, the captioned ones first and in the order of their captions."""
    others = [name for name in images if name not in CAPTIONS]
    for name in [name for name in CAPTIONS if name in images] + others:
        alt, caption = CAPTIONS.get(name, (f"Picture {name}", name))
        yield {"alt": alt, "caption": caption, "base64": base64.b64encode(images[name]).decode("ascii")}


# name -> (text for those who cannot see the picture, how to read it), in the order in which they are shown
CAPTIONS = {
    "tiers.png": (
        "Bar chart of test accuracy by tier, one bar for each method",
        "Accuracy by tier, the largest models on the left; one bar for each method. Error bars are standard deviations "
        "over the tier's clients, or over seeds if there are several. The axis need not start at zero.",
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
        "How much to share, judged one step ahead: the mean loss of clients on their validation data after the first "
        "step that each candidate would lead to, as a difference to being alone. The lowest point was chosen; the band "
        "is the standard error over clients.",
    ),
    "accuracy.png": (
        "Lines of test accuracy against what was spent on training and on communication",
        "Accuracy against its cost so far: the further up and to the left, the better. Bands are the spread over "
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
        "and to the left, the better. A round takes as long as its slowest host.",
    ),
}
