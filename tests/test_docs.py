"""The pages of docs/: their code and commands are run, their flags and links exist, and the site is built."""

import code
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hetperm
import submodels
from hetperm.cli import main as cli
from hetperm.cli.flags import UsageError
from hetperm.cli.train import parse_train

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# The pages whose blocks are run here, from top to bottom, each in an empty folder.
RUN = (
    "index.md",
    "tutorial.md",
    "concepts/index.md",
    "how-to/watch.md",
    "how-to/gpu.md",
    "how-to/clusters.md",
    "faq.md",
)
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```(\w+)\n(.*?)```", flags=re.S)


def blocks(page: str) -> list[tuple[str, str, bool]]:
    """(language, text, whether it is run) of the blocks of a page."""
    return [(kind, text, not skipped) for skipped, kind, text in BLOCK.findall((DOCS / page).read_text())]


def commands(text: str) -> list[list[str]]:
    """The words of the lines of a block that call hetperm; a line that ends in a backslash goes on."""
    return [shlex.split(line)[1:] for line in joined(text).splitlines() if re.match(r"hetperm\b", line)]


def joined(text: str) -> str:
    return text.replace("\\\n", " ")


def test_blocks_are_found_with_whether_they_are_run(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text(
        "```python\n1\n```\n\n<!-- not run: why -->\n```sh\nhetperm train --seed 1\nls\n```\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "DOCS", tmp_path)
    assert blocks("a.md") == [("python", "1\n", True), ("sh", "hetperm train --seed 1\nls\n", False)]
    assert commands("hetperm train \\\n    --seed 1\nls\n") == [["train", "--seed", "1"]]


class Session(code.InteractiveConsole):
    """Python as somebody types or pastes it, line by line: a loop must be followed by an empty line."""

    def type(self, text: str) -> None:
        for line in [*text.splitlines(), ""]:
            unfinished = self.push(line)
        assert not unfinished, text

    def showsyntaxerror(self, *args, **options):
        raise

    def showtraceback(self):
        raise


def test_a_session_takes_only_what_can_be_typed():
    session = Session({})
    session.type("for i in range(2):\n    x = i\n\ny = x")
    assert session.locals["y"] == 1
    with pytest.raises(SyntaxError):
        session.type("for i in range(2):\n    x = i\ny = x")
    with pytest.raises(ZeroDivisionError):
        Session({}).type("1 / 0")


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", _tracker())
    names: dict = {"__name__": "page"}
    session = Session(names)
    for kind, text, is_run in blocks(page):
        assert kind in ("python", "sh"), kind
        if is_run and kind == "python":
            session.type(text) if page == "tutorial.md" else exec(compile(text, page, "exec"), names)
        elif is_run:
            lines = [line for line in joined(text).splitlines() if line.strip()]
            assert len(commands(text)) == len(lines), "a block that is run holds other commands than hetperm"
            for words in commands(text):
                words = [*words, "--steps", "200"] if words == ["train"] else words  # the main job takes longest
                assert cli.guarded(cli._dispatch, words) == 0, (words, capsys.readouterr().err)
    if page == "tutorial.md":
        _check_tutorial(tmp_path, names)
    if page == "how-to/watch.md":
        logged = names["tracker"].logged
        assert [figures["epoch"] for figures in logged] == [1, 2, 1, 2]
        assert {"perm/accuracy_mean", "perm/client_steps"} <= set(logged[0])


def _tracker() -> types.ModuleType:
    """A stand-in for wandb that remembers what it was told."""
    module = types.ModuleType("wandb")

    class Run:
        def __init__(self):
            self.logged, self.summary = [], {}

        def log(self, figures):
            self.logged.append(figures)

        def finish(self):
            pass

    module.init = lambda **options: Run()
    return module


def _check_tutorial(folder: Path, names: dict) -> None:
    """What the tutorial promises is there: two kinds of people found, models on disk, a page of the comparison."""
    alpha = names["alpha"]
    across = alpha[::2, 1::2].sum() + alpha[1::2, ::2].sum()
    assert across / 12 < 0.1  # of the weight goes to those who wear the band on the other arm
    assert (folder / "runs" / "wristbands" / "report.html").is_file()
    assert (folder / "runs" / "compare-wristbands-alone.html").is_file()
    assert sum(p.numel() for p in names["smaller"].parameters()) < sum(p.numel() for p in names["net"].parameters())
    assert (folder / "runs" / "own-model" / "models" / "client_005.safetensors").is_file()


def pages() -> list[str]:
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_page_is_one_that_is_understood(page):
    for kind, text, _ in blocks(page):
        for words in commands(text.replace("$SLURM_ARRAY_TASK_ID", "0")) if kind in ("sh", "bash", "console") else ():
            name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in cli.COMMANDS), None)
            assert name or not words or words[0].startswith("-"), f"{page}: hetperm {' '.join(words)}"
            # Those with a plugin are run for real by test_how_to.py.
            if name == "train" and not {"--help", "--plugins"} & set(words):
                try:
                    parse_train(words[1:])
                except UsageError as error:
                    pytest.fail(f"{page}: hetperm {' '.join(words)}: {error}")


