"""Make .venv-flower: Flower in an environment of its own, which borrows everything else from .venv.

Flower wants older versions of some packages than hetperm. Its own come first on the path, those of .venv after them, so
that torch is not installed twice.
"""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOWER = "flwr==1.41.*"  # as in pyproject.toml


def main() -> None:
    """Make or keep the environment."""
    home = ROOT / ".venv-flower"
    python, done = home / "bin" / "python", home / "done"
    if done.exists() and done.read_text() == FLOWER:
        return
    lender = subprocess.run(
        [ROOT / ".venv" / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    venv.create(home, clear=True, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", FLOWER], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    # Lines of .pth files are appended to the path, in the order of the files' names.
    (Path(own) / "zz_hetperm.pth").write_text(f"{ROOT}\n{lender}\n")
    subprocess.run([python, "-c", "import flwr, torch, hetperm"], check=True)
    done.write_text(FLOWER)


if __name__ == "__main__":
    sys.exit(main())
