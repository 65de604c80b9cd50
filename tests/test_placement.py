"""Where a run computes: a device that is there, threads as they were, workers that memory suffices for."""

import pytest
import torch

from hetperm import Client, Config
from hetperm.device.bench import Workshop
from hetperm.runs import placement
from hetperm.runs.setting import from_config
from submodels import zoo


@pytest.mark.parametrize("name", ["tpu", "cpu:7", "meta", "hpu:0"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match=f"device '{name}' is not there; use 'auto' or 'cpu'"):
        placement.device_of(name)


def test_workers_that_do_not_fit_into_memory_are_refused_before_they_start(monkeypatch):
    config = Config(num_clients=6, capacity_profile="uniform5", samples_per_client=30, engine="threads", workers=4)
    need = placement._worker_bytes(*(getattr(from_config(config), name) for name in ("shop", "clients", "config")))
    monkeypatch.setattr(placement, "available_bytes", lambda: 3 * need)
    with pytest.raises(ValueError, match=r"^4 workers need about .* GB each .* GB are free; take --workers 3, or"):
        from_config(config)
    assert from_config(config.override(workers=3)).engine == "threads"
    monkeypatch.setattr(placement, "available_bytes", lambda: None)
    assert from_config(config).engine == "threads"


MANY = Config(num_clients=6, capacity_profile="uniform5", samples_per_client=30, idle_models="memory")


def bytes_of(setting, name):
    """The personal models of a method, cut one by one."""
    parts = [setting.slicer.cut(setting.start, setting.slicer.index(width)) for width in setting.model_widths(name)]
    return [sum(x.nbytes for x in part.values()) for part in parts]


def test_more_models_than_memory_holds_are_refused_before_training(monkeypatch):
    sizes = bytes_of(from_config(MANY), "perm")
    monkeypatch.setattr(placement, "available_bytes", lambda: 2 * sum(sizes))
    from_config(MANY)
    monkeypatch.setattr(placement, "available_bytes", lambda: 2 * sum(sizes) - 1)
    message = (
        r"^the models of 6 clients need at least \S+ GB, and \S+ GB of memory are free; take fewer clients, "
        "--idle-models disk, or a smaller model$"
    )
    with pytest.raises(ValueError, match=message):
        from_config(MANY)
    from_config(MANY.override(participation=0.9))
    monkeypatch.setattr(placement, "available_bytes", lambda: 6 * min(sizes))
    for others in ({"idle_models": "disk"}, {"algorithm": "local"}, {"algorithm": "fedavg"}):
        from_config(MANY.override(**others))


def test_memory_that_does_not_hold_one_round_is_too_small_for_any_method(monkeypatch):
    sizes = bytes_of(from_config(MANY), "perm")
    monkeypatch.setattr(placement, "available_bytes", lambda: 6 * min(sizes) - 1)
    for others in ({}, {"idle_models": "disk"}, {"algorithm": "heterofl"}, {"idle_models": "disk", "sketch": 64}):
        with pytest.raises(ValueError, match=r"take fewer clients, or a smaller model$"):
            from_config(MANY.override(**others))
    for others in (
        {"idle_models": "disk", "sketch": 64, "warmup_rounds": 0},
        {"trace": "day-night"},
        {"idle_models": "disk", "participation": 0.9},
    ):
        from_config(MANY.override(**others))


def test_ten_thousand_clients_of_a_small_model_fit_into_what_a_laptop_has(monkeypatch):
    model = zoo.build("mlp", in_channels=60, num_classes=10, image_size=None, hidden=[64, 64])
    shop, clients = Workshop(model, None), [Client((torch.zeros(1, 60), torch.zeros(1)))] * 10_000
    monkeypatch.setattr(placement, "available_bytes", lambda: 2**30)
    placement.check_memory(shop, clients, Config(sketch=256))
    with pytest.raises(ValueError, match=r"^the models of 100000 clients need at least 6.5 GB, and 1 GB of memory"):
        placement.check_memory(shop, clients * 10, Config(sketch=256))


def test_threads_are_as_they_were_afterwards():
    torch.set_num_threads(2)
    try:
        with placement.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
