"""The batched engine: what is in a stack beside a model does not change a bit of it."""

from dataclasses import replace

import pytest
import torch
from engine_models import deep, result
from federation import CLASSES, FULL, equal, make_clients, make_shop, same

from hetperm.device import chain
from hetperm.device.gradients import FullGradient, ReportGradient
from hetperm.device.updates import Sgd
from hetperm.engine import batched
from hetperm.engine.batched import Batched
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Failure, Task


def tasks_for(clients, params, update=None):
    return [Task(update or Sgd(4, 4, 0.3), params, host=j, seed=90 + j) for j in range(len(clients))]


@pytest.mark.parametrize("name", ["perm", "heterofl-ft", "fjord-ft"])
def test_the_number_of_workers_decides_no_bit_of_a_batched_run(name):
    assert same(result("batched", name), result("batched", name, workers=3))


def test_neither_do_the_size_of_stacks_and_the_order_of_tasks(monkeypatch):
    clients, shop = make_clients(FULL, dtype=torch.float32), make_shop(deep, torch.float32)
    tasks = tasks_for(clients, shop.full.take())
    whole = Batched(clients, shop).run(tasks)
    reverse = Batched(clients, shop).run(tasks[::-1])[::-1]
    monkeypatch.setattr(batched, "ENTRIES", 1)  # a stack for each model
    monkeypatch.setattr(chain, "ENTRIES", 1)  # and a gather for each step
    single = Batched(clients, shop).run(tasks)
    assert all(map(equal, whole, reverse)) and all(map(equal, whole, single))


def test_hosts_with_fewer_samples_than_a_batch_are_batched_by_themselves():
    clients, shop = make_clients(FULL, sizes=(9, 2, 1, 2)), make_shop(deep)
    tasks = tasks_for(clients, shop.full.take(), Sgd(7, 4, 0.3))
    for one, other in zip(Sequential(clients, shop).run(tasks), Batched(clients, shop).run(tasks), strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-12) for name in one)


def test_tasks_of_one_stack_may_have_step_sizes_of_their_own():
    clients, shop = make_clients(FULL), make_shop(deep)
    tasks = [replace(task, update=Sgd(4, 4, lr)) for lr, task in enumerate(tasks_for(clients, shop.full.take()))]
    for one, other in zip(Sequential(clients, shop).run(tasks), Batched(clients, shop).run(tasks), strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-12) for name in one)


def test_a_task_on_validation_data_is_not_trained_on_the_shard():
    clients, shop = make_clients(FULL), make_shop(deep)
    clients = [replace(client, val=clients[j - 1].train) for j, client in enumerate(clients)]
    tasks = [replace(task, part="val") for task in tasks_for(clients, shop.full.take())]
    for one, other in zip(Sequential(clients, shop).run(tasks), Batched(clients, shop).run(tasks), strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-12) for name in one)


def test_models_of_a_batched_run_do_not_hold_each_other_in_memory():
    clients, shop = make_clients(FULL), make_shop(deep)
    for model in Batched(clients, shop).run(tasks_for(clients, shop.full.take())):
        for x in model.values():
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_a_batched_task_that_fails_fails_alone():
    clients, shop = make_clients(FULL), make_shop(deep)
    x, y = clients[2].train
    clients[2] = replace(clients[2], train=(x, y + CLASSES))  # classes that the model does not have
    outcomes = Batched(clients, shop).run(tasks_for(clients, shop.full.take()))
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [False, False, True, False]
    assert outcomes[2].task.host == 2


@pytest.mark.parametrize("chunk", [2, 512])
def test_gradients_that_clients_report_are_those_of_the_sequential_engine(chunk):
    clients, shop = make_clients(FULL), make_shop(deep)
    one, other = Sequential(clients, shop), Batched(clients, shop)
    tasks = tasks_for(clients, shop.full.take(), FullGradient(chunk))
    for a, b in zip(one.run(tasks), other.run(tasks), strict=True):
        assert torch.allclose(a, b, atol=1e-13)
    tasks = tasks_for(clients, shop.full.take(), ReportGradient(3, chunk=chunk))
    for a, b in zip(one.run(tasks), other.run(tasks), strict=True):
        assert torch.allclose(a.gradient, b.gradient, atol=1e-13)
        assert a.noise == pytest.approx(b.noise, rel=1e-10)
