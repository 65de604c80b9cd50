"""Data sets: pools that never mix, what a client is scored on, the paper's synthetic set, and MNIST."""

import os
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hetperm.client import View
from hetperm.data import DATASETS, _images, images, load, synthetic

BESIDE = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="module", autouse=True)
def slow_imports():
    """torchvision takes a second to import; no single test should be charged with it."""
    import torchvision.transforms.functional  # noqa: F401


def digits(partition, num_clients=10, *, seed=0, **options):
    return load("digits", num_clients=num_clients, partition=partition, seed=seed, **options)


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    theirs, ours = load_digits(), images.digits().images
    assert (ours.x.dtype, ours.x.shape) == (torch.uint8, (1797, 1, 8, 8))
    assert (ours.x[:, 0].numpy() == theirs.images).all() and (ours.y.numpy() == theirs.target).all()


def numbered(monkeypatch, *, n=1000, classes=10, size=4):
    """Replace digits by images that carry their number in their first two pixels."""
    number = torch.arange(n)
    x = torch.zeros(n, 1, size, size, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = number // 250, number % 250
    source = images.Source(images.Images(x, number % classes), None, num_classes=classes, peak=1, mean=0.0, std=1.0)
    monkeypatch.setitem(DATASETS, "digits", lambda wanted: _images(lambda data_dir, download: source, wanted))


def numbers(x, degrees=0.0):
    x = images.rotate(x, -degrees)
    return (x[:, 0, 0, 0] * 250 + x[:, 0, 0, 1]).long()


EVERY = ["iid", "classes:2", "class-groups:2", "dirichlet:0.1", "label-shift:2", "rotation:4"]


def degrees_of(client, partition):
    return client.group * 90 if partition == "rotation:4" else 0


# The evaluation protocol


@pytest.mark.parametrize("partition", EVERY)
def test_a_training_image_has_one_owner_and_the_pools_are_disjoint(monkeypatch, partition):
    numbered(monkeypatch)
    problem = digits(partition)
    parts = {
        part: [numbers(getattr(client, part)[0], degrees_of(client, partition)) for client in problem.clients]
        for part in ("train", "val", "test")
    }
    train = torch.cat(parts["train"])
    assert len(train.unique()) == len(train) == 680
    train, val, test = (set(torch.cat(each).tolist()) for each in parts.values())
    assert (len(val), len(test)) == (120, 200)
    assert not train & val
    assert not train & test
    assert not val & test


@pytest.mark.parametrize("partition", EVERY)
def test_a_client_is_scored_on_all_images_of_its_classes_seen_its_own_way(monkeypatch, partition):
    numbered(monkeypatch)
    problem = digits(partition)
    pool = {
        part: torch.cat(
            [numbers(getattr(client, part)[0], degrees_of(client, partition)) for client in problem.clients]
        ).unique()
        for part in ("val", "test")
    }
    for client in problem.clients:
        x, y = client.train
        seen_as = dict(zip((numbers(x, degrees_of(client, partition)) % 10).tolist(), y.tolist()))  # class -> label
        everything = partition in ("iid", "label-shift:2", "rotation:4")
        assert len(seen_as) == 10 or not everything
        for part in ("val", "test"):
            x, y = getattr(client, part)
            number = numbers(x, degrees_of(client, partition))
            mine = pool[part] if everything else pool[part][[int(k) % 10 in seen_as for k in pool[part]]]
            assert number.sort().values.tolist() == mine.tolist()
            assert y.tolist() == [seen_as[int(k) % 10] for k in number]


@pytest.mark.parametrize("partition", EVERY)
def test_the_pools_do_not_depend_on_the_partition_or_the_number_of_clients(monkeypatch, partition):
    numbered(monkeypatch)
    test = [
        torch.cat([numbers(c.test[0], degrees_of(c, name)) for c in digits(name, clients).clients]).unique().tolist()
        for name, clients in (("iid", 1), (partition, 20))
    ]
    assert test[0] == test[1]


@pytest.mark.parametrize("partition", ["label-shift:3", "rotation:2", "iid"])
def test_clients_that_see_alike_share_the_memory_of_what_they_see(partition):
    problem = digits(partition, num_clients=50)
    expected = {"label-shift:3": 1, "rotation:2": 2, "iid": 1}[partition]
    for part in ("val", "test"):
        assert len({getattr(client, part)[0].data_ptr() for client in problem.clients}) == expected


@pytest.mark.parametrize("partition", ["classes:2", "dirichlet:0.1"])
def test_clients_with_fewer_classes_look_at_one_pool_through_views(partition):
    problem = digits(partition, num_clients=50)
    for part in ("val", "test"):
        views = [getattr(client, part) for client in problem.clients]
        assert all(isinstance(view, View) for view in views)
        assert len({view.pool[0].data_ptr() for view in views}) == 1


def test_group_0_of_a_rotation_sees_upright_images_and_the_others_the_same_images_turned():
    for g in (2, 4, 3):
        by_group = {client.group: client for client in digits(f"rotation:{g}").clients}
        upright = by_group[0].test[0]
        for group, client in by_group.items():
            turned = images.rotate(upright * 0.3760 + 0.3053, group * 360 / g)
            assert torch.allclose(client.test[0], (turned - 0.3053) / 0.3760, atol=1e-5)
            assert torch.equal(client.test[1], by_group[0].test[1])
            assert client.train[0].is_contiguous()
            assert client.test[0].is_contiguous()


# Any number of clients, any amount of data


@pytest.mark.parametrize("num_clients", [1, 2, 13, 200])
@pytest.mark.parametrize("partition", [*EVERY, "dirichlet:0.001", "dirichlet:1000"])
def test_any_number_of_clients_gets_data(partition, num_clients):
    problem = digits(partition, num_clients)
    assert len(problem.clients) == num_clients
    assert [client.key for client in problem.clients] == list(range(num_clients))
    for client in problem.clients:
        assert client.n_train >= 2
        assert client.n_val > 0
        assert client.train[0].shape[1:] == client.test[0].shape[1:] == (1, 8, 8)
        assert set(client.train[1].tolist()) <= set(client.test[1].tolist())


def test_all_and_none_deal_out_the_whole_training_pool_and_a_number_deals_out_that_many():
    whole = digits("iid", samples_per_client="all")
    assert [c.n_train for c in whole.clients] == [c.n_train for c in digits("iid").clients] == [123, 123] + [122] * 8
    assert {c.n_train for c in digits("iid", samples_per_client=7).clients} == {7}
    assert {c.n_train for c in digits("classes:1", samples_per_client=1).clients} == {1}


def test_the_validation_share_is_taken_of_what_is_not_for_testing():
    sizes = {}
    for share in (0, 0.15, 0.5):
        client = digits("iid", 1, validation_share=share).clients[0]
        sizes[share] = client.n_train, client.n_val, len(client.test[1])
    assert sizes == {0: (1438, 0, 359), 0.15: (1222, 216, 359), 0.5: (719, 719, 359)}
    assert digits("iid", 1, validation_share=0).clients[0].val is None


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_the_same_seed_gives_the_same_data_and_another_seed_other_data(name):
    one, same, other = (load(name, num_clients=4, partition="label-shift:2", seed=seed).clients for seed in (3, 3, 4))
    for i in range(4):
        for part in ("train", "val", "test"):
            assert all(torch.equal(*both) for both in zip(getattr(one[i], part), getattr(same[i], part)))
            assert not torch.equal(getattr(one[i], part)[0], getattr(other[i], part)[0])


def test_loading_leaves_the_global_generators_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    digits("dirichlet:0.5")
    load("synthetic", num_clients=2, partition=None, seed=0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


# Images


def test_digits_are_float_images_of_mean_0_and_variance_1():
    problem = digits("iid", 1, validation_share=0)
    assert (problem.in_channels, problem.num_classes, problem.image_size, problem.name) == (1, 10, 8, "digits")
    assert problem.groups is None
    x = torch.cat([problem.clients[0].train[0], problem.clients[0].test[0]])
    assert (x.dtype, tuple(x.shape)) == (torch.float32, (1797, 1, 8, 8))
    assert x.mean().item() == pytest.approx(0, abs=1e-3)
    assert x.std().item() == pytest.approx(1, abs=1e-3)


def test_groups_are_those_of_the_clients():
    problem = digits("class-groups:5", 4)
    assert problem.groups == tuple(client.group for client in problem.clients)
    assert sorted(problem.groups) == [0, 0, 1, 1]


def test_images_are_resized_on_request():
    problem = digits("rotation:4", 4, image_size=5)
    assert problem.image_size == 5
    for client in problem.clients:
        assert {pair[0].shape[1:] for pair in (client.train, client.val, client.test)} == {(1, 5, 5)}


def test_a_quarter_turn_moves_pixels_exactly_and_counter_clockwise():
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    turned = {degrees: images.rotate(x, degrees).flatten().tolist() for degrees in (0, 90, 180, 270, 360, -90)}
    assert turned == {
        0: [1, 2, 3, 4],
        90: [2, 4, 1, 3],
        180: [4, 3, 2, 1],
        270: [3, 1, 4, 2],
        360: [1, 2, 3, 4],
        -90: [3, 1, 4, 2],
    }


def test_other_turns_go_the_same_way_and_agree_with_the_exact_ones():
    x = torch.zeros(1, 1, 16, 16)
    x[..., 3:6, 4:12] = 1
    nearly, exact = images.rotate(x, 89.999), images.rotate(x, 90)
    assert torch.allclose(nearly, exact, atol=1e-2)
    assert images.rotate(x, 120).shape == x.shape


def test_an_oblong_image_is_not_turned_into_another_shape():
    with pytest.raises(ValueError, match="images of 2x3 change shape when turned; give --image-size"):
        images.rotate(torch.zeros(1, 1, 2, 3), 90)
    assert images.rotate(torch.zeros(1, 1, 2, 3), 180).shape == (1, 1, 2, 3)


# The paper's synthetic set


@pytest.fixture(scope="module")
def paper():
    return load("synthetic", num_clients=50, partition=None, seed=0)


def test_the_synthetic_set_has_the_sizes_of_the_paper(paper):
    assert (paper.in_channels, paper.num_classes, paper.image_size) == (60, 2, None)
    assert paper.groups == (0,) * 25 + (1,) * 25
    for client in paper.clients:
        assert client.train[0].shape == (500, 60)
        assert (client.n_train, client.n_val, len(client.test[1])) == (500, 75, 1000)
        assert (client.train[0].dtype, client.train[1].dtype) == (torch.float32, torch.int64)


def test_synthetic_inputs_have_the_mean_and_the_covariance_of_the_paper(paper):
    for group, mean in ((0, 0.2), (1, -0.2)):
        x = torch.cat([client.test[0] for client in paper.clients if client.group == group]).double()  # 25,000 samples
        variance = torch.arange(1, 61, dtype=torch.float64) ** -1.2
        error = (variance / len(x)).sqrt()
        assert ((x.mean(0) - mean).abs() < 5 * error).all()
        correlation = torch.cov(x.T) / torch.outer(variance, variance).sqrt()
        assert (correlation - torch.eye(60)).abs().max() < 5 * (2 / len(x)) ** 0.5


def test_the_two_halves_label_in_opposite_ways_and_the_teacher_never_errs(paper):
    w = synthetic.teacher(0)
    for client in paper.clients:
        for x, y in (client.train, client.val, client.test):
            positive = (x.double() @ w > 0).long()
            assert torch.equal(y, positive if client.group == 0 else 1 - positive)


def test_the_teacher_is_drawn_around_a_tenth():
    w = torch.stack([synthetic.teacher(seed) for seed in range(300)])
    assert w.mean().item() == pytest.approx(0.1, abs=5 / 18000**0.5)
    assert w.std().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("num_clients", "groups"), [(1, [1]), (2, [0, 1]), (3, [0, 1, 1]), (5, [0, 0, 1, 1, 1])])
def test_the_first_half_is_the_clients_up_to_half_of_n_as_the_paper_counts(num_clients, groups):
    assert [client.group for client in synthetic.clients(num_clients, seed=0, samples=3, test=2, d=4)] == groups


def test_a_synthetic_client_does_not_depend_on_how_much_else_is_drawn():
    few = synthetic.clients(2, seed=0, samples=5, test=7)[0]
    more_training, more_clients = (
        synthetic.clients(n, seed=0, samples=samples, test=7, validation=3)[0] for n, samples in ((2, 8), (9, 5))
    )
    assert torch.equal(few.test[0], more_training.test[0])
    assert torch.equal(few.test[0], more_clients.test[0])
    assert torch.equal(few.train[0], more_clients.train[0])
    assert few.val is None


def test_train_validation_and_test_samples_are_all_different(paper):
    x = torch.cat([pair[0] for client in paper.clients for pair in (client.train, client.val, client.test)])
    assert len(x[:, 0].unique()) > 0.99 * len(x)
    assert len(x.unique(dim=0)) == len(x) == 50 * 1575


# Bad requests


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"name": "digit"}, "unknown dataset 'digit'; did you mean 'digits'?"),
        ({"name": "fashion_mnist"}, "unknown dataset 'fashion_mnist'; did you mean 'fashion-mnist'?"),
        (
            {"name": "xyz"},
            "unknown dataset 'xyz'; known are synthetic, digits, digit-pairs, mnist, fashion-mnist, emnist, cifar10, "
            "imagefolder:PATH, leaf:PATH",
        ),
        ({"name": "digits:8"}, "unknown dataset 'digits:8'; did you mean 'digits'?"),
        ({"name": "cifar-10"}, "unknown dataset 'cifar-10'; did you mean 'cifar10'?"),
        ({"name": "imagefolder"}, "unknown dataset 'imagefolder'; did you mean 'imagefolder:PATH'?"),
        ({"name": "leaf:"}, "unknown dataset 'leaf:'; did you mean 'leaf:PATH'?"),
        ({"name": "image-folder:a:b"}, "unknown dataset 'image-folder:a:b'; did you mean 'imagefolder:a:b'?"),
        ({"partition": "label-shft:2"}, "unknown partition 'label-shft:2'; did you mean 'label-shift:2'?"),
        ({"partition": None}, "digits does not come divided among clients; name a partition, such as 'label-shift:2'"),
        ({"num_clients": 0}, "num_clients is 0; it must be a whole number of at least 1"),
        ({"samples_per_client": 0}, "samples_per_client is 0; it must be a whole number of at least 1"),
        ({"samples_per_client": "some"}, "samples_per_client is 'some'; it must be a whole number of at least 1"),
        (
            {"samples_per_client": 400},
            "4 clients of 400 samples need 1600 training samples and the training pool holds 1",
        ),
        (
            {"num_clients": 5000},
            "5000 clients cannot share the 1222 training samples there are; lower num_clients, or validation_share if",
        ),
        ({"image_size": -1}, "image_size is -1; it must be a whole number of at least 1"),
        ({"validation_share": 1}, "validation_share 1 is outside [0, 1)"),
        (
            {"name": "synthetic", "partition": "iid"},
            "synthetic comes divided in two halves, which is label-shift:2; it",
        ),
        ({"name": "synthetic", "image_size": 8}, "synthetic consists of vectors; image_size 8 has no meaning for it"),
    ],
)
def test_a_bad_request_is_refused_in_one_sentence(request_, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        load(**{"name": "digits", "num_clients": 4, "partition": "label-shift:2", "seed": 0, **request_})
    assert "\n" not in str(caught.value)


def test_images_that_do_not_fit_into_memory_once_they_are_resized_are_refused(monkeypatch):
    asked = {"num_clients": 2, "partition": "iid", "seed": 0, "samples_per_client": 10}
    others = 1797 - 1222  # are for validation and testing; digits have one channel
    monkeypatch.setattr("hetperm.data.available_bytes", lambda: 4 * (20 + others) * 9 * 9)
    load("digits", **asked, image_size=9)
    message = "595 images of 10x10 take 0.000222 GB and 0.00018 GB of memory are free; give a smaller --image-size"
    with pytest.raises(ValueError, match=message):
        load("digits", **asked, image_size=10)
    with pytest.raises(ValueError, match="1,170 images of 9x9"):
        load("digits", **asked | {"partition": "rotation:2"}, image_size=9)
    monkeypatch.setattr("hetperm.data.available_bytes", lambda: None)
    load("digits", **asked, image_size=10)


def test_synthetic_clients_whose_samples_do_not_fit_into_memory_are_refused_before_they_are_drawn(monkeypatch):
    few = load("synthetic", num_clients=2, partition=None, seed=0, samples_per_client=10, validation_share=0.5)
    size = sum(x.nbytes + y.nbytes for client in few.clients for x, y in (client.train, client.val, client.test))
    asked = {"name": "synthetic", "partition": None, "seed": 0, "samples_per_client": 10, "validation_share": 0.5}
    monkeypatch.setattr("hetperm.data.available_bytes", lambda: size)
    load(**asked, num_clients=2)
    message = (
        "the samples of 100000 clients take 23.4 GB and 0.000469 GB of memory are free; take fewer clients, or lower"
    )
    with pytest.raises(ValueError, match=message):
        load(**asked, num_clients=100_000)
    with pytest.raises(ValueError, match="the samples of 3 clients take"):
        load(**asked, num_clients=3)


# Files


def mnist(data_dir, **options):
    return load("mnist", **{"num_clients": 2, "partition": "iid", "seed": 0, "data_dir": data_dir, **options})


PLACES = {
    "mnist": "MNIST/raw",
    "fashion-mnist": "FashionMNIST/raw",
    "emnist": "EMNIST/raw",
    "cifar10": "cifar-10-batches-py",
}


@pytest.mark.parametrize(("name", "folder"), PLACES.items())
def test_a_missing_folder_is_named_with_the_flag_that_fetches_it(tmp_path, name, folder):
    with pytest.raises(FileNotFoundError) as caught:
        load(name, num_clients=2, partition="iid", seed=0, data_dir=tmp_path)
    assert str(caught.value) == (
        f"{name} is not in {tmp_path / folder}; point --data-dir at the folder that holds {Path(folder).parts[0]}, "
        "or let `hetperm train --download` fetch it"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "folder"), PLACES.items())
