"""The command line: find the command, run it, exit with its status. Imports torch only when a command needs it."""

import errno
import importlib
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hetperm.advice import did_you_mean
from hetperm.cli import (
    bench,
    compare,
    deploy,
    examples,
    export,
    federate,
    join,
    node,
    reproduce,
    resources,
    serve,
    train,
    who,
)
from hetperm.cli.console import say
from hetperm.cli.flags import UsageError, folder_of
from hetperm.cli.streams import lasting
from hetperm.texts import one_line, printable, words_of

TORCH = (2, 6)  # the oldest version that works, as in pyproject.toml
HELP = """hetperm COMMAND --help lists the flags of a command, with examples.
With HETPERM_TRACEBACK=1 an error shows where in the code it comes from."""
FIVE = """\
Each client learns, at the size it can afford, from the clients worth learning
from. Five things to do:

  hetperm train             train 20 clients of five sizes on digits (a minute),
                            and write a report
  hetperm train --help      use your own data, devices, model and rivals: every
                            setting is a flag
  hetperm compare RUN RUN   put two runs on the same clients side by side
  hetperm bench resources   see whether a model fits each device, under memory
                            limits that the operating system enforces
  hetperm reproduce --help  repeat the experiments of the paper

hetperm --help lists all commands.
In Python: hetperm.fit(model, clients, config)"""
LONGEST = 200  # characters of a command line that are shown in an error
OFF = ("", "0")  # of HETPERM_TRACEBACK
LONGEST_ERROR = 1000  # characters of an error
STOPPED = "stopped; the same command with --resume goes on after the last epoch that was finished"
Command = Callable[[Sequence[str]], None]  # takes the words after its name


def report(args: Sequence[str]) -> None:
    """Write report.html of a run's folder again."""
    usage = "usage: hetperm report FOLDER"
    if args and args[0] in ("-h", "--help"):
        about = "Write report.html again from the other files of a run's folder."
        print(usage, about, examples.text("report"), sep="\n\n")
        return
    if len(args) != 1:
        raise UsageError(f"report takes one folder and got {len(args)}; {usage}")
    from hetperm.report import page
    from hetperm.runs import files

    path = folder_of(args[0]) / page.NAME
    with files.reading(path.parent):
        content = page.render(path.parent)
    files.write(path, content)
    say(f"written to {path}")


# Name of a command -> (what runs it, its line in --help)
COMMANDS: dict[str, tuple[Command, str]] = {
    "train": (train.main, "train personal models and compare with rivals"),
    "reproduce": (reproduce.main, "repeat an experiment with all rivals and seeds"),
    "export": (export.main, "write clients' models as files for their devices"),
    "report": (report, "write report.html of a run's folder again"),
    "compare": (compare.main, "put runs on the same clients side by side"),
    "join": (join.main, "add a new client to a finished run"),
    "who": (who.main, "show whom a client learns from, and why"),
    "federate": (federate.main, "run a federation of processes here (needs Flower)"),
    "deploy": (deploy.main, "write certificates, keys and start commands"),
    "serve": (serve.main, "run the server of a federation"),
    "node": (node.main, "take part in a federation with your data"),
    "bench": (bench.main, "measure the speed of rounds and epochs"),
    "bench resources": (resources.main, "check whether a model fits each device tier"),
}
RESUMED = (train.main, reproduce.main, serve.main)  # those with --resume


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit with its status."""
    _exit_with(_dispatch, sys.argv[1:] if args is None else list(args))


def script(command: Command) -> None:
    """Run the command of a script with the script's own arguments, and exit with its status."""
    _exit_with(command, sys.argv[1:])


