"""Laws that methods for clients of different sizes obey: labels, order, sizes, and what they reduce to."""

import functools
import itertools

import pytest
import torch
from federation import (
    FULL,
    IMAGE,
    LOOPS,
    SIZED,
    VARIANTS,
    WIDTHS,
    ResNet,
    engine_that_records,
    equal,
    make_clients,
    make_method,
    make_shop,
    part_of,
    perm_options,
    run,
    same,
    scalable,
    start,
)
from torch.nn import functional as F

from hetperm.algorithms import perm
from hetperm.device.bench import Workshop
from hetperm.device.updates import Distil
from hetperm.engine.sequential import Sequential
from hetperm.methods import METHODS
from hetperm.mixing import complexity
from hetperm.server.federation import Federation
from hetperm.server.visits import scheduled


@functools.cache
def usual(name, variant="plain"):
    return run(make_method(name, make_clients(), **VARIANTS[variant]))


# What methods reduce to


@pytest.mark.parametrize("name", [name for name in SIZED if not name.endswith("-ft") or name == "heterofl-ft"])
def test_at_full_width_every_method_is_the_homogeneous_one_bit_for_bit(name):
    clients = make_clients(FULL)
    idle = {"extraction": "random", "nested": "rolling", "discrepancy": "masked", "inplace_kd": 0.5}
    one = run(make_method(name, clients, **idle if name in LOOPS else {}))
    other = run(make_method(name, clients, setup={"cut": False}))
    assert same(one, other) and one.work == other.work


@pytest.mark.parametrize("name", LOOPS)
def test_clients_of_one_width_below_one_train_the_narrow_model_as_if_it_were_all(name):
    """Models cut from w at half width, and a federation whose whole model is that half: the same alpha and models."""
    options = {"server_mix": "alpha", "tail_average": 0.5}
    cut = run(make_method(name, make_clients((0.5,) * 4), **options))
    clients, shop = make_clients(FULL), Workshop(scalable().extract(0.5).module, F.cross_entropy)
    federation = Federation(clients, Sequential(clients, shop), seed=3)
    whole = run(METHODS[name].make(federation, part_of(start(), 0.5), perm_options(**options)))
    torch.testing.assert_close(cut.alpha, whole.alpha, rtol=0, atol=1e-12)
    for a, b in zip(cut.deployed, whole.deployed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["perm", "local", "feddropout", "fjord"])
def test_a_width_that_keeps_every_channel_is_full_width(name):
    a, b = (run(make_method(name, make_clients(widths))) for widths in ((1.0, 0.97, 0.97, 1.0), FULL))
    if name == "fjord":  # has two widths to draw from, which are the same
        torch.testing.assert_close(a.deployed[0], b.deployed[0], rtol=0, atol=1e-12)
    else:
        assert same(a, b)


# Labels and order


def by_key(clients):
    """A schedule that the keys of clients decide, in place of their labels."""

    def rounds(alpha, kind, generator):
        order = sorted(range(len(clients)), key=lambda i: clients[i].key)
        found = scheduled(alpha[order][:, order], kind, generator)
        return [[(order[i], order[j]) for i, j in visits] for visits in found]

    return rounds


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *itertools.product(LOOPS, ("odd", "mixed", "parallel", "denoised")),
        *((name, variant) for name in SIZED[2:] for variant in ("plain", "away")),
    ],
)
def test_relabelling_clients_relabels_weights_and_models(name, variant, monkeypatch):
    clients, order = make_clients(), [2, 0, 3, 1]
    states = []
    for labelled in (clients, [clients[i] for i in order]):
        monkeypatch.setattr(perm, "scheduled", by_key(labelled))
        states.append(run(make_method(name, labelled, **VARIANTS[variant])))
    one, other = states
    assert equal(one.w, other.w)
    if one.alpha is not None:
        assert torch.equal(one.alpha[order][:, order], other.alpha)
    for new, old in enumerate(order):
        assert equal(one.v[old], other.v[new]) and equal(one.deployed[old], other.deployed[new])
    asked, absent = ([counts[old] for old in order] if counts else [] for counts in (one.work.asked, one.work.absent))
    assert (asked, absent) == (list(other.work.asked), list(other.work.absent))
    assert one.work.figures == other.work.figures and one.work.missed == other.work.missed