def test_a_set_with_a_file_missing_is_not_there(tmp_path, name, folder, any_sums):
    if name == "cifar10":
        write_cifar10(tmp_path / folder, each=2)
    elif name == "emnist":
        write_emnist(tmp_path / folder, train=20, test=5)
    else:
        write_idx(tmp_path / folder, train=20, test=5)
    load(name, num_clients=2, partition="iid", seed=0, data_dir=tmp_path)
    for file in sorted((tmp_path / folder).iterdir()):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(FileNotFoundError, match=f"^{name} is not in "):
            load(name, num_clients=2, partition="iid", seed=0, data_dir=tmp_path)
        file.write_bytes(content)


def test_without_a_folder_the_default_one_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^mnist is not in data/MNIST/raw; point --data-dir at"):
        mnist(None)


def test_damaged_files_are_named_in_one_sentence(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    write_idx(raw, train=30, test=10)
    (raw / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0\0")
    with pytest.raises(OSError, match=rf"^mnist could not be read from {re.escape(str(raw))} \(.+\); remove"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (
            [3] * 20,
            r"has 30 images and 20 labels; remove that folder and let `hetperm train --download` fetch",
        ),
        ([0, 10] * 15, r"has labels from 0 to 10 and 10 classes, numbered from 0; remove that folder"),
    ],
)
def test_labels_that_are_not_of_the_images_are_refused(tmp_path, labels, sentence):
    raw = tmp_path / "MNIST" / "raw"
    write_idx(raw, train=30, test=10)
    (raw / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, len(labels)) + bytes(labels))
    with pytest.raises(ValueError, match=f"^mnist in {re.escape(str(raw))} {sentence}"):
        mnist(tmp_path)


