"""Data sets, divided among clients.

Train, validation and test pools are separated first, and a training image belongs to at most one client. A client is
scored on the whole test pool, restricted to its classes and passed through its own label map or rotation; validation
data are made from the validation pool in the same way. Where every client is a writer or user, it is scored on its own.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import torch

from hetperm.advice import closest
from hetperm.checks import path as checked_path
from hetperm.checks import whole
from hetperm.client import Client, Pair, View
from hetperm.data import folder, images, leaf, npz, pairs, synthetic
from hetperm.data.partition import Share, divide
from hetperm.data.views import StoredViews, Views, bound
from hetperm.memory import GB, available_bytes
from hetperm.randomness import generator_for
from hetperm.shards import Stored, size_of, taken
from hetperm.texts import printable, shown

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Problem:
    """Clients with their data, and the inputs and outputs that a model for them must have.

    Attributes:
        in_channels: channels of an image or window, the number of symbols of a text, or that of features if
            ``image_size`` is None.
        image_size: side of square images, (height, width) of others, (length,) of windows and texts; None if inputs are
            vectors.
        num_classes: outputs of the model.
        loss: (outputs, labels) -> mean loss of a batch; None: cross-entropy.
        metric: the name of what models are scored by, unless the configuration names another.
        partition: how the data were divided among clients, for reports; None if they came divided.
        preparation: how stored values became inputs; None if they are inputs as they are.
        class_names: the name of every class; empty if the data have none.
    """

    clients: tuple[Client, ...]
    in_channels: int
    num_classes: int
    image_size: int | tuple[int, ...] | None
    name: str
    preparation: images.Preparation | None = None
    class_names: tuple[str, ...] = ()
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    metric: str = "accuracy"
    partition: str | None = None

    def __post_init__(self):
        several = isinstance(self.clients, Sequence) and len(self.clients) > 0
        if not several or not all([isinstance(client, Client) for client in self.clients]):
            raise ValueError(f"a data set has the clients {shown(self.clients)}; give a tuple of Client, not empty")
        for label, value in (("in_channels", self.in_channels), ("num_classes", self.num_classes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{label} of a data set is {shown(value)}; it must be a whole number of at least 1")
        if not isinstance(self.name, str) or not self.name or printable(self.name) != self.name:
            raise ValueError(f"a data set is named {shown(self.name)}; it must be a text without control characters")
        if not (self.partition is None or isinstance(self.partition, str)):
            raise TypeError(f"the partition of {self.name} is {shown(self.partition)}; it must be a text, or None")
        if not (self.preparation is None or isinstance(self.preparation, images.Preparation)):
            raise TypeError(f"the preparation of {self.name} is {shown(self.preparation)}; it must be a Preparation")
        if not isinstance(self.class_names, Sequence) or not all([isinstance(name, str) for name in self.class_names]):
            raise TypeError(f"the class_names of {self.name} are {shown(self.class_names)}; they must be texts")
        if len(self.class_names) not in (0, self.num_classes):
            raise ValueError(f"{self.name} has {self.num_classes} classes and names {len(self.class_names)} of them")
        if not (self.loss is None or callable(self.loss)):
            raise TypeError(f"the loss of {self.name} is {shown(self.loss)}; it must be a function, or None")
        if not isinstance(self.metric, str):
            raise TypeError(f"the metric of {self.name} is {shown(self.metric)}; it must be a name, such as 'accuracy'")

    @property
    def groups(self) -> tuple[int, ...] | None:
        """The group of every client, or None if the partition has no groups."""
        groups = tuple(client.group for client in self.clients)
        return None if None in groups else groups


@dataclass(frozen=True)
class Wanted:
    """The data that a run asks for.

    Attributes:
        name: one of `DATASETS`; ``imagefolder:PATH``, ``leaf:PATH`` and ``npz:PATH`` are read from that folder or file.
        partition: ``iid``, ``classes:k``, ``class-groups:k``, ``dirichlet:a``, ``label-shift:g``, ``rotation:g`` or,
            where the data say whom they come from (LEAF, npz), ``natural`` or ``writer``: every user is a client. None
            keeps the division that a set comes with: two halves (``label-shift:2``) for the synthetic set, users.
        seed: decides everything that is drawn.
        samples_per_client: training samples of a client; None or ``"all"`` deals out the whole training pool (of the
            synthetic set: the paper's 500).
        validation_share: share of the images outside the test pool that is kept for validation (of the synthetic set:
            that many samples more); a folder with validation images keeps those. Of an npz set under ``natural``, the
            last quarter of each user's samples of a class are for testing (see `npz.by_position`).
        data_dir: folder in torchvision's layout, ``data`` unless given; written to only with ``download``.
        image_size: side to resize images to.
        max_test_samples: most samples that a client is scored on, of its test data and of its validation data, drawn
            anew by the seed; None: all.
    """

    name: str
    num_clients: int
    partition: str | None
    seed: int
    samples_per_client: int | Literal["all"] | None = None
    validation_share: float = 0.15
    data_dir: str | Path | None = None
    download: bool = False
    image_size: int | None = None
    max_test_samples: int | None = None

    def __post_init__(self):
        numbers = {
            "num_clients": self.num_clients,
            "samples_per_client": self.samples,
            "image_size": self.image_size,
            "max_test_samples": self.max_test_samples,
        }
        for label, value in numbers.items():
            if value is None and label != "num_clients":
                continue
            whole(1)(label, value)
        if not isinstance(self.partition, str | None):
            raise TypeError(f"partition is {shown(self.partition)}; it must be a text such as 'iid', or None")
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
            raise TypeError(f"seed is {shown(self.seed)}; it must be a whole number")
        share = self.validation_share
        if not isinstance(share, Real) or isinstance(share, bool):
            raise TypeError(f"validation_share is {shown(share)}; it must be a number from 0 to below 1")
        if not 0 <= share < 1:
            raise ValueError(f"validation_share {shown(share)} is outside [0, 1)")

    @property
    def samples(self) -> int | None:
        """Training samples of a client; None: all there are."""
        everything = isinstance(self.samples_per_client, str) and self.samples_per_client == "all"
        return None if everything else self.samples_per_client

    @property
    def path(self) -> Path:
        """The path in a name such as ``npz:PATH``."""
        kind, _, path = self.name.partition(":")
        return checked_path(f"the path of {kind}", path).expanduser()


def load(name: str, **others: Any) -> Problem:
    """A data set divided among clients.

    Args:
        name: one of `DATASETS`, perhaps with a path.
        others: the other fields of `Wanted`.

    Example:
        >>> problem = load("digits", num_clients=4, partition="label-shift:2", seed=0)
        >>> [client.n_train for client in problem.clients], sorted(problem.groups)
        ([306, 306, 305, 305], [0, 0, 1, 1])
    """
    make, wanted = _maker(name), Wanted(name, **others)
    problem, most = make(wanted), wanted.max_test_samples
    if len(problem.clients) != wanted.num_clients:  # a user's set may come divided
        log.warning("the clients of dataset %s are %d, and %d were asked for; set num_clients to the number it has",
                    shown(name), len(problem.clients), wanted.num_clients)  # fmt: skip
    if most is None:
        return problem
    fewer = [_fewer(client, i, most, wanted.seed) for i, client in enumerate(problem.clients)]
    return replace(problem, clients=tuple(fewer))


def _fewer(client: Client, i: int, most: int, seed: int) -> Client:
    """The client at position i with at most so many of its test and of its validation samples."""

    def some(part: str, pair: Pair | None) -> Pair | None:
        if pair is None or size_of(pair) <= most:
            return pair
        rows = torch.randperm(size_of(pair), generator=generator_for(seed, "scored", part, i))[:most].sort().values
        if isinstance(pair, Stored):
            return taken(pair, rows)
        return View(pair.pool, pair.rows[rows]) if isinstance(pair, View) else View(pair, rows)

    return replace(client, val=some("val", client.val), test=some("test", client.test))


def _maker(name: str) -> Callable[[Wanted], Problem]:
    """The function that makes the data set of that name."""
    if not isinstance(name, str):
        raise TypeError(f"the dataset is {shown(name)}; it must be a name such as 'digits'")
    kind, colon, path = name.partition(":")
    # Sets that are read from a folder or file need a path after the colon; the others allow no colon.
    if kind in DATASETS and (bool(path) if kind in WITH_PATH else not colon):
        return DATASETS[kind]
    close = closest(kind, DATASETS)
    advice = f"did you mean {_form(close, path)!r}?" if close else f"known are {', '.join(map(_form, DATASETS))}"
    raise ValueError(f"unknown dataset {shown(name)}; {advice}")


def _form(kind: str, path: str = "") -> str:
    return f"{kind}:{path or 'PATH'}" if kind in WITH_PATH else kind


def _synthetic(wanted: Wanted) -> Problem:
    name, partition = wanted.name, wanted.partition
    if partition not in (None, "label-shift:2"):
        raise ValueError(f"{name} comes divided in two halves, which is label-shift:2; it cannot be {partition!r}")
    if wanted.image_size is not None:
        raise ValueError(f"{name} consists of vectors; image_size {wanted.image_size} has no meaning for it")
    samples = synthetic.SAMPLES if wanted.samples is None else wanted.samples
    validation = images.share_of(wanted.validation_share, samples)
    size = wanted.num_clients * synthetic.num_bytes(samples + validation + synthetic.TEST_SAMPLES)
    available = available_bytes()
    if available is not None and size > available:
        raise ValueError(
            f"the samples of {wanted.num_clients} clients take {size / GB:.3g} GB and {available / GB:.3g} GB of "
            "memory are free; take fewer clients, or lower --samples-per-client"
        )
    clients = synthetic.clients(wanted.num_clients, seed=wanted.seed, samples=samples, validation=validation)
    sizes = {"in_channels": synthetic.DIMENSION, "num_classes": 2, "image_size": None}
    return Problem(clients, **sizes, name=name, partition="label-shift:2")


def _digit_pairs(wanted: Wanted) -> Problem:
    source = pairs.digit_pairs(validation_share=wanted.validation_share, seed=wanted.seed)
    return _images(lambda *_: source, wanted)


def _imagefolder(wanted: Wanted) -> Problem:
    # The folder is part of the name: data_dir and download have no meaning here, or for LEAF.
    return _images(lambda *_: folder.read(wanted.path, wanted.image_size), wanted)


def _leaf(wanted: Wanted) -> Problem:
    return _images(lambda *_: leaf.read(wanted.path, validation_share=wanted.validation_share), wanted)


def _npz(wanted: Wanted) -> Problem:
    natural = wanted.partition is None or wanted.partition in NATURAL
    source = npz.read(wanted.path, natural=natural, validation_share=wanted.validation_share)
    return _images(lambda *_: source, wanted)


def _images(read: Callable[..., images.Source], wanted: Wanted) -> Problem:
    """The samples that ``read(data_dir, download)`` gives, divided among clients."""
    source = read(wanted.data_dir, wanted.download)
    _check_sides(wanted, source)
    if wanted.partition is None and source.images.writer is None:
        raise ValueError(
            f"{wanted.name} does not come divided among clients; name a partition, such as 'label-shift:2'"
        )
    pools = images.pools(source, validation_share=wanted.validation_share, seed=wanted.seed)
    train = pools["train"]
    shares = divide(
        "natural" if wanted.partition is None else wanted.partition,
        train.y,
        num_classes=source.num_classes,
        num_clients=wanted.num_clients,
        samples_per_client=wanted.samples,
        seed=wanted.seed,
        writers=train.writer,
    )
    whole = _fits(wanted, pools, shares)
    # Measured on training samples only: nothing about the test pool may reach the inputs.
    source = images.measured(source, train)
    prepare = partial(images.prepare, source=source, image_size=wanted.image_size)
    views = Views(pools, prepare) if whole else StoredViews(pools, prepare)
    clients = tuple(views.client(i, share) for i, share in enumerate(shares))
    if all([client.test is None for client in clients]):
        raise ValueError(f"{wanted.name}: no client has test samples to be scored on; add some to those it trains on")
    # A text is a window whose channels are the symbols: each position is one of them.
    shape = train.x.shape if source.symbols is None else (len(train), source.symbols, train.x.shape[1])
    return Problem(
        clients,
        in_channels=shape[1],
        num_classes=source.num_classes,
        image_size=wanted.image_size or image_size_of(shape),
        name=wanted.name,
        partition=wanted.partition or "natural",
        # Symbols of a text are numbers already.
        preparation=None if source.symbols else images.Preparation(source.peak, source.mean, source.std),
        class_names=source.names,
    )


def image_size_of(shape: tuple[int, ...]) -> int | tuple[int, ...] | None:
    """The `image_size` of a problem, from (n, channels, ...), the shape of its samples."""
    sides = tuple(shape[2:])
    return (sides[0] if _square(sides) else sides) or None


def _square(sides: tuple[int, ...]) -> bool:
    return len(sides) == 2 and sides[0] == sides[1]


def _check_sides(wanted: Wanted, source: images.Source) -> None:
    """Raise an error if samples (n, channels, ...) are to be resized or turned and cannot be."""
    shape, turned = source.images.x.shape, (wanted.partition or "").startswith("rotation")
    kind = {2: "vectors", 3: "windows"}.get(len(shape)) if source.symbols is None else "texts"
    if kind and wanted.image_size is not None:
        raise ValueError(f"{wanted.name} consists of {kind}; image_size {wanted.image_size} has no meaning for it")
    if kind and turned:
        raise ValueError(
            f"{wanted.name} consists of {kind}, which cannot be turned; name another partition than rotation"
        )
    if turned and wanted.image_size is None and not _square(tuple(shape[2:])):
        size = "x".join(map(str, shape[2:]))
        raise ValueError(f"{wanted.name}: images of {size} change shape when turned; give --image-size")


def _fits(wanted: Wanted, pools: Mapping[str, images.Images], shares: Sequence[Share]) -> bool:
    """Whether all inputs are decoded at once; if not, they are decoded when they are read.

    Raises an error if images that are in memory anyway do not fit once they are resized: a side of 4096 makes gigabytes
    of a small set.
    """
    count = sum([len(share.rows) for share in shares]) + _shared(pools, shares)
    channels, side = pools["train"].x.shape[1], wanted.image_size
    pixels = side**2 if side else math.prod(pools["train"].x.shape[2:])
    size = 4 * count * channels * pixels  # as float32
    if isinstance(pools["train"].x, folder.Files):
        return size <= bound()
    available = available_bytes()
    if side is not None and available is not None and size > available:
        raise ValueError(
            f"{count:,} images of {side}x{side} take {size / GB:.3g} GB and "
            f"{available / GB:.2g} GB of memory are free; give a smaller --image-size"
        )
    return True


def _shared(pools: Mapping[str, images.Images], shares: Sequence[Share]) -> int:
    """Samples of the pools that clients share, which are held once for every rotation."""
    turns = len({share.degrees for share in shares})
    return turns * (len(pools["val"]) + len(pools["test"]))


WITH_PATH = {"imagefolder", "leaf", "npz"}  # written with what they are read from: imagefolder:PATH
NATURAL = ("natural", "writer")  # partitions that make a client of every user

DATASETS = {
    "synthetic": _synthetic,
    "digits": partial(_images, images.digits),
    "digit-pairs": _digit_pairs,
    "mnist": partial(_images, images.mnist),
    "fashion-mnist": partial(_images, images.fashion_mnist),
    "emnist": partial(_images, images.emnist),
    "cifar10": partial(_images, images.cifar10),
    "imagefolder": _imagefolder,
    "leaf": _leaf,
    "npz": _npz,
}
