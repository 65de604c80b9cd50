"""A client: its private shard, the data it is scored on, and how much of the model it can hold."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.weak import WeakIdKeyDictionary

from hetperm.shards import (
    CLEAN,
    Batch,
    Inputs,
    Shard,
    Stored,
    View,
    as_shard,
    kind_of,
    named_tensors,
    not_finite,
    size_of,
)
from hetperm.texts import shown

Pair = Batch | View  # inputs (n, ...) and labels (n, ...) in memory


# eq=False: comparing tensors gives tensors, so a generated == could not answer yes or no.
@dataclass(frozen=True, eq=False)
class Client:
    """One participant: what it trains on, what it is scored on, and how large a model it can hold.

    Attributes:
        train: the private shard: a pair of tensors or arrays, inputs (n, ...) and labels (n, ...), where labels are
            int64 classes or real numbers; or a map-style Dataset, which is read batch by batch (`shards.Stored`).
            Inputs may be several: a tuple of tensors, the model's arguments, or a dict, its keyword arguments.
        val: data to tune on, given like the shard; None where nothing is tuned.
        test: data to score on; None for a client that is not scored.
        width: the largest fraction of the global model's channels it can train, in (0, 1].
        group: the group its data come from, if known; for reports only, no algorithm sees it.
        key: the number its randomness is derived from, so that the order of clients in a list changes no result; None:
            its position in the list of a run.
        classes: (num_classes,) bool, True for the classes it trains and predicts; None: all.
        collate: from a list of samples of a Dataset to a batch: a pair (inputs, labels), or a dict of keyword arguments
            that also holds "labels"; None: torch's `default_collate`.

    Example:
        >>> Client(train=(torch.zeros(8, 60), torch.zeros(8, dtype=torch.long)), width=0.25).n_train
        8
    """

    train: Shard
    val: Shard | None = None
    test: Shard | None = None
    width: float = 1.0
    group: int | None = None
    key: int | None = None
    classes: Tensor | None = None
    collate: Callable[[list], Any] | None = None

    def __post_init__(self):
        if not (self.collate is None or callable(self.collate)):
            raise ValueError(f"{self._name}: collate is {shown(self.collate)}; it must be a function, or None")
        for part in ("train", "val", "test"):
            object.__setattr__(self, part, as_shard(getattr(self, part), self.collate))
        for part, pair in (("train", self.train), ("val", self.val), ("test", self.test)):
            if pair is not None or part == "train":
                fault = _fault(pair)
                if fault:
                    raise ValueError(f"{self._name}: {part} {fault}")
        if self.collate is not None and not any([isinstance(x, Stored) for x in (self.train, self.val, self.test)]):
            raise ValueError(
                f"{self._name}: collate makes batches of the samples of a Dataset, and its data are in memory already; "
                "leave collate out, or give a Dataset"
            )
        for part, pair in (("val", self.val), ("test", self.test)):
            shapes = input_shape(self.train), None if pair is None else input_shape(pair)
            if None not in shapes and shapes[0] != shapes[1]:
                raise ValueError(f"{self._name}: an input of {part} has shape {shapes[1]} and one of train {shapes[0]}")
        if not isinstance(self.width, Real) or isinstance(self.width, bool) or not 0 < self.width <= 1:
            raise ValueError(f"{self._name}: width {shown(self.width)} is outside (0, 1]")
        object.__setattr__(self, "width", float(self.width))  # it may be a fraction
        if not (self.key is None or _is_whole(self.key)):
            raise ValueError(f"{self._name}: a key is a whole number; got {type(self.key).__name__}")
        # No text: tables of clients hold numbers, and a report could not be written of others.
        if not (self.group is None or _is_whole(self.group)):
            raise ValueError(f"{self._name}: group is {shown(self.group)}; it must be a whole number, or None")
        for name in ("key", "group"):
            if getattr(self, name) is not None:
                if abs(getattr(self, name)) >= 2**63:
                    raise ValueError(f"{self._name}: {name} is {shown(getattr(self, name))}; it must be below 2^63")
                object.__setattr__(self, name, int(getattr(self, name)))  # numpy has whole numbers of its own
        if not (self.classes is None or (isinstance(self.classes, Tensor) and self.classes.dtype == torch.bool)):
            raise ValueError(f"{self._name}: classes is {kind_of(self.classes)}; it must be a tensor of bool, or None")
        if self.classes is not None and self.classes.layout is not torch.strided:
            raise ValueError(f"{self._name}: classes is a sparse tensor; give a dense one (to_dense)")
        if self.classes is not None and self.classes.is_meta:
            raise ValueError(f"{self._name}: classes is on the meta device, which holds no values; give a real one")
        if self.classes is not None and not (self.classes.dim() == 1 and self.classes.any()):
            raise ValueError(
                f"{self._name}: classes has shape {tuple(self.classes.shape)} and {int(self.classes.sum())} of them "
                "are True; it must be one value a class, True for at least one"
            )

    def data(self, part: str) -> Shard:
        """Its shard ("train") or its validation data ("val")."""
        return self.train if part == "train" else self.val

    @property
    def n_train(self) -> int:
        """Training samples, the n_i of the paper."""
        return size_of(self.train)

    @property
    def n_val(self) -> int:
        """Validation samples."""
        return 0 if self.val is None else size_of(self.val)

    @property
    def _name(self) -> str:
        return "a client without a key" if self.key is None else f"client {shown(self.key)}"


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


MOST_STORED = 2**28  # samples of a Dataset, of which as many numbers are drawn for every visit
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
_OF_SEVERAL = (*_DTYPES, torch.int32, torch.bool)  # of several inputs some may be masks or positions


def _fault(shard: object) -> str | None:
    """What is wrong with a shard, or None. Of stored samples none is read here."""
    if isinstance(shard, Stored):
        return _fault_of_stored(shard)
    pair = shard.pool if isinstance(shard, View) else shard  # reading a view would copy its rows
    if isinstance(pair, IterableDataset):
        return "is an IterableDataset, which has no rows to draw; give a map-style Dataset"
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and _are_batches(pair[0]) and _is_batch(pair[1])):
        return f"must be a pair of tensors, inputs and labels, samples first; got {kind_of(shard)} (or give a Dataset)"
    several = not isinstance(pair[0], Tensor)
    tensors = named_tensors(pair)
    for label, tensor in tensors:
        if tensor.is_meta:
            return f"{label} are on the meta device, which holds no numbers; give them on a real one"
    for _, x in tensors[:-1]:
        if len(x) != len(pair[1]):
            return f"has {len(x)} inputs and {len(pair[1])} labels"
    for label, tensor in tensors:
        if tensor.dtype not in (_OF_SEVERAL if several and label == "inputs" else _DTYPES):
            return f"{label} are {tensor.dtype}; convert classes with .long() and measurements with .float()"
        if tensor.layout != torch.strided:
            return f"{label} are {tensor.layout}; convert them with .to_dense()"
    # Of the shard, not of the pool: a view may be empty although its pool is not.
    if size_of(shard) == 0:
        return _EMPTY
    for label, tensor in tensors:
        # Of a pool that is not finite the rows of a view may be.
        wrong = not _finite(tensor) and not_finite(tensor[shard.rows] if isinstance(shard, View) else tensor)
        if wrong:
            return f"{label} hold {wrong[1]} (first in sample {wrong[0]}); {CLEAN}"
    return None


_EMPTY = "is empty; a client needs at least one training sample, and None stands for no val or test"


def _fault_of_stored(shard: Stored) -> str | None:
    try:
        if shard.size > MOST_STORED:
            return f"has {shard.size:,} samples by its __len__; it must have at most {MOST_STORED:,}"
        return None if shard.size else _EMPTY
    except Exception:  # a Dataset is a user's code
        return f"is a {type(shard.dataset).__name__} without a length; give it a __len__, the number of its samples"


def _is_batch(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.dim() > 0


def _are_batches(inputs: object) -> bool:
    """Whether these are inputs: a batch, or several in a tuple or dict."""
    if isinstance(inputs, tuple | list | dict):
        values = inputs.values() if isinstance(inputs, dict) else inputs
        return len(inputs) > 0 and all([_is_batch(x) for x in values])
    return _is_batch(inputs)


_FINITE = WeakIdKeyDictionary()  # tensor -> its version when it was last found finite


def _finite(tensor: Tensor) -> bool:
    # Remembered: many clients share a test pool, and every `replace` of a client checks it anew.
    if not tensor.is_floating_point() or _FINITE.get(tensor) == tensor._version:
        return True
    finite = not_finite(tensor) is None
    if finite:
        _FINITE[tensor] = tensor._version
    return finite


def input_shape(shard: Shard) -> tuple[int, ...] | None:
    """The shape of one input, read without copying a view; None of several inputs and of stored samples."""
    if isinstance(shard, Stored):
        return None
    x: Inputs = shard.pool[0] if isinstance(shard, View) else shard[0]
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else None
