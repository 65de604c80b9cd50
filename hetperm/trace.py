"""Traces: TOML files that say which client is there in which round."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetperm.advice import did_you_mean
from hetperm.checks import path as checked_path
from hetperm.config import SHIPPED as CONFIGS
from hetperm.config import read
from hetperm.texts import shown

SHIPPED = CONFIGS / "traces"
KEYS = ("about", "clients")


def load(name: str | Path) -> tuple[str, ...]:
    """The text of each client in a TOML file, or in the shipped trace of that name; see `Presence.trace`.

    Example:
        >>> trace = load("day-night")
        >>> len(trace), {len(text) for text in trace}
        (100, {168})
    """
    path = _find(name)
    settings = read(path, noun="a trace")
    try:
        return _texts(settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _texts(settings: Mapping[str, Any]) -> tuple[str, ...]:
    for key in settings:
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}; {did_you_mean(key, KEYS, 'a trace has about and clients')}")
    texts = settings.get("clients")
    if not isinstance(texts, list) or not texts:
        raise ValueError("clients must be a list of texts, one for each client: 1 where it is there and 0 where not")
    for k, text in enumerate(texts):
        if not isinstance(text, str) or not text or set(text) - {"0", "1"}:
            raise ValueError(f"client {k} is {shown(text)}; it must be a text of 1 (there) and 0 (away), one a round")
        if len(text) != len(texts[0]):
            raise ValueError(f"client {k} has {len(text)} rounds and client 0 has {len(texts[0])}; give all as many")
    if not any(["1" in text for text in texts]):
        raise ValueError("nobody is ever there; write a 1 in the rounds in which a client takes part")
    return tuple(texts)


def _find(name: str | Path) -> Path:
    if not isinstance(name, str | Path):
        raise TypeError(f"the trace is {shown(name)}; it must be a name such as 'day-night', or a path")
    file = checked_path("the trace", name)
    if file.is_file():
        return file
    shipped = SHIPPED / f"{name}.toml"
    if "/" not in str(name) and shipped.is_file():
        return shipped
    names = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    advice = did_you_mean(str(name), names, f"give a TOML file, or one of {', '.join(names)}")
    raise ValueError(f"there is no trace {shown(str(name))}; {advice}")
