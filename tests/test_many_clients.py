"""What keeps a run with very many clients small: sparse mixing weights, models that wait on disk, chunks."""

import json

import numpy as np
import pytest
import torch
from scipy import sparse as scipy_sparse

from hetperm import Config, mixing, run
from hetperm.runs import checkpoint, output
from hetperm.server import store, visits
from hetperm.state import State

TINY = {
    "num_clients": 6,
    "capacity_profile": "uniform5",
    "samples_per_client": 30,
    "model_options": {"hidden": [16, 16]},
    "epochs": 2,
    "local_steps": 1,
    "steps": 0,
    "warmup_rounds": 1,
    "share": 0.7,
    "alpha_every": 1,
    "baselines": (),
    "quiet": True,
}
ALPHA = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(output, "draw", lambda result: None)


def files_of(folder) -> dict[str, bytes]:
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        name: raw
        for name, raw in files.items()
        if not name.startswith(("checkpoint/", "timing", "report", "checksums"))
    }


# Sparse mixing weights


ODD = {"server_mix": "alpha", "tail_average": 0, "final_lr": 0.05}  # all that reads the weights beside visits


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run with dense weights, whose models are in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "draw", lambda result: None)
        return run(Config(**TINY, out=tmp_path_factory.mktemp("plain") / "run"))


@pytest.mark.parametrize("options", [{}, ODD], ids=["plain", "odd"])
def test_a_run_with_sparse_weights_is_the_same_run(options, plain, tmp_path, monkeypatch):
    dense = run(Config(**TINY | options, out=tmp_path / "dense")) if options else plain
    monkeypatch.setattr(mixing, "SPARSE_FROM", 6)
    sparse = run(Config(**TINY | options, out=tmp_path / "sparse"))
    assert sparse.alpha.is_sparse and torch.equal(sparse.alpha.to_dense(), dense.alpha)
    one, other = files_of(dense.folder), files_of(sparse.folder)
    written = scipy_sparse.load_npz(sparse.folder / "alpha.npz").toarray()
    assert np.array_equal(written, np.load(dense.folder / "alpha.npy"))
    one.pop("alpha.npy"), other.pop("alpha.npz")
    for name in [name for name in one if name.startswith("models/") and name.endswith(".json")]:
        whole, partners = (json.loads(files.pop(name)) for files in (one, other))
        row = {str(j): weight for j, weight in enumerate(whole.pop("alpha")) if weight}
        assert partners.pop("alpha") == row and partners == whole
    assert one == other


def test_sparse_weights_say_what_dense_ones_say():
    sparse, groups = mixing.sparse(ALPHA), ["a", "a", "b"]
    assert mixing.rows_of(sparse) == mixing.rows_of(ALPHA) == [{0: 0.5, 1: 0.5}, {0: 0.25, 1: 0.5, 2: 0.25}, {2: 1.0}]
    assert torch.equal(mixing.effective_partners(sparse), mixing.effective_partners(ALPHA))
    assert mixing.nonzero(sparse).tolist() == mixing.nonzero(ALPHA).tolist() == [2, 3, 1]
    assert mixing.self_weight(sparse) == mixing.self_weight(ALPHA) == pytest.approx(2 / 3)
    assert mixing.same_group_mass(sparse, groups) == mixing.same_group_mass(ALPHA, groups) == pytest.approx(2.75 / 3)
    for rule in ("max", "paper"):
        sizes = visits.step_sizes(sparse, 0.3, rule)
        assert sizes.is_sparse and torch.equal(sizes.to_dense(), visits.step_sizes(ALPHA, 0.3, rule))


def test_sparse_weights_come_back_from_a_checkpoint(tmp_path):
    w = {"x": torch.ones(2)}
    state = State(1, w, (w,) * 3, alpha=mixing.sparse(ALPHA))
    checkpoint.save(tmp_path / "c.safetensors", checkpoint.Saved(state))
    back = checkpoint.load(tmp_path / "c.safetensors").state.alpha
    assert back.is_sparse and back.is_coalesced() and torch.equal(back.to_dense(), ALPHA)


# Models that wait on disk

MODEL = {
    "weight": torch.arange(6.0).reshape(2, 3).T,
    "bias": torch.tensor([1.5, -2.5], dtype=torch.float64),
    "nothing": torch.empty(0, 4),
    "scalar": torch.tensor(3.0),
}


def test_a_model_on_disk_is_the_model(tmp_path):
    kept = store.on_disk(tmp_path)(MODEL)
    assert list(kept) == list(MODEL)
    for name, x in MODEL.items():
        assert torch.equal(kept[name], x) and kept[name].dtype == x.dtype and kept[name].shape == x.shape
        assert kept[name].data_ptr() % store.ALIGNED == 0 or not x.numel()
        assert kept[name].data_ptr() != x.data_ptr() or not x.numel()
    assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left behind by a run that is killed


def test_it_is_in_a_mapped_file_and_gone_with_it(tmp_path):
    def maps() -> int:
        with open("/proc/self/maps") as file:
            return sum(str(tmp_path) in line for line in file)

    before = maps()
    kept = store.on_disk(tmp_path)(MODEL)
    assert maps() == before + 1
    del kept
    assert maps() == before


def test_a_run_whose_models_wait_on_disk_is_the_same_run(plain, tmp_path):
    other = run(Config(**TINY, idle_models="disk", out=tmp_path / "disk"))
    assert files_of(plain.folder) == files_of(other.folder)
    assert plain.folder.joinpath("config.toml").read_text().count("idle_models") == 0
