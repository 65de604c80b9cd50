"""Where a run computes: a device that is there, threads as they were, workers that memory suffices for."""

import pytest
import torch

from hetperm import Config
from hetperm.runs import placement
from hetperm.runs.setting import from_config


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


def test_threads_are_as_they_were_afterwards():
    torch.set_num_threads(2)
    try:
        with placement.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
