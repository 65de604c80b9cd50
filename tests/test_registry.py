"""Names from outside: what can be registered, by which way it comes in, and what is refused."""

import json
import sys
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tiny_run import train
from torch import nn

import hetperm
from hetperm import Config, config, plugins
from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.local_only import local_only
from hetperm.algorithms.steps import FineTuneOptions, RivalOptions
from hetperm.cli.train import OF_PERM, parse_train
from hetperm.config import ADDED
from hetperm.data import DATASETS, WITH_PATH, load
from hetperm.methods import METHODS, check_method_tables, leaf_types, options_for
from hetperm.metrics import METRICS, metric_of
from hetperm.params import NotFinite
from hetperm.runs.client_models import load_client
from hetperm.state import State, Work
from submodels import zoo

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(autouse=True)
def nothing_stays_registered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = (METHODS, DATASETS, zoo.MODELS, METRICS)
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)
    ADDED.clear()
    WITH_PATH.difference_update(WITH_PATH - {"imagefolder", "leaf", "npz"})


# By a call


@dataclass(frozen=True)
class Warm(RivalOptions):
    warmth: float = 0.5
    rounds: int = 3


def test_an_algorithm_is_known_with_its_options():
    hetperm.register_algorithm("warm", local_only, Warm, defaults={"rounds": 7})
    assert Config(algorithm="warm").algorithm == "warm"
    options = options_for("warm", Config(rivals={"warm": {"warmth": 1}}, local_steps=3), steps=100)
    assert (options.warmth, options.rounds, options.local_steps) == (1.0, 7, 3)
    with pytest.raises(ValueError, match=r"\[warm\]: unknown key 'warmht'; did you mean 'warmth'"):
        check_method_tables(Config(rivals={"warm": {"warmht": 1}}))
    with pytest.raises(ValueError, match=r"\[warm\]: rounds is 0.5; it must be a whole number"):
        check_method_tables(Config(rivals={"warm": {"rounds": 0.5}}))


def test_one_can_register_again_but_not_over_what_comes_with_hetperm():
    for options in (RivalOptions, Warm):
        hetperm.register_algorithm("warm", local_only, options)
    assert METHODS["warm"].options is Warm
    for register, name in (
        (hetperm.register_algorithm, "perm"),
        (hetperm.register_dataset, "digits"),
        (hetperm.register_model, "mlp"),
        (hetperm.register_metric, "accuracy"),
    ):
        with pytest.raises(ValueError, match=f"'{name}' comes with hetperm; give yours another name"):
            register(name, local_only)


@pytest.mark.parametrize("name", ["My Own", "", "a:b", 3, "-x"])
def test_a_name_that_no_flag_can_hold_is_refused(name):
    with pytest.raises(ValueError, match="a name has small letters, digits, hyphens and underscores"):
        hetperm.register_model(name, nn.Linear)


def test_what_is_no_algorithm_is_refused():
    with pytest.raises(TypeError, match="algorithm 'warm': 3 is no function"):
        hetperm.register_algorithm("warm", 3)
    with pytest.raises(TypeError, match=r"algorithm 'warm': options is .*dict.*; it must be a dataclass"):
        hetperm.register_algorithm("warm", local_only, dict)
    with pytest.raises(ValueError, match="algorithm 'epochs': files have a key of that name"):
        hetperm.register_algorithm("epochs", local_only)
    with pytest.raises(TypeError, match="algorithm 'warm': defaults is 3; it must be a table of options, or None"):
        hetperm.register_algorithm("warm", local_only, defaults=3)
    with pytest.raises(ValueError, match="'cold' of the defaults is no option of Warm"):
        hetperm.register_algorithm("warm", local_only, Warm, defaults={"cold": 1})

    @dataclass(frozen=True)
    class Odd(RivalOptions):
        widths: tuple = ()

    with pytest.raises(TypeError, match=r"option widths is annotated .*; it must be one of float, int, bool, str"):
        hetperm.register_algorithm("odd", local_only, Odd)


