"""Which models are scored after an epoch: all where that is cheap, fewer where it would cost more than training.

Decided by counted work and not by the clock: so the seed decides it, and a resumed run goes on alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from hetperm.client import Client
from hetperm.runs.setting import Setting
from hetperm.shards import size_of, taken
from hetperm.state import State

SHARE = 0.1  # of the multiply-adds of training so far that scoring may take: at most 15 % of the time
FREE = 1e9  # multiply-adds that are never saved: about a second
FEWEST = 250  # validation samples of a client that are scored where all are too many
TAIL = "tail_"  # what columns of the tail average begin with
LABELS = {"test": "", "val": "val_"}  # part of the data -> what its columns begin with


@dataclass(frozen=True)
class Wanted:
    """One set of models on one part of the data.

    Attributes:
        prefix: of its columns: "" for the personal models, "tail_" for their average.
        label: what follows in its columns: "" for test data, "val_" for validation data.
        most: the largest number of samples of a client; None: all.
    """

    prefix: str
    label: str
    most: int | None = None

    @property
    def part(self) -> str:
        """The part of the data."""
        return "val" if self.label else "test"


def wanted_after(
    setting: Setting, method: str, state: State, history: Iterable[Mapping[str, Any]], *, finished: bool
) -> list[Wanted]:
    """What is scored after an epoch; nothing if the epoch is skipped.

    If the configuration says how often, all models are scored then. Otherwise all are scored while that stays below
    `SHARE` of training; epochs that would exceed it are skipped, and after the last only the models that are deployed
    are scored: on all test data, and on some validation data.

    Args:
        history: the rows of the epochs before.
        finished: whether the models were fine-tuned for this evaluation, so that it is wanted in any case.
    """
    config = setting.config
    is_last, due = state.r == config.epochs, finished
    prefixes = [""] if state.tail is None else ["", TAIL]
    everything = [Wanted(prefix, label) for prefix in prefixes for label in LABELS.values() if is_last or not label]
    # Nodes score their own models, all at once and on data that only they have.
    if config.eval_every is not None or setting.nodes is not None:
        return everything if is_last or due or state.r % (config.eval_every or 1) == 0 else []
    price = _prices(setting, method)
    spent = sum(price["test"] for row in history for prefix in ("", TAIL) if _was_scored(setting, row, prefix))
    # Before the last epoch, what scoring after it will take at least is put aside.
    asked = sum(price[one.part] for one in everything) + (0 if is_last else price["test"])
    if spent + asked <= max(FREE, SHARE * state.work.macs):
        return everything
    fewer = [Wanted(prefixes[-1], ""), *([Wanted(prefixes[-1], "val_", FEWEST)] if is_last else [])]
    return fewer if is_last or due else []


def _was_scored(setting: Setting, row: Mapping[str, Any], prefix: str) -> bool:
    return f"{prefix}{setting.metric.name}_mean" in row


def _prices(setting: Setting, method: str) -> dict[str, float]:
    """part of the data -> the multiply-adds of scoring every client's model on it."""
    macs = cache(setting.macs)
    pairs = list(zip(setting.clients, setting.model_widths(method), strict=True))
    return {part: sum(macs(width) * _size(client, part) for client, width in pairs) for part in ("test", "val")}


def _size(client: Client, part: str) -> int:
    shard = getattr(client, part)
    return 0 if shard is None else size_of(shard)


def with_fewer(clients: Sequence[Client], wanted: Wanted) -> Sequence[Client]:
    """The clients with at most so many samples of a part, spread evenly over what they have."""
    if wanted.most is None:
        return clients
    return [_thinned(client, wanted.part, wanted.most) for client in clients]


def _thinned(client: Client, part: str, most: int) -> Client:
    shard, n = getattr(client, part), _size(client, part)
    if n <= most:
        return client
    # Evenly: the first ones may all be of one class.
    return replace(client, **{part: taken(shard, torch.arange(most) * n // most)})
