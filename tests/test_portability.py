"""Other systems and other ways in: a tree without links, a complete wheel and sdist, no Unix modules, no fork."""

import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hetperm.cli import train
from hetperm.cli.main import guarded
from hetperm.runs import memory

ROOT = Path(__file__).resolve().parent.parent

# A system as Windows has it, as far as Python shows: taken away before anything else is imported.
BARE = """
import multiprocessing.context, os, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("resource", "fcntl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ("resource", "fcntl"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
import torch  # which asks for the system, not for what it has

for name in ("fork", "register_at_fork", "symlink", "posix_fallocate", "O_NOFOLLOW", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
spawn = multiprocessing.context._concrete_contexts["spawn"]
multiprocessing.context._concrete_contexts = {"spawn": spawn}
multiprocessing.context._default_context._default_context = spawn
multiprocessing.get_all_start_methods = lambda: ["spawn"]
opened = os.open

def open_no_folder(path, *args, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return opened(path, *args, **options)

os.open = open_no_folder
"""
IMPORTS = """
import importlib, pkgutil, hetperm, submodels
for package in (hetperm, submodels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in ("hetperm.__main__", "hetperm.bench.speed.flower"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # what only an extra brings
                if error.name.partition(".")[0] not in ("flwr", "cryptography", "grpc", "httpx", "ray"):
                    raise
"""
COMMAND = "from hetperm.cli.main import main; main(sys.argv[1:])"
SMALL = "--quiet --epochs 2 --warmup-rounds 1 --num-clients 5 --local-steps 1 --steps 0 --baselines local".split()


def tracked() -> list[str]:
    """The files of the project, as git has them or would have them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return sorted(name for name in names if name and os.path.lexists(ROOT / name))


def test_no_file_of_the_project_is_a_link():
    assert [name for name in tracked() if (ROOT / name).is_symlink()] == []


def test_both_packages_say_that_they_are_typed():
    assert all([(ROOT / package / "py.typed").is_file() for package in ("hetperm", "submodels")])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist, built from what git has."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A folder with the content of the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.slow
def test_the_sdist_holds_every_file_of_the_project(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(set(tracked()) - names) == []


@pytest.mark.slow
def test_the_wheel_holds_the_configurations_and_nothing_but_the_packages(installed):
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.toml")}
    copied = {path.relative_to(installed / "hetperm").as_posix() for path in installed.rglob("*.toml")}
    assert copied == configs
    assert (installed / "submodels" / "py.typed").is_file()
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"hetperm", "submodels"}


@pytest.mark.slow
def test_the_description_of_the_package_links_to_no_file(installed):
    (path,) = installed.glob("*.dist-info/METADATA")
    text = path.read_text(encoding="utf-8")
    assert "Description-Content-Type: text/markdown" in text and "# hetperm" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith(("https:", "#"))] == []


def test_on_another_system_than_unix_the_set_up_names_the_other_way():
    """It is for make, which such a system lacks; somebody may start it by hand."""
    block = "import runpy, sys; sys.modules['fcntl'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", block, str(ROOT / "scripts" / "setup_venv.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: make and .venv are for Unix; here: python -m pip install -e '.[dev]'\n"


def run_bare(code: str, packages: Path, folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run a program on a bare system, with the packages of a folder, in another folder."""
    env = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BARE + code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)


@pytest.mark.slow
def test_without_unix_every_module_is_imported_and_the_main_job_gives_the_same_bytes(installed, tmp_path, monkeypatch):
    done = run_bare(IMPORTS + COMMAND, installed, tmp_path, "train", *SMALL, "--out", "run", "--idle-models", "disk")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    assert guarded(train.main, [*SMALL, "--out", "here"]) == 0
    assert (tmp_path / "run" / "checksums.txt").read_text() == (tmp_path / "here" / "checksums.txt").read_text()


def test_memory_that_no_system_call_tells_is_not_a_number(monkeypatch):
    monkeypatch.setattr(memory, "status", dict)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert math.isnan(memory.peak_bytes())
