"""Methods by name: their options from one flat table, and what tables may not say."""

from dataclasses import fields, is_dataclass

import pytest

from hetperm import Config
from hetperm.algorithms import partial_training, perm
from hetperm.config import ALGORITHMS
from hetperm.methods import FINE_TUNE_STEPS, METHODS, check_method_tables, options_for

STEPS = 10_000
PLAIN = {name for name in METHODS if METHODS[name].fixed.get("fine_tune_steps") == 0}


def flat(options):
    """All values of options, those of nested dataclasses beside the others."""
    out = {}
    for field in fields(options):
        value = getattr(options, field.name)
        out |= flat(value) if is_dataclass(value) else {field.name: value}
    return out


def leaves(name):
    return flat(options_for(name, Config(), steps=STEPS))


def test_every_algorithm_can_be_run_and_no_other():
    assert tuple(METHODS) == ALGORITHMS


@pytest.mark.parametrize("name", METHODS)
def test_what_the_configuration_says_is_an_option_of_every_method_that_has_it(name):
    said = {
        "epochs": 7,
        "local_steps": 3,
        "batch_size": 17,
        "tail_average": 0.25,
        "personal_lr": 0.4,
        "global_lr": 0.7,
        "warmup_rounds": 4,
    }
    values = flat(options_for(name, Config(**said), steps=STEPS))
    tuned = 0 if name in PLAIN or name == "fedrep" else FINE_TUNE_STEPS
    steps = Config().steps if METHODS[name].mixes else STEPS  # PERM has its budget from the configuration
    expected = {**said, "steps": steps, "lr": 0.7, "fine_tune_steps": tuned}
    for key in expected.keys() & values.keys():
        assert values[key] == expected[key], key
    assert {"epochs", "local_steps", "batch_size", "tail_average"} <= values.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_table_of_a_method_goes_before_the_configuration(name):
    table = {"local_steps": 9, "batch_size": 5, "tail_average": 0.75}
    config = Config(rivals={name: table}, local_steps=3, batch_size=17, tail_average=0.25)
    values = flat(options_for(name, config, steps=STEPS))
    assert table.items() <= values.items()
    others = flat(options_for("perm" if name != "perm" else "fedavg", config, steps=STEPS))
    assert (others["local_steps"], others["batch_size"], others["tail_average"]) == (3, 17, 0.25)


def test_the_options_of_perm_are_nested():
    config = Config(inplace_kd=0.8, nested="rolling", regularization=3.0, vc_weight=0.2, extraction="random")
    options = options_for("perm", config, steps=STEPS)
    assert isinstance(options, perm.Options)
    assert (options.visiting.inplace_kd, options.visiting.nested) == (0.8, "rolling")
    assert (options.mixing.regularization, options.mixing.vc_weight, options.extraction) == (3.0, 0.2, "random")


def test_defaults_fill_what_nobody_says():
    assert {"prox": 1.0, "inner_steps": 5, "server_step": 1.0}.items() <= leaves("pfedme").items()
    assert {"mix": 0.5, "adaptive": True}.items() <= leaves("apfl").items()
    assert leaves("ifca")["clusters"] == 2 and leaves("perfedavg")["variant"] == "first-order"
    assert leaves("fedavg-ft")["fine_tune_steps"] == FINE_TUNE_STEPS == 100
    assert leaves("heterofl-clustered")["clusters"] == 2 and leaves("ifca")["restarts"] == 1
    assert leaves("ditto")["prox"] == 1.0 and leaves("fedrep")["head_steps"] == 5
    assert {"draws": "step", "distil": 0.0}.items() <= leaves("fjord").items()
    assert {"scaler": False, "masked_loss": False}.items() <= leaves("heterofl").items()


def test_rates_that_nobody_sets_follow_the_rate_of_the_method():
    options = options_for("perfedavg", Config(personal_lr=0.7, rivals={"perfedavg": {"lr": 0.3}}), steps=STEPS)
    assert (options.lr, options.inner_lr, options.fine_tune_lr) == (0.3, 0.3, 0.3)
    assert options_for("fedrep", Config(rivals={"fedrep": {"lr": 0.3}}), steps=STEPS).head_lr == 0.3
    options = options_for("perfedavg", Config(rivals={"perfedavg": {"lr": 0.3, "inner_lr": 0.1}}), steps=STEPS)
    assert (options.inner_lr, options.fine_tune_lr) == (0.1, 0.3)


def test_fine_tuning_takes_half_of_the_steps_at_most():
    told = Config(rivals={"fedavg-ft": {"fine_tune_steps": 20}})
    assert options_for("fedavg-ft", Config(), steps=100).fine_tune_steps == 50
    assert options_for("fedavg-ft", told, steps=100).fine_tune_steps == 20


def test_what_makes_a_method_what_it_is():
    rules = {name: leaves(name) for name, method in METHODS.items() if method.options is partial_training.Options}
    extraction = {name: values["extraction"] for name, values in rules.items() if not name.endswith("-ft")}
    assert extraction == {
        "fedavg": "static", "heterofl": "static", "feddropout": "random", "fedrolex": "rolling", "fjord": "static"
    }  # fmt: skip
    assert {name for name, values in rules.items() if values["ordered"]} == {"fjord", "fjord-ft"}
    assert {name for name in rules if not name.endswith("-ft")} | {"ifca", "heterofl-clustered"} == PLAIN
    assert {name for name in METHODS if METHODS[name].finds_heads} == {"fedrep"}
    assert {name for name, method in METHODS.items() if method.mixes} == {"perm", "perm-two-stage"}
    one_size = {"fedavg", "fedavg-ft", "perfedavg", "pfedme", "apfl", "ifca"}
    assert {name for name, method in METHODS.items() if method.one_size} == one_size


