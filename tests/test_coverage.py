"""Coverage: how often each block of the global model was trained, by which tier."""

import pytest
import torch
from torch import nn

from hetperm import Client, Config
from hetperm.device.updates import Ordered
from hetperm.runs import training
from hetperm.runs.coverage import coverage, coverage_of
from hetperm.runs.setting import Setting, from_model
from hetperm.runs.training import Trained

WIDTHS = (1.0, 0.5, 0.25, 0.25)


def setting_of(**changes) -> Setting:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    config = Config(**{"num_clients": 4, "epochs": 3, "warmup_rounds": 2, "local_steps": 2, "steps": 12} | changes)
    return from_model(model, [Client((x, y), width=width) for width in WIDTHS], config, loss=None, metric=None)


def rows_of(method: str, **changes):
    """block, tier -> row of a run of this method; None without coverage."""
    main = Trained(method, setting_of(**changes), WIDTHS, None, (), (), (), 0.0, 0.0, trained_here=True)
    rows = coverage_of(main)
    return None if rows is None else {(row["block"], row["tier"]): row for row in rows}


def test_coverage_by_hand():
    rows = {(row["block"], row["tier"]): row for row in coverage(setting_of(), "static", rounds=5)}
    assert [tier for block, tier in rows if block == "0.bias"] == ["1", "0.5", "0.25", "all"]
    # Of 8 hidden channels the tiers train 8, 4, and twice 2, always the first ones.
    assert [rows["0.bias", tier]["never"] for tier in ("1", "0.5", "0.25", "all")] == [0, 0.5, 0.75, 0]
    assert [rows["0.bias", tier]["times"] for tier in ("1", "0.5", "0.25", "all")] == [1, 0.5, 0.5, 2]
    assert rows["2.bias", "0.25"]["times"] == 2  # outputs are never cut
    assert {row["rounds"] for row in rows.values()} == {5}


@pytest.mark.parametrize(
    ("method", "rounds", "reached"),
    [
        ("perm", 5, 1 / 4),  # the warm-up and a step of each epoch
        ("perm-two-stage", 2, 1 / 4),
        ("heterofl", 6, 1 / 4),
        ("heterofl-ft", 3, 1 / 4),  # half of the steps are fine-tuning
        ("fedrolex-ft", 3, 1 / 2),  # a window of two channels that moves on by one a round
    ],
)
def test_coverage_counts_the_rounds_in_which_the_global_model_is_trained(method, rounds, reached):
    rows = rows_of(method)
    assert {row["rounds"] for row in rows.values()} == {rounds}
    assert 1 - rows["0.bias", "0.25"]["never"] == pytest.approx(reached)


def test_methods_that_train_no_parts_of_one_model_have_no_coverage():
    assert [rows_of(method) for method in ("local", "fedavg-ft", "ifca")] == [None] * 3


def test_coverage_of_ordered_dropout_counts_the_widths_that_were_drawn(monkeypatch):
    drawn, draws = [], Ordered.draws

    def listened(self, *args):
        for batch, width in draws(self, *args):
            drawn.append(width)
            yield batch, width

    monkeypatch.setattr(Ordered, "draws", listened)
    list(training.epochs(setting_of(engine="sequential"), "fjord", steps=12))
    assert len(drawn) == 4 * 12 and len(set(drawn)) == 3
    total = sum(drawn)
    # In each of twelve steps, the clients' widths added up
    assert rows_of("fjord")["0.bias", "all"]["times"] == pytest.approx(total / 12, rel=1e-5)
