"""Methods: their names, and how the options of each come from tables, configuration and defaults."""

import pytest

from hetperm.config import ALGORITHMS, Config
from hetperm.methods import METHODS, check_method_tables, options_for


def test_every_algorithm_can_be_run_and_no_other():
    assert tuple(METHODS) == ALGORITHMS


def test_the_options_of_a_method_come_from_its_table_then_the_configuration_then_defaults():
    config = Config(local_steps=7, personal_lr=0.4, rivals={"fedavg-ft": {"lr": 2, "fine_tune_lr": 0.5}})
    options = options_for("fedavg-ft", config, steps=1000)
    assert (options.lr, options.fine_tune_lr, options.fine_tune_steps) == (2.0, 0.5, 300)
    assert (options.local_steps, options.steps) == (7, 1000)
    assert options_for("local", config, steps=1000).lr == 0.4


def test_fine_tuning_takes_at_most_half_of_the_steps():
    assert options_for("fedavg-ft", Config(), steps=100).fine_tune_steps == 50


def test_every_method_has_its_options_without_a_table():
    for method in ALGORITHMS:
        assert options_for(method, Config(epochs=7), steps=1000).epochs == 7, method


TABLES = [
    ("fedavg-ft", {"fine_tune_step": 3}, "[fedavg-ft]: unknown key 'fine_tune_step'; did you mean 'fine_tune_steps'?"),
    ("local", {"epochs": 3}, "[local]: unknown key 'epochs'; it takes local_steps, batch_size, lr, tail_average"),
    ("local", {"lr": "fast"}, "[local]: lr is 'fast'; it must be a number of at least 0"),
    ("ifca", {"clusters": 2.5}, "[ifca]: clusters is 2.5; it must be a whole number of at least 0"),
    ("apfl", {"adaptive": 1}, "[apfl]: adaptive is 1; it must be true or false"),
    ("perfedavg", {"variant": 1}, "[perfedavg]: variant is 1; it must be a text, in quotes"),
    ("local", {"tail_average": 2}, "[local]: tail_average is 2; it must be a number from 0 to 1"),
    ("fedavg", {"lrr": 1}, "[fedavg]: unknown key 'lrr'; did you mean 'lr'?"),
    ("pfedme", {"server_mix": 0.5}, "[pfedme]: unknown key 'server_mix'; did you mean 'server_step'?"),
]


@pytest.mark.parametrize(("method", "table", "sentence"), TABLES, ids=[f"{m} {next(iter(t))}" for m, t, _ in TABLES])
def test_a_table_that_its_method_does_not_understand_is_refused(method, table, sentence):
    with pytest.raises(ValueError) as caught:
        check_method_tables(Config(rivals={method: table}))
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("method", "table", "sentence"),
    [
        ("perfedavg", {"variant": "fo"}, "unknown variant 'fo' of perfedavg; use 'first-order' or 'hessian-free'"),
        ("perfedavg", {"difference": 0}, "difference 0 of perfedavg must be above 0"),
        ("pfedme", {"inner_steps": 0}, "0 inner_steps: pfedme needs at least 1"),
        ("ifca", {"clusters": 0}, "0 clusters: ifca needs at least 1"),
    ],
)
def test_what_a_rival_cannot_do_is_known_before_anything_is_trained(method, table, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_method_tables(Config(rivals={method: table}))
