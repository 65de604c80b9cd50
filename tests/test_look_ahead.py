"""The look ahead: losses after one step, who judges them, what is chosen and what it costs."""

import math
from dataclasses import replace

import pytest
import torch
from engine_models import deep
from federation import (
    FULL,
    IMAGE,
    WIDTHS,
    ResNet,
    build,
    engine_that_records,
    equal,
    generator,
    linear,
    make_clients,
    make_federation,
    make_shop,
    part_of,
    random,
    scalable,
    start,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hetperm import mixing
from hetperm.client import View
from hetperm.device.bench import Workbench
from hetperm.device.gradients import DIRECTIONS, OWN_SHARE, ReportGradient, StepLosses
from hetperm.engine.choice import opened
from hetperm.params import flat, unflatten
from hetperm.server import look_ahead as module
from hetperm.server.estimate import collect_reports
from hetperm.server.federation import Federation
from hetperm.server.look_ahead import SHARES, at_best_rate, best_candidate, look_ahead
from hetperm.server.slicer import Slicer
from hetperm.state import State

ETAS = (0.1, 0.4, 1.6)


def literal(params, shard):
    """(loss, flat gradient) of softmax regression."""
    leaves = [p.clone().requires_grad_() for p in params.values()]
    value = F.cross_entropy(shard[0] @ leaves[0].T + leaves[1], shard[1])
    return float(value.detach()), flat(torch.autograd.grad(value, leaves))


def rows(shard, taken):
    return shard[0][taken], shard[1][taken]


def stepped(params, direction, eta):
    step = unflatten(direction, params)
    return {name: x - eta * step[name] for name, x in params.items()}


def asked(directions, own=None):
    """What a client is handed."""
    own = torch.zeros(len(directions), dtype=torch.float64) if own is None else own
    return start(linear) | {DIRECTIONS: directions, OWN_SHARE: own}


def shop():
    return make_shop(linear, cut=False)


def narrow(losses, shares):
    """The choice where clients have hardly any partners, however much they share."""
    return best_candidate(losses, torch.ones(len(losses)), shares)


# Losses after a step


def test_by_hand():
    """f(w) = (2w - 1)^2 / 2 over two samples, w = 1, direction 1: steps of 1/2 and 1 end at 0 and at 1/2."""
    bench = Workbench(nn.Linear(1, 1, bias=False, dtype=torch.float64), F.mse_loss)
    shard = torch.tensor([[2.0], [0.0]]).double(), torch.tensor([[1.0], [0.0]]).double()
    params = {
        "weight": torch.tensor([[1.0]]).double(),
        DIRECTIONS: torch.tensor([[1.0], [0.0]]).double(),
        OWN_SHARE: torch.zeros(2),
    }
    table = StepLosses((0.5, 1.0), most=2, candidates=2)(bench, params, shard, generator())
    assert table.tolist() == [[0.0, 0.5], [0.5, 0.5]] and table.dtype == torch.float64


def test_on_validation_data_directions_are_taken_as_they_are():
    shard, directions = make_clients()[2].train, random((3, 18), seed=4)
    update = StepLosses(ETAS, most=5, candidates=3)
    table = update(shop().full, asked(directions, random((3,), seed=5)), shard, generator(1))
    judges = rows(shard, torch.randperm(12, generator=generator(1))[:5])
    for c, direction in enumerate(directions):
        expected = [literal(stepped(start(linear), direction, eta), judges)[0] for eta in ETAS]
        assert table[c].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("halves", [False, True])
def test_without_a_step_all_directions_have_the_loss_of_the_model_itself(halves):
    shard, directions = make_clients()[2].train, random((3, 18), seed=4)
    update, bench, forwards = StepLosses((0.0, 0.4), most=12, candidates=3, halves=halves), shop().full, []
    hook = bench.module.register_forward_hook(lambda *_: forwards.append(1))
    table = update(bench, asked(directions), shard, generator(1))
    hook.remove()
    assert table[:, 0].tolist() == pytest.approx([literal(start(linear), shard)[0]] * 3, rel=1e-12)
    gradients = 2 if halves else 0
    assert len(forwards) - gradients == (2 if halves else 1) * (3 + 1)  # each judge: three steps, and one place once


def test_where_no_step_helps_clients_share_as_groups_would():
    """A model that is done: every step makes it worse, those along shared directions a little more than one alone."""
    table = torch.tensor([[[1.0, 1.0], [1.01, 1.01]], [[1.0, 1.0], [1.03, 1.04]], [[1.0, 1.0], [1.05, 1.05]]])
    assert narrow(at_best_rate(table[:, 1:]), (0.0, 0.7, 1.4)) == 0
    assert narrow(at_best_rate(table), (0.0, 0.7, 1.4)) == 1


@pytest.mark.parametrize(("n", "most"), [(12, 12), (12, 6), (11, 11), (2, 2), (3, 3)])
def test_a_held_out_half_judges_steps_with_the_gradient_of_the_other_half(n, most):
    shard = tuple(x[:n] for x in make_clients()[2].train)
    whole = literal(start(linear), shard)[1]
    others, own = random((2, 18), seed=4), torch.tensor([0.3, 1.0]).double()
    table = StepLosses(ETAS, most=most, candidates=2, halves=True)(
        shop().full, asked(others + own[:, None] * whole, own), shard, generator(1)
    )
    one, two = torch.randperm(n, generator=generator(1)).tensor_split(2)
    expected = torch.zeros(2, len(ETAS), dtype=torch.float64)
    for held_out, other in ((one, two), (two, one)):
        gradient = literal(start(linear), rows(shard, other))[1]
        for c in range(2):
            for e, eta in enumerate(ETAS):
                model = stepped(start(linear), others[c] + own[c] * gradient, eta)
                expected[c, e] += literal(model, rows(shard, held_out[: most // 2]))[0] / 2
    torch.testing.assert_close(table, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(0, 11))
def test_no_sample_judges_a_step_that_it_has_made(seed, changed):
    """Alone, a client steps along its own gradient: what a sample says of it must not depend on its own gradient."""
    x, y = make_clients()[2].train
    one, two = torch.randperm(12, generator=generator(seed)).tensor_split(2)
    held_out = one if changed in one.tolist() else two
    seen = []

    class Recording(Workbench):
        def load(self, params):
            seen.append({name: p.clone() for name, p in params.items()})
            super().load(params)

    directions = []
    for label in (int(y[changed]), (int(y[changed]) + 1) % 3):
        labels = y.clone()
        labels[changed] = label
        seen.clear()
        bench = Recording(build(linear), F.cross_entropy)
        params = asked(literal(start(linear), (x, labels))[1][None], torch.ones(1).double())
        StepLosses((1.0,), most=12, candidates=1, halves=True)(bench, params, (x, labels), generator(seed))
        tried = seen[1:]  # the first is w itself
        directions.append(tried[0] if held_out is one else tried[1])
    for name in directions[0]:
        torch.testing.assert_close(directions[0][name], directions[1][name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("halves", "n", "most"), [(False, 12, 7), (True, 12, 12), (True, 11, 11), (True, 9, 4)])
def test_work_is_what_forwards_and_backwards_really_take(halves, n, most):
    bench, forwards, gradients = shop().full, [], []
    bench.module.register_forward_hook(
        lambda layer, args, output: (gradients if torch.is_grad_enabled() else forwards).append(len(output))
    )
    shard = tuple(x[:n] for x in make_clients()[2].train)
    update = StepLosses(ETAS, most=most, candidates=4, halves=halves, chunk=3)
    update(bench, asked(random((4, 18), seed=1)), shard, generator())
    assert sum(gradients) == (n if halves else 0)
    assert update.samples(n) == pytest.approx(sum(forwards) / 3 + sum(gradients))


def test_a_view_of_validation_data_in_another_precision_is_read_row_by_row():
    (x, y), directions = make_clients()[2].train, random((2, 18), seed=4)
    view, update = View((x, y), torch.arange(3, 11)), StepLosses(ETAS, most=5, candidates=2)
    one = update(shop().full, asked(directions), view, generator(1))
    assert torch.equal(one, update(shop().full, asked(directions), (x[3:11], y[3:11]), generator(1)))
    single = update(shop().full, asked(directions), (x[3:11].float(), y[3:11]), generator(1))
    torch.testing.assert_close(single, one, rtol=1e-5, atol=1e-5)


def test_a_loss_that_is_not_finite_is_the_worst_there_is():
    directions = torch.tensor([[0.0], [1e308]], dtype=torch.float64).expand(2, 18)
    table = StepLosses((1.0, 1e9), 12, 2)(shop().full, asked(directions), make_clients()[2].train, generator())
    assert table[0].isfinite().all() and table[1, 1] == math.inf


@pytest.mark.parametrize("halves", [False, True])
def test_who_has_too_few_samples_to_tell_has_no_say(halves):
    x, y = make_clients()[2].train
    params = asked(random((2, 18), seed=4), torch.ones(2))
    update = StepLosses(ETAS, most=1, candidates=2, halves=halves)
    table = update(shop().full, params, (x[:1], y[:1]), generator())
    assert table.isfinite().all() and table.any() != halves


@pytest.mark.parametrize(("halves", "n"), [(False, 1), (True, 2), (True, 3), (True, 4), (False, 2)])
def test_batch_norms_need_two_samples_to_judge(halves, n):
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    bench, (x, y) = make_shop(normed, cut=False).full, make_clients()[2].train
    w = bench.take()
    size = sum(p.numel() for p in w.values())
    params = w | {DIRECTIONS: random((2, size), seed=4), OWN_SHARE: torch.ones(2)}
    table = StepLosses(ETAS, most=n, candidates=2, halves=halves)(bench, params, (x[:n], y[:n]), generator())
    assert table.isfinite().all() and bool(table.any()) == (n >= (4 if halves else 2))


def test_the_model_is_left_alone():
    params = asked(random((2, 18), seed=4), torch.ones(2))
    before = {name: x.clone() for name, x in params.items()}
    StepLosses(ETAS, 8, 2, halves=True)(shop().full, params, make_clients()[0].train, generator())
    assert equal(params, before)


# The choice


def with_validation(clients, n=20):
    """The clients with validation data by the labels of their own shards' nearest samples."""
    out = []
    for i, client in enumerate(clients):
        x, y = client.train
        fresh = random((n, *x.shape[1:]), seed=500 + i).to(x.dtype)
        nearest = torch.cdist(fresh.flatten(1), x.flatten(1)).argmin(1)
        out.append(replace(client, val=(fresh, y[nearest])))
    return out


def outlook(clients, *, federation=None, **options):
    federation = federation or make_federation(clients)
    reports = collect_reports(federation, State(0, start(), ()), ReportGradient(3), batch_size=4)
    return look_ahead(federation, reports, rows_by(reports), **{"lr": 0.4, "batch_size": 4, **options})


def rows_by(reports):
    """(clients, c) -> their rows of alpha."""
    return lambda clients, c: mixing.weights_of(clients, reports.zeta, reports.q, reports.n, share=c)


@pytest.mark.parametrize("validated", [True, False])
def test_the_candidate_is_chosen_whose_first_step_leaves_the_smallest_mean_loss(validated):
    clients = with_validation(make_clients()) if validated else make_clients()
    recording, tasks = engine_that_records()
    federation = make_federation(clients, engine=recording)
    reports = collect_reports(federation, State(0, start(), ()), ReportGradient(3), batch_size=4)
    tasks.clear()
    got = outlook(clients, federation=federation)
    tasks = tasks[4:]  # the first four are reports
    probe = part_of(start(), 0.25)
    gradients = torch.stack(list(reports.gradients))
    assert [task.host for task in tasks] == federation.order
    assert {task.part for task in tasks} == {"val" if validated else "train"}
    tables = []
    for task in tasks:
        assert task.width == 0.25 and equal({name: task.params[name] for name in probe}, probe)
        for c, share in enumerate(SHARES):
            row = mixing.weights(reports.zeta, reports.q, reports.n, share=share)[task.host]
            expected = sum(float(row[j]) * gradients[j] for j in range(4))
            torch.testing.assert_close(task.params[DIRECTIONS][c], expected, rtol=0, atol=1e-12)
            assert task.params[OWN_SHARE][c] == row[task.host]
        client, bench = clients[task.host], make_shop().at(0.25)
        generator = torch.Generator().manual_seed(task.seed)
        tables.append(task.update(bench, task.params, client.data(task.part), generator))
    for c in range(len(SHARES)):
        # The step size that is best for the mean over clients, and the same for all of them.
        rate = min(range(len(module.RATES)), key=lambda e: sum(float(table[c, e]) for table in tables))
        assert got.losses[c].tolist() == [float(table[c, rate]) for table in tables]
    assert got.shares == SHARES and got.losses.shape == (len(SHARES), 4)
    assert got.chosen == best_candidate(got.losses, got.partners)


def updates_of_a_look(clients, **options):
    """What the clients are asked to do in a look ahead."""
    recording, tasks = engine_that_records()
    outlook(clients, federation=make_federation(clients, engine=recording), **options)
    return [task.update for task in tasks if isinstance(task.update, StepLosses)]


def test_step_sizes_are_multiples_of_that_of_the_global_model():
    assert {update.etas for update in updates_of_a_look(make_clients(), lr=0.4)} == {(0.0, 0.1, 0.2, 0.4, 0.8, 1.6)}


@pytest.mark.parametrize(("steps", "most"), [(0, 128), (1000, 16), (5000, 25), (100_000, 128)])
def test_the_steps_of_a_run_bound_the_samples_of_a_look(steps, most):
    """3 % of 5000 steps of 4 samples are 600. Losses at 14 shares and 5 rates, and the one without a step, take a third
    of 71 of each sample.
    """
    clients = make_clients(WIDTHS[3:] * 2, sizes=(200, 130))
    assert {update.most for update in updates_of_a_look(clients, steps=steps)} == {most}


def test_all_clients_take_the_step_size_that_is_best_for_their_mean():
    """Client by client the first candidate would have 0 and 0, and win; no step size of it leaves less than 2."""
    table = torch.tensor([[[0.0, 4.0], [4.0, 0.0], [3.0, 3.0]], [[1.0, 2.5], [5.0, 5.0], [5.0, 5.0]]])
    assert at_best_rate(table).tolist() == [[0.0, 4.0], [1.0, 2.5]]
    assert narrow(at_best_rate(table), (0.0, 0.7)) == 1


def test_a_step_size_after_which_a_loss_is_not_finite_is_not_the_best():
    table = torch.tensor([[[math.inf, 0.0], [2.0, 3.0], [math.nan, 0.0]]])
    assert at_best_rate(table).tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize(
    ("shares", "gains", "chosen"),
    [
        ((0.0, 0.35, 0.7, 1.4, 2.8, 4.0), (-0.1, -0.02, 0.0, 0.0, 0.02, -0.1), 0.7),  # better than both beside it
        ((0.0, 0.35, 0.7, 1.4, 2.8, 4.0), (-0.1, -0.02, 0.0, 0.0, 0.02, 0.018), 2.8),  # not by more than a little
        ((0.0, 0.35, 0.7, 1.4, 2.8, 4.0), (-0.1, -0.02, 0.0, 0.008, 0.02, -0.1), 2.8),  # a way leads down to it
        ((0.0, 0.05, 0.1, 0.2, 0.35, 0.7), (-0.1, -0.02, 0.0, 0.0, 0.02, -0.1), 0.35),  # it merges no groups
        ((0.0, 0.2, 0.35, 0.7, 1.4, 2.8), (-0.1, -0.02, 0.0, 0.0, 0.01, 0.03), 2.8),  # with the last, all share
    ],
)
def test_a_share_that_is_surely_better_than_both_beside_it_and_lies_above_that_of_groups_is_a_dip(
    shares, gains, chosen
):
    """Every client gains the same, so that all differences are sure."""
    losses = 1 - torch.tensor(gains)[:, None] + torch.tensor([0.1, 0.0, 0.2])
    assert shares[best_candidate(losses, torch.full((6,), 9.0), shares)] == chosen


def test_a_dip_that_chance_may_make_is_none():
    """One of four clients gains 0.08: 0.02 on average, with a standard error as large."""
    losses = torch.ones(6, 4) + torch.tensor([0.1, 0.02, 0.0, 0.0, 0.0, 0.1])[:, None]
    losses[4, 0] -= 0.08
    assert module._without_dip(4, losses, (0.0, 0.35, 0.7, 1.4, 2.8, 4.0)) == 4


FIVE = (0.0, 0.35, 0.7, 1.4, 2.8)
BEST = torch.ones(4)
NOISY = BEST + torch.tensor([-1.0, 1.1, 1.0, -0.9])  # 0.05 more on average, with a standard error of 0.58
WORSE = BEST + torch.tensor([0.4, 0.5, 0.5, 0.4])  # 0.45 more, with a standard error of 0.03


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ([WORSE, WORSE, WORSE, WORSE, BEST], 4),  # nothing else is as good
        ([WORSE, WORSE, WORSE, NOISY, BEST], 3),  # the way ends before the share of groups
        ([WORSE, WORSE, NOISY, NOISY, BEST], 2),  # it leads there,
        ([NOISY, NOISY, NOISY, NOISY, BEST], 2),  # and not farther
        ([WORSE, WORSE, NOISY, WORSE, BEST], 4),  # as good by chance, with a worse one on the way
        ([BEST, NOISY, NOISY, WORSE, WORSE], 2),  # from the other side
        ([BEST, NOISY, WORSE, WORSE, WORSE], 1),
        ([BEST, WORSE, NOISY, NOISY, NOISY], 0),  # alone
        ([NOISY, NOISY, BEST, NOISY, NOISY], 2),
    ],
)
def test_from_the_best_the_way_goes_to_the_share_of_groups_while_candidates_are_as_good(losses, chosen):
    assert narrow(torch.stack(losses), FIVE) == chosen


def test_the_tolerance_is_half_a_standard_error():
    """Differences of 0 and 2x: mean x, standard deviation sqrt(2) x, standard error x; of four clients less."""
    groups, more = (0.7, 1.4), torch.ones(4).double()
    pair = torch.tensor([[1.0, 1.2], [1.0, 1.0]]).double()
    assert narrow(pair, groups) == 1  # 0.1 is a whole standard error
    four = torch.stack([torch.tensor([1.0, 1.0, 1.1, 0.95]).double(), more])  # 0.0125, standard error 0.031
    assert narrow(four, groups) == 0
    four[0] += 0.005  # 0.0175, more than half of 0.031
    assert narrow(four, groups) == 1


def test_a_difference_of_half_a_percent_does_not_matter_however_sure_it_is():
    groups, best = (0.7, 1.4), torch.ones(4).double()
    assert narrow(torch.stack([best + 0.0049, best]), groups) == 0
    assert narrow(torch.stack([best + 0.0051, best]), groups) == 1


def test_sharing_must_show_that_it_pays_where_clients_are_as_well_off_alone():
    """30 phone users: alone is best, a little sharing costs a fifth of a percent, and much of it a lot."""
    spread = torch.tensor([0.999, 1.001, 0.998, 1.002]).double()

    def means(*values):
        return torch.tensor(values).double()[:, None] * spread

    assert narrow(means(0.4530, 0.4535, 0.4540, 0.4588, 0.7357), FIVE) == 0
    assert narrow(means(0.4600, 0.4530, 0.4540, 0.4588, 0.7357), FIVE) == 2  # it pays: how much hardly matters
    assert narrow(means(0.4530, 0.4535, 0.4540, 0.4542, 0.4545), FIVE) == 2  # nothing makes a difference
    assert narrow(means(0.4545, 0.4542, 0.4540, 0.4535, 0.4530), FIVE) == 2  # nor here, from the other side


SIX = (0.0, 0.35, 0.7, 1.4, 2.8, 5.6)
WIDE = torch.tensor([1.0, 1.0, 1.1, 1.6, 4.0, 14.0]).double()
UNSURE = torch.tensor([0.3, -0.3, 0.3, -0.3]).double() * torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0]).double()[:, None]


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ((1.000, 1.001, 1.002, 1.010, 1.039, 1.030), 5.6),  # at most 4 % more: the best of those that share widely,
        ((1.000, 1.001, 1.002, 1.010, 1.030, 1.036), 2.8),  # whichever that is
        ((1.000, 1.001, 1.002, 1.010, 1.041, 1.030), 0.0),  # one alone is chance: its better neighbour costs too much
        ((1.000, 1.001, 1.002, 1.010, 1.050, 1.041), 0.0),  # more than 4 %
        ((1.100, 0.980, 0.970, 0.980, 1.008, 1.0085), 2.8),  # who shares a little is nearly alone, too:
        ((1.100, 0.980, 0.970, 0.980, 1.011, 1.010), 0.7),  # 4 % of what was chosen are 0.0388
    ],
)
def test_clients_share_widely_rather_than_be_nearly_alone_if_it_costs_little(losses, chosen):
    """One step says nothing of the noise of later steps, which partners lower."""
    assert SIX[best_candidate(torch.tensor(losses).double()[:, None] + UNSURE, WIDE, SIX)] == chosen