class Shuffling(Sequential):
    """Runs the tasks of a call in another order, and gives their outcomes in task order."""

    def run(self, tasks):
        order = torch.randperm(len(tasks), generator=torch.Generator().manual_seed(0)).tolist()
        done = dict(zip(order, super().run([tasks[k] for k in order]), strict=True))
        return [done[k] for k in range(len(tasks))]


@pytest.mark.parametrize(
    ("name", "variant"), [("perm", "odd"), ("perm", "mixed"), ("feddropout-ft", "plain"), ("fjord", "plain")]
)
def test_the_order_in_which_tasks_run_does_not_matter(name, variant):
    other = run(make_method(name, make_clients(), setup={"engine": Shuffling}, **VARIANTS[variant]))
    assert same(usual(name, variant), other) and usual(name, variant).work == other.work


# What hosts are handed


@pytest.mark.parametrize(
    ("name", "variant", "widths"),
    [
        *itertools.product(["perm"], VARIANTS, [(0.07, 1.0, 0.0625, 0.1), (1.0, 0.97, 0.5, 0.499)]),
        *itertools.product(["perm-two-stage"], ["odd", "mixed"], [WIDTHS]),
        *itertools.product(SIZED[2:], ["plain"], [(1.0, 0.97, 0.25, 0.249)]),
    ],
)
def test_no_host_is_ever_handed_more_than_it_can_hold(name, variant, widths):
    recording, tasks = engine_that_records()
    clients, cut = make_clients(widths), scalable()
    run(make_method(name, clients, setup={"engine": recording}, **VARIANTS[variant]))
    assert {task.host for task in tasks} == set(range(4))
    for task in tasks:
        can, counts = clients[task.host].width, cut.axis_map.counts(task.width)
        # The own model of Ditto is at its client anyway, and is not trained at the same time.
        model = {key: x for key, x in task.params.items() if key != "positions" and not key.startswith("own ")}
        assert task.width <= can
        assert all(tuple(x.shape) == cut.axis_map.shape(key, counts) for key, x in model.items())
        assert sum(x.numel() for x in model.values()) <= complexity.num_params(cut, can)
        assert train_bytes(task.width) <= train_bytes(can)
        inside = getattr(task.update, "widths", ())
        assert all(width <= task.width for width in inside)
        if isinstance(task.update, Distil):
            assert all(cut.axis_map.counts(width) != counts for width in inside)


@functools.cache
def train_bytes(width):
    return scalable().cost(width, batch_size=4).train_bytes


# Norms and precision


def statistics(shop):
    return {
        f"{width} {name}": x.clone() for width in (1.0, 0.5, 0.13) for name, x in shop.at(width).module.named_buffers()
    }


@pytest.mark.parametrize("variant", ["odd", "mixed"])
def test_batch_norms_use_the_batch_and_leave_running_statistics_alone(variant):
    clients, results = make_clients((1.0, 0.5, 0.13, 0.5), shape=IMAGE), []
    for fill in (0.0, 1e6):
        shop = make_shop(ResNet)
        for width in (1.0, 0.5, 0.13):
            for name, x in shop.at(width).module.named_buffers():
                x.fill_(fill if name.endswith("mean") else 1)
        before = statistics(shop)
        algorithm = make_method("perm", clients, model=ResNet, setup={"shop": shop}, local_steps=2, **VARIANTS[variant])
        results.append(run(algorithm, 1))
        assert equal(before, statistics(shop))
    assert same(*results)
    assert all(x.isfinite().all() for params in results[0].deployed for x in params.values())


@pytest.mark.parametrize(
    ("name", "variant", "widths"),
    [
        ("perm", "odd", (0.0625, 0.07, 1.0, 0.5)),
        ("perm", "mixed", (0.01, 0.02, 0.03, 0.04)),
        *itertools.product(["local", "fjord-ft", "feddropout"], ["plain"], [(0.07, 0.0625, 0.0626, 0.9)]),
    ],
)
def test_float32_networks_of_one_channel_a_group_are_trained(name, variant, widths):
    dtype, axis_map = torch.float32, scalable(ResNet, torch.float32).axis_map
    clients = make_clients(widths, shape=IMAGE, dtype=dtype)
    state = run(make_method(name, clients, model=ResNet, dtype=dtype, local_steps=2, **VARIANTS[variant]), 1)
    for params, width in zip(state.deployed, widths, strict=True):
        counts = axis_map.counts(width)
        for key, x in params.items():
            assert x.dtype == dtype and x.isfinite().all() and tuple(x.shape) == axis_map.shape(key, counts)
    assert 1 in axis_map.counts(min(widths))
