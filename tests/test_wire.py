"""Updates on the wire: every one survives being written down, and what cannot be read is refused."""

import json
from dataclasses import fields

import pytest

from hetperm.device import wire
from hetperm.device.gradients import BatchGradient, FullGradient, MeanLoss, ReportGradient, StepLosses
from hetperm.device.recipe import PLAIN, Recipe
from hetperm.device.rival_updates import Envelope, HeadThenBody, Meta, Mixture, Proximal, Scaled
from hetperm.device.updates import Distil, Ordered, Sgd

# One of every update, and the samples that it takes gradients of at a host that has 10 and at one that has 3. A loss
# counts as a third of a gradient.
UPDATES = [
    (Sgd(steps=5, batch_size=4, lr=0.1), 5 * 4, 5 * 3),
    (Sgd(steps=5, batch_size=4, lr=0.1, cap=0.2), 5 * 4, 5 * 3),
    (
        Sgd(steps=5, batch_size=4, lr=0.1, recipe=Recipe("adamw", weight_decay=0.1, accumulate=2, autocast=True)),
        5 * 4,
        5 * 3,
    ),
    (Ordered(steps=5, batch_size=4, lr=0.1, widths=(0.25, 1.0)), 5 * 4, 5 * 3),
    (Distil(steps=2, batch_size=4, lr=0.1, widths=(0.25, 0.5), weight=0.7, cap=0.2), 2 * 2 * 4, 2 * 2 * 3),
    (BatchGradient(batch_size=6, chunk=2), 6, 3),
    (FullGradient(chunk=2), 10, 3),
    (ReportGradient(batches=4, sketch=16, sketch_seed=2**62 + 1, chunk=2, whole_size=100), 10, 3),
    (ReportGradient(batches=4), 10, 3),
    (MeanLoss(chunk=2), 10 / 3, 3 / 3),
    (StepLosses(etas=(0.1, 0.2), most=7, candidates=5), 7 * 5 * 2 / 3, 7 * 5 * 2 / 3),
    (StepLosses(etas=(0.1, 0.2), most=3, candidates=5, halves=True), 2 * 5 * 2 / 3 + 10, 2 * 5 * 2 / 3 + 3),
    (Meta(steps=5, batch_size=4, lr=0.1, inner_lr=0.2, difference=None), 2 * 5 * 4, 2 * 5 * 3),
    (Meta(steps=5, batch_size=4, lr=0.1, inner_lr=0.2, difference=1e-3), 4 * 5 * 4, 4 * 5 * 3),
    (Envelope(steps=5, batch_size=4, lr=0.1, prox=2.0, inner_steps=3, inner_lr=0.2), 5 * 3 * 4, 5 * 3 * 3),
    (Mixture(steps=5, batch_size=4, lr=0.1, mix=0.3, adaptive=True), 2 * 5 * 4, 2 * 5 * 3),
    (Proximal(steps=5, batch_size=4, lr=0.1, prox=0.3), 2 * 5 * 4, 2 * 5 * 3),
    (
        HeadThenBody(steps=5, batch_size=4, lr=0.1, heads=("fc.weight", "fc.bias"), head_steps=2, head_lr=0.2),
        7 * 4,
        7 * 3,
    ),
    (Scaled(steps=5, batch_size=4, lr=0.1, scale=4.0, heads=("fc.weight",)), 5 * 4, 5 * 3),
    (MeanLoss(most=6), 6 / 3, 3 / 3),
]
every_update = pytest.mark.parametrize(("update", "of_ten", "of_three"), UPDATES)


@every_update
def test_an_update_that_is_written_as_json_is_read_as_the_same_update(update, of_ten, of_three):
    plain = wire.write(update)
    read = wire.read(json.loads(json.dumps(plain)))
    assert read == update and type(read) is type(update) and hash(read) == hash(update)
    left_out = {"recipe"} if getattr(update, "recipe", None) == PLAIN else set()
    assert set(plain) == {"update"} | {field.name for field in fields(update)} - left_out


@every_update
def test_an_update_says_how_many_samples_it_takes_gradients_of(update, of_ten, of_three):
    assert (update.samples(10), update.samples(3)) == pytest.approx((of_ten, of_three))


def test_every_update_on_the_wire_is_in_this_table():
    assert {type(update) for update, *_ in UPDATES} == set(wire.UPDATES.values())


@pytest.mark.parametrize("name", ["adam", None, 3])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=f"^unknown update {name!r}; known are sgd, ordered, distil, "):
        wire.read({"update": name, "steps": 5})


def test_plain_values_without_a_name_are_refused():
    with pytest.raises(ValueError, match=r"^unknown update None"):
        wire.read({"steps": 5, "batch_size": 4, "lr": 0.1})


@every_update
def test_a_key_too_many_is_refused_by_name(update, of_ten, of_three):
    name = wire.write(update)["update"]
    with pytest.raises(ValueError, match=f"^update '{name}' does not take 'momentum'; it takes "):
        wire.read(wire.write(update) | {"momentum": 0.9})


@pytest.mark.parametrize("name", ["sgd", "ordered", "distil", "batch-gradient", "report-gradient", "meta"])
def test_a_key_too_few_is_refused_by_name(name):
    update = next(update for update, *_ in UPDATES if isinstance(update, wire.UPDATES[name]))
    first = fields(update)[0].name
    plain = {key: value for key, value in wire.write(update).items() if key != first}
    with pytest.raises(ValueError, match=f"^update '{name}' is incomplete .*'{first}'"):
        wire.read(plain)


def test_an_update_that_has_no_name_is_not_written():
    class Own(Sgd):
        pass

    with pytest.raises(ValueError, match=r"^Own has no name on the wire; known are sgd, ordered"):
        wire.write(Own(steps=5, batch_size=4, lr=0.1))


def test_reading_leaves_the_plain_values_alone():
    plain = wire.write(next(update for update, *_ in UPDATES if isinstance(update, Ordered)))
    copy = dict(plain)
    wire.read(plain)
    assert plain == copy
