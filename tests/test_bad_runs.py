"""Runs that cannot be: one line with value and remedy, status 2, nothing written; and the smallest runs that can be."""

import math
import re
import threading

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hetperm
from hetperm import Client, Config, fit
from hetperm.cli.main import guarded
from hetperm.cli.train import main
from hetperm.config import ALGORITHMS, load
from hetperm.metrics import METRICS, Metric
from hetperm.params import NotFinite
from hetperm.runs import rehearsal

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = "--num-clients 4 --samples-per-client 20 --epochs 2 --local-steps 2 --warmup-rounds 1 --steps 0 --quiet".split()
ONE_SIZE = ["--capacity-profile", "homogeneous", "--baselines", ""]


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """flags -> (status, what was said on stderr, names of what was written), in a folder of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(words: str) -> tuple[int, str, list[str]]:
        before = set(folder.rglob("*"))
        status = guarded(main, [*TINY, *ONE_SIZE, *words.split()])
        written = sorted(path.name for path in set(folder.rglob("*")) - before)
        return status, capsys.readouterr().err, written

    return run


# Refused before anything is written. A row for each kind: which values are wrong is asked where they are read (Config,
# data, partitions, profiles, models), and which words are in test_cli_flags.py.

WRONG = [
    ("--dataset digts", "unknown dataset 'digts'; did you mean 'digits'?"),
    ("--partition classes:11", "the k of classes:k must be a whole number from 1 to 10 (there are 10 classes)"),
    ("--model resnet18-cifr", "unknown model 'resnet18-cifr'; did you mean "),
    ("--capacity-profile mobil", "there is no capacity profile 'mobil' (did you mean 'mobile'?)"),
    (
        "--capacity-profile homogeneous --widths-from budget",
        "profile 'homogeneous': tier 'full' has no budget to solve",
    ),
    ("--dataset synthetic --model cnn", "cnn takes images and was given flat feature vectors; use logistic or mlp"),
    ("--dataset mnist --data-dir x", "mnist is not in x/MNIST/raw; point --data-dir at the folder that holds MNIST"),
    ("--engine batched --model cnn", "error: the batched engine needs a chain of linear layers"),
    ("--samples-per-client 99999", "need 399996 training samples and the training pool holds 1222; lower samples_per"),
    ("--steps 4 --warmup-rounds 0 --local-steps 5 --baselines local", "error: local: a budget of 4 steps a client"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[words for words, _ in WRONG])
def test_what_cannot_be_run_is_one_line_and_leaves_nothing(words, sentence, train):
    status, said, written = train(words)
    assert (status, written) == (2, [])
    assert said.startswith("error: ")
    assert sentence in said
    assert said.count("\n") == 1


FILES = [
    ("local_step = 5", "run.toml: unknown key 'local_step'; did you mean 'local_steps'?"),
    ("[fedavg]\nlr = 'fast'", "[fedavg]: lr is 'fast'; it must be a number from 1e-12 to 1e38"),
    ("[apfl]\nmix = 2", "mix 2.0 is outside [0, 1]; it is the weight of a client's own model in apfl"),
]


@pytest.mark.parametrize(("text", "sentence"), FILES, ids=[text.splitlines()[-1] for text, _ in FILES])
def test_a_file_that_makes_no_sense_is_one_line_and_leaves_nothing(text, sentence, train, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    status, said, written = train(f"--config {tmp_path / 'run.toml'}")
    assert (status, written, said.count("\n")) == (2, [], 1)
    assert sentence in said


# Profiles


def two_tiers(**small: object) -> str:
    tiers = {"large": {"share": 1, "width": 1.0, "train_mb": 1000}, "small": {"share": 1, "width": 0.5} | small}
    return tomli_w.dumps({"tiers": tiers})


@pytest.mark.parametrize(
    ("text", "flags", "sentences"),
    [
        (two_tiers(share=0), "", ["mine.toml: tier 'small': share is 0; it must be a number above 0"]),
        ("[tiers", "", ["mine.toml: is not TOML"]),
        (
            two_tiers(train_mb=0.001),
            "--widths-from budget",
            ["profile 'mine': tier 'small': ", "train_mb=0.001", "raise train_mb to"],
        ),
    ],
    ids=["a value", "no TOML", "a budget that no width fits"],
)
def test_a_profile_that_makes_no_sense_is_one_line_and_leaves_nothing(text, flags, sentences, train, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    status, said, written = train(f"--capacity-profile {tmp_path / 'mine.toml'} {flags}")
    assert (status, written, said.count("\n")) == (2, [], 1)
    assert all(sentence in said for sentence in sentences)


@pytest.mark.parametrize("flags", ["", " --widths-from profile"])
def test_a_model_that_cannot_be_cut_names_the_remedy_and_no_other(flags, train):
    words = "--model logistic --capacity-profile mobile"
    status, said, written = train(words + (" --widths-from budget" if flags else ""))
    assert (status, written, said.count("\n")) == (2, [], 1)
    assert said.endswith(f"a model that cannot be cut needs --capacity-profile homogeneous{flags}\n")


# Folders


def test_a_folder_that_exists_or_cannot_be_made_is_named(train, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    for out, sentence in (("file", "exists"), ("full", "exists"), ("file/run", "(Not a directory); name another with")):
        status, said, written = train(f"--out {tmp_path / out}")
        assert (status, written, said.count("\n")) == (2, [], 1)
        assert f"{tmp_path / out} " in said
        assert sentence in said
        assert "--out" in said
    assert not list((tmp_path / "full").iterdir())


# Numbers that go non-finite


def test_numbers_that_go_non_finite_name_epoch_model_and_host(train):
    status, said, written = train("--personal-lr 1e30 --step-cap 0 --out run")
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("error: perm: epoch 0: model 0 at host 0: fc1.weight is not finite; lower the learning rate")
    assert re.search(r"; this step's was [\d.]+e\+29 at width 1, and step_cap 0 lets steps be of any length", said)
    assert written == ["checkpoint", "config.toml", "perm.safetensors", "profile.csv", "run"]  # and no summary
    assert load("run/config.toml").personal_lr == 1e30


def test_a_global_model_that_goes_astray_names_epoch_and_client(train):
    status, said, _ = train("--global-lr 1e6 --step-cap 0")
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("error: perm: epoch 0: client 0: the gradient is not finite; lower the learning rate")


def test_a_rival_that_goes_non_finite_names_itself_and_the_client(train):
    status, said, _ = train("--global-lr 1e6 --step-cap 0 --algorithm apfl")
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("error: apfl: round 1: client 0: fc1.weight is not finite; lower the learning rate")


# The smallest runs there are


def shard(n: int, classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 3 * n).reshape(n, 3), torch.arange(n) % classes


def run(model: nn.Module, sizes, **changes):
    config = Config(**{"epochs": 4, "local_steps": 2, "steps": 0, "warmup_rounds": 1, "baselines": (), **changes})
    return fit(model, [Client(shard(n), test=shard(4)) for n in sizes], config)


ONE_SAMPLE = (1, 6, 7)
FEW = [(algorithm, sizes) for algorithm in ("perm", "fedavg", "ifca") for sizes in ((5,), (5, 4))]


@pytest.mark.parametrize(
    ("algorithm", "sizes"),
    [*((algorithm, ONE_SAMPLE) for algorithm in ALGORITHMS), *FEW],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_every_method_runs_with_a_client_of_one_sample_and_with_one_or_two_clients(algorithm, sizes):
    result = run(nn.Linear(3, 2), sizes, algorithm=algorithm)
    assert 0 <= result.accuracy <= 1
    if result.alpha is not None:
        assert torch.allclose(result.alpha.sum(1), torch.ones(len(sizes), dtype=torch.float64))


def test_clients_of_one_sample_need_a_number_as_regularization():
    assert 0 <= run(nn.Linear(3, 2), (1, 1), regularization=1.0).accuracy <= 1
    with pytest.raises(ValueError, match="no client has 2 samples"):
        run(nn.Linear(3, 2), (1, 1))


def test_labels_that_the_model_has_no_output_for_name_the_client():
    clients = [Client(shard(5)), Client(shard(5, classes=3))]
    with pytest.raises(ValueError, match="client 1: its labels hold 2 and the model has 2 outputs; number"):
        fit(nn.Linear(3, 2), clients, Config(epochs=1, steps=0, warmup_rounds=1, baselines=()))


class Returns(nn.Module):
    """A linear model whose outputs a function changes."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(3, 2), change

    def forward(self, x):
        return self.change(self.linear(x))


