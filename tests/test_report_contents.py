"""What report reads: summary.json both ways, the rows of a run folder, and nothing of other rooms."""

import ast
import json
import math
from pathlib import Path

import pytest
from summaries import clients, several, single

import hetperm.report
from hetperm.report.contents import Summary, deployed, read, read_csv, tier_columns
from hetperm.runs import files

# summary.json


def without_groups() -> dict:
    """Clients have no known groups, a rival was not scored and no capacity profile was used."""
    table = single() | {"capacity_profile": None}
    table["alpha"]["same_group_mass"] = None
    table["baselines"]["local"]["accuracy"] = dict.fromkeys(table["accuracy"])
    table["baselines"]["local"]["tiers"]["mid"]["accuracy"] = None
    return table


def with_unscored_spread() -> dict:
    """A rival that was never scored spreads by nan, which JSON writes as null."""
    table = several()
    table["spread"]["baselines"]["local"]["tiers"]["mid"]["accuracy"] = math.nan
    return table


@pytest.mark.parametrize(
    "table",
    [single(), single() | {"baselines": {}}, without_groups(), several(), several([7]), with_unscored_spread()],
    ids=["run", "without rivals", "without groups", "seeds", "one seed", "unscored"],
)
def test_a_summary_goes_through_its_types_without_losing_a_byte(table, tmp_path):
    files.write_json(tmp_path / "summary.json", table)
    text = (tmp_path / "summary.json").read_text()
    files.write_json(tmp_path / "again.json", Summary.from_json(json.loads(text)).to_json())
    assert (tmp_path / "again.json").read_text() == text
    files.write_json(tmp_path / "again.json", Summary.from_json(table).to_json())  # as the run has it in memory
    assert (tmp_path / "again.json").read_text() == text


def test_a_summary_knows_its_methods_and_which_of_them_mix():
    summary = Summary.from_json(single())
    assert list(summary.methods) == ["perm", "local", "fedavg-ft"]
    assert summary.methods["perm"] is summary.main
    assert list(summary.mixing) == ["perm"]
    assert summary.main.cost.mb_sent == 2


def test_spread_is_that_of_the_method_asked_for_and_empty_without_seeds():
    summary = Summary.from_json(several())
    assert summary.spread_of("perm").accuracy.mean == pytest.approx(0.01)
    assert summary.spread_of("local").accuracy.mean == pytest.approx(0, abs=1e-9)
    assert Summary.from_json(single()).spread_of("perm").accuracy.mean is None


# Rows


def test_csv_is_read_as_it_was_written_and_a_tier_of_digits_stays_a_name(tmp_path):
    rows = [{"tier": "007", "n": 3, "x": 0.5, "word": "a,b"}, {"tier": "x", "n": None, "x": 1e-9, "word": 'say "µ"'}]
    files.write_csv(tmp_path / "x.csv", rows)
    assert read_csv(tmp_path / "x.csv") == rows


def test_the_deployed_model_is_the_tail_average_once_it_has_begun():
    rows = [
        {"accuracy_mean": 0.5},
        {"accuracy_mean": 0.5, "tail_accuracy_mean": None},  # as a CSV file has an epoch before the tail
        {"accuracy_mean": 0.6, "tail_accuracy_mean": 0.7},
        {},
    ]
    assert [deployed(row, "accuracy_mean") for row in rows] == [0.5, 0.5, 0.7, None]


def test_columns_of_tiers_are_those_of_the_iterate():
    row = {"accuracy_mean": 0, "accuracy_tier_a_b": 1, "tail_accuracy_tier_a_b": 2, "accuracy_tier_mid": 3}
    assert tier_columns(row) == {"a_b": "accuracy_tier_a_b", "mid": "accuracy_tier_mid"}


# The folder


def test_the_rows_of_clients_are_parted_by_seed(tmp_path):
    files.write_json(tmp_path / "summary.json", several())
    files.write_csv(tmp_path / "clients.csv", [{"seed": seed, **row} for seed in range(3) for row in clients(seed)])
    assert [[row["seed"] for row in rows] for rows in read(tmp_path).clients] == [[0] * 6, [1] * 6, [2] * 6]


def test_the_profile_of_several_seeds_is_that_of_the_first_that_has_one(tmp_path):
    files.write_json(tmp_path / "summary.json", several())
    for seed in (1, 2):
        (tmp_path / f"seed-{seed}").mkdir()
        files.write_csv(tmp_path / f"seed-{seed}" / "profile.csv", [{"tier": f"of seed {seed}"}])
    assert read(tmp_path).profile == [{"tier": "of seed 1"}]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (None, None, r"run holds no summary\.json; name the folder of a run that has ended$"),
        ("summary.json", "{", r"summary\.json cannot be read \(.+\); remove it or run again$"),
        ("summary.json", '{"a": 1}', r"summary\.json has no 'algorithm'; it is not the summary of a run$"),
        ("summary.json", "[]", r"summary\.json has no 'algorithm'; it is not the summary of a run$"),
        ("config.toml", "a = ", r"config\.toml cannot be read \(.+\); remove it or run again$"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_in_one_sentence(tmp_path, name, content, sentence):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=r"run holds no summary\.json"):
        read(folder)  # it is not there
    folder.mkdir()
    if name is not None:
        files.write_json(folder / "summary.json", single())
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        read(folder)


# The room


@pytest.mark.parametrize("path", sorted(Path(hetperm.report.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_report_imports_nothing_of_other_rooms(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert [name for name in names if name.startswith("hetperm") and not name.startswith("hetperm.report")] == []
