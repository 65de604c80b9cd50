"""imagefolder:PATH: which images are read, who gets them, and what is said about folders that cannot be used."""

import errno
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from hetperm import Config, shards
from hetperm.client import View
from hetperm.data import folder, images, load, views
from hetperm.runs import training
from hetperm.runs.setting import from_config
from hetperm.shards import Stored

EVERY = ["iid", "classes:2", "class-groups:2", "dirichlet:0.3", "label-shift:2", "rotation:4"]


@pytest.fixture(scope="module", autouse=True)
def slow_imports():
    """torchvision takes a second to import; no single test should be charged with it."""
    import torchvision.datasets
    import torchvision.transforms.functional  # noqa: F401


@pytest.fixture
def raw(monkeypatch):
    """Pixels between 0 and 1 as they are in the files."""
    monkeypatch.setattr(images, "measured", lambda source, train: replace(source, mean=0.0, std=1.0))


def write(root, counts, *, start=0, size=(4, 4), names=None):
    """Images all of one colour, (class, number // 250, number % 250), numbered on over the classes from ``start``."""
    number = start
    for c, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for k in range(count):
            colour = (c, number // 250, number % 250)
            Image.new("RGB", size, colour).save(root / name / (names(k) if names else f"{k:04}.png"))
            number += 1
    return root


def numbers(x):
    green, blue = (x[:, 1:, 0, 0] * 255).round().long().T
    return green * 250 + blue


def read(root, partition="iid", num_clients=3, *, seed=0, **options):
    return load(f"imagefolder:{root}", num_clients=num_clients, partition=partition, seed=seed, **options)


def parts_of(problem):
    return {
        part: torch.cat([numbers(getattr(client, part)[0]) for client in problem.clients])
        for part in ("train", "val", "test")
    }


FOUR = {"ant": 30, "bee": 30, "cat": 30, "dog": 30}


# Which images, and whose


@pytest.mark.parametrize("partition", EVERY)
def test_a_training_image_has_one_owner_and_the_pools_are_disjoint(tmp_path, raw, partition):
    parts = parts_of(read(write(tmp_path, FOUR), partition, 4))
    assert len(parts["train"].unique()) == len(parts["train"]) == 80
    train, val, test = (set(part.tolist()) for part in parts.values())
    assert (len(val), len(test)) == (16, 24)
    assert len(train | val | test) == 120


@pytest.mark.parametrize("partition", EVERY)
def test_labels_are_those_of_the_folders_in_order_of_name(tmp_path, raw, partition):
    problem = read(write(tmp_path, FOUR), partition, 4)
    assert (problem.num_classes, problem.in_channels, problem.image_size) == (4, 3, 4)
    assert problem.name == f"imagefolder:{tmp_path}"
    for client in problem.clients:
        shift = set()
        for x, y in (client.train, client.val, client.test):
            red = (x[:, 0, 0, 0] * 255).round().long()
            assert torch.equal(red, numbers(x) // 30)
            shift |= {*zip(red.tolist(), y.tolist())}
        assert len(shift) == len({c for c, _ in shift}) == len({y for _, y in shift})
        assert partition == "label-shift:2" or all(c == y for c, y in shift)


def test_test_and_validation_images_are_taken_of_every_class_in_proportion(tmp_path, raw):
    client = read(write(tmp_path, {"a": 100, "b": 10, "c": 3, "d": 2, "e": 1}), num_clients=1).clients[0]
    counts = {part: torch.bincount(getattr(client, part)[1], minlength=5).tolist() for part in ("train", "val", "test")}
    assert counts == {"train": [68, 7, 1, 1, 1], "val": [12, 1, 1, 0, 0], "test": [20, 2, 1, 1, 0]}


def test_a_shard_is_not_sorted_by_class(tmp_path):
    y = read(write(tmp_path, FOUR), num_clients=1).clients[0].train[1]
    assert len(y[:20].unique()) == 4


def test_folders_for_testing_and_validation_are_used_for_nothing_else(tmp_path, raw):
    write(tmp_path / "train", {"a": 10, "b": 10})
    write(tmp_path / "test", {"a": 3, "b": 2}, start=1000)
    parts = parts_of(read(tmp_path, num_clients=1))
    assert sorted(parts["test"].tolist()) == [1000, 1001, 1002, 1003, 1004]
    assert sorted([*parts["train"].tolist(), *parts["val"].tolist()]) == list(range(20))
    assert len(parts["val"]) == 4  # two of each class
    write(tmp_path / "val", {"a": 1, "b": 2}, start=2000)
    parts = parts_of(read(tmp_path, num_clients=1))
    assert sorted(parts["val"].tolist()) == [2000, 2001, 2002]
    assert sorted(parts["train"].tolist()) == list(range(20))
    shutil.rmtree(tmp_path / "test")
    parts = parts_of(read(tmp_path, num_clients=1))
    assert (len(parts["train"]), len(parts["val"]), len(parts["test"])) == (16, 3, 4)
    assert max(parts["test"]) < 20


def test_folders_beside_train_that_are_not_read_are_named(tmp_path, raw, caplog):
    write(tmp_path / "train", {"a": 5, "b": 5})
    read(tmp_path, num_clients=1)
    write(tmp_path / "validation", {"a": 1, "b": 1})
    assert not caplog.records
    read(tmp_path, num_clients=1)
    (record,) = caplog.records
    assert record.getMessage().endswith("of the folders beside train only val and test are read, and not 'validation'")


def test_a_class_may_be_called_train_or_test(tmp_path, raw):
    problem = read(write(tmp_path, {"car": 5, "test": 5, "train": 5}), num_clients=1)
    assert problem.num_classes == 3


def test_test_images_without_classes_are_left_alone(tmp_path, raw):
    write(tmp_path / "train", {"a": 10, "b": 10})
    (tmp_path / "test").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "test" / "0.png")
    assert parts_of(read(tmp_path, num_clients=1))["test"].shape == (4,)


def test_one_seed_decides_everything_and_another_seed_decides_otherwise(tmp_path, raw):
    write(tmp_path, FOUR)
    one, same, other = (parts_of(read(tmp_path, "classes:2", seed=seed)) for seed in (3, 3, 4))
    for part in one:
        assert torch.equal(one[part], same[part])
        assert one[part].tolist() != other[part].tolist()


def test_the_order_of_files_on_disk_does_not_matter(tmp_path, raw, monkeypatch):
    write(tmp_path, FOUR)
    before = parts_of(read(tmp_path, "classes:2"))
    walk = [(top, folders[::-1], files[::-1]) for top, folders, files in os.walk(tmp_path)]
    walks = {top: [entry for entry in walk if entry[0].startswith(str(top))][::-1] for top, _, _ in walk}
    scan = os.scandir
    monkeypatch.setattr(os, "walk", lambda top, **_: walks[str(top)])

    class Backwards:
        def __init__(self, path):
            with scan(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __iter__(self):
            return iter(self.entries)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Backwards)
    after = parts_of(read(tmp_path, "classes:2"))
    assert all(torch.equal(before[part], after[part]) for part in before)


def test_a_relative_path_and_one_from_home_are_found(tmp_path, monkeypatch):
    write(tmp_path / "pictures", FOUR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("pictures", "./pictures/", "~/pictures"):
        assert read(path).num_classes == 4


def test_nothing_is_written(tmp_path):
    write(tmp_path, FOUR)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    read(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# Decoding


def decoded(monkeypatch):
    """The files that are decoded from now on."""
    seen, decode = [], folder.Files._decode
    monkeypatch.setattr(folder.Files, "_decode", lambda self, path: seen.append(path) or decode(self, path))
    return seen


@pytest.mark.parametrize("partition", EVERY)
def test_only_what_clients_hold_is_decoded_and_nothing_twice(tmp_path, raw, monkeypatch, partition):
    write(tmp_path, FOUR)
    seen = decoded(monkeypatch)
    read(tmp_path, partition, 4, samples_per_client=3)
    assert len(seen) == len(set(seen)) == 12 + 16 + 24


def test_clients_look_at_one_test_pool(tmp_path):
    write(tmp_path, FOUR)
    assert len({client.test[0].data_ptr() for client in read(tmp_path, "label-shift:2", 8).clients}) == 1
    views = [client.test for client in read(tmp_path, "classes:2", 8).clients]
    assert all(isinstance(view, View) for view in views)
    assert len({view.pool[0].data_ptr() for view in views}) == 1


def test_more_images_than_a_thread_takes_at_a_time_come_in_order(tmp_path, monkeypatch):
    write(tmp_path, {"a": 23})
    monkeypatch.setattr(folder, "CHUNK", 5)
    files = folder.Files(tuple(str(tmp_path / "a" / f"{k:04}.png") for k in (*range(22, -1, -1),)), 4, None)
    assert files.decode()[:, 2, 0, 0].tolist() == list(range(22, -1, -1))
    assert files[torch.tensor([3, 0])].decode()[:, 2, 0, 0].tolist() == [19, 22]
    assert files.shape == files.decode().shape == (23, 3, 4, 4)


def test_pixels_keep_their_places(tmp_path):
    pixels = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    x = folder.Files((str(tmp_path / "a.png"),), 4, None).decode()
    assert torch.equal(x[0], torch.from_numpy(pixels).permute(2, 0, 1))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode).save(path)
    assert folder.Files((str(path),), 4, None).decode().unique().tolist() == [255]


@pytest.mark.parametrize("ending", ["jpg", "JPEG", "bmp", "webp", "ppm"])
def test_every_format_that_torchvision_lists_is_read(tmp_path, ending):
    write(tmp_path, {"a": 5, "b": 5}, names=lambda k: f"{k}.{ending}")
    assert read(tmp_path, num_clients=2).image_size == 4


def test_channels_have_mean_0_and_variance_1_by_the_training_images(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for k in range(60):
            noise = generator.integers((0, 100, 7), (256, 150, 8), size=(6, 6, 3), dtype=np.uint8)  # blue is constant
            Image.fromarray(noise).save(tmp_path / name / f"{k}.png")
    x = read(tmp_path, num_clients=1).clients[0].train[0]
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-2)
    assert x.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 0], abs=1e-2)