class Dropping(nn.Module):
    """A linear model that returns another thing in training."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return (self.linear(x), x) if self.training else self.linear(x)


def compiled():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0]._orig_mod = model[0].weight  # what torch.compile makes has it; making one takes long
    return model


def with_buffer(buffer):
    model = nn.Linear(3, 2)
    model.register_buffer("extra", buffer)
    return model


def sparse_weight():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.ones(2, 3).to_sparse())
    return model


def jagged(out):
    return torch.nested.as_nested_tensor(list(out), layout=torch.jagged)


def fails_at_length(out):
    raise ValueError("a" * 10_000)


class Changes(nn.Module):
    """A linear model that begins with a function of its inputs."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(3, 2), change

    def forward(self, x):
        self.change(x)
        return self.linear(x)


def squared_error(outputs, labels):
    """Right for outputs of shape (n, 1), too."""
    return ((outputs.flatten() - labels) ** 2).mean()


def not_finite() -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, torch.nan)
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(5, 2), {}, r"the model fails on inputs of shape \(2, 3\) and type torch.float32 \(mat1 and mat2"),
        (Returns(lambda out: (out,)), {}, "the model returns a tuple; it must return a tensor"),
        (Returns(lambda out: None), {}, "the model returns a NoneType; it must return a tensor"),
        (Returns(lambda out: 1 // 0), {}, "the model fails on inputs of shape .*division.* by zero"),
        (nn.LazyLinear(2), {}, "weight of the model has no size yet; call the model once on a batch before fit"),
        (nn.Linear(3, 2, device="meta"), {}, "weight of the model is on the meta device"),
        (nn.Linear(3, 2, dtype=torch.cfloat), {}, "weight of the model is torch.complex64; weights must be real"),
        (not_finite(), {}, "weight of the model is not finite before training; give fit a model with other weights"),
        (Changes(lambda x: x.sub_(5.0)), {}, "the model changes in place what it is given, .* such as x.clone"),
        (Changes(lambda x: x.data.mul_(2.0)), {}, "the model changes in place what it is given"),
        (
            Returns(lambda out: out.squeeze()),
            {},
            r"outputs of shape \(2,\) for one sample and \(2, 2\) for two; they must have shape \(1, 2\), so squeeze",
        ),
        (
            nn.Linear(3, 2),
            {"loss": lambda out, y: F.cross_entropy(out, y.clamp_(max=0))},
            "the loss changes in place what it is given",
        ),
        (
            nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(3, 2)),
            {},
            "the model changes in place what it is given",
        ),
        (
            nn.Linear(3, 2),
            {"metric": lambda out, y: y.zero_().sum()},
            "the metric changes in place what it is given",
        ),
        (Returns(threading.Lock()), {}, "the model cannot be copied .*lock.*; take out of it what cannot"),
        (nn.Linear(3, 2), {"loss": lambda out, y: None}, "the loss gives None; it must be one number, a tensor"),
        (nn.Linear(3, 2), {"loss": lambda out, y: out.sum(1)}, r"the loss gives a tensor of shape \(2,\); it must be"),
        (
            nn.Linear(3, 2),
            {"loss": lambda out, y: torch.ones(())},
            "must be one number, a tensor made from the",
        ),
        (
            nn.Linear(3, 2),
            {"loss": F.mse_loss},
            r"the loss compares every output with every label \(outputs of shape \(2, 2",
        ),
        (
            nn.Linear(3, 1),
            {"loss": lambda out, y: ((out - y) ** 2).mean(), "metric": "mae"},
            r"the loss compares every output with every label \(outputs of shape \(2, 1\) and labels of shape \(2,\)",
        ),
        (
            nn.Linear(3, 1),
            {"loss": squared_error, "metric": Metric("error", lambda out, y: (out - y).abs().mean(), better="lower")},
            r"the metric compares every output with every label",
        ),
        (
            nn.Linear(3, 2),
            {"metric": lambda out, y: out.argmax(1) == y},
            r"the metric gives tensor\(.*; it must be one",
        ),
        (
            nn.Linear(3, 2),
            {"metric": Metric("odd", lambda out, y: out.mean(), finish=lambda mean: "high")},
            "metric 'odd': finish gives 'high' for .*; it must return one number",
        ),
        (nn.Linear(3, 2), {"loss": lambda out: 0}, r"the loss fails on outputs of shape \(2, 2\) and labels of shape"),
        (nn.Linear(3, 2), {"metric": lambda out, y: None}, "the metric gives None; it must be one number"),
        (
            nn.Linear(3, 2),
            {"metric": lambda out, y: 1j * out.mean()},
            r"the metric gives tensor\(.*; it must be one number",
        ),
        (
            Returns(Tensor.sum),
            {},
            "^the model returns a single number for a batch of two samples; it must",
        ),
        (compiled(), {}, "^the model, or a part of it, is made by torch.compile; give the module it was made of"),
        (with_buffer(torch.eye(2).to_sparse()), {}, "^the buffer extra of the model is sparse or on the meta device"),
        (with_buffer(torch.eye(2, device="meta")), {}, "^the buffer extra of the model is sparse or on the meta"),
        (nn.Linear(3, 2, device="meta"), {}, "^weight of the model is on the meta device, which holds no values; give"),
        (sparse_weight(), {}, "^weight of the model is a sparse tensor; make it a dense one"),
        (
            nn.Linear(3, 2),
            {"loss": lambda out, y: out.sum() * math.nan},
            "^the loss is nan before training, of",
        ),
        (nn.Linear(3, 2), {"loss": lambda out, y: ((out - y) ** 2).mean()}, "^the loss compares every output with"),
        (nn.Linear(3, 2), {"metric": lambda out, y: (out - y).abs().mean()}, "^the metric compares every output with"),
        (Returns(Tensor.to_sparse), {}, "^the model returns a sparse or nested tensor; return a dense one"),
        (
            Returns(lambda out: torch.nested.as_nested_tensor(list(out), layout=torch.jagged)),
            {},
            "^the model returns a sparse or nested",
        ),
        (
            Returns(lambda out: out.to("meta")),
            {},
            "^the model gives a tensor on the meta device, which holds no values",
        ),
        (Returns(lambda out: out[:, :0]), {}, "^the model has no outputs; give it one for every class"),
        (Returns(fails_at_length), {}, r"^the model fails on inputs .{,100} \(a{250} \.\.\. a{250}\); give fit one"),
        (
            Dropping(),
            {},
            "^in training mode the model returns a tuple, and cross-entropy takes a tensor; let it return one, or",
        ),
        (
            nn.Linear(3, 2),
            {"loss": lambda out, y: F.cross_entropy(out, y).detach()},
            r"^the loss gives a number without a gradient \(detached, or .*\); it must be one number",
        ),
        (
            nn.Linear(3, 2),
            {"loss": lambda out, y: F.cross_entropy(out, y).to("meta")},
            "^the loss gives a tensor on the meta device, which holds no values",
        ),
        (
            nn.Linear(3, 2),
            {"metric": lambda out, y: out.mean().to("meta")},
            "^the metric gives a tensor on the meta device, which holds no values",
        ),
        (
            nn.Linear(3, 2),
            {"augment": lambda x, y, generator: (x.to("meta"), y)},
            "^the augment gives a tensor on the meta device, which holds no values",
        ),
        (nn.Linear(3, 2), {"metric": lambda out, y: {}["k"]}, r"the metric fails on outputs .* \('k'\); give fit one"),
    ],
)
def test_what_cannot_be_run_at_all_is_refused_before_training(model, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        fit(model, [Client(shard(5)), Client(shard(5))], Config(epochs=1, steps=0, baselines=()), **options)
    assert "\n" not in str(caught.value)


def test_a_client_whose_inputs_have_another_shape_than_the_first_ones_is_refused_before_training():
    narrow = Client((torch.zeros(5, 2), torch.zeros(5, dtype=torch.long)))
    with pytest.raises(ValueError, match=r"^the model fails on client 1's inputs of shape \(2, 2\) .*; give fit one"):
        fit(nn.Linear(3, 2), [Client(shard(5)), narrow], Config(epochs=1, steps=0, baselines=()))


X, Y = torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (
            {"test": ({"x": X}, Y)},
            r"the model fails on client 1's test inputs x \(2, 3\) \(.*has no argument 'x'\)",
        ),
        ({"val": ((X, X), Y)}, r"the model fails on client 1's val 2 inputs of shapes .* takes 2 positional arguments"),
        ({"train": ({"x": X}, Y)}, r"the model fails on client 1's inputs x \(2, 3\) \(.*has no argument 'x'\)"),
        ({"train": ({0: X}, Y)}, r"the model fails on client 1's inputs 0 \(2, 3\) \(.*keywords must be strings\)"),
        (
            {"val": TensorDataset(X, Y[:, None])},
            r"client 1: one of its val labels has shape \(1,\) and one of the train",
        ),
        ({"test": TensorDataset(X, X[:, 0])}, "client 1: its test labels are torch.float32 and the training labels of"),
    ],
)
def test_data_that_a_model_is_called_with_otherwise_are_refused_before_training(client, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        fit(nn.Linear(3, 2), [Client(shard(5)), Client(**{"train": shard(5)} | client)], Config(baselines=()))


def test_data_may_be_given_by_position_and_by_keyword():
    by_keyword = Client(train=shard(5), test=({"input": X}, Y), val=((X,), Y))
    config = Config(algorithm="local", baselines=(), steps=10, epochs=1, quiet=True)
    result = fit(nn.Linear(3, 2), [Client(shard(5), test=(X, Y)), by_keyword], config)
    assert len(result.clients) == 2 and result.clients[1]["accuracy"] in (0, 1)


def test_a_hook_that_fails_in_the_rehearsal_fails_with_its_place_in_training():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].register_full_backward_hook(lambda *given: 1 / 0)
    with pytest.raises(ValueError, match=r"^local: .*division by zero"):
        fit(model, [Client(shard(5))] * 2, Config(algorithm="local", baselines=(), steps=10))