@pytest.mark.parametrize(("spread", "chosen"), [(0.041, 5.6), (0.039, 0.0)])
def test_what_is_worse_by_more_than_chance_is_not_shared_widely(spread, chosen):
    """Two clients lose .02 + s and .02 - s: s is the standard error of the mean, and half of it is tolerated."""
    losses = torch.tensor([1.0, 1.006, 1.007, 1.01, 1.03, 1.02]).double()[:, None].repeat(1, 2)
    losses[4:] += torch.tensor([spread, -spread])
    assert SIX[best_candidate(losses, WIDE, SIX)] == chosen


@pytest.mark.parametrize(("fewest", "enough", "chosen"), [(1.9, 4.0, 2), (2.0, 4.0, 0), (1.9, 3.9, 0)])
def test_nearly_alone_are_less_than_two_partners_and_wide_are_four(fewest, enough, chosen):
    losses = torch.tensor([1.0, 1.02, 1.01]).double()[:, None] + UNSURE[[0, 0, 4]]
    partners = torch.tensor([fewest, 1.0, enough]).double()
    assert best_candidate(losses, partners, (0.0, 0.7, 1.4)) == chosen


def test_who_shares_widely_shares_as_groups_would_if_that_is_as_good():
    """The way to the share of groups leads over candidates that share widely, too, and not back to being alone."""
    losses = torch.tensor([1.000, 1.020, 1.0302, 1.0301, 1.030, 1.031]).double()[:, None] + UNSURE[[0, 0, 4, 4, 4, 4]]
    assert SIX[best_candidate(losses, torch.tensor([1.0, 1.1, 9.0, 9.5, 10.0, 10.0]), SIX)] == 0.7
    assert SIX[best_candidate(losses, torch.tensor([1.0, 1.1, 1.2, 9.5, 10.0, 10.0]), SIX)] == 1.4


