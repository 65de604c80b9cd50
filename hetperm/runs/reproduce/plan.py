"""The plan of an experiment: its settings, methods and seeds, read from configs/reproduce. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetperm.advice import did_you_mean
from hetperm.config import FIELDS, SHIPPED, Config, known_algorithms, read
from hetperm.runs.reproduce.options import PATH_FLAGS, SEEDS, TUNING_SEEDS, Options
from hetperm.texts import shown

FOLDER = SHIPPED / "reproduce"
OF_A_SETTING = (
    "title",
    "grid",
    "seconds",
    "rivals",
    "methods",
    "budgets",
)  # keys of a setting that are no fields of Config


@dataclass(frozen=True)
class Case:
    """A setting of an experiment: data, clients, model and budget.

    Attributes:
        config: with the tuned values of every method; its seed is that of no cell.
        grid: the name of the grid that methods are tuned on.
        seconds: what a cell takes, about.
        methods: those that are run here; empty for all of the experiment.
    """

    name: str
    title: str
    config: Config
    grid: str = ""
    seconds: float = 10.0
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """An experiment, ready to run.

    Attributes:
        skipped: a sentence for everything that was left out, and why.
        table: the other keys of the experiment's file.
    """

    experiment: str
    cases: tuple[Case, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    options: Options
    skipped: tuple[str, ...] = ()
    table: Mapping[str, Any] = field(default_factory=dict)

    def methods_of(self, case: Case) -> tuple[str, ...]:
        """The methods of the plan that are run in a setting."""
        return tuple(name for name in self.methods if not case.methods or name in case.methods)


class NothingToRun(ValueError):
    """Every setting of an experiment needs data that no flag names."""


def read_plan(experiment: str, options: Options, *, tuning: bool = False) -> Plan:
    """The plan in an experiment's file, as flags change it; an error if all its settings are skipped."""
    path = FOLDER / f"{experiment}.toml"
    table = read(path, noun="an experiment")
    quick = table.pop("quick", {})
    quick = quick if options.quick else {}
    # A key that the file has at the top replaces it; all others are fields of every setting.
    table |= {key: value for key, value in quick.items() if key in table}
    changes = {key: value for key, value in quick.items() if key not in table} | _flags(options)
    defaults, settings = table.pop("defaults", {}), table.pop("settings")
    # The values that were tuned for another experiment serve its settings here too.
    values = options.tuned or FOLDER / "tuned" / f"{table.pop('tuned', experiment)}.toml"
    if options.tuned and not options.tuned.exists():
        raise ValueError(f"there is no file {options.tuned}; give --tuned a chosen.toml that `reproduce tune` wrote")
    tuned = read(values) if options.tuned or values.is_file() else {}
    if options.tuned:
        _check_tuned(values, tuned, settings)
    skipped, cases = [], []
    for name in _chosen("setting", options.settings, tuple(settings)):
        fields = {**defaults, **settings[name]}
        missing = [flag for flag in _placeholders(fields) if getattr(options, flag) is None]
        if missing:
            skipped.append(f"{name} is skipped: it needs --{missing[0]} PATH")
            continue
        try:
            cases.append(_case(name, fields, changes, tuned.get(name, {}), options, skipped))
        except ValueError as error:
            raise ValueError(f"{path}: [settings.{name}]: {error}") from error
    if not cases:
        raise NothingToRun(f"nothing to run; {'; '.join(skipped)}")
    listed = tuple(table.pop("methods", ("perm",)))
    methods = tuple(name for name in _chosen("method", options.methods, listed) if name in known_algorithms())
    skipped += [
        f"{name} is skipped: this version of hetperm has no such method"
        for name in set(listed) - set(known_algorithms())
    ]
    seeds = options.seeds or (TUNING_SEEDS if tuning else SEEDS)
    if options.quick and not options.seeds:
        seeds = seeds[:1]
    return Plan(experiment, tuple(cases), methods, seeds, options, tuple(sorted(set(skipped))), table)


