"""--log tensorboard: what is written, when, and what is said if the package is missing."""

import importlib.util

import pytest
from tiny_run import refusal, tiny, train, without_what_others_test

from hetperm import run
from hetperm.runs import tensorboard

HAS_IT = importlib.util.find_spec("tensorboard") is not None
needs_it = pytest.mark.skipif(not HAS_IT, reason="tensorboard is not installed (pip install 'hetperm[tensorboard]')")


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


@needs_it
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of tensorboard's own dependencies
def test_scalars_tiers_clients_and_the_map_are_written_for_every_epoch(tmp_path):
    with without_what_others_test():
        result = run(tiny(out=tmp_path / "run", baselines=("local",), log="tensorboard"))
    found = events(tmp_path / "run" / "tensorboard" / "perm")
    scalars = found.Scalars("accuracy/mean")
    assert [event.step for event in scalars] == [1, 2, 3]
    assert [event.value for event in scalars] == pytest.approx([row["accuracy_mean"] for row in result.history])
    tags = found.Tags()
    assert "cost/client steps" in tags["scalars"]
    assert any(tag.startswith("tiers/accuracy ") for tag in tags["scalars"])
    assert [event.step for event in found.Images("mixing weights")] == [1, 2, 3]
    assert tags["histograms"] == ["client_scores"]
    assert events(tmp_path / "run" / "tensorboard" / "local").Scalars("accuracy/mean")
    assert "log" not in (tmp_path / "run" / "config.toml").read_text()


def test_without_the_package_a_run_is_refused_before_it_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    assert train("--log", "tensorboard", "--out", tmp_path / "run") == 2
    assert refusal(capsys) == (
        "--log tensorboard needs a package that is not installed; pip install 'hetperm[tensorboard]'"
    )
    assert not (tmp_path / "run").exists()


def test_fit_without_a_folder_cannot_log(monkeypatch):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="name a folder with out"):
        tensorboard.check("tensorboard", has_folder=False)
