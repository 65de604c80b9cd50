"""``hetperm train``: read the configuration and flags, run once or for several seeds, and print the tables."""

import logging
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetperm import config as configuration
from hetperm.cli import console
from hetperm.cli.flags import FlagParser, UsageError, flag_of
from hetperm.config import Config
from hetperm.texts import shown

log = logging.getLogger(__name__)

# Title in --help -> fields of Config. The others, model_options and rivals, are tables of a file; --option sets single
# keys of them.
TOPICS = {
    "run": ("name", "out", "resume", "seed", "seeds", "algorithm", "baselines", "plugins", "steps", "quiet", "log"),
    "devices": ("capacity_profile", "widths_from", "num_clients", "participation", "trace"),
    "data": (
        *("dataset", "data_dir", "download", "partition", "samples_per_client", "validation_share", "image_size"),
        *("max_test_samples", "metric", "label_mask"),
    ),
    "model": ("model", "start", "personal_width", "extraction", "nested"),
    "training": (
        *("epochs", "local_steps", "batch_size", "personal_lr", "global_lr", "global_batch", "warmup", "warmup_rounds"),
        *("step_cap", "step_rule", "rate_rule", "decay", "visits", "schedule", "inplace_kd", "tail_average"),
        *("projection", "final_lr"),
    ),
    "local steps": (
        *("optimizer", "momentum", "weight_decay", "accumulate", "augment", "autocast", "lr_schedule", "lr_warmup"),
    ),
    "mixing": (
        *("server_mix", "discrepancy", "vc_weight", "regularization", "share", "noise_batches", "alpha_steps"),
        *("first_alpha", "early_report", "denoise", "alpha_every", "report_age", "sketch"),
    ),
    "computing": ("dtype", "device", "engine", "workers", "address", "idle_models", "eval_every", "eval_finished"),
}
OF_PERM = (  # fields that only perm and perm-two-stage read
    *(*TOPICS["mixing"], "personal_lr", "personal_width", "nested", "global_batch", "warmup", "warmup_rounds"),
    *("step_rule", "rate_rule", "decay", "visits", "schedule", "inplace_kd", "projection", "final_lr", "idle_models"),
)
ABOUT = "Train a model for each client, compare with rivals, and write everything to a folder."
SEEDS_LOST = 1  # the exit status if the algorithm diverged with some of the seeds, and the others are aggregated
CONFIG_HELP = (
    "A TOML file, or the name of one that comes with hetperm, such as synthetic. It is read first; flags change it. "
    "(default: the one named after the data set, if there is one)"
)
OPTION_HELP = (
    "Set an option of a method or of the model, such as ditto.prox=0.5 or model.hidden=[64,64]. It wins over the file, "
    "and may be given several times."
)


def main(args: Sequence[str]) -> None:
    """Train once, or once for each seed, and print the tables."""
    config = parse_train(args)
    # Only now: --help and bad flags need not wait for torch.
    from hetperm.runs import experiment

    if config.seeds:
        summary, results = experiment.sweep(config, on_start=console.announce)
        folder = results[0].folder.parent
    else:
        results = [experiment.run(config, on_start=console.announce)]
        summary, folder = results[0].summary, results[0].folder
    console.show(summary, results)
    console.say(f"written to {folder}: report.html, summary.json, pictures, and each client's model in models/")
    for line in next_steps(config, folder):
        console.say(line)
    if len(results) < max(1, len(config.seeds)):
        raise SystemExit(SEEDS_LOST)


def next_steps(config: Config, folder: Path) -> list[str]:
    """Where the report is, and what to try next."""
    again = [] if config.seeds else ["add --seeds 0 1 2 for the spread over seeds"]
    other = "mobile" if config.capacity_profile == "iot" else "iot"
    again.append(f"add --capacity-profile {other} for other devices")
    return [
        f"report: open {folder / 'report.html'} in a browser",
        f"next: {'; '.join(again)}; compare two runs: hetperm compare {folder} OTHER",
    ]