def test_what_is_measured_does_not_depend_on_test_images(tmp_path):
    write(tmp_path / "train", {"a": 10, "b": 10})
    write(tmp_path / "test", {"a": 5, "b": 5}, start=20)
    one = read(tmp_path, num_clients=1).clients[0].train[0]
    shutil.rmtree(tmp_path / "test")
    write(tmp_path / "test", {"a": 5, "b": 5}, start=900)
    assert torch.equal(read(tmp_path, num_clients=1).clients[0].train[0], one)


def test_images_of_any_size_are_brought_to_the_size_asked_for(tmp_path, raw):
    write(tmp_path, {"a": 5, "b": 5})
    write(tmp_path / "c", {"deep": 5}, size=(7, 3))
    problem = read(tmp_path, num_clients=1, image_size=6)
    assert (problem.image_size, problem.num_classes) == (6, 3)
    x = torch.cat([getattr(problem.clients[0], part)[0] for part in ("train", "val", "test")])
    assert x.shape == (15, 3, 6, 6)
    assert torch.equal(x, x[:, :, :1, :1].expand_as(x))  # one colour stays one colour


def test_resizing_a_folder_is_resizing_as_other_sets_are(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, size=(8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    source = images.Source(None, None, num_classes=1, peak=255, mean=0.0, std=1.0)
    for side in (5, 11):
        got = folder.Files((str(tmp_path / "a.png"),), side, None).decode()
        expected = images.prepare(torch.from_numpy(pixels).permute(2, 0, 1)[None], source, image_size=side)
        assert (got / 255 - expected).abs().max() < 1.5 / 255


# Folders that cannot be used


def refuses(error, message, root, **options):
    with pytest.raises(error, match=f"^{re.escape(message)}") as caught:
        read(root, **options)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there_is_named(tmp_path):
    refuses(FileNotFoundError, f"there is no folder {tmp_path / 'x'} to read images from", tmp_path / "x")
    (tmp_path / "file").touch()
    refuses(FileNotFoundError, f"there is no folder {tmp_path / 'file'} to read images from", tmp_path / "file")


def test_a_folder_without_class_folders_is_named(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "0.png")
    message = f"{tmp_path} holds no class folders; images are looked for in {tmp_path / 'CLASS'}"
    refuses(FileNotFoundError, message, tmp_path)


def test_a_folder_without_images_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").touch()
    refuses(FileNotFoundError, f"{tmp_path} holds no images; they are looked for by their ending", tmp_path)


def test_a_link_that_leads_back_is_followed_once(tmp_path, raw):
    write(tmp_path, {"a": 12, "b": 12})
    expected = parts_of(read(tmp_path))
    (tmp_path / "a" / "deep").mkdir()
    (tmp_path / "a" / "deep" / "back").symlink_to("..", target_is_directory=True)
    found = parts_of(read(tmp_path))
    assert all(torch.equal(found[part], expected[part]) for part in expected)


def test_hidden_folders_are_no_classes_and_hold_no_images(tmp_path, raw):
    write(tmp_path, {"a": 12, "b": 12})
    expected = parts_of(read(tmp_path))
    write(tmp_path / "a", {".ipynb_checkpoints": 2})
    write(tmp_path, {".git": 2})
    found = parts_of(read(tmp_path))
    assert all(torch.equal(found[part], expected[part]) for part in expected)


def test_a_link_that_leads_to_itself_is_named(tmp_path):
    write(tmp_path, {"a": 12, "b": 12})
    (tmp_path / "c").symlink_to("c")
    refuses(OSError, f"{tmp_path / 'c'} cannot be followed (Too many levels of symbolic links); mend", tmp_path)


def test_a_link_from_a_class_to_where_other_classes_are_is_refused(tmp_path):
    write(tmp_path, {"a": 12, "b": 12})
    for target, leads in [("..", tmp_path), ("../b", tmp_path / "b")]:
        (tmp_path / "a" / "link").symlink_to(target, target_is_directory=True)
        refuses(ValueError, f"{tmp_path / 'a' / 'link'} leads to {leads}, which holds images of other", tmp_path)
        (tmp_path / "a" / "link").unlink()


def test_a_link_that_leads_to_nothing_is_no_class_to_leave_out(tmp_path):
    write(tmp_path, {"a": 12, "b": 12})
    (tmp_path / "c").symlink_to("gone")
    refuses(OSError, f"{tmp_path / 'c'} cannot be followed (No such file or directory); mend or remove it", tmp_path)


def test_parts_in_capitals_are_no_classes(tmp_path):
    write(tmp_path, {"Train": 12, "bus": 12})  # pictures of trains
    assert read(tmp_path).class_names == ("Train", "bus")
    write(tmp_path / "Train", {"a": 12, "b": 12})
    refuses(ValueError, f"{tmp_path / 'Train'} holds folders and would be a class; rename it train, as", tmp_path)


def test_a_part_without_classes_is_named(tmp_path, caplog):
    write(tmp_path / "train", {"a": 24, "b": 24})
    (tmp_path / "test").mkdir()
    read(tmp_path)
    said = f"{tmp_path / 'test'} holds no class folders and is not read; test images are taken from train"
    assert caplog.messages == [said]


def test_a_tree_of_too_many_folders_is_refused(tmp_path, monkeypatch):
    write(tmp_path, {"a": 12, "b": 12})
    monkeypatch.setattr(folder, "MOST_FOLDERS", 1)
    refuses(ValueError, f"{tmp_path} holds more than 1 folders; name the one with the classes", tmp_path)


def test_a_class_without_images_is_named(tmp_path):
    write(tmp_path, {"a": 3, "b": 0, "c": 3})
    refuses(FileNotFoundError, f"{tmp_path / 'b'} holds no images; remove this class or add some", tmp_path)


@pytest.mark.parametrize("part", ["test", "val"])
def test_classes_must_be_the_same_in_all_parts(tmp_path, part):
    write(tmp_path / "train", {"a": 3, "b": 3})
    write(tmp_path / part, {"a": 3, "c": 3})
    message = f"class 'b' is in {tmp_path / 'train'} and not in {tmp_path / part}; both must have the same classes"
    refuses(ValueError, message, tmp_path)
    shutil.rmtree(tmp_path / part)
    write(tmp_path / part, {"a": 3, "b": 3, "aa": 3})
    refuses(ValueError, f"class 'aa' is in {tmp_path / part} and not in {tmp_path / 'train'}; both", tmp_path)


def test_test_images_without_training_images_are_refused(tmp_path):
    write(tmp_path / "test", {"a": 3, "b": 3})
    message = f"{tmp_path / 'test'} holds class folders and {tmp_path / 'train'} does not"
    refuses(FileNotFoundError, message, tmp_path)


@pytest.mark.parametrize("content", [b"", b"no image", "half"])
def test_a_broken_image_is_named(tmp_path, content):
    write(tmp_path, {"a": 4, "b": 4}, size=(32, 32), names=lambda k: f"{k}.jpg")
    broken = tmp_path / "b" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:-200] if content == "half" else content)
    refuses(OSError, f"{broken} cannot be read as an image (", tmp_path)


