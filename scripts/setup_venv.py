"""The project's .venv: made when missing, repaired when broken, reused when sound. Run by make, needs only Python.

A stamp is written after everything was installed and imported, never before, so a killed set-up leaves none. The stamp
alone is not believed: the interpreter must run, every file that pip recorded must be there in its recorded size, and
every direct dependency must have the version constraints.txt names. All of that takes about half a second.
"""

import contextlib
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows, which has no make either: `main` names the other way
    fcntl = None

OLDEST = (3, 11)
if sys.version_info < OLDEST:  # older versions must get as far as this sentence: no syntax or import they lack above
    sys.exit(
        f"error: hetperm needs Python {OLDEST[0]}.{OLDEST[1]} or newer and {sys.executable} is "
        f"{sys.version_info[0]}.{sys.version_info[1]}; name a newer one: make PYTHON=python3.12"
    )

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "hetperm"
INPUTS = ("pyproject.toml", "constraints.txt")  # what is installed follows from these
IMPORTS = "import torch, torchvision, timm"  # the packages with compiled parts that can be there and yet not load


class SetupError(Exception):
    """A set-up that cannot go on; the message says why and what to do."""


class Verdict(NamedTuple):
    """What to do with a .venv ("reuse", "update" in place or "rebuild" from nothing) and why."""

    action: str
    reason: str


# What is there


def venv_of(root: Path) -> Path:
    return root / ".venv"


def python_of(root: Path) -> Path:
    return venv_of(root) / "bin" / "python"


def stamp_of(root: Path) -> Path:
    return venv_of(root) / "stamp.json"


def site_packages(root: Path) -> Path:
    """The folder pip installs into."""
    base = str(venv_of(root))
    return Path(sysconfig.get_path("purelib", "venv", {"base": base, "platbase": base}))


def interpreter(root: Path) -> str | None:
    """Which Python .venv runs ("cpython-311"); None if it does not run, or runs outside .venv."""
    ask = "import sys; print(sys.implementation.cache_tag); print(sys.prefix)"
    command = [str(python_of(root)), "-I", "-c", ask]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        tag, prefix = answer[-2:]
        # Without its pyvenv.cfg the interpreter still runs, but pip would install into the system.
        return tag if os.path.samefile(prefix, venv_of(root)) else None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def pins(root: Path) -> dict[str, str]:
    """Version by package name, as constraints.txt has them."""
    lines = (line.partition("#")[0].strip() for line in (root / "constraints.txt").read_text().splitlines())
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def installed(site: Path) -> dict[str, str]:
    """Version by package name, as the .dist-info folders of `site` have them."""
    folders = (path.name[: -len(".dist-info")].partition("-") for path in site.glob("*.dist-info"))
    return {normal(name): version for name, _, version in folders}


