"""What the server learns about its clients: gradients at common or own parts, their distances and their noise."""

import itertools
import math

import pytest
import torch
from federation import (
    CLASSES,
    FULL,
    HIDDEN,
    SEED,
    engine_that_records,
    make_clients,
    make_federation,
    make_method,
    make_shop,
    scalable,
    start,
)
from reference import hetero
from reference_inputs import as_list, as_shards, kept
from torch import nn

from hetperm import mixing
from hetperm.device.gradients import ReportGradient
from hetperm.mixing import discrepancy
from hetperm.params import NotFinite, flat
from hetperm.randomness import generator_for, seed_for
from hetperm.server.estimate import EARLY, collect_reports, over_two_models, positions
from hetperm.server.slicer import Slicer
from hetperm.state import State, Work
from submodels import WHOLE

EVERYTHING = [list(range(size)) for size in HIDDEN]


def units_of(index):
    return EVERYTHING if index is WHOLE else kept(index)


def test_the_part_that_a_client_reports_is_the_gradient_of_the_masked_model():
    clients, slicer, d = make_clients(), Slicer(scalable()), sum(x.numel() for x in start().values())
    for i, extraction in itertools.product((0, 1, 3), ("static", "random", "rolling")):
        client = clients[i]
        index = slicer.index(client.width, extraction, seed=SEED, round=5, key=(client.key,))
        assert (index is WHOLE) == (client.width == 1)
        part, at = slicer.cut(start(), index), positions(start(), index)
        bench = make_shop().at(client.width)
        expected = flat(hetero.gradient(as_list(start()), units_of(index), as_shards(clients)[i]))
        sent = {"positions": at} | part
        got = ReportGradient(3, whole_size=d)(bench, sent, client.train, generator_for(0, "p"))
        torch.testing.assert_close(got.gradient, expected, rtol=0, atol=1e-13)
        outside = torch.ones(d, dtype=torch.bool).index_fill(0, at, False)
        assert len(at) == len(at.unique()) == sum(x.numel() for x in part.values())
        assert bool((got.gradient[outside] == 0).all())
        assert torch.equal(flat(list(start().values()))[at], flat(list(part.values())))
        update = ReportGradient(3, sketch=16, sketch_seed=9, whole_size=d)
        small = update(bench, sent, client.train, generator_for(0, "p"))
        assert torch.equal(small.gradient, discrepancy.sketch(got.gradient, 16, 9)) and small.noise == got.noise


@pytest.mark.parametrize("sketch", [None, 64])
def test_masked_discrepancies_are_those_of_embedded_gradients(sketch):
    clients = make_clients()
    federation = make_federation(clients)
    update = ReportGradient(3, sketch=sketch)
    reports = collect_reports(
        federation, State(1, start(), ()), update, batch_size=4, compare="masked", extraction="random"
    )
    gradients = []
    for client, shard in zip(clients, as_shards(clients), strict=True):
        index = federation.slicer.index(client.width, "random", seed=SEED, round=1, key=(client.key,))
        g = flat(hetero.gradient(as_list(start()), units_of(index), shard))
        gradients.append(discrepancy.sketch(g, sketch, seed_for(SEED, "sketch")) if sketch else g)
    expected = torch.stack([torch.stack([(a - b).square().sum() for b in gradients]) for a in gradients])
    torch.testing.assert_close(reports.zeta, expected, rtol=0, atol=1e-12)


def test_the_probe_is_the_part_that_the_smallest_client_can_hold():
    recording, tasks = engine_that_records()
    clients = make_clients((1.0, 0.5, 0.5, 0.25))
    reports = collect_reports(
        make_federation(clients, engine=recording), State(0, start(), ()), ReportGradient(3), batch_size=4
    )
    assert [task.width for task in tasks] == [0.25] * 4
    units = hetero.first(0.25, HIDDEN)
    gradients = [flat(hetero.gradient(as_list(start()), units, shard)) for shard in as_shards(clients)]
    expected = torch.stack([torch.stack([(a - b).square().sum() for b in gradients]) for a in gradients])
    torch.testing.assert_close(reports.zeta, expected, rtol=0, atol=1e-12)
    assert reports.n.tolist() == [9, 7, 12, 8]


def test_bytes_of_reports_by_hand():
    """The probe has 10 + 2 + 4 + 2 + 6 + 3 numbers of 8 bytes; noise and n_i are 16 bytes a client; 36 samples."""
    federation = make_federation(make_clients())
    plain = collect_reports(federation, State(0, start(), ()), ReportGradient(3), batch_size=4)
    sketched = collect_reports(federation, State(0, start(), ()), ReportGradient(3, sketch=16), batch_size=4)
    assert plain.work == Work(rounds=1, client_steps=36 / 4, bytes_down=4 * 27 * 8, bytes_up=4 * (27 * 8 + 16))
    assert sketched.work == Work(rounds=1, client_steps=36 / 4, bytes_down=4 * 27 * 8, bytes_up=4 * (16 * 8 + 16))


