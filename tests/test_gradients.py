"""Updates that send back gradients and losses, by hand and in pieces."""

import pytest
import torch
from federation import IMAGE, ResNet, equal, generator, linear, make_clients, make_shop, start
from reference import perm_maths
from torch.nn import functional as F

from hetperm.device.gradients import BatchGradient, FullGradient, MeanLoss, ReportGradient, micro_gradients
from hetperm.mixing import discrepancy
from hetperm.params import flat


def literal(shard):
    """The gradient of softmax regression at the start, by autograd on the formula itself."""
    x, y = shard
    leaves = [p.clone().requires_grad_() for p in start(linear).values()]
    weight, bias = leaves
    return torch.autograd.grad(F.cross_entropy(x @ weight.T + bias, y), leaves)


def rows(shard, taken):
    return shard[0][taken], shard[1][taken]


def shop():
    return make_shop(linear, cut=False)


def test_the_gradient_of_a_large_batch_is_that_of_the_samples_drawn():
    shard = make_clients()[2].train
    got = BatchGradient(5, chunk=2)(shop().full, start(linear), shard, generator(4))
    drawn = torch.randperm(12, generator=generator(4))[:5]
    assert list(got) == ["weight", "bias"]
    for g, expected in zip(got.values(), literal(rows(shard, drawn)), strict=True):
        torch.testing.assert_close(g, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("chunk", [1, 5, 12, 512])
def test_the_full_gradient_is_that_of_the_shard_however_many_samples_run_at_once(chunk):
    shard = make_clients()[2].train
    got = FullGradient(chunk)(shop().full, start(linear), shard, generator())
    torch.testing.assert_close(got, flat(literal(shard)), rtol=0, atol=1e-14)


def test_micro_batches_make_up_the_shard():
    shard = make_clients()[2].train
    gradients, sizes = micro_gradients(shop().full, start(linear), shard, batches=5, generator=generator(2))
    gradients = list(gradients)
    assert sizes == [3, 3, 2, 2, 2]
    for g, piece in zip(gradients, torch.randperm(12, generator=generator(2)).tensor_split(5), strict=True):
        torch.testing.assert_close(g, flat(literal(rows(shard, piece))), rtol=0, atol=1e-14)
    mean = sum(size * g for size, g in zip(sizes, gradients, strict=True)) / 12
    torch.testing.assert_close(mean, flat(literal(shard)), rtol=0, atol=1e-14)


def test_there_are_no_more_micro_batches_than_samples_and_with_batch_norms_than_pairs_of_them():
    clients, images = make_clients(), make_clients(shape=IMAGE)
    _, sizes = micro_gradients(shop().full, start(linear), clients[1].train, batches=50, generator=generator())
    assert sizes == [1] * 7
    bench = make_shop(ResNet).full
    _, sizes = micro_gradients(bench, start(ResNet), images[1].train, batches=50, generator=generator())
    assert sizes == [3, 2, 2]


def test_a_report_holds_the_gradient_and_the_variance_of_it():
    shard = make_clients()[2].train
    report = ReportGradient(4)(shop().full, start(linear), shard, generator(1))
    torch.testing.assert_close(report.gradient, flat(literal(shard)), rtol=0, atol=1e-14)
    pieces = torch.randperm(12, generator=generator(1)).tensor_split(4)  # all of three samples
    gradients = [flat(literal(rows(shard, piece))).tolist() for piece in pieces]
    assert report.noise == pytest.approx(perm_maths.noise(gradients), rel=1e-12)


def test_a_report_of_a_part_is_zero_elsewhere_and_may_be_sketched():
    shard, at = make_clients()[2].train, torch.arange(18).flip(0) + 3
    params = start(linear) | {"positions": at}
    report = ReportGradient(4, whole_size=25)(shop().full, params, shard, generator(1))
    expected = torch.zeros(25, dtype=torch.float64)
    expected[at] = flat(literal(shard))
    torch.testing.assert_close(report.gradient, expected, rtol=0, atol=1e-14)
    update = ReportGradient(4, sketch=8, sketch_seed=5, whole_size=25)
    sketched = update(shop().full, params, shard, generator(1))
    assert torch.equal(sketched.gradient, discrepancy.sketch(report.gradient, 8, 5))


@pytest.mark.parametrize("chunk", [1, 5, 12, 512])
def test_the_loss_of_a_shard_is_its_mean_however_many_samples_run_at_once(chunk):
    (x, y), params = make_clients()[2].train, start(linear)
    expected = F.cross_entropy(x @ params["weight"].T + params["bias"], y)
    got = MeanLoss(chunk)(shop().full, params, (x, y), generator())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    assert not got.requires_grad


@pytest.mark.parametrize("update", [BatchGradient(99), FullGradient(), ReportGradient(3), MeanLoss()], ids=type)
def test_the_model_is_left_alone(update):
    params = {name: x.clone() for name, x in start(linear).items()}
    update(shop().full, params, make_clients()[0].train, generator())
    assert equal(params, start(linear))
