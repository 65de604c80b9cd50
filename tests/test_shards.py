"""Shards: pairs of tensors, views and Datasets are read alike, and a Dataset is never in memory as a whole."""

import pickle
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from hetperm import Cached, Client, Config, fit
from hetperm.device.bench import Workbench, outputs_of
from hetperm.device.gradients import BatchGradient, FullGradient, MeanLoss, ReportGradient, StepLosses
from hetperm.shards import Stored, View, batches_of, first, labels_of, parts, read, rows_of, size_of, taken, tensors_of

X, Y = torch.arange(22.0).reshape(11, 2), torch.arange(11)
POOL = (torch.cat([X.flip(0), X]), torch.cat([Y.flip(0), Y]))
SHARDS = {
    "tensors": (X, Y),
    "view": View(POOL, torch.arange(11, 22)),
    "dataset": Stored(TensorDataset(X, Y)),
    "several": ((X, X[:, :1]), Y),
    "keywords": ({"a": X, "b": X[:, :1]}, Y),
}
every_shard = pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)


def main_input(inputs):
    """The tensor X among the inputs."""
    if isinstance(inputs, torch.Tensor):
        return inputs
    values = list(inputs.values()) if isinstance(inputs, dict) else inputs
    assert torch.equal(values[0][:, :1], values[1])
    return values[0]


def same(batch, rows):
    x, y = batch
    return torch.equal(main_input(x), X[rows]) and torch.equal(y, Y[rows])


@every_shard
def test_every_shard_is_read_alike(shard):
    rows = torch.tensor([7, 2, 2])
    assert size_of(shard) == 11
    assert same(read(shard), torch.arange(11))
    assert same(rows_of(shard, rows), rows)
    assert same(rows_of(taken(shard, rows), torch.tensor([1, 0])), rows[:2].flip(0))
    assert same(read(first(shard, 3)), torch.arange(3))
    assert [len(y) for _, y in parts(shard, 3)] == [4, 4, 3]
    assert same(list(parts(shard, 3))[1], torch.arange(4, 8))
    assert [len(y) for _, y in batches_of(shard, 4)] == [4, 4, 3]
    assert same(list(batches_of(shard, 4))[2], torch.arange(8, 11))
    assert torch.equal(labels_of(shard, 4), Y)


class Watched(Dataset):
    """A pair as a Dataset that notes how many samples are asked for at once."""

    def __init__(self, pair):
        self.pair, self.asked = pair, []

    def __len__(self):
        return len(self.pair[1])

    def __getitems__(self, rows):
        self.asked.append(len(rows))
        return list(zip(self.pair[0][rows], self.pair[1][rows], strict=True))


def test_labels_that_a_data_set_lists_are_those_of_the_rows_that_are_meant():
    listed = Watched((X, Y))
    listed.labels = Y
    rows = torch.tensor([7, 2])
    assert torch.equal(labels_of(taken(Stored(listed), rows)), Y[rows]) and torch.equal(labels_of(Stored(listed)), Y)
    assert listed.asked == []  # no sample was read for them


def test_no_more_samples_are_read_at_once_than_allowed():
    watched = Watched((X, Y))
    shard = Stored(watched, most=4)
    assert [len(y) for _, y in parts(shard, 1)] == [4, 4, 3]
    assert [len(y) for _, y in batches_of(shard, 9)] == [4, 4, 3]
    labels_of(shard)
    assert max(watched.asked) == 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 11)).double()


@pytest.mark.parametrize("most", [None, 3, 4])
@pytest.mark.parametrize(
    "update",
    [
        BatchGradient(7, chunk=4),
        FullGradient(chunk=4),
        FullGradient(),
        ReportGradient(3, chunk=4),
        MeanLoss(chunk=4),
        MeanLoss(most=7),
        StepLosses((0.1, 0.2), most=6, candidates=2),
        StepLosses((0.1, 0.2), most=6, candidates=2, halves=True),
    ],
    ids=lambda update: type(update).__name__,
)
def test_gradients_and_losses_of_a_dataset_are_those_of_its_tensors(update, most):
    bench = Workbench(network(), nn.functional.cross_entropy)
    pair = X.double() / 11, Y
    params = bench.take()
    if isinstance(update, StepLosses):
        size = sum(p.numel() for p in params.values())
        params |= {"directions": torch.ones(2, size, dtype=torch.float64) / 9, "own share": torch.tensor([0.5, 1.0])}
    watched = Watched(pair)
    ours = update(bench, params, Stored(watched, most=most), torch.Generator().manual_seed(1))
    theirs = update(bench, params, pair, torch.Generator().manual_seed(1))
    torch.testing.assert_close(_numbers(ours), _numbers(theirs), rtol=0, atol=1e-12)
    if most is not None:
        assert max(watched.asked) <= most


