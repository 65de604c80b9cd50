"""The speed benchmark: both sides of a comparison do the same work, and it is written. No times are judged."""

import dataclasses
import json
import shutil
from functools import partial

import pytest
import torch

from hetperm.algorithms.perm import begin
from hetperm.bench.speed import epochs, hetero, options, output, peers, rounds, run, scaling, timing
from hetperm.bench.speed.workloads import WORKLOADS, bare_steps, build, fedavg_round, resized
from hetperm.cli.bench import main
from hetperm.cli.main import guarded
from hetperm.engine import choice
from hetperm.engine.sequential import Sequential
from hetperm.methods import options_for
from hetperm.randomness import generator_for
from hetperm.runs.setting import Setting
from hetperm.server import shuffle
from hetperm.server.federation import Federation
from hetperm.server.global_model import covered_mean
from hetperm.server.visits import personal_epoch

FLOAT = torch.float64


class Counting(Sequential):
    """The sequential engine, which also counts tasks by host."""

    def __init__(self, clients, shop):
        super().__init__(clients, shop)
        self.tasks = []

    def run(self, tasks):
        self.tasks += tasks
        return super().run(tasks)


def small(name: str):
    """A workload in a size that takes no time, and of one step if the model is large."""
    sizes = {"W1": (4, 20), "W2": (3, 3), "W3": (2, 2), "W4": (3, 1)}[name]
    workload = dataclasses.replace(resized(WORKLOADS[name], sizes[0]), local_steps=sizes[1], batch_size=4)
    return dataclasses.replace(workload, widths=workload.widths[-2:] if name == "W4" else workload.widths)


def bare_models(setup) -> list:
    """What the steps of the bare loop make of every client's part of the start."""
    models = []
    for client, pairs in zip(setup.clients, setup.batches, strict=True):
        module = setup.modules[client.width]
        module.load_state_dict(setup.slicer.cut(setup.start, setup.slicer.index(client.width)), strict=False)
        bare_steps(module, torch.optim.SGD(module.parameters(), lr=setup.workload.lr), pairs)
        models.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return models


# Rounds


def test_the_workloads_are_those_that_were_promised():
    sizes = {name: (work.num_clients, work.local_steps, work.batch_size) for name, work in WORKLOADS.items()}
    assert sizes == {"W1": (50, 20, 32), "W2": (50, 20, 32), "W3": (6, 20, 32), "W4": (10, 2, 10)}
    params = {name: build(small(name)).start for name in ("W1", "W2")}
    assert sum(x.numel() for x in params["W1"].values()) == 60 * 10 + 10
    assert sum(x.numel() for x in params["W2"].values()) == 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *[(name, engine) for name in ("W1", "W2") for engine in ("batched", "sequential")],
        ("W3", "sequential"),
        pytest.param("W4", "sequential", marks=pytest.mark.slow),
    ],
)
def test_a_round_and_the_bare_loop_come_to_the_same_model(name, engine):
    setup = build(small(name), dtype=FLOAT)
    with choice.opened(engine, 1, setup.clients, setup.shop) as chosen:
        federation, ours = setup.federation(chosen), fedavg_round(setup, chosen)
    bare = covered_mean(federation, setup.start, bare_models(setup), federation.handed_out("static", 0))
    for key, x in ours.items():
        assert not torch.equal(x, setup.start[key]), key
        torch.testing.assert_close(x, bare[key], rtol=1e-9, atol=1e-9)


def test_without_widths_the_bare_average_is_the_plain_mean():
    setup = build(small("W1"), dtype=FLOAT)
    models = bare_models(setup)
    ours = fedavg_round(setup, Sequential(setup.clients, setup.shop))
    for key, x in ours.items():
        torch.testing.assert_close(x, sum(model[key] for model in models) / len(models))


def test_rounds_of_visits_take_as_many_steps_as_fedavg_rounds():
    setup = build(small("W1"))
    fedavg, visits = (Counting(setup.clients, setup.shop) for _ in range(2))
    state, plan = rounds.travelling(setup)
    for _ in plan:
        fedavg_round(setup, fedavg)
    moved = rounds.visit_rounds(setup, state, plan, visits)
    assert len(visits.tasks) == len(fedavg.tasks) == rounds.ROUNDS * len(setup.clients)
    assert sorted(task.host for task in visits.tasks) == sorted(task.host for task in fedavg.tasks)
    assert {task.update.steps for task in visits.tasks} == {setup.workload.local_steps}
    assert moved.work.client_steps == len(visits.tasks) * setup.workload.local_steps


# Epochs


@pytest.fixture(scope="module")
def grouped() -> Setting:
    """Digits in two groups with different labellings."""
    return epochs.Case(None, num_clients=4, warmup_rounds=2, epochs=1).setting("label-shift:2", dtype="float64")


def perm_state(setting: Setting, federation: Federation):
    options = options_for("perm-two-stage", setting.config.override(local_steps=2), steps=1)
    state = begin(federation, setting.start, options)
    # the groups, whatever the estimate says of so little training
    alpha = torch.tensor([[float(a.group == b.group) for b in setting.clients] for a in setting.clients])
    return dataclasses.replace(state, alpha=alpha / alpha.sum(1, keepdim=True)), options