def test_the_noise_of_a_client_of_one_sample_is_that_of_others_and_unknown_if_nobody_has_two():
    reports = [
        collect_reports(
            make_federation(make_clients(FULL, sizes=sizes)), State(0, start(), ()), ReportGradient(3), batch_size=4
        )
        for sizes in ((9, 1, 12, 8), (1, 1, 1, 1))
    ]
    assert reports[0].q.isfinite().all() and (reports[0].q > 0).all() and reports[1].q is None


def test_an_unknown_comparison_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown discrepancy 'cosine'; use 'probe' or 'masked'"):
        collect_reports(
            make_federation(make_clients()), State(0, start(), ()), ReportGradient(3), batch_size=4, compare="cosine"
        )


def test_a_gradient_that_is_not_finite_is_named_with_epoch_and_client():
    w = start() | {"4.bias": torch.full((CLASSES,), float("inf"), dtype=torch.float64)}
    with pytest.raises(NotFinite, match=r"^epoch 3: client 0: the gradient is not finite"):
        collect_reports(make_federation(make_clients()), State(3, w, ()), ReportGradient(3), batch_size=4)


def test_gradients_whose_spread_is_too_large_for_a_number_are_named_with_epoch_and_client(monkeypatch):
    whole = discrepancy.mean_and_noise
    monkeypatch.setattr(discrepancy, "mean_and_noise", lambda *reports: (whole(*reports)[0], math.inf))
    with pytest.raises(NotFinite, match=r"^epoch 3: client 0: the spread of its gradients is inf; its inputs or its"):
        collect_reports(make_federation(make_clients()), State(3, start(), ()), ReportGradient(3), batch_size=4)


# Complexity in the weights


def test_widths_of_the_same_size_have_the_same_complexity():
    """0.07 and 0.0625 of eight channels are one channel: architectures do not differ, so neither do costs."""
    a, b = (make_method("perm", make_clients(widths)).begin() for widths in ((0.07, 0.0625, 0.07, 0.0625), (0.07,) * 4))
    assert torch.equal(a.alpha, b.alpha)


def test_the_complexity_that_counts_is_that_of_the_personal_models():
    """With everybody as small as the smallest client there is nothing to tell hosts apart by."""
    smallest = {"personal_width": "smallest"}
    one, other = (make_method("perm", make_clients(), vc_weight=weight, **smallest).begin() for weight in (0.0, 9.0))
    assert torch.equal(one.alpha, other.alpha)
    assert not torch.equal(one.alpha, make_method("perm", make_clients(), vc_weight=9.0).begin().alpha)


def test_micro_batches_of_a_model_with_batch_norm_have_two_samples_at_least():
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, CLASSES))

    client, bench = make_clients()[1], make_shop(normed, cut=False).full  # seven samples
    update = ReportGradient(8)
    assert update(bench, start(normed), client.train, generator_for(0, "m")).noise > 0
    three = tuple(tensor[:3] for tensor in client.train)
    noise = update(bench, start(normed), three, generator_for(0, "m")).noise
    assert noise != noise  # one batch of three has no spread: nan


# Reports at two models


def kept_reports(gradients, noise):
    """What is kept of reports that all came in epoch 0."""
    N = len(gradients)
    return {
        "gradient": torch.tensor(gradients),
        "noise": torch.tensor(noise, dtype=torch.float64),
        "epoch": torch.zeros(N, dtype=torch.long),
        "since": torch.tensor(0),
    }


def test_distances_at_two_models_are_added_in_units_of_their_noise():
    """Noise 2 at the present model, where clients are 2 apart; 0.5 at the early one, where they are 3 apart."""
    n, early = torch.tensor([10.0, 30.0]).double(), kept_reports([[0.0, 0.0], [0.0, 3.0]], [0.5, 0.5])
    zeta, q = over_two_models([torch.tensor([[1.0], [3.0]])], torch.tensor([2.0, 2.0]).double(), early, n)
    torch.testing.assert_close(zeta, torch.tensor([[0.0, 20.0], [20.0, 0.0]]).double())  # 4 / 2 + 9 / 0.5
    assert q.tolist() == [2.0, 2.0]  # 2 / 2 + 0.5 / 0.5
    _, q = over_two_models([torch.tensor([[1.0], [3.0]])], torch.tensor([4.0, 0.0]).double(), early, n)
    assert q.tolist() == [4 / 1 + 1, 0 / 1 + 1]  # the unit is the mean over samples: 10 of 40 have noise 4