def headings(text: str) -> set[str]:
    """The addresses of a page's headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    names = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", name).strip().lower().replace(" ", "-") for name in names}


def test_every_link_to_a_heading_leads_to_one():
    broken = []
    for page in pages():
        text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.S)
        for path, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
            target = (DOCS / page).parent / path if path else DOCS / page
            if anchor not in headings(target.read_text()):
                broken.append(f"{page}: {path}#{anchor}")
    assert broken == []


@pytest.mark.slow
def test_pictures_of_concepts_are_drawn_by_the_code_and_are_all_there(monkeypatch):
    spec = importlib.util.spec_from_file_location("draw", DOCS / "concepts" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    page = (DOCS / "concepts" / "index.md").read_text()
    assert re.findall(r"\]\(([\w-]+)\.png\)", page) == list(draw.PICTURES)
    for name, picture in draw.PICTURES.items():
        assert picture().axes, name
        assert (DOCS / "concepts" / f"{name}.png").stat().st_size > 5000
    # What the page says of them: the two kinds are found, and visits stay within a kind.
    alpha = draw.weights(0.7 * float(draw.discrepancy.pairwise(draw.gradients()).median()) * 256)
    kinds = draw.torch.tensor(draw.GROUPS)
    assert alpha[kinds[:, None] == kinds].sum() > 0.99 * len(kinds)


# The site


def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_that_are_missing_leave_the_navigation_and_new_how_to_pages_join_it(tmp_path):
    (tmp_path / "how-to").mkdir()
    for name in ("index.md", "how-to/index.md", "how-to/new.md"):
        (tmp_path / name).write_text("# A title\n")
    nav = [{"Home": "index.md"}, {"Gone": "gone.md"}, "gone.md", {"How to": ["how-to/index.md", "how-to/gone.md"]}]
    config = hooks().on_config({"docs_dir": str(tmp_path), "nav": nav})
    assert config["nav"] == [{"Home": "index.md"}, {"How to": ["how-to/index.md", "how-to/new.md"]}]


def test_every_how_to_page_is_in_the_list_of_them():
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "how-to" / "index.md").read_text()))
    assert listed == {path.name for path in (DOCS / "how-to").glob("*.md")} - {"index.md"}


def test_links_out_of_the_pages_become_text(tmp_path):
    (tmp_path / "b.md").write_text("# Be\n")
    here = tmp_path / "index.md"
    page = types.SimpleNamespace(file=types.SimpleNamespace(abs_src_path=str(here)))
    text = "[in](b.md#x) [out](../c.py) [far](https://d) [here](#e)\n```\n[code](../f)\n```\n"
    here.write_text(text)
    said = hooks().on_page_markdown(text, page=page, config={"docs_dir": str(tmp_path)}, files=None)
    assert said == "[in](b.md#x) out [far](https://d) [here](#e)\n```\n[code](../f)\n```\n"


@pytest.mark.parametrize("package", [hetperm, submodels], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package):
    shown = set(
        re.findall(r"^::: (\S+)", "".join(page.read_text() for page in (DOCS / "api").glob("*.md")), flags=re.M)
    )
    homes = {name: f"{package.__name__}.{home}" for name, home in package._HOME.items() if name != "WHOLE"}
    assert [name for name, home in homes.items() if not {home, f"{home}.{name}"} & shown] == []


@pytest.mark.slow
def test_the_site_is_built_and_fetches_nothing(tmp_path):
    python = next(
        (path for path in (ROOT / ".venv-docs" / "bin" / "python", Path(sys.executable)) if _builds(path)), None
    )
    if python is None:
        pytest.skip("mkdocs-material and mkdocstrings are not installed (make docs installs them into .venv-docs)")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(python), "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= 15
    for page in pages:
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\">]+)", page.read_text())
        assert [address for address in fetched if "canonical" not in address] == [], page.name
    api = "".join(page.read_text() for page in (tmp_path / "site" / "api").glob("*.html"))
    for name in ("hetperm.config.Config", "hetperm.runs.experiment.fit", "submodels.scalable.ScalableModel"):
        assert f'id="{name}"' in api
    assert ".. math" not in api
    shutil.rmtree(tmp_path / "site")


def _builds(python: Path) -> bool:
    command = [str(python), "-c", "import material, mkdocstrings"]
    return python.is_file() and subprocess.run(command, capture_output=True).returncode == 0