def _check_tuned(path: Path, tuned: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise an error if a file of tuned values is none, or holds none of this experiment."""
    for name, tables in tuned.items():
        if not (isinstance(tables, Mapping) and all([isinstance(table, Mapping) for table in tables.values()])):
            raise ValueError(
                f"{path}: {name} is no table of methods, such as [{name}.local]; tuning writes chosen.toml"
            )
    if not tuned.keys() & settings.keys():
        held = ", ".join(map(shown, tuned)) or "nothing"
        raise ValueError(
            f"{path} holds values for {held} and none for {', '.join(settings)}; give --tuned another file"
        )


def _flags(options: Options) -> dict[str, Any]:
    """Fields of the configuration that flags change in every setting."""
    given = {"steps": options.steps, "data_dir": options.data_dir, "workers": options.workers}
    return {name: value for name, value in given.items() if value is not None}


def _placeholders(fields: Mapping[str, Any]) -> list[str]:
    """The flags that give the path of a data set, such as npz:{cifar10}.

    Example:
        >>> _placeholders({"dataset": "npz:{cifar10}"})
        ['cifar10']
    """
    flags = re.findall(r"\{(\w+)\}", fields.get("dataset", ""))
    unknown = set(flags) - set(PATH_FLAGS)
    if unknown:
        raise ValueError(f"dataset {fields['dataset']!r}: no flag --{unknown.pop()} gives a path")
    return flags


def _case(
    name: str,
    fields: Mapping[str, Any],
    changes: Mapping[str, Any],
    tuned: Mapping[str, Any],
    options: Options,
    skipped: list[str],
) -> Case:
    own = {key: fields[key] for key in OF_A_SETTING if key in fields}
    fields = {key: value for key, value in fields.items() if key not in OF_A_SETTING}
    if "dataset" in fields:
        fields["dataset"] = fields["dataset"].format(**{flag: getattr(options, flag) for flag in PATH_FLAGS})
    if fields.get("samples_per_client") == "all":  # TOML has no None
        fields["samples_per_client"] = None
    # Values written beside the setting win over those of the tuned file.
    tables = {**tuned, **own.get("rivals", {})}
    skipped += [
        f"[{method}] of {name} is left out: there is no such method" for method in set(tables) - set(known_algorithms())
    ]
    tables = {method: values for method, values in tables.items() if method in known_algorithms()}
    whole = Config().override(**fields, rivals=tables)
    # A change that a setting cannot have, such as samples of a set that is dealt out by nature, is not made.
    config = whole.override(**{key: value for key, value in changes.items() if not _natural(whole, key)})
    if config.metric not in (None, "accuracy"):
        raise ValueError(f"metric is {config.metric!r}; experiments rank methods by accuracy, so leave it out")
    if not config.steps:
        raise ValueError("steps is 0; a cell needs a budget that does not depend on another cell")
    scale = config.steps * config.num_clients / (whole.steps * whole.num_clients)
    return Case(
        name,
        own.get("title", name),
        config,
        own.get("grid", ""),
        own.get("seconds", 10.0) * min(1.0, scale),
        methods=tuple(own.get("methods", ())),
    )


def _natural(config: Config, key: str) -> bool:
    return key in ("num_clients", "samples_per_client") and config.partition in ("natural", "writer")


def _chosen(noun: str, wanted: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The names that were asked for, all if none were; an error for a name that the experiment has not."""
    for name in wanted:
        if name not in known:
            advice = did_you_mean(name, known, f"known are {', '.join(known)}")
            raise ValueError(f"unknown {noun} {name!r}; {advice}")
    return wanted or known


def variants(table: Mapping[str, Mapping[str, list]], config: Config) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """label -> the fields that an ablation changes, for values that are not the default; and sentences about others.

    Args:
        table: factor -> field -> values, such as {"visits at smaller hosts": {"nested": ["random", "skip"]}}.

    Example:
        >>> variants({"nested": {"nested": ["static", "skip"], "hosts": [1]}}, Config())
        ({'nested = skip': {'nested': 'skip'}}, ['hosts is skipped: this version of hetperm has no such field'])
    """
    changes, skipped = {}, []
    for fields in table.values():
        for name, values in fields.items():
            if name not in FIELDS:
                skipped.append(f"{name} is skipped: this version of hetperm has no such field")
                continue
            for value in values:
                try:
                    changed = config.override(**{name: value})
                except ValueError as error:
                    skipped.append(f"{name} = {value} is skipped: {error}")
                    continue
                if getattr(changed, name) != getattr(config, name):
                    changes[f"{name} = {value}"] = {name: value}
    return changes, skipped


def grid_file(name: str) -> Path:
    """The file that lists the values to try for every method."""
    return FOLDER / "grids" / f"{name}.toml"
