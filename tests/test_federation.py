"""Federation: seeds, widths, parts that are handed out, and tasks that fail."""

from dataclasses import replace

import pytest
import torch
from federation import WIDTHS, engine_that_records, equal, make_clients, make_federation, part_of, start

from hetperm.device.gradients import MeanLoss
from hetperm.device.updates import Ordered, Sgd
from hetperm.engine.task import Task
from hetperm.params import NotFinite
from hetperm.randomness import seed_for
from hetperm.state import Work
from submodels import WHOLE


def test_clients_are_ordered_by_their_keys():
    assert make_federation(make_clients((1.0,) * 5)).order == [4, 1, 3, 0, 2]  # keys 7, 3, 11, 5, 2


def test_seeds_are_those_of_the_run():
    assert make_federation(make_clients(), seed=9).seed_for("visit", 1, 2) == seed_for(9, "visit", 1, 2)


def test_own_models_are_as_large_as_clients_can_hold_or_as_all_can():
    federation = make_federation(make_clients())
    assert federation.own_widths() == list(WIDTHS) and federation.own_widths("smallest") == [0.25] * 4


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
def test_every_client_is_handed_the_part_of_its_width_key_and_round(extraction):
    federation = make_federation(make_clients())
    indices = federation.handed_out(extraction, 4)
    assert indices[0] is WHOLE
    for index, client in zip(indices[1:], federation.clients[1:], strict=True):
        assert index == federation.slicer.index(client.width, extraction, seed=3, round=4, key=(client.key,))


def test_training_at_home_draws_from_the_stream_of_round_and_key():
    recording, tasks = engine_that_records()
    federation = make_federation(make_clients(), engine=recording)
    models, updates = [part_of(start(), width) for width in WIDTHS], [Sgd(2, 4, 0.1 * (i + 1)) for i in range(4)]
    trained = federation.train_at_home(updates, models, round=6)
    assert [task.seed for task in tasks] == [seed_for(3, "global", 6, key) for key in (7, 3, 11, 5)]
    assert [task.update for task in tasks] == updates and [task.host for task in tasks] == [0, 1, 2, 3]
    assert [task.width for task in tasks] == list(WIDTHS) and tasks[2].label == "round 6: client 2"
    assert all(
        model.keys() == part.keys() and not equal(model, part) for model, part in zip(trained, models, strict=True)
    )


def test_work_counts_mini_batches_of_a_host_and_the_multiply_adds_of_the_widths_that_are_trained():
    """Hosts of 9 and 2 samples, batches of 4: five steps of each; at width w a forward pass takes 100 w, a gradient 3
    times that. A loss of the whole shard counts as a third of a gradient.
    """
    federation = replace(make_federation(make_clients((1.0, 0.5), sizes=(9, 2))), macs=lambda width: 100 * width)
    at = [{"params": {}, "host": host, "seed": 0, "width": width} for host, width in ((0, 1.0), (1, 0.5))]
    work = federation.work_of([Task(Sgd(5, 4, 0.1), **place) for place in at], 4)
    assert work == Work(client_steps=5 + 5, macs=3 * (5 * 4 * 100 + 5 * 2 * 50))
    work = federation.work_of([Task(MeanLoss(), **place) for place in at], 4)
    assert work.client_steps == pytest.approx(9 / 4 / 3 + 2 / 2 / 3) and work.macs == pytest.approx(9 * 100 + 2 * 50)
    assert federation.work_of([Task(Ordered(5, 4, 0.1, (0.5, 1.0)), **at[0])], 4).macs == 3 * 5 * 4 * 75
    assert federation.work_at_home([Sgd(5, 4, 0.1)] * 2, 4) == Work(client_steps=10, macs=3 * (2000 + 500))


def fail(bench, params, shard, generator):
    raise ArithmeticError("no good")


def test_a_task_that_fails_is_an_error_that_says_which_it_was():
    tasks = [Task(Sgd(1, 4, 0.1), start(), host=0, seed=0), Task(fail, start(), host=0, seed=0, label="epoch 3: here")]
    with pytest.raises(RuntimeError, match=r"^epoch 3: here: no good$"):
        make_federation(make_clients()).run(tasks, round=0)


@pytest.mark.parametrize("several", [False, True])
def test_a_model_that_is_not_finite_is_an_error_that_says_whose_it_was(several):
    bad = {"x": torch.tensor([1.0, float("nan")])}

    def broken(bench, params, shard, generator):
        return ({"x": torch.zeros(2)}, bad) if several else bad

    with pytest.raises(NotFinite, match=r"^epoch 3: there: x is not finite"):
        make_federation(make_clients()).train([Task(broken, start(), host=0, seed=0, label="epoch 3: there")], round=0)