def test_a_hook_of_a_weight_is_said_to_be_left_out(caplog):
    model = nn.Linear(3, 2)
    model.weight.register_hook(lambda gradient: 0 * gradient)
    fit(model, [Client(shard(5))] * 2, Config(algorithm="local", baselines=(), steps=10, epochs=1, quiet=True))
    assert "weight of the model has a hook (register_hook), which clients' copies of it do not have" in caplog.messages


def test_a_metric_may_give_any_kind_of_number():
    clients = [Client(shard(5), test=shard(5))] * 2
    config = Config(algorithm="local", baselines=(), steps=10, epochs=1, quiet=True)
    result = fit(nn.Linear(3, 2), clients, config, metric=lambda out, y: np.float32(0.5))
    assert result.clients[0]["score"] == 0.5


def test_a_hook_that_takes_other_arguments_is_refused_before_training():
    with pytest.raises(
        TypeError, match=r"^on_epoch takes \(row\); it is called with the method and its row of metrics$"
    ):
        fit(nn.Linear(3, 2), [Client(shard(5))] * 2, Config(baselines=()), on_epoch=lambda row: None)


def test_data_are_left_as_they_were_by_what_works_in_place():
    """An augment is given copies; all others are refused, and were given copies until then."""
    clients = [Client(shard(20), test=shard(20)), Client(shard(20), test=shard(20))]
    pairs = [pair for client in clients for pair in (client.train, client.test)]
    before = [(x.clone(), y.clone()) for x, y in pairs]
    config = Config(steps=40, epochs=2, baselines=(), quiet=True)
    fit(nn.Linear(3, 2), clients, config, augment=lambda x, y, generator: (x.zero_(), y))
    with pytest.raises(ValueError, match="in place"):
        fit(Changes(lambda x: x.zero_()), clients, config)
    for pair, old in zip(pairs, before, strict=True):
        assert torch.equal(pair[0], old[0]) and torch.equal(pair[1], old[1])


