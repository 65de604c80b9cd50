"""Shards: the samples of a client, in memory or read when they are needed.

A shard is a pair of tensors (inputs, labels), a `View` of such a pair, or `Stored` samples. Inputs are a tensor, or
several: a tuple (positional arguments of the model) or a dict (keyword arguments). The functions below read all of
them alike, so that nobody else asks what kind a shard is.
"""

import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from hetperm.texts import one_line, shown

Inputs = Tensor | tuple | dict  # what a model takes: a tensor (n, ...), or several
Batch = tuple[Inputs, Tensor]  # inputs and labels, in memory
LABELS = ("labels", "label")  # the keys of a dict batch that hold its labels
CLEAN = "leave such samples out, or replace the value"


# eq=False, here and below: comparing tensors gives tensors, so a generated == could not answer yes or no.
@dataclass(frozen=True, eq=False)
class View(Sequence):
    """Some rows of a pool that many clients share. It reads like the pair (x, y), and copies rows only when read.

    Attributes:
        pool: inputs (n, ...) and labels (n,), shared.
        rows: (m,) the rows of the pool, in this order.

    Example:
        >>> x, y = View((torch.eye(3), torch.tensor([7, 8, 9])), torch.tensor([2, 0]))
        >>> y
        tensor([9, 7])
    """

    pool: Batch
    rows: Tensor

    def __len__(self) -> int:
        return 2  # it is a pair

    def __getitem__(self, item: int) -> Inputs:
        return mapped(lambda x: x[self.rows], self.pool[item])

    def batches(self, size: int) -> Iterator[Batch]:
        """(x, y) of at most ``size`` rows at a time, so that no more than these are copied."""
        return (_rows(self.pool, rows) for rows in self.rows.split(size))


@dataclass(frozen=True, eq=False)
class Stored:
    """Samples of a map-style Dataset, which are read when they are needed and not kept.

    Attributes:
        dataset: anything with a length whose items are samples.
        collate: from a list of samples to a batch: a pair (inputs, labels), or a dict that also holds "labels"; None:
            torch's own `default_collate`.
        rows: (m,) the samples that are meant, in this order; None: all.
        device, dtype: where batches are put, and the precision of measurements; None: as they come.
        most: the most samples that are in memory at once; None: as many as are asked for.
    """

    dataset: Any
    collate: Callable[[list], Any] | None = None
    rows: Tensor | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    most: int | None = None

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.dataset) if self.rows is None else len(self.rows)

    def read(self) -> Batch:
        """All samples, collated."""
        rows = list(range(self.size)) if self.rows is None else self.rows.tolist()
        # What torch's DataLoader asks for too: a data set may read many samples faster than one by one.
        many = getattr(self.dataset, "__getitems__", None)
        samples = [self._sample(row) for row in rows] if many is None else many(rows)
        inputs, labels = _pair(self._collated(samples, rows))
        if len(labels) != len(rows):
            raise ValueError(f"a batch of {len(rows)} samples has {len(labels)} labels; collate must keep every sample")
        batch = mapped(self._placed, inputs), self._placed(labels)
        for part, x in named_tensors(batch):
            # Minus infinity is what masks of attention add to a score.
            wrong = not_finite(x) and not_finite(x.masked_fill(x == -torch.inf, 0.0))
            if wrong:
                # Inputs that collate makes need not have a row for every sample.
                sample = f"sample {rows[wrong[0]]}" if x.shape[:1] == (len(rows),) else f"the batch of sample {rows[0]}"
                raise ValueError(f"{part} of {sample} of the Dataset hold {wrong[1]}; {CLEAN}")
        return batch

    def _sample(self, row: int) -> Any:
        try:
            return self.dataset[row]
        except LookupError as error:
            raise ValueError(
                f"the Dataset says that it has {len(self.dataset)} samples and raises {shown(error)} for sample {row}; "
                "its __len__ must be the number of its samples"
            ) from error

    def _collated(self, samples: list, rows: list[int]) -> Any:
        try:
            return default_collate(samples) if self.collate is None else self.collate(samples)
        except Exception as error:  # samples and collate are a user's
            k = next((k for k, one in enumerate(samples) if one is None), None) if isinstance(samples, list) else None
            which = f"{len(rows)} samples from {rows[0]} on" if k is None else f"sample {rows[k]}, which is None,"
            reason = one_line(str(error)) or type(error).__name__
            raise ValueError(f"{which} of the Dataset cannot be made a batch ({reason})") from error

    def _placed(self, x: Tensor) -> Tensor:
        return x.detach().to(self.device, self.dtype if x.is_floating_point() else None)


def _pair(batch: Any) -> Batch:
    """The inputs and the labels of a collated batch."""
    if isinstance(batch, Mapping):
        key = next((key for key in LABELS if key in batch), None)
        if key is not None and isinstance(batch[key], Tensor):
            return {name: value for name, value in batch.items() if name != key}, batch[key]
    elif isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    got = f"dict of {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else kind_of(batch)
    raise ValueError(
        f"a batch of the data set is a {got}; it must be a pair (inputs, labels) or a dict that holds 'labels', all of "
        "tensors: give Client a collate that makes one from a list of samples"
    )


