"""The command line: find the command, run it, exit with its status. Imports torch only when a command needs it."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hetperm.advice import did_you_mean
from hetperm.cli import bench, reproduce, resources, train
from hetperm.cli.console import say
from hetperm.cli.flags import UsageError

Command = Callable[[Sequence[str]], None]  # takes the words after its name


def report(args: Sequence[str]) -> None:
    """Write report.html of a run's folder anew."""
    usage = "usage: hetperm report FOLDER    write report.html anew from what a run's folder holds"
    if args and args[0] in ("-h", "--help"):
        print(usage)
        return
    if len(args) != 1:
        raise UsageError(f"report takes one folder and got {len(args)}; {usage}")
    from hetperm.report import page
    from hetperm.runs import files

    path = Path(args[0]) / page.NAME
    files.write(path, page.render(args[0]))
    say(f"written to {path}")


# Name of a command -> (what runs it, its line in --help)
COMMANDS: dict[str, tuple[Command, str]] = {
    "train": (train.main, "train personal models and compare with rivals"),
    "reproduce": (reproduce.main, "run an experiment of the paper, with all rivals and several seeds"),
    "report": (report, "write report.html of a run's folder anew"),
    "bench": (bench.main, "time rounds and epochs"),
    "bench resources": (resources.main, "does the model fit each device tier?"),
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit with its status."""
    args = sys.argv[1:] if args is None else list(args)
    sys.exit(guarded(_dispatch, args))


def script(command: Command) -> None:
    """Run the command of a script with the script's own arguments, and exit with its status."""
    sys.exit(guarded(command, sys.argv[1:]))


def _dispatch(args: Sequence[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        lines = [f"  hetperm {name:16} {about}" for name, (_, about) in COMMANDS.items()]
        print("usage: hetperm COMMAND [FLAGS]\n", *lines, "\nhetperm COMMAND --help lists the flags.", sep="\n")
        return
    if args[0] == "--version":
        import hetperm

        print(f"hetperm {hetperm.__version__}")
        return
    for words in (2, 1):  # the longer name first: `bench resources` is not `bench` with a word too many
        name = " ".join(args[:words])
        if name in COMMANDS:
            command, _ = COMMANDS[name]
            return command(args[words:])
    advice = did_you_mean(args[0], COMMANDS, f"known are {', '.join(COMMANDS)}")
    raise UsageError(f"unknown command {args[0]!r}; {advice}")


def guarded(command: Command, args: Sequence[str]) -> int:
    """The exit status of a command: 2 and one line on stderr for bad input or numbers that went non-finite."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        command(args)
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        # Python flushes stdout once more at exit, and would complain about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    # Kinds of errors whose message explains them. A kind that is caught nowhere here is a bug, and keeps its traceback.
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
        return 130  # 128 + SIGINT, the convention of shells
    return 0


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())
