"""The figures of a run as summary.json holds them, with names and types, and the names of columns that repeat them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetperm.report.fields import figure, listing, part, table, whole, word

MB = 2**20
ACCURACY = "accuracy"  # the metric of a file that names none
Row = Mapping[str, Any]
Rows = Sequence[Row]


def is_blank(value: Any) -> bool:
    """Whether a value has nothing to show: it is None, or a float that is not finite."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


# summary.json. None stands for null, and for a key that an older or shorter summary lacks.


@dataclass(frozen=True)
class Figures:
    """The metric or the loss over clients: mean, n-weighted mean, spread, worst client, mean of the worst tenth."""

    mean: float | None = None
    weighted: float | None = None
    std: float | None = None
    worst: float | None = None
    bottom_decile: float | None = None


@dataclass(frozen=True)
class Tier:
    """A tier under one method: its clients, their width, the parameters they train, the mean of their metric."""

    clients: int | None = None
    width: float | None = None
    params: int | None = None
    score: float | None = None


@dataclass(frozen=True)
class Mixing:
    """Statistics of the mixing weights alpha, each a mean over clients; `same_group_mass` needs known groups.

    Attributes:
        effective_partners: 1 / sum of squared weights, which is k if k partners weigh the same.
        nonzero: the clients that a client learns from, itself included.
        share: how much difference was found worth sharing, in units of noise; None if nothing was looked for.
    """

    effective_partners: float | None = None
    nonzero: float | None = None
    self_weight: float | None = None
    same_tier_mass: float | None = None
    same_group_mass: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Cost:
    """The work of all clients together, to the end of the run."""

    visits: float | None = None
    rounds: float | None = None
    client_steps: float | None = None
    bytes_down: float | None = None
    bytes_up: float | None = None
    skipped: float | None = None
    macs: float | None = None

    @property
    def mb_sent(self) -> float | None:
        """Traffic down and up together, in MB."""
        if is_blank(self.bytes_down) or is_blank(self.bytes_up):
            return None
        return (self.bytes_down + self.bytes_up) / MB


@dataclass(frozen=True)
class Attendance:
    """How often clients were away, where they may be.

    Attributes:
        asked: how often a client was asked for something, on average.
        absent: how often it was away then, on average.
        most: the largest share of times that a client was away.
        missed_steps: mini-batch gradients that a client did not compute because of that, on average.
    """

    asked: float | None = None
    absent: float | None = None
    most: float | None = None
    missed_steps: float | None = None


@dataclass(frozen=True)
class Method:
    """The figures of one method; `alpha` is None if it has no mixing weights.

    Attributes:
        score: of the run's metric; files call it by the metric's own name.
        diverged: None if it finished; else when it went non-finite ("diverged at epoch 3"), and of several seeds with
            how many ("2 of 3 seeds; 1 diverged at epoch 3"): then the figures are those of the seeds that it finished.
    """

    score: Figures = Figures()
    loss: Figures = Figures()
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    alpha: Mixing | None = None
    cost: Cost = Cost()
    diverged: str | None = None
    attendance: Attendance | None = None

    @classmethod
    def from_json(cls, content: Row, name: str = "", *, metric: str = ACCURACY) -> "Method":
        """The figures in a JSON object; an error calls their keys ``name`` and the key."""

        def of(key: str) -> tuple[Any, str]:
            return content.get(key, {}), f"{name}{key}"

        return cls(
            score=part(Figures, *of(metric)),
            loss=part(Figures, *of("loss")),
            tiers={
                tier: part(Tier, entry, f"{name}tiers.{tier}", called={"score": metric})
                for tier, entry in table(*of("tiers")).items()
            },
            # Without mixing weights alpha is None, and not a Mixing full of None.
            alpha=None if content.get("alpha") is None else part(Mixing, *of("alpha")),
            cost=part(Cost, *of("cost")),
            diverged=_or_none(word, content.get("diverged"), f"{name}diverged"),
            attendance=None if content.get("attendance") is None else part(Attendance, *of("attendance")),
        )

    def to_json(self, metric: str = ACCURACY) -> dict[str, Any]:
        """The JSON object, in which the score has the name of the metric."""
        tiers = {name: dict(vars(tier)) for name, tier in self.tiers.items()}
        return {
            metric: dict(vars(self.score)),
            "loss": dict(vars(self.loss)),
            "tiers": {name: {metric if key == "score" else key: x for key, x in tiers[name].items()} for name in tiers},
            "alpha": None if self.alpha is None else dict(vars(self.alpha)),
            "cost": dict(vars(self.cost)),
            **({} if self.attendance is None else {"attendance": dict(vars(self.attendance))}),
            **({} if self.diverged is None else {"diverged": self.diverged}),
        }


