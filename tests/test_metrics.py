"""Metrics by name: by hand, which way is better, and how a run says both."""

import json
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetperm import Client, Config, fit
from hetperm.metrics import METRICS, Metric, absolute_error, accuracy, dice, metric_of
from hetperm.report import tables
from hetperm.report.contents import read
from hetperm.report.grid import markdown
from hetperm.report.summary import Summary
from hetperm.runs.summary import aggregate

pytestmark = pytest.mark.usefixtures("undrawn")

# By hand


@pytest.mark.parametrize(
    ("outputs", "y"),
    [
        (torch.rand(4, 1), torch.ones(4, 1)),
        (torch.rand(4, 3), torch.zeros(4, 1, dtype=torch.long)),
        (torch.rand(4, 4), torch.zeros(4, 4, dtype=torch.long)),
        (torch.rand(4), torch.zeros(4, dtype=torch.long)),
        (torch.rand(4, 1, 2, 2), torch.zeros(4, 1, 2, 2, dtype=torch.long)),
    ],
)
def test_accuracy_is_refused_where_it_means_nothing(outputs, y):
    with pytest.raises(ValueError, match=r"accuracy is for outputs .* name another metric, such as mae"):
        accuracy(outputs, y)


@pytest.mark.parametrize("metric", [accuracy, absolute_error, dice])
def test_metrics_take_tensors_of_numbers(metric):
    outputs, y = torch.zeros(2, 1), torch.zeros(2, 1)
    for noun, arguments in (("outputs", (outputs.numpy(), y)), ("labels", (outputs, y.tolist()))):
        with pytest.raises(TypeError, match=rf"^{noun} is a (ndarray|list); \w+ takes tensors, such as torch.as_tens"):
            metric(*arguments)
    with pytest.raises(ValueError, match=r"^labels hold nan, which \w+ cannot score; remove such samples$"):
        metric(outputs, y * math.nan)


def test_accuracy_of_every_place():
    outputs = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # one image of two places: class 0, then class 1
    assert accuracy(outputs, torch.tensor([[0, 0]])) == 0.5


@pytest.mark.parametrize("wrong", [-1, 3, 255])
def test_accuracy_refuses_labels_that_are_no_classes(wrong):
    with pytest.raises(ValueError, match=f"labels hold {wrong} and accuracy is for classes 0 to 2; leave out or"):
        accuracy(torch.rand(2, 3), torch.tensor([2, wrong]))
    assert accuracy(torch.rand(0, 3), torch.empty(0, dtype=torch.long)).isnan()
    assert accuracy(torch.eye(2), torch.tensor([False, True])) == 1


@pytest.mark.parametrize(
    ("outputs", "y", "wrong"),
    [
        (torch.rand(1, 2, 3), torch.tensor([[0, 1, -100]]), "-100 and dice is for classes 0 to 1"),
        (torch.rand(1, 1, 3), torch.tensor([[0, 255, 0]]), "255 and dice is for classes 0 to 1"),
        (torch.rand(1, 3, 3), torch.tensor([[0, 3, 0]]), "3 and dice is for classes 0 to 2"),
    ],
)
def test_dice_refuses_labels_that_are_no_classes(outputs, y, wrong):
    with pytest.raises(ValueError, match=f"labels hold {wrong}"):
        dice(outputs, y)


def test_absolute_error_by_hand_and_never_over_all_pairs():
    outputs, y = torch.tensor([[1.0], [5.0], [2.0]]), torch.tensor([2.0, 2.0, 2.0])
    assert float(absolute_error(outputs, y)) == pytest.approx(4 / 3)
    assert absolute_error(outputs, y) == absolute_error(outputs.squeeze(1), y)
    with pytest.raises(ValueError, match=r"outputs of shape \(3, 2\) and labels of \(3,\) cannot be compared"):
        absolute_error(torch.zeros(3, 2), y)


