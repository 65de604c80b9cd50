"""Configurations: defaults, files, what is refused and in which words."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from hetperm.checks import checked, hints_of
from hetperm.config import FIELDS, KEYS, SHIPPED, Config, check_field, find, load, read


def written(folder: Path, text: str) -> Path:
    path = folder / "x.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_those_of_the_design():
    config = Config()
    assert (config.num_clients, config.samples_per_client, config.local_steps, config.batch_size) == (20, None, 5, 32)
    assert (config.steps, config.epochs, config.step_cap) == (800, 12, 0.2)
    assert (config.personal_lr, config.global_lr) == (None, None)  # by the kind of the model
    assert (config.warmup, config.warmup_rounds, config.start) == ("ordered", None, "nested")
    assert (config.decay, config.rate_rule, config.first_alpha) == ("linear", "partners", "estimated")
    assert (config.share, config.alpha_every) == ("look-ahead", 6)
    assert (config.tail_average, config.step_rule, config.regularization, config.noise_batches) == (
        0.5,
        "max",
        "noise",
        8,
    )
    assert (config.dataset, config.partition, config.model, config.algorithm) == (
        "digits",
        "label-shift:2",
        "mlp",
        "perm",
    )
    assert (config.validation_share, config.participation, config.dtype, config.device) == (
        0.15,
        1.0,
        "float32",
        "auto",
    )
    assert (config.capacity_profile, config.widths_from, config.baselines) == (
        "mobile",
        "profile",
        ("local", "heterofl-ft"),
    )
    assert (config.extraction, config.nested, config.personal_width) == ("static", "static", "own")
    assert (config.discrepancy, config.vc_weight, config.inplace_kd, config.label_mask) == ("probe", 0.05, 0, False)
    assert (config.engine, config.workers, config.resume) == ("auto", 1, False)


def test_every_field_is_checked_by_its_annotation():
    assert list(hints_of(Config)) == list(FIELDS)
    for name in FIELDS:
        assert check_field(name, getattr(Config(), name)) == getattr(Config(), name)
        with pytest.raises(ValueError, match=f"{name} |unknown algorithm"):
            check_field(name, object())  # which no field takes


def test_a_field_is_called_as_asked():
    with pytest.raises(ValueError, match=r"^\[local\]: tail_average is 2; it must be a number from 0 to 1$"):
        check_field("tail_average", 2, "[local]: tail_average")


def test_choices_are_those_of_the_annotation():
    assert checked(Literal["a", "b"], "letter", "b") == "b"
    for value in ("c", None, ["a"], 3):
        with pytest.raises(ValueError, match=r"unknown letter .*; write 'a' or 'b'"):
            checked(Literal["a", "b"], "letter", value)


def test_keys_of_a_file_are_the_fields_but_for_the_tables_of_rivals():
    assert set(FIELDS) - set(KEYS) == {"rivals"}


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(regularization=0.3, alpha_steps=7, sketch=256, projection=2, seeds=(3, 1), data_dir="some/where"),
        Config(baselines=(), model_options={"bias": False, "hidden": [3, 4]}, rivals={"fedavg-ft": {"lr": 0.5}}),
        Config(final_lr=0.1, tail_average=0, steps=9, name="mine", dtype="float64"),
        Config(capacity_profile="iot", widths_from="budget", extraction="rolling", nested="skip", vc_weight="raw"),
        Config(personal_width="smallest", server_mix="alpha", inplace_kd=1, discrepancy="masked", label_mask=True),
    ],
    ids=["defaults", "numbers", "tables", "paper", "sizes", "ours"],
)
def test_a_configuration_comes_back_from_its_toml_as_it_was(config, tmp_path):
    assert load(written(tmp_path, config.to_toml())) == config


def test_where_a_run_is_written_and_what_it_says_is_not_in_its_toml():
    computed = {"resume": True, "workers": 2}
    assert Config(out="there", quiet=True, **computed).to_toml() == Config().to_toml()


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("*.toml")), ids=lambda path: path.relative_to(SHIPPED).as_posix())
def test_every_shipped_configuration_is_understood(path):
    if path.parent == SHIPPED:
        from hetperm.methods import check_method_tables

        check_method_tables(load(path))
        assert find(path.stem) == path
    elif path.parent.name == "profiles":
        from hetperm.profile import load as profile

        assert profile(path.stem) == profile(path)


def test_digits_are_the_defaults_with_a_small_model_and_rates_of_rivals():
    digits = load("digits")
    assert digits.model_options == {"hidden": [64, 64]}
    assert digits.override(model_options={}, rivals={}) == Config()


def test_synthetic_is_the_set_up_of_the_paper():
    config = load("synthetic")
    assert (config.num_clients, config.local_steps, config.epochs, config.personal_lr) == (50, 10, 20, 1.0)
    assert (config.model, config.model_options) == ("logistic", {"bias": False})
    assert config.capacity_profile == "homogeneous"


def test_a_whole_number_is_good_for_a_real_one_and_lists_for_tuples():
    config = Config(personal_lr=1, baselines=["local"], seeds=[1, 2])
    assert (config.personal_lr, config.baselines, config.seeds) == (1.0, ("local",), (1, 2))
    assert isinstance(config.personal_lr, float)
    assert Config(baselines="local, apfl").baselines == ("local", "apfl")
    assert Config(baselines="").baselines == ()


def test_the_algorithm_is_not_compared_with_itself():
    assert Config(algorithm="local").baselines == ("heterofl-ft",)
    assert Config(algorithm="heterofl-ft").baselines == ("local",)


def test_override_changes_some_fields_and_knows_the_others():
    assert Config().override(epochs=3) == Config(epochs=3)
    with pytest.raises(ValueError, match=r"unknown field 'epoch'; did you mean 'epochs'\?"):
        Config().override(epoch=3)


BAD = [
    ({"num_clients": 0}, "num_clients is 0; it must be a whole number of at least 1"),
    ({"num_clients": 2.5}, "num_clients is 2.5; it must be a whole number of at least 1"),
    ({"epochs": True}, "epochs is True; it must be a whole number of at least 1"),
    ({"warmup_rounds": -1}, "warmup_rounds is -1; it must be a whole number of at least 0"),
    ({"noise_batches": 1}, "noise_batches is 1; it must be a whole number of at least 2"),
    ({"personal_lr": 0}, "personal_lr is 0; it must be a number from 1e-12 to 1e38"),
    ({"personal_lr": float("nan")}, "personal_lr is nan; it must be a number from 1e-12 to 1e38"),
    ({"global_lr": "0.1"}, "global_lr is '0.1'; it must be a number from 1e-12 to 1e38"),
    ({"tail_average": 1.5}, "tail_average is 1.5; it must be a number from 0 to 1"),
    ({"validation_share": 1}, "validation_share is 1; it must be a number from 0 to below 1"),
    ({"participation": 0}, "participation is 0; it must be a number above 0 and up to 1"),
    ({"regularization": 0}, "regularization is 0; it must be 'noise', 'level' or a number above 0, the paper's lambda"),
    ({"regularization": -1.0}, "regularization is -1.0; it must be 'noise', 'level' or a number above 0"),
    ({"regularization": float("nan")}, "regularization is nan; it must be 'noise', 'level' or a number above 0"),
    ({"regularization": True}, "regularization is True; it must be 'noise', 'level' or a number above 0"),
    ({"batch_size": 0}, "batch_size is 0; it must be a whole number of at least 1"),
    ({"regularization": "nois"}, "regularization is 'nois'; it must be 'noise', 'level' or a number above 0"),
    ({"step_rule": "maxx"}, "unknown step_rule 'maxx'; did you mean 'max'?"),
    ({"schedule": "?"}, "unknown schedule '?'; write 'colour' or 'ring'"),
    ({"dtype": "float16"}, "unknown dtype 'float16'; did you mean"),
    ({"algorithm": "prem"}, "unknown algorithm 'prem'; did you mean 'perm'?"),
    ({"algorithm": "?"}, "unknown algorithm '?'; known are perm, perm-two-stage, local"),
    ({"baselines": ("fedavgft",)}, "unknown algorithm 'fedavgft'; did you mean 'fedavg-ft'?"),
    ({"baselines": ("local", "local")}, "baselines names 'local' twice; once is enough"),
    ({"baselines": 3}, "baselines is 3; it must be a list, empty for none"),
    ({"seeds": (1, -1)}, "seeds is -1; it must be a whole number of at least 0"),
    ({"name": "a/b"}, "name is 'a/b'; it must be the name of a folder in runs/ (out takes a path)"),
    ({"dataset": ""}, "dataset is ''; it must be a name, in quotes"),
    ({"download": 1}, "download is 1; it must be true or false"),
    ({"data_dir": 3}, "data_dir is 3; it must be a path, in quotes"),
    ({"out": "a\0b"}, r"out is 'a\x00b'; it must be a path, in quotes"),
    ({"out": Path("a\0b")}, r"out is 'a\x00b'; it must be a path, in quotes"),
    ({"out": Path("b" * 300)}, f"out is '{'b' * 99}...; no name in a path may be longer than 255 bytes"),
    ({"model_options": 3}, "model_options is 3; it must be a table of options"),
    ({"model_options": {3: 4}}, "model_options has the key 3; it must be the name of an option, in quotes"),
    ({"model_options": {"act": None}}, "model_options: act is None; it must be a finite number, a text, true, false"),
    ({"model_options": {"act": [int]}}, "model_options: act is [<class 'int'>]; it must be a finite number, a text"),
    ({"rivals": {"local": {"lr": {1}}}}, "[local]: lr is {1}; it must be a finite number, a text, true, false"),
    ({"name": "a" * 300}, "it must be at most 200 characters, as a folder is"),
    ({"algorithm": np.arange(2)}, "unknown algorithm array([0, 1]); known are perm"),
    ({"rivals": {"fedavg": {"lr": float("inf")}}}, "[fedavg]: lr is inf; it must be a finite number"),
    ({"rivals": {"fedav": {}}}, "unknown algorithm 'fedav'; did you mean 'fedavg'?"),
    ({"final_lr": 0.1}, "set tail_average to 0 or leave final_lr out"),
    (
        {"alpha_steps": 3, "regularization": "level"},
        "leave alpha_steps out, or set regularization to 'noise' or a number",
    ),
    (
        {"share": 0.7, "regularization": "level"},
        "share 0.7 is for regularization 'noise' and regularization is 'level'",
    ),
    (
        {"early_report": 0.5, "discrepancy": "masked"},
        "early_report 0.5 is for discrepancy 'probe' and discrepancy is 'masked'; leave one of them out",
    ),
    (
        {"early_report": 0.5, "regularization": 1.0},
        "early_report 0.5 is for regularization 'noise' or 'level' and regularization is 1; leave one of them out",
    ),
    ({"out": "a\nb"}, "out is 'a\\nb'; it must not hold control characters"),
    ({"out": Path("a\x1b[1m")}, "out is 'a\\x1b[1m'; it must not hold control characters"),
    ({"momentum": 0.5}, "momentum 0.5 is for optimizer 'momentum' and optimizer is 'sgd'; set optimizer to 'momentum'"),
    ({"share": 0.0, "regularization": 0.3}, "regularization is 0.3; leave one of them out"),
    ({"capacity_profile": ""}, "capacity_profile is ''; it must be a name, in quotes"),
    ({"widths_from": "budgets"}, "unknown widths_from 'budgets'; did you mean 'budget'?"),
    ({"extraction": "statik"}, "unknown extraction 'statik'; did you mean 'static'?"),
    ({"extraction": "skip"}, "unknown extraction 'skip'; write 'static' or 'random' or 'rolling'"),
    ({"nested": "roling"}, "unknown nested 'roling'; did you mean 'rolling'?"),
    ({"discrepancy": "mask"}, "unknown discrepancy 'mask'; did you mean 'masked'?"),
    ({"personal_width": "small"}, "unknown personal_width 'small'; did you mean 'smallest'?"),
    ({"server_mix": "Alpha"}, "unknown server_mix 'Alpha'; did you mean 'alpha'?"),
    ({"inplace_kd": -1}, "inplace_kd is -1; it must be a number from 0 to 1000"),
    ({"inplace_kd": float("inf")}, "inplace_kd is inf; it must be a number from 0 to 1000"),
    ({"projection": float("inf")}, "projection is inf; it must be a number of at least 1e-6"),
    ({"vc_weight": -1}, "vc_weight is -1; it must be a number of at least 0, or 'raw', the paper's"),
    ({"vc_weight": "rw"}, "vc_weight is 'rw'; it must be a number of at least 0, or 'raw', the paper's"),
    ({"label_mask": "yes"}, "label_mask is 'yes'; it must be true or false"),
    ({"resume": 1}, "resume is 1; it must be true or false"),
    ({"workers": 0}, "workers is 0; it must be a whole number of at least 1"),
    ({"workers": 100_000}, "workers is 100000; it must be at most 256"),
    ({"sketch": 1_000_000_000}, "sketch is 1000000000; it must be at most 1,048,576"),
    ({"sketch": 1}, "sketch is 1; it must be a whole number of at least 16"),
    ({"epochs": 10**26}, f"epochs is {10**26}; it must be at most 1,000,000"),
    ({"num_clients": 10**7}, "num_clients is 10000000; it must be at most 100,000"),
    ({"steps": 10**12}, "steps is 1000000000000; it must be at most 1,000,000,000"),
    ({"seed": 2**64}, f"seed is {2**64}; it must be at most 18,446,744,073,709,551,615"),
    ({"personal_lr": 1e-320}, "personal_lr is 1e-320; it must be a number from 1e-12 to 1e38"),
    ({"projection": 1e-300}, "projection is 1e-300; it must be a number of at least 1e-6"),
    ({"step_cap": 1e-300}, "step_cap is 1e-300; it must be 0 or a number of at least 1e-6"),
    ({"name": "a\x1b]0;b"}, "name is 'a\\x1b]0;b'; it must not hold control characters"),
    (
        {"participation": 1e-12},
        "participation 1e-12 lets 2.4e-10 of 20 clients take part in 12 epochs together; raise it to at least 0.05",
    ),
    (
        {"steps": 100, "warmup_rounds": 20},
        "warmup_rounds 20 of 5 local_steps each take 100 steps, and steps is 100; lower warmup_rounds, leave it out",
    ),
    ({"steps": 10, "warmup_rounds": 2, "algorithm": "local", "baselines": ("perm",)}, "and steps is 10"),
    ({"personal_lr": 10**400}, "it must be a number from 1e-12 to 1e38"),
    ({"share": 10**400}, "it must be 'look-ahead' or a number from 0 to 1e+100"),
    ({"share": 1e308}, "share is 1e+308; it must be 'look-ahead' or a number from 0 to 1e+100"),
    ({"engine": "thread"}, "unknown engine 'thread'; did you mean 'threads'?"),
    (
        {"engine": "sequential", "workers": 2},
        "engine 'sequential' has one worker and workers is 2; use engine 'threads' or 'auto'",
    ),
    (
        {"server_mix": "alpha", "nested": "random"},
        "server_mix 'alpha' mixes models over shared channels, and nested 'random' trains others; "
        "set nested to 'static' or 'skip', or server_mix to 'none'",
    ),
    ({"server_mix": "alpha", "nested": "rolling"}, "set nested to 'static' or 'skip', or server_mix to 'none'"),
]


@pytest.mark.parametrize(("settings", "sentence"), BAD, ids=[sentence[:40] for _, sentence in BAD])
def test_a_value_that_makes_no_sense_is_refused_in_one_sentence(settings, sentence):
    with pytest.raises(ValueError) as caught:
        Config(**settings)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_perm_has_a_warm_up_that_the_steps_must_pay_for():
    assert Config(steps=10, warmup_rounds=2, algorithm="local", baselines=("fedavg",)).steps == 10
    assert Config(steps=0, warmup_rounds=1000).warmup_rounds == 1000
    assert Config(steps=11, warmup_rounds=2).steps == 11


FILES = [
    ("local_step = 5", "unknown key 'local_step'; did you mean 'local_steps'?"),
    ("rivals = 5", "unknown key 'rivals'; the keys are the flags of hetperm train, with _ for -"),
    ("fedavg = 3", "fedavg is 3; it must be a table of options, [fedavg]"),
    ("[fedavg-fd]\nlr = 1", "unknown table 'fedavg-fd'; did you mean 'fedavg-ft'?"),
    ("epochs = 0", "epochs is 0; it must be a whole number of at least 1"),
    ("epochs = ", "is not TOML"),
]


@pytest.mark.parametrize(("text", "sentence"), FILES, ids=[text.splitlines()[0] for text, _ in FILES])
def test_what_is_wrong_with_a_file_is_said_with_its_name(text, sentence, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no configuration 'nope'; give a TOML file, or one of ") as caught:
        load("nope")
    assert str(caught.value).rpartition("one of ")[2] == ", ".join(sorted(path.stem for path in SHIPPED.glob("*.toml")))
    with pytest.raises(ValueError, match=r"there is no configuration '\.\./configs/digits'"):  # a path from elsewhere
        load("../configs/digits")
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xef\xbb\xbfepochs = 3\r\n")  # as some editors write it
    assert load(path).epochs == 3
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        load(path)
    with pytest.raises(ValueError, match="is no file; a configuration is a TOML file"):  # or a pipe, which never ends
        read(tmp_path)
