"""Does the model fit each device tier of a capacity profile? The same as `hetperm bench resources`."""

from hetperm.cli.main import script
from hetperm.cli.resources import main

if __name__ == "__main__":
    script(main)
