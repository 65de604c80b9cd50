"""Clients of different sizes: against loops typed out, and the laws that parts of models must obey."""

import functools
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from reference import hetero as literal
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.algorithms import perm
from hetperm.algorithms.budget import FineTuneOptions, RivalOptions
from hetperm.client import Client
from hetperm.device.bench import Workbench, Workshop, batches, distil_update, ordered_update, sgd_update
from hetperm.engine import Sequential, Task, Threads, run_all
from hetperm.methods import ALGORITHMS
from hetperm.mixing import discrepancy
from hetperm.randomness import generator_for, seed_for
from hetperm.server.estimate import report, reported
from hetperm.server.global_model import covered_mean, gradient_step, local_sgd_round
from hetperm.server.slicer import Parts, coverage
from hetperm.server.visits import mixed_by_alpha, personal_epoch, present, rounds_of
from hetperm.state import State
from submodels import ScalableModel

INPUTS, HIDDEN, CLASSES = 5, (8, 6), 3
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
WIDTHS = (1.0, 0.5, 0.5, 0.25)
OPTIONS = perm.Options(
    seed=3,
    epochs=2,
    local_steps=3,
    batch_size=4,
    personal_lr=0.5,
    global_lr=0.4,
    global_batch=6,
    warmup_rounds=2,
    step_rule="max",
    schedule="colour",
    regularization="noise",
    noise_batches=3,
    alpha_steps=None,
    sketch=None,
    tail_average=0.0,
    participation=1.0,
    projection=None,
    final_lr=None,
)
RIVAL = RivalOptions(seed=3, epochs=2, local_steps=3, batch_size=4, lr=0.4, steps=12, tail_average=0.0)
TUNED = FineTuneOptions(**vars(RIVAL) | {"steps": 17}, fine_tune_steps=5, fine_tune_lr=0.3)
DEFAULTS = {perm.Options: OPTIONS, RivalOptions: RIVAL, FineTuneOptions: TUNED}
RIVALS = ("heterofl", "feddropout", "fedrolex", "fjord")
LOOPS = {"perm": perm.single_loop, "perm-two-stage": perm.two_stage}
SIZED = ("perm", "perm-two-stage", "local", *RIVALS, *(f"{name}-ft" for name in RIVALS))  # take parts


# A small federation


