"""leaf:PATH: every writer a client, the same data pooled, and what is said about files that cannot be used."""

import json
import re
from dataclasses import replace

import pytest
import torch

from hetperm.data import images, load
from hetperm.data.partition import divide

SIZES = {"w3": 12, "w1": 20, "w0": 6, "w2": 1, "w4": 9}


@pytest.fixture
def raw(monkeypatch):
    """Pixels as they are in the files."""
    monkeypatch.setattr(images, "measured", lambda source, train: replace(source, mean=0.0, std=1.0))


def user_data(sizes, *, start=0, classes=5, pixels=9):
    """Images whose first pixel is their number, whose second is their writer's, and whose class is number mod 5."""
    data, number = {}, start
    for user in sorted(sizes):
        x, y = [], []
        for _ in range(sizes[user]):
            x.append([float(number), float(user[1:]), *[0.0] * (pixels - 2)])
            y.append(number % classes)
            number += 1
        data[user] = {"x": x, "y": y}
    return data


def write(folder, data, *, files=1):
    """LEAF json, the users dealt over some files."""
    folder.mkdir(parents=True, exist_ok=True)
    users = list(data)
    for k in range(files):
        mine = users[k::files]
        content = {
            "users": mine,
            "num_samples": [len(data[user]["y"]) for user in mine],
            "user_data": {user: data[user] for user in mine},
        }
        (folder / f"all_data_{k}.json").write_text(json.dumps(content))


@pytest.fixture
def both(tmp_path):
    """Five writers with training and test images."""
    write(tmp_path / "train", user_data(SIZES), files=2)
    write(tmp_path / "test", user_data(dict.fromkeys(SIZES, 3), start=1000), files=3)
    return tmp_path


def read(root, partition="writer", num_clients=5, *, seed=0, **options):
    return load(f"leaf:{root}", num_clients=num_clients, partition=partition, seed=seed, **options)


def numbers(pair):
    return [] if pair is None else pair[0][:, 0, 0, 0].long().tolist()


def writers(pair):
    return set(pair[0][:, 0, 0, 1].long().tolist())


# Every client a writer


def test_client_i_is_writer_i_by_name_with_its_own_training_and_test_images(both, raw):
    problem = read(both)
    assert (problem.in_channels, problem.image_size, problem.num_classes, problem.groups) == (1, 3, 5, None)
    assert [client.key for client in problem.clients] == [0, 1, 2, 3, 4]
    for i, client in enumerate(problem.clients):
        for pair in (client.train, client.val, client.test):
            assert pair is None or writers(pair) == {i}
            assert pair is None or pair[1].tolist() == [number % 5 for number in numbers(pair)]
        assert sorted(numbers(client.test)) == list(range(1000 + 3 * i, 1003 + 3 * i))
        assert len(numbers(client.train)) + len(numbers(client.val)) == SIZES[f"w{i}"]
    every = [number for client in problem.clients for number in (*numbers(client.train), *numbers(client.val))]
    assert sorted(every) == list(range(48))


def test_validation_images_are_taken_of_every_writer_who_can_spare_one(both):
    assert [client.n_val for client in read(both).clients] == [1, 3, 0, 2, 1]
    assert [client.n_val for client in read(both, validation_share=0.5).clients] == [3, 10, 0, 6, 4]
    assert [client.val for client in read(both, validation_share=0).clients] == [None] * 5


@pytest.mark.parametrize("partition", [None, "natural"])
def test_no_partition_and_natural_are_by_writer(both, partition):
    assert [numbers(client.train) for client in read(both, partition).clients] == [
        numbers(client.train) for client in read(both).clients
    ]


def test_writers_are_drawn_and_those_of_fewer_clients_are_among_those_of_more(both, raw):
    drawn = {}
    for seed in range(8):
        clients = [read(both, num_clients=n, seed=seed).clients for n in (1, 2, 4)]
        names = [[writers(client.train).pop() for client in some] for some in clients]
        assert all(some == sorted(some) for some in names)
        assert {*names[0]} < {*names[1]} < {*names[2]}
        drawn[seed] = tuple(names[2])
    assert len(set(drawn.values())) > 1