def test_one_output_is_not_scored_by_accuracy():
    x, y = shard(20)
    clients = [Client((x, y.float()), test=(x, y.float()))]
    config = Config(steps=40, epochs=1, baselines=(), quiet=True)

    def loss(out, y):
        return F.binary_cross_entropy_with_logits(out.squeeze(1), y.float())

    for labels in (y, y.float()):
        clients = [Client((x, labels), test=(x, labels))]
        with pytest.raises(ValueError, match=r"accuracy.*name another metric, such as mae, or give a function"):
            fit(nn.Linear(3, 1), clients, config, loss=loss)
    fit(nn.Linear(3, 1), clients, config, loss=loss, metric=lambda out, y: ((out.squeeze(1) > 0) == y).float().mean())


def test_what_no_score_can_tell_is_warned_about(caplog):
    x, y = shard(20)
    config = Config(steps=40, epochs=1, baselines=(), quiet=True)
    third = torch.where(torch.arange(20) < 3, 2, y)
    fit(nn.Linear(3, 3), [Client((x, y), test=(x, y)), Client((x, y), test=(x, y))], config)
    assert "test data" not in caplog.text and "is scored on class" not in caplog.text
    fit(nn.Linear(3, 3), [Client((x, y), test=(x, third)), Client((x, y))], config)
    assert "test data hold class 2, which no client trains on (1 such classes)" in caplog.text
    assert "1 of 2 clients have no test data and are in no score (the first is client 1)" in caplog.text
    assert "no client has test data" not in caplog.text
    fit(nn.Linear(3, 3), [Client((x, y))], config)
    assert "no client has test data: models are trained, and no figure says how good they are" in caplog.text
    caplog.clear()
    mask = torch.tensor([True, True, False])
    fit(nn.Linear(3, 3), [Client((x, y), test=(x, third), classes=mask), Client((x, third))], config)
    assert "client 0 is scored on class 2, which its classes leave out, so that it cannot be right" in caplog.text


