"""npz:PATH: windows, images and vectors, every user a client, and what is said about files that cannot be used."""

import io
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hetperm import Config, load_client, run
from hetperm.data import images, load, npz
from hetperm.data.npz import by_position

pytestmark = pytest.mark.usefixtures("undrawn")

BESIDE = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture
def raw(monkeypatch):
    """Values as they are in the files."""
    monkeypatch.setattr(images, "measured", lambda source, train: replace(source, mean=0.0, std=1.0, peak=1))


def windows(n=240, *, users=4, classes=3, length=8, channels=2):
    """Windows that carry their number; users come one after the other, and a class as a run of numbers inside each."""
    number = np.arange(n)
    x = np.zeros((n, length, channels), dtype=np.float32)
    x[:, 0, 0] = number
    each = n // users
    return {"x": x, "y": number % each * classes // each, "user": 7 + number // each}


@pytest.fixture
def write(tmp_path):
    def save(**arrays):
        np.savez(tmp_path / "some.npz", **arrays)
        return tmp_path / "some.npz"

    return save


def read(path, partition="natural", num_clients=4, *, seed=0, **options):
    return load(f"npz:{path}", num_clients=num_clients, partition=partition, seed=seed, **options)


def numbers(pair):
    """The numbers that samples carry in their first value."""
    return [] if pair is None else sorted(pair[0].flatten(1)[:, 0].long().tolist())


# Every user a client


def test_a_class_is_divided_by_position_with_a_window_left_out_between_the_parts():
    # 20 samples: 5 for testing and 1 left out, 2 of the other 14 for validation and 1 left out, 11 for training.
    pool = by_position(torch.zeros(20), torch.zeros(20), validation_share=0.15, gap=1)
    assert pool.tolist() == [0] * 11 + [-1] + [1] * 2 + [-1] + [2] * 5
    whole = by_position(torch.zeros(20), torch.zeros(20), validation_share=0.15, gap=0)
    assert whole.tolist() == [0] * 13 + [1] * 2 + [2] * 5
    without = by_position(torch.zeros(20), torch.zeros(20), validation_share=0, gap=1)
    assert without.tolist() == [0] * 14 + [-1] + [2] * 5


@pytest.mark.parametrize(
    ("n", "expected"),
    [(1, [0]), (2, [0, 0]), (3, [0, -1, 2]), (4, [0, 0, -1, 2]), (5, [0, -1, 1, -1, 2]), (6, [0, -1, 1, -1, 2, 2])],
)
def test_a_short_class_gives_up_validation_first_and_never_training(n, expected):
    assert by_position(torch.zeros(n), torch.zeros(n), validation_share=0.15, gap=1).tolist() == expected


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_no_two_neighbours_of_a_class_are_in_different_pools(gap):
    generator = torch.Generator().manual_seed(0)
    y, user = torch.randint(4, (2000,), generator=generator), torch.randint(5, (2000,), generator=generator)
    pool = by_position(y, user, validation_share=0.2, gap=gap)
    for c in range(4):
        for u in range(5):
            mine = pool[(y == c) & (user == u)]
            kept = mine[mine >= 0]
            assert kept.tolist() == sorted(kept.tolist()), "training, then validation, then testing"
            assert set(kept.tolist()) == {0, 1, 2}
            assert (mine < 0).sum() == 2 * gap
            borders = [k for k in range(len(mine) - 1) if mine[k] >= 0 and mine[k + 1] >= 0 and mine[k] != mine[k + 1]]
            assert len(borders) == (2 if gap == 0 else 0)


def test_client_i_is_user_i_with_the_beginning_of_each_class_to_train_on_and_the_end_to_be_tested_on(write, raw):
    problem = read(write(**windows()))
    assert (problem.in_channels, problem.image_size, problem.num_classes, problem.groups) == (2, (8,), 3, None)
    assert [client.key for client in problem.clients] == [0, 1, 2, 3]
    for i, client in enumerate(problem.clients):
        runs = [range(60 * i + 20 * c, 60 * i + 20 * c + 20) for c in range(3)]
        assert client.train[0].shape == (33, 2, 8)
        assert numbers(client.train) == [k for run in runs for k in run[:11]]
        assert numbers(client.val) == [k for run in runs for k in run[12:14]]
        assert numbers(client.test) == [k for run in runs for k in run[15:]]
        for x, y in (client.train, client.val, client.test):
            assert y.tolist() == [int(k) % 60 // 20 for k in x[:, 0, 0]]


def test_channels_come_before_time(write, raw):
    x = np.tile(np.arange(12, dtype=np.float64).reshape(1, 4, 3), (8, 1, 1))
    client = read(write(x=x, y=np.zeros(8, dtype=int)), "iid", num_clients=1).clients[0]
    assert client.train[0][0].tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_users_may_be_texts_in_any_order_and_are_drawn_if_there_are_more_than_clients(write, raw):
    arrays = windows()
    shuffled = np.random.default_rng(0).permutation(240)
    names = np.array(["d", "a", "c", "b"])[arrays["user"] - 7]
    path = write(x=arrays["x"][shuffled], y=arrays["y"][shuffled], user=names[shuffled])
    owner = [{k // 60 for k in numbers(client.train)} for client in read(path).clients]
    assert owner == [{1}, {3}, {2}, {0}], "in the order of their names"
    drawn = {tuple(numbers(client.train)[0] // 60 for client in read(path, num_clients=2, seed=seed).clients)
             for seed in range(8)}  # fmt: skip
    assert len(drawn) > 1


def test_writer_and_natural_and_no_partition_say_the_same(write):
    path = write(**windows())
    first, *others = [read(path, partition).clients for partition in ("natural", "writer", None)]
    for clients in others:
        for a, b in zip(first, clients, strict=True):
            assert all(torch.equal(x, y) for part in ("train", "val", "test")
                       for x, y in zip(getattr(a, part), getattr(b, part)))  # fmt: skip


def test_split_says_nothing_about_natural_clients(write, caplog):
    arrays = windows()
    plain, split = (read(write(**arrays, **more)) for more in ({}, {"split": np.arange(240) % 2}))
    assert "split is not used, because natural divides what each user has by position" in caplog.text
    assert [client.n_train for client in plain.clients] == [client.n_train for client in split.clients] == [33] * 4


def test_images_of_a_user_are_all_used(write):
    x = np.zeros((40, 4, 4), dtype=np.uint8)
    clients = read(write(x=x, y=np.zeros(40, dtype=int), user=np.arange(40) % 2), num_clients=2).clients
    assert [(client.n_train, client.n_val, len(client.test[1])) for client in clients] == [(13, 2, 5)] * 2


# Other partitions


@pytest.mark.parametrize("partition", ["iid", "classes:2", "dirichlet:0.5", "label-shift:2"])
def test_a_split_is_kept_and_without_one_a_quarter_is_held_out(write, raw, partition):
    arrays = windows()
    split = (np.arange(240) % 6 == 0).astype(np.uint8)
    for more, wanted in (({"split": split}, 40), ({}, 60)):
        clients = read(write(**arrays, **more), partition).clients
        train = [k for client in clients for k in numbers(client.train)]
        test = {k for client in clients for k in numbers(client.test)}
        assert len(train) == len(set(train))
        assert len(test) == wanted
        assert not {*train} & test
        assert not more or test == {*range(0, 240, 6)}
    assert {k for client in read(write(**arrays), partition, seed=1).clients for k in numbers(client.test)} != test


def test_users_who_are_no_clients_are_dealt_out_alike(write, raw):
    clients = read(write(**windows()), "iid", num_clients=2).clients
    assert all({k // 60 for k in numbers(client.train)} == {0, 1, 2, 3} for client in clients)


# Inputs of a model


def test_sensor_channels_are_standardised_by_the_training_windows_alone(write):
    generator = np.random.default_rng(0)
    x = generator.normal([5.0, -1e-3, 3.0], [2.0, 1e-5, 0.0], (400, 8, 3))
    user, split = np.arange(400) % 4, np.repeat([0, 1], 200)
    x[200:] *= 1000  # the test windows
    problem = read(write(x=x, y=np.zeros(400, dtype=int), user=user, split=split), "iid", validation_share=0)
    train = torch.cat([client.train[0] for client in problem.clients])
    assert train.dtype == torch.float32
    assert torch.allclose(train.mean((0, 2)), torch.zeros(3), atol=1e-3)
    assert torch.allclose(train.std((0, 2)), torch.tensor([1.0, 1.0, 0.0]), atol=2e-3), "a constant channel stays so"
    assert problem.clients[0].test[0].std() > 100


def test_vectors_are_standardised_feature_by_feature(write):
    x = np.random.default_rng(0).normal([100, 0.01], [1, 0.001], (200, 2))
    problem = read(write(x=x, y=np.arange(200) % 2), "label-shift:2")
    assert (problem.in_channels, problem.image_size) == (2, None)
    train = torch.cat([client.train[0] for client in problem.clients])
    assert torch.allclose(train.mean(0), torch.zeros(2), atol=1e-2)
    assert torch.allclose(train.std(0), torch.ones(2), atol=1e-2)


@pytest.mark.parametrize(("shape", "channels"), [((4, 4), 1), ((4, 4, 1), 1), ((4, 4, 3), 3), ((4, 6), 1)])
def test_images_are_scaled_and_normalised_as_other_sets_are(write, shape, channels):
    x = np.random.default_rng(0).integers(0, 256, (200, *shape), dtype=np.uint8)
    problem = read(write(x=x, y=np.arange(200) % 2), "iid", validation_share=0)
    assert problem.in_channels == channels
    assert problem.image_size == (4 if shape[1] == 4 else (4, 6))
    train = torch.cat([client.train[0] for client in problem.clients])
    assert train.shape == (150, channels, *shape[:2])
    assert abs(train.mean()) < 1e-3
    assert train.std() == pytest.approx(1, abs=1e-2)


def test_pixels_of_a_colour_image_keep_their_place(write, raw):
    x = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(1, 2, 3, 3).repeat(8, axis=0)
    image = read(write(x=x, y=np.zeros(8, dtype=int)), "iid", num_clients=1).clients[0].train[0][0]
    assert torch.equal(image, torch.from_numpy(x[0]).permute(2, 0, 1).float())


def test_square_images_are_turned_and_resized(write):
    x = np.random.default_rng(0).integers(0, 256, (80, 4, 6, 3), dtype=np.uint8)
    path = write(x=x, y=np.arange(80) % 2)
    assert read(path, "rotation:4", image_size=5).image_size == 5
    with pytest.raises(ValueError, match=r": images of 4x6 change shape when turned; give --image-size$"):
        read(path, "rotation:3")


def test_classes_are_named_counted_or_read_off_the_labels(write):
    arrays = windows()
    assert read(write(**arrays)).num_classes == 3
    assert read(write(**arrays, classes=["a", "b", "c", "d"])).num_classes == 4
    assert read(write(**arrays, classes=5)).num_classes == 5


def test_a_member_that_is_no_array_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "some.npz", "w") as archive:
        archive.writestr("x.npy", b"hello")
        archive.writestr("y", b"")
    with pytest.raises(ValueError, match=r"some\.npz: x is no array of numpy; save it with numpy\.savez$"):
        read(tmp_path / "some.npz")


def test_arrays_of_other_names_are_not_read(write):
    assert read(write(**windows(), channels=np.array(["x", "y"]), notes=np.zeros(3))).num_classes == 3


# Bad input


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"y": None}, "has no 'y' and holds x, user; save x and y in it"),
        ({"x": None, "y": None, "user": None}, "has no 'x' and holds nothing; save x and y in it"),
        ({"x": None, "X": np.zeros(3)}, "has no 'x' and holds y, user, X; save x and y in it"),
        ({"y": np.zeros(239, int)}, "x has 240 samples and y has shape (239,); y must be one value a sample"),
        ({"y": np.zeros((240, 1), int)}, "x has 240 samples and y has shape (240, 1); y must be one value a sample"),
        ({"user": np.zeros(3, int)}, "x has 240 samples and user has shape (3,); user must be one value a sample"),
        ({"split": np.zeros(3, int)}, "x has 240 samples and split has shape (3,); split must be one value a sample"),
        ({"y": np.full(240, -1)}, "y has the label -1; labels must be whole numbers from 0"),
        ({"y": np.full(240, 0.5)}, "y is float64; labels must be whole numbers from 0, saved as integers"),
        ({"y": np.full(240, 10**9)}, "y has the label 1000000000; number the classes from 0, at most 100000 of them"),
        ({"classes": ["a", "b"]}, "y has the label 2 and there are 2 classes, numbered from 0"),
        ({"classes": np.zeros((2, 2))}, "classes is float64 of shape (2, 2); it must be different names"),
        ({"classes": np.array(["b", "a", "a"])}, "classes has the name 'a' twice; it must be different names"),
        ({"classes": -1}, "classes is -1; a number of classes must be from 1 to 100000"),
        ({"classes": 10**6}, "classes is 1000000; a number of classes must be from 1 to 100000"),
        ({"classes": 0.5}, "classes is float64 of shape (); it must be different names"),
        ({"user": np.zeros(240)}, "user is float64; it must be whole numbers or texts"),
        ({"split": np.arange(240) % 3}, "split is int64 and has the values 0, 1, 2; it must be whole numbers, 0 for"),
        ({"split": np.zeros(240, int)}, "split is int64 and has the values 0; it must be whole numbers, 0 for"),
        ({"split": np.array(["0", "1"] * 120)}, "split is <U1 and has the values 0, 1; it must be whole numbers, 0 f"),
        ({"x": np.zeros((240, 4, 4, 4, 4))}, "x is float64 of shape (240, 4, 4, 4, 4); it must be vectors (n, d), "),
        ({"x": np.zeros((240, 4, 4, 3))}, "x is float64 of shape (240, 4, 4, 3); it must be vectors (n, d), "),
        ({"x": np.zeros((240, 4, 4, 2), np.uint8)}, "x is uint8 of shape (240, 4, 4, 2); it must be vectors (n, d), "),
        ({"x": np.zeros(240)}, "x is float64 of shape (240,); it must be vectors (n, d), windows (n, length, ch"),
        ({"x": np.zeros((0, 4)), "y": np.zeros(0, int)}, "x has shape (0, 4), which holds nothing; save at least one"),
        ({"x": np.zeros((240, 3), complex)}, "x is complex128; it must be numbers"),
        ({"x": np.array(["a"] * 240)}, "x is <U1; it must be numbers"),
        ({"x": np.zeros((240, 4, 4), bool)}, "x is bool of shape (240, 4, 4); save images with .astype('uint8') * 255"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(write, change, sentence):
    path = write(**{key: value for key, value in {**windows(), **change}.items() if value is not None})
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:? {re.escape(sentence)}") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300, 3e38, -3e38])
def test_values_with_which_float32_cannot_reckon_are_refused_with_the_first_sample(write, value):
    arrays = windows()
    arrays["x"] = arrays["x"].astype(np.float64)
    arrays["x"][[5, 17], 3, 1] = value
    with pytest.raises(ValueError, match=r"x is not finite, or beyond 1e\+30, in 2 samples, first in sample 5; "):
        read(write(**arrays))


@pytest.mark.filterwarnings("error")
def test_infinities_of_both_signs_are_refused_without_a_word_of_numpys(write):
    with pytest.raises(ValueError, match=r"x is not finite, or beyond 1e\+30, in 2 samples"):
        read(write(x=np.array([[1e300], [-1e300]]), y=np.arange(2)))


def test_a_column_whose_digits_float32_would_lose_is_named(write, caplog):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 3)), np.arange(200) % 2
    read(write(x=x + np.array([0, 100, 0]), y=y), "iid", 2)
    assert caplog.text == ""
    read(write(x=x + np.array([0, 1.7e9, 0]), y=y), "iid", 2)
    assert "the values of column 1 of x differ by about 0.998" in caplog.text and "steps of 2e+02" in caplog.text
    assert "subtract a constant from such columns (1 of them)" in caplog.text
    caplog.clear()
    seconds = np.stack([np.arange(200) + 1_700_000_000, np.zeros(200, dtype=int)], 1)  # the second says nothing anyway
    read(write(x=seconds, y=y), "iid", 2)
    assert "the values of column 0 of x" in caplog.text
    windows = np.tile(x[:, None, :2] - 1e9, (1, 8, 1))
    caplog.clear()
    read(write(x=windows, y=y), "iid", 2)
    assert "the values of channel 0 of x" in caplog.text and "(2 of them)" in caplog.text


def test_labels_with_gaps_are_named(write, caplog):
    x = np.zeros((40, 3), dtype=np.float32)
    read(write(x=x, y=np.arange(40) % 2 * 3), "iid", 2)
    assert caplog.text == ""
    read(write(x=x, y=np.arange(40) % 2 * 999), "iid", 2)
    assert "2 of 1000 classes up to the largest label occur; number them from 0" in caplog.text


def test_labels_that_begin_at_one_are_named(write, caplog):
    arrays = {"x": np.zeros((40, 3), dtype=np.float32), "y": np.arange(40) % 3 + 1}
    assert read(write(**arrays, classes=4), "iid", 2).num_classes == 4
    assert caplog.text == ""  # who says that there are four means it
    assert read(write(**arrays), "iid", 2).num_classes == 4
    assert "y has labels from 1 to 3, so that class 0 never occurs; number them from 0" in caplog.text


def test_vectors_of_true_and_false_are_those_of_1_and_0(write):
    x, y = np.random.default_rng(0).integers(2, size=(40, 3)), np.arange(40) % 2
    whole = read(write(x=x, y=y), "iid", 2).clients[0].train[0]
    assert torch.equal(read(write(x=x.astype(bool), y=y), "iid", 2).clients[0].train[0], whole)


def test_an_array_whose_name_is_misspelt_is_named(write, caplog):
    read(write(**windows(), Splits=np.zeros(240, int), channels=np.array(["a", "b"])))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "'Splits' is not read; is it meant to be 'split'?"
    ]


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"^there is no file {re.escape(str(path))} to read samples from; "):
            read(path)


def test_what_is_no_npz_file_is_refused_and_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    path = tmp_path / "some.npz"
    objects = np.array([Trap()] * 240, dtype=object)
    for save in (
        lambda: path.write_text("x,y\n1,2\n"),
        lambda: path.write_bytes(b""),
        lambda: np.savez(path, x=objects, y=np.zeros(240, int)),
        lambda: path.write_bytes(_one_array()),
        lambda: objects.dump(path),
        lambda: path.write_bytes(_saved(tmp_path)[:-40]),
    ):
        save()
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} (cannot be read as an|is no) npz") as caught:
            read(path)
        assert "\n" not in str(caught.value) and "If you trust" not in str(caught.value)
    assert not (tmp_path / "sprung").exists()