def test_one_image_of_another_size_is_named_with_the_remedy(tmp_path):
    write(tmp_path, {"a": 4, "b": 4})
    odd = tmp_path / "b" / "0002.png"
    Image.new("RGB", (5, 4)).save(odd)
    message = f"{odd} is 5x4 and {tmp_path / 'a' / '0000.png'} is 4x4; give --image-size to bring all images to one"
    refuses(ValueError, message, tmp_path)


def test_images_that_are_not_square_ask_for_a_size(tmp_path):
    write(tmp_path, {"a": 4, "b": 4}, size=(6, 4))
    refuses(ValueError, f"{tmp_path / 'a' / '0000.png'} is 6x4, which is not square; give --image-size", tmp_path)


def test_deep_pixels_are_refused_rather_than_clipped(tmp_path):
    write(tmp_path, {"a": 4, "b": 4})
    deep = tmp_path / "a" / "-.png"
    Image.fromarray(np.full((4, 4), 40000, dtype=np.uint16)).save(deep)
    refuses(ValueError, f"{deep} has more than 8 bits a channel; convert it to 8 bits", tmp_path)


def test_a_set_too_small_to_test_on_is_refused(tmp_path):
    write(tmp_path, {"a": 1, "b": 1})
    refuses(ValueError, f"imagefolder:{tmp_path}: no client has test samples to be scored on", tmp_path, num_clients=2)


