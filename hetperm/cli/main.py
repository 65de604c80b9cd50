"""The command line: ``hetperm train`` and ``hetperm reproduce``. Imports torch only once there is something to run."""

import contextlib
import difflib
import io
import itertools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro

from hetperm import config as configuration
from hetperm.config import Config


class UsageError(ValueError):
    """A command line that was not understood; the message says what of it."""


@dataclass(frozen=True)
class TrainFlags(Config):
    """Train every client's own model, compare with rivals, and write it all to a folder."""

    config: Path | None = None
    """A TOML file, or the name of one that comes with hetperm (such as synthetic), read first: flags win; None: that of
    the data set's name, if it comes with hetperm."""

    def __post_init__(self):
        """Nothing: what a flag says is judged in a Config, whose errors name the field and not this class."""


def train(args: Sequence[str]) -> None:
    """Nothing; a run, or one for each seed, is written and its table printed."""
    _run(parse_train(args))


def parse_train(args: Sequence[str], *, base: Config | None = None, prog: str = "hetperm train") -> Config:
    """The configuration that flags stand for, on top of the file that --config names, or of ``base``.

    Without either it is the configuration that comes with hetperm for the data set, if there is one.
    """
    if {"--seed", "--seeds"} <= {arg.partition("=")[0] for arg in args}:
        raise UsageError("--seed and --seeds exclude each other; leave one of them out")
    named = _value_of("--config", args)
    if named is not None:
        base = configuration.load(named)
    elif base is None:
        dataset = _value_of("--dataset", args) or Config().dataset
        shipped = configuration.SHIPPED / f"{dataset}.toml"
        base = configuration.load(shipped) if "/" not in dataset and shipped.is_file() else Config()
    flags = parse(TrainFlags, args, prog=prog, default=TrainFlags(**vars(base)))
    settings = {each.name: getattr(flags, each.name) for each in fields(Config)}
    if flags.model != base.model:
        settings["model_options"] = {}  # they were those of another model
    return Config(**settings)


def reproduce(args: Sequence[str]) -> None:
    """Nothing; an experiment of the paper is run, and its figure and table are written."""
    from hetperm.runs import reproduce

    reproduce.main(args)


def report(args: Sequence[str]) -> None:
    """Nothing; report.html of a run's folder is written anew."""
    if len(args) != 1 or args[0] in ("-h", "--help"):
        usage = "usage: hetperm report FOLDER    write report.html anew from what a run's folder holds"
        if args and args[0] in ("-h", "--help"):
            print(usage)
            return
        raise UsageError(f"report takes one folder and got {len(args)}; {usage}")
    from hetperm.report import page
    from hetperm.runs import files

    files.write(Path(args[0]) / page.NAME, page.render(args[0]))
    say(f"written to {Path(args[0]) / page.NAME}")


def bench(args: Sequence[str]) -> None:
    """Nothing; speed is measured, or with ``resources`` first whether every tier bears its width."""
    if args and args[0] == "resources":
        from hetperm.bench.devices import command

        command.main(args[1:])
    else:
        from hetperm.bench.speed import command

        command.main(args)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "train": (train, "train personal models and compare with rivals"),
    "reproduce": (reproduce, "run an experiment of the paper, with all rivals and several seeds"),
    "report": (report, "write report.html of a run's folder anew"),
    "bench": (bench, "time rounds and epochs; hetperm bench resources: does every tier bear its width?"),
}


def main(args: Sequence[str] | None = None) -> None:
    """Nothing; the command is carried out, and the process ends with its status."""
    args = sys.argv[1:] if args is None else list(args)
    sys.exit(guarded(_dispatch, args))