def _or_none(check: Callable[..., Any], value: Any, name: str) -> Any:
    return None if value is None else check(value, name)


def _rivals(content: Row, metric: str, name: str = "baselines") -> dict[str, Method]:
    rivals = table(content.get("baselines", {}), name)
    return {
        rival: Method.from_json(table(own, f"{name}.{rival}"), f"{name}.{rival}.", metric=metric)
        for rival, own in rivals.items()
    }


@dataclass(frozen=True)
class Spread:
    """The standard deviation over seeds of every number of a summary: of its algorithm (`main`) and of its rivals.

    A value without a spread is None and is not written: every word, and every number if there is a single seed.
    """

    num_clients: float | None = None
    epochs: float | None = None
    main: Method = Method()
    baselines: Mapping[str, Method] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Any, metric: str) -> "Spread":
        content = _with_nan(table(content, "spread"))
        own = {key: value for key, value in content.items() if key != "diverged"}
        counts = [figure(content.get(key), f"spread.{key}") for key in ("num_clients", "epochs")]
        main, rivals = Method.from_json(own, "spread.", metric=metric), _rivals(content, metric, "spread.baselines")
        return cls(*counts, main, rivals)

    def to_json(self, metric: str) -> dict[str, Any]:
        about = {"num_clients": self.num_clients, "epochs": self.epochs}
        rivals = {name: rival.to_json(metric) for name, rival in self.baselines.items()}
        return _without_none({**about, **self.main.to_json(metric), "baselines": rivals})


