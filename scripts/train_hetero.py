"""Train every client's own model and compare with rivals: the same as `hetperm train`."""

from hetperm.cli.main import script, train

if __name__ == "__main__":
    script(train)
