"""Experiments: cells that run once, equal budgets, tuning that never sees test data, and what is written."""

import json
import re
import runpy
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetperm.cli.flags import flag_of, parse
from hetperm.cli.main import guarded
from hetperm.cli.reproduce import main
from hetperm.config import ALGORITHMS, Config, read
from hetperm.methods import check_method_tables
from hetperm.params import NotFinite
from hetperm.runs import training
from hetperm.runs.checkpoint import Saved
from hetperm.runs.reproduce import cells, experiments, tuning
from hetperm.runs.reproduce.cells import Cell, Settings
from hetperm.runs.reproduce.options import EXPERIMENTS, SEEDS, TUNED, TUNING_SEEDS, Options
from hetperm.runs.reproduce.plan import FOLDER, Case, Plan, grid_file, read_plan, variants
from hetperm.runs.reproduce.session import Session, opened
from hetperm.runs.setting import from_config
from hetperm.runs.summary import summary_of

ROOT = Path(__file__).resolve().parent.parent
GIVEN = Options(cifar10="a.npz", phones="b.npz", leaf="c")  # so that no setting is skipped


# Plans


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("quick", [False, True])
def test_every_experiment_has_a_plan_that_can_be_read(experiment, quick):
    plan = read_plan(experiment, replace(GIVEN, quick=quick))
    assert plan.cases
    assert plan.methods
    assert plan.seeds == ((0,) if quick else SEEDS)
    for case in plan.cases:
        check_method_tables(case.config)
    assert experiment in experiments.RUNS


def test_what_needs_a_path_is_skipped_with_a_sentence_and_runs_when_it_is_given():
    names = {case.name for case in read_plan("hetero", GIVEN).cases}
    plan = read_plan("hetero", Options())
    assert {case.name for case in plan.cases} == names - {"cifar10-class-groups-2", "cifar10-classes-2", "phones"}
    assert "phones is skipped: it needs --phones PATH" in plan.skipped
    with_paths = {case.name: case.config.dataset for case in read_plan("hetero", GIVEN).cases}
    assert with_paths["phones"] == "npz:b.npz"
    (phones,) = (case.config for case in read_plan("hetero", replace(GIVEN, quick=True)).cases if case.name == "phones")
    assert (phones.num_clients, phones.samples_per_client) == (30, None)  # they come as they are, also to a quick look
    assert with_paths["cifar10-classes-2"] == "npz:a.npz"


def test_flags_choose_settings_methods_and_steps():
    options = Options(settings=("mnist-iid",), methods=("local", "perm"), steps=7, seeds=(3,))
    plan = read_plan("hetero", options)
    assert [case.name for case in plan.cases] == ["mnist-iid"]
    assert (plan.methods, plan.seeds, plan.cases[0].config.steps) == (("local", "perm"), (3,), 7)
    for field, sentence in (("settings", "unknown setting 'mnist-idd'"), ("methods", "unknown method 'mnist-idd'")):
        with pytest.raises(ValueError, match=sentence):
            read_plan("hetero", Options(**{field: ("mnist-idd",)}))


def test_every_flag_is_read_from_words():
    words = "--quick --resume --out a --seeds 3 4 --settings b,c --methods perm --budgets macs --steps 5 --data-dir d"
    words += " --cifar10 e --phones f --leaf g --roles i --tuned h --workers 2 --quiet"
    options = parse(Options, words.split(), prog="hetperm reproduce")
    assert {word for word in words.split() if word.startswith("--")} == {flag_of(name) for name in vars(options)}
    assert (options.seeds, options.settings, options.budgets) == ((3, 4), ("b", "c"), ("macs",))
    assert (options.out, options.leaf, options.steps) == (Path("a"), Path("g"), 5)


def test_a_method_that_this_version_lacks_is_left_out_with_a_sentence(monkeypatch):
    monkeypatch.setattr("hetperm.runs.reproduce.plan.known_algorithms", lambda: ("perm", "local"))
    plan = read_plan("hetero", Options())
    assert plan.methods == ("perm", "local")
    assert "fjord-ft is skipped: this version of hetperm has no such method" in plan.skipped