def test_a_data_set_gets_what_is_wanted_and_its_path():
    seen = []

    def mine(wanted):
        seen.append(wanted)
        pair = torch.zeros(4, 2), torch.arange(4) % 2
        clients = tuple(hetperm.Client(pair, test=pair) for _ in range(wanted.num_clients))
        return hetperm.data.Problem(clients, in_channels=2, num_classes=2, image_size=None, name=wanted.name)

    hetperm.register_dataset("mine", mine, takes_path=True)
    problem = load("mine:~/x.csv", num_clients=2, partition="iid", seed=5, max_test_samples=3)
    assert seen[0].path == Path("~/x.csv").expanduser() and (seen[0].seed, seen[0].partition) == (5, "iid")
    assert [len(client.test[1]) for client in problem.clients] == [3, 3]
    with pytest.raises(ValueError, match="unknown dataset 'mine'; did you mean 'mine:PATH'"):
        load("mine", num_clients=2, partition="iid", seed=0)
    hetperm.register_dataset("mine", mine)  # now without
    assert load("mine", num_clients=1, partition="iid", seed=0).clients


def test_a_strangers_data_set_with_another_number_of_clients_is_warned_about(caplog):
    sizes = {"in_channels": 2, "num_classes": 2, "image_size": None, "name": "mine"}
    hetperm.register_dataset("mine", lambda wanted: hetperm.data.Problem((CLIENT,), **sizes))
    for asked in (1, 4):
        assert len(load("mine", num_clients=asked, partition="iid", seed=0).clients) == 1
    said = "the clients of dataset 'mine' are 1, and 4 were asked for; set num_clients to the number it has"
    assert caplog.messages == [said]


def wordless(kind):
    raise kind


def test_what_a_strangers_function_does_wrong_is_said_with_its_name():
    def broken(wanted):
        raise StopIteration("no more")

    hetperm.register_dataset("mine", broken)
    with pytest.raises(ValueError, match=r"dataset 'mine', which is not hetperm's, failed \(StopIteration: no more\)"):
        load("mine", num_clients=2, partition="iid", seed=0)
    hetperm.register_dataset("mine", lambda wanted: 3)
    with pytest.raises(ValueError, match="dataset 'mine' returned 3; it must be of Problem"):
        load("mine", num_clients=2, partition="iid", seed=0)
    for kind in (ValueError, OSError):
        hetperm.register_dataset("mine", lambda wanted, kind=kind: wordless(kind))
        with pytest.raises(ValueError, match=rf"dataset 'mine', which is .* failed \({kind.__name__}\); HETPERM_"):
            load("mine", num_clients=2, partition="iid", seed=0)
    hetperm.register_dataset("mine", lambda wanted: wordless(MemoryError))
    with pytest.raises(MemoryError):
        load("mine", num_clients=2, partition="iid", seed=0)
    hetperm.register_model("mine", lambda **sizes: 3)
    with pytest.raises(ValueError, match="model 'mine' returned 3; it must be of Module"):
        zoo.build("mine", in_channels=1, num_classes=2, image_size=None)
    hetperm.register_model("mine", lambda **sizes: torch.nn.Linear(60, 2, device="meta"))
    with pytest.raises(ValueError, match="weight of the model is on the meta device, which holds no numbers"):
        hetperm.run(hetperm.Config(dataset="synthetic", model="mine", num_clients=2, capacity_profile="homogeneous"))
    hetperm.register_algorithm("mine", lambda *parts: None)
    with pytest.raises(ValueError, match="algorithm 'mine' returned None; it must be of Algorithm"):
        METHODS["mine"].make(None, {}, None)


def sized(*, in_channels, num_classes, image_size, hidden=4, depth=1):
    return nn.Linear(in_channels, num_classes)


