"""Flags of the speed benchmark: what it runs, in which size, and where results go. Imports no torch, for --help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hetperm.advice import did_you_mean
from hetperm.checks import Check, Names, check_fields, path, several, whole
from hetperm.config import Engine

WORKLOADS = ("W1", "W2", "W3", "W4")
PARTS = ("workloads", "hetero", "engines", "peers", "perm_rounds", "epochs", "alpha", "scaling", "train")


def some_of(choices: tuple[str, ...]) -> Check:
    """A check for lists of words from `choices`, at least one."""

    def check(name: str, words: Any) -> tuple[str, ...]:
        for word in words:
            if word not in choices:
                advice = did_you_mean(word, choices, f"known are {', '.join(choices)}")
                raise ValueError(f"{name}: unknown {word!r}; {advice}")
            if list(words).count(word) > 1:
                raise ValueError(f"{name} names {word!r} twice; once is enough")
        if not words:
            raise ValueError(f"{name} is empty; name some of {', '.join(choices)}")
        return tuple(words)

    return check


@dataclass(frozen=True)
class Options:
    """Time rounds and epochs side by side with a bare torch loop, the paper's literal epoch and installed peers."""

    out: Annotated[Path, path] = Path("bench")
    """Folder that results.json, table.md and speed.png are written to."""
    parts: Annotated[Names, some_of(PARTS)] = PARTS
    """What is run: workloads (against a bare loop), hetero (W5, an epoch of models of five
    sizes, against its steps), engines (a task and W3 on each), peers, perm_rounds (against
    FedAvg), epochs (against literal ones), alpha (what it costs), scaling (over the number of clients), train (the
    main job by phase)."""
    workloads: Annotated[Names, some_of(WORKLOADS)] = WORKLOADS
    """W1 logistic, W2 MLP, W3 cnn, W4 resnet18 in five widths."""
    clients: Annotated[int | None, whole(1, 100_000)] = None
    """Clients of a round; None: 50 for W1 and W2, 6 for W3, where 50 would take half a minute a round, 10 for W4."""
    repeats: Annotated[int, whole(1)] = 3
    """Times that both sides are timed in turn, in each run."""
    runs: Annotated[int, whole(1)] = 3
    """Runs of so many repeats; the table shows their spread."""
    data_dir: Path | None = None
    """Folder of MNIST, for the epochs; None: digits, which come with hetperm but are fewer."""
    sizes: Annotated[tuple[int, ...], several(whole(1, 100_000))] = (10, 30, 100, 300, 1000)
    """Numbers of clients of the scaling curve."""
    engine: Engine = "auto"
    """Engine of hetperm on one core; on two cores W3, W4 and W5 run on threads."""
    workers: Annotated[int, whole(1, 256)] = 1
    """Cores of the epochs, literal or not."""
    quick: bool = False
    """A look at everything in small: few clients, one run, figures that mean little."""

    def __post_init__(self):
        check_fields(self, "--{}")

    @property
    def repetitions(self) -> dict[str, int]:
        """How often both sides of a comparison are timed."""
        return {"runs": 1, "repeats": 1} if self.quick else {"runs": self.runs, "repeats": self.repeats}