def test_a_writer_has_the_same_images_however_many_others_take_part(both, raw):
    for samples in (None, 5):
        most = 5 if samples is None else 4
        all_ = {
            writers(client.train).pop(): numbers(client.train)
            for client in read(both, num_clients=most, samples_per_client=samples).clients
        }
        for client in read(both, num_clients=2, samples_per_client=samples).clients:
            assert numbers(client.train) == all_[writers(client.train).pop()]


def test_writers_with_too_few_images_for_samples_per_client_do_not_take_part(both, raw):
    clients = read(both, num_clients=3, samples_per_client=8).clients
    assert [client.n_train for client in clients] == [8, 8, 8]
    assert [writers(client.train).pop() for client in clients] == [1, 3, 4]


def test_a_folder_without_a_test_part_is_divided_writer_by_writer(tmp_path, raw):
    write(tmp_path, user_data(SIZES), files=2)
    parts = {"train": [], "val": [], "test": []}
    sizes = []
    for i, client in enumerate(read(tmp_path).clients):
        for part, found in parts.items():
            pair = getattr(client, part)
            assert pair is None or writers(pair) == {i}
            found.extend(numbers(pair))
        sizes.append(len(numbers(client.test)))
    assert sizes == [1, 4, 0, 2, 2]
    assert sorted(number for found in parts.values() for number in found) == list(range(48))


def test_one_seed_decides_everything_and_another_seed_decides_otherwise(tmp_path, raw):
    write(tmp_path, user_data(SIZES))
    one, same, other = (
        [
            [numbers(pair) for pair in (client.train, client.val, client.test)]
            for client in read(tmp_path, seed=s).clients
        ]
        for s in (3, 3, 4)
    )
    assert one == same
    assert one != other


def test_the_order_of_users_and_files_does_not_matter(tmp_path, raw):
    data = user_data(SIZES)
    write(tmp_path / "one", data)
    write(tmp_path / "other", dict(reversed(data.items())), files=3)
    for partition in ("writer", "iid"):
        one, other = (
            [(numbers(client.train), numbers(client.test)) for client in read(tmp_path / name, partition).clients]
            for name in ("one", "other")
        )
        assert one == other


# Pooled


@pytest.mark.parametrize("partition", ["iid", "classes:2", "class-groups:2", "dirichlet:0.3", "label-shift:2"])
def test_under_another_partition_all_writers_are_dealt_out_and_tested_on(both, raw, partition):
    clients = read(both, partition, 4).clients
    train = [number for client in clients for number in numbers(client.train)]
    val = {number for client in clients for number in numbers(client.val)}
    assert len(train) == len(set(train))
    assert not val & set(train)
    assert {number for client in clients for number in numbers(client.test)} <= set(range(1000, 1015))
    if partition in ("iid", "label-shift:2", "dirichlet:0.3"):
        assert sorted([*train, *val]) == list(range(48))
        assert len(set().union(*(writers(client.train) for client in clients))) == 5


def test_pools_are_the_same_under_every_partition(both, raw):
    def pools(partition):
        clients = read(both, partition).clients
        return [sorted({n for client in clients for n in numbers(getattr(client, part))}) for part in ("val", "test")]

    assert pools("writer") == pools("iid")


def test_pixels_have_mean_0_and_variance_1_and_can_be_resized(both):
    problem = read(both, "iid", 1, validation_share=0)
    x = problem.clients[0].train[0]
    assert (x.shape, x.dtype) == ((48, 1, 3, 3), torch.float32)
    assert x.mean().item() == pytest.approx(0, abs=1e-3)
    assert x.std().item() == pytest.approx(1, abs=2e-3)
    resized = read(both, image_size=7)
    assert resized.image_size == 7
    assert {pair[0].shape[1:] for c in resized.clients for pair in (c.train, c.test)} == {(1, 7, 7)}


def test_classes_that_only_test_images_have_count(tmp_path):
    write(tmp_path / "train", user_data({"w0": 6}, classes=3))
    write(tmp_path / "test", user_data({"w0": 9}, classes=8))
    assert read(tmp_path, num_clients=1).num_classes == 8


