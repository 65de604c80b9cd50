"""What a user's function is known by, so that a run that is resumed notices another one."""

import dis
import functools
import hashlib
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # others compile to other code
VERSIONED = ("torch", "torchvision", "hetperm")  # packages whose functions are what their names say
DEEPEST = 5  # of functions inside functions


def known_by(function: Any) -> list[str]:
    """The name of a function, a hash of what it does, and the Python for which that is so."""
    name = str(getattr(function, "__qualname__", type(function).__name__))
    return [name, hashlib.sha256(repr(_parts(function, DEEPEST)).encode()).hexdigest()[:16], PYTHON]


def are_same(was: Any, now: list[list[str]]) -> bool:
    """Whether functions are those that a checkpoint knows; by name alone if another Python wrote it."""
    if not isinstance(was, list) or len(was) != len(now):
        return False
    names = [[one[0] if isinstance(one, list) and one else one for one in these] for these in (was, now)]
    if names[0] != names[1]:
        return False
    # Earlier checkpoints know names only.
    return all([not isinstance(a, list) or a[2:] != b[2:] or a == b for a, b in zip(was, now, strict=True)])


def _parts(value: Any, depth: int) -> Any:
    """What decides what a value does, as far as it cannot change while a run goes on; else the name of its type."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if depth and isinstance(value, tuple):
        return tuple(_parts(one, depth - 1) for one in value)
    if depth and isinstance(value, functools.partial):
        given = [(key, _parts(one, depth - 1)) for key, one in sorted(value.keywords.items())]
        return "partial", _parts(value.func, depth - 1), _parts(value.args, depth - 1), given
    if depth and isinstance(value, MethodType):
        return _parts(value.__func__, depth - 1)
    if (getattr(value, "__module__", None) or "").partition(".")[0] in VERSIONED:
        return getattr(value, "__qualname__", type(value).__qualname__), _settings(value)
    if depth and isinstance(value, FunctionType):
        return "function", _code(value.__code__, depth - 1), _parts(value.__defaults__, depth - 1), _cells(value, depth)
    kind = type(value)
    called = next((getattr(kind, name) for name in ("forward", "__call__") if name in dir(kind)), None)
    is_users = depth and isinstance(called, FunctionType) and not isinstance(value, type)
    return kind.__qualname__, _parts(called, depth - 1) if is_users else None


def _settings(value: Any) -> dict[str, Any]:
    """The plain attributes of a torch loss, such as its label_smoothing; none of a function."""
    if isinstance(value, FunctionType | type):
        return {}
    own = getattr(value, "__dict__", {})
    return {key: x for key, x in own.items() if isinstance(x, int | float | str) and key != "training"}


def _code(code: CodeType, depth: int) -> Any:
    """What a function computes, without the names of its own variables and the lines it stands in."""
    inner = [_code(one, depth - 1) if isinstance(one, CodeType) and depth else _plain(one) for one in code.co_consts]
    return code.co_code, code.co_names, inner


def _plain(constant: Any) -> str:
    # A set has no order, and an inner function has a name that says where it stands.
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _cells(function: Callable[..., Any], depth: int) -> list[Any]:
    """What a function holds from around it, but for what it changes itself, such as a counter."""
    code = function.__code__
    changed = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF"}
    held = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            held.append(None if name in changed else _parts(cell.cell_contents, depth - 1))
        except ValueError:  # not there yet
            held.append(None)
    return held
