"""Write clients' models as files that their devices run: the same as `hetperm export`."""

from hetperm.cli.export import main
from hetperm.cli.main import script

if __name__ == "__main__":
    script(main)
