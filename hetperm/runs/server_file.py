"""server.safetensors: what the server knows at the end of a run that a client needs who joins later.

The global model, the one from early in the warm-up at which clients reported too, and of every client's reports the
gradients (or sketches of them), their noise and its samples.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor

import hetperm
from hetperm.params import Params
from hetperm.runs import files
from hetperm.texts import one_line, shown

NAME = "server.safetensors"
FORMAT = 2
_ENTRY = "hetperm server"  # the only metadata entry: safetensors does not fix the order of several
_W, _EARLY = "w/", "early/"  # begin the names of the tensors of the global model and of the early one
_TABLES = ("gradient", "noise", "samples", "known", "units")


@dataclass(frozen=True)
class Server:
    """What the server knows.

    Attributes:
        w: the global model.
        gradient: (N, s) of each client's report at the probe, itself or as a sketch. If clients reported at an early
            model too, both in units of their noise, one after the other.
        noise: (N,) its variance; nan where a client has too few samples to tell.
        samples: (N,) training samples.
        known: (N,) bool, whether a client has a report that is not too old; what the others have is zero.
        units: (M,) the noise in whose units the gradients at each of M models are; 1 if there is one model only.
        early: the early model, of the width of the probe; empty if there is none.
        width: the width of the probe.
        share: how much difference is worth sharing.
        method: the method of the run.
    """

    w: Params
    gradient: Tensor
    noise: Tensor
    samples: Tensor
    known: Tensor
    units: Tensor
    early: Params
    width: float
    share: float
    method: str


def save(folder: Path, server: Server) -> None:
    """Write the file completely, or leave the old one as it was."""
    tensors = {f"{_W}{name}": x for name, x in server.w.items()} | {name: getattr(server, name) for name in _TABLES}
    tensors |= {f"{_EARLY}{name}": x for name, x in server.early.items()}
    about = {
        "format": FORMAT,
        "hetperm": hetperm.__version__,
        "method": server.method,
        "width": server.width,
        "share": server.share,
    }
    # Copies: tensors of a model may share memory, which safetensors refuses.
    own = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    files.write(folder / NAME, safetensors.save(own, {_ENTRY: json.dumps(about)}))


def load(folder: Path) -> Server:
    """Read the file; a ValueError of one sentence if there is none, or it is of another version or damaged."""
    path = folder / NAME
    if (path.exists() or path.is_symlink()) and not path.is_file():
        raise ValueError(f"{path} is no file; put the run's own in its place")
    if not path.exists():
        raise ValueError(
            f"{folder} has no {NAME}, which holds the reports of its clients; runs of perm and perm-two-stage write it "
            "if they estimate mixing weights (train again if an older version wrote the run)"
        )
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()[_ENTRY])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        version, wrote = about["format"], about["hetperm"]
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again from the run") from error
    if wrote != hetperm.__version__:
        this = hetperm.__version__
        raise ValueError(f"hetperm {one_line(str(wrote))} wrote {path} and this is {this}; join with that version")
    if version != FORMAT:
        raise ValueError(f"{path} has format {shown(version)} and this hetperm reads {FORMAT}; train the run again")
    w, early = (
        {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        for prefix in (_W, _EARLY)
    )
    wrong = _wrong(w, early, tensors, about)
    if wrong:
        raise ValueError(f"{path}: {wrong} is not what a run writes; copy it again from the run")
    tables = {name: tensors[name] for name in _TABLES}
    return Server(w, **tables, early=early, width=about["width"], share=about["share"], method=about["method"])


def _wrong(w: Params, early: Params, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str | None:
    """The first part of a file that cannot be right; None if all can."""
    if not w or any(name not in tensors for name in _TABLES):
        return "its list of tensors"
    shapes = {"gradient": 2, "noise": 1, "samples": 1, "known": 1}
    odd = next((name for name, dims in shapes.items() if tensors[name].dim() != dims), None)
    if odd is not None:
        return odd
    count = len(tensors["known"])
    fits = {
        **{name: len(tensors[name]) == count for name in shapes},
        "known": tensors["known"].dtype == torch.bool,
        "samples": bool((tensors["samples"] > 0).all()),
        "width": isinstance(about.get("width"), float) and 0 < about["width"] <= 1,
        "share": isinstance(about.get("share"), float) and math.isfinite(about["share"]) and about["share"] >= 0,
        "units": tensors["units"].shape == (2 if early else 1,) and bool((tensors["units"] > 0).all()),
        "the global model": all([bool(x.isfinite().all()) for x in w.values()]),
        "the early model": early.keys() in (set(), w.keys())
        and all([bool(x.isfinite().all()) for x in early.values()]),
        "a gradient": bool(tensors["gradient"].isfinite().all()),
    }
    return next((name for name, right in fits.items() if not right), None)
