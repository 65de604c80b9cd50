"""``hetperm train``: read the configuration and flags, run once or for several seeds, and print the tables."""

from collections.abc import Sequence
from typing import Any

from hetperm import config as configuration
from hetperm.cli import console
from hetperm.cli.flags import FlagParser, UsageError
from hetperm.config import Config

# Title in --help -> fields of Config. The others, model_options and rivals, are tables of a file.
TOPICS = {
    "run": ("name", "out", "resume", "seed", "seeds", "algorithm", "baselines", "steps", "quiet"),
    "devices": ("capacity_profile", "widths_from", "num_clients", "participation", "trace"),
    "data": (
        *("dataset", "data_dir", "download", "partition", "samples_per_client", "validation_share", "image_size"),
        "label_mask",
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
        *("first_alpha", "alpha_every", "report_age", "sketch"),
    ),
    "computing": ("dtype", "device", "engine", "workers", "idle_models", "eval_every", "eval_finished"),
}
ABOUT = "Train every client's own model, compare with rivals, and write it all to a folder."
SEEDS_LOST = 1  # the exit status if the algorithm diverged with some of the seeds, and the others are aggregated
CONFIG_HELP = (
    "A TOML file, or the name of one that comes with hetperm (such as synthetic), read first: flags win; None: that of "
    "the data set's name, if it comes with hetperm. (default: None)"
)


def main(args: Sequence[str]) -> None:
    """Train once, or once for each seed, and print the tables."""
    config = parse_train(args)
    # Only now: --help and bad flags need not wait for torch.
    from hetperm.runs import experiment

    methods = (config.algorithm, *config.baselines)
    runs = max(1, len(config.seeds))
    with console.progress(methods, epochs=config.epochs, runs=runs, quiet=config.quiet) as bar:

        def on_start(setting: Any) -> None:
            # The bar comes second, or the lines would be printed into it.
            console.announce(setting)
            if bar:
                bar.start()

        if config.seeds:
            summary, results = experiment.sweep(config, on_epoch=bar, on_start=on_start)
            folder = results[0].folder.parent
        else:
            results = [experiment.run(config, on_epoch=bar, on_start=on_start)]
            summary, folder = results[0].summary, results[0].folder
    console.show(summary, results)
    console.say(f"written to {folder}: report.html, summary.json, pictures, and each client's model in models/")
    if len(results) < runs:
        raise SystemExit(SEEDS_LOST)


def parse_train(args: Sequence[str], *, base: Config | None = None, prog: str = "hetperm train") -> Config:
    """The configuration given by flags, on top of the file that --config names, or of `base`.

    Without either, flags change the configuration that is shipped for the data set, if there is one.
    """
    given = _parser(prog, Config()).read(args)
    if {"seed", "seeds"} <= given.keys():
        raise UsageError("--seed and --seeds exclude each other; leave one of them out")
    asked = given.pop("help", False)
    base = _base(given.pop("config", []), given.get("dataset", Config().dataset), base)
    # A second parser, because help shows the values that flags would change.
    if asked:
        _parser(prog, base).exit_with_help()
    if given.get("model", base.model) != base.model:
        given["model_options"] = {}  # those of the file belong to another model
    return base.override(**given)


def _parser(prog: str, defaults: Config) -> FlagParser:
    parser = FlagParser(Config, prog=prog, defaults=defaults, topics=TOPICS)
    parser.description = ABOUT
    parser.add_argument("--config", action="append", metavar="FILE", help=CONFIG_HELP)
    parser.flags.append("--config")
    return parser


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
    # A data set may hold a path (leaf:PATH), which must not lead to a file elsewhere.
    shipped = configuration.SHIPPED / f"{dataset}.toml"
    return configuration.load(shipped) if "/" not in dataset and shipped.is_file() else Config()
