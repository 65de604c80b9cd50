"""Capacity profiles: tiers, shares, budgets -> the width of every client. Imports torch only inside functions."""

import math
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Rational, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetperm.advice import did_you_mean
from hetperm.checks import LARGEST
from hetperm.checks import path as checked_path
from hetperm.config import SHIPPED as CONFIGS
from hetperm.config import read
from hetperm.texts import shown

if TYPE_CHECKING:
    from submodels import Cost, ScalableModel

SHIPPED = CONFIGS / "profiles"
LIMITS = ("train_mb", "mmacs", "wire_mb")  # those of submodels.Budget
REQUIRED = ("share", "width")  # keys of a tier's table; the table is named after the tier
SPEEDS = ("down_mbps", "up_mbps", "slow")
OPTIONAL = (*LIMITS, *SPEEDS)
SLOWEST, FASTEST = 1e-6, 1e9  # of speeds: beyond, a second of the simulated clock means nothing
KEYS = (*REQUIRED, *OPTIONAL)
LONGEST_NAME = 60  # letters of a tier's name: tables and pictures show it
MOST_TIERS = 100
TOTAL = "all"  # what tables call all clients


@dataclass(frozen=True)
class Tier:
    """A class of devices that can afford the same.

    Attributes:
        name: what the tier is called in tables and results.
        share: relative weight of the tier among the clients; 6 and 10 stand for 6 : 10, whatever the sum.
        width: fraction of the channels that its clients train.
        train_mb, mmacs, wire_mb: its budget, as in `submodels.Budget`; None: no such limit.
        down_mbps, up_mbps: speed of its network, in megabits a second.
        slow: how many times longer than on the fastest device a step takes.
    """

    name: str
    share: float
    width: float
    train_mb: float | None = None
    mmacs: float | None = None
    wire_mb: float | None = None
    down_mbps: float | None = None
    up_mbps: float | None = None
    slow: float | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"a tier is named {shown(self.name)}; give it a name, in quotes")
        if self.name.strip() == TOTAL:
            raise ValueError(f"a tier is named {self.name!r}, as the row of all clients is; give it another name")
        if len(self.name) > LONGEST_NAME:
            raise ValueError(
                f"a tier is named {self.name[:LONGEST_NAME]!r}...; give it a name of at most {LONGEST_NAME} letters"
            )
        # A spreadsheet would take such a name in a CSV file for a formula, and a terminal for a command.
        if self.name[0] in "=+-@" or not self.name.isprintable():
            raise ValueError(
                f"a tier is named {self.name!r}; a name begins with none of = + - @ and holds no control characters"
            )
        if not _positive(self.share):
            raise self._refusal("share", "it must be a number above 0; leave out a tier that nobody is in")
        if not _positive(self.width) or self.width > 1:
            raise self._refusal("width", "it must be a number above 0 and up to 1, such as 0.25 for a quarter")
        for key in OPTIONAL:
            if getattr(self, key) is not None and not _positive(getattr(self, key)):
                raise self._refusal(key, "it must be a number above 0; leave it out if it is not known or not limited")
        for key in SPEEDS:
            if getattr(self, key) is not None and not SLOWEST <= getattr(self, key) <= FASTEST:
                raise self._refusal(key, f"it must be from {SLOWEST:g} to {FASTEST:g}; leave it out if it is not known")

    def _refusal(self, key: str, must: str) -> ValueError:
        return ValueError(f"tier {self.name!r}: {key} is {shown(getattr(self, key))}; {must}")

    def limits(self) -> dict[str, float]:
        """Name -> limit, for the limits that the tier has."""
        return {key: getattr(self, key) for key in LIMITS if getattr(self, key) is not None}


@dataclass(frozen=True)
class Profile:
    """The devices that take part: a name, where the numbers come from (`about`), and the tiers, the largest first."""

    name: str
    about: str
    tiers: tuple[Tier, ...]

    def __post_init__(self):
        for label in ("name", "about"):
            if not isinstance(getattr(self, label), str):
                raise TypeError(f"{label} of a profile is {shown(getattr(self, label))}; it must be a text")
        if not isinstance(self.tiers, tuple | list) or not all([isinstance(tier, Tier) for tier in self.tiers]):
            raise TypeError(f"tiers is {shown(self.tiers)}; it must be a tuple of Tier")
        if not self.tiers:
            raise ValueError("there are no tiers; write a table [tiers.NAME] with share and width for each")
        if len(self.tiers) > MOST_TIERS:
            raise ValueError(f"there are {len(self.tiers)} tiers; at most {MOST_TIERS} can be told apart, merge some")
        for name, count in Counter(tier.name for tier in self.tiers).items():
            if count > 1:
                raise ValueError(f"{count} tiers are named {name!r}; give each a name of its own")

    @property
    def widths(self) -> tuple[float, ...]:
        """The distinct widths, ascending: the grid that budgets are solved over."""
        return tuple(sorted({tier.width for tier in self.tiers}))


