"""Workbenches and workshops: models come in, are trained and leave; gradients in pieces; benches of every width."""

import pytest
import torch
from federation import CLASSES, INPUTS, equal, make_shop, mlp, part_of, random, start
from torch import nn

from hetperm.device.bench import masked
from hetperm.device.updates import Sgd


def data(n=7):
    return random((n, INPUTS), seed=1), torch.arange(n) % CLASSES


def test_a_model_comes_off_the_bench_as_it_was_put_there_and_in_memory_of_its_own():
    bench = make_shop().full
    bench.load(start())
    taken = bench.take()
    assert equal(taken, start())
    bench.descend(bench.gradient(*data()), 0.1)
    assert equal(taken, start()) and not equal(bench.take(), start())


def test_a_step_goes_down_the_gradient():
    bench = make_shop().full
    bench.load(start())
    gradient = bench.gradient(*data())
    bench.descend(gradient, 0.25)
    for (name, old), g in zip(start().items(), gradient, strict=True):
        torch.testing.assert_close(bench.take()[name], old - 0.25 * g, rtol=0, atol=1e-15)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8])
def test_a_gradient_in_pieces_is_the_gradient(chunk):
    bench = make_shop(cut=False).full
    whole = bench.gradient(*data())
    for _ in range(2):  # nothing is left behind of the first time
        for a, b in zip(bench.mean_gradient(data(), chunk), whole, strict=True):
            assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)


def test_pieces_of_a_model_with_batch_norm_have_two_samples_at_least():
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))

    bench, seen = make_shop(normed, cut=False).full, []
    bench.module[0].register_forward_hook(lambda layer, args, output: seen.append(len(output)))
    bench.mean_gradient(data(), 1)
    assert seen == [3, 2, 2]


def test_parameters_that_the_loss_does_not_depend_on_have_a_gradient_of_zero():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(INPUTS, CLASSES), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    bench = make_shop(Idle, cut=False).full
    for chunk in (2, 512):
        gradient = dict(zip(bench.names, bench.mean_gradient(data(), chunk), strict=True))
        assert not gradient["idle.weight"].any() and gradient["used.weight"].any()


def test_absent_classes_are_out_of_the_running_and_their_logits_finite():
    logits = torch.zeros(2, 3)
    assert masked(logits, None) is logits
    out = masked(logits, torch.tensor([True, False, True]))
    assert out.softmax(1).tolist() == [[0.5, 0.0, 0.5]] * 2 and out.isfinite().all()


def test_frozen_parameters_do_not_travel():
    def half_frozen() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    assert list(make_shop(half_frozen).full.take()) == ["2.weight", "2.bias", "4.weight", "4.bias"]


# Benches of other widths


def test_a_narrower_bench_holds_the_static_part_and_its_steps_come_back():
    bench = make_shop().full
    bench.load(start())
    bench.classes = torch.tensor([True, True, False])
    narrow, index = bench.narrower(0.5)
    assert narrow.width == 0.5 and narrow.classes is bench.classes and equal(narrow.take(), part_of(start(), 0.5))
    ones = tuple(torch.ones_like(p) for p in narrow.take().values())
    bench.descend_part(narrow, index, ones, 0.5, 0.0)
    for name, x in bench.take().items():
        torch.testing.assert_close(x, start()[name] - 0.5 * index.mask(name), rtol=0, atol=0)


def test_a_bench_is_made_once_for_every_width():
    shop = make_shop()
    assert shop.at(1.0) is shop.full and shop.at(0.5) is shop.at(0.5)
    assert [x.shape for x in shop.at(0.25).take().values()] == [x.shape for x in part_of(start(), 0.25).values()]


def test_a_workshop_of_whole_models_has_no_other_bench():
    with pytest.raises(ValueError, match=r"no bench for width 0.5: this model comes in one size"):
        make_shop(cut=False).at(0.5)


def test_a_copy_of_a_workshop_has_benches_of_its_own():
    shop = make_shop()
    other = shop.copy()
    other.full.load({name: torch.zeros_like(x) for name, x in start().items()})
    shop.full.load(start())
    assert equal(shop.full.take(), start()) and not any(x.any() for x in other.full.take().values())


def test_what_is_trained_on_a_bench_before_does_not_matter():
    bench, shard = make_shop().at(0.5), data(9)
    update, model = Sgd(3, 4, 0.3), part_of(start(), 0.5)
    once = update(bench, model, shard, torch.Generator().manual_seed(0))
    update(bench, {name: x + 5 for name, x in model.items()}, shard, torch.Generator().manual_seed(1))
    assert equal(once, update(bench, model, shard, torch.Generator().manual_seed(0)))
