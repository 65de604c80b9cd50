"""The page of all results: what it shows comes from the folders, and nothing else does."""

import json
import re

import pytest

from hetperm.cli.main import guarded
from hetperm.cli.reproduce import main
from hetperm.report import results_page

MACHINE = {"processor": "a processor", "cores": 2, "python": "3.9", "torch": "2.6"}


def write(runs, name, *, experiment, quick=False, mark="", untuned=(), skipped=()):
    """The folder of an experiment with one table and one picture."""
    folder = runs / name
    folder.mkdir(parents=True)
    table = {"name": "wins", "title": f"Table of {experiment}", "seconds": 7300.0, "seeds": [0, 1]}
    table["markdown"] = f"| setting |\n|---|\n| {experiment} {mark} |\n"
    results = {
        "experiment": experiment,
        "quick": quick,
        "command": f"hetperm reproduce {experiment}",
        "seeds": [0, 1],
        "machine": MACHINE,
        "commits": ["abc"],
        "untuned": list(untuned),
        "skipped": list(skipped),
        "tables": [table],
        "pictures": [{"name": "wins", "title": "A picture"}],
    }
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "wins.png").write_bytes(name.encode())


def test_the_page_shows_the_latest_folder_of_each_experiment_and_hetero_first(tmp_path, capsys):
    runs, docs = tmp_path / "runs", tmp_path / "docs"
    write(runs, "reproduce-scale", experiment="scale")
    write(runs, "reproduce-hetero", experiment="hetero", mark="old")
    write(runs, "reproduce-hetero-10", experiment="hetero", mark="new")
    write(runs, "reproduce-hetero-2", experiment="hetero", mark="older")
    write(runs, "reproduce-hetero-11", experiment="hetero", mark="a look", quick=True)
    (runs / "reproduce-runtime").mkdir()  # begun, and without results
    assert guarded(main, ["page", str(runs), str(docs)]) == 0
    text = (docs / "results.md").read_text()
    assert re.findall(r"^## (.*)$", text, flags=re.M) == [
        "Who wins where",
        "More clients",
        "How constants were chosen",
    ]
    assert "| hetero new |" in text
    assert not re.search(r"hetero (old|older|a look) \|", text)
    assert "`hetperm reproduce hetero`; seeds 0, 1; 2 h 2 min of computing." in text
    assert "a processor, 2 cores, Python 3.9, torch 2.6; commit abc." in text
    links = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert links == ["images/hetero-wins.png", "images/scale-wins.png"]
    assert (docs / links[0]).read_bytes() == b"reproduce-hetero-10"
    assert "hetero, scale" in capsys.readouterr().out


def test_the_page_says_what_was_tuned_and_what_was_left_out(tmp_path):
    write(tmp_path, "reproduce-hetero", experiment="hetero", untuned=["digits (all)"], skipped=["phones is skipped"])
    text = results_page.render(results_page.read_all(tmp_path))
    assert "ran with the step sizes of the configuration: digits (all)." in text
    assert "Left out: phones is skipped." in text
    assert "values chosen by" not in text
    write(tmp_path, "reproduce-hetero-2", experiment="hetero")
    text = results_page.render(results_page.read_all(tmp_path))
    assert "ran with values chosen by `hetperm reproduce tune hetero`" in text


def test_the_template_has_no_figures_of_its_own(tmp_path):
    write(tmp_path, "reproduce-hetero", experiment="hetero")
    text = results_page.render(results_page.read_all(tmp_path))
    assert not re.findall(r"\d\.\d{2,}", text)


def test_a_folder_without_results_is_an_error_that_says_what_to_do(tmp_path, capsys):
    write(tmp_path, "reproduce-hetero", experiment="hetero", quick=True)
    assert guarded(main, ["page", str(tmp_path), str(tmp_path / "docs")]) == 2
    assert "run hetperm reproduce first, without --quick" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"experiment": None}, r"results\.json cannot be read \('experiment' is None"),
        ({"experiment": "../x"}, "must be the name of a file"),
        ({"pictures": [{"name": "../../x"}]}, r"'pictures\.name' is '\.\./\.\./x'; it must be the name of a file"),
        ({"pictures": 3}, "'pictures' is 3; it must be a list"),
        ({"machine": None, "pictures": []}, r"results\.json lacks a figure \("),
        ({"tables": [{"seconds": "x"}], "pictures": []}, r"results\.json lacks a figure \("),
    ],
    ids=str,
)
def test_results_of_another_kind_are_refused_and_named(change, sentence, tmp_path):
    write(tmp_path, "reproduce-hetero", experiment="hetero")
    path = tmp_path / "reproduce-hetero" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=sentence):
        results_page.render(results_page.read_all(tmp_path))