def test_a_request_for_too_much_fails_before_anything_is_decoded(tmp_path, monkeypatch):
    write(tmp_path, FOUR)
    seen = decoded(monkeypatch)
    refuses(ValueError, "3 clients of 50 samples need 150 training samples", tmp_path, samples_per_client=50)
    refuses(ValueError, "unknown partition 'clases:2'", tmp_path, partition="clases:2")
    refuses(
        ValueError, "partition 'writer' makes a client of every writer, and only leaf", tmp_path, partition="writer"
    )
    assert seen == []


def test_an_image_that_is_a_pipe_is_refused_at_once(tmp_path):
    write(tmp_path, {"a": 4, "b": 4})
    os.mkfifo(tmp_path / "a" / "-.png")
    with pytest.raises(OSError, match=r"-\.png is no file; replace or remove it"):
        read(tmp_path)


def test_an_image_of_more_pixels_than_fit_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    write(tmp_path, {"a": 4, "b": 4})
    monkeypatch.setattr(folder, "MOST_PIXELS", 15)
    with pytest.raises(OSError, match=r"cannot be read as an image \(4x4 is more than 15 pixels; shrink it first\)"):
        read(tmp_path)


# Folders larger than memory


@pytest.fixture
def little_memory(monkeypatch):
    """Room for thirty images of 4x4 as float32; as pixels, a cache holds 90 for training and 15 for testing."""
    monkeypatch.setattr(views, "MOST", 30 * 4 * 48)


