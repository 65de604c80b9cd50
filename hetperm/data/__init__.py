"""Data sets, divided among clients.

Train, validation and test pools are separated first, and a training image belongs to at most one client. A client is
scored on the whole test pool, restricted to its classes and passed through its own label map or rotation; validation
data are made of the validation pool in the same way. Where every client is a writer, it is scored on its own images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch

from hetperm.advice import closest
from hetperm.client import Client, Pair, View
from hetperm.data import folder, images, leaf, synthetic
from hetperm.data.partition import Share, divide


@dataclass(frozen=True, eq=False)
class Problem:
    """Clients with their data, and what a model for them must take and give.

    Attributes:
        in_channels: channels of an image, or the number of features if ``image_size`` is None.
        image_size: side of the square images; None if inputs are vectors.
    """

    clients: tuple[Client, ...]
    in_channels: int
    num_classes: int
    image_size: int | None
    name: str

    @property
    def groups(self) -> tuple[int, ...] | None:
        """The group of every client, or None if the partition knows none."""
        groups = tuple(client.group for client in self.clients)
        return None if None in groups else groups


def load(
    name: str,
    *,
    num_clients: int,
    partition: str | None,
    samples_per_client: int | Literal["all"] | None = None,
    validation_share: float = 0.15,
    seed: int,
    data_dir: str | Path | None = None,
    download: bool = False,
    image_size: int | None = None,
) -> Problem:
    """A data set divided among clients; the seed decides everything that is drawn.

    Args:
        name: one of `DATASETS`; ``imagefolder:PATH`` and ``leaf:PATH`` are read from that folder.
        partition: ``iid``, ``classes:k``, ``class-groups:k``, ``dirichlet:a``, ``label-shift:g``, ``rotation:g`` or, of
            a LEAF set, ``writer``. None leaves the synthetic set in its two halves, which are ``label-shift:2``, and a
            LEAF set to its writers.
        samples_per_client: training samples of a client; None or ``"all"`` deals out the whole training pool (of the
            synthetic set: the paper's 500).
        validation_share: share of the images outside the test pool that is kept for validation (of the synthetic set:
            that many samples more); a folder with validation images keeps those.
        data_dir: folder in torchvision's layout, ``data`` unless given; written to only with ``download``.
        image_size: side to resize images to.

    Example:
        >>> problem = load("digits", num_clients=4, partition="label-shift:2", seed=0)
        >>> [client.n_train for client in problem.clients], sorted(problem.groups)
        ([306, 306, 305, 305], [0, 0, 1, 1])
    """
    make = _maker(name)
    samples = None if samples_per_client == "all" else samples_per_client
    for label, value in (("num_clients", num_clients), ("samples_per_client", samples), ("image_size", image_size)):
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{label} must be a whole number of at least 1; got {value!r}")
    if not 0 <= validation_share < 1:
        raise ValueError(f"validation_share {validation_share} is outside [0, 1)")
    return make(
        name=name,
        num_clients=num_clients,
        partition=partition,
        samples=samples,
        validation_share=validation_share,
        seed=seed,
        data_dir=data_dir,
        download=download,
        image_size=image_size,
    )


def _maker(name: str) -> Callable[..., Problem]:
    """What makes the data set of that name."""
    kind, colon, path = name.partition(":")
    if kind in DATASETS and (bool(path) if kind in WITH_PATH else not colon):
        return DATASETS[kind]
    close = closest(kind, DATASETS)
    advice = f"did you mean {_form(close, path)!r}?" if close else f"known are {', '.join(map(_form, DATASETS))}"
    raise ValueError(f"unknown dataset {name!r}; {advice}")


def _form(kind: str, path: str = "") -> str:
    return f"{kind}:{path or 'PATH'}" if kind in WITH_PATH else kind


def _synthetic(*, name, num_clients, partition, samples, validation_share, seed, image_size, **_) -> Problem:
    if partition not in (None, "label-shift:2"):
        raise ValueError(f"{name} comes divided in two halves, which is label-shift:2; it cannot be {partition!r}")
    if image_size is not None:
        raise ValueError(f"{name} consists of vectors; image_size {image_size} has no meaning for it")
    samples = synthetic.SAMPLES if samples is None else samples
    validation = images.share_of(validation_share, samples)
    clients = synthetic.clients(num_clients, seed=seed, samples=samples, validation=validation)
    return Problem(clients, in_channels=synthetic.DIMENSION, num_classes=2, image_size=None, name=name)


def _imagefolder(*, name, image_size, **rest) -> Problem:
    return _images(lambda *_: folder.read(_path(name), image_size), name=name, image_size=image_size, **rest)


def _leaf(*, name, **rest) -> Problem:
    return _images(lambda *_: leaf.read(_path(name)), name=name, **rest)


def _path(name: str) -> Path:
    return Path(name.partition(":")[2]).expanduser()


def _images(
    read, *, name, num_clients, partition, samples, validation_share, seed, data_dir, download, image_size
) -> Problem:
    source = read(data_dir, download)
    if partition is None and source.images.writer is None:
        raise ValueError(f"{name} does not come divided among clients; name a partition, such as 'label-shift:2'")
    pools = images.pools(source, validation_share=validation_share, seed=seed)
    train, kinds = pools["train"], source.num_classes
    shares = divide(
        "writer" if partition is None else partition,
        train.y,
        num_classes=kinds,
        num_clients=num_clients,
        samples_per_client=samples,
        seed=seed,
        writers=train.writer,
    )
    prepare = partial(images.prepare, source=images.measured(source, train), image_size=image_size)

    # What clients see alike is made once: 50 clients hold one test pool, or one for each rotation.
    @cache
    def pixels(part: str) -> torch.Tensor:
        return pools[part].pixels()

    @cache
    def inputs(part: str, degrees: float) -> torch.Tensor:
        return prepare(pixels(part), degrees=degrees)

    @cache
    def answers(part: str, labels: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(labels)[pools[part].y]

    @cache
    def rows(part: str, classes: tuple[int, ...]) -> torch.Tensor:
        return torch.isin(pools[part].y, torch.tensor(classes)).nonzero().squeeze(1)

    def seen(part: str, share: Share) -> Pair | None:
        if share.writer is not None:
            mine = (pools[part].writer == share.writer).nonzero().squeeze(1)
            return own(pools[part].take(mine), share) if len(mine) else None
        chosen = rows(part, share.classes)
        if len(chosen) == 0:
            return None
        pool = inputs(part, share.degrees), answers(part, share.labels)
        return pool if len(chosen) == len(pool[1]) else View(pool, chosen)

    def own(some: images.Images, share: Share) -> Pair:
        return prepare(some.pixels(), degrees=share.degrees), torch.tensor(share.labels)[some.y]

    def client(i: int, share: Share) -> Client:
        shard = own(train.take(share.rows), share)
        return Client(shard, seen("val", share), seen("test", share), group=share.group, key=i)

    clients = tuple(client(i, share) for i, share in enumerate(shares))
    if all([client.test is None for client in clients]):
        raise ValueError(f"{name}: no client has test images to be scored on; add some to those it trains on")
    side = train.x.shape[-1] if image_size is None else image_size
    return Problem(clients, in_channels=train.x.shape[1], num_classes=kinds, image_size=side, name=name)


WITH_PATH = ("imagefolder", "leaf")  # written with the folder they are read from: imagefolder:PATH

DATASETS = {
    "synthetic": _synthetic,
    "digits": partial(_images, images.digits),
    "mnist": partial(_images, images.mnist),
    "fashion-mnist": partial(_images, images.fashion_mnist),
    "emnist": partial(_images, images.emnist),
    "cifar10": partial(_images, images.cifar10),
    "imagefolder": _imagefolder,
    "leaf": _leaf,
}