def _numbers(outcome):
    return [*vars(outcome).values()] if hasattr(outcome, "noise") else outcome


# What users give


def test_arrays_become_tensors_and_share_their_memory():
    x, y = np.zeros((5, 3), dtype=np.float32), np.arange(5, dtype=np.int32)
    client = Client((x, y), test=({"a": x}, y))
    x[0, 0] = 7
    assert client.train[0][0, 0] == 7
    assert client.train[1].dtype == torch.int64
    assert client.test[0]["a"].shape == (5, 3)
    frozen = np.zeros((5, 3))
    frozen.flags.writeable = False
    assert Client((frozen, y[::-1])).train[1].tolist() == [4, 3, 2, 1, 0]
    other = Client((frozen.astype(">f4"), y.astype(">i2"))).train
    assert other[0].dtype == torch.float32 and other[1].tolist() == [0, 1, 2, 3, 4]


def test_data_that_were_computed_from_parameters_are_not_trained():
    x = X.clone().requires_grad_() * 2
    for train in ((x, Y), ({"a": x}, Y), TensorDataset(x, Y)):
        assert not any(tensor.requires_grad for tensor in tensors_of(read(Client(train).train)[0]))


def test_datasets_of_torch_and_those_that_only_look_like_one_are_stored():
    class Alike:
        def __len__(self):
            return 3

        def __getitem__(self, row):
            return {"a": torch.zeros(2), "label": row}

    client = Client(TensorDataset(X, Y), Alike(), width=0.5)
    assert (client.n_train, client.n_val) == (11, 3)
    inputs, labels = read(client.val)
    assert inputs["a"].shape == (3, 2) and labels.tolist() == [0, 1, 2]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Negative(Dataset):
    def __len__(self):
        return -1


class Endless(Dataset):
    def __getitem__(self, row):
        return X[0], 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": Stream()}, "train is an IterableDataset, which has no rows to draw; give a map-style Dataset"),
        ({"train": Endless()}, "train is a Endless without a length; give it a __len__"),
        ({"train": Negative()}, "train is a Negative without a length; give it a __len__"),
        ({"train": TensorDataset(X[:0], Y[:0])}, "train is empty"),
        (
            {"train": (np.ma.masked_invalid([[1.0], [np.nan]]), np.zeros(2, int))},
            "train must be a pair of tensors, .* got tuple of MaskedArray, Tensor",
        ),
        (
            {"train": (np.array(["a"]), np.array([0]))},
            "train must be a pair of tensors, .* got tuple of ndarray, Tensor",
        ),
        ({"train": (np.zeros((2, 3), np.uint8), np.zeros(2, int))}, "train inputs are torch.uint8; convert"),
        ({"train": ({}, Y)}, "train must be a pair of tensors, .*; got tuple of dict, Tensor"),
        ({"train": ((X, X[:3]), Y)}, "train has 3 inputs and 11 labels"),
        ({"train": ((X, X * torch.inf), Y)}, r"train inputs hold nan \(first in sample 0\)"),
        ({"train": (X, Y), "collate": list}, "collate makes batches of the samples of a Dataset, and its data are in"),
        ({"train": (X, Y), "collate": 3}, "collate is 3; it must be a function, or None"),
    ],
)
def test_bad_shards_are_refused_in_one_sentence(fields, message):
    with pytest.raises(ValueError, match=f"^client 7: {message}"):
        Client(**fields, key=7)


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_dataset_that_cannot_be_read_is_named_with_client_and_sample(part):
    bad = [(X[k], int(Y[k]) % 3) if k != 9 else None for k in range(len(X))]

    class Spoiled(Dataset):
        def __init__(self, first):
            self.first = first

        def __len__(self):
            return 5

        def __getitem__(self, row):
            return bad[self.first + row]

    pair = (X, Y % 3)
    config = Config(epochs=1, steps=0, warmup_rounds=1, baselines=())
    clients = [Client(pair), Client(**{"train": pair, part: Spoiled(8)})]
    word = "" if part == "train" else f"{part} "
    with pytest.raises(ValueError, match=rf"the {word}Dataset of client 1 cannot be read \(sample 1, which is None,"):
        fit(nn.Linear(2, 3), clients, config)
    clients = [Client(pair), Client(**{"train": pair, part: Spoiled(6)})]
    with pytest.raises((ValueError, RuntimeError), match=r"client 1: .*sample 3, which is None, of the Dataset cannot"):
        fit(nn.Linear(2, 3), clients, config.override(eval_every=1))


