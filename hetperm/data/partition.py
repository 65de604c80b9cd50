"""Who holds which training samples: iid, classes:k, class-groups:k, dirichlet:a, label-shift:g, rotation:g, natural.

A partition says what a client's data look like; dealing then hands every sample to at most one client. How many
samples of a class a client gets is drawn, never exactly balanced: balanced shards would differ from one another by less
than chance, and everything that compares a difference with chance would be misled. Groups are as even as N allows, and
are drawn independently of everything else about a client.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetperm.advice import closest
from hetperm.data.dealing import deal_alike, deal_all, deal_some
from hetperm.randomness import seed_for
from hetperm.texts import shown

MOST_ROTATIONS = 360


@dataclass(frozen=True, eq=False)
class Share:
    """What one client gets.

    Attributes:
        rows: (n,) rows of the training pool, ascending.
        classes: the classes of the pool it is scored on.
        group: its group, or None if the partition has no groups.
        labels: its label for each class of the pool: y becomes ``labels[y]``.
        degrees: how far its images are turned, counter-clockwise.
        writer: the one writer whose images it holds and is scored on; None if its images have no common writer.
    """

    rows: Tensor
    classes: tuple[int, ...]
    group: int | None
    labels: tuple[int, ...]
    degrees: float
    writer: int | None = None


@dataclass(frozen=True, eq=False)
class _Plan:
    """What clients' data look like, before any image is dealt.

    Attributes:
        mix: (N, C) logarithm of the share of each class in each client's data; None if all are like the pool.
        held: (N, C) the classes of each client; None: those it happens to get images of.
        groups: (N,) group of each client, or None.
        labels: the label map of each group, or None for the labels as they are.
        degrees: the rotation of each group, or None.
    """

    mix: np.ndarray | None = None
    held: np.ndarray | None = None
    groups: np.ndarray | None = None
    labels: list[np.ndarray] | None = None
    degrees: list[float] | None = None


def divide(
    partition: str,
    labels: Tensor,
    *,
    num_classes: int,
    num_clients: int,
    samples_per_client: int | None = None,
    seed: int,
    writers: Tensor | None = None,
) -> tuple[Share, ...]:
    """The share of every client.

    Args:
        partition: such as ``label-shift:2``.
        labels: (n,) classes of the training pool.
        samples_per_client: None deals out every image that a client may hold. Clients that are like the pool get equal
            parts. Otherwise each image goes to a client that holds its class, drawn by how much of it each one holds.
        writers: (n,) whom each sample of the training pool comes from; None if the data do not say.

    Example:
        >>> shares = divide("class-groups:2", torch.arange(40) % 4, num_classes=4, num_clients=2, seed=0)
        >>> sorted(len(share.rows) for share in shares), len({share.classes for share in shares})
        ([20, 20], 2)
    """
    rule, argument = parse(partition, num_classes)
    if rule is by_writer:
        return by_writer(
            writers, num_clients, num_classes, samples_per_client=samples_per_client, seed=seed, name=partition
        )
    y = labels.numpy()
    if samples_per_client is not None and num_clients * samples_per_client > len(y):
        raise ValueError(
            f"{num_clients} clients of {samples_per_client} samples need {num_clients * samples_per_client} training "
            f"samples and the training pool holds {len(y)}; lower samples_per_client or num_clients"
        )
    if num_clients > len(y):
        raise ValueError(
            f"{num_clients} clients cannot share the {len(y)} training samples there are; lower num_clients, or "
            "validation_share if it leaves few"
        )
    plan = rule(argument, num_clients, num_classes, np.random.default_rng(seed_for(seed, "partition", rule.__name__)))
    # Another stream than the plan's: how many images are dealt changes nobody's group or classes.
    rng = np.random.default_rng(seed_for(seed, "deal"))
    if plan.mix is None:
        owner = deal_alike(len(y), num_clients, samples_per_client, rng)
    elif samples_per_client is None:
        owner = deal_all(y, plan.mix, partition, rng)
    else:
        owner = deal_some(y, plan.mix, samples_per_client, partition, rng)
    return tuple(_share(i, np.flatnonzero(owner == i), y, plan, num_classes) for i in range(num_clients))


def _share(i: int, rows: np.ndarray, y: np.ndarray, plan: _Plan, num_classes: int) -> Share:
    group = None if plan.groups is None else int(plan.groups[i])
    if plan.mix is None:
        classes = range(num_classes)
    else:
        classes = (np.unique(y[rows]) if plan.held is None else np.flatnonzero(plan.held[i])).tolist()
    labels = range(num_classes) if plan.labels is None else plan.labels[group].tolist()
    degrees = 0.0 if plan.degrees is None else plan.degrees[group]
    return Share(torch.from_numpy(rows), tuple(classes), group, tuple(labels), degrees)


def by_writer(
    writers: Tensor | None,
    num_clients: int,
    num_classes: int,
    *,
    samples_per_client: int | None = None,
    seed: int,
    name: str = "natural",
) -> tuple[Share, ...]:
    """One writer or user for each client, in the order of their numbers; the data come divided, so nothing is dealt.

    Who takes part is drawn, and the users of a smaller federation are among those of a larger one. With
    ``samples_per_client``, only users with that many training samples are drawn.

    Args:
        writers: (n,) whom each sample of the training pool comes from.
        name: what an error calls the partition.
    """
    people = f"{name}s" if name == "writer" else "users"
    if writers is None:
        raise ValueError(
            f"partition {name!r} makes a client of every {people[:-1]}, and only leaf:PATH and an npz:PATH with 'user' "
            "say whom a sample comes from; write another partition, such as 'iid'"
        )
    names, inverse, counts = np.unique(writers.numpy(), return_inverse=True, return_counts=True)
    least = 1 if samples_per_client is None else samples_per_client
    able = np.flatnonzero(counts >= least)
    if num_clients > len(able):
        raise ValueError(
            f"{name}: {num_clients} clients are too many for the {len(able)} {people} there are; lower num_clients"
            if samples_per_client is None
            else f"{name}: {len(able)} of {len(names)} {people} have {least} training samples, too few for "
            f"{num_clients} clients; lower samples_per_client or num_clients"
        )
    rng = np.random.default_rng(seed_for(seed, "partition", "writer"))
    rows_of = np.split(np.argsort(inverse, kind="stable"), counts.cumsum()[:-1])

    def share(k: int) -> Share:
        writer, rows = int(names[k]), rows_of[k]
        if samples_per_client is not None:
            # A generator for each of them: their samples do not depend on who else takes part.
            rng = np.random.default_rng(seed_for(seed, "deal", "writer", writer))
            rows = np.sort(rng.choice(rows, samples_per_client, replace=False))
        everything = tuple(range(num_classes))
        return Share(torch.from_numpy(rows), everything, group=None, labels=everything, degrees=0.0, writer=writer)

    # The beginning of one permutation, so that more clients only add writers.
    return tuple(share(k) for k in np.sort(rng.permutation(able)[:num_clients]))


# Names


def parse(partition: str, num_classes: int) -> tuple[Callable[..., _Plan | tuple[Share, ...]], float | int | None]:
    """The rule a name stands for and its number, checked against the number of classes."""
    name, colon, text = partition.partition(":")
    if name not in PARTITIONS:
        close = closest(name, PARTITIONS)
        advice = f"did you mean {close + colon + text!r}?" if close else f"write one of {', '.join(_forms())}"
        raise ValueError(f"unknown partition {shown(partition)}; {advice}")
    rule, letter = PARTITIONS[name]
    if letter is None:
        if colon:
            raise ValueError(f"partition {partition!r}: {name} takes no number; write {name!r}")
        return rule, None
    if letter == "a":
        value, allowed = _number(float, text), "a positive number"
        good = value is not None and 0 < value < math.inf
    else:
        # Of more than num_classes label maps, two would have to agree on some class. Groups a degree apart are alike.
        largest = MOST_ROTATIONS if name == "rotation" else num_classes
        value, allowed = _number(int, text), f"a whole number from 1 to {largest}"
        good = value is not None and 1 <= value <= largest
    if not good:
        upto = f" (there are {num_classes} classes)" if " to " in allowed and name != "rotation" else ""
        raise ValueError(f"partition {partition!r}: the {letter} of {name}:{letter} must be {allowed}{upto}")
    return rule, value


def _number(kind: type, text: str) -> float | int | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _forms() -> list[str]:
    return [name if letter is None else f"{name}:{letter}" for name, (_, letter) in PARTITIONS.items()]


# Rules: (argument, N, C, generator) -> plan


def iid(_: None, N: int, C: int, rng: np.random.Generator) -> _Plan:
    """Every client has data like the pool."""
    return _Plan()


def classes(k: int, N: int, C: int, rng: np.random.Generator) -> _Plan:
    """k random classes a client; every class is held by as many clients as any other, give or take one.

    Clients that hold the same classes are one group.
    """
    holders = np.zeros(C, dtype=int)
    held = np.zeros((N, C), dtype=bool)
    for i in rng.permutation(N):
        chosen = np.lexsort((rng.random(C), holders))[:k]  # the classes with the fewest holders, ties at random
        holders[chosen] += 1
        held[i, chosen] = True
    return _Plan(mix=_even(held), held=held, groups=np.unique(held, axis=0, return_inverse=True)[1].reshape(-1))


def class_groups(k: int, N: int, C: int, rng: np.random.Generator) -> _Plan:
    """Disjoint groups of k random classes; C mod k classes are left over and nobody holds them."""
    order = rng.permutation(C)
    groups = _even_groups(C // k, N, rng)
    held = np.zeros((N, C), dtype=bool)
    for i, group in enumerate(groups):
        held[i, order[group * k : (group + 1) * k]] = True
    return _Plan(mix=_even(held), held=held, groups=groups)


def dirichlet(a: float, N: int, C: int, rng: np.random.Generator) -> _Plan:
    """Each client's classes are mixed by a draw from Dirichlet(a): one class for small a, like the pool for large a."""
    # In logarithms, by Gamma(a) = Gamma(a + 1) U^(1/a): for small a nearly all of the shares are below the least float.
    with np.errstate(over="ignore"):
        log_gamma = np.log(rng.standard_gamma(a + 1, (N, C))) + np.log(1 - rng.random((N, C))) / a
    # Not -inf: that would say that the client may not hold the class at all, and a row of it has no sum.
    log_gamma = np.maximum(log_gamma, -1e300)
    return _Plan(mix=log_gamma - np.logaddexp.reduce(log_gamma, axis=1, keepdims=True))