def test_tuned_values_come_from_a_file_and_are_those_of_their_setting(tmp_path):
    path = tmp_path / "chosen.toml"
    path.write_text("[digits.fjord-ft]\nlr = 0.125\n[mnist-iid.perm]\nglobal_lr = 0.75\n")
    configs = {case.name: case.config for case in read_plan("hetero", Options(tuned=path)).cases}
    assert configs["digits"].rivals == {"fjord-ft": {"lr": 0.125}}
    assert configs["mnist-iid"].rivals == {"perm": {"global_lr": 0.75}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "[phone.perm]\nglobal_lr = 0.5",
            "chosen.toml holds values for 'phone' and none for digits, mnist-label-shift-2",
        ),
        ("digits = 3", "chosen.toml: digits is no table of methods, such as [digits.local]; tuning writes chosen.toml"),
        ("[digits]\nlr = 3", "chosen.toml: digits is no table of methods"),
    ],
)
def test_a_file_without_values_for_the_experiment_is_refused(tmp_path, text, sentence):
    path = tmp_path / "chosen.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_plan("hetero", Options(tuned=path))


def test_flags_that_an_experiment_would_ignore_are_refused(capsys):
    for words, sentence in (
        ("synthetic --budgets macs", "--budgets is for hetero and budgets; leave it out for synthetic"),
        ("hetero --tuned x.toml", "there is no file x.toml; give --tuned a chosen.toml that `reproduce tune` wrote"),
        ("all --tuned x.toml", "--tuned holds the values of one experiment; leave it out, each has its own"),
    ):
        assert guarded(main, words.split()) == 2
        assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_run_that_is_resumed_where_there_is_none_looks_for_its_data_first(tmp_path, capsys):
    words = ["hetero", "--settings", "digits,mnist-iid", "--data-dir", str(tmp_path), "--resume"]
    assert guarded(main, [*words, "--out", str(tmp_path / "new")]) == 2
    assert "mnist is not in" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_setting_can_have_fewer_methods_than_its_experiment():
    plan = read_plan("hetero", Options(phones=Path("users.npz"), methods=("perm", "ditto", "local")))
    (phones,) = [case for case in plan.cases if case.name == "phones"]
    assert plan.methods_of(phones) == ("perm", "local") and plan.methods_of(plan.cases[0]) == plan.methods
    assert {cell.method for cell in experiments._equal_steps(plan, phones)} == {"perm", "local"}


def test_an_experiment_can_use_what_was_tuned_for_another():
    ours, theirs = (read_plan(name, Options(settings=("digits",))).cases[0] for name in ("budgets", "hetero"))
    assert ours.config == theirs.config and ours.config.rivals


def test_ablations_leave_out_defaults_and_what_this_version_lacks():
    table = {"a": {"nested": ["static", "skip"], "no_such_field": [1]}, "b": {"vc_weight": [0.05, -1.0, "raw"]}}
    changes, skipped = variants(table, Config())
    assert changes == {"nested = skip": {"nested": "skip"}, "vc_weight = raw": {"vc_weight": "raw"}}
    assert [sentence.partition(" is skipped")[0] for sentence in skipped] == ["no_such_field", "vc_weight = -1.0"]


def test_every_shipped_ablation_is_valid_or_of_a_field_that_this_version_lacks():
    plan = read_plan("ablations", Options())
    for case in plan.cases:
        changes, skipped = variants(plan.table["factors"], case.config)
        assert len(changes) >= 20
        assert all("no such field" in sentence for sentence in skipped)


def test_a_published_command_holds_no_path_of_this_machine():
    options = Options(data_dir="/yard/data", cifar10="/yard/data/c.npz", out="/yard")
    words = ["hetero", "--data-dir", "/yard/data", "--cifar10=/yard/data/c.npz", "--out", "/yard"]
    assert options.public(words) == ["hetero", "--data-dir", "DATA", "--cifar10=CIFAR10.npz", "--out", "OUT"]


# Grids

