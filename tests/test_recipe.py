"""Recipes: every way to take local steps equals a plain torch loop, for PERM's updates and for those of rivals."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetperm.device.augment import flip_crop
from hetperm.device.bench import Workbench, Workshop
from hetperm.device.recipe import PLAIN, Recipe
from hetperm.device.rival_updates import OWN, Envelope, HeadThenBody, Meta, Mixture, Proximal, Scaled
from hetperm.device.updates import Distil, Ordered, Sgd, batches
from submodels import ScalableModel

LR, STEPS, SIZE = 0.05, 6, 8
RECIPES = {
    "sgd, decay": Recipe(weight_decay=0.1),
    "momentum": Recipe("momentum", momentum=0.8),
    "momentum, decay": Recipe("momentum", weight_decay=0.1),
    "adamw": Recipe("adamw"),
    "adamw, decay": Recipe("adamw", weight_decay=0.1),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
every_dtype = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])


def network(dtype=torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def data(dtype=torch.float64, n=21):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return x, torch.arange(n) % 3


def drawn(n, steps=STEPS, size=SIZE):
    return batches(n, size, steps, torch.Generator().manual_seed(5))


def done(update, module, shard, params=None, scalable=None):
    """What an update makes of a module."""
    bench = Workshop(copy.deepcopy(module), F.cross_entropy, scalable).full
    return update(bench, params or bench.take(), shard, torch.Generator().manual_seed(5))


def optimizer_of(recipe, params, lr=LR):
    params = list(params)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=lr, weight_decay=recipe.weight_decay)
    momentum = recipe.momentum if recipe.optimizer == "momentum" else 0.0
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=recipe.weight_decay)


def torch_loop(module, recipe, shard, rows, *, schedule=None, autocast=False, pieces=1):
    """The loop that everybody writes."""
    module = copy.deepcopy(module).train()
    optimizer = optimizer_of(recipe, module.parameters())
    scheduler = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    x, y = shard
    for batch in rows:
        optimizer.zero_grad()
        for piece in batch.tensor_split(pieces):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(module(x[piece]), y[piece]) * len(piece) / len(batch)
            loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return dict(module.named_parameters())


def assert_same(ours, theirs, tolerance=1e-12):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name].detach(), rtol=0, atol=tolerance)


@every_dtype
@every_recipe
def test_steps_are_those_of_torchs_own_optimizer(recipe, dtype, tolerance):
    module, shard = network(dtype), data(dtype)
    ours = done(Sgd(STEPS, SIZE, LR, recipe=recipe), module, shard)
    assert_same(ours, torch_loop(module, recipe, shard, drawn(21)), tolerance)
    assert max(float((ours[name] - p.detach()).abs().max()) for name, p in module.named_parameters()) > 1e-3


def test_adamw_takes_the_step_that_can_be_computed_by_hand():
    # The first step of Adam is the sign of the gradient, and decay is lr * weight_decay * weight beside it.
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(module.weight, 2.0)
    bench = Workbench(module, lambda out, y: (3 * out).mean())
    shard = torch.ones(4, 1, dtype=torch.float64), torch.zeros(4)
    update = Sgd(1, 4, 0.5, recipe=Recipe("adamw", weight_decay=0.1))
    after = update(bench, bench.take(), shard, torch.Generator())
    assert float(after["weight"]) == pytest.approx(2 - 0.5 * (1 + 0.1 * 2), abs=1e-8)


@every_dtype
@pytest.mark.parametrize("pieces", [2, 3, 8, 20])
def test_accumulated_pieces_give_the_gradient_of_the_whole_batch(pieces, dtype, tolerance):
    module, shard = network(dtype), data(dtype)
    recipe = Recipe("momentum", accumulate=pieces)
    ours = done(Sgd(STEPS, SIZE, LR, recipe=recipe), module, shard)
    assert_same(ours, torch_loop(module, recipe, shard, drawn(21), pieces=min(pieces, SIZE)), tolerance)
    assert_same(ours, torch_loop(module, recipe, shard, drawn(21)), tolerance)


def test_batch_norms_see_one_piece_at_a_time_and_never_a_single_sample():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    shard = data(n=9)
    seen = []
    module[1].register_forward_pre_hook(lambda norm, args: seen.append(len(args[0])))
    bench = Workbench(module, F.cross_entropy)
    ours = Sgd(2, 5, LR, recipe=Recipe(accumulate=5))(bench, bench.take(), shard, torch.Generator().manual_seed(5))
    assert seen == [3, 2, 3, 2]
    bare = copy.deepcopy(module)
    bare[1].track_running_stats, bare[1].running_mean, bare[1].running_var = False, None, None
    bare.load_state_dict({**bare.state_dict(), **dict(zip(bench.names, bench.take().values()))}, strict=False)
    assert all(torch.isfinite(x).all() for x in ours.values())


def test_autocast_is_torchs_own():
    module, shard = network(torch.float32), data(torch.float32)
    recipe = Recipe("adamw", autocast=True)
    ours = done(Sgd(STEPS, SIZE, LR, recipe=recipe), module, shard)
    assert_same(ours, torch_loop(module, recipe, shard, drawn(21), autocast=True), 1e-6)
    exact = torch_loop(module, recipe, shard, drawn(21))
    assert any(not torch.allclose(ours[name], exact[name], rtol=0, atol=1e-6) for name in ours)
    assert all(x.dtype == torch.float32 for x in ours.values())
    pieces = done(Sgd(STEPS, SIZE, LR, recipe=replace(recipe, accumulate=2)), module, shard)
    assert_same(pieces, torch_loop(module, recipe, shard, drawn(21), autocast=True, pieces=2), 1e-6)


SCHEDULES = {
    "linear": lambda t: 1 - t / 12,
    "cosine": lambda t: (1 + math.cos(math.pi * t / 12)) / 2,
}


@every_dtype
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_from_task_to_task(name, dtype, tolerance):
    module, shard = network(dtype), data(dtype)
    recipe = Recipe(weight_decay=1e-3, schedule=name)
    first, second = (replace(recipe, begin=begin, end=begin + 0.5) for begin in (0.0, 0.5))
    half = done(Sgd(6, SIZE, LR, recipe=first), module, shard)
    ours = done(Sgd(6, SIZE, LR, recipe=second), module, shard, half)
    rows = torch.cat([drawn(21), drawn(21)])
    assert_same(ours, torch_loop(module, recipe, shard, rows, schedule=SCHEDULES[name]), tolerance)


def test_the_cosine_is_that_of_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    recipe = Recipe(schedule="cosine", begin=0.0, end=1.0)
    for t in range(10):
        assert recipe.rate(t, 10) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_step_sizes_rise_before_they_fall():
    recipe = Recipe(schedule="linear", warmup=0.25, begin=0.0, end=1.0)
    assert [recipe.rate(t, 8) for t in range(8)] == pytest.approx([0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert [Recipe(warmup=0.5, begin=0.0, end=1.0).rate(t, 4) for t in range(4)] == [0.5, 1, 1, 1]
    assert [PLAIN.rate(t, 4) for t in range(4)] == [1] * 4


@every_recipe
def test_the_state_begins_anew_with_every_visit(recipe):
    module, shard = network(), data()
    update = Sgd(STEPS, SIZE, LR, recipe=recipe)
    once = done(update, module, shard)
    twice = done(update, module, shard, once)
    carried_on = copy.deepcopy(module)
    carried_on.load_state_dict({name: x.detach() for name, x in torch_loop(module, recipe, shard, drawn(21)).items()})
    assert_same(twice, torch_loop(carried_on, recipe, shard, drawn(21)))


@pytest.mark.parametrize("recipe", [Recipe("momentum"), Recipe("adamw", weight_decay=0.1)], ids=["momentum", "adamw"])
def test_no_step_is_longer_than_the_cap_and_its_direction_stays(recipe):
    module, shard = network(), data()
    flat = lambda params: torch.cat([x.detach().flatten() for x in params.values()])  # noqa: E731
    start = flat(dict(module.named_parameters()))
    free = flat(done(Sgd(1, SIZE, 10.0, recipe=recipe), module, shard)) - start
    held = flat(done(Sgd(1, SIZE, 10.0, cap=0.2, recipe=recipe), module, shard)) - start
    assert float(free.norm()) > 0.2 * float(start.norm())
    assert float(held.norm()) == pytest.approx(0.2 * float(start.norm()), rel=1e-9)
    torch.testing.assert_close(held / held.norm(), free / free.norm(), rtol=0, atol=1e-9)
    loose = done(Sgd(STEPS, SIZE, 1e-3, cap=0.9, recipe=recipe), module, shard)
    assert_same(loose, done(Sgd(STEPS, SIZE, 1e-3, recipe=recipe), module, shard))


def test_a_gradient_that_is_not_finite_is_no_step_and_leaves_no_trace_in_the_state():
    module, recipe = network(), Recipe("adamw")
    bench = Workbench(module, F.cross_entropy)
    local, good = recipe.on(bench, 2), bench.gradient(*data())
    start = bench.take()
    local.descend([g * math.nan for g in good], LR, cap=0.2)
    assert_same(bench.take(), start)
    local.descend(good, LR, cap=0.2)
    after = bench.take()
    bench.load(start)
    recipe.on(bench, 1).descend(good, LR, cap=0.2)
    assert_same(after, bench.take())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": "lion"}, "unknown optimizer 'lion'; use sgd, momentum, adamw"),
        ({"schedule": "step"}, "unknown schedule 'step'; use constant, linear, cosine"),
        ({"augment": "mixup"}, "unknown augment 'mixup'; use flip-crop, own, none"),
    ],
)
def test_an_unknown_word_is_refused_with_the_known_ones(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Recipe(**wrong)


# The updates of rivals, each against torch's optimizers and its formula


def gradient(module, batch):
    return torch.autograd.grad(F.cross_entropy(module(batch[0]), batch[1]), list(module.parameters()))


def step(optimizer, gradient):
    for p, g in zip(optimizer.param_groups[0]["params"], gradient, strict=True):
        p.grad = g.detach().clone()
    optimizer.step()


def at(shard, rows):
    return shard[0][rows], shard[1][rows]


def named(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def own_model():
    module = network()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.7)
    return module


def both_models(module, own):
    return {**named(module), **{OWN + name: p for name, p in named(own).items()}}


@every_recipe
def test_ditto_moves_both_models_by_the_optimizer(recipe):
    w, v, shard = network(), own_model(), data()
    ours = done(Proximal(STEPS, SIZE, LR, prox=0.3, recipe=recipe), w, shard, both_models(w, v))
    received = named(w)
    of_w, of_v = (optimizer_of(recipe, module.parameters()) for module in (w, v))
    for rows in drawn(21):
        step(of_w, gradient(w, at(shard, rows)))
        step(
            of_v, [g + 0.3 * (p - received[n]) for g, (n, p) in zip(gradient(v, at(shard, rows)), v.named_parameters())]
        )
    assert_same(ours[0], named(w))
    assert_same(ours[1], named(v))


@every_recipe
def test_apfl_moves_both_models_by_the_optimizer(recipe):
    w, u, shard, a = network(), own_model(), data(), 0.4
    ours = done(Mixture(STEPS, SIZE, LR, mix=a, adaptive=False, recipe=recipe), w, shard, both_models(w, u))
    of_w, of_u = (optimizer_of(recipe, module.parameters()) for module in (w, u))
    mixture = copy.deepcopy(w)
    for rows in drawn(21):
        mixture.load_state_dict({n: a * p + (1 - a) * named(w)[n] for n, p in named(u).items()})
        of_mixture = gradient(mixture, at(shard, rows))
        of_own = gradient(w, at(shard, rows))
        step(of_u, [a * g for g in of_mixture])
        step(of_w, of_own)
    assert_same(ours[0], named(w))
    assert_same(ours[1], named(u))


@every_recipe
def test_pfedme_moves_theta_by_the_optimizer(recipe):
    theta, shard = network(), data()
    ours = done(
        Envelope(STEPS, SIZE, 0.3, prox=0.5, inner_steps=2, inner_lr=LR, recipe=recipe), theta, shard, named(theta)
    )
    w, optimizer = named(theta), optimizer_of(recipe, theta.parameters())
    for rows in drawn(21):
        for _ in range(2):
            pulls = [0.5 * (p.detach() - w[n]) for n, p in theta.named_parameters()]
            step(optimizer, [g + pull for g, pull in zip(gradient(theta, at(shard, rows)), pulls, strict=True)])
        w = {n: x - 0.3 * 0.5 * (x - named(theta)[n]) for n, x in w.items()}
    assert_same(ours[0], w)
    assert_same(ours[1], named(theta))


@every_recipe
def test_perfedavg_takes_its_meta_steps_by_the_optimizer(recipe):
    w, shard = network(), data()
    ours = done(Meta(STEPS, SIZE, LR, inner_lr=0.1, difference=None, recipe=recipe), w, shard, named(w))
    optimizer, rows = optimizer_of(recipe, w.parameters()), iter(drawn(21, 2 * STEPS))
    for _ in range(STEPS):
        adapted, first = copy.deepcopy(w), gradient(w, at(shard, next(rows)))
        with torch.no_grad():
            for p, g in zip(adapted.parameters(), first, strict=True):
                p.sub_(0.1 * g)
        step(optimizer, gradient(adapted, at(shard, next(rows))))
    assert_same(ours, named(w))


@every_recipe
def test_fedrep_has_a_state_for_the_classifier_and_one_for_the_body(recipe):
    module, shard, heads = network(), data(), ("2.weight", "2.bias")
    update = HeadThenBody(STEPS, SIZE, LR, heads=heads, head_steps=3, head_lr=0.1, recipe=recipe)
    ours = done(update, module, shard, named(module))
    head, body = optimizer_of(recipe, module[2].parameters(), 0.1), optimizer_of(recipe, module[0].parameters())
    for k, rows in enumerate(drawn(21, STEPS + 3)):
        of_all = gradient(module, at(shard, rows))
        step(head, of_all[2:]) if k < 3 else step(body, of_all[:2])
    assert_same(ours, named(module))


@every_recipe
def test_heterofls_scaler_moves_the_weights_by_the_optimizer(recipe):
    v, shard = network(), data()
    ours = done(Scaled(STEPS, SIZE, LR, scale=2.0, heads=("2.weight", "2.bias"), recipe=recipe), v, shard, named(v))
    optimizer = optimizer_of(recipe, v.parameters())
    for rows in drawn(21):
        scaled = copy.deepcopy(v)
        with torch.no_grad():
            for p in scaled[0].parameters():
                p.mul_(2.0)
        of_scaled = gradient(scaled, at(shard, rows))
        step(optimizer, [*(2.0 * g for g in of_scaled[:2]), *of_scaled[2:]])
    assert_same(ours, named(v))


@pytest.fixture(scope="module")
def scalable():
    return ScalableModel(network(), torch.zeros(1, 4, dtype=torch.float64))


def narrow(module, width):
    """The outputs of the module whose hidden units beyond a width are switched off."""
    kept = math.ceil(6 * width)

    def run(x):
        return F.linear(torch.tanh(module[0](x))[:, :kept], module[2].weight[:, :kept], module[2].bias)

    return run


@every_recipe
def test_fjord_steps_with_the_gradient_of_a_part_and_zero_elsewhere(recipe, scalable):
    module, shard, widths = network(), data(), (0.5, 1.0)
    update = Ordered(STEPS, SIZE, LR, widths, recipe=recipe)
    ours = done(update, module, shard, named(module), scalable)
    optimizer, used = optimizer_of(recipe, module.parameters()), set()
    for rows, width in update.draws(21, torch.Generator().manual_seed(5)):
        used.add(width)
        x, y = at(shard, rows)
        step(optimizer, torch.autograd.grad(F.cross_entropy(narrow(module, width)(x), y), list(module.parameters())))
    assert_same(ours, named(module))
    assert used == set(widths)


@every_recipe
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_teacher_takes_one_step_with_the_sum_of_both_losses(recipe, pieces, scalable):
    module, shard = network(), data()
    update = Distil(STEPS, SIZE, LR, (0.5,), weight=0.6, recipe=replace(recipe, accumulate=pieces))
    ours = done(update, module, shard, named(module), scalable)
    optimizer = optimizer_of(recipe, module.parameters())
    for rows in drawn(21):
        x, y = at(shard, rows)
        outputs = module(x)
        said = narrow(module, 0.5)(x).log_softmax(1)
        distance = F.kl_div(said, outputs.detach().log_softmax(1), reduction="batchmean", log_target=True)
        step(optimizer, torch.autograd.grad(F.cross_entropy(outputs, y) + 0.6 * distance, list(module.parameters())))
    assert_same(ours, named(module))


# Augmentation


def test_images_are_mirrored_and_moved_and_nothing_else():
    x = torch.arange(1.0, 4 * 2 * 64 + 1).reshape(4, 2, 8, 8).repeat(64, 1, 1, 1)
    changed, y = flip_crop(x, torch.arange(256), torch.Generator().manual_seed(0))
    assert changed.shape == x.shape and torch.equal(y, torch.arange(256))
    padded = F.pad(x, (1, 1, 1, 1))
    ways = set()
    for image, before, plain in zip(changed, padded, x, strict=True):
        mirrored = F.pad(plain.flip(2), (1, 1, 1, 1))
        found = [
            (flip, down, right)
            for flip, source in ((False, before), (True, mirrored))
            for down in range(3)
            for right in range(3)
            if torch.equal(image, source[:, down : down + 8, right : right + 8])
        ]
        assert len(found) == 1
        ways.update(found)
    assert len(ways) == 18  # of 256 draws, every way of the 18 was seen
    again, _ = flip_crop(x, y, torch.Generator().manual_seed(0))
    assert torch.equal(changed, again)


def test_only_images_can_be_mirrored():
    with pytest.raises(ValueError, match=r"^augment 'flip-crop' is for images .*; these inputs are \(2, 3\)$"):
        flip_crop(torch.zeros(2, 3), torch.zeros(2), torch.Generator())


def test_a_users_function_changes_what_local_steps_see_and_not_what_they_draw():
    module, shard = network(), data()
    seen = []

    def shift(x, y, generator):
        seen.append(len(y))
        return x + 1, y

    bench = Workshop(copy.deepcopy(module), F.cross_entropy, augment=shift).full
    update = Sgd(STEPS, SIZE, LR, recipe=Recipe(augment="own", accumulate=2))
    ours = update(bench, bench.take(), shard, torch.Generator().manual_seed(5))
    moved = (shard[0] + 1, shard[1])
    assert_same(ours, torch_loop(module, Recipe(), moved, drawn(21), pieces=2))
    assert seen == [4, 4] * STEPS


def test_a_users_function_that_makes_nan_is_named():
    module, recipe = network(), Recipe(augment="own")
    bench = Workshop(module, F.cross_entropy, augment=lambda x, y, generator: (x * torch.nan, y)).full
    with pytest.raises(ValueError, match=r"^augment returns inputs that hold nan; let it return finite numbers$"):
        Sgd(STEPS, SIZE, LR, cap=0.2, recipe=recipe)(bench, bench.take(), data(), torch.Generator())


def test_a_users_function_that_returns_no_samples_is_named():
    bench = Workshop(network(), F.cross_entropy, augment=lambda x, y, generator: (x[:0], y[:0])).full
    with pytest.raises(ValueError, match=r"^augment returns no samples; let it return a changed sample for every one"):
        Sgd(STEPS, SIZE, LR, cap=0.2, recipe=Recipe(augment="own"))(bench, bench.take(), data(), torch.Generator())