def test_the_extraction_of_a_configuration_is_that_of_perm_and_not_of_its_rivals():
    config = Config(extraction="rolling")
    assert options_for("perm", config, steps=STEPS).extraction == "rolling"
    assert options_for("heterofl", config, steps=STEPS).extraction == "static"


# What tables may not say


def refusal(name, **table):
    with pytest.raises(ValueError) as error:
        check_method_tables(Config(rivals={name: table}))
    return str(error.value)


def test_an_unknown_key_is_refused_with_the_method_and_what_it_takes():
    for name in METHODS:
        assert refusal(name, wings=2).startswith(f"[{name}]: unknown key 'wings'; it takes ")


def test_a_misspelt_key_is_refused_with_the_right_one():
    assert refusal("pfedme", proxx=2.0) == "[pfedme]: unknown key 'proxx'; did you mean 'prox'?"
    assert "did you mean 'personal_lr'?" in refusal("perm", personal_lrr=0.1)  # which is nested


def test_what_makes_a_method_what_it_is_cannot_be_set_in_its_table():
    for name, method in METHODS.items():
        for key, value in method.fixed.items():
            assert refusal(name, **{key: value}).startswith(f"[{name}]: unknown key '{key}'; ")


@pytest.mark.parametrize("key", ["epochs", "steps"])
def test_what_is_the_same_for_all_methods_cannot_be_set_in_a_table(key):
    for name in METHODS:
        assert f"unknown key '{key}'" in refusal(name, **{key: 3})


WHOLE = "a whole number of at least 0 and at most 1,000,000"


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("pfedme", {"prox": -1.0}, "[pfedme]: prox is -1.0; it must be 0 or a number from 1e-12 to 1e38"),
        ("pfedme", {"prox": "1"}, "[pfedme]: prox is '1'; it must be 0 or a number from 1e-12 to 1e38"),
        ("pfedme", {"inner_steps": 2.5}, f"[pfedme]: inner_steps is 2.5; it must be {WHOLE}"),
        ("pfedme", {"inner_steps": 10**7}, f"[pfedme]: inner_steps is 10000000; it must be {WHOLE}"),
        ("ifca", {"lr": 1e39}, "[ifca]: lr is 1e+39; it must be a number from 1e-12 to 1e38"),
        (
            "local",
            {"lr": 10**400},
            f"[local]: lr is {str(10**400)[:100]}...; it must be a number from 1e-12 to 1e38",
        ),
        ("local", {"lr": 1e-320}, "[local]: lr is 1e-320; it must be a number from 1e-12 to 1e38"),
        ("local", {"lr": 0}, "[local]: lr is 0; it must be a number from 1e-12 to 1e38"),
        (
            "fedavg-ft",
            {"fine_tune_lr": -0.1},
            "[fedavg-ft]: fine_tune_lr is -0.1; it must be 0 or a number from 1e-12 to 1e38",
        ),
        ("ifca", {"clusters": 1_000_000}, "1000000 clusters: ifca takes at most 100"),
        ("pfedme", {"prox": True}, "[pfedme]: prox is True; it must be 0 or a number from 1e-12 to 1e38"),
        ("apfl", {"adaptive": 1}, "[apfl]: adaptive is 1; it must be true or false"),
        ("perfedavg", {"variant": 3}, "[perfedavg]: variant is 3; it must be a text, in quotes"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_what_it_must_be(name, table, message):
    assert refusal(name, **table) == message


def test_a_whole_number_will_do_for_a_number():
    options = options_for("pfedme", Config(rivals={"pfedme": {"prox": 2}}), steps=STEPS)
    assert options.prox == 2.0 and isinstance(options.prox, float)


def test_values_that_the_configuration_checks_are_checked_in_tables_too():
    assert "[fedavg]: batch_size" in refusal("fedavg", batch_size=0)
    assert "[local]: tail_average is 2; it must be a number from 0 to 1" in refusal("local", tail_average=2)


@pytest.mark.parametrize(
    ("method", "table", "sentence"),
    [
        ("perfedavg", {"variant": "fo"}, "unknown variant 'fo' of perfedavg; use 'first-order' or 'hessian-free'"),
        ("perfedavg", {"difference": 0}, "difference 0 of perfedavg must be above 0"),
        ("pfedme", {"inner_steps": 0}, "0 inner_steps: pfedme needs at least 1"),
        ("ifca", {"clusters": 0}, "0 clusters: ifca needs at least 1"),
        ("heterofl-clustered-ft", {"restarts": 0}, "0 restarts: ifca needs at least 1"),
        ("fjord-ft", {"draws": "epoch"}, "unknown draws 'epoch' of fjord; use 'step' or 'round'"),
        ("heterofl", {"draws": "round"}, "unknown key 'draws'"),
        ("fjord", {"scaler": True}, "unknown key 'scaler'"),
    ],
)
def test_what_a_rival_cannot_do_is_known_before_anything_is_trained(method, table, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_method_tables(Config(rivals={method: table}))