def test_a_budget_that_was_not_enough_for_reports_is_said_to_be_overspent(train, caplog):
    train("--steps 12 --warmup-rounds 1 --local-steps 1 --batch-size 2")
    assert "perm took " in caplog.text and "steps a client of a budget of 12: reports and looks ahead" in caplog.text
    caplog.clear()
    train("--steps 60 --warmup-rounds 1 --local-steps 1")
    assert "of a budget of" not in caplog.text


def test_a_budget_that_reports_alone_would_use_up_is_refused(train):
    status, said, written = train("--steps 4 --warmup-rounds 0 --local-steps 1 --batch-size 2")
    assert (status, written) == (2, [])
    assert "perm: a budget of 4 steps a client, and to report gradients takes 10; raise --steps" in said


def test_what_is_made_for_the_moment_may_be_changed_in_place():
    """Outputs are nobody's; an augment may mix labels, which the metric never sees."""
    clients = [Client(shard(20), test=shard(20)), Client(shard(20), test=shard(20))]
    config = Config(steps=40, epochs=2, baselines=(), quiet=True)

    def mixed(x, y, generator):
        return x, F.one_hot(y, 2).float() * 0.9 + 0.05

    def in_place(out, y):
        return F.cross_entropy(out.div_(2.0), y)

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fit(model, clients, config, augment=mixed)
    by_copy = fit(model, clients, config, loss=lambda out, y: F.cross_entropy(out / 2.0, y))
    assert fit(model, clients, config, loss=in_place).accuracy == by_copy.accuracy


