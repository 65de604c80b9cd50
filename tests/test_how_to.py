"""docs/how-to: code and commands of the pages run as they stand, and the page of the run folder names all there is."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetperm import Client, Config, fit
from hetperm.cli.main import guarded
from hetperm.cli.train import main
from hetperm.config import ADDED
from hetperm.data import DATASETS
from hetperm.methods import METHODS
from hetperm.metrics import METRICS
from submodels import zoo

pytestmark = pytest.mark.usefixtures("undrawn")

PAGES = Path(__file__).resolve().parent.parent / "docs" / "how-to"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.M | re.S)


@pytest.fixture(autouse=True)
def nothing_stays_registered(tmp_path, monkeypatch):
    """What a page registers is forgotten afterwards, and its files are in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    tables = (METHODS, DATASETS, zoo.MODELS, METRICS)
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)
    ADDED.clear()


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((PAGES / page).read_text())


def follow(page: str) -> None:
    """Do what a page says: write the files that it shows, run its Python, run its commands."""
    names = {"__name__": "page"}
    for language, text in blocks(page):
        named = re.match(r"# (\w+\.(?:py|toml))\n", text)
        if named:
            Path(named[1]).write_text(text)
        elif language == "python":
            exec(compile(text, page, "exec"), names)
        elif language == "sh":
            for line in text.splitlines():
                program, command, *words = shlex.split(line)
                assert (program, command) == ("hetperm", "train")
                assert guarded(main, [*words, "--quiet"]) == 0, line


@pytest.mark.slow
@pytest.mark.parametrize("page", ["own-model.md", "own-data.md", "own-algorithm.md", "own-capacity-profile.md"])
def test_the_code_and_the_commands_of_a_page_run(page):
    follow(page)
    if page == "own-algorithm.md":
        mine = json.loads(Path("runs/mine/summary.json").read_text())
        assert mine["accuracy"] == mine["baselines"]["ditto"]["accuracy"]  # to the last bit
        assert mine["cost"] == mine["baselines"]["ditto"]["cost"]
        loose = json.loads(Path("runs/loose/summary.json").read_text())
        assert loose["accuracy"] != mine["accuracy"]
    if page == "own-data.md":
        stations = json.loads(Path("runs/stations/summary.json").read_text())
        assert (stations["metric"], stations["better"], stations["partition"]) == ("mae", "lower", None)


def test_ditto_takes_sixty_lines():
    (code,) = [text for language, text in blocks("own-algorithm.md") if text.startswith("# my_ditto.py")]
    assert len([line for line in code.splitlines() if line.strip()]) <= 60


def test_every_page_has_a_place_in_the_list_of_pages():
    readme = (PAGES.parent.parent / "README.md").read_text()
    for page in PAGES.glob("*.md"):
        assert f"docs/how-to/{page.name}" in readme


# What a run folder holds

FIGURE = "(mean|weighted|std|worst|bottom_decile)"
NAME = r"[\w.-]+"  # of a method or a tier


