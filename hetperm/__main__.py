"""python -m hetperm: the same as the command hetperm."""

from hetperm.cli.main import main

if __name__ == "__main__":
    main()