@pytest.mark.parametrize(
    ("build", "options", "sentence"),
    [
        (sized, {"hiden": 3}, r"^model 'mine' has no option hiden; did you mean 'hidden'\?$"),
        (sized, {"foo": 3}, "^model 'mine' has no option foo; it takes hidden, depth$"),
        (
            lambda in_channels, num_classes, image_size: None,
            {"foo": 3},
            "^model 'mine' has no option foo; it takes none$",
        ),
        (
            lambda sizes: None,
            {},
            "model 'mine' takes no in_channels; its function must take in_channels, num_classes, image_size by name",
        ),
        (lambda **sizes: wordless(TypeError("my own")), {"foo": 3}, r"failed \(TypeError: my own\)"),
    ],
)
def test_a_strangers_model_that_lacks_an_option_is_said_to(build, options, sentence):
    hetperm.register_model("mine", build)
    with pytest.raises(ValueError, match=sentence):
        zoo.build("mine", in_channels=2, num_classes=2, image_size=None, **options)
    hetperm.register_model("mine", partial(sized, hidden=2))
    assert zoo.build("mine", in_channels=2, num_classes=2, image_size=None, depth=2).out_features == 2


CLIENT = hetperm.Client((torch.rand(4, 2), torch.arange(4) % 2))


def shifted(state):
    """The state with every number of the models of clients one larger, in place."""
    for model in state.v:
        for x in model.values():
            x.add_(1)
    return replace(state, r=state.r + 1)


def narrow(model):
    return {name: x[:1] for name, x in model.items()}