# Files


def names() -> list[str]:
    """The names of the profiles that come with hetperm.

    Example:
        >>> names()
        ['cross-silo', 'edge-cluster', 'homogeneous', 'iot', 'mobile', 'mobile-ram', 'uniform5']
    """
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load(name: str | Path) -> Profile:
    """The profile in a TOML file, or the shipped profile of that name.

    Example:
        >>> [tier.width for tier in load("mobile").tiers]
        [1.0, 0.5, 0.25, 0.125, 0.0625]
    """
    path = _find(name)
    settings = read(path, noun="a capacity profile")
    try:
        return _profile(path.stem, settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _find(name: str | Path) -> Path:
    if not isinstance(name, str | Path):
        raise TypeError(f"the capacity profile is {shown(name)}; it must be a name such as 'mobile', or a path")
    file = checked_path("the capacity profile", name)
    if file.is_file():
        return file
    if str(name) in names():
        return SHIPPED / f"{name}.toml"
    question = did_you_mean(name, names())
    meant = f" ({question})" if question else ""
    raise ValueError(
        f"there is no capacity profile {shown(str(name))}{meant}; give a TOML file, or one of {', '.join(names())}"
    )


def _profile(name: str, settings: Mapping[str, Any]) -> Profile:
    _check_keys(settings, ("about", "tiers"))
    about, tables = settings.get("about", ""), settings.get("tiers", {})
    if not isinstance(about, str):
        raise ValueError(f"about is {about!r}; it must be a text, in quotes")
    if not isinstance(tables, Mapping):
        raise ValueError("tiers is not a table of tiers; write a table [tiers.NAME] for each")
    return Profile(name, about.strip(), tuple(_tier(name, table) for name, table in tables.items()))


def _tier(name: str, table: Any) -> Tier:
    if not isinstance(table, Mapping):
        raise ValueError(f"tier {name!r} is {table!r}; it must be a table [tiers.{name}] with share and width")
    try:
        _check_keys(table, KEYS)
    except ValueError as error:
        raise ValueError(f"tier {name!r}: {error}") from error
    for key, example in (("share", "share = 1, a relative weight"), ("width", "width = 0.25 for a quarter")):
        if key not in table:
            raise ValueError(f"tier {name!r} has no {key}; write {example}")
    return Tier(name, **table)


def _check_keys(table: Mapping[str, Any], valid_keys: Sequence[str]) -> None:
    for key in table:
        if key not in valid_keys:
            advice = did_you_mean(key, valid_keys, f"known are {', '.join(valid_keys)}")
            raise ValueError(f"unknown key {key!r}; {advice}")


def _positive(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    # A whole number or a fraction may be larger than any float, and is compared and not converted.
    return 0 < value <= sys.float_info.max if isinstance(value, Rational) else math.isfinite(value) and value > 0


# Who is in which tier


def apportion(shares: Sequence[float], N: int) -> tuple[int, ...]:
    """How many of N clients each share gets, by largest remainder; ties go to the earlier one.

    Shares are read as decimals, so that 0.55 of 50 is exactly 27.5 and ties are ties.

    Args:
        shares: positive relative weights.
        N: number of clients, 0 or more.

    Example:
        >>> apportion([6, 10, 11, 18, 55], 50)  # quotas 3, 5, 5.5, 9, 27.5
        (3, 5, 6, 9, 27)
    """
    if isinstance(N, bool) or not isinstance(N, int) or not 0 <= N <= LARGEST:
        raise ValueError(f"{shown(N)} clients cannot be apportioned; give a whole number from 0 to {LARGEST:,}")
    if not isinstance(shares, Sequence) or isinstance(shares, str | bytes):
        raise TypeError(f"shares is {shown(shares)}; it must be a list of numbers, such as [6, 10]")
    if not shares:
        raise ValueError(f"there are no shares to apportion {N} clients to; give at least one")
    for share in shares:
        if not _positive(share):
            raise ValueError(f"share {shown(share)} is no weight; give a positive finite number, or leave it out")
    # By way of the text: as floats, 0.55 * 50 is 27.500000000000004, and rounding would break a tie.
    weights = [Fraction(str(share)) for share in shares]
    quotas = [N * weight / sum(weights) for weight in weights]
    counts = [math.floor(quota) for quota in quotas]
    # The sort is stable, so ties go to the earlier share.
    by_remainder = sorted(range(len(counts)), key=lambda t: counts[t] - quotas[t])
    for t in by_remainder[: N - sum(counts)]:
        counts[t] += 1
    return tuple(counts)


def assign(
    profile: Profile, num_clients: int, *, groups: Sequence[Hashable] | None = None, seed: int
) -> tuple[int, ...]:
    """The tier of every client, as its position in `profile.tiers`; `apportion` says how many each tier gets.

    Args:
        num_clients: number of clients, N.
        groups: (N,) a label for every client. Tiers are then spread evenly over groups: a tier of T clients gets
            n T / N of a group of n, rounded down or up.
        seed: decides which clients, and which way is rounded.

    Example:
        >>> assign(load("uniform5"), 10, groups="aaaaabbbbb", seed=0)
        (2, 4, 3, 0, 1, 0, 3, 4, 2, 1)
    """
    import torch

    from hetperm.randomness import generator_for

    _check_profile(profile)
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise TypeError(f"seed is {shown(seed)}; it must be a whole number")
    groups = groups.tolist() if isinstance(groups, torch.Tensor) else groups  # a tensor is equal to itself only
    labels = None if groups is None else _listed(groups, texts=True)
    if labels is None and groups is not None:
        raise TypeError(f"groups is {shown(groups)}; it must be a list with a label for every client, or None")
    totals = apportion([tier.share for tier in profile.tiers], num_clients)
    labels = [None] * num_clients if labels is None else labels
    if len(labels) != num_clients:
        raise ValueError(f"groups has {len(labels)} labels for {num_clients} clients; give one for each client")
    for label in labels:
        if not isinstance(label, Hashable):
            raise TypeError(f"groups holds {shown(label)}; the label of a client must be a number or a text")
    members: dict[Hashable, list[int]] = {}
    # The shuffle decides who is in a tier, and also the order of groups, and so which of them are rounded up.
    for i in torch.randperm(num_clients, generator=generator_for(seed, "tiers")).tolist():
        members.setdefault(labels[i], []).append(i)
    tiers = [0] * num_clients
    for clients, counts in zip(members.values(), _crossed([len(group) for group in members.values()], totals)):
        for i, t in zip(clients, (t for t, count in enumerate(counts) for _ in range(count))):
            tiers[i] = t
    return tuple(tiers)


def _crossed(sizes: Sequence[int], totals: Sequence[int]) -> list[list[int]]:
    """Clients of each group in each tier: size * total / N, rounded down or up, with rows and columns that add up.

    This can always be done (Bacharach's controlled rounding). Which cells are rounded up is a matching of groups with
    tiers, found by augmenting paths: if a tier has no room left, a group that was rounded up there moves to another.
    """
    N = sum(sizes)
    # In whole numbers throughout: a float could land on the wrong side of one.
    table = [[size * total // N for total in totals] for size in sizes]
    # The tiers in which a group is between two whole numbers, the nearest to the upper one first.
    loose = [sorted((t for t, T in enumerate(totals) if n * T % N), key=lambda t: -(n * totals[t] % N)) for n in sizes]
    # How many groups each tier must round up to reach its total.
    owed = [T - sum(column) for T, column in zip(totals, zip(*table))]
    up: list[list[int]] = [[] for _ in totals]  # for every tier, the groups that are rounded up

    def round_up(g: int, tried: set[int]) -> bool:
        # A search tries each tier once, or two groups could push each other to and fro for ever.
        for t in loose[g]:
            if t in tried or g in up[t]:
                continue
            tried.add(t)
            if len(up[t]) == owed[t]:
                moved = next((h for h in up[t] if round_up(h, tried)), None)
                if moved is None:
                    continue
                up[t].remove(moved)
            up[t].append(g)
            return True
        return False

    for g, size in enumerate(sizes):
        for _ in range(size - sum(table[g])):
            rounded = round_up(g, set())
            assert rounded  # Bacharach: there is always a way
    return [[count + (g in up[t]) for t, count in enumerate(row)] for g, row in enumerate(table)]


def empty_tiers(profile: Profile, assigned: Iterable[int]) -> list[str]:
    """The names of the tiers without clients.

    Example:
        >>> mobile = load("mobile")
        >>> empty_tiers(mobile, assign(mobile, 3, seed=0))
        ['flagship', 'high', 'mid']
    """
    taken = set(_positions(profile, assigned))
    return [tier.name for t, tier in enumerate(profile.tiers) if t not in taken]


# What it costs


def solved(
    profile: Profile, scalable: "ScalableModel", *, batch_size: int, optimizer: str = "sgd", accumulate: int = 1
) -> Profile:
    """The profile in which every tier has the largest of the profile's own widths that its budget allows.

    Args:
        scalable: the model whose widths are priced.
        batch_size: samples of a training step.
        optimizer: one of `submodels.cost.OPTIMIZERS`.
        accumulate: pieces in which a batch is run.
    """
    from submodels.budget import Budget

    _check_profile(profile)
    _check_scalable(scalable)
    for tier in profile.tiers:
        if not tier.limits():
            raise ValueError(
                f"profile {profile.name!r}: tier {tier.name!r} has no budget to solve its width from; give it one of "
                f"{', '.join(LIMITS)}, or use the widths that are listed"
            )

    def width(tier: Tier) -> float:
        try:
            step = {"optimizer": optimizer, "accumulate": accumulate}
            return scalable.fit(Budget(**tier.limits()), batch_size, widths=profile.widths, **step)
        except ValueError as error:
            raise ValueError(f"profile {profile.name!r}: tier {tier.name!r}: {error}") from error

    return replace(profile, tiers=tuple(replace(tier, width=width(tier)) for tier in profile.tiers))


def table(
    profile: Profile,
    assigned: Sequence[int],
    scalable: "ScalableModel | None",
    *,
    batch_size: int,
    optimizer: str = "sgd",
    accumulate: int = 1,
    whole: "Cost | None" = None,
) -> list[dict[str, Any]]:
    """A row for every tier: its name, clients and width, what that width costs, and its budget.

    Costs are None in tiers without clients. wire_mb_per_visit counts the sub-model on its way down and up. A column
    budget_train_mb, budget_mmacs or budget_wire_mb exists if any tier has that limit, and a column note if a width
    cannot be expressed: of four heads, a sixteenth is one.

    Args:
        assigned: the tier of every client, from `assign`.
        scalable: the model; None if it cannot be cut, and then all clients must have width 1.
        batch_size, optimizer, accumulate: of a training step.
        whole: the cost of a model that cannot be cut (`submodels.cost.count`); None leaves costs out.
    """
    clients = Counter(_positions(profile, assigned))
    if scalable is not None:
        _check_scalable(scalable)
    if whole is not None and not hasattr(whole, "wire_bytes"):
        raise TypeError(f"whole is {shown(whole)}; it must be a submodels.Cost, or None")
    limits = [key for key in LIMITS if any(key in tier.limits() for tier in profile.tiers)]
    rows = []
    for t, tier in enumerate(profile.tiers):
        cost = whole
        # A tier without clients is not priced, and may have a width that this model does not allow.
        if not clients[t]:
            cost = None
        elif scalable is not None:
            cost = scalable.cost(tier.width, batch_size, optimizer, accumulate=accumulate)
        elif tier.width != 1:
            raise ValueError(
                f"tier {tier.name!r} has width {float(tier.width):g} and this model cannot be cut; use the profile "
                "'homogeneous' or another model"
            )
        row = {"tier": tier.name, "clients": clients[t], "width": tier.width, **_priced(cost)}
        rows.append(row | {f"budget_{key}": getattr(tier, key) for key in limits})
    notes = {t: _coarse(scalable, tier.width) for t, tier in enumerate(profile.tiers) if clients[t]}
    return [row | {"note": notes.get(t, "")} for t, row in enumerate(rows)] if any(notes.values()) else rows


def over_budget(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A warning for every limit that tiers exceed with the widths that they hold.

    Args:
        rows: from `table`.

    Example:
        >>> over_budget([{"tier": "low", "width": 0.5, "train_mb": 12.25, "budget_train_mb": 8}])
        ['tier low needs more train_mb than its budget: 12.25 of 8 at width 0.5; --widths-from budget finds what fits']
    """
    over: dict[str, list[str]] = {}
    for row in rows:
        for name in LIMITS:
            # A visit is down and up; a budget counts one way.
            need = (row.get("wire_mb_per_visit") or 0) / 2 if name == "wire_mb" else row.get(name) or 0
            budget = row.get(f"budget_{name}")
            if budget is not None and need > budget:
                text = f"tier {row['tier']} needs more {name} than its budget: {need:.4g} of {float(budget):g}"
                over.setdefault(name, []).append(f"{text} at width {float(row['width']):g}")
    others = {name: f" (and {len(tiers) - 1} others)" if tiers[1:] else "" for name, tiers in over.items()}
    return [f"{tiers[0]}{others[name]}; --widths-from budget finds what fits" for name, tiers in over.items()]


def _check_profile(profile: Any) -> None:
    if not isinstance(profile, Profile):
        raise TypeError(f"profile is {shown(profile)}; it must be a Profile, such as hetperm.profile.load('mobile')")


def _check_scalable(scalable: Any) -> None:
    if not hasattr(scalable, "cost") or not hasattr(scalable, "axis_map"):
        raise TypeError(f"scalable is {shown(scalable)}; it must be a submodels.ScalableModel")


def _listed(values: Any, *, texts: bool = False) -> list | None:
    """The values as a list; None if they are not several. A text counts as several only if `texts`."""
    if isinstance(values, str | bytes) and not texts:
        return None
    try:
        return list(values)
    except TypeError:
        return None


def _positions(profile: Any, assigned: Any) -> list[int]:
    """The tiers of clients as a list; an error if they are not those of the profile."""
    _check_profile(profile)
    positions, tiers = _listed(assigned), len(profile.tiers)
    if positions is None or not all([isinstance(t, Integral) and 0 <= t < tiers for t in positions]):
        raise TypeError(
            f"assigned is {shown(assigned)}; it must hold the position of a tier, 0 to {tiers - 1}, for every client"
        )
    return positions


def _coarse(scalable: "ScalableModel | None", width: float) -> str:
    """What a width keeps more of than it says, in words; empty if nothing."""
    return "" if scalable is None else "; ".join(scalable.axis_map.coarse(width))


def _priced(cost: "Cost | None") -> dict[str, float | None]:
    if cost is None:
        return dict.fromkeys(("params", "mmacs", "train_mb", "wire_mb_per_visit"))
    from submodels.budget import needs

    need = needs(cost)
    return {
        "params": cost.params,
        "mmacs": need["mmacs"],
        "train_mb": need["train_mb"],
        "wire_mb_per_visit": 2 * need["wire_mb"],
    }


def uncovered(widths: Iterable[float], extraction: str) -> str | None:
    """A warning if no client trains some part of the global model, else None.

    Args:
        widths: those of the clients.
        extraction: static, rolling or random; only static never reaches what lies beyond the largest width.

    Example:
        >>> print(uncovered([0.5, 0.25], "static"))
        the largest width of a client is 0.5 and static extraction always keeps the first channels: 50% of the channels
        of every layer, about 75% of the parameters, stay untrained; use rolling or random extraction, or give a client
        width 1
    """
    listed = _listed(widths)
    if listed is None:
        raise TypeError(f"widths is {shown(widths)}; it must be a list of numbers, such as [0.5, 0.25]")
    for width in listed:
        if not _positive(width) or width > 1:
            raise ValueError(f"widths holds {shown(width)}; a width is a number above 0 and up to 1")
    if not isinstance(extraction, str) or extraction not in ("static", "rolling", "random"):
        raise ValueError(f"extraction is {shown(extraction)}; it must be static, rolling or random")
    largest = float(max(listed, default=1))  # on Python 3.11 a Fraction cannot be written with a format
    if extraction != "static" or largest >= 1:
        return None
    # A weight joins an input and an output channel: at width p, about p * p of them are trained.
    return (
        f"the largest width of a client is {largest:g} and static extraction always keeps the first channels: "
        f"{100 * (1 - largest):.3g}% of the channels of every layer, about {100 * (1 - largest**2):.3g}% of the "
        "parameters, stay untrained; use rolling or random extraction, or give a client width 1"
    )
