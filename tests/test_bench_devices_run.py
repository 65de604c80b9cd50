"""The device benchmark, run: processes that the system stops, the limited engine, and whole benchmarks."""

import csv
import json
import os
import signal
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from hetperm.bench.devices import benchmark, device, federated, limits, measure
from hetperm.bench.devices.device import Devices, Exceeded
from hetperm.bench.devices.limited import Limited
from hetperm.bench.devices.limits import DataLimit, choose
from hetperm.cli.main import guarded
from hetperm.cli.resources import main
from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.device.gradients import ReportGradient
from hetperm.device.updates import Sgd
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Task
from hetperm.report.page import render
from hetperm.runs.memory import MB
from submodels import ScalableModel, zoo
from submodels.cost import count

LIMIT, _ = choose("auto")
limited = pytest.mark.skipif(LIMIT is None, reason="this system limits no memory")


@pytest.fixture(scope="module")
def devices():
    with Devices() as started:
        yield started


# Processes


def test_work_is_done_in_another_process_and_tensors_come_back(devices):
    assert devices.do(os.getpid) != devices.do(os.getpid) != os.getpid()
    x = torch.randn(3, 4).T
    back = devices.do(partial(dict, x=x, y=torch.tensor(2), z=torch.empty(0)))
    assert {name: tuple(tensor.shape) for name, tensor in back.items()} == {"x": (4, 3), "y": (), "z": (0,)}
    assert torch.equal(back["x"], x)
    assert devices.baseline > 50 * MB