GRIDS = sorted(path.stem for path in (FOLDER / "grids").glob("*.toml"))


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_as_large_for_every_method_and_every_point_can_be_run(name):
    tables = read(grid_file(name))
    known = [method for method in tables if method in ALGORITHMS]
    sizes = {method: len(points) for method, points in tuning.grid(name, known).items()}
    assert len(set(sizes.values())) == 1, sizes
    assert {"perm", "perm-two-stage"} <= set(known)
    for method in known:
        for point in tuning.combinations(tables[method]):
            check_method_tables(Config(rivals={method: point}))


@pytest.mark.parametrize("experiment", TUNED)
def test_every_setting_that_is_tuned_has_a_grid_with_all_its_methods(experiment):
    plan = read_plan(experiment, GIVEN, tuning=True)
    assert plan.seeds == TUNING_SEEDS
    assert not set(TUNING_SEEDS) & set(SEEDS)
    for case in plan.cases:
        assert set(tuning.grid(case.grid, plan.methods)) == set(plan.methods)


def test_a_grid_that_favours_a_method_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "unfair.toml"
    path.write_text("[perm]\npersonal_lr = [1, 2, 3]\n[local]\nlr = [1]\n")
    monkeypatch.setattr(tuning, "grid_file", lambda name: path)
    with pytest.raises(ValueError, match="from 1 to 3 points; give every method equally many"):
        tuning.grid("unfair", ["perm", "local"])
    with pytest.raises(ValueError, match=r"no table \[ifca\]"):
        tuning.grid("unfair", ["perm", "ifca"])


# Cells

SMALL = Config(
    num_clients=4,
    samples_per_client=20,
    epochs=1,
    steps=12,
    local_steps=2,
    capacity_profile="homogeneous",
)
CASE = Case("small", "small digits", SMALL)


def session_in(folder: Path, **options) -> Session:
    plan = Plan("hetero", (CASE,), ("perm", "local"), (0, 1), Options(**options))
    return Session(plan, folder, command="a command", say=lambda line: None)


def test_finished_cells_are_not_run_again_and_others_are(tmp_path):
    wanted = [Cell("small", method, SMALL.override(seed=seed)) for seed in (0, 1) for method in ("perm", "local")]
    runs = []

    def measure(cell):
        runs.append(cell.label)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return {"diverged": None, "figure": len(runs)}

    with pytest.raises(KeyboardInterrupt):
        session_in(tmp_path).run(wanted, measure)
    rows = session_in(tmp_path).run(wanted, measure)
    assert runs == [*[cell.label for cell in wanted[:3]], wanted[2].label, wanted[3].label]
    assert [row["figure"] for row in rows] == [1, 2, 4, 5]
    assert [(row["method"], row["seed"]) for row in rows] == [("perm", 0), ("local", 0), ("perm", 1), ("local", 1)]
    assert session_in(tmp_path).run(wanted, measure) == rows
    assert len(runs) == 5


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"steps": 13}, True),
        ({"rivals": {"local": {"lr": 0.5}}}, True),
        ({"rivals": {"perm": {"global_lr": 0.5}}}, False),  # of another method
        ({"workers": 2, "data_dir": Path("elsewhere"), "quiet": True}, False),
    ],
)
def test_a_row_of_other_settings_is_not_taken_for_a_cells_own(tmp_path, change, again):
    cell = Cell("small", "local", SMALL)
    session_in(tmp_path).run([cell], lambda cell: {"diverged": None})
    assert (replace(cell, config=SMALL.override(**change)).kept(tmp_path) is None) == again


def test_a_session_says_how_long_it_will_take_and_learns_from_finished_cells(tmp_path):
    lines = []
    session = session_in(tmp_path)
    session._say = lines.append
    wanted = [Cell("small", "local", SMALL.override(seed=seed), seconds=60.0) for seed in range(10)]
    session.expect(wanted)
    assert lines == ["hetero: 10 cells; about 10 min to go"]
    wanted[0].keep(tmp_path, {"fingerprint": wanted[0].fingerprint, "seconds": 120.0})
    later = session_in(tmp_path)
    later._say = lines.append
    later.expect(wanted)
    assert lines[1] == "hetero: 10 cells, 1 finished before; about 18 min to go"  # 9 cells, twice as slow


