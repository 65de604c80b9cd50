"""Tables of texts, in the terminal and in Markdown."""

import pytest
from rich.console import Console

from hetperm.report.grid import Grid, markdown, terminal, transposed

TIERS = Grid(["tier", "clients"], [["[red]a|b[/]", "2"], ["all", "6"]], title="[b]t", note="[i]n", strong={1})


def test_names_are_shown_as_they_are_in_the_terminal():
    console = Console(width=60, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(terminal(TIERS))
    text = capture.get()
    assert all(word in text for word in ("[red]a|b[/]", "[b]t", "[i]n"))
    assert [line.count("\x1b[1m") > 0 for line in text.splitlines() if "2" in line or "6" in line] == [False, True]


def test_names_are_shown_as_they_are_in_markdown():
    assert markdown(TIERS).splitlines() == [
        "| tier | clients |",
        "|---|--:|",
        r"| [red]a\|b[/] | 2 |",
        "| all | 6 |",
        "",
        "[i]n",
    ]


def test_columns_of_words_are_aligned_left_in_markdown():
    lines = markdown(Grid(["a", "b", "c"], [["x", "y", "1"]]), words=2).splitlines()
    assert lines == ["| a | b | c |", "|---|---|--:|", "| x | y | 1 |"]


def test_a_table_on_its_side_keeps_title_and_note():
    sideways = transposed(TIERS)
    assert (list(sideways.columns), sideways.rows) == (["tier", "[red]a|b[/]", "all"], [("clients", "2", "6")])
    assert (sideways.title, sideways.note) == (TIERS.title, TIERS.note)


def test_the_width_of_a_table_is_that_of_its_widest_cells():
    assert TIERS.width == len("[red]a|b[/]") + 2 + len("clients") + 2


def test_a_line_that_is_too_short_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        transposed(Grid(["a", "b"], [["1"]]))
