"""Accuracy, summaries over clients, and evaluation that leaves a module as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetperm.client import View
from hetperm.metrics import accuracy
from hetperm.runs.evaluate import IMAGES, evaluate, summarise


def test_accuracy_is_the_share_of_right_answers():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
    assert accuracy(logits, torch.tensor([0, 1, 2, 2])).item() == 0.75


# Summaries


def test_a_summary_by_hand():
    values = [i / 20 for i in range(20)]  # 0, .05, ..., .95; the worst tenth is 0 and .05
    figures = summarise(values, [1] * 19 + [21])
    assert figures["mean"] == pytest.approx(0.475)
    assert figures["weighted"] == pytest.approx((sum(values[:19]) + 21 * 0.95) / 40)
    assert figures["std"] == pytest.approx((sum((v - 0.475) ** 2 for v in values) / 20) ** 0.5)
    assert figures["worst"] == 0
    assert figures["bottom_decile"] == pytest.approx(0.025)


def test_the_worst_loss_is_the_largest():
    figures = summarise(torch.tensor([1.0, 4.0, 2.0]), torch.ones(3), largest_is_worst=True)
    assert (figures["worst"], figures["bottom_decile"]) == (4, 4)


def test_the_summary_of_one_client_is_that_client():
    assert summarise([0.5], [3]) == {"mean": 0.5, "weighted": 0.5, "std": 0, "worst": 0.5, "bottom_decile": 0.5}


def test_a_summary_does_not_depend_on_the_order_of_clients():
    values, n = torch.rand(23), torch.randint(1, 9, (23,))
    order = torch.randperm(23)
    assert summarise(values, n) == pytest.approx(summarise(values[order], n[order]))


@pytest.mark.parametrize(("values", "n"), [([], []), ([1.0, 2.0], [1])])
def test_a_summary_needs_one_count_for_every_value(values, n):
    with pytest.raises(ValueError, match=f"{len(values)} values and {len(n)} sample counts"):
        summarise(values, n)


# Evaluation


class Sum(nn.Module):
    """Logits (0, sum of the input), with parts that behave differently in training."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout(0.9)

    def forward(self, x):
        total = self.drop(self.norm(x)).sum(1) * self.scale
        return torch.stack([torch.zeros_like(total), total], 1)


X = torch.tensor([[1.0, 0.0], [0.0, -1.0], [3.0, 1.0], [-2.0, 0.0], [0.0, 5.0]])
Y = torch.tensor([1, 0, 0, 0, 1])


@pytest.mark.parametrize("batch_size", [1, 2, 5, 512])
def test_means_are_over_samples_whatever_the_batch_size(batch_size):
    loss, right = evaluate(
        lambda x: torch.stack([0 * x[:, 0], x.sum(1)], 1),
        (X, Y),
        loss=F.cross_entropy,
        metric=accuracy,
        batch_size=batch_size,
    )
    margins = torch.tensor([1.0, 1.0, -4.0, 2.0, 5.0])  # of the right class over the other
    assert right == pytest.approx(0.8)
    assert loss == pytest.approx(F.softplus(-margins).mean().item(), rel=1e-6)


def test_a_view_is_scored_on_its_rows():
    rows = torch.tensor([0, 1, 3])
    figures = [
        evaluate(Sum(), data, loss=F.cross_entropy, metric=accuracy, batch_size=2)
        for data in (View((X, Y), rows), (X[rows], Y[rows]))
    ]
    assert figures[0] == figures[1]
    assert figures[0][1] == 1.0


def test_a_module_is_scored_in_evaluation_mode_without_gradients_and_given_back_as_it_was():
    model = Sum().train()
    model.norm.eval()  # frozen by its owner
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = []
    model.drop.register_forward_hook(lambda drop, *_: modes.append((drop.training, torch.is_inference_mode_enabled())))
    evaluate(model, (X, Y), loss=F.cross_entropy, metric=accuracy)
    assert modes == [(False, True)]
    assert (model.training, model.drop.training, model.norm.training) == (True, True, False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_module_is_given_back_as_it_was_also_when_the_loss_raises():
    def bad_loss(outputs, y):
        raise RuntimeError("no")

    model = Sum().train()
    with pytest.raises(ValueError, match=r"the loss fails on outputs of shape .* \(no\)"):
        evaluate(model, (X, Y), loss=bad_loss, metric=accuracy)
    assert model.drop.training


def test_a_loss_that_works_in_place_changes_no_score():
    plain = evaluate(Sum(), (X, Y), loss=F.cross_entropy, metric=accuracy)
    in_place = evaluate(
        Sum(), (X, Y), loss=lambda out, y: F.cross_entropy(out, y) + 0 * out.neg_().sum(), metric=accuracy
    )
    assert in_place == plain


def test_data_move_to_the_precision_of_the_model():
    model = Sum().double()
    assert evaluate(model, (X, Y), loss=F.cross_entropy, metric=accuracy)[1] == pytest.approx(0.8)


@pytest.mark.parametrize("nothing", [None, (X[:0], Y[:0])])
def test_nothing_to_evaluate_on_is_an_error(nothing):
    with pytest.raises(ValueError, match="there is no data to evaluate on"):
        evaluate(Sum(), nothing, loss=F.cross_entropy, metric=accuracy)


def test_a_metric_that_is_no_mean_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"the metric of a batch has shape \(5,\) and must be one number"):
        evaluate(Sum(), (X, Y), loss=F.cross_entropy, metric=lambda logits, y: logits.argmax(1) == y)


def test_images_of_a_plain_network_are_run_with_channels_last_a_few_at_a_time_and_give_the_same_figures():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 3))
    x, y = torch.randn(IMAGES + 6, 1, 8, 8), torch.arange(IMAGES + 6) % 3
    seen = []
    network[1].register_forward_hook(lambda part, inputs, output: seen.append(inputs[0].clone()))
    plain = evaluate(network, (x, y), loss=F.cross_entropy, metric=accuracy)  # what a hook does nobody knows
    assert [len(one) for one in seen] == [IMAGES + 6] and seen[0].is_contiguous()
    network[1]._forward_hooks.clear()
    sizes = []

    def loss(outputs, y):
        sizes.append(len(y))
        return F.cross_entropy(outputs, y)

    fast = evaluate(network, (x, y), loss=loss, metric=accuracy)
    assert sizes == [IMAGES, 6]
    assert fast == pytest.approx(plain, rel=1e-5)