def random(shape, seed, scale=1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(make, dtype=torch.float64, seed=1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype)


def mlp() -> nn.Module:
    one, two = HIDDEN
    return nn.Sequential(nn.Linear(INPUTS, one), nn.Tanh(), nn.Linear(one, two), nn.Tanh(), nn.Linear(two, CLASSES))


@functools.cache
def _scalable(make, dtype, shape) -> ScalableModel:
    return ScalableModel(build(make, dtype), torch.zeros(2, *shape, dtype=dtype))


def scalable(make=mlp, dtype=torch.float64, shape=(INPUTS,)) -> ScalableModel:
    return _scalable(make, dtype, shape)


@functools.cache
def start(make=mlp, dtype=torch.float64) -> dict[str, Tensor]:
    model = build(make, dtype, seed=2)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def make_clients(widths=WIDTHS, *, sizes=(9, 7, 12, 8), keys=(7, 3, 11, 5), shape=(INPUTS,), dtype=torch.float64):
    """Two groups with other labels for the same inputs, crossed with the sizes of models; unequal, noisy shards."""
    teacher = random((CLASSES, INPUTS), seed=3)
    clients = []
    for i, (width, n, key) in enumerate(zip(widths, sizes, keys, strict=False)):
        x, noise = random((n, *shape), seed=3100 + i), random((n, CLASSES), seed=200 + i, scale=2.0)
        y = (x.flatten(1)[:, :INPUTS] @ teacher.T + noise).argmax(1)
        y = y if i in (0, 3) else (y + 1) % CLASSES
        clients.append(Client(train=(x.to(dtype), y), width=width, key=key))
    return clients


def shop(make=mlp, dtype=torch.float64, shape=(INPUTS,)) -> Workshop:
    cut = scalable(make, dtype, shape)
    return Workshop(cut.model, F.cross_entropy, cut)


def make_run(name, clients, options=None, *, engine=Sequential, parts=None, begin=None, **changes):
    """An algorithm by its name, on the small network unless parts of another are given."""
    make, kind = ALGORITHMS[name]
    options = replace(options or DEFAULTS[kind], **changes)
    return make(clients, engine(clients, shop()), begin or start(), options, parts or Parts(scalable()))


def run(algorithm, epochs=2) -> State:
    state = algorithm.begin()
    for _ in range(epochs):
        state = algorithm.epoch(state)
    return algorithm.finish(state)


def equal(a, b) -> bool:
    """Whether two models are the same to the last bit."""
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


VARIANTS = {
    "plain": {},
    "odd": {"extraction": "random", "nested": "random", "discrepancy": "masked", "participation": 0.8, "final_lr": 0.1},
    "mixed": {"server_mix": "alpha", "inplace_kd": 0.5, "tail_average": 0.5, "projection": 1.0, "vc_weight": 0.5},
    "rolling": {"nested": "rolling", "extraction": "rolling"},
    "skip": {"nested": "skip", "final_lr": 0.1},
    "raw": {"discrepancy": "masked", "vc_weight": "raw", "regularization": 40.0},
    "smallest": {"personal_width": "smallest", "inplace_kd": 0.5},
}


@functools.cache
def sequential(name, variant) -> State:
    """What the sequential engine comes to."""
    return run(make_run(name, make_clients(), **VARIANTS[variant]))


def same(a: State, b: State) -> bool:
    alphas = (a.alpha is None and b.alpha is None) or torch.equal(a.alpha, b.alpha)
    pairs = [(a.w, b.w), *zip(a.v, b.v, strict=True), *zip(a.deployed, b.deployed, strict=True)]
    return alphas and all(equal(x, y) for x, y in pairs)


# The same draws for the loops


@dataclass
class Draw:
    """Everything that is drawn in a run, by the keys under which the package draws it."""

    clients: list
    options: object
    parts: Parts

    def generator(self, *what):
        return torch.Generator().manual_seed(seed_for(self.options.seed, *what))

    def key(self, i):
        return self.clients[i].key

    def some(self, generator, i, steps=None):
        steps = steps or self.options.local_steps
        return list(batches(self.clients[i].n_train, self.options.batch_size, steps, generator))

    def choices(self, generator, i, count):
        """One of ``count`` for every step, drawn after the batches."""
        self.some(generator, i)
        return [int(torch.randint(count, (), generator=generator)) for _ in range(self.options.local_steps)]

    def global_batches(self, i, r):
        return self.some(self.generator("global", r, self.key(i)), i)

    def global_choices(self, i, r, count):
        return self.choices(self.generator("global", r, self.key(i)), i, count)

    def tune_batches(self, i):
        return self.some(self.generator("fine-tune", self.key(i)), i, self.options.fine_tune_steps)

    def visit_batches(self, i, j, r):
        return self.some(self.generator("visit", r, self.key(i), self.key(j)), j)

    def visit_choices(self, i, j, r, count):
        return self.choices(self.generator("visit", r, self.key(i), self.key(j)), j, count)

    def large_batch(self, i, r):
        order = torch.randperm(self.clients[i].n_train, generator=self.generator("step", r, self.key(i)))
        return order[: self.options.global_batch]

    def pieces(self, i, r):
        order = torch.randperm(self.clients[i].n_train, generator=self.generator("report", r, self.key(i)))
        return order.tensor_split(self.options.noise_batches)

    def rounds(self, r, alpha):
        rows = torch.tensor(alpha, dtype=torch.float64)
        return rounds_of(rows, self.options.schedule, generator_for(self.options.seed, "schedule", r))

    def here(self, j, r):
        return present(self.clients, self.options.participation, seed=self.options.seed, r=r)[j]

    def units(self, i, t):
        width, at = self.clients[i].width, {"seed": self.options.seed, "round": t}
        return kept(self.parts.index(width, "random", key=self.key(i), **at))

    def nested_units(self, i, j, t):
        widths, at = (self.clients[i].width, self.clients[j].width), {"seed": self.options.seed, "round": t}
        return kept(self.parts.nested(*widths, "random", key=(self.key(i), self.key(j)), **at))


def kept(index):
    """The units of the two hidden layers in an index set; groups are told apart by where they appear."""
    by_layer = {}
    for group, channels in zip(index.axis_map.groups, index.kept, strict=True):
        layer = next(name for name, axis in group.members if axis == 0 and name.endswith("weight"))
        by_layer[layer] = channels.tolist()
    return [by_layer["0.weight"], by_layer["2.weight"]]


def as_shards(clients):
    everything = list(range(CLASSES))
    known = [everything if c.classes is None else c.classes.nonzero().flatten().tolist() for c in clients]
    return [(*client.train, classes) for client, classes in zip(clients, known, strict=True)]


def as_list(params):
    return [params[name] for name in NAMES]


def sliced(model, width):
    """The static part of a full-size model, cut with plain slices."""
    one, two = (len(units) for units in literal.first(width, HIDDEN))
    W1, b1, W2, b2, W3, b3 = model
    return [W1[:one], b1[:one], W2[:two, :one], b2[:two], W3[:, :two], b3]


def assert_close(params, model, width=1.0, atol=1e-12):
    for name, expected in zip(NAMES, sliced(model, width), strict=True):
        assert params[name].shape == expected.shape and (params[name] - expected).abs().max() <= atol, name


# --- PERM against the loops --------------------------------------------------------------------------------------

CASES = {
    "static": {},
    "static, masked": {"discrepancy": "masked", "vc_weight": 0.5},
    "masked, raw complexity": {"discrepancy": "masked", "vc_weight": "raw", "regularization": 40.0},
    "rolling": {"extraction": "rolling", "nested": "rolling", "discrepancy": "masked"},
    "random": {"extraction": "random", "nested": "random", "discrepancy": "masked"},
    "rolling warm-up, static visits": {"extraction": "rolling"},
    "random warm-up, rolling visits": {"extraction": "random", "nested": "rolling", "warmup_rounds": 3},
    "skip": {"nested": "skip"},
    "the paper's step on the ring": {"step_rule": "paper", "schedule": "ring", "personal_lr": 0.1},
    "final step": {"final_lr": 0.3},
    "final step in a ball": {"final_lr": 0.9, "projection": 0.2},
    "ball": {"projection": 0.15, "personal_lr": 2.0},
    "server mix": {"server_mix": "alpha", "epochs": 3},
    "server mix and tail": {"server_mix": "alpha", "epochs": 3, "tail_average": 0.6},
    "tail, skip, mix": {"server_mix": "alpha", "tail_average": 1.0, "nested": "skip"},
    "participation": {"participation": 0.6},
    "participation, rolling": {"participation": 0.5, "nested": "rolling", "extraction": "rolling"},
    "everybody as small as the smallest": {"personal_width": "smallest", "server_mix": "alpha"},
    "a number and descent": {"regularization": 30.0, "alpha_steps": 7, "vc_weight": 0.3},
    "a water level": {"regularization": "level", "vc_weight": 0.2},
    "distillation": {"inplace_kd": 0.7, "local_steps": 4},
    "distillation and mixing": {"inplace_kd": 0.7, "server_mix": "alpha"},
    "no warm-up": {"warmup_rounds": 0, "extraction": "rolling", "discrepancy": "masked"},
}
TWO_STAGES = ("static", "rolling", "random", "server mix and tail", "final step", "participation", "distillation")


def assert_run(name, clients, options, parts=None):
    parts = parts or Parts(scalable())
    algorithm = make_run(name, clients, options, parts=parts)
    widths = [client.width for client in clients]
    own = widths if options.personal_width == "own" else [min(widths)] * len(clients)
    expected = literal.perm(
        as_shards(clients), widths, as_list(start()), options, Draw(clients, options, parts), two_stages=name != "perm"
    )
    state = algorithm.begin()
    for step, (w, alpha, v, tail) in enumerate(expected):
        if step == options.epochs + 1:
            state = algorithm.finish(state)
        elif step:
            state = algorithm.epoch(state)
        assert_close(state.w, w)
        torch.testing.assert_close(state.alpha, torch.tensor(alpha, dtype=torch.float64), rtol=0, atol=1e-12)
        for i, width in enumerate(own):
            assert_close(state.v[i], v[i], width)
            if tail is not None:
                assert_close(state.deployed[i], tail[i], width)
        assert (state.tail is None) == (tail is None)
    return state


@pytest.mark.parametrize(
    ("name", "case"), [*(("perm", case) for case in CASES), *(("perm-two-stage", case) for case in TWO_STAGES)]
)
def test_perm_equals_the_paper_typed_out(name, case):
    state = assert_run(name, make_clients(), replace(OPTIONS, **CASES[case]))
    # Agreeing on cases that are all alike would prove little.
    assert case == "static" or not same(state, sequential(name, "plain"))


def test_in_these_cases_clients_learn_from_some_of_the_others_and_from_smaller_ones():
    for compare in ("probe", "masked"):
        alpha = make_run("perm", make_clients(), discrepancy=compare).begin().alpha
        smaller = [(i, j) for i in range(4) for j in range(4) if alpha[i, j] > 0 and WIDTHS[i] > WIDTHS[j]]
        assert int((alpha > 0).sum()) == 13 and smaller == [(0, 1), (0, 3), (1, 3), (2, 3)]
    assert 0 < sum(present(make_clients(), 0.6, seed=3, r=0)) < 4


@pytest.mark.parametrize("name", LOOPS)
def test_perm_of_four_widths_that_divide_nothing_equals_the_paper_typed_out(name):
    options = replace(OPTIONS, nested="rolling", server_mix="none", extraction="rolling", discrepancy="masked")
    assert_run(name, make_clients((0.3, 0.9, 0.1, 0.61)), options)


@pytest.mark.parametrize("name", LOOPS)
def test_with_the_classes_of_others_masked_perm_equals_the_paper_typed_out(name):
    classes = [[0, 1, 2], [0, 2], [1, 2], [0, 1]]
    options = replace(OPTIONS, extraction="rolling", server_mix="alpha", inplace_kd=0.5)
    assert_run(name, with_classes(make_clients(), classes), options, Parts(scalable(), ("4.weight", "4.bias")))


def with_classes(clients, classes):
    """The clients with other labels, of the given classes only."""
    out = []
    for client, known in zip(clients, classes, strict=True):
        x, y = client.train
        mask = torch.zeros(CLASSES, dtype=torch.bool)
        mask[known] = True
        out.append(replace(client, train=(x, torch.tensor(known)[y % len(known)]), classes=mask))
    return out


# --- partial training against the loops --------------------------------------------------------------------------

HOW = {
    "heterofl": {"extraction": "static"},
    "feddropout": {"extraction": "random"},
    "fedrolex": {"extraction": "rolling"},
    "fjord": {"extraction": "static", "by_steps": True},
}


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("name", RIVALS)
def test_partial_training_equals_loops_over_coordinates(name, tuned):
    clients, parts = make_clients(), Parts(scalable())
    options = TUNED if tuned else RIVAL
    state = run(make_run(f"{name}-ft" if tuned else name, clients, parts=parts))
    w, v = literal.partial_training(
        as_shards(clients), WIDTHS, as_list(start()), Draw(clients, options, parts), rounds=4, lr=RIVAL.lr,
        tune_lr=options.fine_tune_lr if tuned else None, **HOW[name],
    )  # fmt: skip
    assert_close(state.w, w)
    for params, model, width in zip(state.deployed, v, WIDTHS, strict=True):
        assert_close(params, model, width)


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
def test_coordinates_that_nobody_holds_keep_their_value(extraction):
    clients, parts = make_clients((0.5, 0.25, 0.25, 0.5)), Parts(scalable())
    arguments = {"seed": 3, "r": 2, "parts": parts, "extraction": extraction}
    engine = Sequential(clients, shop())
    after, _ = local_sgd_round(start(), clients, engine, local_steps=2, batch_size=4, lr=0.3, **arguments)
    stepped, _ = gradient_step(start(), clients, engine, batch_size=4, lr=0.3, **arguments)
    indices = [parts.index(c.width, extraction, seed=3, round=2, key=c.key) for c in clients]
    for name, old in start().items():
        covered = torch.stack([index.mask(name) for index in indices]).any(0)
        assert torch.equal(after[name] != old, covered) and torch.equal(stepped[name] != old, covered)
    assert not torch.stack([index.mask("2.weight") for index in indices]).any(0).all()


def test_clients_of_fjord_draw_only_widths_that_they_can_hold():
    clients, engines = make_clients(), []
    run(make_run("fjord", clients, engine=recording(engines)))
    for task in engines[0].tasks:
        width = clients[task.host].width
        assert task.update.keywords["widths"] == [p for p in (0.25, 0.5, 1.0) if p <= width]
    bench = shop().at(0.5)
    asked, at = [], bench.shop.at
    bench.shop.at = lambda width: asked.append(width) or at(width)
    part = Parts(scalable()).cut(start(), scalable().index(0.5))
    how = {"steps": 40, "batch_size": 4, "lr": 0.1, "widths": [0.25, 0.5], "generator": generator_for(0, "x")}
    ordered_update(bench, part, clients[1].train, **how)
    assert 10 < len(asked) < 30 and set(asked) == {0.25}  # the other steps are on the bench itself


# --- what a device does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [1.0, 0.5])
@pytest.mark.parametrize("update", ["distil", "ordered"])
def test_updates_on_narrower_parts_equal_autograd_on_slices(update, own):
    (x, y), widths = make_clients()[0].train, [p for p in (0.25, 0.5, 1.0) if p < own]
    widths += [own] if update == "ordered" else []
    params = Parts(scalable()).cut(start(), Parts(scalable()).index(own))
    how = {"steps": 6, "batch_size": 4, "lr": 0.3, "widths": widths}
    function = functools.partial(distil_update, weight=0.8) if update == "distil" else ordered_update
    got = function(shop().at(own), params, (x, y), generator=generator_for(0, "u"), **how)
    generator = generator_for(0, "u")
    order = list(batches(len(x), 4, 6, generator))
    model = [p.clone() for p in as_list(params)]
    for batch in order:
        width = widths[int(torch.randint(len(widths), (), generator=generator))]
        leaves = [p.clone().requires_grad_() for p in model]
        part = sliced(leaves, width)
        if update == "distil":
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


def forward(model, x):
    W1, b1, W2, b2, W3, b3 = model
    return torch.tanh(torch.tanh(x @ W1.T + b1) @ W2.T + b2) @ W3.T + b3


def test_distillation_of_weight_zero_and_one_width_to_draw_are_plain_sgd_bit_for_bit():
    """Longer than a pass over the shard: the widths that are drawn must not disturb the batches."""
    bench, client, how = shop().at(1.0), make_clients()[0], {"steps": 9, "batch_size": 4, "lr": 0.3}
    plain = sgd_update(bench, start(), client.train, generator=generator_for(0, "z"), **how)
    taught = distil_update(
        bench, start(), client.train, widths=[0.25, 0.5], weight=0.0, generator=generator_for(0, "z"), **how
    )
    whole = ordered_update(bench, start(), client.train, widths=[1.0], generator=generator_for(0, "z"), **how)
    assert equal(taught, plain) and equal(whole, plain)


def test_micro_batches_of_a_model_with_batch_norm_have_two_samples_at_least():
    def normed():
        return nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, CLASSES))

    client = make_clients()[1]  # seven samples
    bench = Workbench(build(normed), F.cross_entropy)
    how = {"noise_batches": 8, "sketch": None, "sketch_seed": 0, "generator": generator_for(0, "m")}
    assert report(bench, start(normed), client.train, **how).noise > 0
    pair = tuple(part[:3] for part in client.train)
    assert report(bench, start(normed), pair, **how).noise != report(bench, start(normed), pair, **how).noise  # nan


