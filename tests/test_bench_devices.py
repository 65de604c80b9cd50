"""The device benchmark by hand: limits, slack, the simulated clock, and which limit is chosen."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hetperm.bench.devices import limits
from hetperm.bench.devices.federated import points, to_reach
from hetperm.bench.devices.limits import Cgroup, DataLimit, Unusable
from hetperm.device.gradients import BatchGradient, FullGradient, Report, ReportGradient
from hetperm.device.updates import Ordered, Sgd
from hetperm.device.wire import UPDATES
from hetperm.engine.task import Failure, Task
from hetperm.profile import Tier
from hetperm.runs.clock import Clock, Speed, size
from hetperm.runs.memory import MB

# Limits


@pytest.mark.parametrize(
    ("overheads", "quarters"),
    [([], 2), ([0], 2), ([-3 * MB], 2), ([MB], 6), ([MB, MB + 1], 7), ([7 * MB, MB], 30)],
)
def test_slack_is_the_most_beside_tensors_and_half_a_mb_in_quarters(overheads, quarters):
    assert limits.slack(overheads) == quarters * MB // 4


def test_what_is_allowed_is_budget_and_slack_or_what_a_device_has_left():
    assert limits.allowed_bytes(2.5, MB) == 3.5 * MB
    assert limits.allowed_bytes(2.5, MB, baseline=100 * MB, device_mb=200) == 3.5 * MB
    assert limits.allowed_bytes(2.5, MB, baseline=100 * MB, device_mb=102) == 2 * MB


def test_a_device_below_the_baseline_is_explained():
    with pytest.raises(
        ValueError, match=r"a limit of 99 MB is below what Python and torch take .* 100 MB; raise --dev"
    ):
        limits.allowed_bytes(2.5, MB, baseline=100 * MB, device_mb=99)


@pytest.fixture
def groups(tmp_path):
    """A tree of cgroups as the kernel shows it: session/app, of which session limits memory; and who is in app."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / "session" / "app").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory\n")
    for group, controls in ((root, ""), (root / "session", "cpu memory\n"), (root / "session" / "app", "\n")):
        (group / "cgroup.subtree_control").write_text(controls)
        (group / "cgroup.procs").write_text("")
    own.write_text("0::/session/app\n")
    return root, own


def test_a_cgroup_is_made_in_the_nearest_group_that_limits_memory(groups):
    root, own = groups
    assert limits.cgroup_parent(root, own) == root / "session"


def test_what_is_missing_for_a_cgroup_is_said(groups, monkeypatch, tmp_path):
    root, own = groups
    with pytest.raises(Unusable, match=f"cgroups v2 are not mounted at {tmp_path}"):
        limits.cgroup_parent(tmp_path, own)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(Unusable, match=f"no permission to make a group in {root / 'session'}"):
            limits.cgroup_parent(root, own)
    (root / "session" / "cgroup.subtree_control").write_text("cpu\n")
    with pytest.raises(Unusable, match=r"no group above .* limits memory"):
        limits.cgroup_parent(root, own)
    own.write_text("4:memory:/old\n")
    with pytest.raises(Unusable, match="this process is in no cgroup v2"):
        limits.cgroup_parent(root, own)


def test_a_process_enters_a_group_of_its_own_with_its_limit(groups):
    root, _ = groups
    limit, group = Cgroup(root), root / f"hetperm-{os.getpid()}"
    limit.enter(5 * MB)
    assert (group / "memory.max").read_text() == str(5 * MB)
    assert (group / "cgroup.procs").read_text() == str(os.getpid())
    (group / "memory.peak").write_text("123\n")
    assert limit.peak() == 123
    limit.leave(pid=1)  # it has no group


def refuse(*_):
    raise Unusable("no permission to make a group in /there")


def test_without_permission_for_cgroups_the_fallback_is_named(monkeypatch):
    monkeypatch.setattr(limits, "cgroup_parent", refuse)
    monkeypatch.setattr(limits, "status", lambda: {"VmData": 1, "VmPeak": 1})
    monkeypatch.setattr("sys.platform", "linux")
    limit, sentence = limits.choose("auto")
    assert isinstance(limit, DataLimit)
    assert sentence == (
        "cgroups cannot be used (no permission to make a group in /there): memory is limited by RLIMIT_DATA of each "
        "process"
    )
    with pytest.raises(Unusable, match=r"cgroups cannot be used: no permission .*; use --enforce rlimit, or auto"):
        limits.choose("cgroup")
    assert limits.choose("none") == (None, "memory is not limited, as asked for")


def test_a_system_without_limits_only_measures(monkeypatch):
    monkeypatch.setattr(limits, "cgroup_parent", refuse)
    monkeypatch.setattr("sys.platform", "darwin")
    limit, sentence = limits.choose("auto")
    assert limit is None
    assert sentence.endswith("darwin does not enforce RLIMIT_DATA: memory is measured and not limited")
    with pytest.raises(Unusable, match="darwin does not enforce RLIMIT_DATA; use --enforce none"):
        limits.choose("rlimit")


def test_the_group_is_where_cgroups_are_allowed(monkeypatch):
    monkeypatch.setattr(limits, "cgroup_parent", lambda: Path("/there"))
    assert limits.choose("auto") == (Cgroup(Path("/there")), "memory is limited by a cgroup for each process")


# The clock