def test_a_failed_download_is_told_in_one_sentence(tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    def fail(self):
        raise RuntimeError("Error downloading train-images:\nTried one mirror, got:\nno network\n")

    monkeypatch.setattr(MNIST, "download", fail)
    with pytest.raises(
        OSError, match=r"^mnist could not be fetched into .*MNIST/raw \(Error .* no network\); is there a network\?"
    ) as caught:
        mnist(tmp_path, download=True)
    assert "\n" not in str(caught.value)


def write_idx(raw, *, train, test):
    raw.mkdir(parents=True)
    for part, n in (("train", train), ("t10k", test)):
        pixels = np.arange(n * 784, dtype=np.int64).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, n, 28, 28) + pixels.tobytes())
        labels = (np.arange(n) % 10).astype(np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, n) + labels.tobytes())


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_the_files_of_a_torchvision_set_are_read_and_its_test_images_only_test(tmp_path, name, folder):
    write_idx(tmp_path / folder / "raw", train=100, test=30)
    problem = load(name, num_clients=5, partition="iid", seed=0, data_dir=str(tmp_path), download=True)  # nothing to do
    assert (problem.in_channels, problem.image_size, problem.num_classes) == (1, 28, 10)
    assert [client.n_train for client in problem.clients] == [17] * 5
    assert {(client.n_val, len(client.test[1])) for client in problem.clients} == {(15, 30)}
    assert torch.equal(problem.clients[0].test[1], torch.arange(30) % 10)


