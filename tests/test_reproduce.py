"""The paper's experiments: grids that favour nobody, tuning that never sees test data, and what is written."""

import tomllib
from types import SimpleNamespace

import pytest

from hetperm.cli.main import guarded
from hetperm.cli.reproduce import EXPERIMENTS, grid_file, main
from hetperm.config import ALGORITHMS, Config, load, read
from hetperm.methods import check_method_tables
from hetperm.params import NotFinite
from hetperm.runs import training
from hetperm.runs.checkpoint import Saved
from hetperm.runs.reproduce import as_toml, best, combinations, scores

TINY = "--num-clients 4 --samples-per-client 20 --epochs 1 --local-steps 2 --warmup-rounds 1 --quiet".split()


# Grids


def grid_sizes(experiment: str) -> dict[str, int]:
    return {method: len(list(combinations(table))) for method, table in read(grid_file(experiment)).items()}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_has_a_configuration_and_a_grid_that_favours_no_perm(experiment):
    sizes = grid_sizes(experiment)
    assert set(EXPERIMENTS[experiment]) <= set(ALGORITHMS)
    assert set(sizes) == set(EXPERIMENTS[experiment])
    assert max(sizes["perm"], sizes["perm-two-stage"]) == min(sizes.values())
    for method, table in read(grid_file(experiment)).items():
        for point in combinations(table):
            check_method_tables(load(experiment).override(rivals={method: point}))


@pytest.mark.parametrize("experiment", ["synthetic", "digits"])
def test_the_grid_is_as_large_for_every_method(experiment):
    assert len(set(grid_sizes(experiment).values())) == 1


# Tuning

SMALL = Config(
    num_clients=4,
    samples_per_client=20,
    epochs=1,
    local_steps=2,
    capacity_profile="homogeneous",
    baselines=("local",),
    seeds=(7, 8),
)
POINTS = {"perm": [{"personal_lr": 0.1}, {"personal_lr": 0.2}], "local": [{"lr": 0.5}]}
# What training reports if test data are there: the test accuracies are better, and of the worse points
LAST = {"accuracy_mean": 0.9, "val_accuracy_mean": 0.4, "tail_accuracy_mean": 0.8, "tail_val_accuracy_mean": 0.3}


@pytest.fixture
def trained(monkeypatch):
    """The (setting, method, steps) that tuning trains; training reports `LAST` and takes 99 steps of all clients."""
    calls = []

    def epochs(setting, method, *, steps):
        calls.append((setting, method, steps))
        state = SimpleNamespace(v=setting.clients, work=SimpleNamespace(client_steps=99))
        yield Saved(state)
        yield Saved(state, (LAST,), finished=True)

    monkeypatch.setattr(training, "epochs", epochs)
    return calls


def test_points_are_scored_on_validation_data_and_not_on_test_data(trained, monkeypatch):
    assert {row["val_accuracy"] for row in scores(SMALL, POINTS)} == {LAST["tail_val_accuracy_mean"]}
    monkeypatch.delitem(LAST, "tail_val_accuracy_mean")
    assert {row["val_accuracy"] for row in scores(SMALL, POINTS)} == {LAST["val_accuracy_mean"]}


def test_no_client_has_test_data_while_rivals_are_tuned(trained):
    list(scores(SMALL, POINTS))
    assert len(trained) == len(SMALL.seeds) * 3
    for setting, _, _ in trained:
        assert [client.test for client in setting.clients] == [None] * 4
        assert all(client.val is not None for client in setting.clients)


def test_every_point_is_tried_with_every_seed_and_its_own_options(trained):
    reports = []
    rows = list(scores(SMALL, POINTS, lambda method, row: reports.append(method)))
    order = [("perm", {"personal_lr": 0.1}), ("perm", {"personal_lr": 0.2}), ("local", {"lr": 0.5})]
    accuracy = LAST["tail_val_accuracy_mean"]
    assert rows == [
        {"seed": seed, "method": method, **point, "val_accuracy": accuracy}
        for seed in (7, 8)
        for method, point in order
    ]
    assert reports == ["perm", "perm", "local"] * 2
    for (setting, method, _), (_, point) in zip(trained, order * 2, strict=True):
        assert setting.config.rivals == {method: point}