def test_a_model_is_left_as_it_was_by_a_look_at_its_training():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    rehearsal.rehearse(model, [Client(shard(5))], F.cross_entropy, METRICS["accuracy"])
    assert model.training and int(model[1].num_batches_tracked) == 0 and not model[1].running_mean.any()


@pytest.mark.parametrize(("part", "word"), [("val", "validation"), ("test", "test")])
def test_labels_that_cross_entropy_leaves_out_are_not_scored(part, word):
    config = Config(steps=40, epochs=1, baselines=(), quiet=True)
    x, y = shard(20)
    some, none = torch.where(torch.arange(20) < 5, -100, y), torch.full((20,), -100)
    for labels, count in ((some, 5), (none, 20)):
        with pytest.raises(
            ValueError, match=f"client 1: of its {word} labels {count} of 20 are -100, which cross-entro"
        ):
            fit(nn.Linear(3, 2), [Client((x, y)), Client((x, y), **{part: (x, labels)})], config)
    with pytest.raises(ValueError, match="20 of 20 are -100"):
        fit(nn.Linear(3, 2), [Client((x, y), **{part: (x, none)})], config, metric="perplexity")
    fit(nn.Linear(3, 2), [Client((x, y), **{part: (x, some)})], config, metric="perplexity")


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"loss": lambda out, y: F.cross_entropy(out, y, reduction="sum")}, "loss"),
        ({"metric": lambda out, y: out.abs().sum()}, "metric"),
        ({"metric": lambda out, y: (out.argmax(1) == y).float().sum()}, "metric"),
    ],
)
def test_a_sum_over_a_batch_is_warned_about(options, noun, caplog):
    clients = [Client(shard(20), test=shard(20))]
    config = Config(steps=40, epochs=1, baselines=(), quiet=True)
    fit(nn.Linear(3, 2), clients, config)
    assert "twice as large" not in caplog.text
    fit(nn.Linear(3, 2), clients, config, **options)
    assert f"the {noun} is twice as large for a batch of every sample twice" in caplog.text


