"""The list of mutants can still be applied, and what becomes of each is told right (`make mutants` runs them)."""

import re
import subprocess
from collections import Counter
from dataclasses import replace

import mutants
import pytest
from mutants import Mutant

MUTANTS = mutants.read()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_breaks_one_place_and_names_tests_that_exist(mutant):
    text = (mutants.ROOT / mutant.file).read_text()
    assert mutant.applied(text) != text
    assert re.fullmatch(r"[A-Z].*\.", mutant.breaks) and mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        function = name.partition("[")[0].rpartition(".")[2]
        assert f"def {function}(" in (mutants.ROOT / file).read_text(), test


def test_no_two_mutants_are_the_same():
    assert max(Counter((mutant.file, mutant.old, mutant.new) for mutant in MUTANTS).values()) == 1


ADDED = Mutant("sign", "A sum is a difference.", "sums.py", "a + b", "a - b", ("test_sums.py::test_two_and_two",))


@pytest.mark.parametrize(("text", "count"), [("a * b", 0), ("a + b, a + b", 2)])
def test_a_text_that_does_not_occur_once_is_an_error_that_says_so(text, count):
    with pytest.raises(ValueError, match=f"^sign: its old text occurs {count} times in sums.py; correct mutants.toml$"):
        ADDED.applied(text)


@pytest.mark.slow
def test_mutants_are_caught_survive_or_cannot_be_tried(tmp_path, monkeypatch, capsys):
    project = tmp_path / "project"
    project.mkdir()
    (project / "sums.py").write_text("def added(a, b):\n    return a + b\n")
    (project / "test_sums.py").write_text(
        "from sums import added\n\n"
        "def test_two_and_two():\n    assert added(2, 2) == 4\n\n"
        "def test_nothing():\n    assert added(0, 0) == 0\n\n"
        "def test_wrong():\n    assert added(1, 1) == 3\n"
    )
    (project / ".gitignore").write_text("*.log\n")
    (project / "large.log").write_text("")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    tests = {
        "caught": {},
        "overlooked": {"tests": ("test_sums.py::test_nothing",)},
        "outdated": {"old": "a * b"},
        "untested": {"tests": ("test_sums.py::test_gone",)},
        "always": {"tests": ("test_sums.py::test_wrong",)},
    }
    listed = [replace(ADDED, name=name, **changes) for name, changes in tests.items()]
    monkeypatch.setattr(mutants, "PRELOADED", ["pytest"])
    copied = mutants.copy_project
    monkeypatch.setattr(mutants, "copy_project", lambda folder: copied(folder, project))
    verdicts = {verdict.name: verdict for verdict in mutants.try_all(listed, jobs=2)}
    words = {name: verdict.word for name, verdict in verdicts.items()}
    assert words == {
        "caught": "caught",
        "overlooked": "SURVIVED",
        "outdated": "ERROR",
        "untested": "ERROR",
        "always": "caught",
        "test_sums.py": "ERROR",
    }
    assert verdicts["caught"].detail == "test_sums.py::test_two_and_two"
    assert "occurs 0 times" in verdicts["outdated"].detail and "status 4" in verdicts["untested"].detail
    assert verdicts["test_sums.py"].detail.startswith("fails with nothing broken: ")
    assert len(capsys.readouterr().out.splitlines()) == len(verdicts)

    monkeypatch.setattr(mutants, "read", lambda: listed)
    monkeypatch.setattr(mutants, "try_all", lambda chosen, jobs: [verdicts[mutant.name] for mutant in chosen])
    assert (mutants.main(["caught"]), mutants.main(["caught", "over"]), mutants.main(["out"])) == (0, 1, 1)
    assert "1 of 2 mutants caught" in capsys.readouterr().out


def test_a_name_that_no_mutant_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        mutants.main(["there-is-none"])
    assert "no mutant of mutants.toml is called there-is-none" in capsys.readouterr().err
