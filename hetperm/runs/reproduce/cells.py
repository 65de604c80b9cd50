"""Cells: one setting, one method, one seed. Each is run once, and its row is kept in a file of its own."""

import hashlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetperm.config import FIELDS, NOT_KEPT, Config
from hetperm.params import NotFinite
from hetperm.runs import files, training
from hetperm.runs.checkpoint import Saved
from hetperm.runs.placement import one_thread
from hetperm.runs.setting import Setting, from_config
from hetperm.runs.summary import mixing_of, summary_of
from hetperm.state import State

Row = dict[str, Any]
NO_NUMBER = (*NOT_KEPT, "name", "data_dir", "download", "device", "baselines", "algorithm", "seeds")  # they decide none


@dataclass(frozen=True)
class Cell:
    """What is run once.

    Attributes:
        case: the name of the setting.
        config: everything that decides the cell's numbers; the seed is its own.
        variant: tells cells of one setting, method and seed apart: a budget, a changed field, a point of a grid.
        seconds: what it takes, about.
    """

    case: str
    method: str
    config: Config
    variant: str = ""
    seconds: float = 10.0

    @property
    def seed(self) -> int:
        """The seed of the cell."""
        return self.config.seed

    @property
    def label(self) -> str:
        """The cell in words."""
        return " ".join(filter(None, [self.case, self.method, self.variant, f"seed {self.seed}"]))

    @property
    def file(self) -> Path:
        """The file of its row, inside the folder of an experiment.

        Example:
            >>> Cell("digits", "perm", Config(seed=3), "share = 0.7").file.as_posix()
            'cells/digits/perm_share-0.7_3.json'
        """
        words = [re.sub(r"[^\w.+-]+", "-", word) for word in (self.method, self.variant, str(self.seed)) if word]
        return Path("cells", self.case, f"{'_'.join(words)}.json")

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the row, so that a row of other settings is not taken for it."""
        settings = {name: getattr(self.config, name) for name in FIELDS if name not in (*NO_NUMBER, "rivals")}
        settings["dataset"] = settings["dataset"].partition(":")[0]  # where a file lies decides nothing
        text = repr([self.method, self.variant, sorted(self.config.rivals.get(self.method, {}).items()), settings])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def kept(self, folder: Path) -> Row | None:
        """The row of a cell that was run before; None if it was not, or with other settings."""
        path = folder / self.file
        if not path.is_file():
            return None
        row = json.loads(path.read_text(encoding="utf-8"))
        return row if row["fingerprint"] == self.fingerprint else None

    def keep(self, folder: Path, row: Mapping[str, Any]) -> None:
        """Write the row, so that the cell need not be run again."""
        path = folder / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, row)


Measure = Callable[[Cell], Mapping[str, Any]]  # the figures of a cell


def measured(cell: Cell, measure: Measure, *, commit: str | None = None) -> Row:
    """The row of a cell: its figures, what they are of, and how long it took."""
    began, cpu = time.perf_counter(), time.process_time()
    figures = measure(cell)
    return {
        "setting": cell.case,
        "method": cell.method,
        "variant": cell.variant,
        "seed": cell.seed,
        "steps": cell.config.steps,
        "num_clients": cell.config.num_clients,
        "fingerprint": cell.fingerprint,
        "commit": commit,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        **figures,
    }


# Settings

OF_THE_METHOD = (  # fields that a setting does not depend on: cells that differ only in these share it
    *("steps", "epochs", "local_steps", "personal_lr", "global_lr", "step_cap", "warmup", "warmup_rounds"),
    *("extraction", "nested", "personal_width", "server_mix", "inplace_kd", "step_rule", "schedule", "discrepancy"),
    *("vc_weight", "regularization", "share", "noise_batches", "alpha_steps", "sketch", "tail_average", "alpha_every"),
    "early_report",
    "denoise",
    *(
        "participation",
        "trace",
        "report_age",
        "projection",
        "final_lr",
        "eval_every",
        "eval_finished",
        "rivals",
        "algorithm",
        "baselines",
    ),
    *("visits", "name", "out", "resume", "quiet", "seeds"),
)


class Settings:
    """The setting of a configuration. The last one is remembered: cells that follow each other share data and model."""

    def __init__(self, build: Callable[[Config], Setting] = from_config):
        self._build, self._key, self._last = build, "", None

    def __call__(self, config: Config) -> Setting:
        key = repr([(name, getattr(config, name)) for name in FIELDS if name not in OF_THE_METHOD])
        if key != self._key:
            self._last, self._key = self._build(config), key
        return self._last.with_config(config)


# Figures


def last_epoch(setting: Setting, method: str) -> Saved:
    """A method after its last epoch, with as many steps as the configuration says."""
    # Closed even after an error: the generator holds an engine whose workers must end.
    with one_thread(), closing(training.epochs(setting, method, steps=setting.config.steps)) as epochs:
        (last,) = deque(epochs, maxlen=1)
    return last


def trained(setting: Setting, method: str, *, history: bool = False) -> tuple[dict[str, Any], State | None]:
    """The figures of a method on test data, and its last state. One that went non-finite has a sentence and no figures.

    Args:
        history: also keep one row of metrics per epoch.
    """
    try:
        saved = last_epoch(setting, method)
    except NotFinite as error:
        return {"diverged": str(error)}, None
    done = training.trained(setting, method, saved, None)
    figures = {"diverged": None, **summary_of(done, {}).main.to_json()}
    if history:
        figures["history"] = [_point(row) for row in saved.history]
    return figures, saved.state


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row of metrics that curves are made of."""
    kinds = ("accuracy_mean", "loss_mean", "tail_accuracy_mean", "tail_loss_mean")
    work = ("epoch", "rounds", "client_steps", "bytes_down", "bytes_up", "macs", "finished")
    return {name: row[name] for name in (*work, *kinds) if name in row}


def warmed_up(setting: Setting, method: str) -> tuple[dict[str, Any], State | None]:
    """Statistics of the mixing weights that a method starts with, after its warm-up, and that state."""
    from hetperm.engine import choice

    config = setting.config
    try:
        with one_thread(), choice.opened(setting.engine, config.workers, setting.clients, setting.shop) as engine:
            state = training.algorithm_for(setting, method, engine, steps=config.steps).begin()
    except NotFinite as error:
        return {"diverged": str(error)}, None
    alpha = mixing_of(setting, state.alpha)
    sizes = [setting.groups.count(group) for group in setting.groups] if setting.groups else []
    return {
        "diverged": None,
        "alpha": dict(vars(alpha)),
        "group_size": sum(sizes) / len(sizes) if sizes else None,  # as a client sees it
        "cost": state.work.figures,
    }, state


def write_matrix(path: Path, setting: Setting, state: State) -> None:
    """Write the mixing weights and the groups of a cell beside its row, for a picture."""
    alpha = state.alpha.to_dense().cpu().numpy()
    groups = np.array([] if setting.groups is None else setting.groups)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path.with_suffix(".npz"), lambda file: np.savez_compressed(file, alpha=alpha, groups=groups))