def write_emnist(raw, *, train, test):
    """Every image black but for a bright top row, which is a column in the files; labels 46, 45, ..."""
    raw.mkdir(parents=True)
    for part, n in (("train", train), ("test", test)):
        pixels = np.zeros((n, 28, 28), dtype=np.uint8)
        pixels[:, :, 0] = 255
        header = struct.pack(">IIII", 0x803, n, 28, 28)
        (raw / f"emnist-balanced-{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = (46 - np.arange(n) % 47).astype(np.uint8)
        (raw / f"emnist-balanced-{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, n) + labels.tobytes())


def test_emnist_has_47_classes_and_stands_upright(tmp_path):
    write_emnist(tmp_path / "EMNIST" / "raw", train=100, test=47)
    problem = load("emnist", num_clients=5, partition="iid", seed=0, data_dir=tmp_path)
    assert (problem.in_channels, problem.image_size, problem.num_classes) == (1, 28, 47)
    assert [client.n_train for client in problem.clients] == [17] * 5
    x, y = problem.clients[0].test
    assert torch.equal(y, torch.arange(46, -1, -1))
    assert (x[:, 0, 0, :] > 0).all()
    assert (x[:, 0, 1:, :] < 0).all()


def write_cifar10(folder, *, each):
    """Five training batches and a test batch; the three channels of image k hold 3k, 3k + 1 and 3k + 2."""
    folder.mkdir(parents=True)
    for batch in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        pixels = np.repeat(np.arange(3 * each, dtype=np.uint8).reshape(each, 3), 32 * 32, axis=1)
        (folder / batch).write_bytes(pickle.dumps({"data": pixels, "labels": [k % 10 for k in range(each)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))


@pytest.fixture
def any_sums(monkeypatch):
    """torchvision's CIFAR10 without check sums: only the real files have those."""
    from torchvision.datasets import CIFAR10

    for part in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, part, [[file, None] for file, _ in getattr(CIFAR10, part)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})


def test_cifar10_is_read_in_colour_and_its_test_images_only_test(tmp_path, any_sums):
    write_cifar10(tmp_path / "cifar-10-batches-py", each=20)
    problem = load("cifar10", num_clients=5, partition="iid", seed=0, data_dir=tmp_path)
    assert (problem.in_channels, problem.image_size, problem.num_classes) == (3, 32, 10)
    assert [client.n_train for client in problem.clients] == [17] * 5
    x, y = problem.clients[0].test
    assert torch.equal(y, torch.arange(20) % 10)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    assert (x == x[:, :, :1, :1]).all()
    assert torch.allclose((x[:, :, 0, 0] * std + mean) * 255, torch.arange(60.0).view(20, 3), atol=1e-4)


def test_cifar10_whose_check_sums_are_wrong_is_refused(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder, each=2)
    with pytest.raises(
        OSError, match=rf"^cifar10 could not be read from {re.escape(str(folder))} \(Dataset not found or "
    ):
        load("cifar10", num_clients=2, partition="iid", seed=0, data_dir=tmp_path)


@pytest.fixture
def real_mnist():
    folder = Path(os.environ.get("HETPERM_DATA", BESIDE))
    if not (folder / "MNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        pytest.skip("MNIST is not here; set HETPERM_DATA to a folder that holds it in torchvision's layout")
    return folder


@pytest.mark.slow
def test_fifty_clients_share_one_copy_of_the_test_images_of_mnist(real_mnist):
    problem = mnist(real_mnist, num_clients=50, partition="classes:2", samples_per_client=200)
    assert {client.n_train for client in problem.clients} == {200}
    for client in problem.clients:
        assert set(client.train[1].tolist()) == set(client.test[1].tolist())
        assert len(client.test[1]) < 2400
    assert {client.test.pool[0].data_ptr() for client in problem.clients} == {
        problem.clients[0].test.pool[0].data_ptr()
    }
    assert problem.clients[0].test.pool[0].shape == (10000, 1, 28, 28)
    x = problem.clients[0].test.pool[0]
    assert x.mean().item() == pytest.approx(0, abs=0.02)
    assert x.std().item() == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_all_of_mnist_is_dealt_out(real_mnist):
    problem = mnist(real_mnist, num_clients=7, partition="dirichlet:0.3")
    assert sum(client.n_train for client in problem.clients) == 51000
    assert torch.bincount(torch.cat([client.train[1] for client in problem.clients])).min() > 4000
