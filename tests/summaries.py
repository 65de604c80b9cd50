"""Summaries and rows of made-up runs, as a run's folder holds them."""

from collections.abc import Sequence
from typing import Any

from hetperm.runs.summary import mean_and_spread

WIDTHS = {"entry": 0.0625, "flagship": 1.0, "mid": 0.25}  # neither by size nor by name
TIERS = ("mid", "entry", "flagship", "entry", "mid", "entry")  # of clients 0 to 5
GROUPS = (1, 0, 0, 0, 1, 0)
AHEAD = {"perm": 0.1, "local": 0.0, "fedavg-ft": 0.05}
ONE_SIZE = ("fedavg-ft",)
BASE = {"flagship": 0.8, "mid": 0.75, "entry": 0.7}


def clients(seed: int = 0) -> list[dict[str, Any]]:
    """One row per client; accuracy by hand: that of the tier, the method, a hundredth a seed, a thousandth a client."""

    def accuracy(i: int, method: str) -> float:
        return BASE[TIERS[i]] + AHEAD[method] + 0.01 * seed * (method == "perm") + 0.001 * i

    return [
        {
            "client": i,
            "tier": tier,
            "width": WIDTHS[tier],
            "params": int(1600 * WIDTHS[tier]),
            "group": GROUPS[i],
            "n_train": 50,
            "n_val": 5,
            "accuracy": accuracy(i, "perm"),
            "loss": 0.3,
            "effective_partners": 2.0 + i,
            "accuracy_local": accuracy(i, "local"),
            "accuracy_fedavg-ft": accuracy(i, "fedavg-ft"),
        }
        for i, tier in enumerate(TIERS)
    ]


def single(seed: int = 0) -> dict[str, Any]:
    """The summary of one run."""
    methods = {method: _method(method, clients(seed)) for method in AHEAD}
    about = {"algorithm": "perm", "dataset": "digits", "partition": "label-shift:2", "model": "zoo:mlp"}
    about |= {"metric": "accuracy", "better": "higher", "num_clients": len(TIERS), "seed": seed, "epochs": 2}
    about["capacity_profile"] = "mobile"
    return {**about, **methods.pop("perm"), "baselines": methods}


def several(seeds: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    """The summary of several runs."""
    runs = [single(seed) for seed in seeds]
    means, spread = mean_and_spread([{key: value for key, value in run.items() if key != "seed"} for run in runs])
    paired = {}
    for rival in means["baselines"]:
        differences = [run["accuracy"]["mean"] - run["baselines"][rival]["accuracy"]["mean"] for run in runs]
        mean, std = mean_and_spread(differences)
        paired[rival] = {"mean": mean, "std": std, "differences": differences}
    return {**means, "seeds": list(seeds), "spread": spread, "paired": paired}


def _method(method: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    column = "accuracy" if method == "perm" else f"accuracy_{method}"
    accuracies = [row[column] for row in rows]
    tiers = {}
    for tier, width in WIDTHS.items():
        of_tier = [row[column] for row in rows if row["tier"] == tier]
        trained = min(WIDTHS.values()) if method in ONE_SIZE else width
        tiers[tier] = {
            "clients": len(of_tier),
            "width": width,
            "params": int(1600 * trained),
            "accuracy": sum(of_tier) / len(of_tier),
        }
    alpha = {
        "effective_partners": 4.5,
        "nonzero": 5.0,
        "self_weight": 0.25,
        "same_tier_mass": 0.4,
        "same_group_mass": 0.95,
        "share": 0.7,
    }
    mean, worst = sum(accuracies) / len(accuracies), min(accuracies)
    moved = 0 if method == "local" else 2**20
    return {
        "accuracy": {"mean": mean, "weighted": mean, "std": 0.04, "worst": worst, "bottom_decile": worst},
        "loss": {"mean": 0.3, "weighted": 0.3, "std": 0.1, "worst": 0.5, "bottom_decile": 0.4},
        "tiers": tiers,
        "alpha": alpha if method == "perm" else None,
        "cost": {
            "visits": 12,
            "rounds": 3,
            "client_steps": 60,
            "bytes_down": moved,
            "bytes_up": moved,
            "skipped": 0,
            "macs": 7200,
        },
    }