@pytest.mark.parametrize(
    ("begin", "epoch", "sentence"),
    [
        (lambda state: None, None, "algorithm 'mine' returned None; it must be of State"),
        (lambda state: {}["k"], None, r"algorithm 'mine', which is not hetperm's, failed \(KeyError: 'k'\)"),
        (lambda state: sys.exit(0), None, r"algorithm 'mine', which is not hetperm's, failed \(SystemExit: 0\)"),
        (lambda state: replace(state, r=5), None, "a State whose r is 5 at the beginning; it must be 0"),
        (lambda state: replace(state, v=state.v[:1]), None, "whose v is 1 of them; it must be a tuple of 2 models"),
        (lambda state: replace(state, v=list(state.v)), None, "whose v is a list; it must be a tuple of 2 models"),
        (
            lambda state: replace(state, v=tuple(map(narrow, state.v))),
            None,
            r"weight of client 0's model is torch.float32 of shape \(1, 2\); it must be torch.float32 of \(2, 2\)",
        ),
        (
            lambda state: replace(state, v=tuple({name: x.long() for name, x in model.items()} for model in state.v)),
            None,
            "in which weight of client 0's model is torch.int64 of shape",
        ),
        (lambda state: replace(state, tail=state.v[:1]), None, "whose tail is not None, nor a tuple of 2 models"),
        (lambda state: replace(state, w=None), None, "whose w is None; it must be a model"),
        (lambda state: replace(state, memory={"mean": torch.ones(2)}), None, "whose memory is no table of models"),
        (
            lambda state: replace(state, work=Work(visits=-1)),
            None,
            "whose work has visits -1; it must be a whole",
        ),
        (lambda state: replace(state, work=3), None, "whose work is 3; it must be a Work of numbers from 0"),
        (lambda state: replace(state, v=({}, {})), None, "in which weight of client 0's model is no tensor"),
        (lambda state: replace(state, alpha=torch.eye(3)), None, r"whose alpha is .*; it must be None or a tensor of"),
        (lambda state: state, lambda state: state, "a State whose r is 0 after epoch 0; it must be 1"),
        (lambda state: state, lambda state: 1 // 0, "failed .ZeroDivisionError"),
    ],
)
def test_a_state_of_a_strangers_algorithm_that_a_run_cannot_use_is_refused(begin, epoch, sentence):
    def mine(federation, start, options):
        return Algorithm(lambda: begin(State(0, start, (start, start))), epoch)

    hetperm.register_algorithm("mine", mine)
    with pytest.raises(ValueError, match=sentence):
        hetperm.fit(nn.Linear(2, 2), [CLIENT, CLIENT], Config(steps=40, epochs=2, algorithm="mine", baselines=()))


def fit_changed(changes, finish=None, one_size=False, **settings):
    """Run an algorithm that only counts epochs, with changes to the state of each, in the folder "run"."""

    def mine(federation, start, options):
        def epoch(state):
            state = replace(state, r=state.r + 1)
            return replace(state, **changes(state))

        return Algorithm(lambda: State(0, start, (start, start)), epoch, finish)

    hetperm.register_algorithm("mine", mine, one_size=one_size)
    clients = [replace(CLIENT, test=CLIENT.train)] * 2
    config = Config(**{"epochs": 2, "steps": 40, "algorithm": "mine", "baselines": (), "out": "run", **settings})
    torch.manual_seed(0)
    return hetperm.fit(nn.Linear(2, 2), clients, config)


def kept(x):
    return {"mean": {"x": x}}


def scaled(state, factor):
    return tuple({name: x * factor for name, x in model.items()} for model in state.v)


@pytest.mark.filterwarnings("ignore:.*beta state", "ignore:.*prototype stage")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (lambda state: {"r": float(state.r)}, "whose r is 1.0 after epoch 0; it must be 1"),
        (lambda state: {"r": bool(state.r)}, "whose r is True after epoch 0; it must be 1"),
        (lambda state: {"v": ({**state.v[0], "x": torch.ones(1)},) * 2}, "client 0's model has 'x', and none of its"),
        (
            lambda state: {"v": ({name: x.to_sparse() for name, x in state.w.items()},) * 2},
            "sparse_coo on cpu",
        ),
        (lambda state: {"v": scaled(state, 1.0), "tail": (narrow(state.w),) * 2}, "it must be torch.float32 of"),
        (lambda state: {"tail": state.v}, "whose tail_count is 0; it must be how many of the 1 epochs are in tail"),
        (
            lambda state: {"tail": state.v, "tail_count": 2},
            "whose tail_count is 2; it must be how many of",
        ),
        (lambda state: {"tail_count": None}, "whose tail_count is None; it must be 0, as tail is None"),
        (lambda state: {"w": {name: x.half() for name, x in state.w.items()}}, "in which weight of w is torch.float16"),
        (lambda state: {"w": {name: x.to("meta") for name, x in state.w.items()}}, "of w is a Tensor of .* on meta"),
        (lambda state: {"w": {**state.w, 3: torch.ones(1)}}, "in which w has the name 3; a name must be a text"),
        (lambda state: {"work": Work(visits=1.5)}, "whose work has visits 1.5; it must be a whole number from 0"),
        (lambda state: {"work": Work(bytes_up=10**400)}, "whose work has bytes_up 1000.*; it must be a whole number"),
        (lambda state: {"work": Work(missed=torch.nan)}, "whose work has missed nan; it must be a number from 0"),
        (lambda state: {"work": Work(asked=3)}, "whose work has asked 3; it must be a tuple of whole numbers from 0"),
        (
            lambda state: {"work": Work(asked=(1,), absent=(0,))},
            r"asked \(1,\) and absent \(0,\); they must be empty",
        ),
        (lambda state: {"work": Work(asked=(1, 1), absent=(0, 2))}, "how often of these it was absent"),
        (lambda state: {"memory": kept(torch.ones(2) + 0j)}, "x of memory 'mean' is torch.complex64 of shape .2,.; it"),
        (
            lambda state: {"memory": kept(torch.ones(2, dtype=torch.int8))},
            "must be a plain or sparse .COO. tensor",
        ),
        (lambda state: {"memory": kept(torch.ones(2)._neg_view())}, "x of memory 'mean' is a Tensor of torch.float32"),
        (
            lambda state: {"memory": kept(torch.eye(2).to_sparse_csr())},
            "x of memory 'mean' is .* .torch.sparse_csr",
        ),
        (lambda state: {"memory": kept(torch.nested.nested_tensor([torch.ones(2)]))}, "x of memory 'mean' is a Tensor"),
        (lambda state: {"memory": kept(nn.UninitializedParameter())}, "x of memory 'mean' is a UninitializedParameter"),
        (lambda state: {"memory": {"a\ud800": {}}}, "whose memory has the name .*; a name must be a text that a file"),
        (lambda state: {"memory": {3: {}}}, "whose memory has the name 3; a name must be a text"),
        (lambda state: {"alpha": torch.eye(2).long()}, "alpha is torch.int64 of shape .* of floating-point numbers"),
        (lambda state: {"alpha": torch.eye(2).to_sparse_csr()}, "whose alpha is a Tensor .*torch.sparse_csr on cpu"),
        (lambda state: {"alpha": torch.eye(2).to_sparse(1)}, "whose alpha is sparse in one dimension only; make it"),
        (
            lambda state: {"alpha": [[1.0]]},
            r"whose alpha is \[\[1.0\]\]; it must be None or a tensor of shape",
        ),
        (lambda state: {"alpha": torch.ones(2, 2)}, "whose alpha holds no mixing weights: row 0 of alpha sums to 2"),
        (lambda state: {"alpha": torch.eye(2) * torch.nan}, "alpha holds no mixing weights: row 0 of alpha holds nan"),
    ],
)
def test_a_state_that_no_checkpoint_or_table_can_hold_is_refused_after_its_epoch(changes, sentence):
    with pytest.raises(ValueError, match=rf"algorithm 'mine', which is not hetperm's, returned a State .*{sentence}"):
        fit_changed(changes)
    assert not Path("run/metrics.csv").exists()


