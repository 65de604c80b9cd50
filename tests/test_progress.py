"""The progress bar of runs, and that `fit` shows it as `run` does."""

import io
import sys

import pytest
import torch
from torch import nn

from hetperm import Client, Config, fit
from hetperm.runs import progress


def test_a_resumed_run_counts_its_earlier_epochs():
    bar = progress.Bar("perm", total=12)
    reports = [("perm", 3), ("local", 2), ("local", 3), ("perm", 3), ("local", 1), ("local", 2), ("local", 3)]
    for method, epoch in reports:
        bar(method, {"epoch": epoch, "accuracy_mean": 0.5})
    (task,) = bar._bar.tasks
    assert (task.completed, task.total, task.description) == (12, 12, "local 0.500")
    bar.stop()


def test_a_bar_appears_only_once_there_is_something_to_show(capsys):
    with progress.progress(["perm"], epochs=3, runs=1, quiet=False):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_quiet_run_has_no_bar():
    with progress.progress(["perm"], epochs=3, runs=1, quiet=True) as bar:
        assert bar is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_fit_shows_its_progress_on_a_terminal_unless_it_is_quiet(monkeypatch, quiet):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", Terminal())
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=generator), torch.randint(2, (20,), generator=generator)
    config = Config(steps=20, epochs=2, baselines=("local",), quiet=quiet)
    seen = []
    clients = [Client(train=(x, y), test=(x, y)) for _ in range(2)]
    fit(nn.Linear(3, 2), clients, config, on_epoch=lambda method, row: seen.append((method, row["epoch"])))
    assert ("4/4" in sys.stderr.getvalue()) == (not quiet)
    assert seen == [("perm", 1), ("perm", 2), ("local", 1), ("local", 2)]