# --- parts -------------------------------------------------------------------------------------------------------


def test_the_part_that_a_client_reports_is_the_gradient_of_the_masked_model():
    clients, parts, d = make_clients(), Parts(scalable()), sum(x.numel() for x in start().values())
    for i, extraction in itertools.product(range(4), ("static", "random", "rolling")):
        client = clients[i]
        index = parts.index(client.width, extraction, seed=3, round=5, key=client.key)
        assert (index is None) == (client.width == 1)
        at = parts.positions(start(), index)
        how = {"noise_batches": 3, "sketch_seed": 9, "places": None if at is None else (at, d)}
        bench, part = shop().at(client.width), parts.cut(start(), index)
        got = report(bench, part, client.train, sketch=None, generator=generator_for(0, "p"), **how)
        units = [list(range(size)) for size in HIDDEN] if index is None else kept(index)
        whole = literal.gradient(as_list(start()), units, as_shards(clients)[i])
        expected = torch.cat([g.flatten() for g in whole])
        torch.testing.assert_close(got.gradient, expected, rtol=0, atol=1e-13)
        if index is not None:
            outside = torch.ones(d, dtype=torch.bool).index_fill(0, at, False)
            assert len(at) == len(at.unique()) == sum(x.numel() for x in part.values())
            assert bool((got.gradient[outside] == 0).all())
            embedded = scalable().embed({name: p.clone() for name, p in part.items()}, index)
            flat = torch.cat([x.flatten() for x in embedded.values()])
            assert torch.equal(flat[at], torch.cat([x.flatten() for x in part.values()]))
        small = report(bench, part, client.train, sketch=16, generator=generator_for(0, "p"), **how)
        assert torch.equal(small.gradient, discrepancy.sketch(got.gradient, 16, 9))
        torch.testing.assert_close(small.gradient, discrepancy.sketch(expected, 16, 9), rtol=0, atol=1e-13)