def test_without_any_noise_there_is_no_unit_and_models_are_not_added():
    n, early = torch.ones(2).double(), kept_reports([[0.0], [3.0]], [0.0, 0.0])
    assert over_two_models([torch.tensor([[1.0], [3.0]])], torch.ones(2).double(), early, n) is None
    early = kept_reports([[0.0], [3.0]], [1.0, 1.0])
    assert over_two_models([torch.tensor([[1.0], [3.0]])], None, early, n) is None


def test_very_many_clients_are_compared_at_two_models_row_by_row(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    gradients, early = (torch.randn(6, 5, generator=generator).double() for _ in range(2))
    n, q = torch.arange(1.0, 7.0).double(), torch.rand(6, generator=generator).double()
    before = kept_reports(early.tolist(), [0.5] * 6) | {"gradient": early}
    dense, noise = over_two_models([gradients], q, before, n)
    monkeypatch.setattr(discrepancy, "DENSE_UP_TO", 2)
    rows, same = over_two_models([gradients], q, before, n)
    assert isinstance(rows, discrepancy.Distances) and torch.equal(noise, same)
    torch.testing.assert_close(rows[:], dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dense_up_to", [2000, 2])
def test_relabelling_clients_relabels_distances_at_two_models_to_the_bit(monkeypatch, dense_up_to):
    monkeypatch.setattr(discrepancy, "DENSE_UP_TO", dense_up_to)
    generator = torch.Generator().manual_seed(2)
    late, early = torch.randn(7, 9, generator=generator), torch.randn(7, 5, generator=generator)
    n, q, order = (
        torch.arange(3.0, 10.0).double(),
        torch.rand(7, generator=generator).double(),
        torch.randperm(7, generator=generator),
    )
    noise = torch.rand(7, generator=generator).double()

    def compared(rows):
        before = kept_reports(early[rows].tolist(), noise[rows].tolist()) | {"gradient": early[rows]}
        zeta, q_both = over_two_models([late[rows]], q[rows], before, n[rows])
        return zeta[:], q_both

    (zeta, both), (other, other_q) = compared(torch.arange(7)), compared(order)
    assert torch.equal(other, zeta[order][:, order]) and torch.equal(other_q, both[order])


def test_clients_report_once_at_the_early_model_and_it_counts_in_the_work():
    clients = make_clients()
    recording, tasks = engine_that_records()
    federation = make_federation(clients, engine=recording)
    probe = federation.slicer.cut(start(), federation.slicer.index(min(client.width for client in clients)))
    early = {name: 2 * x for name, x in probe.items()}
    plain = collect_reports(federation, State(0, start(), ()), ReportGradient(3), batch_size=4)
    asked = len(tasks)
    state = State(0, start(), (), memory={EARLY: early})
    both = collect_reports(federation, state, ReportGradient(3), batch_size=4)
    assert len(tasks) == 3 * asked and both.work.rounds == plain.work.rounds == 1
    assert both.work.client_steps == 2 * plain.work.client_steps and both.work.bytes_up == 2 * plain.work.bytes_up
    torch.testing.assert_close(both.zeta, plain.zeta, rtol=0, atol=0)
    assert plain.compared is None and not torch.allclose(both.for_weights[0], plain.for_weights[0])
    again = collect_reports(
        federation, State(1, start(), (), memory={**state.memory, **both.memory}), ReportGradient(3), batch_size=4
    )
    assert len(tasks) == 3 * asked and again.work.client_steps == 0  # nobody is asked again at the same models
    torch.testing.assert_close(again.for_weights[0], both.for_weights[0], rtol=1e-6, atol=1e-9)


def test_groups_that_one_model_serves_alike_are_told_apart_by_an_early_one():
    """At the present model all gradients are alike but for noise; at the early one the groups have opposite ones."""
    generator = torch.Generator().manual_seed(1)
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    early = torch.nn.functional.one_hot(group).double() * 10 + 0.1 * torch.randn(6, 2, generator=generator)
    late = 0.1 * torch.randn(6, 2, generator=generator).double()
    n, q = torch.full((6,), 20.0).double(), torch.full((6,), 0.02).double()
    zeta = discrepancy.pairwise(late)
    alone = mixing.weights(zeta, q, n)
    both = mixing.weights(
        *over_two_models([late], q, kept_reports([[0.0]] * 6, [0.02] * 6) | {"gradient": early}, n), n
    )
    same = group[:, None] == group
    assert float((alone * same).sum(1).min()) < 0.8 and float((both * same).sum(1).min()) == pytest.approx(1)
