"""Train every client's own model and compare with rivals: the same as `hetperm train`."""

from hetperm.cli.main import script
from hetperm.cli.train import main

if __name__ == "__main__":
    script(main)
