"""Run an experiment of the paper with all rivals and several seeds: the same as `hetperm reproduce`."""

from hetperm.cli.main import script
from hetperm.cli.reproduce import main

if __name__ == "__main__":
    script(main)
