"""Where models wait: the models of a run on disk are those of a run in memory."""

import errno
import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federation import equal, make_clients, make_federation, perm_options, run, same, start

from hetperm.algorithms import perm
from hetperm.server import store


def test_a_model_kept_on_disk_is_the_model_in_memory_of_its_own(tmp_path):
    model = {"a": torch.randn(3, 2).T, "b": torch.tensor(2.5), "c": torch.empty(0, 3), "d": torch.tensor([True])}
    kept = store.on_disk(tmp_path)(model)
    assert equal(model, kept) and [x.dtype for x in kept.values()] == [x.dtype for x in model.values()]
    assert not list(tmp_path.iterdir())  # the file has no name
    model["a"].zero_()
    assert not equal(model, kept)


def test_each_tensor_on_disk_begins_at_an_aligned_address(tmp_path):
    keep = store.on_disk(tmp_path)
    models = [keep({name: torch.ones(n) for n, name in enumerate("abcd", start=k)}) for k in range(1, 20)]
    assert {x.data_ptr() % store.ALIGNED for model in models for x in model.values()} == {0}


def test_a_model_of_no_numbers_can_be_kept(tmp_path):
    assert store.on_disk(tmp_path)({}) == {}
    assert store.on_disk(tmp_path)({"a": torch.empty(0, 3)})["a"].shape == (0, 3)


def test_in_memory_a_model_is_itself():
    assert store.in_memory(start()) is start()


def test_a_federation_whose_models_wait_on_disk_trains_the_same_models(tmp_path):
    federation = make_federation(make_clients())
    options = perm_options(epochs=3, tail_average=1.0)
    states = [
        run(perm.single_loop(replace(federation, keep=keep), start(), options), epochs=3)
        for keep in (store.in_memory, store.on_disk(tmp_path))
    ]
    assert same(*states)


# Room


def models(count: int, *, sizes: tuple[int, ...] = (5, 300, 40)) -> list[dict[str, torch.Tensor]]:
    """Models of several sizes, each of one number of its own."""
    return [{"a": torch.full((sizes[k % len(sizes)],), float(k)), "b": torch.tensor([k])} for k in range(count)]


def test_models_on_disk_do_not_touch_each_other_and_leave_their_room_to_those_that_follow(tmp_path, monkeypatch):
    made, mapped_file = [], store._mapped_file
    monkeypatch.setattr(store, "_mapped_file", lambda *args: made.append(args[1]) or mapped_file(*args))
    keep, expected = store.on_disk(tmp_path), models(60)
    kept = [keep(model) for model in expected]
    room = sum(made)
    for _ in range(5):  # as epochs do it: every model is replaced, one after the other
        for k, model in enumerate(expected):
            kept[k] = keep({name: x + 1 for name, x in kept[k].items()})
            expected[k] = {name: x + 1 for name, x in model.items()}
    assert all([equal(*pair) for pair in zip(kept, expected, strict=True)])
    assert sum(made) <= room * 1.5  # each size needs one place more than there are models


def test_room_is_kept_while_one_tensor_of_its_model_is_left(tmp_path):
    keep, (first, second) = store.on_disk(tmp_path), models(2, sizes=(5,))
    left = keep(first)["a"][1:]
    other = keep(second)
    assert left.tolist() == [0.0] * 4 and equal(other, second)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_descriptors_hardly_grow_with_the_number_of_models(tmp_path):
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()
    before, keep = opened(), store.on_disk(tmp_path)
    kept = [keep(model) for model in models(3000)]
    assert opened() - before < 30
    del kept, keep
    gc.collect()
    assert opened() == before


@pytest.mark.skipif(not Path("/dev/shm").is_dir() or not hasattr(os, "statvfs"), reason="needs a small file system")
def test_a_disk_without_room_is_one_sentence_and_no_dead_process():
    """More than there is on the disk is asked for, so that nothing is written."""
    space = os.statvfs("/dev/shm")
    arena = store.Arena(Path("/dev/shm"))
    with pytest.raises(
        OSError, match=r"^no room for models that wait in /dev/shm \(No space left.*\); make room there"
    ):
        arena.room(space.f_frsize * space.f_blocks + 2**20)


@pytest.mark.parametrize("how", ["unsupported", "missing"])
def test_where_room_cannot_be_reserved_it_is_written(tmp_path, monkeypatch, how):
    def unsupported(*args):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if how == "missing":
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    monkeypatch.setattr(store, "_ZEROS", 100)
    kept = [store.on_disk(tmp_path)(model) for model in models(5)]
    assert all([equal(*pair) for pair in zip(kept, models(5), strict=True)])
    monkeypatch.setattr(os, "write", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match=r"\(No space left\); make room there, or let them wait in memory"):
        store.on_disk(tmp_path)(models(1)[0])
