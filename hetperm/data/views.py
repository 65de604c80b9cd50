"""The pools as clients see them: prepared and in memory, or decoded when they are read with a bounded number kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hetperm.client import Client, Pair, View
from hetperm.data import images
from hetperm.data.folder import Files
from hetperm.data.partition import Share
from hetperm.memory import available_bytes
from hetperm.shards import Cached, Stored

MOST = 512 * 2**20  # bytes of inputs that are decoded at once, and of pixels that are kept of larger sets


def bound() -> int:
    """Bytes that data may take: `MOST`, or a quarter of the free memory if that is less."""
    free = available_bytes()
    return MOST if free is None else min(MOST, free // 4)


class Views:
    """The pools as clients see them: turned, with other labels, only some classes.

    What several clients see is made once: 50 clients share one test pool, or one for each rotation.

    Args:
        pools: train, val and test; `prepare`: (pixels, degrees=) -> inputs of a model.
    """

    def __init__(self, pools: Mapping[str, images.Images], prepare: Callable[..., torch.Tensor]):
        self.pools, self.prepare = pools, prepare
        # Caches of this object, not of its methods: they are freed with it. Their keys are tuples, which can be hashed.
        self.pixels = cache(lambda part: pools[part].pixels())
        self.inputs = cache(lambda part, degrees: prepare(self.pixels(part), degrees=degrees))
        self.answers = cache(lambda part, labels: torch.tensor(labels)[pools[part].y])
        self.rows = cache(lambda part, classes: torch.isin(pools[part].y, torch.tensor(classes)).nonzero().squeeze(1))

    def client(self, i: int, share: Share) -> Client:
        """Client i, with its own shard and views of the pools that it is tuned and scored on."""
        shard = self._own(self.pools["train"].take(share.rows), share)
        return Client(shard, self._seen("val", share), self._seen("test", share), group=share.group, key=i)

    def _own(self, some: images.Images, share: Share) -> Pair:
        return self.prepare(some.pixels(), degrees=share.degrees), torch.tensor(share.labels)[some.y]

    def _seen(self, part: str, share: Share) -> Pair | None:
        """A pool as a client sees it; None if it holds nothing for this client."""
        if share.writer is not None:
            mine = (self.pools[part].writer == share.writer).nonzero().squeeze(1)
            return self._own(self.pools[part].take(mine), share) if len(mine) else None
        rows = self.rows(part, share.classes)
        if len(rows) == 0:
            return None
        pool = self.inputs(part, share.degrees), self.answers(part, share.labels)
        # With all rows, the shared pool itself: a view would copy it each time it is read.
        return pool if len(rows) == len(pool[1]) else View(pool, rows)


class Pixels(Dataset):
    """Images of a folder as uint8 (3, side, side), each decoded when it is asked for."""

    def __init__(self, files: Files):
        self.files = files

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, row: int) -> Tensor:
        return self.files.image(row)


@dataclass(frozen=True, eq=False)
class Prepared(Dataset):
    """Some images of a pool as inputs of a model, with their labels.

    Attributes:
        pixels: the pool's images, shared by all clients and kept as far as the bound allows.
        rows: (m,) those that are meant.
        labels: (m,) their classes.
        prepare: from pixels (n, 3, side, side) to inputs of a model.
    """

    pixels: Cached
    rows: Tensor
    labels: Tensor
    prepare: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([k])[0]

    def __getitems__(self, ks: Sequence[int]) -> list[tuple[Any, Any]]:
        """Several samples, prepared together."""
        x = torch.stack([self.pixels[row] for row in self.rows[ks].tolist()])
        return list(zip(self.prepare(x), self.labels[ks], strict=True))


class StoredViews:
    """The pools as clients see them, where images are decoded when they are read; arguments are those of `Views`."""

    def __init__(self, pools: Mapping[str, images.Images], prepare: Callable[..., torch.Tensor]):
        self.pools, self.prepare = pools, prepare
        # One bound for all pools, each with its part: a training image is read more often than a test image.
        mb = bound() / 2**20
        shares = {"train": 0.75 * mb, "val": 0.125 * mb, "test": 0.125 * mb}
        self.pixels = {part: Cached(Pixels(pool.x), shares[part]) for part, pool in pools.items()}

    def client(self, i: int, share: Share) -> Client:
        """Client i; no image is read yet."""
        seen = {
            part: torch.isin(self.pools[part].y, torch.tensor(share.classes)).nonzero().squeeze(1)
            for part in ("val", "test")
        }
        shards = {part: self._shard(part, rows, share) for part, rows in {"train": share.rows, **seen}.items()}
        return Client(**shards, group=share.group, key=i)

    def _shard(self, part: str, rows: torch.Tensor, share: Share) -> Stored | None:
        if len(rows) == 0:
            return None
        labels = torch.tensor(share.labels)[self.pools[part].y[rows]]
        return Stored(Prepared(self.pixels[part], rows, labels, partial(self.prepare, degrees=share.degrees)))
