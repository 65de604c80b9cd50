"""Scores: which data a model is judged on, whose statistics its norms use, and figures over clients and tiers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hetperm import Client, Config
from hetperm.device.bench import CHUNK
from hetperm.metrics import Metric
from hetperm.params import NotFinite
from hetperm.runs.scores import by_tier, figures, load_for_evaluation, score
from hetperm.runs.setting import Setting, from_model


def shard(mean: float, n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = mean + torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
    return x, torch.arange(n) % 2


def setting_of(model: nn.Module, clients: list[Client], **changes) -> Setting:
    return from_model(model, clients, Config(**changes), loss=None, metric=None)


# Norms


@pytest.mark.parametrize("n", [8, CHUNK + 4])
def test_norms_use_the_statistics_of_the_clients_training_data_and_of_nothing_else(n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    clients = [Client(shard(mean, n), val=shard(-7), test=shard(7)) for mean in (5.0, -5.0)]
    setting = setting_of(model, clients)
    x = clients[0].train[0]
    for _ in range(2):  # whoever was on the bench before
        load_for_evaluation(setting.shop.full, setting.start, setting.clients[1])
        load_for_evaluation(setting.shop.full, setting.start, setting.clients[0])
        norm = setting.shop.full.module[0]
        assert torch.allclose(norm.running_mean, x.mean(0), atol=1e-5)
        assert torch.allclose(norm.running_var, x.var(0), rtol=0.02)


# Which data, which model


class Constant(nn.Module):
    """Logits that do not depend on the input."""

    def __init__(self, *logits: float):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x):
        return self.logits.expand(len(x), -1)


def ones(n: int, label: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(n, 3), torch.full((n,), label)


def test_every_client_is_scored_with_its_own_model_on_the_part_that_was_asked_for():
    clients = [Client(ones(4), val=ones(4, label=0), test=ones(4)), Client(ones(4), val=ones(4), test=None)]
    setting = setting_of(Constant(0.0, 1.0), clients)
    models = [{"logits": torch.tensor([0.0, 1.0])}, {"logits": torch.tensor([0.0, 2.0])}]
    right, wrong = (math.log(1 + math.exp(-margin)) for margin in (1, -1))
    accuracies, losses = score(setting, models, [1.0, 1.0], "test", where="")
    assert accuracies[0] == 1 and losses[0] == pytest.approx(right)
    assert math.isnan(accuracies[1]) and math.isnan(losses[1])
    accuracies, losses = score(setting, models, [1.0, 1.0], "val", where="")
    assert accuracies == (0, 1)
    assert losses == pytest.approx((wrong, math.log(1 + math.exp(-2))))


def test_classes_that_a_client_masks_can_neither_win_nor_weigh_in_its_loss():
    client = Client((torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])), test=ones(4))
    setting = setting_of(Constant(0.0, 1.0, 9.0), [client], label_mask=True)
    accuracies, losses = score(setting, [setting.start], [1.0], "test", where="")
    assert accuracies == (1,)
    assert losses == pytest.approx((math.log(1 + math.exp(-1)),))
    open_to_all = replace(setting, clients=(replace(setting.clients[0], classes=None),))
    assert score(open_to_all, [setting.start], [1.0], "test", where="")[0] == (0,)


def test_a_score_that_is_not_finite_names_moment_client_and_figures():
    setting = setting_of(Constant(0.0, 1.0), [Client(ones(4), test=ones(4))])
    broken = {"logits": torch.tensor([0.0, math.nan])}
    with pytest.raises(
        NotFinite, match=r"^after epoch 3: client 0: test loss nan, accuracy .*; lower the learning rate"
    ):
        score(setting, [broken], [1.0], "test", where="after epoch 3")


def test_a_metric_that_gives_no_number_for_a_sound_model_is_named():
    setting = setting_of(Constant(0.0, 1.0), [Client(ones(4), test=ones(4))])
    odd = replace(setting, metric=Metric("odd", lambda outputs, labels: torch.tensor(math.nan)))
    with pytest.raises(
        NotFinite, match=r"test loss 0\.3.*, odd nan .*; make odd give a number for such outputs, or cho"
    ):
        score(odd, [setting.start], [1.0], "test", where="after epoch 3")


# Figures


@pytest.fixture(scope="module")
def three() -> Setting:
    """Clients of 2, 4 and 6 samples, the first of a tier of its own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return setting_of(model, [Client(ones(n), width=width) for n, width in ((2, 1.0), (4, 0.5), (6, 0.5))])


def test_figures_are_over_the_clients_that_were_scored_by_hand(three):
    over = figures(three, (0.5, math.nan, 1.0), (2.0, math.nan, 1.0))
    assert over["accuracy"] == pytest.approx(
        {"mean": 0.75, "weighted": (2 * 0.5 + 6 * 1.0) / 8, "std": 0.25, "worst": 0.5, "bottom_decile": 0.5}
    )
    assert (over["loss"]["worst"], over["loss"]["mean"]) == (2.0, 1.5)  # the largest loss is the worst


def test_without_anybody_scored_figures_have_their_names_and_no_values(three):
    over = figures(three, (math.nan,) * 3, (math.nan,) * 3)
    assert list(over["accuracy"]) == ["mean", "weighted", "std", "worst", "bottom_decile"]
    assert all(math.isnan(value) for table in over.values() for value in table.values())


def test_a_tier_has_the_mean_of_those_of_its_clients_that_were_scored(three):
    assert by_tier(three, (0.5, 0.2, 0.6)) == {"1": 0.5, "0.5": pytest.approx(0.4)}
    assert by_tier(three, (0.5, math.nan, 0.6)) == {"1": 0.5, "0.5": 0.6}
    assert math.isnan(by_tier(three, (math.nan, 0.2, 0.6))["1"])