def test_random_parts_are_drawn_anew_for_every_seed_round_and_client():
    parts, usual = Parts(scalable()), {"seed": 3, "round": 2, "key": 5}
    drawn = [
        kept(parts.index(0.5, "random", **usual | change)) for change in ({}, {"seed": 4}, {"round": 3}, {"key": 6})
    ]
    drawn += [kept(parts.nested(1.0, 0.5, "random", **usual | {"key": key})) for key in ((5, 6), (6, 5))]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))
    assert drawn[0] == kept(Parts(scalable()).index(0.5, "random", **usual))


@pytest.mark.parametrize("sketch", [None, 64])
def test_masked_discrepancies_are_those_of_embedded_gradients(sketch):
    clients, parts = make_clients(), Parts(scalable())
    how = {"seed": 3, "r": 1, "noise_batches": 3, "compare": "masked", "extraction": "random", "parts": parts}
    zeta, *_ = reported(start(), clients, Sequential(clients, shop()), sketch=sketch, **how)
    flat = []
    for client, shard in zip(clients, as_shards(clients), strict=True):
        index = parts.index(client.width, "random", seed=3, round=1, key=client.key)
        units = kept(index) if index is not None else [list(range(size)) for size in HIDDEN]
        g = torch.cat([x.flatten() for x in literal.gradient(as_list(start()), units, shard)])
        flat.append(discrepancy.sketch(g, sketch, seed_for(3, "sketch")) if sketch else g)
    expected = torch.stack([torch.stack([(a - b).square().sum() for b in flat]) for a in flat])
    torch.testing.assert_close(zeta, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
def test_coverage_counts_who_trained_what(extraction):
    clients, parts, tiers = make_clients((0.5, 0.25, 0.25, 0.5)), Parts(scalable()), ["big", "small", "small", "big"]
    rows = list(coverage(parts, start(), clients, tiers, extraction, seed=3, rounds=5))
    draw = Draw(clients, OPTIONS, parts)
    units = {
        "static": lambda i, t: literal.first(clients[i].width, HIDDEN),
        "rolling": lambda i, t: literal.window(clients[i].width, HIDDEN, t),
        "random": draw.units,
    }[extraction]
    expected = literal.coverage(as_list(start()), functools.cache(units), 5, tiers)
    assert [(row["block"], row["tier"]) for row in rows] == [(n, t) for t in ("big", "small", "all") for n in NAMES]
    for row in rows:
        times, never = expected[NAMES.index(row["block"]), row["tier"]]
        assert row["times"] == pytest.approx(times, rel=1e-6) and row["never"] == pytest.approx(never, abs=1e-6)
        assert row["rounds"] == 5


def test_coverage_by_hand():
    """Eight units of which one client trains all and one trains two: 2 of 8 rows twice, the others once."""
    rows = coverage(Parts(scalable()), start(), make_clients((1.0, 0.25)), ["a", "b"], "static", seed=0, rounds=9)
    found = {row["tier"]: row for row in rows if row["block"] == "0.bias"}
    assert {tier: (row["times"], row["never"]) for tier, row in found.items()} == {
        "a": (1.0, 0.0),
        "b": (0.25, 0.75),
        "all": (1.25, 0.0),
    }


def test_coverage_of_widths_that_change_from_step_to_step():
    """Eight units: the wide client trains all in one step of two and two of them in the other, the narrow one two."""
    steps = {0: [1.0, 0.25], 1: [0.25, 0.25]}
    clients = make_clients((1.0, 0.25))
    rows = coverage(
        Parts(scalable()), start(), clients, ["a", "b"], "static",
        seed=0, rounds=9, drawn=lambda client, r: steps[clients.index(client)],
    )  # fmt: skip
    found = {row["tier"]: (row["times"], row["never"]) for row in rows if row["block"] == "0.bias"}
    assert found["a"] == pytest.approx((0.625, 0.0)) and found["b"] == pytest.approx((0.25, 0.75))
    assert found["all"] == pytest.approx((0.875, 0.0))


def test_a_tier_may_be_called_all():
    rows = coverage(Parts(scalable()), start(), make_clients((1.0, 0.25)), ["a", "all"], "static", seed=0, rounds=1)
    assert [(row["tier"], row["times"]) for row in rows if row["block"] == "0.bias"] == [
        ("a", 1.0), ("all", 0.25), ("all", 1.25)
    ]  # fmt: skip


@pytest.mark.parametrize("extraction", ["static", "random"])
def test_without_rounds_nothing_is_covered(extraction):
    rows = list(coverage(Parts(scalable()), start(), make_clients(), list("abbc"), extraction, seed=0, rounds=0))
    assert all(row["times"] == 0 and row["never"] == 1 for row in rows) and len(rows) == 4 * 6


class Residual(nn.Module):
    """A stream that two branches are added to: its channels are one group through four layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(INPUTS, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.c, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.b(self.a(x).relu())
        return self.head((x + self.c(x)).relu())


class ResNet(nn.Module):
    """A small convolutional network with batch norms and a projected and an identity shortcut."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.norm2 = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.short, self.head = nn.Conv2d(8, 16, 1, stride=2), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (x + self.norm1(self.one(x))).relu()
        x = (self.short(x) + self.norm2(self.two(x))).relu()
        return self.head(x.mean((2, 3)))


IMAGE = (1, 4, 4)


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
@pytest.mark.parametrize(("make", "shape"), [(Residual, (INPUTS,)), (ResNet, IMAGE)])
def test_coupled_channels_stay_aligned_whatever_is_extracted(make, shape, extraction):
    cut, x = scalable(make, torch.float64, shape), random((6, *shape), seed=4)
    parts, w, full = Parts(cut), start(make), build(make)
    for t, (own, host) in itertools.product(range(3), [(1.0, 0.5), (1.0, 0.13), (0.75, 0.3)]):
        index = parts.nested(own, host, extraction, seed=1, round=t, key=(5,))
        model = parts.cut(w, parts.index(own))
        bench, outer = shop(make, torch.float64, shape), parts.index(own) or cut.index(1.0)
        bench.at(host).load(parts.cut(model, index))
        inside = outer.compose(index)
        full.load_state_dict({name: x * inside.mask(name) for name, x in w.items()}, strict=False)
        torch.testing.assert_close(bench.at(host).outputs(x), full.train()(x), rtol=0, atol=1e-12)


# --- what it reduces to ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZED)
def test_at_full_width_every_algorithm_is_the_homogeneous_one_bit_for_bit(name):
    clients = make_clients((1.0,) * 4)
    idle = {"extraction": "random", "nested": "rolling", "discrepancy": "masked", "inplace_kd": 0.5}
    one = run(make_run(name, clients, **idle if name.startswith("perm") else {}))
    make, kind = ALGORITHMS[name]
    engine = Sequential(clients, Workbench(build(mlp), F.cross_entropy))
    other = run(make(clients, engine, start(), DEFAULTS[kind]))
    assert same(one, other) and one.work == other.work


@pytest.mark.parametrize("name", RIVALS)
def test_at_full_width_partial_training_is_fedavg(name):
    clients = make_clients((1.0,) * 4)
    for suffix in ("", "-ft"):
        make, _ = ALGORITHMS[f"fedavg{suffix}"]
        options = TUNED if suffix else RIVAL
        plain = run(make(clients, Sequential(clients, Workbench(build(mlp), F.cross_entropy)), start(), options))
        assert same(run(make_run(name + suffix, clients)), plain)


@pytest.mark.parametrize("name", LOOPS)
def test_at_full_width_perm_equals_the_homogeneous_paper_typed_out(name):
    assert_run(name, make_clients((1.0,) * 4), replace(OPTIONS, final_lr=0.2))


@pytest.mark.parametrize("name", LOOPS)
def test_clients_of_one_width_below_one_train_the_narrow_model_as_if_it_were_all(name):
    """Models cut from w at half width, and a federation whose whole model is that half: the same alpha and models."""
    half = scalable().extract(0.5).module
    narrow = Parts(scalable()).cut(start(), scalable().index(0.5))
    options = {"server_mix": "alpha", "tail_average": 0.5}
    cut = run(make_run(name, make_clients((0.5,) * 4), **options))
    clients = make_clients((1.0,) * 4)
    engine = Sequential(clients, Workbench(half, F.cross_entropy))
    whole = run(LOOPS[name](clients, engine, narrow, replace(OPTIONS, **options)))
    torch.testing.assert_close(cut.alpha, whole.alpha, rtol=0, atol=1e-12)
    for a, b in zip(cut.deployed, whole.deployed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_width_that_keeps_every_channel_is_full_width():
    clients = make_clients((1.0, 0.97, 0.97, 1.0))
    for name in SIZED:
        a, b = run(make_run(name, clients)), run(make_run(name, make_clients((1.0,) * 4)))
        if name in ("fjord", "fjord-ft"):  # has two widths to draw from, which are the same
            torch.testing.assert_close(a.deployed[0], b.deployed[0], rtol=0, atol=1e-12)
        else:
            assert same(a, b), name


# --- laws --------------------------------------------------------------------------------------------------------


def by_key(clients):
    """A schedule that the keys of clients decide, in place of their labels."""

    def rounds(alpha, kind, generator):
        order = sorted(range(len(clients)), key=lambda i: clients[i].key)
        found = rounds_of(alpha[order][:, order], kind, generator)
        return [[(order[i], order[j]) for i, j in visits] for visits in found]

    return rounds


@pytest.mark.parametrize(
    ("name", "variant"),
    [*itertools.product(LOOPS, ("odd", "mixed")), *((name, "plain") for name in SIZED[2:])],
)
def test_relabelling_clients_relabels_weights_and_models(name, variant, monkeypatch):
    clients, order = make_clients(), [2, 0, 3, 1]
    states = []
    for labelled in (clients, [clients[i] for i in order]):
        monkeypatch.setattr(perm, "rounds_of", by_key(labelled))
        states.append(run(make_run(name, labelled, **VARIANTS[variant])))
    one, other = states
    assert equal(one.w, other.w)
    if one.alpha is not None:
        assert torch.equal(one.alpha[order][:, order], other.alpha)
    for new, old in enumerate(order):
        assert equal(one.v[old], other.v[new]) and equal(one.deployed[old], other.deployed[new])
    assert one.work == other.work


def visited(own, host, nested="static", weight=1.0):
    """(model before, model after, its nested part) of one visit of a model to a host."""
    clients, parts = make_clients((own, host)), Parts(scalable())
    v = tuple(parts.cut(start(), parts.index(client.width)) for client in clients)
    alpha = torch.tensor([[1 - weight, weight], [0.0, 1.0]], dtype=torch.float64)
    state = State(0, start(), v, alpha=alpha)
    after = personal_epoch(
        state, clients, Sequential(clients, shop()), rounds=[[(0, 1)]], seed=3, local_steps=2, batch_size=4,
        personal_lr=0.3, step_rule="max", parts=parts, nested=nested,
    )  # fmt: skip
    index = None if nested == "skip" else parts.nested(own, host, nested, seed=3, round=0, key=(7, 3))
    assert equal(state.v[1], after.v[1])
    return v[0], after.v[0], index


@pytest.mark.parametrize("nested", ["static", "random", "rolling"])
@pytest.mark.parametrize(("own", "host"), [(1.0, 0.5), (1.0, 0.25), (0.5, 0.25)])
def test_a_visit_to_a_smaller_host_changes_the_nested_part_and_nothing_else(own, host, nested):
    before, after, index = visited(own, host, nested)
    for name in NAMES:
        assert torch.equal(before[name] != after[name], index.mask(name))


@pytest.mark.parametrize("host", [1.0, 0.5])
def test_a_host_that_can_hold_the_visitor_trains_all_of_it(host):
    before, after, index = visited(0.5, host, "rolling")
    assert index is None and all((before[name] != after[name]).all() for name in NAMES)


def test_a_visit_of_weight_zero_and_a_skipped_one_change_nothing():
    before, after, _ = visited(1.0, 0.5, weight=0.0)
    assert equal(before, after)
    before, after, _ = visited(1.0, 0.5, "skip")
    assert equal(before, after)


def test_mixing_by_hand():
    """A unit that only the wide model has is its own; what all have is mixed by alpha, renormalised."""
    clients, parts = make_clients((1.0, 0.5, 0.25)), Parts(scalable())
    whole = [{name: torch.full_like(x, value) for name, x in start().items()} for value in (1.0, 2.0, 4.0)]
    v = tuple(parts.cut(w, parts.index(client.width)) for w, client in zip(whole, clients, strict=True))
    alpha = torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64)
    mixed = mixed_by_alpha(State(1, start(), v, alpha=alpha), clients, parts, [1.0, 0.5, 0.25]).v
    assert mixed[0]["0.bias"].tolist() == [2.75, 2.75, 1.5, 1.5, 1, 1, 1, 1]  # two units are common to all, four to two
    assert mixed[1]["0.bias"].tolist() == [3, 3, 2, 2]
    assert mixed[2]["0.bias"].tolist() == [2, 2]
    nobody = replace(State(1, start(), v), alpha=torch.tensor([[0.0, 0.0, 1.0]] * 3).double())
    left = mixed_by_alpha(nobody, clients, parts, [1.0, 0.5, 0.25]).v
    assert left[0]["0.bias"].tolist() == [4, 4, 1, 1, 1, 1, 1, 1]


def test_mixing_sums_in_the_order_of_keys():
    """Three models of one width: sums of three depend on their order, and labels must not decide it."""
    widths, keys, order = [0.5, 1.0, 0.5, 0.25, 0.5], (7, 3, 11, 5, 2), [4, 2, 0, 3, 1]
    clients, parts = make_clients(widths, sizes=(9, 7, 12, 8, 6), keys=keys), Parts(scalable())
    whole = [{name: random(x.shape, seed=i) for name, x in start().items()} for i in range(5)]
    v = [parts.cut(w, parts.index(width)) for w, width in zip(whole, widths, strict=True)]
    alpha = random((5, 5), seed=9).softmax(1)
    one = mixed_by_alpha(State(1, start(), tuple(v), alpha=alpha), clients, parts, widths).v
    other = State(1, start(), tuple(v[i] for i in order), alpha=alpha[order][:, order])
    other = mixed_by_alpha(other, [clients[i] for i in order], parts, [widths[i] for i in order]).v
    assert all(equal(one[old], other[new]) for new, old in enumerate(order))


# --- what hosts are handed ---------------------------------------------------------------------------------------


def recording(engines):
    """An engine that keeps the tasks it ran; it is put into ``engines``."""

    class Recording(Sequential):
        def __init__(self, clients, shop):
            super().__init__(clients, shop)
            self.tasks = []
            engines.append(self)

        def run(self, tasks):
            self.tasks += tasks
            return super().run(tasks)

    return Recording


@pytest.mark.parametrize(
    ("name", "variant", "widths"),
    [
        *itertools.product(["perm"], VARIANTS, [(0.07, 1.0, 0.0625, 0.1), (1.0, 0.97, 0.5, 0.499)]),
        *itertools.product(["perm-two-stage"], ["plain", "odd", "mixed"], [WIDTHS]),
        *itertools.product(SIZED[2:], ["plain"], [(1.0, 0.97, 0.25, 0.249)]),
    ],
)
def test_no_host_is_ever_handed_more_than_it_can_hold(name, variant, widths):
    clients, engines, parts = make_clients(widths), [], Parts(scalable())
    run(make_run(name, clients, engine=recording(engines), parts=parts, **VARIANTS[variant]))
    tasks = engines[0].tasks
    assert {task.host for task in tasks} == set(range(4))
    for task in tasks:
        can = clients[task.host].width
        assert task.width <= can
        counts = scalable().axis_map.counts(task.width)
        for key, x in task.params.items():
            assert tuple(x.shape) == scalable().axis_map.shape(key, counts)
        assert sum(x.numel() for x in task.params.values()) <= parts.num_params(can, scalable().model)
        need, have = (scalable().cost(width, batch_size=4).train_bytes for width in (task.width, can))
        assert need <= have
        inside = getattr(task.update, "keywords", {}).get("widths", [])
        assert all(width <= task.width for width in inside)
        if inside and task.update.func is distil_update:
            assert all(scalable().axis_map.counts(width) != counts for width in inside)


# --- engines -----------------------------------------------------------------------------------------------------


class Shuffling(Sequential):
    """Runs the tasks of a call in another order, and gives their outcomes in task order."""

    seed = 0

    def run(self, tasks):
        order = torch.randperm(len(tasks), generator=torch.Generator().manual_seed(self.seed)).tolist()
        done = dict(zip(order, super().run([tasks[k] for k in order]), strict=True))
        return [done[k] for k in range(len(tasks))]


class Reversing(Sequential):
    def run(self, tasks):
        return super().run(tasks[::-1])[::-1]


engine_cases = pytest.mark.parametrize(
    ("name", "variant"), [("perm", "odd"), ("perm", "mixed"), ("feddropout-ft", "plain"), ("fjord", "plain")]
)


@pytest.mark.parametrize("engine", [Shuffling, Reversing])
@engine_cases
def test_the_order_in_which_tasks_run_does_not_matter(name, variant, engine):
    other = run(make_run(name, make_clients(), engine=engine, **VARIANTS[variant]))
    assert same(sequential(name, variant), other) and sequential(name, variant).work == other.work


@pytest.mark.parametrize("workers", [1, 2, 3])
@engine_cases
def test_threads_give_the_numbers_of_the_sequential_engine(name, variant, workers):
    engines = []

    def threads(clients, shop):
        engines.append(Threads(clients, shop, workers))
        return engines[-1]

    try:
        other = run(make_run(name, make_clients(), engine=threads, **VARIANTS[variant]))
    finally:
        engines[0].close()
    assert same(sequential(name, variant), other)


class Jittery(nn.Module):
    """Dropout as many write it: a function, which no list of layers shows."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.dropout(self.one(x).relu(), 0.5, training=self.training))


def test_models_that_draw_random_numbers_give_the_same_numbers_in_any_order_and_on_threads():
    clients = make_clients((1.0, 0.5, 0.5, 1.0))
    bench = shop(Jittery)
    parts, how = Parts(scalable(Jittery)), {"local_steps": 2, "batch_size": 4, "lr": 0.3, "seed": 1, "r": 0}
    one, _ = local_sgd_round(start(Jittery), clients, Sequential(clients, bench), parts=parts, **how)
    other, _ = local_sgd_round(start(Jittery), clients, Reversing(clients, bench), parts=parts, **how)
    assert equal(one, other)
    for workers in (1, 3):
        threads = Threads(clients, bench, workers)
        try:
            for _ in range(3):  # and again, once it has found out
                other, _ = local_sgd_round(start(Jittery), clients, threads, parts=parts, **how)
                assert equal(one, other)
        finally:
            threads.close()


# --- masked classes ----------------------------------------------------------------------------------------------

HEADS = ("4.weight", "4.bias")
KNOWN = [[0, 1], [0, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize("update", ["sgd", "distil", "ordered"])
def test_the_rows_of_absent_classes_never_move_at_a_host(update):
    clients = with_classes(make_clients(), KNOWN)
    function = {
        "sgd": sgd_update,
        "distil": functools.partial(distil_update, weight=0.8, widths=[0.25, 0.5]),
        "ordered": functools.partial(ordered_update, widths=[0.25, 1.0]),
    }[update]
    function = functools.partial(function, steps=6, batch_size=4, lr=0.5)
    clients[2] = replace(clients[2], classes=None)  # knows all
    engine = Sequential(clients, shop())
    for host in (0, 1, 2, 0):  # a bench must not remember the classes of another host
        task = Task(function, start(), host=host, seed=host)
        (after,) = run_all(engine, [task], ["here"])
        absent = torch.zeros(CLASSES, dtype=torch.bool) if host == 2 else ~clients[host].classes
        for name in HEADS:
            assert torch.equal(after[name][absent], start()[name][absent])
            assert (after[name][~absent] != start()[name][~absent]).all()


def test_clients_vote_only_on_the_classes_they_hold():
    clients, parts = with_classes(make_clients(), [[0], [0], [0], [0]]), Parts(scalable(), HEADS)
    engine = Sequential(clients, shop())
    how = {"local_steps": 2, "batch_size": 4, "lr": 0.4, "seed": 1, "r": 0}
    after, _ = local_sgd_round(start(), clients, engine, parts=parts, **how)
    for name in HEADS:
        assert torch.equal(after[name][1:], start()[name][1:])
    clients = with_classes(make_clients(), [[0, 1], [0], [0, 2], [0, 2]])
    indices = [parts.index(client.width) for client in clients]
    ones = [{name: torch.full_like(x, float(i)) for name, x in parts.cut(start(), index).items()}
            for i, index in enumerate(indices)]  # fmt: skip
    mean = covered_mean(start(), ones, indices, clients, parts)
    assert mean["4.bias"].tolist() == [1.5, 0.0, 2.5]
    assert mean["4.weight"][1].tolist() == [0.0] * 6  # only the widest knows class 1, and it holds all
    assert mean["4.weight"][2, :2].tolist() == [2.5, 2.5] and mean["4.weight"][2, 2] == 2.0
    assert torch.equal(mean["4.weight"][2, 3:], start()["4.weight"][2, 3:])  # held by the widest, which has no say
    assert mean["2.bias"].tolist() == [1.5, 1.5, 1.0, 0.0, 0.0, 0.0]


def test_whole_models_are_averaged_alike_with_and_without_a_map_of_their_channels():
    clients = with_classes(make_clients((1.0,) * 4), [[0, 1], [0], [0, 1], [1]])
    models = [{name: random(x.shape, seed=10 * i + k) for k, (name, x) in enumerate(start().items())} for i in range(4)]
    one = covered_mean(start(), models, [None] * 4, clients, Parts(scalable(), HEADS))
    other = covered_mean(start(), models, [None] * 4, clients, Parts(heads=HEADS))
    assert equal(one, other)
    assert torch.equal(one["4.weight"][2], start()["4.weight"][2])
    for row, voters in ((0, [0, 1, 2]), (1, [0, 2, 3])):
        expected = sum(models[i]["4.weight"][row] for i in voters) / 3
        torch.testing.assert_close(one["4.weight"][row], expected, rtol=0, atol=1e-15)


def test_a_classifier_that_is_not_trained_needs_no_votes():
    def headless():
        model = mlp()
        model[4].requires_grad_(False)
        return model

    clients = with_classes(make_clients(), KNOWN)
    engine, parts = Sequential(clients, shop(headless)), Parts(scalable(headless), HEADS)
    how = {"local_steps": 1, "batch_size": 4, "lr": 0.1, "seed": 1, "r": 0}
    after, _ = local_sgd_round(start(headless), clients, engine, parts=parts, **how)
    assert list(after) == list(NAMES[:4])


# --- starts ------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A parameter outside of layers that can be reset."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.scale * self.one(x).relu())


def test_a_fresh_start_does_not_depend_on_what_was_trained_before():
    """The global model's module is a workbench too: what lies on it is anybody's."""
    bench, parts = shop(Scaled), Parts(scalable(Scaled))
    once = parts.fresh(0.5, start(Scaled), seed=0)
    bench.full.load({name: torch.full_like(x, 9.0) for name, x in start(Scaled).items()})
    again = parts.fresh(0.5, start(Scaled), seed=0)
    assert equal(once, again)
    assert torch.equal(again["scale"], start(Scaled)["scale"][:4])
    assert not torch.equal(again["one.weight"], start(Scaled)["one.weight"][:4])


def test_personal_models_begin_as_static_parts_of_the_warm_model():
    for extraction in ("static", "random", "rolling"):
        state = make_run("perm", make_clients(), extraction=extraction).begin()
        for params, width in zip(state.v, WIDTHS, strict=True):
            assert_close(params, as_list(state.w), width, atol=0)


# --- norms, frozen parameters, precision -------------------------------------------------------------------------


def statistics(bench):
    return {name: x.clone() for width in (1.0, 0.5, 0.13) for name, x in
            ((f"{width} {n}", b) for n, b in bench.at(width).module.named_buffers())}  # fmt: skip


@pytest.mark.parametrize("variant", ["odd", "mixed"])
def test_batch_norms_use_the_batch_and_leave_running_statistics_alone(variant):
    clients = make_clients((1.0, 0.5, 0.13, 0.5), shape=IMAGE)
    results = []
    for fill in (0.0, 1e6):
        bench = shop(ResNet, torch.float64, IMAGE)
        for width in (1.0, 0.5, 0.13):
            for name, x in bench.at(width).module.named_buffers():
                x.fill_(fill if name.endswith("mean") else 1)
        before = statistics(bench)
        engine = lambda clients, _, bench=bench: Sequential(clients, bench)  # noqa: E731
        algorithm = make_run(
            "perm", clients, engine=engine, parts=Parts(scalable(ResNet, torch.float64, IMAGE)), begin=start(ResNet),
            local_steps=2, **VARIANTS[variant],
        )  # fmt: skip
        results.append(run(algorithm, 1))
        assert equal(before, statistics(bench))
    assert same(*results)
    assert all(x.isfinite().all() for params in results[0].deployed for x in params.values())


def half() -> nn.Module:
    """A network whose first layer is not trained."""
    model = mlp()
    model[0].requires_grad_(False)
    return model


def test_a_part_has_the_parameters_that_are_not_trained_of_its_own_channels():
    parts, x, whole = Parts(scalable(half)), random((6, INPUTS), seed=4), dict(build(half).named_parameters())
    index = parts.nested(0.5, 0.25)
    bench = shop(half).at(0.25)
    bench.load(parts.cut(parts.cut(start(half), parts.index(0.5)), index))
    units = literal.first(0.25, HIDDEN)
    expected = literal.scores([start(half).get(name, whole[name]) for name in NAMES], units, x)
    torch.testing.assert_close(bench.outputs(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", ["extraction", "nested"])
def test_parameters_that_are_not_trained_and_cut_are_refused_with_moving_parts(where):
    clients, parts = make_clients(), Parts(scalable(half))
    for kind in ("random", "rolling"):
        engine = lambda clients, _: Sequential(clients, shop(half))  # noqa: E731
        algorithm = make_run("perm", clients, engine=engine, parts=parts, begin=start(half), **{where: kind})
        with pytest.raises(ValueError) as error:
            algorithm.epoch(algorithm.begin())
        expected = f"0.weight is cut and not trained, so clients hold one part of it; extraction '{kind}' would need "
        assert str(error.value) == expected + "another every round: use 'static', or train it"
    state = run(make_run("perm", clients, engine=engine, parts=parts, begin=start(half)))
    assert list(state.w) == list(NAMES[2:])


@pytest.mark.parametrize(
    ("name", "variant", "widths"),
    [
        *itertools.product(["perm"], ["odd", "mixed"], [(0.0625, 0.07, 1.0, 0.5), (0.01, 0.02, 0.03, 0.04)]),
        *itertools.product(["local", "fjord-ft", "feddropout"], ["plain"], [(0.07, 0.0625, 0.0626, 0.9)]),
    ],
)
def test_float32_networks_of_one_channel_a_group_are_trained(name, variant, widths):
    shape, dtype = IMAGE, torch.float32
    clients, parts = make_clients(widths, shape=shape, dtype=dtype), Parts(scalable(ResNet, dtype, shape))
    engine = lambda clients, _: Sequential(clients, shop(ResNet, dtype, shape))  # noqa: E731
    algorithm = make_run(
        name, clients, engine=engine, parts=parts, begin=start(ResNet, dtype), local_steps=2, **VARIANTS[variant]
    )
    state = run(algorithm, 1)
    for params, width in zip(state.deployed, widths, strict=True):
        counts = parts.scalable.axis_map.counts(width)
        for key, x in params.items():
            assert x.dtype == dtype and x.isfinite().all()
            assert tuple(x.shape) == parts.scalable.axis_map.shape(key, counts)
    assert 1 in parts.scalable.axis_map.counts(min(widths))


def test_widths_of_the_same_size_have_the_same_complexity():
    """0.07 and 0.0625 of eight channels are one channel: architectures do not differ, so neither do costs."""
    a, b = (make_run("perm", make_clients(widths)).begin() for widths in ((0.07, 0.0625, 0.07, 0.0625), (0.07,) * 4))
    assert torch.equal(a.alpha, b.alpha)


def test_the_complexity_that_counts_is_that_of_the_personal_models():
    """With everybody as small as the smallest client there is nothing to tell hosts apart by."""
    one, other = (make_run("perm", make_clients(), personal_width="smallest", vc_weight=p).begin() for p in (0.0, 9.0))
    assert torch.equal(one.alpha, other.alpha)
    assert not torch.equal(one.alpha, make_run("perm", make_clients(), vc_weight=9.0).begin().alpha)
