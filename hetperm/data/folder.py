"""Images in one folder for every class, listed as torchvision's ImageFolder does; hidden folders are left out.

Only images that are needed are decoded, those of a large folder when they are read (`views.StoredViews`). Nothing is
written. Every image is converted to RGB. All must have one size, unless they are resized to one while they are decoded.
"""

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetperm.data.images import Images, Source
from hetperm.texts import shown

log = logging.getLogger(__name__)

PARTS = ("train", "val", "test")
MOST_PIXELS = 50_000_000  # of an image; a small file can hold far more, and every thread decodes one
MOST_FOLDERS = 100_000  # that are looked into; a tree with links into the file system has no end
CHUNK = 64  # images that a thread decodes at a time
THREADS = min(8, os.cpu_count() or 1)  # more only wait for the interpreter


@dataclass(frozen=True, eq=False)
class Files:
    """Square RGB images on disk.

    Attributes:
        paths: the file of each image.
        side: the side of every image once it is decoded.
        like: the file whose size all must have; None if they are resized to `side`.
    """

    paths: tuple[str, ...]
    side: int
    like: str | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(n, channels, height, width)."""
        return len(self.paths), 3, self.side, self.side

    def __getitem__(self, rows: Tensor) -> "Files":
        return replace(self, paths=tuple([self.paths[row] for row in rows.tolist()]))

    def decode(self) -> Tensor:
        """The images in memory, uint8 (n, 3, side, side)."""
        x = np.empty(self.shape, dtype=np.uint8)

        def fill(start: int) -> None:
            for k, path in enumerate(self.paths[start : start + CHUNK], start):
                x[k] = self._decode(path).transpose(2, 0, 1)

        if len(x) <= CHUNK:  # a thread would only take memory for its stack
            fill(0)
            return torch.from_numpy(x)
        # Each chunk fills its own rows of one array, so that nothing has to be joined and order does not matter.
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(fill, range(0, len(self.paths), CHUNK)))  # the list raises what a thread has raised
        return torch.from_numpy(x)

    def image(self, row: int) -> Tensor:
        """One image, uint8 (3, side, side)."""
        return torch.from_numpy(self._decode(self.paths[row]).transpose(2, 0, 1).copy())

    def _decode(self, path: str) -> np.ndarray:
        from PIL import Image

        image, size = _open(path), (self.side, self.side)
        if image.size != size:
            if self.like is not None:
                raise ValueError(
                    f"{path} is {_size(image)} and {self.like} is {self.side}x{self.side}; "
                    "give --image-size to bring all images to one size"
                )
            image = image.resize(size, Image.Resampling.BILINEAR)
        return np.asarray(image)


def read(root: Path, image_size: int | None = None) -> Source:
    """The images of ``root/CLASS/``, or of ``root/train/CLASS/`` with ``test`` and ``val`` beside ``train``.

    Without a folder of their own, test and validation images are taken from every class in proportion. Classes are
    numbered in the order of their names.

    Args:
        image_size: side to resize images to; None if they are squares of one size.
    """
    if not root.is_dir():
        raise FileNotFoundError(
            f"there is no folder {root} to read images from; write imagefolder:PATH with one that exists"
        )
    parts = [part for part in PARTS if _holds_folders(root / part)]
    if parts and "train" not in parts:
        raise FileNotFoundError(
            f"{root / parts[0]} holds class folders and {root / 'train'} does not; add those to train"
        )
    if parts:
        _warn_of_others(root, parts)
    else:
        _check_names(root)
    classes, paths, y = _listing(root / "train" if parts else root)
    files = Files(paths, *_side(paths[0], image_size))
    others = {}
    for part in parts[1:]:
        names, paths, answers = _listing(root / part)
        # Each folder numbers its classes by name: the numbers only agree if the names do.
        odd = sorted({*classes} ^ {*names})
        if odd:
            there, missing = ("train", part) if odd[0] in classes else (part, "train")
            raise ValueError(
                f"class {odd[0]!r} is in {root / there} and not in {root / missing}; both must have the same classes"
            )
        others[part] = Images(replace(files, paths=paths), answers)
    return Source(
        Images(files, y),
        others.get("test"),
        num_classes=len(classes),
        peak=255,
        mean=None,
        std=None,
        val=others.get("val"),
        strata=y,
        names=tuple(classes),
    )


def _check_names(root: Path) -> None:
    """Raise an error if a part is among the classes by its spelling, such as Train/CLASS beside Test/CLASS."""
    for name in _folders(root):
        part = name.lower()
        if part in PARTS and name != part and _holds_folders(root / name):
            raise ValueError(f"{root / name} holds folders and would be a class; rename it {part}, as parts are called")


def _warn_of_others(root: Path, parts: Sequence[str]) -> None:
    """Warn of folders beside those of the parts: they are not read."""
    for part in PARTS:
        if part not in parts and (root / part).exists():
            log.warning("%s holds no class folders and is not read; %s images are taken from train", root / part, part)
    others = sorted({*_folders(root)} - {*PARTS})
    if others:
        named = shown(others[0]) + (f" and {len(others) - 1} others" if others[1:] else "")
        log.warning("%s: of the folders beside train only val and test are read, and not %s", root, named)


def _holds_folders(path: Path) -> bool:
    return path.is_dir() and bool(_folders(path))


def _folders(path: Path) -> list[str]:
    """The names of the folders in a folder, in order; hidden ones, such as .git, are no classes."""
    names = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    names.append(entry.name)
                elif entry.is_symlink():
                    entry.stat()  # an error if it leads to nothing: it may have been a class
            except OSError as error:
                raise OSError(f"{entry.path} cannot be followed ({error.strerror}); mend or remove it") from error
    return sorted(names)


def _listing(folder: Path) -> tuple[list[str], tuple[str, ...], Tensor]:
    """The classes, the image files and (n,) their classes."""
    if not _holds_folders(folder):
        raise FileNotFoundError(f"{folder} holds no class folders; images are looked for in {folder / 'CLASS'}")
    classes = _folders(folder)
    _warn_of_strays(folder)
    count = itertools.count(1)
    homes = {_identity(path): path for path in (folder, *(folder / name for name in classes))}
    images = [_images(folder / name, count, homes) for name in classes]
    if not any(images):
        raise FileNotFoundError(f"{folder} holds no images; they are looked for by their ending, such as .jpg or .png")
    for name, paths in zip(classes, images, strict=True):
        if not paths:
            raise FileNotFoundError(f"{folder / name} holds no images; remove this class or add some")
    y = [k for k, paths in enumerate(images) for _ in paths]
    return classes, tuple(itertools.chain(*images)), torch.tensor(y)


def _unreadable(error: OSError) -> None:
    raise ValueError(
        f"{error.filename} cannot be read ({error.strerror}), and its images would be left out; make it readable, or "
        "name the folder that holds those of the classes"
    ) from error


def _warn_of_strays(folder: Path) -> None:
    """Warn of images beside the folders of classes: they are of no class, and are not read."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    with os.scandir(folder) as entries:
        strays = [entry.name for entry in entries if entry.name.lower().endswith(IMG_EXTENSIONS)]
    if strays:
        log.warning("%s: %d images lie beside the folders of classes and are not read", folder, len(strays))