def _with_nan(value: Any) -> Any:
    """The spread with nan for every null: `to_json` leaves None out, so null was a number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _with_nan(item) for key, item in value.items()}
    return math.nan if value is None else value


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


@dataclass(frozen=True)
class Gain:
    """How far the algorithm is ahead of a rival in the mean of the metric, seed by seed on the same data.

    Positive is ahead, also if less of the metric is better.
    """

    mean: float | None
    std: float | None
    differences: Sequence[float | None]

    @classmethod
    def from_json(cls, content: Any, name: str) -> "Gain":
        own = table(content, name)
        differences = listing(own.get("differences"), f"{name}.differences")
        for difference in differences:
            figure(difference, f"{name}.differences")
        mean, std = (figure(own.get(key), f"{name}.{key}") for key in ("mean", "std"))
        return cls(mean, std, differences)


@dataclass(frozen=True)
class Summary:
    """summary.json of one run, or of several seeds: then all figures are means over them.

    Attributes:
        main: the algorithm's figures, which stand at the top level of the file.
        metric: the name of what models are scored by, and of its keys and columns.
        better: whether more of it is better ("higher") or less ("lower").
        model: the model that was trained; of a user's own model its class. `partition`: how data were divided among
            clients; None if they came divided.
        seed: the seed of a single run.
        baselines: rival -> its figures.
        seeds: the seeds of several runs; a single run has none, and neither `spread` nor `paired`.
        paired: rival -> the algorithm's gain over it.
    """

    algorithm: str
    dataset: str
    num_clients: int
    main: Method
    metric: str = ACCURACY
    better: str = "higher"
    model: str | None = None
    partition: str | None = None
    seed: int | None = None
    epochs: int | None = None
    capacity_profile: str | None = None
    baselines: Mapping[str, Method] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    spread: Spread = Spread()
    paired: Mapping[str, Gain] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Row) -> "Summary":
        """The summary in a JSON object; a ValueError names the first field that is missing or of another kind."""
        metric = word(content.get("metric", ACCURACY), "metric")
        for key in (*NEEDED, metric):
            if key not in content:
                raise ValueError(f"{key!r} is missing; it is not the summary of a run")
        gains = table(content.get("paired", {}), "paired")
        return cls(
            algorithm=word(content["algorithm"], "algorithm"),
            dataset=word(content["dataset"], "dataset"),
            num_clients=whole(content["num_clients"], "num_clients", low=1),
            main=Method.from_json(content, metric=metric),
            metric=metric,
            better=word(content.get("better", "higher"), "better"),
            model=_or_none(word, content.get("model"), "model"),
            partition=_or_none(word, content.get("partition"), "partition"),
            seed=_or_none(whole, content.get("seed"), "seed"),
            epochs=_or_none(figure, content.get("epochs"), "epochs"),
            capacity_profile=_or_none(word, content.get("capacity_profile"), "capacity_profile"),
            baselines=_rivals(content, metric),
            seeds=tuple(whole(seed, "seeds") for seed in listing(content.get("seeds", ()), "seeds")),
            spread=Spread.from_json(content.get("spread", {}), metric),
            paired={rival: Gain.from_json(gain, f"paired.{rival}") for rival, gain in gains.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object, with keys in the order of the file; the writer must replace numbers that are not finite."""
        over_seeds = {
            "seeds": list(self.seeds),
            "spread": self.spread.to_json(self.metric),
            "paired": {rival: dict(vars(gain)) for rival, gain in self.paired.items()},
        }
        return {
            "algorithm": self.algorithm,
            "dataset": self.dataset,
            "partition": self.partition,
            "model": self.model,
            "metric": self.metric,
            "better": self.better,
            "num_clients": self.num_clients,
            **({} if self.seeds else {"seed": self.seed}),  # the file of several seeds has no such key
            "epochs": self.epochs,
            "capacity_profile": self.capacity_profile,
            **self.main.to_json(self.metric),
            "baselines": {name: rival.to_json(self.metric) for name, rival in self.baselines.items()},
            **(over_seeds if self.seeds else {}),
        }

    @property
    def scored_by(self) -> str:
        """The metric, and a word on its direction where readers would not expect it.

        Example:
            >>> Summary("perm", "own", 2, Method(), metric="mae", better="lower").scored_by
            'mae, lower is better'
        """
        return self.metric if self.better == "higher" else f"{self.metric}, lower is better"

    def rank(self, value: float | None) -> float:
        """A value of the metric as a sort key: the larger, the better; a blank one sorts below every number."""
        return or_lowest(value if is_blank(value) or self.better == "higher" else -value)

    @property
    def methods(self) -> dict[str, Method]:
        """method -> its figures, the algorithm first."""
        return {self.algorithm: self.main, **self.baselines}

    @property
    def mixing(self) -> dict[str, Mixing]:
        """method -> statistics of its mixing weights, for the methods that have them."""
        return {name: method.alpha for name, method in self.methods.items() if method.alpha is not None}

    @property
    def tier_names(self) -> list[str]:
        """The tiers, the largest width first."""
        return sorted(self.main.tiers, key=lambda name: -or_lowest(self.widest(name).width))

    def widest(self, tier: str) -> Tier:
        """The tier's figures under the method that trains the largest models there."""
        # Some methods train the smallest width in every tier, which does not show what the tier can hold.
        entries = [method.tiers[tier] for method in self.methods.values() if tier in method.tiers]
        return max(entries, key=lambda entry: (or_lowest(entry.width), or_lowest(entry.params)))

    def spread_of(self, method: str) -> Method:
        """The spread of a method's figures over seeds; every figure is None for a single run."""
        return self.spread.main if method == self.algorithm else self.spread.baselines.get(method, Method())


NEEDED = ("algorithm", "dataset", "num_clients", "cost")


def or_lowest(value: float | None) -> float:
    """The value as a sort key: a blank one sorts below every number."""
    return float("-inf") if is_blank(value) else value


# Names of columns. metrics.csv has accuracy_mean, tail_loss_worst, accuracy_tier_NAME; clients.csv accuracy_METHOD.


def deployed(row: Row, column: str) -> Any:
    """A figure of the model that a client would use: the tail average once it has begun, before that the last model.

    Example:
        >>> deployed({"loss_mean": 0.5, "tail_loss_mean": 0.4}, "loss_mean"), deployed({"loss_mean": 0.5}, "loss_mean")
        (0.4, 0.5)
    """
    of_tail = row.get(f"tail_{column}")
    return row.get(column) if is_blank(of_tail) else of_tail


def tier_columns(row: Row, metric: str = ACCURACY) -> dict[str, str]:
    """tier -> the name of the column of its metric, from a row of metrics.csv."""
    start = f"{metric}_tier_"
    return {column.removeprefix(start): column for column in row if column.startswith(start)}


def method_column(summary: Summary, method: str) -> str:
    """The column of a method's metric in clients.csv."""
    return summary.metric if method == summary.algorithm else f"{summary.metric}_{method}"


def quantity(column: str) -> str:
    """The kind of number that a column holds: the first word of its name.

    Example:
        >>> quantity("accuracy_tier_large"), quantity("loss")
        ('accuracy', 'loss')
    """
    return column.partition("_")[0]
