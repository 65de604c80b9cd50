"""Where models wait: the models of a run on disk are those of a run in memory."""

from dataclasses import replace

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
    kept = store.on_disk(tmp_path)({name: torch.ones(n) for n, name in enumerate("abcd", start=1)})
    first = kept["a"].data_ptr()
    assert [(x.data_ptr() - first) % store.ALIGNED for x in kept.values()] == [0, 0, 0, 0]


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
