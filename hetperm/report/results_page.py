"""The page of all results: docs/results.md, from results.json and the pictures of every experiment's folder."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError

from hetperm.report.fields import listing, table, word
from hetperm.texts import shown

ORDER = (
    "hetero",
    "natural",
    "budgets",
    "rates",
    "ablations",
    "alpha-maps",
    "scale",
    "synthetic",
    "cifar10",
    "femnist",
    "runtime",
)
TEMPLATE = "results.md"


@dataclass(frozen=True)
class Found:
    """The folder of an experiment that has results.

    Attributes:
        results: the content of results.json.
    """

    folder: Path
    results: dict[str, Any]

    @property
    def experiment(self) -> str:
        """The name of the experiment."""
        return self.results["experiment"]

    def image(self, name: str) -> str:
        """The name of a picture on the page, which tells experiments apart."""
        return f"{self.experiment}-{name}.png"


def read_all(runs: Path) -> list[Found]:
    """The latest folder of every experiment, in the order of the page; quick looks are no results and are left out."""
    latest: dict[str, Found] = {}
    for folder in sorted(runs.glob("reproduce-*"), key=_number):
        path = folder / "results.json"
        if path.is_file():
            found = Found(folder, _results(path))
            if not found.results["quick"]:
                latest[found.experiment] = found
    if not latest:
        raise ValueError(
            f"{runs} has no folder reproduce-* with results.json; run hetperm reproduce first, without --quick"
        )
    return [latest[name] for name in sorted(latest, key=_rank)]


def _results(path: Path) -> dict[str, Any]:
    """The content of results.json; a ValueError names the file and the field if it is something else."""
    try:
        content = dict(table(json.loads(path.read_text(encoding="utf-8")), "the whole file"))
        _plain_name(content.get("experiment"), "experiment")
        content.setdefault("quick", False)
        for picture in listing(content.get("pictures"), "pictures"):
            _plain_name(table(picture, "pictures").get("name"), "pictures.name")
        return content
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it or run again") from error


def _plain_name(value: Any, name: str) -> None:
    """Raise an error unless the value can be part of a file's name: a page must not reach into other folders."""
    if Path(word(value, name)).name != value:
        raise ValueError(f"{name!r} is {shown(value)}; it must be the name of a file, without its folder")


def _number(folder: Path) -> tuple[int, str]:
    """Where a folder comes among those of its experiment: reproduce-hetero before reproduce-hetero-2."""
    end = re.search(r"-(\d+)$", folder.name)
    return (int(end[1]) if end else 1, folder.name)


def _rank(experiment: str) -> int:
    return ORDER.index(experiment) if experiment in ORDER else len(ORDER)


def images(found: Sequence[Found]) -> dict[str, bytes]:
    """name -> bytes of every picture that the page shows."""
    return {
        each.image(picture["name"]): (each.folder / f"{picture['name']}.png").read_bytes()
        for each in found
        for picture in each.results["pictures"]
    }


def render(found: Sequence[Found]) -> str:
    """The page in Markdown. It shows no figure that is not in the folders."""
    loader = PackageLoader("hetperm", "report")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters["duration"] = duration
    template = environment.get_template(TEMPLATE)
    try:
        return template.render(experiments=found).rstrip() + "\n"
    except (TemplateError, TypeError) as error:
        names = ", ".join(str(each.folder / "results.json") for each in found)
        raise ValueError(f"one of {names} lacks a figure ({error}); run that experiment again") from error


def duration(seconds: float) -> str:
    """A time as people say it.

    Example:
        >>> duration(42), duration(600), duration(7300)
        ('42 s', '10 min', '2 h 2 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