def patterns(text: str, metric: str) -> list[re.Pattern]:
    """The names in the first columns of tables, as patterns."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    words = {"METRIC": metric, "METHOD": NAME, "TIER": NAME, "FIGURE": FIGURE, "NNN": r"\d{3,}", "SEED": r"\d+"}
    words["LIMIT"] = "(train_mb|mmacs|wire_mb)"
    found = []
    for name in names:
        pattern = re.escape(name)
        for word, meaning in words.items():
            pattern = pattern.replace(word, meaning)
        found.append(re.compile(pattern))
    return found


def section(title: str) -> str:
    """The part of the page under a heading; with an empty one, the part before the first."""
    page = (PAGES / "run-folder.md").read_text()
    parts = dict(re.findall(r"^## `([^`]+)`\n(.*?)(?=^## |\Z)", page, flags=re.M | re.S))
    return parts[title] if title else page.partition("\n## ")[0]


def unnamed(names, text: str, metric: str) -> list[str]:
    known = patterns(text, metric)
    return sorted({name for name in names if not any(pattern.fullmatch(name) for pattern in known)})


def keys(content, start="") -> set[str]:
    """Dotted names of all values in a JSON object."""
    if not isinstance(content, dict):
        return {start}
    return {name for key, value in content.items() for name in keys(value, f"{start}.{key}" if start else key)}


def summary_names(content) -> set[str]:
    """The names in summary.json; those of rivals and of the spread are the names of a method again."""
    own = {key: value for key, value in content.items() if key not in ("baselines", "spread", "seeds")}
    names = keys(own) | ({"seeds"} if "seeds" in content else set())
    for rival in content.get("baselines", {}).values():
        names |= keys(rival)
    if "spread" in content:
        names |= summary_names(content["spread"])
    return names - {"alpha"}  # null: a method without mixing weights


def what_is_not_named(folder: Path) -> dict[str, list[str]]:
    """file -> what it holds that the page does not name; only those that hold such."""
    metric = json.loads((folder / "summary.json").read_text())["metric"]
    paths = [path for path in folder.rglob("*") if path.is_file()]
    inside = [path.relative_to(folder).as_posix() for path in paths]
    files = {re.sub(r"^seed-\d+/", "", name) for name in inside}
    missing = {"files": unnamed(files, section(""), metric)}
    for path in paths:
        if path.suffix == ".csv":
            with path.open(newline="") as file:
                columns = next(csv.reader(file))
            text = section(path.name) + (section("metrics.csv") if path.name == "baselines.csv" else "")
            missing[path.name] = unnamed(columns, text, metric)
        elif path.name == "summary.json":
            missing[path.name] = unnamed(summary_names(json.loads(path.read_text())), section(path.name), metric)
        elif path.parent.name == "models" and path.suffix == ".json":
            missing["manifest"] = unnamed(json.loads(path.read_text()), section("models/client_NNN.json"), metric)
        elif path.name == "timing.json":
            missing[path.name] = unnamed(json.loads(path.read_text()), section(path.name), metric)
    return {name: found for name, found in missing.items() if found}


TINY = "--num-clients 6 --samples-per-client 30 --steps 40 --epochs 2 --quiet"


def trained(words: str) -> Path:
    assert guarded(main, f"{words} {TINY} --out run".split()) == 0
    return Path("run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--baselines local,fedavg-ft --participation 0.9 --label-mask",
        "--baselines local --seeds 0 1 --capacity-profile uniform5 --metric perplexity",
        "--algorithm fjord-ft --baselines pfedme --option pfedme.lr=500 --step-cap 0",  # which diverges
    ],
)
def test_every_file_and_column_of_a_run_has_a_line_on_the_page(words):
    assert what_is_not_named(trained(words)) == {}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        h = self.embed(x)
        return self.out(self.attention(h, h, h, need_weights=False)[0]).mean(1)


def test_a_run_of_fit_is_on_the_page_too(tmp_path):
    x = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0))
    pair = (x, x.sum((1, 2)).unsqueeze(1))
    clients = [Client(pair, pair, pair, width=width) for width in (1.0, 0.5)]
    config = Config(steps=20, epochs=1, baselines=("local",), out=tmp_path / "run", quiet=True)
    fit(Heads(), clients, config, loss=F.mse_loss, metric="mae")
    assert what_is_not_named(tmp_path / "run") == {}


def test_a_file_or_column_without_a_line_is_found(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"metric": "accuracy", "mood": "fine"}))
    (tmp_path / "clients.csv").write_text("client,accuracy_local,mood_local\n")
    (tmp_path / "notes.txt").touch()
    assert what_is_not_named(tmp_path) == {
        "files": ["notes.txt"],
        "summary.json": ["mood"],
        "clients.csv": ["mood_local"],
    }