def test_a_writer_without_test_images_is_not_scored_and_one_without_training_images_takes_no_part(tmp_path, raw):
    write(tmp_path / "train", user_data({"w0": 6, "w1": 6, "w2": 0}))
    write(tmp_path / "test", user_data({"w0": 3, "w2": 3}))
    clients = read(tmp_path, num_clients=2).clients
    assert [client.test is None for client in clients] == [False, True]
    assert len(read(tmp_path, "iid", 2).clients[0].test[1]) == 6


# The partition alone


def test_shares_by_writer_are_the_rows_of_the_writers():
    owner = torch.tensor([7, 3, 7, 9, 3, 7])
    shares = divide("writer", torch.zeros(6).long(), num_classes=2, num_clients=3, seed=0, writers=owner)
    assert [(share.writer, share.rows.tolist()) for share in shares] == [(3, [1, 4]), (7, [0, 2, 5]), (9, [3])]
    assert {(share.classes, share.labels, share.group, share.degrees) for share in shares} == {
        ((0, 1), (0, 1), None, 0)
    }


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_sets_without_writers_say_which_have_them(name):
    message = (
        "only leaf:PATH and an npz:PATH with 'user' say whom"
        if name == "digits"
        else "synthetic comes divided in two halves"
    )
    with pytest.raises(ValueError, match=message):
        load(name, num_clients=2, partition="writer", seed=0)


def test_writer_takes_no_number(both):
    with pytest.raises(ValueError, match=r"^partition 'writer:2': writer takes no number; write 'writer'$"):
        read(both, "writer:2")


# Files that cannot be used


def refuses(error, message, root, **options):
    with pytest.raises(error, match=f"^{re.escape(message)}") as caught:
        read(root, **{"num_clients": 1, **options})
    assert "\n" not in str(caught.value)


def test_a_file_that_lost_samples_is_refused(both):
    path = next((both / "train").iterdir())
    content = json.loads(path.read_text())
    content["num_samples"][0] += 1
    path.write_text(json.dumps(content))
    refuses(ValueError, f"{path} is not whole: its num_samples do not agree with the samples", both)


def test_too_few_writers_are_counted(both):
    refuses(ValueError, "writer: 6 clients are too many for the 5 writers there are", both, num_clients=6)
    message = "writer: 3 of 5 writers have 8 training samples, too few for 4 clients; lower samples_per_client or num_"
    refuses(ValueError, message, both, num_clients=4, samples_per_client=8)