def normal(name: str) -> str:
    """The package's name in the one spelling that compares: lower case, with dashes."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


# What is wrong with it


def damage(site: Path) -> str | None:
    """The first trace of an installation that was cut short or lost files since; None if every package is whole."""
    for left in site.glob("~*"):  # pip renames what it is about to replace
        return f"pip was stopped while it replaced a package ({left.name})"
    sizes = defaultdict(set)  # two packages may own one file
    for folder in site.glob("*.dist-info"):
        try:
            with open(folder / "RECORD", newline="", encoding="utf-8") as record:
                for name, _, size in csv.reader(record):
                    sizes[name].add(size)
        except (OSError, ValueError):
            return f"{folder.name} has no readable RECORD"
    for name, expected in sizes.items():
        if name.endswith(".pyc"):
            continue
        try:
            size = os.stat(os.path.join(site, name)).st_size
        except OSError:
            return f"{name} is missing"
        if "" not in expected and str(size) not in expected:
            return f"{name} has {size} bytes instead of {' or '.join(sorted(expected))}"
    return None


def lacking(root: Path) -> str | None:
    """The first direct dependency that is absent or not in its pinned version; None if all are right."""
    have = installed(site_packages(root))
    for name, version in {PROJECT: "", **pins(root)}.items():
        if name not in have:
            return f"{name} is not installed"
        if version and have[name].partition("+")[0] != version:  # 2.6.0+cpu is 2.6.0
            return f"{name} is {have[name]}, not {version}"
    return None


def fingerprint(root: Path) -> dict[str, str]:
    """What a finished .venv was made from and for; equal fingerprints mean there is nothing to do."""
    digest = hashlib.sha256(b"\0".join((root / name).read_bytes() for name in INPUTS)).hexdigest()
    return {"python": sys.implementation.cache_tag, "folder": str(root), "inputs": digest}


def read_stamp(root: Path) -> dict[str, str]:
    """The fingerprint at the end of the last finished set-up; empty if there is none."""
    try:
        stamp = json.loads(stamp_of(root).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(root: Path) -> None:
    """Write the stamp under another name and rename it: it is whole or absent."""
    draft = stamp_of(root).with_suffix(".tmp")
    draft.write_text(json.dumps(fingerprint(root), indent=1))
    draft.replace(stamp_of(root))


def diagnose(root: Path, *, ask=interpreter) -> Verdict:
    """What the .venv of `root` needs; whatever pip could trip over is rebuilt, the rest is updated in place."""
    if not os.path.lexists(venv_of(root)):
        return Verdict("rebuild", "there is none yet")
    tag, now, stamp = ask(root), fingerprint(root), read_stamp(root)
    if tag is None:
        return Verdict("rebuild", "its Python does not run")
    if tag != now["python"]:
        return Verdict("rebuild", f"it was made for {tag}, this is {now['python']}")
    if stamp and stamp.get("folder") != now["folder"]:
        return Verdict("rebuild", "it was made in another folder")
    harm = damage(site_packages(root))
    if harm:
        return Verdict("rebuild", harm)
    if "pip" not in installed(site_packages(root)):
        return Verdict("rebuild", "it has no pip")
    if not stamp:
        return Verdict("update", "its set-up was not finished")
    if stamp != now:
        return Verdict("update", " or ".join(INPUTS) + " changed")
    lack = lacking(root)
    return Verdict("update", lack) if lack else Verdict("reuse", "it is sound")


# What to do about it


def create(root: Path, run) -> None:
    """Put a new, empty environment in the place of whatever is there."""
    venv = venv_of(root)
    if os.path.lexists(venv) and not venv.is_dir():
        venv.unlink()
    # Inside an active .venv, python3 is the very interpreter about to be removed: use the one it came from.
    python = getattr(sys, "_base_executable", None) or sys.executable
    try:
        run([python, "-m", "venv", "--clear", str(venv)])
    except subprocess.CalledProcessError:
        raise SetupError(
            f"{python} could not create .venv (its message is above); "
            "it needs the venv module, on Debian and Ubuntu: apt install python3-venv"
        ) from None


def install(root: Path, run) -> None:
    """Install the project, editable, with its development tools, in the versions of constraints.txt."""
    pip = [str(python_of(root)), "-m", "pip", "--disable-pip-version-check", "--no-input", "-qq"]
    try:
        run([*pip, "install", "--constraint", str(root / "constraints.txt"), "--editable", f"{root}[dev]"])
    except subprocess.CalledProcessError:
        raise SetupError(
            "pip could not install the project into .venv (its message is above); check the network and the free "
            "disk space, then run make again; if that does not help, make clean starts from nothing"
        ) from None


def fault(root: Path, run) -> str | None:
    """What a .venv still lacks after pip said it was done; None if it is ready."""
    try:
        run([str(python_of(root)), "-c", IMPORTS])
    except subprocess.CalledProcessError:
        return f"'{IMPORTS}' fails"
    return damage(site_packages(root)) or lacking(root)


def set_up(root: Path, run, *, diagnose=diagnose, say=print) -> Verdict:
    """The verdict on the .venv of `root`, once it is carried out.

    Args:
        root: the project's folder.
        run: runs a command (a list of strings); raises CalledProcessError when the command fails.
        diagnose: root -> Verdict.
        say: prints one line.
    """
    verdict = diagnose(root)
    if verdict.action == "reuse":
        return verdict
    with contextlib.suppress(OSError):
        stamp_of(root).unlink()  # from here until the end there is nothing to trust
    if verdict.action == "update":
        say(f"updating .venv: {verdict.reason} ...")
        install(root, run)
        wrong = fault(root, run)
        if wrong:
            verdict = Verdict("rebuild", wrong)
    if verdict.action == "rebuild":
        say(f"creating .venv: {verdict.reason} (takes a few minutes) ...")
        create(root, run)
        install(root, run)
        wrong = fault(root, run)
        if wrong:
            raise SetupError(f"pip finished, but the new .venv is not fit for use: {wrong}; run make clean, then make")
    write_stamp(root)
    say(".venv is ready")
    return verdict


@contextlib.contextmanager
def locked(root: Path, *, say=print):
    """The descriptor of the lock that one set-up of `root` holds at a time; the others wait."""
    with open(root / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make is setting up .venv; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def main(root: Path = ROOT) -> int:
    """The exit status: 0 when .venv is ready, 1 with one sentence on stderr when it is not."""
    say = partial(print, flush=True)
    if fcntl is None:
        print("error: make and .venv are for Unix; here: python -m pip install -e '.[dev]'", file=sys.stderr)
        return 1
    try:
        with locked(root, say=say) as lock:
            # The commands inherit the lock: if this script is killed, it is held until they too have ended.
            set_up(root, partial(subprocess.run, check=True, pass_fds=(lock,)), say=say)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the next make repairs .venv", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