def test_clients_that_are_all_alike_end_alone_only_if_that_is_sure():
    """50 clients of iid data: the losses of those who are alone are lower by 1 %, and by less than their error."""
    shares, partners = (0.0, 0.35, 0.7, 1.4, 2.8), torch.tensor([1.0, 45.0, 49.0, 50.0, 50.0])

    def chosen(lost, spread, more=0.0):
        """Two clients, of which one loses and the other gains by sharing: the error is the spread."""
        alone = torch.tensor([0.13, 0.13]).double()
        sharing = [alone + lost + k * more + torch.tensor([spread, -spread]) for k in range(4)]
        return shares[best_candidate(torch.stack([alone, *sharing]), partners, shares)]

    assert chosen(lost=0.0013, spread=0.0007) == 0.7
    assert chosen(lost=0.0013, spread=0.0006) == 0.0  # more than two standard errors
    assert chosen(lost=0.0013, spread=0.0024, more=0.0003) == 0.0  # it matters how widely they share: not all alike


def test_partners_are_counted_over_those_that_were_asked():
    """Alone a client has one partner, and where everybody shares by samples the inverse of the sum of squares."""
    clients = make_clients()
    got, n = outlook(clients), torch.tensor([client.n_train for client in clients]).double()
    assert got.partners.shape == (len(SHARES),)
    assert float(got.partners[0]) == pytest.approx(1)
    assert float(got.partners[-1]) == pytest.approx(float(n.sum() ** 2 / n.square().sum()), rel=1e-4)