def test_a_folder_is_refused_without_resume_and_gone_on_with_by_it(tmp_path):
    plan = Plan("hetero", (CASE,), ("perm",), (0,), Options(out=tmp_path / "out"))
    with opened(plan, prefix="reproduce", command="a command", say=print):
        pass
    with pytest.raises(FileExistsError, match="--resume"), opened(plan, prefix="x", command="", say=print):
        pass
    again = replace(plan, options=Options(out=tmp_path / "out", resume=True))
    with opened(again, prefix="reproduce", command="a command", say=print) as session:
        assert session.folder == tmp_path / "out"
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["command"] == "a command"
    assert results["machine"].keys() == {"processor", "cores", "python", "torch"}
    assert results["untuned"] == ["small digits (all)"]


def test_the_folder_of_another_kind_of_run_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text(SMALL.to_toml())
    plan = Plan("hetero", (CASE,), ("perm",), (0,), Options(out=tmp_path, resume=True))
    said = f"^{tmp_path} holds another kind of run; name another folder with --out$"
    with pytest.raises(FileExistsError, match=said), opened(plan, prefix="reproduce", command="", say=print):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_cell_has_the_figures_that_a_run_has():
    setting = from_config(SMALL)
    figures, state = cells.trained(setting, "local", history=True)
    *_, saved = training.epochs(setting, "local", steps=SMALL.steps)
    assert (
        figures["accuracy"]
        == summary_of(training.trained(setting, "local", saved, None), {}).main.to_json()["accuracy"]
    )
    assert figures["diverged"] is None
    assert [row["epoch"] for row in figures["history"]] == [1]
    assert state.work == saved.state.work


def test_a_method_that_diverges_is_a_row_with_a_sentence_and_no_figures(monkeypatch):
    def epochs(setting, method, *, steps):
        raise NotFinite("perm: epoch 0")
        yield

    monkeypatch.setattr(training, "epochs", epochs)
    assert cells.trained(from_config(SMALL), "perm") == ({"diverged": "perm: epoch 0"}, None)


def test_cells_that_differ_in_the_method_only_share_a_setting_but_not_its_configuration():
    built = []

    def build(config):
        built.append(config.seed)
        return from_config(config)

    settings = Settings(build)
    first = settings(SMALL)
    second = settings(SMALL.override(nested="skip", rivals={"local": {"lr": 0.5}}))
    assert second.clients is first.clients
    assert (first.config.nested, second.config.nested) == ("static", "skip")
    assert settings(SMALL.override(seed=1)).config.seed == 1
    assert built == [0, 1]


# Budgets


def cost(steps, *, macs=0.0, down=0, up=0):
    return {"steps": steps, "cost": {"client_steps": steps, "macs": macs, "bytes_down": down, "bytes_up": up}}


@pytest.mark.parametrize(
    ("row", "reference", "budget", "home", "steps"),
    [
        (cost(800, macs=4e9), cost(800, macs=6e9), "macs", 300, 1200),
        (cost(800, macs=6e9), cost(800, macs=3e9), "macs", 0, 400),
        (cost(800, down=60, up=40), cost(800, down=100, up=100), "bytes", 0, 1600),
        (cost(800, down=60, up=40), cost(800, down=100, up=100), "bytes", 300, 1300),  # 500 of them send something
        (cost(800, macs=1), cost(800, macs=1e9), "macs", 0, 3200),  # the most
        (cost(800, macs=1e9), cost(800, macs=1), "macs", 0, 200),  # the least
        (cost(800, macs=100), cost(800, macs=101), "macs", 0, None),  # as good as equal
        (cost(800), cost(800, down=9), "bytes", 0, None),  # local sends nothing
    ],
)
def test_steps_are_such_that_a_rival_spends_what_perm_did(row, reference, budget, home, steps):
    got = experiments.equal_spending(row, reference, budget, least=0.25, most=4.0, home=home)
    assert got == steps


# Tuning

POINTS = {"perm": [{"personal_lr": 0.1}, {"personal_lr": 0.2}], "local": [{"lr": 0.5}, {"lr": 1.0}]}
# What training reports if test data are there: the test accuracies are better, and of the worse points
LAST = {"accuracy_mean": 0.9, "val_accuracy_mean": 0.4, "tail_accuracy_mean": 0.8, "tail_val_accuracy_mean": 0.3}


