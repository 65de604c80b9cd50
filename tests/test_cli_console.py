"""What is printed while a command runs."""

from hetperm.cli import console


def test_a_resumed_run_counts_its_earlier_epochs():
    bar = console.Bar("perm", total=12)
    reports = [("perm", 3), ("local", 2), ("local", 3), ("perm", 3), ("local", 1), ("local", 2), ("local", 3)]
    for method, epoch in reports:
        bar(method, {"epoch": epoch, "accuracy_mean": 0.5})
    (task,) = bar._bar.tasks
    assert (task.completed, task.total, task.description) == (12, 12, "local 0.500")
    bar.stop()


def test_a_bar_appears_only_once_there_is_something_to_show(capsys):
    with console.progress(["perm"], epochs=3, runs=1, quiet=False):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_quiet_run_has_no_bar():
    with console.progress(["perm"], epochs=3, runs=1, quiet=True) as bar:
        assert bar is None


def test_nothing_is_shown_of_the_progress_where_there_is_no_terminal(capsys):
    with console.status(quiet=False) as show:
        show("working")
    assert capsys.readouterr() == ("", "")


def test_a_line_is_printed_as_it_is_however_long(capsys):
    console.say("[bold] " + "x" * 300)
    assert capsys.readouterr().out == "[bold] " + "x" * 300 + "\n"
