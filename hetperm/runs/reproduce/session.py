"""A session: the cells of an experiment one after the other, and the files that are made of their rows."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from hetperm.config import read
from hetperm.report import grid, pictures
from hetperm.report.comparison import Table
from hetperm.report.results_page import duration
from hetperm.report.summary import is_blank
from hetperm.runs import files
from hetperm.runs.machine import commit, machine
from hetperm.runs.reproduce.cells import Cell, Measure, Row, measured
from hetperm.runs.reproduce.plan import Plan

RESULTS = "results.json"
Say = Callable[[str], object]


class Session:
    """An experiment in its folder.

    Args:
        command: how it was started, without paths of this machine.
        say: called with a line about what happens.
    """

    def __init__(self, plan: Plan, folder: Path, *, command: str, say: Say):
        self.plan, self.folder, self.command, self._say = plan, folder, command, say
        self._done, self._total, self._seconds, self._expected = 0, 0, 0.0, 0.0
        self._left = 0.0  # expected seconds of cells that are not run yet
        self._commit = commit()
        self._results: dict[str, Any] = {
            "experiment": plan.experiment,
            "quick": plan.options.quick,
            "command": command,
            "seeds": list(plan.seeds),
            "machine": machine(),
            "commits": [],
            "untuned": untuned(plan),
            "skipped": list(plan.skipped),
            "tables": [],
            "pictures": [],
        }

    def expect(self, cells: Sequence[Cell], *, more: Sequence[Cell] = ()) -> None:
        """Say how much there is to run and how long it will take.

        Args:
            cells: those that are known.
            more: stand for cells that depend on the rows of others.
        """
        for sentence in self.plan.skipped:
            self._say(sentence)
        kept = [(cell, cell.kept(self.folder)) for cell in cells]
        for cell, row in kept:
            if row is not None:
                self._seconds += row["seconds"]
                self._expected += cell.seconds
        pending = [cell for cell, row in kept if row is None]
        self._total = len(cells) + len(more)
        self._left = sum(cell.seconds for cell in (*pending, *more))
        finished = f", {len(cells) - len(pending)} finished before" if len(pending) < len(cells) else ""
        self._say(f"{self.plan.experiment}: {self._total} cells{finished}; about {self._time_left()} to go")

    def _time_left(self) -> str:
        # Cells that are done say how fast this machine is; before that, the file's guess has to do.
        speed = self._seconds / self._expected if self._expected else 1.0
        return duration(self._left * speed)

    def run(self, cells: Sequence[Cell], measure: Measure) -> list[Row]:
        """The rows of cells, those that were run before from their files."""
        rows = []
        for cell in cells:
            row = cell.kept(self.folder)
            if row is None:
                row = measured(cell, measure, commit=self._commit)
                cell.keep(self.folder, row)
                self._seconds += row["seconds"]
                self._expected += cell.seconds
                self._left = max(0.0, self._left - cell.seconds)
                self._note(cell, row)
            self._done += 1
            rows.append(row)
        commits = {row["commit"] for row in rows if row["commit"]} | set(self._results["commits"])
        self._results["commits"] = sorted(commits)
        return rows

    def _note(self, cell: Cell, row: Row) -> None:
        if not self.plan.options.quiet:
            figure = _short(row)
            self._say(
                f"[{self._done + 1} of {max(self._total, self._done + 1)}] {cell.label}{figure and f': {figure}'} "
                f"({row['seconds']:.1f} s; about {self._time_left()} left)"
            )

    def skip(self, sentences: Sequence[str]) -> None:
        """Record what was left out, and why, and say it."""
        for sentence in dict.fromkeys(sentences):
            if sentence not in self._results["skipped"]:
                self._results["skipped"].append(sentence)
                self._say(sentence)

    def table(self, name: str, title: str, table: Table, rows: Sequence[Row], *, words: int = 1) -> None:
        """Write a table as NAME.md and NAME.csv, with what it was made of in results.json.

        Args:
            rows: the cells' rows that it was made of.
            words: how many of its columns at the left hold words.
        """
        seeds = sorted({row["seed"] for row in rows})
        entry = {"name": name, "title": title, "seconds": sum(row["seconds"] for row in rows), "seeds": seeds}
        text = grid.markdown(table.grid, words=words)
        files.write(self.folder / f"{name}.md", f"`{self.command}`\n\n{text}")
        files.write_csv(self.folder / f"{name}.csv", table.rows)
        self._record("tables", {**entry, "markdown": text})

    def picture(self, name: str, title: str, figure: Any) -> None:
        """Write a picture as NAME.png."""
        files.write(self.folder / f"{name}.png", pictures.png(figure))
        self._record("pictures", {"name": name, "title": title})

    def _record(self, kind: str, entry: Mapping[str, Any]) -> None:
        entries = self._results[kind]
        others = [each for each in entries if each["name"] != entry["name"]]
        # A table that is written again, with more rows, keeps its place.
        at = next((k for k, each in enumerate(entries) if each["name"] == entry["name"]), len(others))
        self._results[kind] = [*others[:at], entry, *others[at:]]
        files.write_json(self.folder / RESULTS, self._results)

    def end(self) -> None:
        """Write results.json also if there was nothing to show."""
        files.write_json(self.folder / RESULTS, self._results)


def untuned(plan: Plan) -> list[str]:
    """The settings in which some method has no values of its own, and those methods; empty if all were tuned."""
    found = []
    for case in plan.cases:
        methods = plan.methods_of(case)
        missing = [method for method in methods if method not in case.config.rivals]
        if missing:
            found.append(f"{case.title} ({'all' if missing == list(methods) else ', '.join(missing)})")
    return found


def _short(row: Mapping[str, Any]) -> str:
    """The figure of a cell that a line about it shows."""
    if row.get("diverged"):
        return "diverged"
    for figure in (row.get("val_accuracy"), (row.get("accuracy") or {}).get("mean")):
        if not is_blank(figure):
            return f"{figure:.3f}"
    mass = (row.get("alpha") or {}).get("same_group_mass")
    return "" if is_blank(mass) else f"mass {mass:.3f}"


@contextmanager
def opened(plan: Plan, *, prefix: str, command: str, say: Say) -> Iterator[Session]:
    """A context with the session of a plan, in its folder, which no other process may write to meanwhile."""
    options = plan.options
    name = f"{prefix}-{plan.experiment}"
    folder = files.run_folder(options.out, name, resume=options.resume)
    if not (options.resume and folder.exists()):
        folder = files.claim(options.out, name, resume=options.resume)
    elif (folder / "config.toml").is_file() and "settings" not in read(folder / "config.toml", noun="a plan"):
        raise FileExistsError(f"{folder} holds another kind of run; name another folder with --out")
    with files.locked(folder):
        files.tidy(folder)
        # Its presence tells a folder that can be resumed from any other.
        files.write(folder / "config.toml", _settings(plan))
        session = Session(plan, folder, command=command, say=say)
        yield session
        session.end()


def _settings(plan: Plan) -> str:
    """The resolved settings of a plan, one table each."""
    tables = {case.name: tomllib.loads(case.config.to_toml()) for case in plan.cases}
    return tomli_w.dumps({"methods": list(plan.methods), "seeds": list(plan.seeds), "settings": tables})