@pytest.fixture
def trained(monkeypatch):
    """The (setting, method, steps) that tuning trains; training reports `LAST`."""
    calls = []

    def epochs(setting, method, *, steps):
        calls.append((setting, method, steps))
        state = SimpleNamespace(v=setting.clients)
        yield Saved(state)
        yield Saved(state, (LAST,), finished=True)

    monkeypatch.setattr(training, "epochs", epochs)
    return calls


def scores(config: Config = SMALL) -> list[dict]:
    settings, found = Settings(), tuning.point_cells(Case("small", "", config), POINTS, (7, 8))
    return [
        {"method": cell.method, "seed": cell.seed, **tuning.figures(settings(cell.config), cell.method)}
        for cell in found
    ]


def test_points_are_scored_on_validation_data_and_not_on_test_data(trained, monkeypatch):
    assert {row["val_accuracy"] for row in scores()} == {LAST["tail_val_accuracy_mean"]}
    monkeypatch.delitem(LAST, "tail_val_accuracy_mean")
    assert {row["val_accuracy"] for row in scores()} == {LAST["val_accuracy_mean"]}


def test_no_client_has_test_data_while_methods_are_tuned(trained):
    scores()
    assert len(trained) == 2 * 4
    for setting, _, _ in trained:
        assert [client.test for client in setting.clients] == [None] * 4
        assert all(client.val is not None for client in setting.clients)


def test_every_point_is_tried_with_every_seed_as_many_steps_and_its_own_options_only(trained):
    order = [(method, point) for method, choices in POINTS.items() for point in choices]
    # What was chosen before, for any method, must play no part.
    rows = scores(SMALL.override(rivals={"local": {"tail_average": 0.0}, "perm": {"global_lr": 9.0}}))
    assert rows == [
        {"method": method, "seed": seed, "point": point, "diverged": None, "val_accuracy": 0.3}
        for seed in (7, 8)
        for method, point in order
    ]
    for (setting, method, steps), (_, point) in zip(trained, order * 2, strict=True):
        assert setting.config.rivals == {method: point}
        assert steps == setting.config.steps == SMALL.steps


def test_a_point_that_diverges_with_a_seed_is_not_chosen(trained, monkeypatch):
    calm = training.epochs

    def epochs(setting, method, **options):
        if setting.config.rivals[method] == {"personal_lr": 0.1} and setting.config.seed == 8:
            raise NotFinite("perm: epoch 0")
        return calm(setting, method, **options)

    monkeypatch.setattr(training, "epochs", epochs)
    rows = scores()
    assert [row["val_accuracy"] for row in rows if row["seed"] == 8] == [None, 0.3, 0.3, 0.3]
    assert tuning.best(rows, POINTS)["perm"] == {"point": {"personal_lr": 0.2}, "val_accuracy": 0.3}


def test_the_best_point_has_the_best_mean_over_seeds():
    accuracies = {0.1: (0.5, 0.9), 0.2: (0.8, 0.8), 0.3: (0.8, 0.8)}
    rows = [
        {"seed": seed, "method": "local", "point": {"lr": lr}, "val_accuracy": accuracy}
        for lr, both in accuracies.items()
        for seed, accuracy in enumerate(both)
    ]
    points = {"local": [{"lr": lr} for lr in accuracies]}
    assert tuning.best(rows, points) == {"local": {"point": {"lr": 0.2}, "val_accuracy": 0.8}}


def test_what_was_chosen_is_a_table_for_every_setting_and_method():
    choice = {"point": {"lr": 0.5}, "val_accuracy": 0.25}
    lost = {"point": {"lr": 9.0}, "val_accuracy": float("-inf")}
    text = tuning.as_toml({"digits": {"perm": choice, "local": choice}, "mnist-iid": {"local": lost}}, "a command")
    assert text.startswith("# Chosen on validation data by: a command\n")
    assert "# mnist-iid, local: every point diverged" in text
    assert tomllib.loads(text) == {"digits": {"perm": {"lr": 0.5}, "local": {"lr": 0.5}}}


# Whole commands


