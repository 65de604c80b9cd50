"""What pyproject.toml cannot say: configs/ goes into the package, and the description links to no file."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithConfigs(build_py):
    """Copies configs/ to hetperm/configs. In a checkout and an editable install they are found beside the package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for path in (ROOT / "configs").rglob("*.toml"):
                copy = Path(self.build_lib) / "hetperm" / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def description() -> str:
    """README.md without pictures and links that lead to files of the repository: elsewhere they lead nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithConfigs},
    long_description=description(),
    long_description_content_type="text/markdown",
)
