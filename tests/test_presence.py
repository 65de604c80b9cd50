"""Who is there: draws and traces, in every phase of every method, what absence costs, and reports that grow old."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from federation import (
    BUDGET,
    FULL,
    KEYS,
    LOOPS,
    SEED,
    WIDTHS,
    engine_that_records,
    equal,
    make_clients,
    make_federation,
    make_method,
    part_of,
    run,
    same,
    start,
)

from hetperm import mixing, trace
from hetperm.config import Config
from hetperm.device.gradients import ReportGradient
from hetperm.device.updates import Sgd
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Absent, Failure
from hetperm.methods import METHODS
from hetperm.mixing import discrepancy
from hetperm.randomness import seed_for
from hetperm.server.estimate import REPORTS, collect_reports, missing, outdated
from hetperm.server.global_model import covered_mean, gradient_step, local_sgd_round
from hetperm.server.presence import Presence, present
from hetperm.state import State, Work

ROOT = Path(__file__).resolve().parent.parent


# Draws and traces


def drawn(clients, round):
    """The number that decides whether a client comes, drawn from the stream of its key."""
    streams = [torch.Generator().manual_seed(seed_for(SEED, "present", round, client.key)) for client in clients]
    return [float(torch.rand((), generator=stream)) for stream in streams]


def test_a_client_comes_if_its_draw_is_below_the_share_that_comes():
    clients, seen = make_clients((1.0,) * 5), set()
    for round in range(6):
        for share in (0.1, 0.5, 0.9):
            expected = [number < share for number in drawn(clients, round)]
            assert present(clients, Presence(share), seed=SEED, round=round) == expected
            seen.update(expected)
    assert seen == {True, False}


def test_as_many_clients_come_as_their_share_says():
    clients = make_clients((1.0,) * 5)
    counts = [sum(sum(present(clients, Presence(share), seed=0, round=r)) for r in range(200)) for share in (0.2, 0.8)]
    assert abs(counts[0] - 200) < 45 and abs(counts[1] - 800) < 45  # of 1000; three and a half deviations


def test_everybody_comes_if_all_take_part():
    assert Presence().is_certain and not Presence(trace=("1",)).is_certain
    assert present(make_clients(), Presence(), seed=0, round=0) == [True] * 4


def test_a_trace_is_read_by_key_and_round_and_begins_again():
    """Keys 7, 3, 11, 5 of three texts are texts 1, 0, 2, 2; round 5 of texts of 3 is their last."""
    clients, presence = make_clients(), Presence(trace=("001", "110", "010"))
    assert present(clients, presence, seed=0, round=5) == [False, True, False, False]
    assert present(clients, presence, seed=0, round=1) == [True, False, True, True]


def test_the_shipped_trace_is_what_its_script_writes():
    script = ROOT / "bench" / "day_night.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "configs" / "traces" / "day-night.toml").read_text()


def test_in_the_shipped_trace_four_times_as_many_come_at_night():
    texts = trace.load("day-night")
    by_hour = [sum(text[hour::24].count("1") for text in texts) for hour in range(24)]
    assert 3.5 < max(by_hour) / min(by_hour) < 4.5
    assert by_hour.index(max(by_hour)) in range(13, 18) and by_hour.index(min(by_hour)) in (*range(8), *range(22, 24))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("clients = []", "clients must be a list of texts"),
        ('clients = ["01", "2"]', "client 1 is '2'; it must be a text of 1"),
        ('clients = ["01", "010"]', "client 1 has 3 rounds and client 0 has 2"),
        ('clients = ["00"]', "nobody is ever there"),
        ('cleints = ["01"]', "unknown key 'cleints'; did you mean 'clients'?"),
        ("clients = [", "is not TOML"),
    ],
)
def test_a_bad_trace_is_refused_in_a_sentence_that_names_the_file(content, sentence, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"bad\.toml: ") as caught:
        trace.load(path)
    assert sentence in str(caught.value)


def test_an_unknown_trace_and_two_ways_at_once_are_refused():
    with pytest.raises(ValueError, match="there is no trace 'day-nigt'; did you mean 'day-night'"):
        trace.load("day-nigt")
    with pytest.raises(ValueError, match=r"trace 'day-night' says who is there and participation 0\.5 draws it"):
        Config(trace="day-night", participation=0.5)


# Every phase of every method


def traced(*texts):
    """A trace in which client i of `make_clients` has text i."""
    by_key = dict(zip(KEYS, texts))
    return Presence(trace=tuple(by_key.get(key, "0" * len(texts[0])) for key in range(12)))


ROOM = {"steps": 60}  # for two rounds of the method whose rounds cost most


def options_of(name):
    """Options with a look ahead, or with a fine-tuning that is a single round."""
    if name in LOOPS:
        return {"share": "look-ahead"}
    method = METHODS[name]
    tuned = "fine_tune_steps" in {field.name for field in fields(method.options)}
    return ROOM | ({"fine_tune_steps": 3} if tuned and "fine_tune_steps" not in method.fixed else {})


@pytest.mark.parametrize("name", METHODS)
def test_in_no_phase_of_any_method_an_absent_client_does_anything(name):
    """Client 2 is never there, client 1 in every second round; every task of every phase is recorded."""
    clients = make_clients(FULL if METHODS[name].one_size else WIDTHS)
    recording, tasks = engine_that_records()
    rounds = []

    class Noting(recording):
        def run(self, some):
            rounds.append([task.host for task in some])
            return super().run(some)

    options = {"share": "look-ahead"} if name in LOOPS else ROOM
    presence = traced("1" * 2, "10", "0" * 2, "1" * 2)
    state = run(make_method(name, clients, setup={"engine": Noting, "presence": presence}, **options))
    assert {task.host for task in tasks} == {0, 1, 3}
    assert any(1 in hosts for hosts in rounds) and any(hosts and 1 not in hosts for hosts in rounds)
    work = state.work
    assert work.absent[2] == work.asked[2] > 0 and 0 < work.absent[1] < work.asked[1]
    assert work.absent[0] == work.absent[3] == 0 and work.missed > 0
    n = [client.n_train for client in clients]
    counted = sum(task.update.samples(n[task.host]) / min(4, n[task.host]) for task in tasks)
    assert work.client_steps == pytest.approx(counted)  # who is away spends nothing


@pytest.mark.parametrize("name", METHODS)
def test_a_trace_in_which_all_are_there_changes_no_bit(name):
    clients = make_clients(FULL if METHODS[name].one_size else WIDTHS)
    one = run(make_method(name, clients, **options_of(name)))
    other = run(make_method(name, clients, setup={"presence": Presence(trace=("1",))}, **options_of(name)))
    assert same(one, other) and one.work.figures == other.work.figures
    assert not one.work.asked and not any(other.work.absent)


@pytest.mark.parametrize("name", ["perm", "perm-two-stage", "heterofl-ft", "ifca", "apfl", "local"])
def test_if_nobody_ever_comes_models_stay_as_they_are(name):
    clients = make_clients(FULL)
    state = run(make_method(name, clients, setup={"presence": Presence(trace=("0",))}))
    assert all([equal(params, state.v[0]) for params in state.v[1:]])
    if name != "apfl":  # which deploys a mixture
        assert equal(state.v[0], start())
    assert state.work.client_steps == state.work.bytes_up == state.work.bytes_down == 0


class Leaving(Sequential):
    """An engine that finds host 1 absent, whoever says that it is there."""

    hosts_may_be_absent = True

    def run(self, tasks):
        found = super().run(tasks)
        pairs = zip(tasks, found, strict=True)
        return [Failure(task, Absent("gone")) if task.host == 1 else outcome for task, outcome in pairs]


@pytest.mark.parametrize("name", METHODS)
def test_an_engine_that_finds_a_host_absent_does_what_a_trace_does(name):
    clients = make_clients(FULL if METHODS[name].one_size else WIDTHS)
    found = run(make_method(name, clients, setup={"engine": Leaving}, **options_of(name)))
    stated = run(make_method(name, clients, setup={"presence": traced("1", "0", "1", "1")}, **options_of(name)))
    assert same(found, stated)
    assert found.work == stated.work


def test_any_other_failure_still_ends_the_run():
    class Broken(Sequential):
        def run(self, tasks):
            return [Failure(task, RuntimeError("no good")) for task in tasks]

    with pytest.raises(RuntimeError, match="global round 0: client 0: no good"):
        run(make_method("heterofl", make_clients(), setup={"engine": Broken}))


# By hand


def test_absent_clients_do_not_count_in_a_mean():
    federation = make_federation(make_clients(FULL))
    models = [{name: torch.full_like(x, value) for name, x in start().items()} for value in (1.0, 5.0, 3.0, 100.0)]
    mean = covered_mean(federation, start(), [models[0], None, models[2], None], federation.handed_out("static", 0))
    assert all([bool((x == 2.0).all()) for x in mean.values()])
    assert covered_mean(federation, start(), [None] * 4, federation.handed_out("static", 0)) is start()


def test_a_round_of_global_training_is_that_of_those_who_are_there():
    clients, update = make_clients(FULL), [Sgd(3, 4, 0.1)] * 4
    away = make_federation(clients, presence=traced("1", "0", "1", "0"))
    w, work = local_sgd_round(away, start(), update, batch_size=4, round=5)
    few = [clients[0], clients[2]]
    expected, cost = local_sgd_round(make_federation(few), start(), update[:2], batch_size=4, round=5)
    assert equal(w, expected)
    assert work == cost + Work(missed=6, asked=(1,) * 4, absent=(0, 1, 0, 1))


def test_nobody_there_for_a_step_leaves_the_global_model():
    federation = make_federation(make_clients(FULL), presence=Presence(trace=("0",)))
    indices = federation.handed_out("static", 0)
    state = gradient_step(federation, State(0, start(), ()), ReportFree, indices, lr=0.1, batch_size=4, cap=0.2)
    assert equal(state.w, start()) and state.work.rounds == 1 and state.work.bytes_up == 0


class ReportFree:
    """An update that must not run."""

    @staticmethod
    def samples(n):
        return n


# Reports


UPDATE = ReportGradient(3)


def collected(presence, state, age=0):
    """(reports, the state that remembers them), and a round later."""
    reports = collect_reports(make_federation(make_clients(), presence=presence), state, UPDATE, batch_size=4, age=age)
    memory = {**state.memory, **reports.memory}
    return reports, replace(state, memory=memory, work=state.work + reports.work)


def test_an_old_report_counts_up_to_its_age():
    """Client 1 reports in round 0, at epoch 0, and is away in rounds 1 and 2, at epochs 2 and 5."""
    presence = traced("111", "100", "111", "111")
    first, state = collected(presence, State(0, start(), ()))
    assert first.known is None and missing(state, 4) == []
    state = outdated(replace(state, r=2))
    assert missing(state, 4) == [0, 1, 2, 3]
    second, state = collected(presence, state, age=2)
    assert second.known == (0, 1, 2, 3) and second.gradients[1] is None
    torch.testing.assert_close(second.zeta, first.zeta)  # w has not moved
    assert state.memory[REPORTS]["epoch"].tolist() == [2, 0, 2, 2] and missing(state, 4) == [1]
    third, _ = collected(presence, outdated(replace(state, r=5)), age=2)
    assert third.known == (0, 2, 3)
    assert not third.zeta[1].any() and not third.zeta[:, 1].any() and third.q[1] == 0


def test_who_was_away_is_asked_again_and_a_report_at_the_same_model_never_grows_old():
    presence = traced("10", "01", "10", "10")
    first, state = collected(presence, State(0, start(), ()))
    assert first.known == (0, 2, 3) and missing(state, 4) == [1]
    second, state = collected(presence, replace(state, r=9), age=0)
    assert second.known == (0, 1, 2, 3) and missing(state, 4) == []
    assert second.work.asked == (0, 1, 0, 0)
    everybody, _ = collected(Presence(), State(0, start(), ()))
    torch.testing.assert_close(second.zeta, everybody.zeta)


def test_who_has_no_report_is_alone_and_nobody_learns_from_it():
    state = make_method("perm", make_clients(), setup={"presence": traced("1", "0", "1", "1")}).begin()
    alone = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert torch.equal(state.alpha[1], alone) and torch.equal(state.alpha[:, 1], alone)
    without = [make_clients()[i] for i in (0, 2, 3)]
    expected = make_method("perm", without).begin().alpha
    torch.testing.assert_close(state.alpha[[0, 2, 3]][:, [0, 2, 3]], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", [("1", "0", "1", "1"), ("0", "0", "0", "0"), ("01", "10", "01", "01")])
def test_very_many_clients_of_whom_some_are_away_make_no_matrix_and_the_same_run(pattern, monkeypatch):
    dense = run(make_method("perm", make_clients(), setup={"presence": traced(*pattern)}))
    monkeypatch.setattr(discrepancy, "DENSE_UP_TO", 2)
    monkeypatch.setattr(mixing, "SPARSE_FROM", 2)
    monkeypatch.setattr(torch, "eye", None)
    state = run(make_method("perm", make_clients(), setup={"presence": traced(*pattern)}))
    assert state.alpha.is_sparse
    torch.testing.assert_close(state.alpha.to_dense(), dense.alpha, rtol=0, atol=1e-9)
    rates, expected = (one.memory["rates"]["rate"] for one in (state, dense))
    torch.testing.assert_close(rates, expected, rtol=1e-6, atol=0)


def test_a_long_gradient_is_kept_as_a_sketch_that_tells_distances(monkeypatch):
    from hetperm.server import estimate

    exact, _ = collected(Presence(), State(0, start(), ()))
    monkeypatch.setattr(estimate, "FEWEST", 16)
    monkeypatch.setattr(estimate, "KEPT", 26)
    first, state = collected(traced("11", "10", "11", "11"), State(0, start(), ()))
    assert first.memory[REPORTS]["gradient"].shape == (4, 26)
    assert torch.equal(first.zeta, exact.zeta)  # all are here, so nothing is sketched
    second, _ = collected(traced("11", "10", "11", "11"), outdated(replace(state, r=1)), age=1)
    here = [0, 2, 3]
    torch.testing.assert_close(second.zeta[here][:, here], exact.zeta[here][:, here])
    ratio = second.zeta[1, here] / exact.zeta[1, here]
    assert not torch.equal(ratio, torch.ones(3)) and 0.2 < float(ratio.mean()) < 3


@pytest.mark.parametrize("name", LOOPS)
def test_steps_that_are_missed_are_not_made_up_for(name):
    state = run(make_method(name, make_clients(), participation=0.5, **BUDGET), BUDGET["epochs"])
    total = state.work.client_steps + state.work.missed
    assert 4 * BUDGET["steps"] - 24 < total <= 4 * BUDGET["steps"]
    assert 0.3 < state.work.missed / total < 0.7


def test_fine_tuning_of_clients_that_may_be_away_is_in_rounds():
    """5 steps of fine-tuning are a round of 3 and one of 2; client 1 misses the second of them."""
    clients = make_clients()
    presence = traced(*("1" * 6, "111110", "1" * 6, "1" * 6))  # 4 rounds of training come first
    method = make_method("heterofl-ft", clients, setup={"presence": presence})
    state = method.epoch(method.epoch(method.begin()))
    done = method.finish(state)
    assert (state.work.rounds, done.work.rounds) == (4, 6)
    assert done.work.client_steps - state.work.client_steps == 4 * 5 - 2 and done.work.missed == 2
    assert done.work.bytes_down - state.work.bytes_down == sum(
        x.nbytes for width in WIDTHS for x in part_of(start(), width).values()
    )
