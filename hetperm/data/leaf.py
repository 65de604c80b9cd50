"""leaf:PATH: LEAF json (Caldas et al., 2018), samples with whom they come from: FEMNIST's images, Shakespeare's text.

A file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. An image is one
flat list of pixels, and its label a number. A text is a stretch of characters, and its label the next one. A plain
table ``{role: text}`` is read too (see `text`).
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetperm.data import text
from hetperm.data.images import LARGEST_VALUE, MOST_CLASSES, Images, Source
from hetperm.data.text import Text

Samples = tuple[np.ndarray, np.ndarray]  # float32 (n, pixels) and int64 (n,)


def read(root: Path, *, validation_share: float) -> Source:
    """The samples of ``root/train/*.json`` and ``root/test/*.json``, of ``root/*.json``, or of one file.

    Writers are numbered in the order of their names. Without a test folder, test images are taken from every writer in
    proportion, and texts are divided by position; so is what is kept for validation.
    """
    if not root.exists():
        raise FileNotFoundError(
            f"there is no folder {root} to read LEAF json from; write leaf:PATH with one that exists"
        )
    inside = [part for part in ("train", "test") if (root / part).is_dir()]
    if inside == ["test"]:
        raise FileNotFoundError(f"there is a folder {root / 'test'} and no {root / 'train'}; LEAF writes both")
    parts = [_users(root / part) for part in inside] or [_users(root)]
    kinds = {isinstance(samples, Text) for part in parts for samples in part.values()}
    if len(kinds) > 1:
        raise ValueError(f"{root}: one of train and test holds texts and the other images; give two of a kind")
    if kinds == {True}:
        train, *test = parts
        return text.source(train, test[0] if test else None, validation_share=validation_share, where=f"leaf:{root}")
    return _images(root, parts)


def _images(root: Path, parts: list[dict[str, Samples]]) -> Source:
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


def _users(path: Path) -> dict[str, Samples | Text]:
    """The samples of every user who has any, in order of name, from a file or all files of a folder."""
    if path.is_file():
        files = [path]
    else:
        files = sorted(path.glob("*.json"))
        for file in files:
            if not file.is_file():  # a pipe would never end, and what a broken link led to would be left out
                raise OSError(f"{file} is no file; replace or remove it")
    users, sizes = {}, set()
    for file in files:
        for user, samples in _contents(file):
            if user in users:
                raise ValueError(f"{file}: user {user!r} comes a second time in {path}; keep one of them")
            size = (samples.length, "characters") if isinstance(samples, Text) else (samples[0].shape[1], "pixels")
            sizes.add(size)
            if len(sizes) > 1:
                (other,) = sizes - {size}
                raise ValueError(
                    f"{file}: user {user!r} has samples of {size[0]} {size[1]} and others have {other[0]} {other[1]}"
                )
            users[user] = samples
    if not users:
        raise FileNotFoundError(
            f"{path} holds no {'samples' if files else '.json files'}; point leaf:PATH at LEAF's data"
        )
    # By name, so that it does not matter how LEAF spread its users over files.
    return dict(sorted(users.items()))


def _contents(file: Path) -> Iterator[tuple[str, Samples | Text]]:
    """The users of one file who have samples."""
    try:
        content = json.loads(file.read_bytes(), object_pairs_hook=_table)
        if _is_plain(content):
            yield from ((role, Text.of(words)) for role, words in content.items() if words)
            return
        users, data = content["users"], content["user_data"]
        triples = [(user, list(data[user]["x"]), list(data[user]["y"])) for user in users]
    except KeyError as error:
        raise ValueError(f"{file} is not LEAF json: it has no {error}, and is no table of texts by role") from error
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
            where = f"{file}: user {user!r}"
            yield user, _stretches(x, y, where=where) if _are_texts(x) else _samples(x, y, where=where)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of a JSON file, in which no key comes twice: all but the last would be lost."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return table


def _is_plain(content: Any) -> bool:
    """Whether a file is a table {role: text}."""
    return isinstance(content, Mapping) and bool(content) and all([isinstance(one, str) for one in content.values()])


def _are_texts(x: list) -> bool:
    return bool(x) and all([isinstance(one, str) for one in x])


def _stretches(x: list[str], y: list, *, where: str) -> Text:
    lengths = {len(one) for one in x}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"{where} has texts of {min(lengths)} to {max(lengths)} characters; all must have one length")
    if not all([isinstance(one, str) and len(one) == 1 for one in y]):
        raise ValueError(f"{where} has texts whose labels are not single characters; each is the one that follows")
    if len(x) != len(y):
        raise ValueError(f"{where} has {len(x)} inputs and {len(y)} labels")
    return Text.of_samples(x, y)


def _samples(x: list, y: list, *, where: str) -> Samples:
    try:
        inputs, labels = np.asarray(x), np.asarray(y)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{where} has samples of different sizes; leaf:PATH reads images as flat lists") from error
    if inputs.dtype.kind in "UO":
        raise ValueError(
            f"{where} has inputs that are neither numbers nor texts; leaf:PATH reads images and texts, such as FEMNIST "
            "and Shakespeare"
        )
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
    largest = float(np.abs(inputs).max())
    if largest > LARGEST_VALUE:
        raise ValueError(
            f"{where} has a pixel of size {largest:g}; pixels must be from -{LARGEST_VALUE:g} to {LARGEST_VALUE:g}"
        )
    return inputs.astype(np.float32), labels.astype(np.int64)
