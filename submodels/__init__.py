"""submodels: make any PyTorch model width-scalable.

A `ScalableModel` wraps an unmodified `nn.Module` and cuts real, smaller modules out of it at any width, by any
extractor, and writes them back. Names are imported when first used, so that importing the package costs nothing.
"""

import importlib

_HOME = {
    "ScalableModel": "scalable",
    "Submodel": "scalable",
    "AxisMap": "axismap",
    "ChannelGroup": "axismap",
    "Static": "extractors",
    "Random": "extractors",
    "Rolling": "extractors",
    "Importance": "extractors",
    "IndexSet": "indexset",
    "Whole": "indexset",
    "WHOLE": "indexset",
    "average": "averaging",
    "Budget": "budget",
    "Cost": "cost",
    "recalibrate": "norms",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        globals()[name] = getattr(importlib.import_module(f"submodels.{_HOME[name]}"), name)
        return globals()[name]
    raise AttributeError(f"module 'submodels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