def _identity(folder: str | Path) -> tuple[int, int]:
    """What tells a folder from others, by whatever path it is reached."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _images(folder: Path, count: Iterator[int], homes: Mapping[tuple[int, int], Path]) -> list[str]:
    """The images in a folder and those inside it, as torchvision's ImageFolder lists them, but for hidden folders.

    Args:
        folder: that of a class.
        count: counts folders.
        homes: the folders of all classes and the one that holds them, by identity: a link to one would give a class
            the images of others.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    seen, found = set(), []
    for inner, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        if next(count) > MOST_FOLDERS:
            raise ValueError(f"{folder.parent} holds more than {MOST_FOLDERS:,} folders; name the one with the classes")
        with suppress(OSError):  # it may be gone
            identity = _identity(inner)
            if identity in seen:  # a link back, which would lead round and round
                folders.clear()
                continue
            seen.add(identity)
            if homes.get(identity, folder) != folder:
                raise ValueError(f"{inner} leads to {homes[identity]}, which holds images of other classes; remove it")
        folders[:] = [name for name in folders if not name.startswith(".")]  # os.walk goes into those that are left
        found.append((inner, names))
    paths = [os.path.join(inner, name) for inner, names in sorted(found) for name in sorted(names)]
    return [path for path in paths if path.lower().endswith(IMG_EXTENSIONS)]


def _side(path: str, image_size: int | None) -> tuple[int, str | None]:
    """The side of all images, and the file that it was read from, or None if the side was given."""
    if image_size is not None:
        return image_size, None
    image = _open(path)
    if image.width != image.height:
        raise ValueError(f"{path} is {_size(image)}, which is not square; give --image-size to resize all images")
    return image.width, path


def _size(image) -> str:
    return f"{image.width}x{image.height}"


def _open(path: str):
    """The image as 8-bit RGB; an error names the file if it cannot be read."""
    from PIL import Image

    if not os.path.isfile(path):
        raise OSError(f"{path} is no file; replace or remove it")  # a pipe would wait for ever
    try:
        with Image.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{_size(image)} is more than {MOST_PIXELS:,} pixels; shrink it first")
            mode, rgb = image.mode, image.convert("RGB")
    except Exception as error:  # a broken file can raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"{path} cannot be read as an image ({reason}); replace or remove it") from error
    if mode[0] in "IF":  # after a conversion, all that is not nearly black would be white
        raise ValueError(f"{path} has more than 8 bits a channel; convert it to 8 bits")
    return rgb
