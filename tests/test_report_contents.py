"""What report reads: summary.json both ways, the rows of a run folder, and nothing of other rooms."""

import ast
import json
import math
import os
import re
from pathlib import Path

import pytest
from summaries import clients, several, single

import hetperm.report
from hetperm.report import page
from hetperm.report.contents import read, read_csv
from hetperm.report.summary import Summary, deployed, tier_columns
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
    assert summary.spread_of("perm").score.mean == pytest.approx(0.01)
    assert summary.spread_of("local").score.mean == pytest.approx(0, abs=1e-9)
    assert Summary.from_json(single()).spread_of("perm").score.mean is None


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


DAMAGED = [  # keys that lead to a value of summary.json, what is there instead, and what is said
    ("cost", None, "'cost' is None; it must be a table"),
    ("cost visits", "x", "'cost.visits' is 'x'; it must be a number or null"),
    ("accuracy", [1], "'accuracy' is [1]; it must be a table"),
    ("accuracy mean", True, "'accuracy.mean' is True"),
    ("accuracy mean", 10**400, "'accuracy.mean' is 1000"),
    ("tiers mid", 3, "'tiers.mid' is 3; it must be a table"),
    ("alpha", "x", "'alpha' is 'x'; it must be a table"),
    ("num_clients", 0, "'num_clients' is 0; it must be a whole number of at least 1"),
    ("algorithm", {}, "'algorithm' is {}; it must be a text"),
    ("baselines", [], "'baselines' is []; it must be a table"),
    ("baselines local", None, "'baselines.local' is None"),
    ("baselines local cost bytes_up", "9", "'baselines.local.cost.bytes_up' is '9'"),
    ("baselines local diverged", 3, "'baselines.local.diverged' is 3; it must be a text"),
    ("seeds", "01", "'seeds' is '01'; it must be a list"),
    ("seeds", ["../.."], "'seeds' is '../..'; it must be a whole number"),
    ("spread", 1, "'spread' is 1; it must be a table"),
    ("paired", {"local": {"differences": "x"}}, "'paired.local.differences' is 'x'; it must be a list"),
    ("paired", {"local": {"differences": ["x"]}}, "'paired.local.differences' is 'x'; it must be a number"),
]


@pytest.mark.parametrize(("keys", "value", "sentence"), DAMAGED, ids=[f"{k} {v!r:.20}" for k, v, _ in DAMAGED])
def test_a_field_of_another_kind_is_named_with_its_file(keys, value, sentence, tmp_path):
    summary = single()
    *path, last = keys.split()
    place = summary
    for key in path:
        place = place[key]
    place[last] = value
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        page.render(tmp_path)
    assert str(tmp_path / "summary.json") in str(caught.value)


@pytest.mark.parametrize("key", ["cost", "accuracy", "loss", "tiers", "alpha", "baselines", "epochs", "seed"])
def test_a_summary_without_some_figures_has_a_page_all_the_same(key, tmp_path):
    summary = single()
    summary[key] = None if key in ("epochs", "seed") else {}
    files.write_json(tmp_path / "summary.json", summary)
    assert "digits" in page.render(tmp_path)


TABLES = [
    ("clients.csv", "client,tier\n0,a,3\n", "row 1 has not as many cells as the heading"),
    ("clients.csv", "client,tier\n0,a\n1\n", "row 2 has not as many cells"),
    ("clients.csv", f"client,tier\n0,{'x' * 140_000}\n", "field larger than field limit"),
    ("clients.csv", "client,effective_partners\n0,many\n", "'effective_partners' is 'many'; it must be a number"),
    ("metrics.csv", "epoch,bytes_down,bytes_up\n1,2,x\n", "'bytes_up' is 'x'; it must be a number"),
    ("look-ahead.csv", "share,minus_alone\n0,abc\n", "'minus_alone' is 'abc'; it must be a number"),
    ("client_metrics.csv", "epoch,client,accuracy\n1,0,x\n", "'accuracy' is 'x'; it must be a number"),
    ("baselines.csv", "method,epoch,bytes_up\nlocal,1,x\n", "'bytes_up' is 'x'; it must be a number"),
    ("resources.json", "{}}", "Extra data"),
    ("resources.json", '{"lines": []}', "'tiers' is None; it must be a list"),
    ("resources.json", '{"tiers": [3], "lines": []}', "'tiers' is 3; it must be a table"),
    ("resources.json", '{"tiers": [], "lines": [3]}', "'lines' is 3; it must be a text"),
    ("summary.json", "[" * 100_000, "recursion"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), TABLES, ids=[f"{n} {s[:20]}" for n, _, s in TABLES])
def test_a_damaged_table_is_named(name, content, sentence, tmp_path):
    files.write_json(tmp_path / "summary.json", single())
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        page.render(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_odd_but_possible_content_has_a_page(tmp_path):
    files.write_json(tmp_path / "summary.json", single() | {"num_clients": 2})
    (tmp_path / "clients.csv").write_text(f"client\n0\n{'9' * 400}\n")
    (tmp_path / "config.toml").write_text("partition = 3\n")
    os.mkfifo(tmp_path / "z.png")  # reading it would wait for ever
    (tmp_path / "y.png").mkdir()
    (tmp_path / "resources.json").write_text('{"tiers": [], "lines": ["\\ud800"]}')
    assert page.render(tmp_path).encode()


@pytest.mark.parametrize(("text", "trained"), [("client,joined\n", 0), ("client,joined\n0,\n1,\n2,1\n", 2)])
def test_a_table_that_lacks_clients_is_named(tmp_path, text, trained):
    files.write_json(tmp_path / "summary.json", single())
    (tmp_path / "clients.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"clients\.csv has rows of {trained} clients and the run had 6;"):
        read(tmp_path)


def test_a_mark_at_the_beginning_of_a_file_is_no_fault(tmp_path):
    files.write_json(tmp_path / "summary.json", single())
    before = read(tmp_path)
    (tmp_path / "summary.json").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "summary.json").read_bytes())
    assert read(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (None, None, r"run holds no summary\.json; name the folder of a run that has ended$"),
        ("summary.json", "{", r"summary\.json cannot be read \(.+\); remove it or run again$"),
        ("summary.json", '{"a": 1}', r"summary\.json cannot be read \('algorithm' is missing; it is not"),
        ("summary.json", "[]", r"summary\.json cannot be read \('the whole file' is \[\]; it must be a table\)"),
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


OWN = ("hetperm.report", "hetperm.texts")


@pytest.mark.parametrize("path", sorted(Path(hetperm.report.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_report_imports_nothing_of_other_rooms(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert [name for name in names if name.startswith("hetperm") and not name.startswith(OWN)] == []
