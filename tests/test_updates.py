"""Updates: what a host does with a model, against autograd on slices and by hand."""

from dataclasses import replace

import pytest
import torch
from federation import (
    CLASSES,
    HEADS,
    NAMES,
    equal,
    generator,
    make_clients,
    make_federation,
    make_shop,
    part_of,
    start,
    with_classes,
)
from reference_inputs import as_list, batches, sliced
from torch import nn
from torch.nn import functional as F

from hetperm.device import updates
from hetperm.device.bench import Workbench
from hetperm.device.rival_updates import Envelope, Meta, Mixture
from hetperm.device.updates import Distil, Ordered, Sgd
from hetperm.engine.task import Task

SGD = Sgd(steps=9, batch_size=4, lr=0.3)


def forward(model, x):
    W1, b1, W2, b2, W3, b3 = model
    return torch.tanh(torch.tanh(x @ W1.T + b1) @ W2.T + b2) @ W3.T + b3


# Batches


@pytest.mark.parametrize(("n", "size", "steps"), [(9, 4, 5), (8, 4, 2), (8, 4, 3), (3, 4, 2), (1, 4, 3), (7, 1, 9)])
def test_batches_are_drawn_without_replacement_shard_after_shard(n, size, steps):
    rows = updates.batches(n, size, steps, generator())
    assert rows.tolist() == batches(n, size, steps, generator())
    assert rows.shape == (steps, min(size, n))
    per_pass = n // min(size, n)
    for first in range(0, steps, per_pass):
        one_pass = rows[first : first + per_pass].flatten().tolist()
        assert len(set(one_pass)) == len(one_pass)


# Plain SGD and its kin


def test_a_step_of_sgd_by_hand():
    """f(w) = ((2w - 1)^2 + 0) / 2 at w = 1: the gradient is 2 and a step of 0.1 ends at 0.8, where it is 1.2."""
    bench, w, shard = square()
    assert Sgd(1, 2, 0.1)(bench, w, shard, generator())["weight"].item() == pytest.approx(0.8, abs=1e-15)
    assert Sgd(2, 2, 0.1)(bench, w, shard, generator())["weight"].item() == pytest.approx(0.68, abs=1e-15)
    assert w["weight"].item() == 1.0


def square():
    """A bench for one weight with a quadratic loss, the weight 1, and a shard of two samples."""
    x, y = torch.tensor([[2.0], [0.0]], dtype=torch.float64), torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    bench = Workbench(nn.Linear(1, 1, bias=False, dtype=torch.float64), F.mse_loss)
    return bench, {"weight": torch.tensor([[1.0]], dtype=torch.float64)}, (x, y)


@pytest.mark.parametrize("own", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["distil", "ordered"])
def test_updates_on_narrower_parts_equal_autograd_on_slices(kind, own):
    (x, y), widths = make_clients()[0].train, [p for p in (0.25, 0.5, 1.0) if p < own]
    widths += [own] if kind == "ordered" else []
    update = Distil(6, 4, 0.3, tuple(widths), 0.8) if kind == "distil" else Ordered(6, 4, 0.3, tuple(widths))
    params = part_of(start(), own)
    got = update(make_shop().at(own), params, (x, y), generator())
    stream, model = generator(), [p.clone() for p in as_list(params)]
    for batch in batches(len(x), 4, 6, stream):
        width = widths[int(torch.randint(len(widths), (), generator=stream))]
        leaves = [p.clone().requires_grad_() for p in model]
        part = sliced(leaves, width)
        if kind == "distil":
            teacher = forward(leaves, x[batch])
            target = teacher.detach().softmax(1)
            lesson = (target * (target.log() - forward(part, x[batch]).log_softmax(1))).sum(1).mean()
            value = F.cross_entropy(teacher, y[batch]) + 0.8 * lesson
        else:
            value = F.cross_entropy(forward(part, x[batch]), y[batch])
        slopes = torch.autograd.grad(value, leaves, materialize_grads=True, allow_unused=True)
        model = [p - 0.3 * g for p, g in zip(model, slopes, strict=True)]
    for name, expected in zip(NAMES, model, strict=True):
        torch.testing.assert_close(got[name], expected, rtol=0, atol=1e-12)


def test_distillation_of_weight_zero_and_one_width_to_draw_are_plain_sgd_bit_for_bit():
    """Longer than a pass over the shard: the widths that are drawn must not disturb the batches."""
    bench, shard = make_shop().full, make_clients()[0].train
    plain = SGD(bench, start(), shard, generator())
    assert equal(Distil(9, 4, 0.3, (0.25, 0.5), 0.0)(bench, start(), shard, generator()), plain)
    assert equal(Ordered(9, 4, 0.3, (1.0,))(bench, start(), shard, generator()), plain)


