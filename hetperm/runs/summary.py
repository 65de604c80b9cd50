"""The figures of a run, by method and by client, and the aggregate over several seeds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hetperm import mixing
from hetperm.report.contents import Cost, Figures, Method, Mixing, Summary, Tier
from hetperm.runs.scores import by_tier, figures
from hetperm.runs.setting import Setting
from hetperm.runs.training import Trained


def summary_of(main: Trained, baselines: Mapping[str, Trained]) -> Summary:
    """The content of summary.json."""
    setting = main.setting
    return Summary(
        algorithm=main.method,
        dataset=setting.dataset,
        num_clients=len(setting.clients),
        main=_method(main),
        seed=setting.config.seed,
        epochs=setting.config.epochs,
        capacity_profile=setting.config.capacity_profile if setting.profile else None,
        baselines={name: _method(rival) for name, rival in baselines.items()},
    )


def _method(trained: Trained) -> Method:
    """The figures of one method."""
    setting = trained.setting
    over_clients = figures(setting, trained.accuracy, trained.loss)
    accuracies = by_tier(setting, trained.accuracy)
    first = {tier: setting.tiers.index(tier) for tier in setting.tier_names}  # any client of a tier stands for it
    tiers = {
        tier: Tier(
            clients=setting.tiers.count(tier),
            width=setting.clients[i].width,
            params=setting.num_params(trained.widths[i]),
            accuracy=accuracies[tier],
        )
        for tier, i in first.items()
    }
    return Method(
        accuracy=Figures(**over_clients["accuracy"]),
        loss=Figures(**over_clients["loss"]),
        tiers=tiers,
        alpha=mixing_of(setting, trained.state.alpha),
        cost=Cost(**vars(trained.state.work)),
    )


def mixing_of(setting: Setting, alpha: Tensor | None) -> Mixing | None:
    """Statistics of mixing weights; None if there are none."""
    if alpha is None:
        return None
    return Mixing(
        effective_partners=float(mixing.effective_partners(alpha).mean()),
        nonzero=float(mixing.nonzero(alpha).double().mean()),
        self_weight=mixing.self_weight(alpha),
        same_tier_mass=mixing.same_group_mass(alpha, setting.tiers),
        same_group_mass=None if setting.groups is None else mixing.same_group_mass(alpha, setting.groups),
    )


def client_rows(main: Trained, baselines: Mapping[str, Trained]) -> Iterator[dict[str, Any]]:
    """Yield the rows of clients.csv, one per client."""
    setting, alpha = main.setting, main.state.alpha
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
            "accuracy": main.accuracy[i],
            "loss": main.loss[i],
            "effective_partners": partners[i],
            **{f"accuracy_{name}": rival.accuracy[i] for name, rival in baselines.items()},
        }


# Several seeds


def aggregate(summaries: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """The summary of several runs: the mean of every figure and its standard deviation over seeds (``spread``).

    ``paired`` holds for each rival by how much the algorithm is ahead of it, seed by seed.

    Args:
        summaries: the content of summary.json of each run.
        seeds: the seeds of the runs.
    """
    # The mean of seeds would mean nothing.
    without_seed = [{key: value for key, value in summary.items() if key != "seed"} for summary in summaries]
    mean, spread = mean_and_spread(without_seed)
    # Differences seed by seed: what a seed does to both methods alike cancels.
    paired = {
        name: _paired([one["accuracy"]["mean"] - one["baselines"][name]["accuracy"]["mean"] for one in summaries])
        for name in mean["baselines"]
    }
    return {**mean, "seeds": list(seeds), "spread": spread, "paired": paired}


def _paired(differences: list[float]) -> dict[str, Any]:
    mean, std = mean_and_spread(differences)
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