def test_a_literal_epoch_makes_all_visits_and_gives_the_models_of_those_with_weight(grouped):
    engine = Counting(grouped.clients, grouped.shop)
    federation = Federation(grouped.clients, engine, seed=grouped.config.seed)
    state, options = perm_state(grouped, federation)
    N, engine.tasks = len(grouped.clients), []
    literal = epochs.literal_epoch(federation, state, options)
    assert len(engine.tasks) == N * N
    assert sum(task.update.lr == 0 for task in engine.tasks) == N * N // 2
    ring = shuffle.rounds_of(shuffle.ring(N, generator_for(federation.seed, "schedule", 0)))
    same_order = personal_epoch(federation, state, ring, options.visiting)
    assert len(engine.tasks) == N * N + N * N // 2
    assert literal.r == 1
    for ours, theirs in zip(same_order.v, literal.v, strict=True):
        assert all([torch.equal(ours[key], theirs[key]) for key in ours])


def test_clients_in_groups_of_ten_differ_between_groups_only_by_their_data():
    clients = scaling.grouped(12)
    assert [client.group for client in clients] == [0] * 10 + [1] * 2
    centres = torch.stack([client.train[0].mean(0) for client in clients])
    apart = torch.cdist(centres, centres)
    assert apart[:10, :10].max() < apart[:10, 10:].min()


# Timing


def test_a_ratio_is_the_reference_over_ours_and_the_median_of_the_runs():
    found = timing.Comparison([(8.0, 4.0), (6.0, 4.0), (9.0, 6.0)], [(2.0, 1.0), (3.0, 2.0), (3.0, 3.0)], [4, 2, 3])
    assert found.ratio == 3
    assert found.row("bare", "round") == {
        "bare_seconds": 8.0,
        "bare_cpu_seconds": 4.0,
        "round_seconds": 3.0,
        "round_cpu_seconds": 2.0,
    }


def test_both_sides_run_in_turn_and_the_first_call_does_not_count(monkeypatch):
    monkeypatch.setattr(timing, "LEAST", 0.0)
    monkeypatch.setattr(timing, "RUN", 0.0)
    calls = []
    found = timing.compare(partial(calls.append, "bare"), partial(calls.append, "ours"), runs=2, repeats=3)
    assert calls == ["bare", "ours"] * (1 + 2 * 3)
    assert len(found.ratios) == 2


def test_a_ratio_is_taken_within_each_repetition(monkeypatch):
    """The machine halves its speed after the second of three repetitions: both sides feel it, the ratio does not."""
    clock = {"reference": iter([6.0, 6.0, 12.0]), "ours": iter([2.0, 3.0, 6.0])}
    monkeypatch.setattr(timing, "seconds", lambda work, least: (next(clock[work()]), 1.0))
    monkeypatch.setattr(timing, "RUN", 0.0)
    found = timing.compare(lambda: "reference", lambda: "ours", runs=1, repeats=3)
    assert found == timing.Comparison(((6.0, 1.0),), ((3.0, 1.0),), (2.0,))


def test_quick_work_is_repeated_until_a_run_has_lasted_long_enough(monkeypatch):
    now = iter(range(0, 100, 2))
    monkeypatch.setattr(timing, "seconds", lambda work, least: work())
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    calls = []
    work = lambda: calls.append(0) or (1.0, 1.0)  # noqa: E731
    timing.compare(work, work, runs=1, repeats=2)
    assert len(calls) == 2 + 2 * 4  # two seconds a look at the clock: it is first looked at after the second repetition
    calls.clear()
    timing.compare(work, work, runs=1, repeats=1)
    assert len(calls) == 2 + 2


def test_cores_and_threads_are_given_back():
    before = timing.cores(), torch.get_num_threads()
    with timing.pinned(1):
        assert len(timing.cores()) <= 1
        assert torch.get_num_threads() == 1
    assert (timing.cores(), torch.get_num_threads()) == before


# The command


def test_every_part_has_something_to_run_and_a_table():
    assert tuple(run.MEASURES) == tuple(output.TABLES) == options.PARTS
    assert tuple(WORKLOADS) == options.WORKLOADS


def test_a_quick_run_writes_the_ratio_of_every_workload(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "LEAST", 0.0)
    words = ["--quick", "--workloads", "W1,W2", "--parts", "workloads,perm_rounds"]
    main([*words, "--out", str(tmp_path / "bench")])
    results = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert results["command"] == "hetperm bench " + " ".join([*words, "--out", "bench"])
    assert results["workloads"].keys() == results["perm_rounds"].keys() == {"W1", "W2"}
    assert all([row["ratio_to_bare"] > 0 for row in results["workloads"].values()])
    assert all([row["ratio_to_fedavg"] > 0 for row in results["perm_rounds"].values()])
    table = (tmp_path / "bench" / "table.md").read_text()
    assert "| W1 | logistic regression, 60 features | 4 clients x 20 steps x batch 32 | batched | 1 | " in table
    assert table in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "bench").iterdir()) == ["results.json", "speed.png", "table.md"]