def _exit_with(command: Command, args: Sequence[str]) -> NoReturn:
    if threading.current_thread() is threading.main_thread():  # no other thread may set what signals do
        for number, answer in ((signal.SIGINT, _interrupt), (signal.SIGTERM, _terminate)):
            if signal.getsignal(number) is not signal.SIG_IGN:  # what is ignored, as after nohup, stays so
                signal.signal(number, answer)
    sys.meta_path.insert(0, _NumpyFirst)
    status = guarded(command, args)
    if status > 128:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C while Python cleans up would show a traceback
    sys.exit(status)


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM; it ends as after Ctrl-C."""


_asked_to_stop: list[KeyboardInterrupt] = []  # by signals, in this process


def _interrupt(number: int, frame: Any) -> NoReturn:
    _stop(number, KeyboardInterrupt())


def _terminate(number: int, frame: Any) -> NoReturn:
    _stop(number, Terminated())


def _stop(number: int, by: KeyboardInterrupt) -> NoReturn:
    # A second one ends the process at once: in the middle of cleaning up it would show a traceback.
    signal.signal(number, signal.SIG_DFL)
    _asked_to_stop.append(by)
    raise by


def _dispatch(args: Sequence[str]) -> None:
    if not args:
        print(FIVE)
        return
    if args[0] in ("-h", "--help", "--version") and args[1:]:
        raise UsageError(f"{args[0]} goes with no other words; got {' '.join(args[1:])!r}")
    if args[0] in ("-h", "--help"):
        lines = [f"  hetperm {name:16} {about}" for name, (_, about) in COMMANDS.items()]
        print("usage: hetperm COMMAND [FLAGS]\n", *lines, f"\n{HELP}", sep="\n")
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


# Statuses


def guarded(command: Command, args: Sequence[str]) -> int:
    """The exit status of a command: 2 and one line on stderr for whatever went wrong, never a traceback."""
    logging.basicConfig(handlers=[_Warnings()], format="%(message)s", level=logging.WARNING)
    with lasting() as output:
        status = _status(command, args)
        if output is None:
            return status
        output.flush()
        # A closed pipe is no fault: its reader, such as head, has seen enough.
        if status == 0 and output.fault and not isinstance(output.fault, BrokenPipeError):
            return _refuse(f"the output could not be written ({output.fault.strerror}); all else was done")
        return status


class _Warnings(logging.Handler):
    """Prints warnings to the present stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(self.format(record)), file=sys.stderr)


def _status(command: Command, args: Sequence[str]) -> int:
    try:
        _check_place()
        for word in args:
            _check_encoding(word)
        command(args)
    except SystemExit as stop:
        if not _is_ours(stop):
            return _refuse(
                "code that is not of hetperm ended the command (SystemExit); let it return, or raise an error"
            )
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt as stop:
        return _say_stopped(stop, command, args)
    except Exception as error:  # the outermost handler: nothing that a user can feed ends in a traceback
        if _asked_to_stop:  # a package that was half imported made another error of it
            return _say_stopped(_asked_to_stop[0], command, args)
        if os.environ.get("HETPERM_TRACEBACK", "0") not in OFF:
            raise
        return _refuse(old_torch() or explained(error, args))
    except BaseException as error:  # what only code of a plugin raises, or lets out
        if os.environ.get("HETPERM_TRACEBACK", "0") not in OFF:
            raise
        return _refuse(f"code that is not of hetperm ended the command ({words_of(error)}); let it raise an Exception")
    return 0


def _is_ours(stop: SystemExit) -> bool:
    """Whether a command ended itself, and not a metric, loss or plugin that it called: then nothing was said of it."""
    place = stop.__traceback__
    while place is not None:
        module = place.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("hetperm", "argparse"):
            return False
        place = place.tb_next
    return True


