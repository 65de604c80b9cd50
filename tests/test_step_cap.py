"""The cap on steps: none is longer than a share of the length of the model that takes it, wherever it is taken."""

import math
from dataclasses import replace

import pytest
import torch
from engine_models import deep
from federation import (
    FULL,
    WIDTHS,
    equal,
    generator,
    make_clients,
    make_federation,
    make_shop,
    part_of,
    random,
    start,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.device import chain
from hetperm.device.gradients import BatchGradient
from hetperm.device.rival_updates import Envelope, Meta, Mixture
from hetperm.device.updates import Distil, Ordered, Sgd
from hetperm.engine.batched import Batched
from hetperm.engine.choice import opened
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Task
from hetperm.params import norm, step_size, subtract
from hetperm.server.global_model import gradient_step
from hetperm.state import State
from submodels import WHOLE

CAP = 0.1
CAPPED = {
    "sgd": Sgd(1, 4, 50.0, CAP),
    "ordered": Ordered(1, 4, 50.0, (1.0,), CAP),
    "part": Ordered(1, 4, 50.0, (0.5,), CAP),
    "distil": Distil(1, 4, 50.0, (0.25, 0.5), 0.5, CAP),
    "meta": Meta(1, 4, 50.0, 50.0, 1e-3, CAP),
    "envelope": Envelope(1, 4, 0.1, 1.0, 1, 50.0, CAP),
    "mixture": Mixture(1, 4, 50.0, 0.5, True, CAP),
}


def moved(before, after):
    return norm([after[name] - x for name, x in before.items()])


def length(params):
    return norm(list(params.values()))


def handed(update):
    """The model that an update is handed; a mixture also gets the client's own."""
    own = {f"own {name}": x for name, x in start().items()} if isinstance(update, Mixture) else {}
    return start() | own


def models_of(outcome):
    """The models that took a step, of what an update returns."""
    if not isinstance(outcome, tuple):
        return [outcome]
    return [outcome[1]] if len(outcome) == 2 else list(outcome[:2])  # the envelope caps theta, not the server's w


# The size of a step


def test_by_hand():
    """|v| = 5 and |g| = 10: a tenth of v is 0.5 long, which is a step size of 0.05."""
    v, g = [torch.tensor([3.0]), torch.tensor([[4.0]])], [torch.tensor([6.0]), torch.tensor([[8.0]])]
    assert step_size(0.04, 0.1, v, g) == 0.04
    assert step_size(0.06, 0.1, v, g) == pytest.approx(0.05, rel=1e-15)
    assert step_size(math.inf, 0.1, v, g) == pytest.approx(0.05, rel=1e-15)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.floats(-30, 30), st.floats(1e-3, 10), st.sampled_from([torch.float32, torch.float64]))
