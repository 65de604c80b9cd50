"""An environment for an extra of the project, .venv-NAME: it sees all of .venv, and holds what the extra adds.

Run by make, with the Python of .venv. It is made anew when the extra or constraints.txt change. A stamp, written last,
says what it was made from, so that one whose set-up was cut short is not taken for whole. What is of another version in
.venv is installed here as well, and comes first on the path.
"""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNCONSTRAINED = {"flower"}  # extras that want older versions of some packages than constraints.txt has


def requirements(root: Path, extra: str) -> list[str]:
    """What an extra adds, as pyproject.toml has it."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]


def constraints(root: Path, extra: str) -> Path | None:
    """The file of versions that an extra is held to; None if it is not."""
    return None if extra in UNCONSTRAINED else root / "constraints.txt"


def wanted(root: Path, extra: str) -> str:
    """The content of the stamp of a finished environment."""
    held_to = constraints(root, extra)
    return "\n".join([sys.version, str(root), *requirements(root, extra), held_to.read_text() if held_to else ""])


def set_up(root: Path, extra: str, run) -> bool:
    """Make the environment of an extra, unless it is there; return whether it was made.

    Args:
        run: runs a command (a list of strings); raises CalledProcessError when the command fails.
    """
    folder = root / f".venv-{extra}"
    stamp = folder / "stamp"
    if stamp.is_file() and stamp.read_text() == wanted(root, extra):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    run([sys._base_executable, "-m", "venv", str(folder)])
    base = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", base))
    site.mkdir(parents=True, exist_ok=True)
    # Torch and all else of .venv, so that nothing is downloaded twice.
    (site / "project.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install"]
    held_to = constraints(root, extra)
    run([*pip, *(["--constraint", str(held_to)] if held_to else []), *requirements(root, extra)])
    stamp.write_text(wanted(root, extra))
    return True


def main(extra: str) -> int:
    """The exit status: 0 when the environment is ready, 1 with one sentence on stderr when it is not."""
    try:
        if set_up(ROOT, extra, lambda command: subprocess.run(command, check=True)):
            print(f".venv-{extra} is ready", flush=True)
    except subprocess.CalledProcessError:
        print(
            f"error: .venv-{extra} could not be made (the message is above); check the network and the free disk space",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