def test_dice_of_one_region_by_hand():
    y = torch.tensor([[[1, 1], [0, 0]], [[0, 0], [0, 0]]])
    logits = torch.tensor([[[[5.0, -5.0], [5.0, -5.0]]], [[[-1.0, -1.0], [-1.0, -1.0]]]])
    # The first: two said, two true, one in common: 2 / 4. The second: nothing said, nothing there: 1.
    assert float(dice(logits, y)) == pytest.approx((0.5 + 1) / 2)
    assert dice(logits, y.unsqueeze(1).float()) == dice(logits, y)


def test_dice_of_several_classes_is_the_mean_over_those_that_are_there():
    y = torch.tensor([[0, 1, 2, 2]])
    said = torch.tensor([[0, 1, 1, 2]])
    logits = F.one_hot(said, 4).movedim(-1, 1).float()
    # Class 1: 2 * 1 / (2 + 1), class 2: 2 * 1 / (1 + 2); class 3 is neither said nor there, class 0 is background.
    assert float(dice(logits, y)) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="cannot be compared"):
        dice(logits, torch.zeros(1, 5, dtype=torch.long))


def test_the_mean_of_batches_is_that_of_all():
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randn(6, 3, 4, 4, generator=generator), torch.randint(3, (6, 4, 4), generator=generator)
    halves = [dice(logits[k : k + 3], y[k : k + 3]) for k in (0, 3)]
    assert float(dice(logits, y)) == pytest.approx(float(sum(halves) / 2))


def test_perplexity_is_the_exponential_of_the_mean_loss():
    metric = METRICS["perplexity"]
    uniform = metric(torch.zeros(8, 5), torch.arange(8) % 5)
    assert metric.of_client(float(uniform)) == pytest.approx(5)
    assert metric.of_client(1e4) == math.inf and metric.lower_is_better
    assert METRICS["accuracy"].of_client(0.3) == 0.3


# Names


def minus_error(outputs, y):
    return -(outputs - y).abs().mean()


def test_a_function_has_its_own_name_and_more_of_it_is_better():
    assert (metric_of(minus_error).name, metric_of(minus_error).better) == ("minus-error", "higher")
    assert [metric_of(function).name for function in (F.l1_loss, lambda a, b: a, math.exp)] == [
        "l1-loss",
        "score",
        "exp",
    ]

    def loss(outputs, y): ...

    assert metric_of(loss).name == "score"  # a column is called loss already
    assert metric_of(METRICS["mae"]) is METRICS["mae"] is metric_of("mae")


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        (("loss", minus_error), ValueError, "a metric is named 'loss'; a name has small letters"),
        (
            ("mean_iou", minus_error),
            ValueError,
            "a metric is named 'mean_iou'; .* 'mean-iou'",
        ),
        (("x", minus_error, "less"), ValueError, "metric 'x': better is 'less'; it must be 'higher' or 'lower'"),
        (("x", 3), TypeError, "metric 'x': score is 3; it must be a function"),
        (("x", minus_error, "lower", 3), TypeError, "metric 'x': finish is 3; it must be a function"),
    ],
)
def test_a_metric_that_cannot_be_written_down_is_refused(arguments, kind, sentence):
    with pytest.raises(kind, match=sentence):
        Metric(*arguments)


def out_of_range(mean):
    raise IndexError


@pytest.mark.parametrize(
    ("finish", "sentence"),
    [
        (lambda mean: None, "finish gives None for 0.5; it must return one number"),
        (lambda mean: 1j * mean, "finish gives 0.5j for 0.5; it must return one number"),
        (lambda mean: torch.ones(2), "finish gives tensor([1., 1.]) for 0.5; it must return one number"),
        (lambda mean: math.log(mean - 1), "finish fails on 0.5 (math domain error)"),
        (out_of_range, "finish fails on 0.5 (IndexError)"),
    ],
)
def test_a_finish_that_gives_no_number_is_refused_with_the_name_of_its_metric(finish, sentence):
    with pytest.raises(ValueError, match=f"^metric 'x': {re.escape(sentence)}$"):
        Metric("x", minus_error, finish=finish).of_client(0.5)


def test_a_finish_may_give_any_kind_of_number():
    for finish in (lambda mean: torch.tensor([2.0]), lambda mean: 2, np.float32):
        assert Metric("x", minus_error, finish=finish).of_client(2.0) == 2.0