def test_folders_that_hold_nothing_are_named(tmp_path):
    refuses(FileNotFoundError, f"there is no folder {tmp_path / 'x'} to read LEAF json from", tmp_path / "x")
    refuses(FileNotFoundError, f"{tmp_path} holds no .json files; point leaf:PATH at LEAF's data", tmp_path)
    write(tmp_path, user_data({"w0": 0}))
    refuses(FileNotFoundError, f"{tmp_path} holds no samples; point leaf:PATH at LEAF's data", tmp_path)
    (tmp_path / "b.json").symlink_to("gone")
    refuses(OSError, f"{tmp_path / 'b.json'} is no file; replace or remove it", tmp_path)
    write(tmp_path / "test", user_data({"w0": 4}))
    refuses(FileNotFoundError, f"there is a folder {tmp_path / 'test'} and no {tmp_path / 'train'}", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", " is not LEAF json (Expecting property name"),
        ("[]", " is not LEAF json (list indices must be integers"),
        ('{"users": []}', " is not LEAF json: it has no 'user_data'"),
        ('{"users": ["w0"], "user_data": {}}', " is not LEAF json: it has no 'w0'"),
        ('{"users": ["w0"], "user_data": {"w0": {"x": []}}}', " is not LEAF json: it has no 'y'"),
        (
            '{"users": ["w0"], "user_data": {"w0": {"x": 1, "y": 2}}}',
            " is not LEAF json ('int' object is not iterable)",
        ),
        ('{"users": [], "user_data": {"w0": {}}}', " is not LEAF json: it has data of 1 users and lists 0"),
    ],
)
def test_a_file_that_is_not_leaf_is_named(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    refuses(ValueError, f"{tmp_path / 'a.json'}{message}", tmp_path)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (["to be", "or no"], ["o", "t"], "has samples of 5 characters and others have 4 pixels"),
        (["to be", "or not"], ["o", "t"], "has texts of 5 to 6 characters; all must have one length"),
        (["to be"], ["or"], "has texts whose labels are not single characters; each is the one that follows"),
        (["to be"], [0], "has texts whose labels are not single characters"),
        (["to be"], ["o", "r"], "has 1 inputs and 2 labels"),
        ([["1.0"] * 4], [0], "has inputs that are neither numbers nor texts; leaf:PATH reads images and texts"),
        ([[1.0, None, 0.0, 0.0]], [0], "has inputs that are neither numbers nor texts"),
        ([[1.0] * 4, [1.0] * 9], [0, 1], "has samples of different sizes; leaf:PATH reads images as flat lists"),
        ([[1.0] * 60], [0], "has inputs of 60 values; leaf:PATH reads square images as flat lists"),
        ([[[1.0] * 3] * 3], [0], "has inputs of 3x3 values; leaf:PATH reads square images as flat lists"),
        ([[]], [0], "has inputs of 0 values"),
        ([1.0], [0], "has inputs of no values"),
        ([[1.0] * 4], [0.5], "has labels that are not whole numbers from 0"),
        ([[1.0] * 4], ["a"], "has labels that are not whole numbers from 0"),
        ([[1.0] * 4], [-1], "has labels that are not whole numbers from 0"),
        ([[1.0] * 4], [True], "has labels that are not whole numbers from 0"),
        ([[1.0] * 4], [], "has labels that are not whole numbers from 0"),
        ([[1.0] * 4], [0, 1], "has 1 inputs and 2 labels"),
        ([[1.0] * 4], [10**9], "has the label 1000000000; number the classes from 0, at most 100000 of them"),
        ([[1.0, 0.0, 0.0, float("nan")]], [0], "has pixels that are not finite"),
        ([[1.0, 0.0, 0.0, 1e39]], [0], "has a pixel of size 1e+39; pixels must be from -1e+30 to 1e+30"),
        ([[1.0, 0.0, 0.0, -1e308]], [0], "has a pixel of size 1e+308; pixels must be from -1e+30 to 1e+30"),
    ],
)
def test_samples_that_are_not_images_are_refused_by_user(tmp_path, x, y, message):
    write(tmp_path, {"w0": {"x": [[0.0] * 4], "y": [0]}, "w1": {"x": x, "y": y}})
    refuses(ValueError, f"{tmp_path / 'all_data_0.json'}: user 'w1' {message}", tmp_path)


def test_images_of_different_sizes_are_refused(tmp_path):
    write(tmp_path / "train", {**user_data({"w0": 2}), **user_data({"w1": 2}, pixels=16)})
    message = f"{tmp_path / 'train' / 'all_data_0.json'}: user 'w1' has samples of 16 pixels and others have 9 pixels"
    refuses(ValueError, message, tmp_path)
    write(tmp_path / "train", user_data({"w0": 2}))
    write(tmp_path / "test", user_data({"w0": 2}, pixels=16))
    refuses(ValueError, f"{tmp_path}: images for training have side 3 and for testing 4", tmp_path)


def test_a_user_of_two_files_is_refused(tmp_path):
    write(tmp_path, user_data({"w0": 2}))
    (tmp_path / "b.json").write_text((tmp_path / "all_data_0.json").read_text())
    refuses(ValueError, f"{tmp_path / 'b.json'}: user 'w0' comes a second time in {tmp_path}", tmp_path)


def test_writers_none_of_whom_can_be_tested_are_refused(tmp_path):
    write(tmp_path / "train", user_data({"w0": 4}))
    write(tmp_path / "test", user_data({"w1": 4}))
    refuses(ValueError, f"leaf:{tmp_path}: no client has test samples to be scored on", tmp_path)
