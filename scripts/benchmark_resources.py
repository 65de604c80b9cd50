"""Does every tier of a capacity profile bear its share of a model? The same as `hetperm bench resources`."""

from hetperm.cli import script
from hetperm.resources.command import main

if __name__ == "__main__":
    script(main)