def test_a_dataset_without_end_is_refused():
    class Endless(Dataset):
        def __len__(self):
            return 10**18

        def __getitem__(self, row):
            return X[0], 0

    with pytest.raises(ValueError, match="train has 1,000,000,000,000,000,000 samples by its __len__; it must have at"):
        Client(Endless())


@pytest.mark.parametrize(
    ("sample", "collate", "message"),
    [
        ((X[0],), None, "a batch of the data set is a list of Tensor; it must be a pair"),
        ({"a": X[0]}, None, "a batch of the data set is a dict of 'a'; it must be a pair"),
        (
            (X[0], 1),
            lambda samples: (torch.zeros(1, 2), torch.zeros(1)),
            "a batch of 2 samples has 1 labels; collate must",
        ),
    ],
)
def test_a_batch_that_is_no_pair_is_refused_before_training(sample, collate, message):
    class Bad(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, row):
            return sample

    with pytest.raises(ValueError, match=rf"^the Dataset of client 0 cannot be read \({message}"):
        fit(nn.Linear(2, 3), [Client(Bad(), collate=collate)], Config(baselines=()))


@dataclass
class Longer(Dataset):
    """A Dataset that says that it has more samples than it has."""

    error: type[Exception]

    def __len__(self):
        return len(X) + 3

    def __getitem__(self, row):
        if row >= len(X):
            raise self.error
        return X[row], Y[row] % 3


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            IndexError,
            r"the Dataset says that it has 14 samples and raises IndexError\(\) for sample 1[123]; its __len__",
        ),
        (ZeroDivisionError, "ZeroDivisionError$"),  # says nothing itself, so its kind is named
    ],
)
def test_an_error_of_a_dataset_in_training_is_told_where_and_what_it_is(error, sentence):
    config = Config(epochs=1, steps=0, warmup_rounds=1, baselines=(), batch_size=32)
    with pytest.raises(RuntimeError, match=f"^perm: global round 0: client 0: {sentence}"):
        fit(nn.Linear(2, 3), [Client(Longer(error)), Client(Longer(error))], config)


