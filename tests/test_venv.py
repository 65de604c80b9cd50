"""The set-up script: what it decides about a .venv and what it then does, on folders and with a fake runner, no pip."""

import ast
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "setup_venv.py"
spec = importlib.util.spec_from_file_location("setup_venv", SCRIPT)
setup_venv = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup_venv)

TAG = sys.implementation.cache_tag


def put_package(site, name, version, text="x = 1\n"):
    """A package in `site` as pip leaves it: one module, and a RECORD of it."""
    (site / f"{name}.py").write_text(text)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    rows = [f"{name}.py,sha256=0,{len(text)}", f"{name}.pyc,,", f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")


def put_environment(root):
    """All that the set-up of `root` puts into .venv, save the interpreter and the stamp."""
    site = setup_venv.site_packages(root)
    site.mkdir(parents=True, exist_ok=True)
    for name, version in {"pip": "25.0", "hetperm": "0.1.0", "einops": "0.8.2", "scikit_learn": "1.9.1"}.items():
        put_package(site, name, version)


@pytest.fixture
def bare(tmp_path):
    """A project without .venv."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text(
        "# pins\neinops==0.8.2\nscikit-learn==1.9.1  # same package, other spelling\n"
    )
    return tmp_path


@pytest.fixture
def sound(bare):
    """A project with a finished .venv."""
    put_environment(bare)
    setup_venv.write_stamp(bare)
    return bare


def diagnose(root, tag=TAG):
    return setup_venv.diagnose(root, ask=lambda root: tag)


class Runner:
    """Pretends to run: venv empties .venv, pip fills it; the commands named in `failing` fail."""

    def __init__(self, root, failing=()):
        self.root, self.failing, self.ran = root, failing, []

    def __call__(self, command):
        step = "venv" if "venv" in command else "pip" if "install" in command else "import"
        self.ran.append(step)
        if step in self.failing:
            raise subprocess.CalledProcessError(1, command)
        if step == "venv":
            shutil.rmtree(self.root / ".venv", ignore_errors=True)
        if step == "pip":
            put_environment(self.root)


def set_up(root, runner, tag=TAG):
    return setup_venv.set_up(root, runner, diagnose=partial(diagnose, tag=tag), say=lambda line: None)


# What is decided


def test_a_sound_venv_is_reused(sound):
    assert diagnose(sound).action == "reuse"


def test_a_missing_venv_is_built(bare):
    assert diagnose(bare) == ("rebuild", "there is none yet")


def delete_module(root):
    (setup_venv.site_packages(root) / "einops.py").unlink()


def cut_module_short(root):
    (setup_venv.site_packages(root) / "einops.py").write_text("x")


def delete_record(root):
    (setup_venv.site_packages(root) / "einops-0.8.2.dist-info" / "RECORD").unlink()


def leave_half_replaced_package(root):
    (setup_venv.site_packages(root) / "~inops").mkdir()


def delete_pip(root):
    shutil.rmtree(setup_venv.site_packages(root) / "pip-25.0.dist-info")


def delete_all_packages(root):
    shutil.rmtree(setup_venv.site_packages(root))


def move_elsewhere(root):
    stamp = setup_venv.stamp_of(root)
    stamp.write_text(stamp.read_text().replace(str(root), "/somewhere/else"))


def delete_stamp(root):
    setup_venv.stamp_of(root).unlink()


def garble_stamp(root):
    setup_venv.stamp_of(root).write_text('{"python": ')


def change_pyproject(root):
    (root / "pyproject.toml").write_text("[project]\nname = 'other'\n")


def change_constraints(root):
    (root / "constraints.txt").write_text("einops==0.8.3\n")


def uninstall_dependency(root):
    delete_module(root)
    shutil.rmtree(setup_venv.site_packages(root) / "einops-0.8.2.dist-info")


def install_other_version(root):
    uninstall_dependency(root)
    put_package(setup_venv.site_packages(root), "einops", "0.7.0")


def uninstall_project(root):
    shutil.rmtree(setup_venv.site_packages(root) / "hetperm-0.1.0.dist-info")


HARMS = [
    (delete_module, "rebuild", "einops.py is missing"),
    (cut_module_short, "rebuild", "einops.py has 1 bytes instead of 6"),
    (delete_record, "rebuild", "einops-0.8.2.dist-info has no readable RECORD"),
    (leave_half_replaced_package, "rebuild", "pip was stopped"),
    (delete_pip, "rebuild", "it has no pip"),
    (delete_all_packages, "rebuild", "it has no pip"),
    (move_elsewhere, "rebuild", "another folder"),
    (delete_stamp, "update", "not finished"),
    (garble_stamp, "update", "not finished"),
    (change_pyproject, "update", "changed"),
    (change_constraints, "update", "changed"),
    (uninstall_dependency, "update", "einops is not installed"),
    (install_other_version, "update", "einops is 0.7.0, not 0.8.2"),
    (uninstall_project, "update", "hetperm is not installed"),
]


@pytest.mark.parametrize(("harm", "action", "reason"), HARMS, ids=[harm.__name__ for harm, *_ in HARMS])
def test_a_harmed_venv_is_not_trusted_and_sound_again_after_the_set_up(sound, harm, action, reason):
    harm(sound)
    verdict = diagnose(sound)
    assert verdict.action == action
    assert reason in verdict.reason
    (sound / "constraints.txt").write_text("einops==0.8.2\n")  # the fake pip installs just this version
    set_up(sound, Runner(sound))
    assert diagnose(sound).action == "reuse"


@pytest.mark.parametrize(("tag", "reason"), [(None, "does not run"), ("cpython-310", "made for cpython-310")])
def test_a_broken_or_other_interpreter_means_rebuilding(sound, tag, reason):
    verdict = diagnose(sound, tag)
    assert verdict.action == "rebuild"
    assert reason in verdict.reason


def test_byte_code_may_be_missing_and_local_versions_match_their_pin(sound):
    site = setup_venv.site_packages(sound)
    uninstall_dependency(sound)
    put_package(site, "einops", "0.8.2+cpu")
    assert not (site / "einops.pyc").exists()
    assert diagnose(sound).action == "reuse"


def test_a_file_that_two_packages_own_may_have_either_size(sound):
    site = setup_venv.site_packages(sound)
    with open(site / "einops-0.8.2.dist-info" / "RECORD", "a") as record:
        record.write("pip.py,sha256=0,999\n")
    assert diagnose(sound).action == "reuse"


# What is done


def test_reusing_runs_nothing(sound):
    runner = Runner(sound)
    set_up(sound, runner)
    assert runner.ran == []


def test_building_creates_installs_checks_and_stamps(bare):
    runner = Runner(bare)
    set_up(bare, runner)
    assert runner.ran == ["venv", "pip", "import"]
    assert diagnose(bare).action == "reuse"


def test_updating_keeps_the_environment(sound):
    delete_stamp(sound)
    runner = Runner(sound)
    set_up(sound, runner)
    assert runner.ran == ["pip", "import"]


def test_an_update_that_does_not_import_ends_in_rebuilding(sound):
    change_pyproject(sound)

    class Runs(Runner):
        def __call__(self, command):
            self.failing = () if "venv" in self.ran else ("import",)
            super().__call__(command)

    runner = Runs(sound)
    set_up(sound, runner)
    assert runner.ran == ["pip", "import", "venv", "pip", "import"]
    assert diagnose(sound).action == "reuse"


@pytest.mark.parametrize(
    ("step", "remedy"), [("venv", "python3-venv"), ("pip", "make clean starts from nothing"), ("import", "make clean")]
)
def test_a_failed_step_names_the_remedy_and_leaves_no_stamp(bare, step, remedy):
    with pytest.raises(setup_venv.SetupError, match=remedy):
        set_up(bare, Runner(bare, failing=(step,)))
    assert not setup_venv.stamp_of(bare).exists()
    assert diagnose(bare).action != "reuse"


def test_a_failed_update_leaves_no_stamp_but_the_environment(sound):
    change_pyproject(sound)
    with pytest.raises(setup_venv.SetupError, match="network"):
        set_up(sound, Runner(sound, failing=("pip",)))
    assert diagnose(sound) == ("update", "its set-up was not finished")


def test_a_set_up_killed_inside_pip_is_finished_by_the_next(bare):
    class Killed(Runner):
        def __call__(self, command):
            super().__call__(command)
            if self.ran[-1] == "pip":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        set_up(bare, Killed(bare))
    assert diagnose(bare).action == "update"
    set_up(bare, Runner(bare))
    assert diagnose(bare).action == "reuse"


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_venv_that_is_no_folder_makes_way(bare, kind):
    venv = bare / ".venv"
    venv.write_text("") if kind == "file" else venv.symlink_to(bare / "gone")
    set_up(bare, Runner(bare), tag=None)
    assert venv.is_dir()


# The real interpreter, the lock, and older Pythons


def test_the_interpreter_answers_only_from_inside_its_venv(tmp_path):
    venv = tmp_path / ".venv"
    assert setup_venv.interpreter(tmp_path) is None
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    assert setup_venv.interpreter(tmp_path) == TAG
    (venv / "pyvenv.cfg").rename(venv / "elsewhere.cfg")
    assert setup_venv.interpreter(tmp_path) is None
    (venv / "elsewhere.cfg").rename(venv / "pyvenv.cfg")
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(tmp_path / "gone")
    assert setup_venv.interpreter(tmp_path) is None


def test_a_second_set_up_waits_for_the_first_and_says_so(tmp_path):
    waiting, inside = threading.Event(), threading.Event()

    def second():
        with setup_venv.locked(tmp_path, say=lambda line: waiting.set()):
            inside.set()

    with setup_venv.locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(timeout=10)
        assert not inside.is_set()
    thread.join(timeout=10)
    assert inside.is_set()


def test_the_lock_outlives_a_killed_script_until_its_command_ends(tmp_path):
    with setup_venv.locked(tmp_path) as lock:
        command = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    with open(tmp_path / ".venv.lock") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        command.communicate(b"\n")
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_older_python_can_read_the_script_and_gets_one_sentence():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    pretend = f"import runpy, sys; sys.version_info = (3, 9, 2); runpy.run_path({os.fspath(SCRIPT)!r})"
    done = subprocess.run([sys.executable, "-c", pretend], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: hetperm needs Python 3.11 or newer and ")
    assert done.stderr.count("\n") == 1


# The environment of an extra


@pytest.fixture
def setup_extra():
    spec = importlib.util.spec_from_file_location("setup_extra", SCRIPT.with_name("setup_extra.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_extra_gets_an_environment_that_sees_the_projects_own(setup_extra, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\nmore = ["one==1", "two"]\n')
    (tmp_path / "constraints.txt").write_text("three==3\n")
    commands = []
    assert setup_extra.set_up(tmp_path, "more", commands.append)
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert commands[1][-2:] == ["one==1", "two"]
    (link,) = tmp_path.glob(".venv-more/**/project.pth")
    assert link.read_text().splitlines()[0] == str(tmp_path)
    assert not setup_extra.set_up(tmp_path, "more", commands.append)
    (tmp_path / "constraints.txt").write_text("three==4\n")

    def fails(command):
        raise subprocess.CalledProcessError(1, command)

    with pytest.raises(subprocess.CalledProcessError):  # one that failed is made again
        setup_extra.set_up(tmp_path, "more", fails)
    assert setup_extra.set_up(tmp_path, "more", commands.append)
    assert len(commands) == 4


def test_an_extra_that_wants_other_versions_is_not_held_to_those_of_the_project(setup_extra, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\nflower = ["a"]\nmore = ["b"]\n')
    (tmp_path / "constraints.txt").write_text("three==3\n")
    commands = []
    for extra in ("flower", "more"):
        assert setup_extra.set_up(tmp_path, extra, commands.append)
    assert [("--constraint" in command) for command in commands if "pip" in command] == [False, True]
    (tmp_path / "constraints.txt").write_text("three==4\n")
    assert [setup_extra.set_up(tmp_path, extra, commands.append) for extra in ("flower", "more")] == [False, True]