Shard = Batch | View | Stored


def mapped(function: Callable[[Tensor], Any], inputs: Inputs) -> Any:
    """The inputs with every tensor replaced by a function of it; what is no tensor stays."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: mapped(function, x) for name, x in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple([mapped(function, x) for x in inputs])
    return inputs


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors among inputs, in order."""
    found: list[Tensor] = []
    mapped(found.append, inputs)
    return found


def named_tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    """The tensors of a batch, each under the name "inputs" or "labels"."""
    return [*(("inputs", x) for x in tensors_of(batch[0])), ("labels", batch[1])]


def not_finite(x: Tensor) -> tuple[int, float] | None:
    """The first row (n, ...) that holds nan, inf or -inf, and that value; None if all numbers are finite.

    Example:
        >>> not_finite(torch.tensor([[1.0, 2.0], [torch.inf, torch.nan]]))
        (1, inf)
    """
    # A finite sum settles it ten times faster; a sum may also overflow, hence the second look.
    if not x.is_floating_point() or x.sum().isfinite() or x.isfinite().all():
        return None
    row, *place = (~torch.atleast_1d(x).isfinite()).nonzero()[0].tolist()
    return row, float(torch.atleast_1d(x)[row, *place])


def size_of(shard: Shard) -> int:
    """The number of samples."""
    if isinstance(shard, Stored):
        return shard.size
    return len(shard.rows) if isinstance(shard, View) else len(shard[1])


def taken(shard: Shard, rows: Tensor) -> Shard:
    """The shard of some rows, in this order: tensors are copied, stored samples not read yet."""
    if isinstance(shard, Stored):
        return replace(shard, rows=rows.cpu() if shard.rows is None else shard.rows[rows.cpu()])
    if isinstance(shard, View):
        return _rows(shard.pool, shard.rows[rows])
    return _rows(shard, rows)


def first(shard: Shard, count: int) -> Shard:
    """The shard of the first samples: tensors are not copied, stored samples not read yet."""
    return _slice(shard, 0, min(count, size_of(shard)))


def at_once(shard: Shard, size: int) -> int:
    """The samples that may be in memory at once, if ``size`` are asked for: fewer of stored ones, perhaps."""
    return min(size, shard.most) if isinstance(shard, Stored) and shard.most else size


def read(shard: Shard) -> Batch:
    """All samples, in memory."""
    return shard.read() if isinstance(shard, Stored) else (shard[0], shard[1])


def rows_of(shard: Shard, rows: Tensor) -> Batch:
    """Some samples, in memory; of a view and of stored samples only these are copied or read."""
    return read(taken(shard, rows))


def parts(shard: Shard, count: int) -> Iterator[Batch]:
    """The samples in ``count`` parts of nearly equal size, one at a time; tensors are not copied.

    Of stored samples there are more parts if so many may not be in memory at once.
    """
    n = size_of(shard)
    count = max(count, math.ceil(n / max(1, at_once(shard, n))))
    size, longer = divmod(n, count)
    ends = [k * size + min(k, longer) for k in range(count + 1)]
    return (read(_slice(shard, start, end)) for start, end in pairwise(ends))


def batches_of(shard: Shard, size: int) -> Iterator[Batch]:
    """The samples, at most ``size`` at a time; the last batch may be smaller."""
    if isinstance(shard, View):
        return shard.batches(size)
    n, size = size_of(shard), at_once(shard, size)
    return (read(_slice(shard, start, min(start + size, n))) for start in range(0, n, size))


def labels_of(shard: Shard, size: int = 512) -> Tensor:
    """(n, ...) the labels alone; stored samples are read once, at most ``size`` at a time, unless labels are known."""
    known = known_labels(shard)
    return torch.cat([y for _, y in batches_of(shard, size)]) if known is None else known


def known_labels(shard: Shard) -> Tensor | None:
    """(n, ...) the labels if they are at hand; None of stored samples whose data set does not list its ``labels``."""
    if not isinstance(shard, Stored):
        return shard[1]
    labels = getattr(shard.dataset, "labels", None)
    if not (isinstance(labels, Tensor) and shard.collate is None and len(labels) == len(shard.dataset)):
        return None
    return labels if shard.rows is None else labels[shard.rows]


def _rows(pair: Batch, rows: Tensor) -> Batch:
    x, y = pair
    # The tensor first: it is what nearly every shard has, and this is asked at every step.
    return (x[rows] if isinstance(x, Tensor) else mapped(lambda one: one[rows], x)), y[rows]


def _slice(shard: Shard, start: int, end: int) -> Shard:
    if isinstance(shard, Stored | View):
        return taken(shard, torch.arange(start, end))
    x, y = shard
    return mapped(lambda one: one[start:end], x), y[start:end]


# From what users have to a shard


