"""Plugins: code from outside that registers algorithms, data sets, models or metrics. Imports no torch.

A plugin is a Python file (``my_file.py``) or a module that can be imported (``my_package.methods``), named by
``--plugins``; or a package that is installed with an entry point in the group "hetperm", which needs no flag. It is run
once, and what it registers (`hetperm.register_algorithm` and its kin) is known by name from then on.
"""

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from hetperm.texts import one_line, shown, words_of

LONGEST = 200  # characters of what went wrong inside a plugin

GROUP = "hetperm"  # of entry points
_files: dict[Path, ModuleType] = {}  # those that were run
_named: set[str] = set()  # those that were asked for
log = logging.getLogger(__name__)


def plugin(name: str, value: Any) -> str:
    """Run a plugin, unless it has been run; return its name. An error says what went wrong inside it."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} has {shown(value)}; it must be a Python file or the name of a module")
    module = module_of(value)
    if value not in _named and not _uses_us(module):
        log.warning("plugin %s registers nothing, as no file of it names hetperm; is another one meant?", shown(value))
    _named.add(value)
    return value


def _uses_us(module: ModuleType) -> bool:
    """Whether a file of a module, or of one inside it, names hetperm."""
    own = [one for name, one in [*sys.modules.items()] if f"{name}.".startswith(f"{module.__name__}.")]
    files = [Path(one.__file__) for one in own if getattr(one, "__file__", None)]
    return any([b"hetperm" in file.read_bytes() for file in files if file.is_file()])


def module_of(value: str) -> ModuleType:
    """The module of a plugin."""
    is_file = value.endswith(".py")
    if is_file and not Path(value).is_file():
        raise FileNotFoundError(f"there is no plugin {value!r}; name a Python file, or a module without .py")
    try:
        module = _run(Path(value).resolve()) if is_file else importlib.import_module(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's code can raise anything, and a script may end itself
        raise _refusal(shown(value), error, "leave it out") from error
    if not getattr(module, "__file__", None) and hasattr(module, "__path__"):
        raise ValueError(
            f"plugin {value!r} is a folder without __init__.py, so nothing of it is run; name a file in it"
        )
    return module


def _run(path: Path) -> ModuleType:
    if path not in _files:
        # In sys.modules, where pickle looks for the classes of what is sent to a worker.
        name = f"hetperm_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        _files[path] = module
    return _files[path]


@cache
def load_installed() -> None:
    """Load the plugins of installed packages, once."""
    for entry in metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise _refusal(f"{entry.name!r} ({entry.value})", error, "uninstall its package") from error


def _refusal(name: str, error: BaseException, otherwise: str) -> ValueError:
    words = one_line(words_of(error)).replace("got an unexpected keyword argument", "takes no argument")[:LONGEST]
    reason = f"{type(error).__name__}: {words}"
    return ValueError(f"plugin {name} cannot be loaded ({reason}); correct it, or {otherwise}")


def digests(plugins: Iterable[str]) -> dict[str, str]:
    """plugin -> a hash of its source, by which a run that is resumed knows whether it has changed."""
    sources = {name: getattr(module_of(name), "__file__", None) for name in plugins}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for name, file in sources.items() if file}
