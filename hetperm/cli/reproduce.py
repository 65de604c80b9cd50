"""``hetperm reproduce``: an experiment with all methods and seeds, their tuning, and the page of all results."""

import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hetperm.cli import console, examples
from hetperm.cli.flags import UsageError, parse
from hetperm.runs.reproduce.options import EXPERIMENTS, SEEDS, TUNED, TUNING_SEEDS, Options

ALL, PAGE, TUNE = "all", "page", "tune"
BUDGETED = ("hetero", "budgets")  # experiments that also give methods equal multiply-adds or bytes
USAGE = """usage: hetperm reproduce EXPERIMENT [FLAGS]
           run every method with every seed; write tables and pictures
       hetperm reproduce all [FLAGS]
           run all experiments, one after the other
       hetperm reproduce tune EXPERIMENT [FLAGS]
           choose the parameters of every method on validation data
           ({tuned})
       hetperm reproduce page [RUNS] [DOCS]
           write DOCS/results.md from the folders RUNS/reproduce-*

{experiments}

Settings, methods and grids are in configs/reproduce. The results go to
runs/reproduce-EXPERIMENT: tables (md, csv), pictures, results.json, and a file
for every finished cell, so that --resume continues after the last one. Seeds
are {seeds} unless --seeds says otherwise ({tuning} for tuning).
hetperm reproduce EXPERIMENT --help lists the flags.

{examples}"""


def main(args: Sequence[str]) -> None:
    """Run or tune the experiment that the arguments name, or write the page."""
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return
    if args[0] == PAGE:
        page(args[1:])
        return
    if args[0] == ALL:
        run_all(args[1:])
        return
    action, words = (tune, args[1:]) if args[0] == TUNE else (run, args)
    known = TUNED if action is tune else tuple(EXPERIMENTS)
    if not words or words[0] not in known:
        complaint = f"unknown experiment {words[0]!r}" if words else "which experiment?"
        raise UsageError(f"{complaint}; known are {', '.join(known)}")
    action(words[0], words[1:])


def _usage() -> str:
    width = max(map(len, EXPERIMENTS))
    indent = " " * (width + 4)
    lines = "\n".join(
        textwrap.fill(f"  {name:{width}}  {about}", 80, subsequent_indent=indent, break_on_hyphens=False)
        for name, about in EXPERIMENTS.items()
    )
    seeds, tuning = (", ".join(map(str, values)) for values in (SEEDS, TUNING_SEEDS))
    return USAGE.format(
        experiments=lines, tuned=", ".join(TUNED), seeds=seeds, tuning=tuning, examples=examples.text("reproduce")
    )


def run(experiment: str, args: Sequence[str]) -> None:
    """Run every cell of an experiment, and write tables and pictures."""
    options = parse(Options, args, prog=f"hetperm reproduce {experiment}")
    if options.budgets and experiment not in BUDGETED:
        raise UsageError(f"--budgets is for {' and '.join(BUDGETED)}; leave it out for {experiment}")
    _run(experiment, options)


def _run(experiment: str, options: Options) -> None:
    from hetperm.runs.reproduce.plan import read_plan

    plan = read_plan(experiment, options)
    from hetperm.runs.reproduce import experiments
    from hetperm.runs.reproduce.session import opened

    if not options.resume or (options.out is not None and not options.out.exists()):  # else few cells may be left
        experiments.check_data(plan)
    with opened(plan, prefix="reproduce", command=started_by(options), say=_line) as session:
        experiments.RUNS[experiment](session)
    console.say(f"written to {session.folder}: results.json, tables (md, csv), pictures, and every cell in cells/")


def run_all(args: Sequence[str]) -> None:
    """Run all experiments but those that lack their data. One that fails is named at the end, after the others."""
    options = parse(Options, args, prog="hetperm reproduce all")
    if options.out is not None:
        raise UsageError("--out names the folder of one experiment; leave it out, each has its own in runs/")
    if options.tuned is not None:
        raise UsageError("--tuned holds the values of one experiment; leave it out, each has its own")
    from hetperm.runs.reproduce.plan import NothingToRun

    wrong = []
    for name in EXPERIMENTS:
        try:
            _run(name, options)
        except NothingToRun as error:
            console.say(f"{name}: {error}")
        except (ValueError, OSError) as error:
            wrong.append(f"{name}: {error}")
            console.say(f"not run: {wrong[-1]}")
    if wrong:
        raise ValueError("; ".join(wrong))


def tune(experiment: str, args: Sequence[str]) -> None:
    """Run every point of the grids, and write the best point of each method on validation data."""
    options = parse(Options, args, prog=f"hetperm reproduce tune {experiment}")
    from hetperm.runs.reproduce.plan import read_plan

    plan = read_plan(experiment, options, tuning=True)
    from hetperm.runs.reproduce import experiments, tuning
    from hetperm.runs.reproduce.session import opened

    if not options.resume or (options.out is not None and not options.out.exists()):  # else few cells may be left
        experiments.check_data(plan)
    with opened(plan, prefix="tune", command=started_by(options), say=_line) as session:
        console.say(tuning.tune(session))
    console.say(
        f"written to {session.folder}: chosen.toml (for configs/reproduce/tuned/{experiment}.toml, or --tuned), "
        "tuning.csv (every point)"
    )


def page(args: Sequence[str]) -> None:
    """Write results.md, and the pictures it shows, from the folders of all experiments."""
    if args and args[0] in ("-h", "--help"):
        print(_usage())
        return
    if len(args) > 2:
        raise UsageError(f"page takes two folders, RUNS and DOCS, and got {len(args)}")
    runs, docs = (Path(word) for word in (*args, *("runs", "docs")[len(args) :]))
    from hetperm.report import results_page
    from hetperm.runs import files

    found = results_page.read_all(runs)
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    for name, content in results_page.images(found).items():
        files.write(images / name, content)
    files.write(docs / "results.md", results_page.render(found))
    console.say(f"written to {docs / 'results.md'}: {', '.join(each.experiment for each in found)}")


def started_by(options: Options | None = None) -> str:
    """The command that started this process, as it would be typed; with options, without paths of this machine."""
    program = Path(sys.argv[0]).name
    start = "python -m hetperm" if program == "__main__.py" else program
    start = f"python scripts/{program}" if start.endswith(".py") else start
    words = sys.argv[1:] if options is None else options.public(sys.argv[1:])
    return shlex.join([*start.split(), *words])


def _line(text: str) -> None:
    # At once: the output of hours may go to a file that somebody watches.
    print(text, flush=True)
