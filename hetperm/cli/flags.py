"""Flags made from a dataclass: the names of its fields with dashes.

The type of a field says how its flag is read, and the docstring below it is the help. An error is one line that names
the flag and what it takes. Imports no torch.
"""

import argparse
import ast
import inspect
import logging
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin

from hetperm.advice import closest, did_you_mean
from hetperm.checks import COMMAS, choices_of, hints_of, members, path, split, unwrapped
from hetperm.cli import examples

log = logging.getLogger(__name__)

# type -> (its name in help, its name in an error)
TYPES = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    Path: ("PATH", "a path"),
    str: ("TEXT", "a text"),
}


class UsageError(ValueError):
    """A command line that was not understood; the message says which part of it."""


def parse(kind: type, args: Sequence[str], *, prog: str) -> Any:
    """An instance of the dataclass `kind`, filled from flags; --help prints the help and exits."""
    parser = FlagParser(kind, prog=prog, defaults=kind())
    given = parser.read(args)
    if given.pop("help", False):
        parser.exit_with_help()
    return kind(**given)


class FlagParser(argparse.ArgumentParser):
    """A parser with a flag for every field of a dataclass.

    Args:
        kind: the dataclass.
        defaults: an instance of it; help shows its values.
        topics: title -> fields, the groups that help lists flags in; None: one group of all fields.
    """

    def __init__(self, kind: type, *, prog: str, defaults: Any, topics: Mapping[str, Sequence[str]] | None = None):
        super().__init__(
            prog=prog,
            usage="%(prog)s [FLAGS]",
            description=_paragraph(kind.__doc__),
            epilog=examples.text(prog.removeprefix("hetperm ")),
            formatter_class=_Help,
            add_help=False,  # which defaults it shows may depend on the flags, so they are read first
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,  # only what was given is returned
            exit_on_error=False,
        )
        descriptions, hints = field_docstrings(kind), hints_of(kind)
        self.flags = []
        for title, names in (topics or {"flags": list(hints)}).items():
            group = self.add_argument_group(title)
            for name in names:
                self.flags.append(flag_of(name))
                about = _about(_paragraph(descriptions.get(name, "")), getattr(defaults, name), hints[name])
                group.add_argument(flag_of(name), dest=name, help=about.replace("%", "%%"), **_reading(hints[name]))
        self.add_argument("-h", "--help", action="store_true", help="show this help and exit")

    def read(self, args: Sequence[str]) -> dict[str, Any]:
        """Field -> value for the flags that were given; raises a `UsageError` if they make no sense."""
        try:
            given, rest = self.parse_known_args(_words(args))
        except argparse.ArgumentError as error:
            # Our own readers raise UsageError, so argparse is left with two complaints: a value is missing, or a switch
            # was given one. A switch has two names (--quiet/--no-quiet), which tells them apart.
            flag, *opposite = error.argument_name.split("/")
            reason = "it takes no value" if opposite else "the value is missing"
            raise UsageError(f"{flag}: {reason}; see --help") from None
        # Flags before other words: what follows an unknown flag is only its value.
        unknown = next((word.partition("=")[0] for word in rest if word.startswith("--")), None)
        if unknown:
            close = closest(unknown, self.flags)
            raise UsageError(f"unknown flag {unknown}; {f'did you mean {close}?' if close else 'see --help'}")
        if rest:
            raise UsageError(f"not understood: {' '.join(rest)}; see --help")
        return vars(given)

    def exit_with_help(self) -> NoReturn:
        """Print the help and exit."""
        self.print_help()
        sys.exit(0)


class _Help(argparse.HelpFormatter):
    """Help that never breaks a line at a hyphen, because words such as heterofl-ft are names; examples keep theirs."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


def flag_of(name: str) -> str:
    """The flag of a field.

    Example:
        >>> flag_of("local_steps")
        '--local-steps'
    """
    return f"--{name.replace('_', '-')}"


def field_docstrings(kind: type) -> dict[str, str]:
    """Field -> the docstring below it, read from the source because Python does not keep it."""
    try:
        (definition,) = ast.parse(inspect.getsource(kind)).body
    except OSError:  # installed without its source: flags work, and help is shorter
        return {}
    return {
        field.target.id: below.value.value
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


# Reading words


class _Read(argparse.Action):
    """Store the words after a flag, converted by `read`."""

    def __init__(self, *args: Any, read: Any, **options: Any):
        super().__init__(*args, **options)
        self._read = read

    def __call__(self, parser, namespace, words, option_string=None):
        # Some versions of argparse take "--" out of what was given, and leave an empty list.
        if words == []:
            words = "--" if self.nargs is None else ["--"]
        # Nothing is there before a flag is given. No error: wrappers put their own flags before those of a user.
        if hasattr(namespace, self.dest):
            log.warning("%s is given twice; the last one counts", self.option_strings[0])
        try:
            setattr(namespace, self.dest, self._read(words))
        except ValueError as error:
            raise UsageError(f"{self.option_strings[0]}: {error}") from None


def _reading(hint: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for a flag of this type."""
    kind, notes = unwrapped(hint)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if COMMAS in notes:
        return {"action": _Read, "read": split, "metavar": "NAME,NAME,..."}
    if get_origin(kind) is tuple:
        (item, _) = get_args(kind)
        return {
            "action": _Read,
            "read": lambda words: tuple(value_of(item, word) for word in words),
            "nargs": "+",
            "metavar": _metavar(item),
        }
    return {"action": _Read, "read": lambda word: value_of(kind, word), "metavar": _metavar(kind)}