def test_a_dip_that_no_neighbour_shares_is_chance():
    def chosen(*values):
        return narrow(torch.tensor(values).double()[:, None].expand(-1, 4), FIVE)

    assert chosen(0.537, 0.546, 0.543, 0.527, 0.569) == 0
    assert chosen(0.537, 0.546, 0.530, 0.527, 0.569) == 3  # a neighbour is better than all others too
    assert chosen(0.328, 0.301, 0.287, 0.306, 0.331) == 2  # the bottom of a valley, however deep
    assert chosen(0.520, 0.546, 0.543, 0.530, 0.529) == 0  # to be alone is like no other candidate: it needs no support


def test_candidates_that_all_clients_find_equal_leave_the_share_of_groups():
    chosen = narrow(torch.zeros(len(SHARES), 3), SHARES)
    assert SHARES[chosen] == mixing.SHARE


def test_infinite_losses_and_single_clients_leave_no_doubt():
    three = (0.0, 0.7, 1.4)
    assert narrow(torch.tensor([[math.inf, 0.0], [5.0, 5.0], [5.0, 9.0]]), three) == 1
    assert narrow(torch.tensor([[5.0, 5.0], [math.inf, 0.0], [math.nan, 0.0]]), three) == 0
    assert narrow(torch.tensor([[2.0], [2.1], [2.5]]), three) == 0


