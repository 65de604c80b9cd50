"""Comparisons of sizes in a forward: a cut must not change their answers, or it computes another function.

``if y.shape == x.shape: y = y + x`` adds nothing when 12 channels meet 16. Cut to a sixteenth, both would be one
channel and the shortcut would appear. So the answers of the whole model are kept: a width at which one would change
keeps some more channels, and where only the whole model gives the answer, the groups concerned stay whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from submodels.integers import ARITHMETIC, COMPARISONS
from submodels.terms import Term, renumber, without

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Formula:
    """Arithmetic of sizes."""

    symbol: str
    left: "Size"
    right: "Size"


Size = int | Term | Formula


def evaluate(size: Size, counts: Sequence[int]) -> int:
    """The number when ``counts`` channels of every group are kept."""
    if isinstance(size, int):
        return size
    if isinstance(size, Formula):
        left, right = evaluate(size.left, counts), evaluate(size.right, counts)
        # A divisor such as c // 8 may vanish when c is cut; then the sub-model itself could not run.
        return ARITHMETIC[size.symbol](left, right or 1 if size.symbol in ("//", "%") else right)
    return size.size(counts)


def groups_of(size: Size) -> Iterator[int]:
    """Ids of the groups a size depends on."""
    if isinstance(size, Formula):
        yield from groups_of(size.left)
        yield from groups_of(size.right)
    elif not isinstance(size, int):
        yield from size.groups()


def show(size: Size, names: Sequence[str]) -> str:
    """A size as text, given the names of the groups."""
    if isinstance(size, int):
        return str(size)
    if isinstance(size, Formula):
        return f"({show(size.left, names)} {size.symbol} {show(size.right, names)})"
    return size.show(names)


@dataclass(frozen=True)
class Decision:
    """A comparison of two sizes and its answer in the whole model.

    Attributes:
        whole_only: no narrower model gives this answer; what the groups concerned then stay is whole.
    """

    symbol: str
    left: Size
    right: Size
    answer: bool
    whole_only: bool = False

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether the answer is the same when ``counts`` channels of every group are kept."""
        return COMPARISONS[self.symbol](evaluate(self.left, counts), evaluate(self.right, counts)) == self.answer

    def groups(self) -> set[int]:
        """Ids of the groups it depends on."""
        return {*groups_of(self.left), *groups_of(self.right)}

    def larger(self, sizes: Sequence[int]) -> set[int]:
        """The groups on the larger side, which have to grow for the answer to come back."""
        left_is_larger = evaluate(self.left, sizes) >= evaluate(self.right, sizes)
        return set(groups_of(self.left if left_is_larger else self.right)) or self.groups()

    def question(self, names: Sequence[str]) -> str:
        """The comparison as text, given the names of the groups."""
        return f"{show(self.left, names)} {self.symbol} {show(self.right, names)}"


def rewritten(decision: Decision, frozen: set[int], sizes: Sequence[int], ids: dict[int, int]) -> Decision:
    """The same decision with some groups kept whole and the others under new numbers."""

    def rewrite(size: Size) -> Size:
        if isinstance(size, int):
            return size
        if isinstance(size, Formula):
            return Formula(size.symbol, rewrite(size.left), rewrite(size.right))
        return renumber(without(size, frozen, sizes), ids)

    return Decision(
        decision.symbol, rewrite(decision.left), rewrite(decision.right), decision.answer, decision.whole_only
    )


def grown(counts: Sequence[int], decisions: Sequence[Decision], own: Sequence[int], sizes: Sequence[int]) -> Counts:
    """The counts, with as many channels more as keep every answer.

    Groups of one size grow together: maps rely on their keeping equally many channels.

    Args:
        own: channels there are to keep, of every group; `sizes`: those of the global model.
    """
    now = tuple(counts)
    while broken := next((d for d in decisions if not d.whole_only and not d.holds(now)), None):
        growing = {sizes[group] for group in broken.larger(sizes) if now[group] < own[group]}
        growing = growing or {sizes[group] for group in broken.groups() if now[group] < own[group]}
        if not growing:
            break
        now = tuple(min(have, n + 1) if size in growing else n for n, have, size in zip(now, own, sizes, strict=True))
    return now


def relevant(decisions: Sequence[Decision], candidates: Sequence[Counts]) -> tuple[Decision, ...]:
    """The decisions that some width would change, each once.

    Args:
        candidates: the counts of every width, the whole model's last.
    """
    out = []
    for d in dict.fromkeys(decisions):
        if not d.groups() or all(d.holds(counts) for counts in candidates):
            continue
        cut = [counts for counts in candidates if any(counts[g] < candidates[-1][g] for g in d.groups())]
        narrower = any(d.holds(counts) for counts in cut)
        out.append(Decision(d.symbol, d.left, d.right, d.answer, whole_only=not narrower))
    return tuple(out)