def _one_array():
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    return stream.getvalue()


def _saved(folder):
    np.savez(folder / "whole.npz", **windows())
    return (folder / "whole.npz").read_bytes()


def test_too_many_clients_and_no_users_are_refused(write):
    path = write(**windows())
    with pytest.raises(ValueError, match=r"^natural: 5 clients are too many for the 4 users there are; lower num_cl"):
        read(path, num_clients=5)
    with pytest.raises(ValueError, match=r"^natural: 0 of 4 users have 50 training samples, too few for 2 clients; "):
        read(path, num_clients=2, samples_per_client=50)
    arrays = windows()
    del arrays["user"]
    with pytest.raises(ValueError, match=r"^partition 'natural' makes a client of every user, and only leaf:PATH and"):
        read(write(**arrays))
    with pytest.raises(ValueError, match="does not come divided among clients; name a partition"):
        read(write(**arrays), None)


def test_windows_and_vectors_are_neither_turned_nor_resized(write):
    arrays = windows()
    for kind, x in (("windows", arrays["x"]), ("vectors", arrays["x"][:, :, 0])):
        path = write(**{**arrays, "x": x})
        with pytest.raises(ValueError, match=f"consists of {kind}, which cannot be turned; name another partition"):
            read(path, "rotation:4")
        with pytest.raises(ValueError, match=f"consists of {kind}; image_size 8 has no meaning for it"):
            read(path, image_size=8)