def test_groups_share_among_themselves_and_clients_that_are_all_alike_with_all():
    """Many samples of one teacher say the same; where labels are shifted, sharing with all would only harm."""

    def federation_of(shifted):
        teacher, clients = random((3, 5), seed=8), []
        for i in range(6):
            x, held_out = random((12, 5), seed=i), random((40, 5), seed=100 + i)
            shift = i % 2 if shifted else 0
            train, val = ((data, (4 * data @ teacher.T).argmax(1).add(shift) % 3) for data in (x, held_out))
            clients.append(replace(make_clients(FULL)[0], train=train, val=val, key=i))
        return clients

    chosen = {shifted: outlook(federation_of(shifted)) for shifted in (False, True)}
    reach = {}
    for shifted, got in chosen.items():
        federation = make_federation(federation_of(shifted))
        reports = collect_reports(federation, State(0, start(), ()), ReportGradient(3), batch_size=4)
        alpha = mixing.weights(reports.zeta, reports.q, reports.n, share=got.shares[got.chosen])
        reach[shifted] = mixing.same_group_mass(alpha, [i % 2 for i in range(6)])
    assert reach[True] > 0.9 and reach[False] < 0.7


@pytest.mark.parametrize("validated", [True, False])
def test_relabelling_clients_changes_no_bit(validated):
    clients, order = make_clients(), [2, 0, 3, 1]
    clients = with_validation(clients) if validated else clients
    one, other = outlook(clients), outlook([clients[i] for i in order])
    assert torch.equal(one.losses, other.losses) and one.chosen == other.chosen and one.work == other.work


