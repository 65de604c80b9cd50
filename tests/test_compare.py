"""hetperm compare: tables and page of runs side by side, and what cannot be compared."""

import json
import os

import pytest
from summaries import clients, single
from test_report_page import CONFIG, Page, data_of, write_run, write_sweep

from hetperm.cli import compare as command
from hetperm.cli.main import guarded
from hetperm.report import page
from hetperm.report.compare import compare, method_grid, render, run_grid, setting_grid, tier_grid
from hetperm.runs import files


def other_run(path, *, ahead: float = 0.05, config: str = CONFIG, seed: int = 0):
    """A run like that of `write_run`, whose algorithm is ahead by so much for every client."""
    write_run(path, seed=seed)
    files.write_csv(path / "clients.csv", [{**row, "accuracy": row["accuracy"] + ahead} for row in clients(seed)])
    summary = single(seed)
    summary["accuracy"]["mean"] += ahead
    files.write_json(path / "summary.json", summary)
    files.write(path / "config.toml", config)
    return path


@pytest.fixture
def two(tmp_path):
    """Two runs that differ in one setting."""
    return [write_run(tmp_path / "first"), other_run(tmp_path / "second", config=CONFIG + "share = 0.7\n")]


def test_a_client_that_joined_later_is_in_no_pair(two):
    rows = [{**row, "joined": None} for row in clients()]
    files.write_csv(two[0] / "clients.csv", [*rows, {**rows[0], "client": len(rows), "joined": 1}])
    lines = {row[0]: row for row in run_grid(compare(two)).rows}
    assert lines["second"][3] == "+0.050 [+0.050, +0.050] ahead"


def test_runs_that_differ_in_one_setting_are_paired_over_clients(two):
    found = compare(two)
    lines = {row[0]: row for row in run_grid(found).rows}
    assert lines["first"][:5] == ["first", "perm", "0.836", "-", "0.801"]
    assert lines["second"][3] == "+0.050 [+0.050, +0.050] ahead"
    assert setting_grid(found).rows == [["share", "-", "0.7"]]
    assert tier_grid(found).rows[0] == ["flagship", "0.902", "0.902"]
    assert [row[0] for row in method_grid(found).rows] == ["perm", "local", "fedavg-ft"]


def test_sweeps_are_paired_over_the_seeds_that_both_have(tmp_path):
    first, second = write_sweep(tmp_path / "first"), write_sweep(tmp_path / "second")
    for seed in range(3):
        summary = single(seed)
        summary["accuracy"]["mean"] += 0.01 * seed
        files.write_json(second / f"seed-{seed}" / "summary.json", summary)
    (first / "seed-0" / "summary.json").unlink()
    found = compare([first, second])
    assert (found.over, found.seeds) == ("seeds", [1, 2])
    # differences of 0.01 and 0.02: mean 0.015, t(1) = 12.706, half = 12.706 * 0.00707 / sqrt(2) = 0.0635
    assert run_grid(found).rows[1][3] == "+0.015 [-0.049, +0.079] level"


def test_the_page_has_tables_and_curves_and_needs_nothing(two):
    page = Page(render(compare(two)))
    assert page.said("h1") == ["first and second"]
    assert page.said("h2") == ["Runs", "Settings", "Tiers", "Progress", "Methods"]
    assert page.said("p")[1] == (
        "In mean test accuracy, second is 0.050 ahead of first (95% interval +0.050 to +0.050)."
    )
    data = data_of(page)
    assert list(data["curves"]) == ["first", "second"]
    assert data["paired"]["rivals"]["second"]["mean"] == 0.05
    assert [script.get("src") for script in page.all("script")] == [None, None]