def parse_train(args: Sequence[str], *, base: Config | None = None, prog: str = "hetperm train") -> Config:
    """The configuration given by flags, on top of the file that --config names, or of `base`.

    Without either, flags change the configuration that is shipped for the data set, if there is one.
    """
    given = _parser(prog, Config()).read(args)
    if {"seed", "seeds"} <= given.keys():
        raise UsageError("--seed and --seeds exclude each other; leave one of them out")
    if "seed" in given:
        given["seeds"] = ()  # those of a file would replace it
    asked, options = given.pop("help", False), given.pop("option", [])
    base = _base(given.pop("config", []), given.get("dataset", Config().dataset), base)
    # A second parser, because help shows the values that flags would change.
    if asked:
        _parser(prog, base).exit_with_help()
    if given.get("model", base.model) != base.model:
        given["model_options"] = {}  # those of the file belong to another model
    of_perm = [flag_of(name) for name in given if name in OF_PERM]
    config = base.override(**_with_options(given, options, base))
    _check_options(options, config)
    methods = {config.algorithm, *config.baselines}
    if of_perm and methods <= {*configuration.ALGORITHMS} - {"perm", "perm-two-stage"}:
        log.warning("%s is for perm, which is not run: it decides nothing here", of_perm[0])
    return config


def _parser(prog: str, defaults: Config) -> FlagParser:
    parser = FlagParser(Config, prog=prog, defaults=defaults, topics=TOPICS)
    parser.description = ABOUT
    parser.add_argument("--config", action="append", metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--option", action="append", metavar="NAME.KEY=VALUE", help=OPTION_HELP)
    parser.flags += ["--config", "--option"]
    return parser


def _with_options(given: dict[str, Any], options: Sequence[str], base: Config) -> dict[str, Any]:
    """The given fields with the tables of options that --option changes."""
    tables = {name: dict(table) for name, table in base.rivals.items()}
    of_model = dict(given.get("model_options", base.model_options))
    before: set[tuple[str, str]] = set()
    for option in options:
        where, equals, value = option.partition("=")
        name, dot, key = where.strip().rpartition(".")
        if not (equals and dot and name and key):
            raise UsageError(f"--option: {option!r} is not NAME.KEY=VALUE, such as ditto.prox=0.5")
        if (name, key) in before:
            log.warning("--option %s.%s is given twice; the last one counts", name, key)
        before.add((name, key))
        table = of_model if name == "model" else tables.setdefault(name, {})
        table[key] = _toml(value)
    changed = {"rivals": tables, "model_options": of_model} if options else {}
    return given | {field: table for field, table in changed.items() if table != getattr(base, field)}


def _check_options(options: Sequence[str], config: Config) -> None:
    """Raise an error if --option names a method that the run does not have. A file may hold tables of others."""
    for option in options:
        name = option.partition("=")[0].strip().rpartition(".")[0]
        if name not in ("model", config.algorithm, *config.baselines):
            raise UsageError(f"--option: {option!r} is for {name}, which is not run; add it to --baselines")


def _toml(text: str) -> Any:
    """A value as TOML writes it; what is none is a text.

    Example:
        >>> _toml("0.5"), _toml("[64, 64]"), _toml("first-order")
        (0.5, [64, 64], 'first-order')
    """
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        return text.strip()
    if len(table) > 1:
        raise UsageError(f"--option: {shown(text)} holds several keys; give each an --option of its own")
    return table["value"]


def _base(files: Sequence[str], dataset: str, base: Config | None) -> Config:
    """The configuration that flags change."""
    if len(files) > 1:
        raise UsageError(f"--config is given {len(files)} times ({', '.join(files)}); give it once")
    if files and base is not None:
        raise UsageError("an experiment has the configuration of its name; leave --config out, flags can change it")
    if files:
        return configuration.load(files[0])
    if base is not None:
        return base
    # By what is there: a data set may hold a path (leaf:PATH), which must not lead to a file elsewhere.
    shipped = {file.stem: file for file in configuration.SHIPPED.glob("*.toml")}
    return configuration.load(shipped[dataset]) if dataset in shipped else Config()