@limited
def test_a_process_that_takes_more_than_it_is_allowed_is_seen_to_be_stopped(devices):
    assert devices.do(partial(benchmark.take, 8 * MB), allowed=16 * MB, limit=LIMIT) is None
    with pytest.raises(Exceeded, match=r"refused memory|killed"):
        devices.do(partial(benchmark.take, 24 * MB), allowed=16 * MB, limit=LIMIT)
    with pytest.raises(Exceeded, match=r"refused memory|killed"):
        devices.do(partial(torch.ones, 24 * MB // 4), allowed=16 * MB, limit=LIMIT)
    assert benchmark.holds(devices, LIMIT)


def test_a_killed_process_is_seen_to_be_killed_and_the_next_one_is_well(devices):
    die = partial(signal.raise_signal, signal.SIGKILL)
    with pytest.raises(Exceeded, match=r"^killed \(SIGKILL\)$"):
        devices.do(die, allowed=10**9)
    with pytest.raises(RuntimeError, match="a process without a limit was killed"):
        devices.do(die)
    with pytest.raises(RuntimeError, match=r"^invalid literal"):
        devices.do(partial(int, "x"))
    assert devices.do(partial(int, "7")) == 7


class NeverHolds(DataLimit):
    def enter(self, allowed):
        """Do nothing, as a system that ignores limits."""


def test_a_limit_that_does_nothing_is_found_out(devices):
    assert not benchmark.holds(devices, NeverHolds())


def test_a_process_that_cannot_start_torch_is_explained(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Devices() as broken, pytest.raises(RuntimeError, match=r"ended at once .* ulimit -d .* raise it"):
        broken.do(os.getpid)


# Memory


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    module, example = zoo.build("cnn", in_channels=1, num_classes=4, image_size=16), torch.zeros(1, 1, 16, 16)
    return benchmark.Network(module, ScalableModel(module, example), example, batch_size=10)


@limited
def test_what_is_predicted_is_what_a_process_takes(devices, net):
    for width in (1.0, 0.25):
        work = measure.training(net.at(width), net.example, batch_size=10, steps=1)
        peak = devices.do(partial(measure.watched, work, LIMIT))
        assert abs(peak.resident - net.cost(width).train_bytes) < 4 * MB
        assert abs(peak.charged - net.cost(width).train_bytes) < 4 * MB


@limited
def test_a_wider_model_is_stopped_by_a_limit_that_the_narrow_one_keeps(devices):
    module, example = zoo.build("mlp", in_channels=1, num_classes=4, image_size=64), torch.zeros(1, 1, 64, 64)
    net = benchmark.Network(module, ScalableModel(module, example), example, batch_size=10)
    narrow, wide = (count(net.at(width), example, batch_size=10).train_bytes for width in (0.25, 1.0))
    assert wide > narrow + 4 * MB
    enforcement = benchmark.Enforcement(devices, LIMIT, slack=0, rehearsed=False)
    assert enforcement.ends(net, 0.25, narrow + 2 * MB) is None
    assert enforcement.ends(net, 1.0, narrow + 2 * MB) in ("refused memory", "killed (SIGSEGV)", "killed (SIGKILL)")
    rehearsed = benchmark.Enforcement(devices, LIMIT, slack=0, rehearsed=True)
    assert rehearsed.ends(net, 1.0, narrow + 2 * MB) is not None


# The engine


@pytest.fixture(scope="module")
def people(net):
    x = torch.randn(2, 20, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    y = torch.arange(20) % 4
    clients = [Client((inputs, y), test=(inputs, y), width=width) for inputs, width in zip(x, (1, 0.25))]
    return clients, Workshop(net.module, F.cross_entropy, net.scalable)


def tasks_for(shop: Workshop) -> list[Task]:
    train, tell = Sgd(steps=3, batch_size=8, lr=0.1), ReportGradient(batches=4)
    whole, part = (shop.at(width).take() for width in (1.0, 0.25))
    return [
        Task(train, whole, host=0, seed=1),
        Task(train, part, host=1, seed=2, width=0.25),
        Task(tell, part, host=0, seed=3, width=0.25),
    ]


def test_the_limited_engine_gives_the_same_numbers_bit_by_bit(devices, people):
    clients, shop = people
    tasks = tasks_for(shop)
    engine = Limited(clients, shop, devices, allowed=[64 * MB, 32 * MB], limit=LIMIT)
    ours, theirs = engine.run(tasks), Sequential(clients, shop).run(tasks)
    for one, two in zip(ours[:2], theirs[:2], strict=True):
        assert list(one) == list(two)
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(ours[2].gradient, theirs[2].gradient)
    assert ours[2].noise == theirs[2].noise
    assert engine.done == [2, 1]


@limited
def test_a_task_that_its_host_cannot_hold_is_a_failure(devices, people):
    clients, shop = people
    engine = Limited(clients, shop, devices, allowed=[64 * MB, 1000], limit=LIMIT)
    fitting, failed, _ = engine.run(tasks_for(shop))
    assert isinstance(fitting, dict)
    assert isinstance(failed.error, Exceeded)


# Whole benchmarks

PROFILE = """
[tiers.big]
share = 1
width = 1.0
train_mb = {big}
slow = 1
down_mbps = 10
up_mbps = 5

[tiers.small]
share = 1
width = 0.25
train_mb = {small}
slow = 4
"""


@pytest.fixture
def bench(devices, tmp_path, monkeypatch, capsys):
    """(flags, budgets) -> (status, stdout, stderr, folder) of the command, with processes that are there already."""
    monkeypatch.setattr(device, "Devices", lambda caches=False: nullcontext(devices))

    def run(*words: str, big: float = 8, small: float = 2):
        (tmp_path / "mine.toml").write_text(PROFILE.format(big=big, small=small))
        out = tmp_path / "out"
        flags = ["--capacity-profile", str(tmp_path / "mine.toml"), "--model", "cnn"]
        try:
            status = guarded(main, [*flags, "--out", str(out), *words])
        except SystemExit as stop:
            status = stop.code
        return (status, *capsys.readouterr(), out)

    return run


@limited
@pytest.mark.slow
def test_every_tier_fits_and_everything_is_written(bench, monkeypatch):
    monkeypatch.setattr(federated, "FINE_TUNING", 2)
    short = ["--epochs", "1", "--num-clients", "4", "--local-steps", "1", "--image-size", "8"]
    status, said, _, folder = bench(*short)
    assert status == 0, said
    for word in ("fits", "limit = baseline", "stopped in 1 of the 1 tiers", "the same numbers, bit by bit, as without"):
        assert word in said
    with open(folder / "resources.csv", newline="") as file:
        big, small = csv.DictReader(file)
    assert (big["verdict"], small["verdict"]) == ("fits", "fits")
    assert (float(small["wider"]), small["above"]) == (1.0, "refused memory")
    assert float(small["device_step_ms"]) == pytest.approx(4 * float(small["step_ms"]))
    result = json.loads((folder / "resources.json").read_text())
    assert 0.5 <= result["slack_mb"] <= 8
    assert float(big["limit_mb"]) == 8 + result["slack_mb"]
    assert result["federated"]["completed"] and result["federated"]["same"]
    assert min(result["federated"]["tasks"].values()) > 0
    assert {row["method"] for row in result["curves"]} == {"perm", "heterofl-ft", "fedrolex-ft"}
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in result["curves"])
    page = (folder / "report.html").read_text()
    assert "Does it fit the devices?" in page
    assert page.count("<img ") == 2
    assert render(folder) == page


@limited
def test_a_tier_that_does_not_fit_is_status_1(bench):
    status, said, _, folder = bench("--no-federated", "--no-curves", big=2)
    assert status == 1
    assert "tier big: does not fit: width 1 was " in said
    verdicts = [row["verdict"] for row in json.loads((folder / "resources.json").read_text())["tiers"]]
    assert verdicts == ["does not fit", "fits"]


def test_without_limits_nothing_is_decided(bench):
    status, said, _, folder = bench("--no-curves", "--enforce", "none")
    assert status == 0
    assert "memory is not limited, as asked for" in said
    assert said.count("undecidable") == 4  # in the table, and in a sentence each
    assert "federated" not in json.loads((folder / "resources.json").read_text())


WRONG = [
    ("--input 3x32", "input is '3x32'; it must be channels x height x width, such as 3x32x32"),
    ("--input 3x99999x9", "input is '3x99999x9'; it must be channels and sides of at most 4096 pixels"),
    ("--batch-size 0", "batch_size is 0; it must be a whole number of at least 1"),
    ("--device-mb -1", "device_mb is -1.0; it must be a number above 0"),
    ("--device-mb 20", "a limit of 20 MB is below what Python and torch take by themselves here, "),
    ("--capacity-profile phones", "there is no capacity profile 'phones'; give a TOML file, or one of "),
    ("--model resnet18-cifr", "unknown model 'resnet18-cifr'; did you mean "),
    ("--dataset digts", "unknown dataset 'digts'; did you mean 'digits'?"),
    ("--dataset synthetic", "cnn takes images and was given flat feature vectors; use logistic or mlp for those"),
    ("--batch-siz 3", "unknown flag --batch-siz; did you mean --batch-size?"),
    ("--enforce cgroups", "--enforce: 'cgroups' is not one of 'auto', 'cgroup', 'rlimit', 'none'; did you mean"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[words for words, _ in WRONG])
def test_what_cannot_be_measured_is_one_line_and_status_2(words, sentence, bench):
    status, out, err, folder = bench(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1
    assert not folder.exists()


def test_a_model_that_fits_nowhere_is_explained(bench):
    status, _, err, _ = bench(big=0.5, small=0.01)
    assert status == 2
    assert err.startswith("error: cnn fits no tier of profile 'mine' at batch size 10: tier 'big' comes nearest and ")
    assert "of 0.5; lower --batch-size or --input" in err
    status, _, err, _ = bench("--widths-from", "budget", big=0.5, small=0.01)
    assert status == 2
    assert "no width fits train_mb=0.5" in err


def test_no_permission_for_cgroups_is_one_line_with_the_fallback(bench, monkeypatch):
    def refuse(*_):
        raise limits.Unusable("no permission to make a group in /there")

    monkeypatch.setattr(limits, "cgroup_parent", refuse)
    status, _, err, _ = bench("--enforce", "cgroup")
    assert (status, err.count("\n")) == (2, 1)
    assert err.endswith("no permission to make a group in /there; use --enforce rlimit, or auto\n")


def test_the_section_is_part_of_the_report_of_a_run_that_has_one(tmp_path):
    summary = {"algorithm": "perm", "dataset": "digits", "num_clients": 2, "accuracy": {"mean": 0.5, "worst": 0.4}}
    cost = {"visits": 1, "rounds": 1, "client_steps": 1, "bytes_down": 1, "bytes_up": 1}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"cost": cost}))
    found = {"tiers": [{"tier": "big", "width": 1.0, "verdict": "fits", "reason": ""}], "lines": ["limit = baseline"]}
    (tmp_path / "resources.json").write_text(json.dumps(found))
    page = render(tmp_path)
    assert "<h1>perm on digits</h1>" in page
    assert "<li>limit = baseline</li>" in page