def test_no_step_is_longer_than_the_cap_and_none_that_fits_is_cut(seed, power, cap, dtype):
    v = [random((3, 2), seed).to(dtype), random((5,), seed + 1).to(dtype)]
    g = [(10.0**power * random(x.shape, seed + 2)).to(dtype) for x in v]
    size = step_size(0.5, cap, v, g)
    assert 0 < size <= 0.5 and size * norm(g) <= cap * norm(v) * (1 + 1e-6)
    assert size == 0.5 or size * norm(g) == pytest.approx(cap * norm(v), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_no_step_and_without_a_cap_it_is_one(bad):
    v, g = [torch.ones(3)], [torch.tensor([1.0, bad, 0.0])]
    assert step_size(0.5, 0.1, v, g) == 0.0 and step_size(0.5, 0.0, v, g) == 0.5
    w = {"x": v[0]}
    assert equal(subtract(w, {"x": g[0]}, 0.0), w)


def test_a_large_gradient_is_finite_even_if_its_squares_are_not():
    v, g = [torch.full((4,), 0.5)], [torch.full((4,), 1e30)]
    assert norm(g) == pytest.approx(2e30, rel=1e-6)
    assert step_size(0.5, 0.2, v, g) == pytest.approx(0.2 / 2e30, rel=1e-6)


def test_a_model_of_length_zero_has_no_cap():
    assert step_size(0.5, 0.1, [torch.zeros(3)], [torch.ones(3)]) == 0.5


# Updates


@pytest.mark.parametrize("kind", CAPPED)
def test_a_step_of_any_update_keeps_to_the_cap_and_to_its_direction(kind):
    update, bench, shard = CAPPED[kind], make_shop().full, make_clients()[0].train
    capped = models_of(update(bench, handed(update), shard, generator()))
    free = models_of(replace(update, cap=0.0)(bench, handed(update), shard, generator()))
    for model, other in zip(capped, free, strict=True):
        most = CAP * length(part_of(start(), 0.5) if kind == "part" else start())
        if kind == "distil":  # a step of the model, and one of its part
            assert CAP * length(part_of(start(), 0.25)) < moved(start(), model) <= 2 * most
        else:
            assert moved(start(), model) == pytest.approx(most, rel=1e-12)
        assert moved(start(), other) > 3 * most
        if kind in ("sgd", "ordered", "part", "mixture"):
            share = moved(start(), model) / moved(start(), other)
            for name, x in start().items():
                torch.testing.assert_close(model[name] - x, share * (other[name] - x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", CAPPED)
def test_a_cap_that_no_step_reaches_changes_no_bit(kind):
    small = {name: 1e-3 for name in ("lr", "inner_lr") if hasattr(CAPPED[kind], name)}
    update, bench, shard = replace(CAPPED[kind], **small, steps=4), make_shop().full, make_clients()[0].train
    free = replace(update, cap=0.0)(bench, handed(update), shard, generator())
    for cap in (10.0, 1e300):
        capped = replace(update, cap=cap)(bench, handed(update), shard, generator())
        assert all(map(equal, models_of(capped), models_of(free)))


def test_steps_of_a_distilling_model_by_hand():
    """Each of the two gradients is that of the model as it was; each step has a cap of its own."""
    bench, (x, y) = make_shop().full, make_clients()[0].train
    update = Distil(1, 4, 50.0, (0.5,), 0.5, CAP)
    got = update(bench, start(), (x, y), generator())
    batch = torch.randperm(len(x), generator=generator())[:4]
    bench.load(start())
    outputs = bench.outputs(x[batch])
    gradient = bench.gradient_of(F.cross_entropy(outputs, y[batch]))
    part, index = bench.narrower(0.5)
    said = part.outputs(x[batch]).log_softmax(1)
    lesson = part.gradient_of(F.kl_div(said, outputs.detach().softmax(1), reduction="batchmean"))
    pupil = part_of(start(), 0.5)
    for (name, old), g, h in zip(start().items(), gradient, lesson, strict=True):
        expected = old - CAP * length(start()) / norm(gradient) * g
        step = CAP * length(pupil) / norm(lesson) if 25.0 * norm(lesson) > CAP * length(pupil) else 25.0
        index.scatter_(name, expected, -step * h, accumulate=True)
        torch.testing.assert_close(got[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "ordered", "part", "distil", "envelope"])
def test_a_batch_whose_loss_is_not_finite_leaves_the_model_as_it_is(kind):
    x, y = make_clients()[0].train
    update = CAPPED[kind]
    after = models_of(update(make_shop().full, handed(update), (torch.full_like(x, math.nan), y), generator()))
    assert all(equal(model, start()) for model in after)


# Engines


def tasks_for(clients, update, models):
    return [
        Task(update, model, host=j, seed=90 + j, width=client.width)
        for j, (client, model) in enumerate(zip(clients, models, strict=True))
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("lr", [0.05, 3.0, 300.0])
def test_the_batched_engine_caps_as_the_sequential_one_does(dtype, tolerance, lr):
    """At a step size of 3 some steps are cut and others are not."""
    clients, shop = make_clients(WIDTHS, dtype=dtype), make_shop(deep, dtype)
    models = [shop.at(width).take() for width in WIDTHS]
    tasks = tasks_for(clients, Sgd(6, 4, lr, CAP), models)
    one, other = (kind(clients, shop).run(tasks) for kind in (Sequential, Batched))
    for a, b in zip(one, other, strict=True):
        assert all((a[name] - b[name]).abs().max() <= tolerance for name in a)
    with opened("processes", 2, clients, shop) as processes:
        assert all(map(equal, one, processes.run(tasks)))


def test_some_steps_are_cut_and_others_are_not():
    bench, shard, cut = make_shop(deep).full, make_clients()[0].train, []
    params = bench.take()
    for batch in Sgd(6, 4, 3.0).batches(len(shard[0]), generator(90)):
        bench.load(params)
        g = bench.gradient(shard[0][batch], shard[1][batch])
        cut.append(step_size(3.0, CAP, list(params.values()), g) < 3.0)
        bench.descend(g, 3.0, CAP)
        params = bench.take()
    assert any(cut)


def test_in_a_stack_every_model_has_its_own_cap():
    """What is in a stack beside a model changes no bit of it, also if steps are cut or not finite."""
    clients, shop = make_clients(FULL), make_shop(deep)
    x, y = clients[1].train
    clients[1] = replace(clients[1], train=(torch.full_like(x, 1e308), y))
    models = [{name: scale * p for name, p in shop.full.take().items()} for scale in (1.0, 20.0, 20.0, 0.0)]
    rates = (0.1, 1.0, 50.0, 1.0)
    tasks = [replace(task, update=Sgd(4, 4, lr, CAP)) for lr, task in zip(rates, tasks_for(clients, None, models))]
    together = Batched(clients, shop).run(tasks)
    alone = [Batched(clients, shop).run([task])[0] for task in tasks]
    assert all(map(equal, together, alone))
    assert equal(together[1], models[1]) and not equal(together[0], models[0])
    for a, b in zip(together, Sequential(clients, shop).run(tasks), strict=True):
        assert all(torch.allclose(a[name], b[name], atol=1e-11) for name in a)


def test_a_cap_of_zero_is_plain_training_to_the_bit_and_stacks_do_not_mix_caps():
    clients, shop = make_clients(FULL), make_shop(deep)
    models = [shop.full.take()] * 4
    tasks = tasks_for(clients, Sgd(4, 4, 5.0), models)
    mixed = [replace(task, update=replace(task.update, cap=CAP * (task.host % 2))) for task in tasks]
    plain, half = Batched(clients, shop).run(tasks), Batched(clients, shop).run(mixed)
    assert [equal(a, b) for a, b in zip(plain, half, strict=True)] == [True, False, True, False]


def test_large_gradients_of_float32_are_cut_by_the_batched_engine_too():
    """Inputs of 1e20 have squares that overflow, and gradients that do not."""
    clients, shop = make_clients(FULL, dtype=torch.float32), make_shop(linear, torch.float32, cut=False)
    x, y = clients[0].train
    clients[0] = replace(clients[0], train=(1e20 * x, y))
    task = Task(Sgd(1, 4, 1.0, CAP), shop.full.take(), host=0, seed=0)
    (one,), (other,) = (kind(clients, shop).run([task]) for kind in (Sequential, Batched))
    for model in (one, other):
        assert moved(task.params, model) == pytest.approx(CAP * length(task.params), rel=1e-4)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3))


def test_a_capped_step_of_logistic_regression_by_hand():
    """One sample (1, 2) of class 0: errors are (p - 1, 1 - p), so a step is along (1, 2) and (-1, -2), a tenth long."""
    layers, params = [chain.Layer("w", None)], {"w": torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)}
    shard = (torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([0]))
    chain.descend(layers, params, [shard], [torch.tensor([[0]])], [50.0], [None], CAP)
    along = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64) + CAP * along / along.norm()
    torch.testing.assert_close(params["w"][0], expected, rtol=0, atol=1e-14)