def spoiled(row: int, value: float = torch.nan) -> TensorDataset:
    x = X.clone()
    x[row, 1] = value
    return TensorDataset(x / 11, Y % 3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_of_a_dataset_that_is_not_finite_is_named_when_it_is_read(value):
    shard = Stored(spoiled(7, value))
    assert size_of(read(first(shard, 7))) == 7
    with pytest.raises(ValueError, match=f"^inputs of sample 7 of the Dataset hold {value}; leave such samples out"):
        rows_of(shard, torch.tensor([2, 7]))
    with pytest.raises(ValueError, match=r"^labels of sample 4 of the Dataset hold nan"):
        read(Stored(TensorDataset(X, torch.where(Y == 4, torch.nan, 1.0))))
    assert rows_of(Stored(spoiled(7, -torch.inf)), torch.tensor([7]))[0][0, 1] == -torch.inf  # as in masks of attention
    mean = Stored(spoiled(7), collate=lambda samples: ({"x": torch.stack([x for x, _ in samples]).mean()}, Y))
    with pytest.raises(ValueError, match=r"^inputs of the batch of sample 0 of the Dataset hold nan"):
        read(mean)


@pytest.mark.parametrize(
    ("part", "place"),
    [("train", "global round 0: client 1"), ("val", "look ahead: client 1"), ("test", "after epoch 1: client 1: test")],
)
def test_a_run_whose_data_hold_nan_says_so_and_does_not_blame_the_rate(part, place):
    whole = dict.fromkeys(("train", "val", "test"), (X / 11, Y % 3))
    clients = [Client(**whole), Client(**whole | {part: spoiled(7)})]
    config = Config(epochs=1, steps=0, warmup_rounds=1, baselines=(), batch_size=11)
    with pytest.raises((ValueError, RuntimeError), match=f"^perm: {place}: inputs of sample 7 of the Dataset hold nan"):
        fit(nn.Linear(2, 3), clients, config)


def test_inputs_reach_a_model_as_it_takes_them():
    class Logits:
        logits = "L"

    assert outputs_of(lambda *args, **kwargs: torch.tensor([len(args), len(kwargs)]), X).tolist() == [1, 0]
    assert outputs_of(lambda *args, **kwargs: torch.tensor([len(args), len(kwargs)]), (X, X)).tolist() == [2, 0]
    assert outputs_of(lambda *args, **kwargs: torch.tensor([len(args), len(kwargs)]), {"a": X}).tolist() == [0, 1]
    assert outputs_of(lambda x: Logits(), X) == outputs_of(lambda x: {"logits": "L"}, X) == "L"


# The cache


def test_a_cache_holds_no_more_than_it_may_and_forgets_the_oldest():
    class Counting(Dataset):
        made = 0

        def __len__(self):
            return 5

        def __getitem__(self, row):
            Counting.made += 1
            return torch.full((2**18,), float(row)), row  # 1 MB

    cache = Cached(Counting(), mb=2)
    for row in (0, 1, 0, 2, 0, 1):  # 1 is forgotten for 2, and made again
        assert cache[row][0][0] == row
        assert cache.mb_kept <= 2
    assert Counting.made == 4 and len(cache) == 5
    again = pickle.loads(pickle.dumps(Cached(TensorDataset(X, Y), mb=1)))
    assert again.mb_kept == 0 and torch.equal(again[3][0], X[3])


def test_a_sample_larger_than_the_cache_is_not_kept():
    cache = Cached([(torch.zeros(2**19), 0)], mb=1)
    assert cache[0][1] == 0 and cache.mb_kept == 0
    with pytest.raises(ValueError, match=r"^a cache of 0 MB holds nothing"):
        Cached([], mb=0)
    with pytest.raises(TypeError, match=r"^the dataset is tensor\(3.\), which has no length \(.*\); it must be a map-"):
        Cached(torch.tensor(3.0), mb=1)


# Runs


def shard(i, n=12):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(i))
    return x, (x[:, :2].argmax(1) + i % 2) % 2


SMALL = {"steps": 30, "epochs": 2, "local_steps": 3, "batch_size": 4, "global_batch": 8, "engine": "sequential"}


def trained(make, model=None, **settings):
    clients = [
        Client(make(shard(i)), make(shard(i + 10)), make(shard(i + 20)), width=(1, 0.5)[i % 2]) for i in range(3)
    ]
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    return fit(model, clients, Config(**SMALL | {"baselines": ("local",)} | settings))


def test_a_run_on_datasets_reads_a_batch_at_a_time_and_gives_the_numbers_of_tensors():
    made = []

    def watched(pair):
        made.append(Watched(pair))
        return made[-1]

    ours, theirs = trained(watched, label_mask=True), trained(lambda pair: pair, label_mask=True)
    assert max(size for dataset in made for size in dataset.asked) <= 4
    for one, other in zip(ours.state.v, theirs.state.v, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)
    assert ours.accuracy == pytest.approx(theirs.accuracy, abs=1e-5)


class TwoInputs(nn.Module):
    """Takes a vector and a number, as arguments or by keyword, and returns an object with logits."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, a, b):
        hidden = self.body(torch.cat([a, b], dim=1)).relu()
        return {"logits": self.head(hidden), "hidden": hidden}


@pytest.mark.parametrize("kind", ["arguments", "keywords"])
def test_a_model_of_several_inputs_is_cut_trained_saved_and_loaded(kind, tmp_path):
    from hetperm import load_client

    def make(pair):
        several = pair[0], pair[0][:, :1]
        return (several if kind == "arguments" else dict(zip("ab", several, strict=True))), pair[1]

    result = trained(make, TwoInputs(), out=tmp_path / "run", baselines=())
    assert [row["params"] for row in result.clients] == [66, 34, 66]
    model, x = load_client(tmp_path / "run", 1, TwoInputs()), make(shard(21))[0]
    assert model.body.out_features == 4
    expected = outputs_of(result.model(1), x)
    torch.testing.assert_close(outputs_of(model, x), expected)
    page = re.sub(r"base64,[^\"]*", "", (tmp_path / "run" / "report.html").read_text())
    assert "your own data (36 training samples)" in page and "model test_shards.TwoInputs" in page
    assert not any(word in page for word in ("label-shift", "mlp", "mobile"))
