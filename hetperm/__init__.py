"""PERM for clients of unequal size: each learns, at the size it can afford, from the clients worth learning from.

Names are imported when first used, so that importing the package costs nothing.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "Config": "config",
    "run": "runs.experiment",
    "fit": "runs.experiment",
    "sweep": "runs.experiment",
    "Result": "runs.result",
    "Client": "client",
    "Cached": "shards",
    "load_client": "runs.client_models",
    "Metric": "metrics",
    "register_algorithm": "registry",
    "register_dataset": "registry",
    "register_model": "registry",
    "register_metric": "registry",
    "join": "runs.join",
}
_MODULES = {
    "mixing": "mixing",
    "shuffle": "server.shuffle",
    "discrepancy": "mixing.discrepancy",
    "complexity": "mixing.complexity",
}
__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str):
    if name in _HOME:
        globals()[name] = getattr(importlib.import_module(f"hetperm.{_HOME[name]}"), name)
        return globals()[name]
    if name in _MODULES:
        return importlib.import_module(f"hetperm.{_MODULES[name]}")
    raise AttributeError(f"module 'hetperm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