def descended(lr: list[float], cap: float) -> dict[str, Tensor]:
    """A stack of three models after eight steps."""
    g = torch.Generator().manual_seed(0)
    layers = [chain.Layer("a", "b", "relu"), chain.Layer("c", None)]
    params = {"a": torch.randn(3, 9, 6, generator=g), "b": torch.randn(3, 9, generator=g)}
    params["c"] = torch.randn(3, 4, 9, generator=g)
    shards = [(torch.randn(20, 6, generator=g), torch.randint(4, (20,), generator=g)) for _ in range(3)]
    rows = [torch.randint(20, (8, 5), generator=g) for _ in range(3)]
    chain.descend(layers, params, shards, rows, lr, [None] * 3, cap)
    return params


def test_steps_that_a_bound_shows_to_be_short_are_what_they_are_when_measured(monkeypatch):
    measured = []
    slope = chain._slope
    monkeypatch.setattr(chain, "_slope", lambda parts: measured.append(len(parts)) or slope(parts))
    for lr, count in (([0.01, 0.5, 20.0], 8), ([0.01, 0.02, 0.01], 0)):
        with monkeypatch.context() as patch:
            patch.setattr(chain, "CERTAIN", -1.0)  # everything is measured
            every = descended(lr, 0.2)
        measured.clear()
        for name, x in descended(lr, 0.2).items():
            assert torch.equal(x, every[name])
        assert len(measured) == count
    # The last model of the first stack is at the cap.
    assert not torch.equal(descended([0.01, 0.5, 20.0], 0.2)["a"][2], descended([0.01, 0.5, 20.0], 0.3)["a"][2])


