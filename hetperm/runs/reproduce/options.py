"""Flags of `hetperm reproduce`, and the experiments by name. Imports no torch, for --help."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from hetperm.checks import LARGEST_SEED, Names, check_fields, several, text, whole

EXPERIMENTS = {
    "synthetic": "the paper's synthetic set: curves of accuracy and loss",
    "cifar10": "the paper's CIFAR-10, two classes a client: curves (needs --cifar10)",
    "femnist": "the paper's writers: curves and mixing weights (needs --leaf)",
    "alpha-maps": "who learns from whom on MNIST: heat maps, partners and mass on one's own group",
    "runtime": "seconds of a communication round, against FedAvg, perFedAvg and pFedMe",
    "hetero": "who wins where: clients of several sizes, all rivals, at equal steps",
    "budgets": "the same with the nearest rivals in two settings, also at equal FLOPs and bytes",
    "natural": "people as they are: 30 phone users and 100 roles of Shakespeare, against all rivals that fine-tune",
    "ablations": "one choice of PERM changed at a time",
    "rates": "PERM with step sizes from a tenth of the default to twice it",
    "scale": "partners and mass on one's own group with up to a thousand clients",
}
TUNED = ("synthetic", "cifar10", "femnist", "hetero", "natural")  # those that have a grid for every method
SEEDS = (0, 1, 2, 3, 4)
TUNING_SEEDS = (100, 101)  # tuning must not see the data that results are reported on
PATHS = {
    "cifar10": "CIFAR10.npz",
    "phones": "PHONES.npz",
    "leaf": "LEAF",
    "roles": "ROLES.json",
    "data_dir": "DATA",
    "out": "OUT",
}
BUDGETS = ("steps", "macs", "bytes")


def budget_name(name: str, value: str) -> str:
    """The name of a budget."""
    if value not in BUDGETS:
        raise ValueError(f"{name}: unknown {value!r}; known are {', '.join(BUDGETS)}")
    return value


@dataclass(frozen=True)
class Options:
    """Run every cell (a setting, a method and a seed) of an experiment; write tables, pictures and results.json."""

    quick: bool = False
    """A look at every part in small: one seed, few steps and clients; the figures mean nothing."""
    resume: bool = False
    """Go on with the folder of before: finished cells are not run again."""
    out: Path | None = None
    """Folder to write to, which must not exist; None: runs/reproduce-EXPERIMENT, or -2, ... if that is taken."""
    seeds: Annotated[tuple[int, ...], several(whole(0, LARGEST_SEED))] = ()
    """Seeds; none: 0 to 4, for tuning 100 and 101."""
    settings: Annotated[Names, several(text)] = ()
    """Only these settings of the experiment, by name; none: all."""
    methods: Annotated[Names, several(text)] = ()
    """Only these methods; none: all of the experiment."""
    budgets: Annotated[Names, several(budget_name)] = ()
    """Of hetero and budgets, steps and these of macs and bytes; none: those of the experiment's file."""
    steps: Annotated[int | None, whole(1)] = None
    """Mini-batch gradients of each client; None: as the experiment's file says."""
    data_dir: Path | None = None
    """Folder of MNIST in torchvision's layout; None: data."""
    cifar10: Path | None = None
    """CIFAR-10 as an npz file; None: what needs it is skipped."""
    phones: Path | None = None
    """Phone users' activities as an npz file; None: what needs them is skipped."""
    leaf: Path | None = None
    """LEAF's FEMNIST, a folder of json files; None: what needs it is skipped."""
    roles: Path | None = None
    """Shakespeare's roles: a JSON file {role: text}, or LEAF's folder; None: what needs them is skipped."""
    tuned: Path | None = None
    """The values that tuning chose (chosen.toml); None: those that come with hetperm."""
    workers: Annotated[int, whole(1, 256)] = 1
    """Threads or processes of an engine; decides no number."""
    quiet: bool = False
    """No line for every cell."""

    def __post_init__(self):
        check_fields(self, "--{}")

    def public(self, words: list[str]) -> list[str]:
        """The words of a command with names in place of this machine's paths, so that it can be published."""
        paths = {str(getattr(self, name)): label for name, label in PATHS.items() if getattr(self, name) is not None}
        # The longest first: a path may begin with another.
        for path in sorted(paths, key=len, reverse=True):
            words = [word.replace(path, paths[path]) for word in words]
        return words


PATH_FLAGS = tuple(field.name for field in fields(Options) if field.name in ("cifar10", "phones", "leaf", "roles"))
