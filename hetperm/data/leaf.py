"""LEAF json (Caldas et al., 2018): images with their writers, such as FEMNIST.

A file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[...], ...], "y": [...]}}}``. An image is
one flat list of pixels.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from hetperm.data.images import MOST_CLASSES, Images, Source

Samples = tuple[np.ndarray, np.ndarray]  # float32 (n, pixels) and int64 (n,)


def read(root: Path) -> Source:
    """The images of ``root/train/*.json`` and ``root/test/*.json``, or of ``root/*.json``; writers in order of name.

    Without a test folder, test images are taken from every writer in proportion. Validation images always are.
    """
    if not root.is_dir():
        raise FileNotFoundError(
            f"there is no folder {root} to read LEAF json from; write leaf:PATH with one that exists"
        )
    inside = [part for part in ("train", "test") if (root / part).is_dir()]
    if inside == ["test"]:
        raise FileNotFoundError(f"there is a folder {root / 'test'} and no {root / 'train'}; LEAF writes both")
    parts = [_users(root / part) for part in inside] or [_users(root)]
    # One numbering for both folders: a writer's test images must find its training images.
    names = {user: number for number, user in enumerate(sorted(set().union(*parts)))}
    images, *test = [_joined(part, names) for part in parts]
    # The largest class may occur in one of the folders only.
    kinds = 1 + max([int(part.y.max()) for part in (images, *test)])
    sides = {part.x.shape[-1] for part in (images, *test)}
    if len(sides) > 1:
        raise ValueError(
            f"{root}: images for training have side {images.x.shape[-1]} and for testing {test[0].x.shape[-1]}"
        )
    return Source(
        images,
        test[0] if test else None,
        num_classes=kinds,
        peak=1,
        mean=None,
        std=None,
        strata=images.writer,
    )


def _joined(users: dict[str, Samples], names: dict[str, int]) -> Images:
    x, y = (np.concatenate(arrays) for arrays in zip(*users.values()))
    side = math.isqrt(x.shape[1])
    writer = np.repeat([names[user] for user in users], [len(y) for _, y in users.values()])
    return Images(torch.from_numpy(x).view(-1, 1, side, side), torch.from_numpy(y), torch.from_numpy(writer))


def _users(folder: Path) -> dict[str, Samples]:
    """The samples of every user who has any, in order of name."""
    files = sorted(path for path in folder.glob("*.json") if path.is_file())  # not a pipe, which would never end
    users, length = {}, None
    for file in files:
        for user, samples in _contents(file):
            if user in users:
                raise ValueError(f"{file}: user {user!r} comes a second time in {folder}; keep one of them")
            width = samples[0].shape[1]
            if length not in (None, width):
                raise ValueError(f"{file}: user {user!r} has images of {width} pixels and others have {length}")
            users[user], length = samples, width
    if not users:
        raise FileNotFoundError(
            f"{folder} holds no {'samples' if files else '.json files'}; point leaf:PATH at LEAF's data"
        )
    # By name, so that it does not matter how LEAF spread its users over files.
    return dict(sorted(users.items()))


def _contents(file: Path) -> Iterator[tuple[str, Samples]]:
    """The users of one file who have samples."""
    try:
        content = json.loads(file.read_bytes())
        users, data = content["users"], content["user_data"]
        triples = [(user, list(data[user]["x"]), list(data[user]["y"])) for user in users]
    except KeyError as error:
        raise ValueError(f"{file} is not LEAF json: it has no {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is not LEAF json ({error})") from error
    if len(data) > len({*users}):
        raise ValueError(f"{file} is not LEAF json: it has data of {len(data)} users and lists {len({*users})}")
    stated, counts = content.get("num_samples"), [len(y) for _, _, y in triples]
    if stated is not None and stated != counts:
        raise ValueError(
            f"{file} is not whole: its num_samples do not agree with the samples that its users have; copy it again"
        )
    for user, x, y in triples:
        if x or y:
            yield user, _samples(x, y, where=f"{file}: user {user!r}")


def _samples(x: list, y: list, *, where: str) -> Samples:
    try:
        inputs, labels = np.asarray(x), np.asarray(y)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{where} has samples of different sizes; leaf:PATH reads images as flat lists") from error
    if inputs.dtype.kind in "UO":
        raise ValueError(f"{where} has text or other data for inputs; leaf:PATH reads images, such as FEMNIST")
    if inputs.ndim != 2 or inputs.shape[1] == 0 or math.isqrt(inputs.shape[1]) ** 2 != inputs.shape[1]:
        shape = "x".join(map(str, inputs.shape[1:])) or "no"
        raise ValueError(f"{where} has inputs of {shape} values; leaf:PATH reads square images as flat lists")
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or labels.min() < 0:
        raise ValueError(f"{where} has labels that are not whole numbers from 0")
    if labels.max(initial=0) >= MOST_CLASSES:
        raise ValueError(
            f"{where} has the label {labels.max()}; number the classes from 0, at most {MOST_CLASSES} of them"
        )
    if len(inputs) != len(labels):
        raise ValueError(f"{where} has {len(inputs)} inputs and {len(labels)} labels")
    if not np.isfinite(inputs).all():
        raise ValueError(f"{where} has pixels that are not finite")
    return inputs.astype(np.float32), labels.astype(np.int64)
