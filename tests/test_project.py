"""The project as a whole: who may import whom, what the Makefile promises, and what no file may contain."""

import ast
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUBMODELS = sorted((ROOT / "submodels").rglob("*.py"))

AT_THE_TOP = {"torch", "numpy", "einops", "submodels", *sys.stdlib_module_names}
INSIDE_FUNCTIONS = AT_THE_TOP | {"timm", "torchvision"}


# Imports


def imports(source: str) -> set[tuple[str, bool]]:
    """(package, whether the import stands inside a function) for every import of `source`."""
    found = set()

    def visit(node, inside):
        if isinstance(node, ast.Import):
            found.update((alias.name.partition(".")[0], inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module.partition(".")[0], inside))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def test_imports_are_told_apart_by_where_they_stand():
    source = (
        "import torch.nn as nn\nfrom . import axes\nif nn:\n    from timm import x\ndef f():\n    import hetperm.cli\n"
    )
    assert imports(source) == {("torch", False), ("timm", False), ("hetperm", True)}


@pytest.mark.parametrize("path", SUBMODELS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_submodels_imports_only_what_it_may(path):
    allowed = {False: AT_THE_TOP, True: INSIDE_FUNCTIONS}
    wrong = sorted(name for name, inside in imports(path.read_text()) if name not in allowed[inside])
    assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_importing_all_of_submodels_imports_neither_timm_nor_torchvision():
    code = "from submodels import *; import sys; print(sorted({'timm', 'torchvision', 'hetperm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# What the project says about itself


def test_constraints_pin_every_direct_dependency_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # Not in .venv unless somebody asks for them, and pinned where they are listed.
    for name in ("bench", "docs", "export", "flower", "ray", "tensorboard"):
        del extras[name]
    direct = [re.match(r"[\w.-]+", line)[0] for line in sum(extras.values(), project["dependencies"])]
    pinned = re.findall(r"^([\w.-]+)==[\d.]+$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert sorted(pinned) == sorted(direct)


def phony_targets() -> list[str]:
    return re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.M)[1].split()


def test_make_help_lists_exactly_the_phony_targets_and_is_the_default():
    run = ["make", "--no-print-directory"]
    listed, default = (
        subprocess.run([*run, *target], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for target in (["help"], [])
    )
    lines = [line.split(maxsplit=2) for line in listed.splitlines()]
    assert [target for _, target, _ in lines] == phony_targets()
    assert default == listed


def mentioned_targets(text: str) -> set[str]:
    """The targets of the make commands in `text`: what code spans and the lines of code blocks begin with."""
    return set(re.findall(r"(?:`|^[ \t]*(?:\$ )?)make ([a-z][\w-]*)", text, flags=re.M))


def test_mentioned_targets_are_read_from_code_and_not_from_prose():
    assert mentioned_targets("`make one` and make two\n    $ make three ARGS=x\nmake four\n`PYTHON=x make`") == {
        "one",
        "three",
        "four",
    }


def test_every_make_target_that_the_documentation_mentions_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / ".ci" / "run"]
    unknown = {page.name: mentioned_targets(page.read_text()) - set(phony_targets()) for page in pages}
    assert not {name: targets for name, targets in unknown.items() if targets}


def test_every_script_that_the_makefile_runs_exists():
    scripts = re.findall(r"\b[\w/]+\.py\b", (ROOT / "Makefile").read_text())
    assert scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


def links(text: str) -> list[str]:
    """Where the links and pictures of a Markdown page go, but for addresses and headings."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S))
    return [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]


def test_links_are_read_from_text_and_not_from_code():
    assert links("[a](b.md#c) ![d](e.png) [f](https://g) [h](#i)\n```\n[j](k)\n```") == ["b.md", "e.png"]


def test_every_link_of_the_documentation_leads_to_a_file():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "submodels" / "README.md"]
    broken = {
        page.name: [link for link in links(page.read_text()) if not (page.parent / link).exists()] for page in pages
    }
    assert not {name: targets for name, targets in broken.items() if targets}
    assert sum(len(links(page.read_text())) for page in pages) > 20


def docstrings(source: str) -> list[str]:
    """The docstrings of a module, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text for text in found if text]


def test_docstrings_say_what_is_done_or_returned():
    paths = [path for folder in ("hetperm", "submodels", "tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    wrong = [f"{path.relative_to(ROOT)}: {text}" for path in paths for text in docstrings(path.read_text())
             if text.startswith("Nothing;")]  # fmt: skip
    assert not wrong
    assert docstrings('"""A."""\ndef f():\n    """Nothing; b."""\n') == ["A.", "Nothing; b."]


# Machine paths

EVERYWHERE = {"/", "/home", "/Users", "/tmp", "/var/tmp", "/opt", "/srv", "/mnt", tempfile.gettempdir()}


def project_files() -> list[Path]:
    """The files git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def mentions(text: str, folder: str) -> bool:
    """Whether `text` holds the absolute path `folder` or one below it: not as the end of another path."""
    return re.search(rf"(?<![\w.~/-]){re.escape(folder)}(?![\w-])", text) is not None


@pytest.mark.parametrize(
    ("text", "found"),
    [("at /yard/x", True), ("'/yard'", True), ("../yard/x", False), ("back/yard/x", False), ("/yards", False)],
)
def test_a_path_is_found_only_where_it_begins(text, found):
    assert mentions(text, "/yard") == found


def test_no_file_mentions_a_folder_of_this_machine():
    folders = {str(folder) for folder in (ROOT, ROOT.parent, Path.home())} - EVERYWHERE
    offenders = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        offenders += [f"{path.relative_to(ROOT)}: {folder}" for folder in sorted(folders) if mentions(text, folder)]
    assert not offenders
