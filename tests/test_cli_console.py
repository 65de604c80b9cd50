"""What is printed while a command runs."""

from hetperm.cli import console


def test_nothing_is_shown_of_the_progress_where_there_is_no_terminal(capsys):
    with console.status(quiet=False) as show:
        show("working")
    assert capsys.readouterr() == ("", "")


def test_a_line_is_printed_as_it_is_however_long(capsys):
    console.say("[bold] " + "x" * 300)
    assert capsys.readouterr().out == "[bold] " + "x" * 300 + "\n"
