"""The figures of a run, by method and by client, and the aggregate over several seeds."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hetperm import mixing
from hetperm.algorithms import perm
from hetperm.client import Client
from hetperm.report.summary import ACCURACY, Attendance, Cost, Figures, Method, Mixing, Summary, Tier
from hetperm.runs.scores import by_tier, figures
from hetperm.runs.setting import Setting
from hetperm.runs.training import Trained
from hetperm.shards import known_labels
from hetperm.state import State, Work


def summary_of(main: Trained, baselines: Mapping[str, Trained]) -> Summary:
    """The content of summary.json."""
    setting = main.setting
    return Summary(
        algorithm=main.method,
        dataset=setting.dataset,
        num_clients=len(setting.clients),
        main=_method(main),
        metric=setting.metric.name,
        better=setting.metric.better,
        model=setting.architecture.get("name", setting.architecture.get("class")),
        partition=setting.partition,
        seed=setting.config.seed,
        epochs=setting.config.epochs,
        capacity_profile=setting.config.capacity_profile if setting.profile else None,
        baselines={name: _method(rival) for name, rival in baselines.items()},
    )


def _method(trained: Trained) -> Method:
    """The figures of one method; of one that diverged only its sizes and its cost."""
    setting = trained.setting
    over_clients = {} if trained.diverged else figures(setting, trained.score, trained.loss)
    means = by_tier(setting, trained.score)
    first = {tier: setting.tiers.index(tier) for tier in setting.tier_names}  # any client of a tier stands for it
    tiers = {
        tier: Tier(
            clients=setting.tiers.count(tier),
            width=setting.clients[i].width,
            params=setting.num_params(trained.widths[i]),
            score=None if trained.diverged else means[tier],
        )
        for tier, i in first.items()
    }
    return Method(
        score=Figures(**over_clients.get(setting.metric.name, {})),
        loss=Figures(**over_clients.get("loss", {})),
        tiers=tiers,
        alpha=None if trained.diverged else mixing_of(setting, trained.state.alpha, _share(trained.state)),
        cost=Cost(**trained.state.work.figures),
        attendance=attendance_of(trained.state.work),
        diverged=trained.diverged or None,
    )


def attendance_of(work: Work) -> Attendance | None:
    """How often clients were away; None if nobody could be."""
    if not work.asked:
        return None
    shares = [away / asked for away, asked in zip(work.absent, work.asked, strict=True) if asked]
    return Attendance(
        asked=sum(work.asked) / len(work.asked),
        absent=sum(work.absent) / len(work.asked),
        most=max(shares, default=0.0),
        missed_steps=work.missed / len(work.asked),
    )


def _share(state: State) -> float | None:
    return perm.chosen_share(state.memory) if perm.LOOK_AHEAD in state.memory else None


def mixing_of(setting: Setting, alpha: Tensor | None, share: float | None = None) -> Mixing | None:
    """Statistics of mixing weights; None if there are none."""
    if alpha is None:
        return None
    return Mixing(
        effective_partners=float(mixing.effective_partners(alpha).mean()),
        nonzero=float(mixing.nonzero(alpha).double().mean()),
        self_weight=mixing.self_weight(alpha),
        same_tier_mass=mixing.same_group_mass(alpha, setting.tiers),
        same_group_mass=None if setting.groups is None else mixing.same_group_mass(alpha, setting.groups),
        share=share,
    )


def client_rows(main: Trained, baselines: Mapping[str, Trained]) -> Iterator[dict[str, Any]]:
    """Yield the rows of clients.csv, one per client."""
    setting, alpha, work = main.setting, main.state.alpha, main.state.work
    metric = setting.metric.name
    partners = [None] * len(setting.clients) if alpha is None else mixing.effective_partners(alpha).tolist()
    for i, client in enumerate(setting.clients):
        yield {
            "client": i,
            "tier": setting.tiers[i],
            "width": client.width,
            "params": setting.num_params(main.widths[i]),
            "group": client.group,
            "n_train": client.n_train,
            "n_val": client.n_val,
            # Labels of nodes stay there; the server has zeros in their place.
            "most_common": _most_common(client) if setting.nodes is None else None,
            metric: main.score[i],
            "loss": main.loss[i],
            "effective_partners": partners[i],
            **({"asked": work.asked[i], "absent": work.absent[i]} if work.asked else {}),
            **{f"{metric}_{name}": rival.score[i] for name, rival in baselines.items()},
        }


def _most_common(client: Client) -> float | None:
    """The share of a client's training samples that are of its most common class; None if labels are no classes."""
    y = known_labels(client.train)
    if y is None or y.is_floating_point() or y.dim() != 1:
        return None
    return float(y.unique(return_counts=True)[1].max() / len(y))


