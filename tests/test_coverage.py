"""Coverage: how often each block of the global model was trained, by tier."""

import functools
from types import SimpleNamespace

import pytest
import torch
from federation import HIDDEN, NAMES, SEED, make_clients, rival_options, scalable, start
from reference import hetero
from reference_inputs import Draw, as_list
from torch import nn

from hetperm import Client, Config
from hetperm.device.updates import Ordered
from hetperm.randomness import generator_for
from hetperm.runs import coverage as module
from hetperm.runs import training
from hetperm.runs.coverage import coverage, coverage_of
from hetperm.runs.setting import Setting, from_model
from hetperm.runs.training import Trained
from hetperm.server.slicer import Slicer


def setting(widths, tiers, seed=SEED):
    """What coverage reads of a setting."""
    config = SimpleNamespace(seed=seed)
    return SimpleNamespace(
        clients=make_clients(widths), tiers=tiers, slicer=Slicer(scalable()), start=start(), config=config
    )


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
def test_coverage_counts_who_trained_what(extraction):
    tiers = ["big", "small", "small", "big"]
    here = setting((0.5, 0.25, 0.25, 0.5), tiers)
    units = {
        "static": lambda i, t: hetero.first(here.clients[i].width, HIDDEN),
        "rolling": lambda i, t: hetero.window(here.clients[i].width, HIDDEN, t),
        "random": Draw(here.clients, None).units,
    }[extraction]
    expected = hetero.coverage(as_list(start()), functools.cache(units), 5, tiers)
    rows = list(coverage(here, extraction, rounds=5))
    assert [(row["block"], row["tier"]) for row in rows] == [(n, t) for t in ("big", "small", "all") for n in NAMES]
    for row in rows:
        times, never = expected[NAMES.index(row["block"]), row["tier"]]
        assert row["times"] == pytest.approx(times, rel=1e-6) and row["never"] == pytest.approx(never, abs=1e-6)
        assert row["rounds"] == 5


def of_the_first_layer(rows):
    return [(row["tier"], row["times"], row["never"]) for row in rows if row["block"] == "0.bias"]


def test_coverage_by_hand():
    """Eight units of which one client trains all and one trains two: 2 of 8 rows twice, the others once."""
    rows = coverage(setting((1.0, 0.25), ["a", "b"]), "static", rounds=9)
    assert of_the_first_layer(rows) == [("a", 1.0, 0.0), ("b", 0.25, 0.75), ("all", 1.25, 0.0)]


def test_coverage_of_widths_that_change_from_step_to_step():
    """Eight units: the wide client trains all in one step of two and two of them in the other, the narrow one two."""
    here, steps = setting((1.0, 0.25), ["a", "b"]), {1.0: [1.0, 0.25], 0.25: [0.25, 0.25]}
    rows = coverage(here, "static", rounds=9, drawn=lambda client, round: steps[client.width])
    found = {tier: (times, never) for tier, times, never in of_the_first_layer(rows)}
    assert found["a"] == pytest.approx((0.625, 0.0)) and found["b"] == pytest.approx((0.25, 0.75))
    assert found["all"] == pytest.approx((0.875, 0.0))


def test_the_widths_of_ordered_dropout_are_those_that_were_trained():
    here, options = setting((1.0, 0.5, 0.5, 0.25), list("abbc")), rival_options("fjord", local_steps=20)
    for client in here.clients:
        widths = tuple(width for width in (0.25, 0.5, 1.0) if width <= client.width)
        trained = Ordered(20, 4, 0.4, widths).draws(client.n_train, generator_for(SEED, "global", 2, client.key))
        assert module._drawn(here, options, client, 2) == [width for _, width in trained]


def test_a_tier_may_be_called_all():
    rows = coverage(setting((1.0, 0.25), ["a", "all"]), "static", rounds=1)
    assert [row[:2] for row in of_the_first_layer(rows)] == [("a", 1.0), ("all", 0.25), ("all", 1.25)]


@pytest.mark.parametrize("extraction", ["static", "random"])
def test_without_rounds_nothing_is_covered(extraction):
    rows = list(coverage(setting((1.0, 0.5, 0.5, 0.25), list("abbc")), extraction, rounds=0))
    assert all(row["times"] == 0 and row["never"] == 1 for row in rows) and len(rows) == 4 * 6


# Of whole runs

WIDTHS = (1.0, 0.5, 0.25, 0.25)


def setting_of(**changes) -> Setting:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    config = Config(
        **{"num_clients": 4, "epochs": 3, "warmup_rounds": 2, "local_steps": 2, "steps": 12, "alpha_every": 1} | changes
    )
    return from_model(model, [Client((x, y), width=width) for width in WIDTHS], config, loss=None, metric=None)


def rows_of(method: str, **changes):
    """block, tier -> row of a run of this method; None without coverage."""
    main = Trained(method, setting_of(**changes), WIDTHS, None, (), (), (), 0.0, 0.0, trained_here=True)
    rows = coverage_of(main)
    return None if rows is None else {(row["block"], row["tier"]): row for row in rows}


@pytest.mark.parametrize(
    ("method", "rounds", "reached"),
    [
        ("perm", 4, 1 / 4),  # the warm-up and a step of each epoch but the last, after which nothing is estimated
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