def test_a_path_is_needed(tmp_path):
    with pytest.raises(ValueError, match=r"^unknown dataset 'npz:'; did you mean 'npz:PATH'"):
        load("npz:", num_clients=2, partition="iid", seed=0)


# Runs


SHORT = {"epochs": 1, "local_steps": 1, "warmup_rounds": 1, "quiet": True, "baselines": ()}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["har-cnn", "mlp"])
def test_models_of_windows_are_trained_at_their_width_saved_and_loaded_again(write, tmp_path, model):
    arrays = windows(480)
    arrays["x"] += np.random.default_rng(0).normal(size=arrays["x"].shape)
    config = Config(
        dataset=f"npz:{write(**arrays)}", partition="natural", num_clients=4, model=model, steps=40, **SHORT
    )
    result = run(config.override(out=tmp_path / "run"))
    client = result.setting.clients[3]
    module = load_client(tmp_path / "run", 3)
    assert sum(p.numel() for p in module.parameters()) == result.setting.num_params(client.width)
    with torch.no_grad():
        right = (module(client.test[0]).argmax(1) == client.test[1]).double().mean().item()
    assert right == pytest.approx(result.clients[3]["accuracy"])


@pytest.mark.parametrize(
    ("x", "model", "sentence"),
    [
        (windows()["x"], "cnn", "cnn takes images and was given windows of length 8; use har-cnn, logistic or mlp"),
        (windows()["x"][:, 0], "har-cnn", "har-cnn takes windows of a signal and was given flat feature vectors; use"),
        (np.zeros((240, 8, 8), np.uint8), "har-cnn", "har-cnn takes windows of a signal and was given 8x8 images; use"),
    ],
)
def test_a_model_for_other_inputs_is_refused(write, tmp_path, x, model, sentence):
    path = write(**{**windows(), "x": x})
    with pytest.raises(ValueError, match=f"^{sentence}"):
        run(Config(dataset=f"npz:{path}", partition="iid", num_clients=4, model=model, out=tmp_path / "run", **SHORT))