@pytest.mark.parametrize(
    ("changes", "one_size"),
    [
        (lambda state: {"tail": state.v, "tail_count": state.r}, False),
        (lambda state: {"v": tuple({name: nn.Parameter(x) for name, x in model.items()} for model in state.v)}, False),
        (lambda state: {"w": {}, "work": Work(visits=3, macs=0.5, asked=(2, 1), absent=(1, 0))}, False),
        (lambda state: {"w": {name: x.double() for name, x in state.w.items()}}, True),
        (lambda state: {"memory": {"ä/b\n": {"": torch.eye(2).to_sparse(), "nan": torch.tensor(torch.nan)}}}, False),
        (lambda state: {"memory": kept(torch.ones(1, requires_grad=True).expand(3))}, False),
        (lambda state: {"alpha": nn.Parameter(torch.eye(2))}, False),
        (lambda state: {"alpha": torch.eye(2).bfloat16()}, False),
        (lambda state: {"alpha": torch.eye(2).bfloat16().to_sparse()}, False),
        (lambda state: {"alpha": torch.eye(2).half().to_sparse().requires_grad_()}, False),
    ],
)
def test_a_state_that_passes_is_read_again_from_its_own_checkpoint(changes, one_size):
    first = fit_changed(changes, one_size=one_size)
    Path("run/clients.csv").unlink()
    again = fit_changed(changes, one_size=one_size, resume=True)
    assert Path("run/clients.csv").is_file() and not again.main.trained_here and again.summary == first.summary


def test_a_stranger_may_remember_reports_of_another_kind_than_perm():
    assert fit_changed(lambda state: {"memory": {"reports": {"gradient": torch.ones(2)}}}).state.r == 2
    assert Path("run/report.html").is_file() and not Path("run/server.safetensors").exists()
    with pytest.raises(ValueError, match="whose memory has 'look ahead', where perm keeps what it saw ahead; give it"):
        fit_changed(lambda state: {"memory": {"look ahead": {"x": torch.ones(2)}}}, out="other")


def test_a_strangers_end_of_training_keeps_the_epoch():
    with pytest.raises(ValueError, match="returned a State whose r is 3 at the end; it must be 2"):
        fit_changed(lambda state: {}, finish=lambda state: replace(state, r=3))


@pytest.mark.parametrize(
    "changes",
    [
        lambda state: {"v": scaled(state, torch.nan)},
        lambda state: {"tail": scaled(state, torch.nan), "tail_count": 1},
        lambda state: {"w": scaled(state, torch.inf)[0]},
    ],
)
def test_a_strangers_method_whose_models_are_not_finite_has_diverged(changes):
    result = fit_changed(changes, algorithm="local", baselines=("mine",))
    assert result.baselines["mine"].diverged == "diverged at epoch 1"