# Several seeds


def aggregate(
    summaries: Sequence[Mapping[str, Any]], seeds: Sequence[int], lost: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """The summary of several runs: the mean of every figure and its standard deviation over seeds (``spread``).

    ``paired`` holds for each rival by how much the algorithm is ahead of it, seed by seed. The figures of a rival are
    over the seeds that it finished; ``diverged`` says of how many it did not. A seed with which the algorithm itself
    diverged counts for no method.

    Args:
        summaries: the content of summary.json of each run that was finished.
        seeds: the seeds of all runs.
        lost: seed -> when the algorithm diverged, such as "diverged at epoch 3"; None: with no seed.
    """
    lost = lost or {}
    # The mean of seeds would mean nothing.
    apart = ("seed", "baselines")
    mean, spread = mean_and_spread([{key: one[key] for key in one if key not in apart} for one in summaries])
    rivals = {name: [one["baselines"][name] for one in summaries] for name in summaries[0]["baselines"]}
    pairs = {name: _over_seeds(runs) for name, runs in rivals.items()}
    # Differences seed by seed: what a seed does to both methods alike cancels.
    finished = [seed not in lost for seed in seeds]
    paired = {name: _paired(summaries, runs, finished) for name, runs in rivals.items()}
    return {
        **mean,
        **({"diverged": _of_seeds(list(lost.values()), len(seeds))} if lost else {}),
        "baselines": {name: pair[0] for name, pair in pairs.items()},
        "seeds": list(seeds),
        "spread": {**spread, "baselines": {name: pair[1] for name, pair in pairs.items()}},
        "paired": paired,
    }


def _over_seeds(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(mean, spread) of a rival over the seeds that it finished; if it diverged with all of them, of its cost."""
    moments = [one["diverged"] for one in runs if one.get("diverged")]
    kept = [one for one in runs if not one.get("diverged")] or runs
    mean, spread = mean_and_spread([{key: one[key] for key in one if key != "diverged"} for one in kept])
    return mean | ({"diverged": _of_seeds(moments, len(runs))} if moments else {}), spread


def _of_seeds(moments: Sequence[str], seeds: int) -> str:
    """What became of a method that diverged with some seeds.

    Example:
        >>> _of_seeds(["diverged at epoch 3"], 3), _of_seeds(["diverged at epoch 3", "diverged at epoch 1"], 2)
        ('2 of 3 seeds; 1 diverged at epoch 3', '0 of 2 seeds; 1 diverged at epoch 3, 1 diverged at epoch 1')
    """
    counts = ", ".join(f"{count} {moment}" for moment, count in Counter(moments).items())
    return f"{seeds - len(moments)} of {seeds} seeds; {counts}"


def _paired(
    own: Sequence[Mapping[str, Any]], rival: Sequence[Mapping[str, Any]], finished: Sequence[bool]
) -> dict[str, Any]:
    """How far ahead of a rival, seed by seed; None for a seed with which either diverged."""
    metric = own[0].get("metric", ACCURACY)
    sign = -1 if own[0].get("better") == "lower" else 1
    both = (
        None if other.get("diverged") else sign * (mine[metric]["mean"] - other[metric]["mean"])
        for mine, other in zip(own, rival, strict=True)
    )
    differences = [next(both) if well else None for well in finished]
    known = [difference for difference in differences if difference is not None]
    mean, std = mean_and_spread(known) if known else (None, None)
    return {"mean": mean, "std": std, "differences": differences}


def mean_and_spread(summaries: Sequence[Any]) -> tuple[Any, Any]:
    """(mean, standard deviation) over runs of every number in summaries of the same structure.

    A value that is not a number is kept if all summaries agree on it, and is None otherwise. One run has no spread.

    Example:
        >>> mean_and_spread([{"a": 1.0, "b": "x"}, {"a": 3.0, "b": "x"}])
        ({'a': 2.0, 'b': 'x'}, {'a': 1.4142135623730951})
    """
    first = summaries[0]
    if isinstance(first, Mapping):
        pairs = {key: mean_and_spread([summary[key] for summary in summaries]) for key in first}
        mean = {key: pair[0] for key, pair in pairs.items()}
        return mean, {key: pair[1] for key, pair in pairs.items() if pair[1] is not None}
    if all([_is_number(value) for value in summaries]):
        values = np.array(summaries, dtype=float)
        spread = float(values.std(ddof=1)) if len(values) > 1 else None
        # Equal numbers stay as they are, because the mean would turn whole numbers into floats.
        return (first if len(set(summaries)) == 1 else float(values.mean())), spread
    return (first if all([value == first for value in summaries]) else None), None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