def value_of(kind: Any, word: str) -> Any:
    """The value that a word stands for.

    Example:
        >>> value_of(float | None, "0.5"), value_of(float | None, "None")
        (0.5, None)
    """
    choices, types = choices_of(kind), [member for member in members(kind) if member in TYPES]
    if word in choices:
        return word
    if Path in types and not word.strip():
        raise ValueError("the path is empty; name a file or folder (. is this folder)")  # Path("") would be that one
    # Before the types: for `str | None`, the word None would be a text like any other.
    if word == "None" and NoneType in members(kind):
        return None
    for member in types:
        try:
            return member(word)
        except ValueError:
            pass
    wanted = [TYPES[member][1] for member in types]
    if choices:
        wanted.append(f"one of {', '.join(map(repr, choices))}")
    raise ValueError(f"{word!r} is not {' or '.join(wanted)}; {did_you_mean(word, choices, 'see --help')}")


def _metavar(kind: Any) -> str:
    types = [TYPES[member][0] for member in members(kind) if member in TYPES]
    choices = choices_of(kind)
    return "|".join([*types, f"{{{','.join(choices)}}}"] if choices else types)


UNSET = re.compile(r"(.*); None: (.*)\.")  # a docstring that says what None stands for


def _about(text: str, value: Any, hint: Any) -> str:
    """The help of a flag, with its default.

    Example:
        >>> _about("Side of images; None: as they are.", None, int | None), _about("A name.", None, str | None)
        ('Side of images. (default: as they are)', 'A name.')
    """
    unset = UNSET.fullmatch(text)
    if unset:
        text = f"{unset[1]}."
    if value is None:
        return f"{text} (default: {unset[2]})" if unset else text
    return f"{text} (default: {_shown(value, hint)})"


def _shown(value: Any, hint: Any) -> str:
    """A default as it would be typed; of a switch whether it is on."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, tuple):
        return str(value)
    _, notes = unwrapped(hint)
    return ("," if COMMAS in notes else " ").join(map(str, value)) or "none"


def _words(args: Sequence[str]) -> list[str]:
    """The arguments as argparse should see them.

    Example:
        >>> _words(["--local_steps=3", "--vc-weight", "-1e-3", "a_b"])
        ['--local-steps=3', '--vc-weight=-1e-3', 'a_b']
    """
    words: list[str] = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        if flag.startswith("--"):
            words.append(f"{flag.replace('_', '-')}{equals}{value}")  # fields have underscores, and so may flags
        elif _is_negative(arg) and words and words[-1].startswith("--"):
            words[-1] += f"={arg}"  # argparse would take -1e-3 for a flag
        else:
            words.append(arg)
    return words


def _is_negative(word: str) -> bool:
    """Whether a word is a number with a minus, such as -1e-3 or -inf."""
    try:
        float(word)
    except ValueError:
        return False
    return word.startswith("-")


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def read_run(prog: str, kind: type, args: Sequence[str]) -> tuple[Path, object]:
    """The folder of a run, the first word, and the options of the flags after it; --help prints the help and exits."""
    parser = FlagParser(kind, prog=prog, defaults=kind())
    parser.usage = f"{prog} RUN [FLAGS]"
    words = list(args)
    folder = words.pop(0) if words and not words[0].startswith("-") else None
    given = parser.read(words)
    if given.pop("help", False):
        parser.exit_with_help()
    if folder is None:
        raise UsageError(f"which run? {prog} RUN takes the folder of one")
    return folder_of(folder), kind(**given)


def folder_of(word: str) -> Path:
    """The folder that a word of a command names."""
    return path("the folder", value_of(Path, word))