def label_shift(g: int, N: int, C: int, rng: np.random.Generator) -> _Plan:
    """g groups, each with its own permutation of the labels; group 0 keeps them, and no two agree on any class."""
    # Shifts along one cycle through all classes: two different shifts agree nowhere.
    cycle = rng.permutation(C)
    maps = [np.empty(C, dtype=int) for _ in range(g)]
    for shift, labels in enumerate(maps):
        labels[cycle] = np.roll(cycle, -shift)
    return _Plan(groups=_even_groups(g, N, rng), labels=maps)


def rotation(g: int, N: int, C: int, rng: np.random.Generator) -> _Plan:
    """g groups, group c turned by c * 360 / g degrees."""
    return _Plan(groups=_even_groups(g, N, rng), degrees=[c * 360 / g for c in range(g)])


PARTITIONS = {
    "iid": (iid, None),
    "classes": (classes, "k"),
    "class-groups": (class_groups, "k"),
    "dirichlet": (dirichlet, "a"),
    "label-shift": (label_shift, "g"),
    "rotation": (rotation, "g"),
    "natural": (by_writer, None),
    "writer": (by_writer, None),  # what LEAF's users are in FEMNIST
}


def _even(held: np.ndarray) -> np.ndarray:
    """(N, C) log shares: the classes a client holds in equal parts."""
    return np.where(held, -np.log(held.sum(1, keepdims=True)), -np.inf)


def _even_groups(g: int, N: int, rng: np.random.Generator) -> np.ndarray:
    """(N,) groups whose sizes differ by one at most; every group has a client if there are enough of them."""
    return rng.permutation(np.arange(N) % g)
