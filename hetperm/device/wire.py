"""Updates as a name and plain values, so that they can be sent to another machine."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hetperm.device import recipe
from hetperm.device.gradients import BatchGradient, FullGradient, MeanLoss, ReportGradient, StepLosses
from hetperm.device.rival_updates import Envelope, HeadThenBody, Meta, Mixture, Proximal, Scaled
from hetperm.device.updates import Distil, Ordered, Sgd, Update

UPDATES: dict[str, type] = {
    "sgd": Sgd,
    "ordered": Ordered,
    "distil": Distil,
    "batch-gradient": BatchGradient,
    "full-gradient": FullGradient,
    "report-gradient": ReportGradient,
    "mean-loss": MeanLoss,
    "step-losses": StepLosses,
    "meta": Meta,
    "envelope": Envelope,
    "mixture": Mixture,
    "proximal": Proximal,
    "head-then-body": HeadThenBody,
    "scaled": Scaled,
}
_NAMES = {kind: name for name, kind in UPDATES.items()}


def write(update: Update) -> dict[str, Any]:
    """The update as a table of plain values, which JSON can hold.

    Example:
        >>> write(Sgd(steps=5, batch_size=32, lr=0.2))
        {'update': 'sgd', 'steps': 5, 'batch_size': 32, 'lr': 0.2, 'cap': 0.0}

    A recipe other than plain SGD is a table inside it.
    """
    # By exact type: a subclass may behave differently, and the reader would build its parent.
    if type(update) not in _NAMES:
        raise ValueError(f"{type(update).__name__} has no name on the wire; known are {', '.join(UPDATES)}")
    values = {field.name: getattr(update, field.name) for field in fields(update)}
    if values.get("recipe") == recipe.PLAIN:
        del values["recipe"]
    return {"update": _NAMES[type(update)], **{key: _plain(value) for key, value in values.items()}}


def read(plain: Mapping[str, Any]) -> Update:
    """The update that a table of plain values describes.

    Example:
        >>> read({"update": "ordered", "steps": 5, "batch_size": 32, "lr": 0.2, "widths": [0.5, 1.0]}).widths
        (0.5, 1.0)
    """
    values = dict(plain)
    name = values.pop("update", None)
    if name not in UPDATES:
        raise ValueError(f"unknown update {name!r}; known are {', '.join(UPDATES)}")
    wanted = {field.name for field in fields(UPDATES[name])}
    if not set(values) <= wanted:
        raise ValueError(f"update {name!r} does not take {min(set(values) - wanted)!r}; it takes {sorted(wanted)}")
    try:
        return UPDATES[name](**{key: _unplain(value) for key, value in values.items()})
    except TypeError as error:
        raise ValueError(f"update {name!r} is incomplete ({error})") from None


def _plain(value: Any) -> Any:
    if isinstance(value, recipe.Recipe):
        return dict(vars(value))
    return list(value) if isinstance(value, tuple) else value


def _unplain(value: Any) -> Any:
    if isinstance(value, Mapping):  # the only table in an update
        return recipe.Recipe(**value)
    # JSON turns the tuples of an update into lists; here they become tuples again.
    return tuple(value) if isinstance(value, list) else value