def test_a_function_that_fails_when_models_are_scored_is_named_with_client_and_part():
    def fails(out, y):
        if len(y) > 4:  # the rehearsal has fewer
            raise KeyError("boom")
        return (out.argmax(1) == y).float().mean()

    clients = [Client(shard(20), test=shard(20))]
    config = Config(steps=40, epochs=1, baselines=(), quiet=True)
    with pytest.raises(ValueError, match=r"client 0: test: the metric fails on outputs .* \('boom'\)"):
        fit(nn.Linear(3, 2), clients, config, metric=fails)
    with pytest.raises(ValueError, match="client 0: test: the metric of a batch is None; it must be one number"):
        fit(nn.Linear(3, 2), clients, config, metric=lambda out, y: None if len(y) > 4 else 1.0)


def test_what_is_called_after_every_epoch_gets_a_copy_of_the_row():
    clients, rows = [Client(shard(20), test=shard(20))], []

    def track(method, row):
        rows.append(dict(row))
        row["client_scores"].clear()
        row.clear()

    result = fit(nn.Linear(3, 2), clients, Config(steps=40, epochs=2, baselines=(), quiet=True), on_epoch=track)
    history = result.main.history
    assert [row["epoch"] for row in history] == [row["epoch"] for row in rows] == [1, 2]
    assert len(history[0]["client_scores"]) == 1


def test_hooks_that_are_no_functions_are_refused_before_training():
    for call, hook in ((hetperm.run, "on_epoch"), (hetperm.run, "on_start"), (hetperm.run, "settle")):
        with pytest.raises(TypeError, match=f"{hook} is a int; it must be a function, or None"):
            call(Config(quiet=True), **{hook: 3})
    with pytest.raises(TypeError, match="on_start is a str; it must be a function"):
        hetperm.sweep(Config(quiet=True, seeds=(0, 1)), on_start="x")
    with pytest.raises(TypeError, match="settle returns a NoneType; it must return a Setting"):
        hetperm.run(Config(quiet=True), settle=lambda config: None)


def test_a_run_in_which_nobody_is_there_says_so(train, tmp_path, caplog):
    (tmp_path / "here" / "away.toml").write_text('clients = ["' + "0" * 99 + '1"]\n')
    status, _, _ = train("--steps 10 --epochs 1 --algorithm fedavg --trace away.toml")
    assert status == 0 and "fedavg took no step, so its models are untrained: no client was there" in caplog.text