class _NumpyFirst:
    """Imports numpy before torch does: torch would swallow a Ctrl-C that comes meanwhile, and go on without numpy."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            importlib.import_module("numpy")


def _check_place() -> None:
    """Raise an error if the current folder is gone: libraries look for their own files there, and end the process."""
    try:
        os.getcwd()
    except OSError as error:
        raise OSError(f"the current folder is gone ({error.strerror}); change to one that exists") from error


def _check_encoding(word: str) -> None:
    """Raise an error if a word is not UTF-8: files with such a name could be written and not read again."""
    try:
        word.encode()
    except UnicodeEncodeError as error:
        readable = word.encode(errors="surrogateescape").decode(errors="replace")
        raise ValueError(f"{readable!r} is not UTF-8; rename the file, or choose another name") from error


def _say_stopped(stop: KeyboardInterrupt, command: Command, args: Sequence[str]) -> int:
    print(str(stop) or _stopped(command, args), file=sys.stderr)  # some commands say how to go on themselves
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)  # the convention of shells


def _stopped(command: Command, args: Sequence[str]) -> str:
    """What is said of a command that was stopped: how to go on, where that is possible."""
    if command is _dispatch and args:
        command, _ = COMMANDS.get(args[0], (command, ""))
    return STOPPED if command in RESUMED else "stopped"


def _refuse(sentence: str) -> int:
    if len(sentence) > LONGEST_ERROR:  # it quotes what it was given; its beginning and its end say what is wrong
        sentence = f"{sentence[: LONGEST_ERROR // 2]} ... {sentence[-LONGEST_ERROR // 2 :]}"
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def explained(error: Exception, args: Sequence[str]) -> str:
    """An error in one line: what happened, where, and what to do."""
    text = one_line(str(error)) or type(error).__name__
    # A library that finds no room is an ImportError, and says so in words of the loader.
    no_room = "failed to map segment" in text and "not permitted" not in text
    if isinstance(error, MemoryError) or "can't allocate memory" in text or no_room:
        return (
            "out of memory; take fewer --workers, smaller batches or --idle-models disk; if it is limited here (see "
            "ulimit -d and ulimit -v), raise the limit"
        )
    if isinstance(error, OSError):
        return _environment(error, text)
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; `make setup`, or pip install with the packages of pyproject.toml, brings it"
    # Kinds of errors whose message explains them.
    if isinstance(error, ValueError | ArithmeticError | RuntimeError) and not isinstance(error, RecursionError):
        return text
    words = one_line(shlex.join(args))
    words = words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
    return f"{words}: unexpected {type(error).__name__} ({text}); HETPERM_TRACEBACK=1 shows where it comes from"


NO_SPACE = "free some space, or name a folder on another disk"
NOT_ALLOWED = "name a folder that you may read and write, or change its permissions"
REMEDIES = {
    errno.ENOSPC: NO_SPACE,
    errno.EDQUOT: NO_SPACE,
    errno.EACCES: NOT_ALLOWED,
    errno.EPERM: NOT_ALLOWED,
    errno.EROFS: NOT_ALLOWED,
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs",
    errno.EAGAIN: "take fewer --workers, or raise the limit of processes (ulimit -u)",
    errno.ENOMEM: "take fewer --workers, or close other programs",
}


def _environment(error: OSError, text: str) -> str:
    """An error of the operating system, with the remedy if it is known."""
    if error.errno is None:  # one of ours, which says what to do; only a full disk needs a word more
        cause = getattr(error.__cause__, "errno", None)
        return f"{text}; {NO_SPACE}" if cause in (errno.ENOSPC, errno.EDQUOT) else text
    where = "" if error.filename is None else f"{printable(os.fsdecode(error.filename))}: "
    advice = REMEDIES.get(error.errno)
    return f"{where}{one_line(error.strerror or text)}" + (f"; {advice}" if advice else "")


def old_torch() -> str | None:
    """A sentence if the installed torch is too old, else None."""
    from importlib import metadata

    try:
        version = metadata.version("torch")
        found = tuple(int(part) for part in version.split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):  # not there, which its own error says, or an odd name
        return None
    if found >= TORCH:
        return None
    wanted = ".".join(map(str, TORCH))
    return f"torch {version} is installed and hetperm needs {wanted} or newer; `pip install -U torch torchvision`"