def test_a_metric_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="unknown metric 'perplexitty'; did you mean 'perplexity'"):
        metric_of("perplexitty")
    with pytest.raises(TypeError, match=r"metric is a int; it must be a name, a function or a hetperm.Metric"):
        metric_of(3)


# A run says the metric's name and which way is better


def clients():
    generator = torch.Generator().manual_seed(0)

    def part(sign, n):
        x = torch.randn(n, 3, generator=generator)
        return x, sign * x.sum(1)

    return [Client(part(sign, 24), test=part(sign, 40), width=width) for sign in (1, -1) for width in (1.0, 0.5)]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


SMALL = {"epochs": 2, "steps": 40, "batch_size": 8, "baselines": ("local", "fedavg"), "personal_lr": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "mae"
    fit(model(), clients(), Config(**SMALL, out=path), loss=F.mse_loss, metric="mae")
    return path


def test_no_metric_can_be_named_like_a_column_or_an_entry_of_a_run(folder):
    summary = json.loads((folder / "summary.json").read_text())
    names = {*summary, *summary["tiers"]["0.5"], *summary["mae"], *summary["cost"], "joined", "tail", "val"}
    for path in folder.glob("*.csv"):
        names |= set(path.read_text().partition("\n")[0].split(","))
    for name in names - {"mae"}:
        if "_" not in name:  # no metric may hold one
            with pytest.raises(ValueError, match=f"^a metric is named '{name}'"):
                Metric(name, F.l1_loss)


def test_files_call_the_metric_by_its_name(folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["metric"], summary["better"]) == ("mae", "lower")
    assert "accuracy" not in json.dumps(summary) and summary["tiers"]["0.5"]["mae"] > 0
    assert summary["mae"]["worst"] >= summary["mae"]["mean"]  # the largest error is the worst
    for name in ("metrics.csv", "clients.csv", "baselines.csv"):
        columns = (folder / name).read_text().splitlines()[0]
        assert "mae" in columns and "accuracy" not in columns
    assert (folder / "mae.png").exists() and not (folder / "accuracy.png").exists()
    manifest = json.loads((folder / "models" / "client_000.json").read_text())
    assert manifest["mae"] > 0 and "accuracy" not in manifest
    assert 'metric = "mae"' in (folder / "config.toml").read_text()


def test_tables_and_the_page_say_it_too(folder):
    summary = read(folder).summary
    grid = tables.closing_grid(summary)
    assert grid.columns[1] == "mae" and "test mae, lower is better" in grid.title
    best = min(summary.methods, key=lambda name: summary.methods[name].score.mean)
    assert [grid.rows[k][0] for k in grid.strong] == [best]
    assert tables.tier_grid(summary).title == "mae by tier"
    page = (folder / "report.html").read_text()
    assert "Mae by tier" in page and "lower is better" in page and "the further down and to the left" in page
    assert "accuracy" not in page.lower()
    assert "mae" in markdown(grid)


def test_being_ahead_is_positive_whichever_way_is_better(folder):
    summary = json.loads((folder / "summary.json").read_text())
    paired = aggregate([summary, summary], [0, 1])["paired"]
    for rival, gain in paired.items():
        ahead = summary["baselines"][rival]["mae"]["mean"] - summary["mae"]["mean"]
        assert gain["differences"] == [pytest.approx(ahead)] * 2
    assert Summary.from_json(aggregate([summary, summary], [0, 1])).better == "lower"


def test_the_metric_of_the_configuration_serves_fit_too():
    result = fit(model(), clients(), Config(**SMALL | {"baselines": ()}, metric="mae"), loss=F.mse_loss)
    assert result.summary["metric"] == "mae" and result.score == result.summary["mae"]["mean"]


def test_perplexity_of_a_client_is_that_of_all_its_samples():
    x, y = torch.randn(600, 4, generator=torch.Generator().manual_seed(1)), torch.arange(600) % 3
    one = [Client((x[:30], y[:30]), test=(x, y)) for _ in range(2)]  # more than a batch of the evaluation
    result = fit(nn.Linear(4, 3), one, Config(**SMALL | {"baselines": ()}), metric="perplexity")
    row = result.clients[0]
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]), rel=1e-5)
