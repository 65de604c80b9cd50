"""Summaries: the figures of a run, a row for each client, and mean and spread over seeds."""

import math

import pytest
import torch
from torch import nn

from hetperm import Client, Config
from hetperm.runs.setting import Setting, from_model
from hetperm.runs.summary import aggregate, client_rows, mean_and_spread, summary_of
from hetperm.runs.training import Trained
from hetperm.state import State, Work

PARAMS = {1.0: 3 * 4 + 4 + 4 * 2 + 2, 0.5: 3 * 2 + 2 + 2 * 2 + 2}


@pytest.fixture(scope="module")
def setting() -> Setting:
    """Three clients of two tiers and two groups."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.zeros(6, 3), torch.arange(6) % 2
    sizes = ((2, 1.0, 0), (4, 0.5, 0), (6, 0.5, 1))
    clients = [Client((x[:n], y[:n]), width=width, group=group) for n, width, group in sizes]
    return from_model(model, clients, Config(seed=3, epochs=5, num_clients=3), loss=None, metric=None)


def trained(setting: Setting, method: str, accuracy: tuple[float, ...], alpha=None) -> Trained:
    state = State(5, {}, ({},) * 3, alpha=alpha, work=Work(visits=7, client_steps=30, bytes_up=5))
    widths, loss = tuple(setting.model_widths(method)), (1.0, 2.0, 3.0)
    return Trained(method, setting, widths, state, (), accuracy, loss, 1.0, 0.0, trained_here=True)


def test_the_summary_of_a_run_by_hand(setting):
    alpha = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    main = trained(setting, "perm", (0.9, 0.5, 0.7), alpha)
    summary = summary_of(main, {"fedavg": trained(setting, "fedavg", (0.2, 0.4, 0.6))}).to_json()
    about = ("algorithm", "dataset", "num_clients", "seed", "epochs", "capacity_profile")
    assert [summary[key] for key in about] == ["perm", "own", 3, 3, 5, None]
    assert summary["accuracy"]["mean"] == pytest.approx(0.7)
    assert summary["accuracy"]["weighted"] == pytest.approx((2 * 0.9 + 4 * 0.5 + 6 * 0.7) / 12)
    assert (summary["accuracy"]["worst"], summary["loss"]["worst"]) == (0.5, 3.0)
    assert summary["tiers"] == {
        "1": {"clients": 1, "width": 1.0, "params": PARAMS[1.0], "accuracy": 0.9},
        "0.5": {"clients": 2, "width": 0.5, "params": PARAMS[0.5], "accuracy": pytest.approx(0.6)},
    }
    assert summary["alpha"].pop("share") is None  # nobody looked ahead
    assert summary["alpha"] == pytest.approx(
        {
            "effective_partners": (2 + 1 + 2) / 3,
            "nonzero": 5 / 3,
            "self_weight": 2 / 3,
            "same_tier_mass": (0.5 + 1 + 1) / 3,
            "same_group_mass": (1 + 1 + 0.5) / 3,
        }
    )
    assert (summary["cost"]["visits"], summary["cost"]["client_steps"], summary["cost"]["bytes_up"]) == (7, 30, 5)
    rival = summary["baselines"]["fedavg"]
    assert rival["accuracy"]["mean"] == pytest.approx(0.4)
    assert rival["alpha"] is None
    # A method of one size has the smallest model in every tier, whatever its clients could hold.
    assert {tier: row["params"] for tier, row in rival["tiers"].items()} == {"1": PARAMS[0.5], "0.5": PARAMS[0.5]}
    assert rival["tiers"]["1"]["width"] == 1.0


def test_every_client_has_a_row_with_all_methods(setting):
    alpha = torch.eye(3, dtype=torch.float64)
    rivals = {"local": trained(setting, "local", (0.1, math.nan, 0.3))}
    first, second, third = client_rows(trained(setting, "perm", (0.9, math.nan, 0.7), alpha), rivals)
    about = {
        "client": 0,
        "tier": "1",
        "width": 1.0,
        "params": PARAMS[1.0],
        "group": 0,
        "n_train": 2,
        "n_val": 0,
        "most_common": 0.5,
    }
    assert first == about | {"accuracy": 0.9, "loss": 1.0, "effective_partners": 1.0, "accuracy_local": 0.1}
    assert math.isnan(second["accuracy"]) and math.isnan(second["accuracy_local"])
    assert (third["client"], third["tier"], third["accuracy_local"]) == (2, "0.5", 0.3)


def test_without_mixing_weights_nobody_has_partners(setting):
    rows = client_rows(trained(setting, "local", (0.1, 0.2, 0.3)), {})
    assert [row["effective_partners"] for row in rows] == [None] * 3


# Several seeds


def test_mean_and_spread_by_hand():
    runs = [{"x": {"y": 1.0}, "n": 5, "s": "a", "none": None}, {"x": {"y": 2.0}, "n": 5, "s": "b", "none": None}]
    mean, spread = mean_and_spread(runs)
    assert mean == {"x": {"y": 1.5}, "n": 5, "s": None, "none": None}
    assert spread == {"x": {"y": pytest.approx(math.sqrt(0.5))}, "n": 0.0}
    assert mean_and_spread(runs[:1]) == (runs[0], {"x": {}})


def test_rivals_are_compared_seed_by_seed():
    runs = [
        {"seed": seed, "accuracy": {"mean": mine}, "baselines": {"local": {"accuracy": {"mean": theirs}}}}
        for seed, mine, theirs in ((3, 0.5, 0.4), (4, 0.9, 0.6))
    ]
    summary = aggregate(runs, (3, 4))
    assert summary["accuracy"]["mean"] == pytest.approx(0.7)
    assert summary["spread"]["baselines"]["local"]["accuracy"]["mean"] == pytest.approx(0.1 * math.sqrt(2))
    assert summary["seeds"] == [3, 4] and "seed" not in summary
    paired = summary["paired"]["local"]
    assert paired["differences"] == pytest.approx([0.1, 0.3])
    assert (paired["mean"], paired["std"]) == (pytest.approx(0.2), pytest.approx(0.1 * math.sqrt(2)))