def test_a_metric_that_is_a_tensor_is_refused():
    with pytest.raises((TypeError, ValueError), match="metric") as caught:
        fit(nn.Linear(3, 2), [Client(shard(5))], Config(epochs=1, steps=0, baselines=()), metric=torch.eye(3))
    assert "\n" not in str(caught.value)


def test_what_is_refused_before_training_leaves_the_model_and_the_generator_alone():
    model, before = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout()), torch.random.get_rng_state()
    model[1].eval()
    rehearsal.rehearse(model, [Client(shard(5))], nn.functional.cross_entropy, METRICS["accuracy"])
    assert [part.training for part in model.modules()] == [True, True, False, True]
    assert torch.equal(torch.random.get_rng_state(), before) and int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ({"config": {"epochs": 3}}, {}, r"the configuration is a dict; give a hetperm.Config"),
        ({}, {"loss": "mse"}, "loss is a str; it must be a function, or None"),
        ({}, {"on_epoch": 3}, "on_epoch is a int; it must be a function, or None"),
        ({"clients": [Client(shard(5)), None]}, {}, "a client is a NoneType; wrap its shard"),
        ({"clients": iter(())}, {}, "clients is a .*iterator; fit takes a list of hetperm.Client"),
    ],
)
def test_arguments_of_another_type_are_refused(args, options, message):
    with pytest.raises(TypeError, match=message):
        fit(nn.Linear(3, 2), args.get("clients", [Client(shard(5))]), args.get("config", Config()), **options)


def test_run_and_sweep_take_a_configuration():
    for start in (hetperm.run, hetperm.sweep):
        with pytest.raises(TypeError, match=r"the configuration is a dict; give a hetperm.Config"):
            start({})


def test_labels_that_only_tests_hold_and_labels_that_are_masked_are_refused_before_training():
    x, y = shard(5)
    with pytest.raises(
        ValueError, match="client 0: its test labels hold 7 and the model has 2 outputs; number classes"
    ):
        fit(nn.Linear(3, 2), [Client((x, y), test=(x, y + 7 - y))], Config())
    mask = torch.tensor([True, False])
    with pytest.raises(ValueError, match="client 0: it trains on label 1, which its classes leave out"):
        fit(nn.Linear(3, 2), [Client((x, torch.ones_like(y)), classes=mask)], Config())


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_one_sample_is_too_few_for_batch_norm_and_two_are_enough(tmp_path):
    with pytest.raises(ValueError, match=r"a client with 1 sample cannot train BatchNorm \(layer '1'\), which needs"):
        run(batch_norm(), (1, 6), out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
    assert 0 <= run(batch_norm(), (2, 6)).accuracy <= 1


def test_clients_without_data_are_refused():
    with pytest.raises(ValueError, match="there are no clients; give at least one"):
        run(nn.Linear(3, 2), ())
    with pytest.raises(ValueError, match="train is empty; a client needs at least one training sample"):
        run(nn.Linear(3, 2), (5, 0))


def test_a_metric_or_loss_of_ones_own_that_is_not_finite_stops_the_run():
    clients = [Client(shard(5), test=shard(4)), Client(shard(4))]
    config = Config(epochs=1, steps=0, warmup_rounds=1, baselines=())
    with pytest.raises(NotFinite, match=r"perm: after epoch 1: client 0: test loss .*, score nan"):
        fit(nn.Linear(3, 2), clients, config, metric=lambda outputs, y: outputs.sum() * torch.nan)
    # With a cap a gradient that is not finite is no step, but nothing can be learned from it either.
    for cap, place in ((0.0, "global round 0: client 0: weight"), (0.2, "epoch 0: client 0: the gradient")):
        with pytest.raises(NotFinite, match=f"perm: {place} is not finite"):
            fit(
                nn.Linear(3, 2),
                clients,
                config.override(step_cap=cap),
                loss=lambda outputs, y: (outputs - outputs.detach()).square().sum().sqrt(),  # 0, and its gradient nan
            )