@pytest.mark.parametrize("partition", EVERY)
def test_images_that_are_decoded_when_read_are_those_that_memory_would_hold(tmp_path, monkeypatch, partition):
    root = write(tmp_path, FOUR)
    whole = read(root, partition, 4, max_test_samples=5)
    monkeypatch.setattr(views, "MOST", 30 * 4 * 48)
    monkeypatch.setattr(images, "AT_ONCE", 100)  # the mean is taken of two images at a time
    for client, expected in zip(read(root, partition, 4, max_test_samples=5).clients, whole.clients, strict=True):
        assert isinstance(client.train, Stored)
        for part in ("train", "val", "test"):
            (x, y), (their_x, their_y) = shards.read(getattr(client, part)), getattr(expected, part)
            torch.testing.assert_close(x, their_x)
            assert torch.equal(y, their_y) and torch.equal(shards.known_labels(getattr(client, part)), y)


def test_a_large_folder_is_decoded_when_read_and_a_bounded_part_of_it_is_kept(tmp_path, little_memory, monkeypatch):
    files = decoded(monkeypatch)
    problem = read(write(tmp_path, {"ant": 80, "bee": 80}), num_clients=2)
    measured = len(files)
    assert measured <= 1 + len(problem.clients) * problem.clients[0].n_train  # one for its size, the rest for the mean
    shard = problem.clients[0].train
    rows = torch.tensor([3, 1, 4])
    shards.rows_of(shard, rows)
    shards.rows_of(shard, rows)
    assert len(files) == measured + 3  # decoded once, then kept
    for _ in range(2):
        for client in problem.clients:
            shards.read(client.train), shards.read(client.test)
    pools = {id(part.dataset.pixels): part.dataset.pixels for c in problem.clients for part in (c.train, c.val, c.test)}
    assert len(pools) == 3 and 0 < sum(pool.mb_kept for pool in pools.values()) * 2**20 <= views.MOST
    assert len(files) > measured + 3 + 128  # more than fits was read twice


