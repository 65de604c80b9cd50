"""The progress bar of runs, and that `fit` shows it as `run` does."""

import io
import sys

import pytest
import torch
from torch import nn

from hetperm import Client, Config, fit
from hetperm.runs import progress, training
from hetperm.runs.setting import from_model


def test_a_resumed_run_counts_its_earlier_epochs():
    bar = progress.Bar(progress.Course(4, epochs=3))
    reports = [("perm", 3), ("local", 2), ("local", 3), ("perm", 3), ("local", 1), ("local", 2), ("local", 3)]
    parts = []
    for method, epoch in reports:
        bar(method, {"epoch": epoch, "accuracy_mean": 0.5})
        parts.append(round(12 * bar._bar.tasks[0].completed))
    assert parts == [3, 5, 6, 9, 10, 11, 12]
    assert bar._bar.tasks[0].description == "local 0.500"
    bar.stop()


def test_warm_up_and_rounds_of_rivals_move_the_course_and_the_next_seed_begins_anew():
    course, parts = progress.Course(4, epochs=2), []
    for method, spent in [("perm", 0.25), ("perm", 0.5), ("local", 0.5), ("perm", 0.5), ("perm", 1.0), ("perm", 0.5)]:
        course.moved(method, spent)
        parts.append(course.part)
    assert parts == [0.0625, 0.125, 0.375, 0.625, 0.75, 0.875]


def test_an_epoch_does_not_move_the_course_back():
    course = progress.Course(1, epochs=4)
    course.moved("perm", 0.5)  # the warm-up
    course.ended("perm", 1, 0.9)
    assert course.part == 0.5
    course.moved("perm", 0.6)
    course.ended("perm", 4, 0.9)
    assert course.part == 1.0


class Log:
    """Lines of progress with a clock that is set by hand."""

    def __init__(self, total: int, epochs: int):
        self.time, self.lines = 0.0, []
        self.shown = progress.Lines(progress.Course(total, epochs), now=lambda: self.time, write=self.lines.append)


def test_without_a_terminal_a_line_a_minute_says_epoch_score_and_time_left():
    log = Log(total=2, epochs=4)
    log.shown.start()
    for seconds in range(1, 200):
        log.time = float(seconds)
        log.shown.moved("perm", seconds / 240)
        if seconds == 61:
            log.shown("perm", {"epoch": 1, "accuracy_mean": 0.8125})
    assert log.lines == [
        "perm: epoch 0 of 4, 12% of the run, about 7 min left",
        "perm: epoch 1 of 4, accuracy 0.812, 25% of the run, about 6 min left",
        "perm: epoch 1 of 4, accuracy 0.812, 38% of the run, about 5 min left",
    ]


def test_what_came_from_checkpoints_does_not_shorten_the_time_left():
    log = Log(total=2, epochs=4)
    log.shown.start()
    log.shown("perm", {"epoch": 4, "accuracy_mean": 0.5})  # at once: half of the run
    log.time = 60.0
    log.shown.moved("local", 0.5)
    assert log.lines == ["local: epoch 0 of 4, 75% of the run, about 60 s left"]


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
    assert ("100%" in sys.stderr.getvalue()) == (not quiet)
    assert seen == [("perm", 1), ("perm", 2), ("local", 1), ("local", 2)]


@pytest.mark.parametrize(("algorithm", "engine"), [("perm", "auto"), ("perm", "threads"), ("fedavg-ft", "auto")])
def test_every_round_of_a_run_is_told(algorithm, engine):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=generator), torch.randint(2, (20,), generator=generator)
    config = Config(algorithm=algorithm, engine=engine, workers=2, steps=40, local_steps=2, epochs=2, baselines=())
    setting = from_model(nn.Linear(3, 2), [Client(train=(x, y)) for _ in range(2)], config, loss=None, metric=None)
    parts, before_first_epoch = [], []
    for _ in training.epochs(setting, algorithm, steps=40, on_steps=parts.append):
        before_first_epoch.append(len(parts))
    assert parts == sorted(parts) and 0 < parts[0] <= 0.1 and parts[-1] == pytest.approx(1, abs=0.06)
    # Ten rounds of warm-up, reports at two models and the look.
    assert before_first_epoch[0] == (13 if algorithm == "perm" else 0)