@pytest.fixture
def reproduced(monkeypatch, capsys):
    """(words, folder) -> what the script prints, in this process: it has imported torch already."""

    def reproduced(words: list[str], folder: Path) -> str:
        script = ROOT / "scripts" / "reproduce.py"
        monkeypatch.setattr(sys, "argv", [str(script), *words, "--out", str(folder)])
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        said = capsys.readouterr()
        assert end.value.code == 0, said.err
        return said.out

    return reproduced


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "tables", "pictures"),
    [
        ("hetero --settings digits", ["wins", "steps", "spending", "worst"], ["wins"]),
        ("budgets --settings digits", ["wins", "steps", "macs", "bytes", "spending", "worst"], ["wins"]),
        ("ablations --settings digits", ["ablations"], ["ablations"]),
        ("rates --settings digits", ["rates"], ["rates"]),
        ("synthetic", ["methods"], ["curves", "alpha-perm", "alpha-perm-two-stage"]),
        ("scale", ["scale"], ["scale"]),
        ("runtime --settings logistic", ["runtime"], ["runtime"]),
    ],
)
def test_a_quick_look_writes_all_tables_and_pictures(reproduced, tmp_path, words, tables, pictures):
    out = tmp_path / "out"
    assert " to go\n" in reproduced([*words.split(), "--quick"], out)
    results = json.loads((out / "results.json").read_text())
    assert sorted(table["name"] for table in results["tables"]) == sorted(tables)
    assert sorted(picture["name"] for picture in results["pictures"]) == sorted(pictures)
    assert results["command"] == f"python scripts/reproduce.py {words} --quick --out OUT"
    for name in tables:
        assert (out / f"{name}.md").read_text().startswith("`python scripts/reproduce.py ")
        assert (out / f"{name}.csv").stat().st_size > 20
    for name in pictures:
        assert (out / f"{name}.png").stat().st_size > 5_000
    assert not [path for path in out.rglob("*.json") if str(tmp_path) in path.read_text()]


@pytest.mark.slow
def test_tuning_writes_what_it_chose_and_every_point_and_reproducing_reads_it(tmp_path, capsys):
    out = tmp_path / "tuned"
    words = ["hetero", "--quick", "--settings", "digits", "--methods", "perm,local", "--quiet"]
    assert guarded(main, ["tune", *words, "--out", str(out)]) == 0
    chosen = tomllib.loads((out / "chosen.toml").read_text())
    assert chosen["digits"].keys() == {"perm", "local"}
    assert len((out / "tuning.csv").read_text().splitlines()) == 1 + 2 * len(tuning.grid("mlp", ["local"])["local"])
    again = tmp_path / "run"
    assert guarded(main, [*words, "--tuned", str(out / "chosen.toml"), "--out", str(again)]) == 0
    assert json.loads((again / "results.json").read_text())["untuned"] == []
    assert "written to" in capsys.readouterr().out


def test_all_experiments_but_those_without_their_data_are_run(monkeypatch, capsys):
    started = []

    def start(plan, **others):
        started.append(plan.experiment)
        raise ValueError("not now")

    monkeypatch.setattr("hetperm.runs.reproduce.session.opened", start)
    monkeypatch.setattr(experiments, "check_data", lambda plan: None)
    assert guarded(main, ["all", "--quick"]) == 2
    said = capsys.readouterr()
    assert "femnist: nothing to run; femnist is skipped: it needs --leaf PATH\n" in said.out
    assert started == [name for name in EXPERIMENTS if name not in ("cifar10", "femnist", "natural")]
    assert "femnist" not in said.err and said.err.count("not now") == len(started)


@pytest.mark.parametrize(
    ("experiment", "flags"),
    [("cifar10", ["--cifar10"]), ("femnist", ["--leaf"]), ("natural", ["--phones", "--roles"])],
)
@pytest.mark.parametrize("action", [[], ["tune"]])
def test_an_experiment_without_its_data_names_the_flags_and_writes_nothing(action, experiment, flags, tmp_path, capsys):
    assert guarded(main, [*action, experiment, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: nothing to run; ") and said.err.count("\n") == 1 and not said.out
    assert re.findall("is skipped: it needs (--[a-z0-9]+) PATH", said.err) == flags
    assert not (tmp_path / "out").exists()