def test_a_strangers_divergence_without_words_is_one():
    with pytest.raises(NotFinite, match=r"mine: algorithm 'mine', which is not hetperm's, failed \(NotFinite\)"):
        fit_changed(lambda state: wordless(NotFinite))


def test_a_strangers_algorithm_that_edits_tensors_changes_no_rival():
    def mine(federation, start, options):
        return Algorithm(lambda: State(0, start, (start, start)), shifted)

    hetperm.register_algorithm("mine", mine)
    model, clients = nn.Linear(2, 2), [replace(CLIENT, test=CLIENT.train)] * 2
    losses = []
    for first in ("mine", "fedavg"):
        config = Config(steps=40, epochs=2, algorithm=first, baselines=("local",))
        losses.append(hetperm.fit(model, clients, config).summary["baselines"]["local"]["loss"])
    assert losses[0] == losses[1]


def test_models_may_come_with_the_first_epoch_and_options_may_extend_those_of_fine_tuning():
    @dataclass(frozen=True, kw_only=True)
    class Tuned(FineTuneOptions):
        warmth: float = 0.5

    def mine(federation, start, options):
        assert options.warmth == 0.5
        return Algorithm(lambda: State(0, start, ()), lambda state: replace(state, r=state.r + 1, v=(start, start)))

    hetperm.register_algorithm("mine", mine, Tuned)
    result = hetperm.fit(nn.Linear(2, 2), [CLIENT, CLIENT], Config(steps=40, epochs=2, algorithm="mine", baselines=()))
    assert len(result.state.v) == 2


def test_a_strangers_model_with_weights_that_are_not_finite_is_refused_before_training():
    def spoiled(**sizes):
        model = nn.Linear(60, 2)
        nn.init.constant_(model.weight, torch.nan)
        return model

    hetperm.register_model("mine", spoiled)
    config = Config(dataset="synthetic", model="mine", num_clients=2, capacity_profile="homogeneous", quiet=True)
    with pytest.raises(ValueError, match="weight of the model is not finite before training; --model must build one"):
        hetperm.run(config)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"clients": ()}, r"a data set has the clients \(\); give a tuple of Client, not empty"),
        ({"clients": (client for client in ())}, r"a data set has the clients <generator .*; give a tuple of Client"),
        ({"clients": 5}, r"a data set has the clients 5; give a tuple of Client, not empty"),
        ({"clients": [3]}, r"a data set has the clients \[3\]"),
        ({"in_channels": 0}, "in_channels of a data set is 0; it must be a whole number of at least 1"),
        ({"num_classes": "two"}, "num_classes of a data set is 'two'"),
        ({"name": "a\x1b[2J"}, "a data set is named .*; it must be a text without control characters"),
        ({"class_names": (1, 2)}, r"the class_names of mine are \(1, 2\); they must be texts"),
        ({"partition": 3}, "the partition of mine is 3; it must be a text, or None"),
        ({"preparation": "abc"}, "the preparation of mine is 'abc'; it must be a Preparation"),
        ({"class_names": ("a",)}, "mine has 2 classes and names 1 of them"),
        ({"loss": 3}, "the loss of mine is 3; it must be a function, or None"),
        ({"metric": None}, "the metric of mine is None; it must be a name, such as 'accuracy'"),
    ],
)
def test_what_is_no_data_set_is_refused(fields, sentence):
    sizes = {"clients": (CLIENT,), "in_channels": 2, "num_classes": 2, "image_size": None, "name": "mine"}
    with pytest.raises((TypeError, ValueError), match=sentence):
        hetperm.data.Problem(**sizes | fields)


def test_a_folder_that_is_no_package_is_no_plugin(tmp_path, monkeypatch):
    (tmp_path / "mine_of_old").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^plugin 'mine_of_old' is a folder without __init__\.py"):
        Config(plugins=("mine_of_old",))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise GeneratorExit", "GeneratorExit: "),
        ("class Mine(BaseException): pass\nraise Mine('me')", "Mine: me"),
        ("class Mine(Exception):\n  def __str__(self): return 1\nraise Mine", "Mine: it cannot be shown"),
    ],
)
def test_a_plugin_that_ends_itself_is_refused(text, reason, tmp_path):
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(ValueError, match=rf"plugin 'script.py' cannot be loaded \({reason}\); correct it, or leave"):
        Config(plugins=["script.py"])


