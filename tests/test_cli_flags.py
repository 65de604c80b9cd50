"""Flags: how words become values, what is wrong with them in one line, and the groups of --help."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

from hetperm.bench.devices.options import Options as DeviceOptions
from hetperm.bench.speed.options import Options as SpeedOptions
from hetperm.checks import Names
from hetperm.cli import train
from hetperm.cli.flags import UsageError, field_docstrings, flag_of, parse
from hetperm.cli.main import guarded
from hetperm.cli.train import TOPICS, parse_train
from hetperm.config import FIELDS, SHIPPED, Config, load


def words_after(flag: str, page: str) -> str:
    """What a page of help says between a flag and the next."""
    return " ".join(page.split(f"{flag} ", 1)[1].split("\n  --", 1)[0].split())


# Values


def test_flags_are_the_fields_with_dashes():
    words = "--local-steps 3 --baselines local,apfl --seeds 0 1 2 --regularization 0.5 --quiet"
    config = parse_train(words.split())
    changes = {"local_steps": 3, "baselines": ("local", "apfl"), "seeds": (0, 1, 2), "regularization": 0.5}
    assert config == load("digits").override(quiet=True, **changes)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--epochs=3", "epochs", 3),
        ("--local_steps 3", "local_steps", 3),
        ("--epochs 3 --epochs 4", "epochs", 4),
        ("--out some/where", "out", Path("some/where")),
        ("--warmup-rounds None", "warmup_rounds", None),
        ("--regularization level", "regularization", "level"),
        ("--regularization 2", "regularization", 2.0),
        ("--baselines=", "baselines", ()),
        ("--seeds 3 4", "seeds", (3, 4)),
        ("--quiet", "quiet", True),
        ("--quiet --no-quiet", "quiet", False),
    ],
)
def test_a_word_is_read_as_its_field_is_typed(words, field, value):
    assert getattr(parse_train(words.split()), field) == value


def test_a_seed_takes_the_place_of_the_seeds_of_a_file(tmp_path):
    (tmp_path / "run.toml").write_text("seeds = [1, 2]")
    config = parse_train(["--config", str(tmp_path / "run.toml"), "--seed", "5"])
    assert (config.seed, config.seeds) == (5, ())


def test_an_empty_list_of_baselines_means_none():
    assert parse_train(["--baselines", ""]).baselines == ()


@pytest.mark.parametrize("kind", [DeviceOptions, SpeedOptions])
def test_without_flags_options_are_the_defaults(kind):
    assert parse(kind, [], prog="x") == kind()


# Files


@pytest.mark.parametrize("words", [["--config", "synthetic"], ["--config=synthetic"]])
def test_a_file_is_read_first_and_flags_win(words):
    config = parse_train(["--epochs", "3", *words])
    assert config == load("synthetic").override(epochs=3)


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.toml")))
def test_a_configuration_of_a_data_set_is_taken_for_that_data_set(name):
    config = load(name)
    if name == config.dataset:
        assert parse_train(["--dataset", name]) == config
    assert parse_train(["--config", name]) == config


def test_a_data_set_without_a_configuration_has_the_defaults():
    assert parse_train(["--dataset", "emnist"]) == Config(dataset="emnist")
    assert parse_train(["--dataset", "mnist", "--personal-lr", "0.01"]).personal_lr == 0.01


def test_an_option_of_several_lines_is_one_value_or_refused():
    assert parse_train(["--option", "model.hidden=[8,\n8]"]).model_options == {"hidden": [8, 8]}
    with pytest.raises(UsageError, match="holds several keys; give each an --option of its own"):
        parse_train(["--option", "local.lr=1\nx=2"])


def test_another_model_does_not_get_the_options_of_the_one_in_the_file():
    assert parse_train("--config synthetic --model mlp".split()).model_options == {}
    assert parse_train("--config synthetic --model logistic".split()).model_options == {"bias": False}


# Errors: a row for each kind; what is wrong with a value is told by Config (test_config.py)

WRONG = [
    ("--epoch 3", "unknown flag --epoch; did you mean --epochs?"),
    ("--zzz", "unknown flag --zzz; see --help"),
    ("--zzz=3", "unknown flag --zzz; see --help"),
    ("something", "not understood: something; see --help"),
    ("--epochs 3 4", "not understood: 4; see --help"),
    ("--epochs", "--epochs: the value is missing; see --help"),
    ("--epochs --quiet", "--epochs: the value is missing; see --help"),
    ("--quiet=3", "--quiet: it takes no value; see --help"),
    ("--epochs x", "--epochs: 'x' is not a whole number; see --help"),
    ("--epochs None", "--epochs: 'None' is not a whole number; see --help"),
    ("--personal-lr x", "--personal-lr: 'x' is not a number; see --help"),
    ("--personal-lr=--", "--personal-lr: '--' is not a number; see --help"),
    ("--seeds 0 a", "--seeds: 'a' is not a whole number; see --help"),
    ("--schedule rng", "--schedule: 'rng' is not one of 'colour', 'ring'; did you mean 'ring'?"),
    ("--schedule x", "--schedule: 'x' is not one of 'colour', 'ring'; see --help"),
    (
        "--regularization nois",
        "--regularization: 'nois' is not a number or one of 'noise', 'level'; did you mean 'noise'?",
    ),
    ("--vc-weight rw", "--vc-weight: 'rw' is not a number or one of 'raw'; did you mean 'raw'?"),
    ("--epochs 0", "epochs is 0; it must be a whole number of at least 1"),
    ("--vc-weight -1e-3", "vc_weight is -0.001; it must be a number of at least 0, or 'raw', the paper's"),
    ("--seeds 0 -1", "seeds is -1; it must be a whole number of at least 0"),
    ("--personal-lr nan", "personal_lr is nan; it must be a number from 1e-12 to 1e38"),
    ("--baselines local,heterofl-tf", "unknown algorithm 'heterofl-tf'; did you mean 'heterofl-ft'?"),
    ("--config digts", "there is no configuration 'digts'; did you mean 'digits'?"),
    (
        "--config nope",
        "there is no configuration 'nope'; give a TOML file, or one of cifar10, digit-pairs, digits, mnist, mnist-iid, "
        "mnist-label-shift, paper-faithful, synthetic",
    ),
    ("--config digits --config synthetic", "--config is given 2 times (digits, synthetic); give it once"),
    ("--seeds 0 1 --seed 3", "--seed and --seeds exclude each other; leave one of them out"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[words for words, _ in WRONG])
def test_a_bad_flag_is_one_line_and_status_2(words, sentence, capsys):
    assert guarded(train.main, words.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"error: {sentence}\n")


def test_a_flag_that_is_given_twice_is_named_and_the_last_one_counts(caplog):
    words = "--steps 300 --option ditto.prox=2 --baselines ditto --quiet"
    assert parse_train(words.split()).steps == 300 and not caplog.messages
    config = parse_train([*words.split(), *"--steps=200 --option ditto.prox=3 --quiet".split()])
    assert (config.steps, config.rivals["ditto"]) == (200, {"prox": 3})
    assert caplog.messages == [
        f"{what} is given twice; the last one counts" for what in ("--steps", "--option ditto.prox")
    ]


def test_an_experiment_is_named_and_takes_no_other_configuration():
    with pytest.raises(UsageError, match="an experiment has the configuration of its name; leave --config out"):
        parse_train(["--config", "digits"], base=load("synthetic"))


# Help


def test_every_field_with_a_flag_stands_in_one_topic():
    listed = list(chain.from_iterable(TOPICS.values()))
    assert len(listed) == len(set(listed))
    assert set(FIELDS) - set(listed) == {"model_options", "rivals"}  # tables of a file
    assert set(listed) <= set(FIELDS)
    assert list(TOPICS) == ["run", "devices", "data", "model", "training", "local steps", "mixing", "computing"]


def test_help_lists_every_flag_under_its_topic(capsys):
    with pytest.raises(SystemExit):
        parse_train(["--help"])
    page = capsys.readouterr().out
    for title, names in TOPICS.items():
        section = page.split(f"\n{title}:\n", 1)[1].split("\n\n", 1)[0]
        assert [name for name in names if f"  {flag_of(name)}" not in section] == [], title


@dataclass(frozen=True)
class Sample:
    """A sample."""

    steps: int = 3
    """Takes 100 % of
    the steps."""
    names: Names = ("a", "b")
    sizes: tuple[int, ...] = ()


def test_help_is_the_docstring_of_a_field_with_its_default(capsys):
    assert field_docstrings(Sample) == {"steps": "Takes 100 % of\n    the steps."}
    with pytest.raises(SystemExit) as stop:
        parse(Sample, ["--names", "c", "-h"], prog="x")
    page = capsys.readouterr().out
    assert not stop.value.code
    assert words_after("--steps", page) == "INT Takes 100 % of the steps. (default: 3)"
    assert words_after("--names", page) == "NAME,NAME,... (default: a,b)"
    assert words_after("--sizes", page) == "INT [INT ...] (default: none)"


@pytest.mark.parametrize("kind", [Config, DeviceOptions, SpeedOptions])
def test_every_field_says_what_it_is(kind):
    assert set(field_docstrings(kind)) == set(kind.__dataclass_fields__)


@pytest.mark.parametrize("word", ["", " "])
def test_an_empty_path_is_not_the_present_folder(word):
    with pytest.raises(UsageError, match=r"^--out: the path is empty; name a file or folder"):
        parse_train(["--out", word, "--resume"])