def test_rivals_get_as_many_steps_as_the_algorithm_took(trained):
    list(scores(SMALL, POINTS))
    assert trained[2][2] == 25  # 99 steps of 4 clients, rounded up
    trained.clear()
    list(scores(SMALL.override(steps=9), POINTS))
    assert {steps for _, _, steps in trained} == {9}


def test_a_point_that_diverges_with_a_seed_is_not_chosen(trained, monkeypatch):
    calm = training.epochs

    def epochs(setting, method, **options):
        if setting.config.rivals[method] == {"personal_lr": 0.1} and setting.config.seed == 8:
            raise NotFinite("perm: epoch 0")
        return calm(setting, method, **options)

    monkeypatch.setattr(training, "epochs", epochs)
    rows = list(scores(SMALL, POINTS))
    assert [row["val_accuracy"] for row in rows if row["seed"] == 8] == [None, 0.3, 0.3]
    assert best(rows, POINTS)["perm"] == {"point": {"personal_lr": 0.2}, "val_accuracy": 0.3}


def test_the_best_point_has_the_best_mean_over_seeds():
    accuracies = {0.1: (0.5, 0.9), 0.2: (0.8, 0.8), 0.3: (0.8, 0.8)}
    rows = [
        {"seed": seed, "method": "local", "lr": lr, "val_accuracy": accuracy}
        for lr, both in accuracies.items()
        for seed, accuracy in enumerate(both)
    ]
    points = {"local": [{"lr": lr} for lr in accuracies]}
    assert best(rows, points) == {"local": {"point": {"lr": 0.2}, "val_accuracy": 0.8}}


def test_what_was_chosen_for_perm_is_a_comment_and_for_rivals_a_table():
    chosen = {method: {"point": {"lr": 0.5}, "val_accuracy": 0.25} for method in ("perm", "perm-two-stage", "local")}
    text = as_toml(chosen, "a command")
    assert text.startswith("# Chosen on validation data by: a command\n")
    assert "# [perm-two-stage]\n# lr = 0.5\n" in text
    assert text.count("# validation accuracy 0.2500\n") == 3
    assert tomllib.loads(text) == {"local": {"lr": 0.5}}


# Whole commands


@pytest.mark.slow
def test_tuning_writes_what_it_chose_and_every_point(tmp_path):
    out = tmp_path / "tuned"
    words = ["tune", "synthetic", *TINY, "--baselines", "local,ifca", "--out", str(out)]
    assert guarded(main, words) == 0
    chosen = tomllib.loads((out / "chosen.toml").read_text())
    assert chosen.keys() == {"local", "ifca"}
    assert chosen["ifca"].keys() == {"lr", "clusters"}
    rows = (out / "tuning.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(grid_sizes("synthetic")[method] for method in ("perm", "local", "ifca"))


@pytest.mark.slow
def test_the_paper_experiment_is_reproduced_with_figure_and_tables(tmp_path, monkeypatch, capsys):
    out = tmp_path / "all"
    words = ["synthetic", *TINY, "--epochs", "2", "--seeds", "0", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["scripts/reproduce.py", *words])
    assert guarded(main, words) == 0
    assert f"written to {out}: figure.png, table.md, table.csv" in capsys.readouterr().out
    assert (out / "figure.png").stat().st_size > 10_000
    text = (out / "table.md").read_text()
    assert text.startswith("`python scripts/reproduce.py synthetic --num-clients 4")
    for method in EXPERIMENTS["synthetic"]:
        assert f"| {method} | 0." in text
    assert (out / "table.csv").read_text().startswith("method,accuracy,accuracy_spread,")
    assert (out / "seed-1" / "summary.json").is_file()