def as_shard(value: Any, collate: Callable[[list], Any] | None) -> Any:
    """What a user gave as a shard: arrays become tensors, and a Dataset `Stored` samples; the rest stays as it is.

    Tensors that were computed from parameters are cut off from these: a shard is not trained.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        if not any([isinstance(x, np.ndarray) or _has_history(x) for part in value for x in _leaves(part)]):
            return value
        return _converted(value[0], labels=False), _converted(value[1], labels=True)
    return Stored(value, collate) if is_dataset(value) else value


def is_dataset(value: Any) -> bool:
    """Whether a value is a map-style data set, of torch or by its methods (as Hugging Face's are)."""
    if isinstance(value, IterableDataset | View | Stored | Tensor | np.ndarray | str | bytes | Mapping | tuple | list):
        return False
    return isinstance(value, Dataset) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))


def kind_of(value: Any) -> str:
    """The type of a value for errors, and those of its items if it is a list or a tuple."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join([type(item).__name__ for item in value]) or 'nothing'}"
    return type(value).__name__


def _leaves(inputs: Any) -> list[Any]:
    if isinstance(inputs, Mapping):
        return [leaf for x in inputs.values() for leaf in _leaves(x)]
    if isinstance(inputs, tuple | list):
        return [leaf for x in inputs for leaf in _leaves(x)]
    return [inputs]


def _has_history(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _converted(value: Any, *, labels: bool) -> Any:
    """Arrays as tensors that share their memory where the type allows it; whole numbers become int64."""
    if isinstance(value, Mapping):
        return {name: _converted(x, labels=labels) for name, x in value.items()}
    if isinstance(value, tuple | list):
        return tuple([_converted(x, labels=labels) for x in value])
    if _has_history(value):
        return value.detach()
    # What is masked would be believed all the same: it is left for the check to refuse.
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return value
    if not value.dtype.isnative:  # files of instruments have the other order of bytes
        value = value.astype(value.dtype.newbyteorder("="))
    # Bytes are pixels more often than classes: among inputs they are left for the check to refuse.
    whole = value.dtype.kind in "iu" and (labels or value.dtype.itemsize > 1)
    if whole and value.dtype != np.int64:
        value = value.astype(np.int64)
    if any([step < 0 for step in value.strides]):
        value = value.copy()
    try:
        with warnings.catch_warnings():
            # torch warns of memory that must not be written to, such as a mapped file; nothing here writes to a shard.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(value)
    except TypeError:  # texts, objects: the check names the type
        return value


class Cached(Dataset):
    """A Dataset whose samples stay in memory once they were read, up to a bound; the oldest unused make room.

    For data sets whose samples are costly to make, such as a folder of images: what fits is decoded once, and the rest
    every time it is read. A sample must be the same whenever it is read: random changes belong into `augment`.

    Args:
        dataset: the map-style data set.
        mb: the most memory that kept samples take, in MB.

    Example:
        >>> images = Cached([(torch.zeros(3, 64, 64), 0)] * 100, mb=1)
        >>> [images[k][1] for k in (0, 1, 0)], images.mb_kept
        ([0, 0, 0], 0.09375)
    """

    def __init__(self, dataset: Any, mb: float):
        if isinstance(dataset, type | str | bytes | Mapping) or not {"__len__", "__getitem__"} <= set(dir(dataset)):
            raise TypeError(f"the dataset is {shown(dataset)}; it must be a map-style Dataset")
        try:
            len(dataset)
        except Exception as error:  # a Dataset is a user's code
            raise TypeError(
                f"the dataset is {shown(dataset)}, which has no length ({one_line(str(error))}); it must be a "
                "map-style Dataset"
            ) from error
        if isinstance(mb, bool) or not (isinstance(mb, int | float) and mb > 0):
            raise ValueError(f"a cache of {shown(mb)} MB holds nothing; give a number above 0")
        self.dataset, self._most = dataset, mb * 2**20
        self._kept: OrderedDict[int, tuple[Any, int]] = OrderedDict()  # row -> (sample, its bytes), oldest use first
        self._bytes = 0
        self._lock = threading.Lock()  # clients that share a data set may be read by several threads

    @property
    def mb_kept(self) -> float:
        """The memory that kept samples take now, in MB."""
        return self._bytes / 2**20

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        with self._lock:
            if row in self._kept:
                self._kept.move_to_end(row)
                return self._kept[row][0]
        sample = self.dataset[row]
        size = sum([_bytes(leaf) for leaf in _leaves(sample)])
        with self._lock:
            if row not in self._kept and size <= self._most:
                self._kept[row] = (sample, size)
                self._bytes += size
                while self._bytes > self._most:
                    self._bytes -= self._kept.popitem(last=False)[1][1]
        return sample

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot be sent to another process, and what is kept need not be.
        return {"dataset": self.dataset, "mb": self._most / 2**20}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)


def _bytes(leaf: Any) -> int:
    if isinstance(leaf, Tensor | np.ndarray):
        return leaf.nbytes
    size = getattr(leaf, "size", None)
    if isinstance(size, tuple) and hasattr(leaf, "getbands"):  # an image of PIL
        return size[0] * size[1] * len(leaf.getbands())
    return len(leaf) if isinstance(leaf, str | bytes) else 0
