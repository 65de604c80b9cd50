"""The page of all results: docs/results.md, from results.json and the pictures of every experiment's folder."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

ORDER = ("hetero", "ablations", "alpha-maps", "scale", "synthetic", "cifar10", "femnist", "runtime")
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
            found = Found(folder, json.loads(path.read_text(encoding="utf-8")))
            if not found.results["quick"]:
                latest[found.experiment] = found
    if not latest:
        raise ValueError(
            f"{runs} has no folder reproduce-* with results.json; run hetperm reproduce first, without --quick"
        )
    return [latest[name] for name in sorted(latest, key=_rank)]


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
    return environment.get_template(TEMPLATE).render(experiments=found).rstrip() + "\n"


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