@pytest.mark.parametrize("validated", [True, False])
def test_every_engine_finds_the_same(validated):
    clients = make_clients(WIDTHS)
    clients = with_validation(clients) if validated else clients
    tables = []
    for kind, workers in (("sequential", 1), ("threads", 2), ("processes", 2), ("batched", 1)):
        with opened(kind, workers, clients, make_shop(deep)) as engine:
            federation = Federation(clients, engine, Slicer(scalable(deep)), seed=3)
            reports = collect_reports(federation, State(0, start(deep), ()), ReportGradient(3), batch_size=4)
            tables.append(look_ahead(federation, reports, rows_by(reports), lr=0.4, batch_size=4).losses)
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    torch.testing.assert_close(tables[3], tables[0], rtol=1e-10, atol=1e-10)


def test_a_client_of_one_sample_does_not_decide_for_all():
    clients = make_clients(sizes=(9, 1, 12, 8))
    got = outlook(clients)
    assert got.losses.isfinite().all() and not got.losses[:, make_federation(clients).order.index(1)].any()
    assert got.losses[:, [k for k, i in enumerate(make_federation(clients).order) if i != 1]].all()


def test_networks_with_batch_norms_look_ahead_too():
    clients = make_clients((1.0, 0.5, 0.5, 0.25), shape=IMAGE, sizes=(9, 2, 3, 8))
    federation = make_federation(clients, model=ResNet)
    reports = collect_reports(federation, State(0, start(ResNet), ()), ReportGradient(3), batch_size=4)
    got = look_ahead(federation, reports, rows_by(reports), lr=0.4, batch_size=4)
    assert got.losses.isfinite().all()


