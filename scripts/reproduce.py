"""Run an experiment of the paper with all rivals and several seeds: the same as `hetperm reproduce`."""

from hetperm.cli.main import reproduce, script

if __name__ == "__main__":
    script(reproduce)