def test_a_metric_is_known_to_configurations_and_to_fit():
    hetperm.register_metric("far-off", lambda outputs, y: outputs.sum(), better="lower", finish=lambda mean: -mean)
    assert (metric_of("far-off").better, metric_of("far-off").of_client(2.0)) == ("lower", -2.0)


# By a file, a module or an entry point

MODEL = """
    from __future__ import annotations
    from dataclasses import dataclass
    import hetperm
    from hetperm.algorithms.local_only import local_only
    from hetperm.algorithms.steps import FineTuneOptions, RivalOptions
    from torch import nn

    @dataclass(frozen=True)
    class Options(RivalOptions):
        warmth: float = 0.5

    def tiny(*, in_channels, num_classes, image_size, hidden=4):
        size = in_channels * image_size**2
        return nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    hetperm.register_algorithm("warm", local_only, Options)
    hetperm.register_model("tiny", tiny)
"""
SMALL = "--num-clients 4 --steps 20 --epochs 2 --quiet --samples-per-client 20 --capacity-profile uniform5"


def write_plugin(path="mine.py", text=MODEL):
    Path(path).write_text(textwrap.dedent(text))
    plugins._files.clear()
    return path


def test_a_strangers_algorithm_runs_with_options_tables_and_resume(capsys):
    """All from the command line: a file outside the package, options, tables, and going on with a run."""
    write_plugin()
    words = f"--plugins mine.py --algorithm warm --model tiny --option model.hidden=8 {SMALL} --out run".split()
    words += "--baselines local --option warm.lr=0.3 --option local.lr=0.3 --option local.tail_average=0.5".split()
    assert train(*words, "--option", "warm.warmth=0.25") == 0
    said = capsys.readouterr().out
    assert "warm" in said and "zoo:tiny" in said
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["algorithm"] == "warm" and summary["accuracy"] == summary["baselines"]["local"]["accuracy"]
    written = Path("run/config.toml").read_text()
    assert 'plugins = [\n    "mine.py",\n]' in written and "warmth = 0.25" in written
    # The written configuration is enough to go on, and a lost file comes back as it was.
    table = Path("run/clients.csv").read_bytes()
    Path("run/clients.csv").unlink()
    assert train("--config", "run/config.toml", "--out", "run", "--resume", "--quiet") == 0
    assert Path("run/clients.csv").read_bytes() == table
    assert load_client("run", 0)[1].out_features in range(1, 9)


def test_a_run_is_not_resumed_with_a_plugin_that_has_changed(capsys):
    write_plugin()
    words = f"--plugins mine.py --algorithm warm --baselines local {SMALL} --out run".split()
    assert train(*words) == 0
    Path("run/summary.json").unlink()
    write_plugin(text=MODEL + "    # another version\n")
    assert train(*words, "--resume") == 2
    assert "a plugin has changed since; bring it back as it was, or start another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--plugins none.py", "there is no plugin 'none.py'; name a Python file, or a module without .py"),
        ("--plugins no_such_module", "plugin 'no_such_module' cannot be loaded (ModuleNotFoundError: No module named"),
        (
            "--plugins broken.py",
            "plugin 'broken.py' cannot be loaded (ZeroDivisionError: division by zero); correct it",
        ),
        ("--algorithm prem", "unknown algorithm 'prem'; did you mean 'perm'?"),
        ("--algorithm qqqqqq", "--plugins FILE.py adds others"),
        ("--option ditto", "--option: 'ditto' is not NAME.KEY=VALUE, such as ditto.prox=0.5"),
        ("--option dito.prox=1", "unknown algorithm 'dito'; did you mean 'ditto'?"),
        ("--baselines ditto --option ditto.prox=one", "[ditto]: prox is 'one'; it must be 0 or a number from 1e-12"),
        ("--option model.hiden=3", "model 'mlp' does not take these model_options"),
        (
            "--plugins mine.py --model tiny --option model.hiden=8",
            "error: model 'tiny' has no option hiden; did",
        ),
        ("--option ditto.prox=1", "--option: 'ditto.prox=1' is for ditto, which is not run; add it to --baselines"),
        ("--metric acuracy", "unknown metric 'acuracy'; did you mean 'accuracy'?"),
        ("--metric dice", "digits does not go with --model mlp and --metric dice; change one of them"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(words, sentence, capsys):
    Path("broken.py").write_text("1 / 0\n")
    write_plugin()
    assert train(*words.split(), "--out", "run") == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--algorithm local --baselines fedavg --share 0.5",
            "--share is for perm, which is not run: it decides nothing",
        ),
        ("--algorithm local --baselines perm --share 0.5", ""),
        ("--algorithm local --baselines fedavg --tail-average 0", ""),
        ("--share 0.5", ""),
    ],
)
def test_flags_of_perm_in_a_run_without_it_are_warned_about(words, said, caplog):
    parse_train(words.split())
    assert said in caplog.text and bool(said) == bool(caplog.text)


