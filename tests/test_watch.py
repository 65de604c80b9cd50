"""The watch: who is stuck is ended, who works or waits for a turn is not, whatever the clock says."""

from pathlib import Path

import pytest

from hetperm.engine import watch
from hetperm.engine.watch import FLOOR, TICK, UNSEEN, Seen, Watch


class Worker:
    """A process that can be ended, and does nothing else."""

    def __init__(self, pid):
        self.pid, self.is_ended = pid, False

    def kill(self):
        self.is_ended = True


@pytest.fixture
def looking(monkeypatch):
    """A watch, and a function that lets it look at a worker and see what it is told."""
    monkeypatch.setattr(Watch, "_look", lambda self: None)  # no thread: looks are made by hand
    watching = Watch()

    def look(worker, *sights):
        for sight in sights:
            monkeypatch.setattr(watch, "_seen", lambda pid, sight=sight: sight)
            watching._judge(worker.pid, watching._held[worker.pid])
        return worker.is_ended

    yield watching, look
    watching.close()


ASLEEP = Seen("S", cpu=5)
LOOKS = int(FLOOR / TICK)  # without any work that every worker is granted


def test_a_worker_that_does_nothing_is_ended(looking, caplog):
    watching, look = looking
    stuck = Worker(7)
    watching.begin(stuck)
    assert not look(stuck, *[ASLEEP] * LOOKS)  # at the first look it has worked since it was begun
    assert not watching.was_stuck(stuck) and look(stuck, ASLEEP) and watching.was_stuck(stuck)
    assert [record.getMessage() for record in caplog.records] == [
        "a worker did nothing for 10 s; it is replaced, and its task done again"
    ]


@pytest.mark.parametrize(
    "sights",
    [
        [Seen("S", cpu) for cpu in range(5 * LOOKS)],
        [Seen("R", cpu=5)] * 5 * LOOKS,
        [Seen("D", cpu=5)] * 5 * LOOKS,
        [Seen("S", cpu=k // LOOKS) for k in range(5 * LOOKS)],
    ],
    ids=["computes", "waits for its turn", "waits for the disk", "works now and then"],
)
def test_a_worker_that_uses_or_wants_time_is_never_ended(sights, looking):
    watching, look = looking
    worker = Worker(7)
    watching.begin(worker)
    assert not look(worker, *sights)


def test_a_worker_may_do_nothing_for_as_long_as_the_longest_task_took(looking):
    watching, look = looking
    slow, quick = Worker(1), Worker(2)
    for worker, looks in ((slow, 3 * LOOKS), (quick, 1)):
        watching.begin(worker)
        look(worker, *(Seen("S", cpu) for cpu in range(looks)))
        watching.done(worker)
    for pid in (3, 4):  # that the first of them was ended grants the second no more
        stuck = Worker(pid)
        watching.begin(stuck)
        assert not look(stuck, *[ASLEEP] * 3 * LOOKS)
        assert look(stuck, ASLEEP)
        watching.done(stuck)


def test_where_the_system_tells_nothing_a_worker_is_granted_ten_minutes(looking):
    watching, look = looking
    worker = Worker(7)
    watching.begin(worker)
    assert UNSEEN == 600 and not look(worker, *[None] * int(UNSEEN / TICK - 1))
    assert look(worker, None)


def test_a_worker_that_has_answered_meanwhile_is_not_ended(looking):
    watching, look = looking
    worker = Worker(7)
    watching.begin(worker)
    look(worker, *[ASLEEP] * LOOKS)
    held = watching._held[worker.pid]
    watching.done(worker)
    watching._judge(worker.pid, held)
    assert not worker.is_ended and not watching.was_stuck(worker)


def test_state_and_time_of_a_process_are_read_behind_its_name_whatever_that_is(monkeypatch):
    stat = "7 (a) R (b) S 1 7 7 0 -1 4 90 0 0 0 40 2 0 0 20 0 1"
    monkeypatch.setattr(Path, "read_text", lambda self: stat)
    assert watch._seen(7) == Seen("S", 42)

    def gone(self):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", gone)
    assert watch._seen(7) is None