def test_ordered_dropout_trains_narrower_parts_in_its_share_of_the_steps():
    shop = make_shop()
    bench, at, asked = shop.at(0.5), shop.at, []
    shop.at = lambda width: asked.append(width) or at(width)
    Ordered(40, 4, 0.1, (0.25, 0.5))(bench, part_of(start(), 0.5), make_clients()[1].train, generator())
    assert 10 < len(asked) < 30 and set(asked) == {0.25}  # the other steps are on the bench itself


@pytest.mark.parametrize(
    "update", [Sgd(6, 4, 0.5), Distil(6, 4, 0.5, (0.25, 0.5), 0.8), Ordered(6, 4, 0.5, (0.25, 1.0))], ids=type
)
def test_the_rows_of_absent_classes_never_move_at_a_host(update):
    clients = with_classes(make_clients(), [[0, 1], [0, 2], [0, 2], [0, 1]])
    clients[2] = replace(clients[2], classes=None)  # knows all
    federation = make_federation(clients)
    for host in (0, 1, 2, 0):  # a bench must not remember the classes of another host
        (after,) = federation.run([Task(update, start(), host=host, seed=host)], round=0)
        absent = torch.zeros(CLASSES, dtype=torch.bool) if host == 2 else ~clients[host].classes
        for name in HEADS:
            assert torch.equal(after[name][absent], start()[name][absent])
            assert (after[name][~absent] != start()[name][~absent]).all()


@pytest.mark.parametrize(
    "update",
    [
        SGD,
        Ordered(3, 4, 0.3, (0.25, 1.0)),
        Distil(3, 4, 0.3, (0.25,), 0.5),
        Meta(3, 4, 0.3, 0.1, 1e-3),
        Envelope(3, 4, 0.3, 1.0, 2, 0.1),
        Mixture(3, 4, 0.3, 0.5, True),
    ],
    ids=type,
)
def test_updates_leave_the_model_they_are_handed_alone_and_depend_on_the_generator_only(update):
    bench, shard = make_shop().full, make_clients()[2].train
    own = {f"own {name}": x + 0.1 for name, x in start().items()} if isinstance(update, Mixture) else {}
    params = start() | own
    before = {name: x.clone() for name, x in params.items()}
    models = [update(bench, params, shard, generator(seed)) for seed in (1, 1, 2)]
    one, again, other = (model if isinstance(model, tuple) else (model,) for model in models)
    assert equal(params, before)
    assert all(map(equal, one, again)) and not all(map(equal, one, other))


# Rivals, by hand


def test_a_meta_step_by_hand_with_and_without_the_hessian():
    """For a quadratic loss finite differences are exact: f' = 2 (2w - 1), f'' = 4; w~ = 0.9 and f'(w~) = 1.6."""
    bench, w, shard = square()
    first = Meta(1, 2, 0.1, 0.05, difference=None)(bench, w, shard, generator())
    second = Meta(1, 2, 0.1, 0.05, difference=1e-3)(bench, w, shard, generator())
    assert first["weight"].item() == pytest.approx(1 - 0.1 * 1.6, abs=1e-12)
    assert second["weight"].item() == pytest.approx(1 - 0.1 * (1 - 0.05 * 4) * 1.6, abs=1e-12)


def test_a_step_on_the_envelope_by_hand():
    """theta = 1 - 0.05 * 2 = 0.9, then 0.9 - 0.05 (1.6 + 2 (0.9 - 1)) = 0.83; w = 1 - 0.3 * 2 (1 - 0.83)."""
    bench, w, shard = square()
    local, theta = Envelope(1, 2, 0.3, prox=2.0, inner_steps=2, inner_lr=0.05)(bench, w, shard, generator())
    assert theta["weight"].item() == pytest.approx(0.83, abs=1e-14)
    assert local["weight"].item() == pytest.approx(1 - 0.3 * 2 * 0.17, abs=1e-14)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_step_of_a_mixture_by_hand(adaptive):
    """w = 1, u = 0, a = 1/4: the mixture is 3/4 and its gradient 1; a moves by -lr (u - w) times that, so it grows."""
    bench, w, shard = square()
    params = w | {"own weight": torch.zeros(1, 1, dtype=torch.float64)}
    local, own, mix = Mixture(1, 2, 0.1, 0.25, adaptive)(bench, params, shard, generator())
    assert local["weight"].item() == pytest.approx(1 - 0.1 * 2, abs=1e-15)
    assert own["weight"].item() == pytest.approx(-0.1 * 0.25 * 1, abs=1e-15)
    assert mix["mix"].item() == pytest.approx(0.35 if adaptive else 0.25, abs=1e-15)