def test_a_run_on_a_large_folder_ends_as_one_in_memory(tmp_path, monkeypatch):
    root = write(tmp_path, {"ant": 20, "bee": 20})
    config = Config(dataset=f"imagefolder:{root}", partition="iid", model="mlp", num_clients=2, samples_per_client=None)
    config = config.override(steps=8, epochs=2, engine="sequential", dtype="float64", capacity_profile="homogeneous")
    ends = []
    for most in (views.MOST, 100):
        monkeypatch.setattr(views, "MOST", most)
        *_, saved = training.epochs(from_config(config), "perm", steps=8)
        ends.append(saved)
    assert ends[0].history[-1]["accuracy_mean"] == ends[1].history[-1]["accuracy_mean"]
    for ours, theirs in zip(ends[0].state.v, ends[1].state.v, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_images_beside_the_classes_are_named(tmp_path, caplog):
    root = write(tmp_path, FOUR)
    read(root)
    assert caplog.text == ""
    shutil.copy(next((root / "ant").iterdir()), root / "stray.PNG")
    read(root)
    assert "1 images lie beside the folders of classes and are not read" in caplog.text


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    root = write(tmp_path, FOUR)

    def denied(top, onerror, followlinks):
        onerror(PermissionError(errno.EACCES, "Permission denied", f"{top}/inner"))

    monkeypatch.setattr(folder.os, "walk", denied)
    with pytest.raises(
        ValueError, match=r"ant/inner cannot be read \(Permission denied\), and its images .* name the folder"
    ):
        read(root)