def test_flags_of_perm_are_those_that_no_rival_reads():
    rivals = [set(leaf_types(method.options)) for method in METHODS.values() if not method.mixes]
    ours = set(leaf_types(METHODS["perm"].options)) & {*config.FIELDS}
    # Rivals take it unless their tables name a step size; and models of rivals wait in memory.
    assert ours - set().union(*rivals) - {"global_lr"} == {*OF_PERM} - {"idle_models"}


def test_a_plugin_that_registers_nothing_is_asked_about_once(caplog):
    plugins._named.clear()
    write_plugin()
    for _ in range(2):
        Config(plugins=["mine.py", "os"])
    said = "plugin 'os' registers nothing, as no file of it names hetperm; is another one meant?"
    assert caplog.messages == [said]


def test_a_broken_plugin_of_a_file_is_named_too(tmp_path):
    Path("broken.toml").write_text('plugins = ["broken.py"]\n')
    Path("broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"plugin 'broken.py' cannot be loaded \(ZeroDivisionError"):
        config.load("broken.toml")


def test_options_of_the_command_line_go_over_those_of_a_file():
    from hetperm.cli.train import parse_train

    Path("mine.toml").write_text("[ditto]\nprox = 2.0\nlr = 0.3\n[model_options]\nhidden = [8, 8]\n")
    flags = ["--config", "mine.toml", "--option", "ditto.prox=0.5", "--option", "model.hidden=[4, 4]"]
    read = parse_train([*flags, "--baselines", "ditto,perfedavg", "--option", "perfedavg.variant=first-order"])
    assert read.rivals == {"ditto": {"prox": 0.5, "lr": 0.3}, "perfedavg": {"variant": "first-order"}}
    assert read.model_options == {"hidden": [4, 4]}
    # Options of another model than the file's begin anew.
    other = parse_train(["--config", "mine.toml", "--model", "logistic", "--option", "model.bias=false"])
    assert other.model_options == {"bias": False}


def test_an_installed_package_needs_no_flag(monkeypatch):
    write_plugin("installed_mine.py")
    monkeypatch.syspath_prepend(".")
    entry = metadata.EntryPoint("mine", "installed_mine", "hetperm")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == "hetperm" else [])
    plugins.load_installed.cache_clear()
    try:
        assert Config(algorithm="warm").algorithm == "warm"
        Path("mine.toml").write_text('algorithm = "warm"\n[warm]\nwarmth = 0.1\n')
        assert config.load("mine.toml").rivals == {"warm": {"warmth": 0.1}}
    finally:
        sys.modules.pop("installed_mine", None)
        plugins.load_installed.cache_clear()


def test_a_plugin_of_a_package_that_fails_is_named(monkeypatch):
    entry = metadata.EntryPoint("mine", "no_such_module", "hetperm")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    plugins.load_installed.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"plugin 'mine' \(no_such_module\) cannot be loaded .*uninstall"):
            Config(algorithm="warm")
    finally:
        plugins.load_installed.cache_clear()
