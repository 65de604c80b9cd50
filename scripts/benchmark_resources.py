"""Does every tier of a capacity profile bear its share of a model? The same as `hetperm bench resources`."""

from hetperm.bench.devices.command import main
from hetperm.cli.main import script

if __name__ == "__main__":
    script(main)