# Real files


def real(name):
    path = Path(os.environ.get("HETPERM_DATA", BESIDE)) / name
    if not path.is_file():
        pytest.skip(f"{name} is not here; set HETPERM_DATA to a folder that holds it")
    return path


@pytest.mark.slow
def test_thirty_people_with_phones_are_thirty_clients_whose_pools_share_no_reading():
    path = real("hapt.npz")
    problem = read(path, num_clients=30)
    assert (problem.in_channels, problem.image_size, problem.num_classes) == (6, (128,), 6)
    assert min(client.n_train for client in problem.clients) > 100
    for client in problem.clients:
        # Windows overlap by half, so a half that two windows have in common is the same readings.
        train, val, test = (
            {half.numpy().tobytes() for window in x for half in window.chunk(2, dim=1)}
            for x, _ in (client.train, client.val, client.test)
        )
        assert not train & val
        assert not train & test
        assert not val & test


@pytest.mark.slow
def test_cifar10_in_one_file_is_divided_as_its_split_says():
    problem = read(real("cifar10.npz"), "classes:2", num_clients=20, samples_per_client=50)
    assert (problem.in_channels, problem.image_size, problem.num_classes) == (3, 32, 10)
    assert all(len(client.test[1]) == 2000 for client in problem.clients)


def test_arrays_that_are_larger_than_memory_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((1000, 50)), y=np.zeros(1000, dtype=int))
    monkeypatch.setattr(npz, "available_bytes", lambda: 300_000)
    with pytest.raises(ValueError, match=r"bomb\.npz holds 0\.00038 GB and 0\.00028 GB of memory are free"):
        read(tmp_path / "bomb.npz")