FAST = Tier("fast", 1, 1.0, down_mbps=80, up_mbps=40, slow=1)
SLOW = Tier("slow", 1, 0.5, down_mbps=8, up_mbps=4, slow=3)
BARE = Tier("bare", 1, 1.0)


def test_a_visit_is_download_computing_and_upload():
    speed = Speed(per_mac=1e-9)
    # 1 MB at 8 and 4 Mbps are 1 and 2 seconds; 10^6 multiply-adds x 50 samples x 1 ns x 3 are 0.15
    assert speed.seconds(SLOW, 10**6, 50, down=10**6, up=10**6) == pytest.approx(3.15)
    assert speed.seconds(BARE, 10**6, 50, down=10**6, up=10**6) == pytest.approx(0.05)


class Echo:
    """An engine whose hosts send back what they got."""

    def run(self, tasks):
        return [task.params for task in tasks]


def params(numbers: int) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(numbers)}


def training(host: int, width: float, numbers: int) -> Task:
    return Task(Sgd(steps=5, batch_size=10, lr=0.1), params(numbers), host=host, seed=0, width=width)


@pytest.fixture
def clock():
    macs = {1.0: 4 * 10**6, 0.5: 10**6}
    return Clock(Echo(), tiers=[FAST, SLOW], samples=[100, 4], macs=macs.__getitem__, speed=Speed(1e-9))


def test_a_round_takes_as_long_as_its_slowest_host(clock):
    tasks = [training(0, 1.0, 250_000), training(1, 0.5, 125_000)]
    assert clock.run(tasks) == [task.params for task in tasks]
    # fast: 0.1 + 0.2 on the wire, 4 ms x 50 samples; slow: 0.5 + 1 on the wire, 3 x 1 ms x 5 batches of its 4 samples
    assert clock.seconds == pytest.approx(max(0.3 + 0.2, 1.5 + 0.06))
    assert clock.sent == 2 * 4 * 375_000
    clock.run(tasks[:1])
    assert clock.seconds == pytest.approx(1.56 + 0.5)


def test_the_clock_says_of_hosts_what_its_engine_says(clock):
    assert not clock.hosts_may_be_absent
    clock.engine.hosts_may_be_absent = True
    parts = {"tiers": clock.tiers, "samples": clock.samples, "macs": clock.macs, "speed": clock.speed}
    assert Clock(clock.engine, **parts).hosts_may_be_absent


def test_visits_that_mix_rounds_take_the_time_of_their_rounds(clock):
    tasks = [training(0, 1.0, 250_000), training(1, 0.5, 125_000), training(0, 1.0, 250_000)]
    told = []
    visits = [
        SimpleNamespace(model=k, host=task.host, round=k // 2, work=1.0, task=lambda task=task: task, done=told.append)
        for k, task in enumerate(tasks)
    ]
    assert clock.flow is None

    def flow(visits):
        for visit in reversed(visits):
            visit.done(visit.task().params)

    clock.engine.flow = flow
    clock.flow(visits)
    assert clock.seconds == pytest.approx(1.56 + 0.5)
    assert clock.sent == 2 * 4 * 625_000
    assert len(told) == 3


def test_what_stays_at_home_is_not_uploaded(clock):
    clock.uploads = False
    clock.run([training(0, 1.0, 250_000)])
    assert (clock.seconds, clock.sent) == (pytest.approx(0.1 + 0.2), 10**6)


def test_tasks_of_one_host_follow_each_other_and_an_empty_round_takes_no_time(clock):
    clock.run([])
    assert clock.seconds == 0
    clock.run([training(0, 1.0, 250_000)] * 2)
    assert clock.seconds == pytest.approx(1.0)


def test_the_clock_asks_every_kind_of_work_how_many_samples_it_takes(clock):
    updates = {
        Sgd(steps=3, batch_size=4, lr=1): 12,
        Sgd(steps=3, batch_size=400, lr=1): 300,
        Ordered(steps=3, batch_size=4, lr=1, widths=(1.0,)): 12,
        BatchGradient(batch_size=8): 8,
        FullGradient(): 100,
        ReportGradient(batches=8): 100,
    }
    for update, samples in updates.items():
        before = clock.seconds
        clock.run([Task(update, {}, host=0, seed=0)])
        assert clock.seconds - before == pytest.approx(samples * 4e6 * 1e-9), update
    assert all(callable(kind.samples) for kind in UPDATES.values())  # whatever a method hands out can be timed


def test_bytes_are_those_of_the_tensors():
    assert size(params(3)) == 12
    assert size(Report(torch.zeros(3), noise=1.0)) == 12 + 16
    assert size((params(1), params(2))) == 12
    assert size(Failure(training(0, 1.0, 3), ValueError())) == 0


def test_the_first_point_that_is_good_enough_counts():
    curve = [
        {"method": "a", "accuracy": y, "seconds": 10.0 * k, "bytes": k} for k, y in enumerate((0.2, 0.6, 0.5, 0.9))
    ]
    other = [{"method": "b", "accuracy": 0.3, "seconds": 1.0, "bytes": 1}]
    assert to_reach(curve + other, 0.5) == {"a": {"seconds": 10.0, "bytes": 1}, "b": None}


def test_the_last_epoch_is_always_a_point():
    assert [points(epochs) for epochs in (1, 2, 3, 7)] == [[1], [1, 2], [1, 2, 3], [3, 5, 7]]