@pytest.mark.slow
def test_a_quick_run_of_epochs_tells_visits_accuracy_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "QUICK_SIZES", (10,))
    monkeypatch.setattr(epochs, "PARTITIONS", ("classes:1",))
    main(["--quick", "--parts", "epochs,alpha,scaling", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["epochs"].keys() == set(epochs.PARTITIONS)
    for row in results["epochs"].values():
        assert row["literal_visits"] == 100 > row["visits"]
        assert 0 < row["accuracy"] <= 1
    assert 0 < results["alpha"]["share_of_epoch"] < 1
    assert results["alpha"]["report_steps"] > 10  # all ten clients reported, each on several mini-batches
    (row,) = results["scaling"]
    assert row["num_clients"] == 10
    assert row["peak_mb"] > row["imports_mb"] > 0
    assert row["models_mb"] * 2**20 == 10 * 4 * (60 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10)
    assert "digits classes:1" in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_a_quick_run_tells_what_engines_add_to_a_task_and_the_phases_of_the_main_job(tmp_path, monkeypatch, warm):
    def answer_of(module: str, *words: str):
        code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        done = warm.run(*words, code=code)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    monkeypatch.setattr(run.phases, "answer_of", answer_of)
    monkeypatch.setattr(run.engines, "ENGINES", ("sequential", "ray"))
    monkeypatch.setattr(run.engines.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(run.phases.main_job, "__kwdefaults__", {"job": {"steps": 20, "epochs": 2}})
    main(["--quick", "--parts", "engines,train", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert 0 < results["engines"]["sequential"]["task_seconds"] < 1
    assert "Ray is not installed" in results["engines"]["ray"]["skipped"]
    phases = results["train"]["phases"]
    assert all([seconds > 0 for seconds in phases.values()])
    assert sum(phases.values()) == pytest.approx(2 * phases["total"])
    table = (tmp_path / "table.md").read_text()
    assert "| evaluation |" in table and "Ray is not installed" in table


def test_a_peer_that_is_not_installed_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert [peers.missing(name) for name in peers.PEERS] == ["not installed (pip install 'hetperm[bench]')"] * 2


def test_flower_is_not_started_where_its_ports_could_be_reached(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert "no network namespace" in peers.missing("flwr")


def test_pfl_comes_to_the_model_of_the_round():
    pytest.importorskip("pfl")
    setup = build(small("W1"))
    advance, module = peers.pfl_rounds(setup)
    advance()
    ours = fedavg_round(setup, Sequential(setup.clients, setup.shop))
    for key, p in module.named_parameters():
        torch.testing.assert_close(p.detach(), ours[key], rtol=1e-5, atol=1e-6)


WRONG = [
    ("--parts alpha,alpha", "--parts names 'alpha' twice; once is enough"),
    ("--workloads W9", "--workloads: unknown 'W9'; known are W1, W2, W3, W4"),
    ("--parts epoch", "--parts: unknown 'epoch'; did you mean 'epochs'?"),
    (
        "--parts=",
        "--parts is empty; name some of workloads, hetero, engines, peers, perm_rounds, epochs, alpha, scaling, train",
    ),
    ("--clients 0", "--clients is 0; it must be a whole number of at least 1"),
    ("--sizes 10 0", "--sizes is 0; it must be a whole number of at least 1"),
    ("--repeat 3", "unknown flag --repeat; did you mean --repeats?"),
    ("--engine fast", "--engine: 'fast' is not one of 'auto', 'sequential', 'batched', 'threads', 'processes', 'ray'"),
    ("resource", "not understood: resource; see --help"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[words for words, _ in WRONG])
def test_a_bad_flag_is_one_line_and_status_2(words, sentence, capsys):
    assert guarded(main, words.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"error: {sentence}")


def test_data_that_are_not_there_and_folders_that_cannot_be_made_end_the_run_at_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    for words in (["--data-dir", str(tmp_path), "--out", str(tmp_path)], ["--out", str(tmp_path / "file")]):
        assert guarded(main, words) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)


# W5


def test_the_bare_steps_of_an_epoch_are_those_of_its_tasks():
    workload = dataclasses.replace(WORKLOADS["W3"], sizes={"in_channels": 1, "image_size": 8}, num_clients=4)
    workload = hetero.mobile(dataclasses.replace(workload, local_steps=2, batch_size=4))
    setup = build(workload)
    steps = hetero.steps_of(hetero.setting_of(workload, setup.clients, setup.shop.full.module), workload)
    # Every model at every host, a global step and a report of every client: each client has two batches.
    assert [len(one.batches) for one in steps] == [2] * len(steps) and len(steps) >= 4 * 4 + 4
    sizes = {sum(p.numel() for p in setup.shop.at(width).module.parameters()) for width in workload.widths}
    assert {sum(p.numel() for p in one.module.parameters()) for one in steps} == sizes
    before = [p.clone() for p in steps[0].module.parameters()]
    hetero.bare_epoch(steps, 0.1)
    assert not all(map(torch.equal, before, steps[0].module.parameters()))