def refused(capsys, *words) -> str:
    assert guarded(command.main, [str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    return said.err.removeprefix("error: ").strip()


def test_what_cannot_be_compared_is_refused_in_a_sentence(two, tmp_path, capsys):
    first = two[0]
    other = write_run(tmp_path / "other")

    def with_summary(**changes) -> None:
        files.write_json(other / "summary.json", single() | changes)

    with_summary(dataset="mnist")
    assert refused(capsys, first, other) == (
        "first is on digits and other on mnist; runs on different data cannot be compared"
    )

    def by_dice(one):
        """A summary whose methods are scored by another metric."""
        return {"dice" if key == "accuracy" else key: value for key, value in one.items()}

    summary = {**by_dice(single()), "metric": "dice"}
    summary["tiers"] = {name: by_dice(tier) for name, tier in summary["tiers"].items()}
    summary["baselines"] = {}
    files.write_json(other / "summary.json", summary)
    rows = [{"dice" if key == "accuracy" else key: value for key, value in row.items()} for row in clients()]
    files.write_csv(other / "clients.csv", rows)
    assert refused(capsys, first, other) == (
        "first is scored by accuracy and other by dice; run one of them again with --metric accuracy"
    )
    files.write_csv(other / "clients.csv", clients())
    with_summary()
    files.write(other / "config.toml", CONFIG.replace("label-shift:2", "iid"))
    assert refused(capsys, first, other).startswith("first divides the data by label-shift:2 and other by iid;")
    files.write(other / "config.toml", CONFIG)
    with_summary(num_clients=7)
    files.write_csv(other / "clients.csv", [*clients(), {**clients()[0], "client": 6}])
    assert refused(capsys, first, other) == (
        "first has 6 clients and other has 7; runs with different clients cannot be compared: run both with the same "
        "--num-clients"
    )
    files.write_csv(other / "clients.csv", clients())
    with_summary(seed=4)
    assert refused(capsys, first, other).startswith(
        "the runs share no seed (first has 0; other has 4), so their clients differ"
    )
    with_summary()
    rows = clients()
    rows[3]["n_train"] = 51
    files.write_csv(other / "clients.csv", rows)
    assert refused(capsys, first, other).startswith(
        "client 3 is not the same in both: train samples 50 in first and 51 in other;"
    )
    assert not list(tmp_path.glob("*.html"))


def test_bad_words_are_refused_in_a_sentence(two, tmp_path, capsys):
    assert refused(capsys, two[0]).startswith("a comparison takes at least two runs and got 1;")
    assert "is named twice" in refused(capsys, two[0], two[0])
    assert refused(capsys, two[0], tmp_path / "none").startswith("there is no folder ")
    assert refused(capsys, *two, "--out", ".html") == "--out: '.html' is no page; name a file that ends in .html"
    assert refused(capsys, *two, "--out", "x.pdf") == "--out: 'x.pdf' is no page; name a file that ends in .html"
    assert refused(capsys, *two, "--out") == "--out: the value is missing; name a file that ends in .html"
    assert refused(capsys, *two, "--out", "a\n.html").startswith(r"--out is 'a\n.html'; it must not hold control")
    assert refused(capsys, *two, "--all").startswith("unknown flag --all;")
    (tmp_path / "mine.html").write_text("mine")
    assert "is no page of hetperm compare" in refused(capsys, *two, "--out", tmp_path / "mine.html")
    long = "a" * 300
    assert "no name in a path may be longer than 255 bytes" in refused(capsys, two[0], long)
    assert "no name in a path may be longer than 255 bytes" in refused(capsys, *two, "--out", f"{long}.html")
    (tmp_path / "bench").mkdir()
    files.write_json(tmp_path / "bench" / "resources.json", {"tiers": [{"tier": "a"}], "lines": []})
    assert "holds a resource benchmark and no run" in refused(capsys, two[0], tmp_path / "bench")


def test_a_page_that_is_named_twice_is_warned_about(two, tmp_path, caplog):
    command.main([*map(str, two), f"--out={tmp_path / 'a.html'}", "--out", str(tmp_path / "b.html")])
    assert caplog.messages[0] == "--out is given twice; the last one counts"
    assert not (tmp_path / "a.html").exists() and (tmp_path / "b.html").exists()


def test_a_page_takes_the_place_of_no_pipe_folder_or_link(two, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.html")  # reading it would wait for ever
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "dangling.html").symlink_to(tmp_path / "gone")
    (tmp_path / "looping.html").symlink_to(tmp_path / "looping.html")
    for name in ("pipe", "folder", "dangling", "looping"):
        page = tmp_path / f"{name}.html"
        said = refused(capsys, *two, "--out", page)
        assert said == f"{page} exists and is no file; name another with --out"
    assert os.readlink(tmp_path / "dangling.html") == str(tmp_path / "gone")


def test_the_command_prints_tables_and_writes_a_page_that_may_be_written_again(two, capsys):
    for _ in range(2):
        assert guarded(command.main, [str(path) for path in two]) == 0
        said = capsys.readouterr().out
        assert "+0.050 [+0.050, +0.050] ahead" in said
        page = two[0].parent / "compare-first-second.html"
        assert f"written to {page}: open it in a browser" in said
        assert page.is_file()


def test_files_that_were_changed_are_named_those_of_seeds_too(tmp_path, caplog, capsys):
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        write_sweep(run)
        for folder in (run, *run.glob("seed-*")):
            files.write_checksums(folder)
    assert guarded(command.main, [*map(str, runs)]) == 0 and not caplog.records
    (seed, *_) = sorted(runs[1].glob("seed-*"))
    (seed / "clients.csv").write_text((seed / "clients.csv").read_text().replace("0.", "0.0"))
    assert guarded(command.main, [*map(str, runs)]) == 0
    said = f"not as the run wrote it, going by checksums.txt: {seed.name}/clients.csv"
    assert caplog.messages == [f"{runs[1]}: {said}"]


SWEPT = 'algorithm = "perm"\nshare = 0.2\n'


@pytest.mark.parametrize(
    ("seed", "config", "sentence"),
    [
        (0, SWEPT, "seed-1 holds a run with seed 0; put back the one with seed 1"),
        (1, SWEPT + "projection = 0.1\n", "seed-1 holds a run with projection 0.1, and that of the sweep is None;"),
        (1, SWEPT.replace("0.2", "0.7"), "seed-1 holds a run with share 0.7, and that of the sweep is 0.2;"),
    ],
)
def test_a_folder_of_a_seed_that_holds_another_run_is_named(tmp_path, capsys, seed, config, sentence):
    sweep = write_sweep(tmp_path / "sweep")
    for home in (sweep, *sweep.glob("seed-*")):
        files.write(home / "config.toml", SWEPT + ("" if home == sweep else "global_lr = 0.5\n"))
    page.render(sweep)  # step sizes that a run fills in are none of a sweep
    files.write_json(sweep / "seed-1" / "summary.json", single(seed))
    files.write(sweep / "seed-1" / "config.toml", config)
    assert sentence in refused(capsys, sweep, write_run(tmp_path / "run"))
    with pytest.raises(ValueError, match=sentence.partition(";")[0].replace(".", r"\.")):
        page.render(sweep)


def test_hostile_names_of_folders_stay_text(two, tmp_path):
    evil = two[1].rename(tmp_path / "<img src=x>&")
    page = Page(render(compare([two[0], evil])))
    assert "<img src=x>&" in page.said("th")
    assert not page.all("img")


def test_runs_of_one_name_are_told_apart_by_their_path(tmp_path):
    found = compare([write_run(tmp_path / "a" / "run"), other_run(tmp_path / "b" / "run")])
    assert [side.label for side in found.sides] == [str(tmp_path / name / "run") for name in "ab"]
    assert json.dumps(data_of(Page(render(found)))["curves"])
