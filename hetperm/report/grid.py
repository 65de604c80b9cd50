"""A table of texts, independent of where it is shown, and its forms for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from hetperm.texts import printable


@dataclass(frozen=True)
class Grid:
    """A table of texts: the first column names a line, the others hold figures.

    Attributes:
        columns: the headings.
        rows: the lines, each as long as the headings.
        note: a sentence below the table.
        strong: the positions of the lines that stand out.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    strong: frozenset[int] = frozenset()

    @property
    def width(self) -> int:
        """Characters of a line, with two between columns."""
        return sum(max(map(len, column)) + 2 for column in zip(self.columns, *self.rows, strict=True))


def transposed(grid: Grid) -> Grid:
    """The table with rows and columns exchanged.

    Example:
        >>> transposed(Grid(["tier", "clients"], [["large", "2"], ["small", "8"]])).rows
        [('clients', '2', '8')]
    """
    if not grid.columns:
        return grid
    columns, *rows = zip(grid.columns, *grid.rows, strict=True)
    # `strong` is dropped: the lines that stood out are columns now.
    return Grid(columns, rows, title=grid.title, note=grid.note)


def terminal(grid: Grid) -> Table:
    """The table for a terminal."""

    # Texts are wrapped in Text: rich would read a tier called "[red]" as markup.
    def plain(text: str) -> Text:
        return Text(printable(text))

    table = Table(
        title=plain(grid.title) if grid.title else None,
        title_style="bold",
        title_justify="left",
        caption=plain(grid.note) if grid.note else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    for k, name in enumerate(grid.columns):
        table.add_column(plain(name), justify="right" if k else "left", no_wrap=k == 0)
    for k, row in enumerate(grid.rows):
        table.add_row(*map(plain, row), style="bold" if k in grid.strong else None)
    return table


def markdown(grid: Grid, *, words: int = 1) -> str:
    r"""The table in Markdown, with its note below; the title is left to the document.

    Args:
        words: how many columns at the left hold words; the others are figures, aligned on the right.

    Example:
        >>> print(markdown(Grid(["tier", "clients"], [["a|b", "2"]])), end="")
        | tier | clients |
        |---|--:|
        | a\|b | 2 |
    """
    rule = f"|{'---|' * words}{'--:|' * (len(grid.columns) - words)}"
    lines = [_markdown_row(grid.columns), rule, *map(_markdown_row, grid.rows)]
    return "\n".join(lines + (["", grid.note] if grid.note else [])) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