# What it costs


def test_work_by_hand():
    """Every candidate at every step size on the 20 samples of each for validation, but no more than it trains on; the
    probe has 27 numbers and a direction as many, of 8 bytes each; a sample costs a third of a gradient's.
    """
    clients = with_validation(make_clients())
    work = outlook(clients).work
    tried = len(SHARES) * (len(module.RATES) - 1) + 1  # without a step all candidates are at one place
    assert work.client_steps == pytest.approx(sum(n * tried / 3 / 4 for n in (9, 7, 12, 8)))
    assert work.bytes_up == 4 * len(SHARES) * len(module.RATES) * 8  # whole tables
    assert work.bytes_down == 4 * (1 + len(SHARES)) * 27 * 8 and work.rounds == 1


def test_work_of_clients_without_validation_data_by_hand():
    """Two halves of 4, 3, 6 and 4 samples judge; each also takes a gradient of its whole shard."""
    work = outlook(make_clients()).work
    halves, tried = {9: 8, 7: 6, 12: 12, 8: 8}, len(SHARES) * (len(module.RATES) - 1) + 1
    assert work.client_steps == pytest.approx(sum((n + judges * tried / 3) / 4 for n, judges in halves.items()))


def test_no_more_clients_are_asked_than_suffice_whoever_comes_first(monkeypatch):
    monkeypatch.setattr(module, "CLIENTS", 2)
    clients, order = make_clients(), [2, 0, 3, 1]
    one, other = outlook(clients), outlook([clients[i] for i in order])
    assert one.losses.shape == (len(SHARES), 2) and torch.allclose(one.losses, other.losses, rtol=0, atol=1e-12)