def test_what_the_models_moved_is_taken_off_the_bound_on_their_lengths():
    """A bias falls from 1, by at most 0.6 of what is left: by 0.5, by 0.3 instead of 0.5, by 0.12 instead of 0.2."""
    layers = [chain.Layer("w", "b")]
    params = {"w": torch.zeros(1, 2, 1), "b": torch.tensor([[1.0, 0.0]])}
    limit = chain._Cap(torch.full((1, 1, 1), 0.5), 0.6)
    error, below = torch.tensor([[[1.0], [0.0]]]), torch.zeros(1, 1, 1)
    for slope, left in ((1.0, 0.5), (1.0, 0.2), (0.4, 0.08)):
        (part,) = limit.of(params, [(layers[0], below, slope * error)])
        params["b"] -= part[2].sum(2)
        assert float(params["b"][0, 0]) == pytest.approx(left)


@pytest.mark.parametrize("bias", [None, "b"])
def test_no_gradient_is_steeper_than_its_bound(bias):
    g = torch.Generator().manual_seed(1)
    parts = [
        (chain.Layer("w", bias), torch.randn(50, 4, 3, generator=g), torch.randn(50, 5, 3, generator=g).pow(5))
        for _ in range(2)
    ]
    bound, slope = chain._steepest(parts), chain._slope(parts)
    assert (slope <= bound * (1 + 1e-6)).all() and (slope > 0.5 * bound).any()
    same = [(chain.Layer("w", bias), torch.ones(1, 4, 3), torch.ones(1, 5, 3))]  # all columns alike: nothing to lose
    assert float(chain._steepest(same)) == pytest.approx(float(chain._slope(same)))


# The global model


def test_a_step_of_the_global_model_keeps_to_the_cap():
    federation, state = make_federation(make_clients(FULL)), State(0, start(), ())
    options = {"lr": 50.0, "batch_size": 4}
    free = gradient_step(federation, state, BatchGradient(4), [WHOLE] * 4, **options).w
    capped = gradient_step(federation, state, BatchGradient(4), [WHOLE] * 4, **options, cap=CAP).w
    share = CAP * length(start()) / moved(start(), free)
    assert share < 1
    for name, x in start().items():
        torch.testing.assert_close(capped[name] - x, share * (free[name] - x), rtol=1e-9, atol=1e-12)


def test_a_global_step_that_is_not_finite_is_no_step():
    def broken(bench, params, shard, generator):
        return {name: torch.full_like(x, math.nan) for name, x in params.items()}

    broken.samples = lambda n: n
    state = State(0, start(), ())
    options = {"lr": 0.1, "batch_size": 4, "cap": CAP}
    assert equal(gradient_step(make_federation(make_clients(FULL)), state, broken, [WHOLE] * 4, **options).w, start())


def test_a_part_of_a_bench_takes_steps_that_are_capped_by_its_own_length():
    bench = make_shop().full
    bench.load(start())
    part, index = bench.narrower(0.25)
    ones = tuple(torch.ones_like(p) for p in part.take().values())
    bench.descend_part(part, index, ones, 50.0, CAP)
    for name, x in bench.take().items():
        step = CAP * length(part_of(start(), 0.25)) / norm(ones)
        torch.testing.assert_close(x, start()[name] - step * index.mask(name).double(), rtol=0, atol=1e-14)