def _dispatch(args: Sequence[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        lines = [f"  hetperm {name:10} {about}" for name, (_, about) in COMMANDS.items()]
        print("usage: hetperm COMMAND [FLAGS]\n", *lines, "\nhetperm COMMAND --help lists the flags.", sep="\n")
    elif args[0] == "--version":
        import hetperm

        print(f"hetperm {hetperm.__version__}")
    elif args[0] in COMMANDS:
        COMMANDS[args[0]][0](args[1:])
    else:
        close = difflib.get_close_matches(args[0], COMMANDS, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {args[0]!r}; {advice}")


def script(command: Callable[[Sequence[str]], None]) -> None:
    """Nothing; a script's command is carried out with its flags, and the process ends with its status."""
    sys.exit(guarded(command, sys.argv[1:]))


def guarded(command: Callable[[Sequence[str]], None], args: Sequence[str]) -> int:
    """The exit status of a command: 2 and one line on stderr for bad input or numbers that went non-finite."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        command(args)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ArithmeticError, RuntimeError) as error:
        if os.environ.get("HETPERM_TRACEBACK"):
            raise
        print(f"error: {one_line(str(error)) or type(error).__name__}", file=sys.stderr)
        return 2
    except MemoryError:
        advice = "if it is limited here (see ulimit -d and ulimit -v), raise the limit"
        print(f"error: out of memory; {advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on after the last epoch that was finished", file=sys.stderr)
        return 130
    return 0


def one_line(text: str) -> str:
    """`text` without line breaks."""
    return " ".join(text.split())


# Flags


def parse(kind: type, args: Sequence[str], *, prog: str, default: Any = tyro.MISSING_NONPROP) -> Any:
    """What flags stand for, as an instance of a dataclass; a `UsageError` of one line if they make no sense."""
    known = {f"--{each.name.replace('_', '-')}" for each in fields(kind)}
    for arg in args:
        flag = arg.partition("=")[0].replace("_", "-")
        if re.fullmatch("--[a-z].*", flag) and flag.replace("--no-", "--", 1) not in known | {"--help"}:
            close = difflib.get_close_matches(flag, known, n=1)
            raise UsageError(f"unknown flag {flag}; {f'did you mean {close[0]}?' if close else 'see --help'}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=list(args), prog=prog, default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_reason(said.getvalue())) from None


def _reason(box: str) -> str:
    """The first paragraph inside a box that tyro draws about an error, with lines or with dashes."""
    lines = [line.strip("│| ") for line in box.splitlines()[1:]]
    paragraphs = itertools.groupby(lines, key=lambda line: bool(line.strip("─-╰╯+ ")))
    text = one_line(next((" ".join(lines) for words, lines in paragraphs if words), "")).rstrip(".")
    for theirs, ours in _REWORDED:
        text = re.sub(theirs, ours, text)
    wrong, *known = re.findall(r"'([^']*)'", text) if "is not one of '" in text else [""]
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"{text or 'the flags make no sense'}; " + (f"did you mean {close[0]!r}?" if close else "see --help")


_REWORDED = (
    (r"^Error parsing (--\S+):", r"\1:"),
    (r"invalid literal for int\(\) with base 10: (.+)$", r"\1 is not a whole number"),
    (r"could not convert string to float: (.+)$", r"\1 is not a number"),
    (r"no type matching (\S+) could be instantiated from \[(.+)\]$", r"\2 is not one of \1"),
    (r"Could not find valid parse for arguments: \[(.+)\]$", r"\1 cannot be read"),
    (r"^invalid choice (.+) for argument '(.+)'\. Expected one of \((.+)\)$", r"\2: \1 is not one of \3"),
    (r"^Missing value for argument '(.+)'\. Expected .+$", r"\1: the value is missing"),
    (r"^Unrecognized options: ", r"not understood: "),
)


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    """The value given to a flag, or None; an error if there are two."""
    found = []
    for k, arg in enumerate(args):
        if arg == flag and k + 1 < len(args):
            found.append(args[k + 1])
        elif arg.startswith(f"{flag}="):
            found.append(arg.partition("=")[2])
    if len(found) > 1:
        raise UsageError(f"{flag} is given {len(found)} times ({', '.join(found)}); give it once")
    return found[0] if found else None


# Running


def _run(config: Config) -> None:
    from hetperm.runs import experiment

    methods = (config.algorithm, *config.baselines)
    runs = max(1, len(config.seeds))
    with progress(methods, epochs=config.epochs, runs=runs, quiet=config.quiet) as bar:

        def on_start(setting: Any) -> None:
            announce(setting)
            if bar:
                bar.start()

        if config.seeds:
            summary, results = experiment.sweep(config, on_epoch=bar, on_start=on_start)
            folder = results[0].folder.parent
        else:
            results = [experiment.run(config, on_epoch=bar, on_start=on_start)]
            summary, folder = results[0].summary, results[0].folder
    show(summary, results)
    say(f"written to {folder}: report.html, summary.json, pictures, and each client's model in models/")


def announce(setting: Any) -> None:
    """Nothing; what is going to be trained, and what each tier can afford, is printed."""
    from hetperm.engine import choose
    from hetperm.report import tables

    config = setting.config
    engine = choose(config.engine, config.workers, setting.clients, setting.shop)
    workers = f" with {config.workers} workers" if config.workers > 1 else ""
    say(f"{setting.description}; engine {engine}{workers}")
    if setting.profile:
        say(tables.profile_table(setting.profile, title=f"capacity profile {config.capacity_profile}"))


def show(summary: Mapping[str, Any], results: Sequence[Any]) -> None:
    """Nothing; the closing tables of a run, or of the aggregate of several, are printed."""
    from hetperm.report import tables
    from hetperm.report.contents import Summary
    from hetperm.runs.experiment import histories

    summary = Summary.from_json(summary)
    say(tables.closing_table(summary))
    if len(summary.tier_names) > 1:
        say(tables.tier_table(summary, [row for result in results for row in result.clients]))
    lines = tables.mixing_lines(summary) + tables.visit_lines(histories(results), summary.num_clients)
    lines += tables.paired_lines(summary)
    for line in lines:
        say(line)


def say(what: Any) -> None:
    """Nothing; a line or a table is printed, on as wide a page as it needs unless a terminal shows it."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(what, highlight=False, markup=False, soft_wrap=isinstance(what, str))


class Bar:
    """A progress bar, called after every epoch with the method and its metrics; it appears once work begins."""

    def __init__(self, method: str, total: int):
        from rich import progress as bars
        from rich.console import Console

        columns = [
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("epochs"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
        ]
        console = Console(stderr=True)
        # On a terminal only, and gone at the end: what stays on stderr are warnings and the one line of an error.
        self._bar = bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._first, self._total, self._task, self._last = method, total, None, ("", 0)

    def start(self) -> None:
        """Nothing; the bar is on the screen."""
        if self._task is None:
            self._task = self._bar.add_task(self._first, total=self._total)
            self._bar.start()

    def stop(self) -> None:
        """Nothing; the bar stays as it is."""
        if self._task is not None:
            self._bar.stop()

    def __call__(self, method: str, row: Mapping[str, Any]) -> None:
        self.start()
        found = row.get("tail_accuracy_mean", row.get("accuracy_mean", math.nan))
        description = method if math.isnan(found) else f"{method} {found:.3f}"
        before, r = self._last
        # A method that is gone on with comes with the epochs of before: they were never shown here.
        advance = row["epoch"] - r if method == before and row["epoch"] > r else row["epoch"]
        self._last = method, row["epoch"]
        self._bar.update(self._task, advance=advance, description=description)


@contextlib.contextmanager
def progress(methods: Sequence[str], *, epochs: int, runs: int, quiet: bool) -> Iterator[Bar | None]:
    """A context with a progress bar, or without one."""
    if quiet:
        yield None
        return
    bar = Bar(methods[0], total=len(methods) * epochs * runs)
    try:
        yield bar
    finally:
        bar.stop()
