"""What `hetperm federate` and `hetperm serve` show of a federation while it runs."""

from rich.console import Console

from hetperm.cli.federation import Lines, Screen

JOINED = {"event": "joined", "host": 0, "detail": "client 7: 30 samples"}
SETTLED = {"event": "settled", "widths": [1.0, 0.25], "keys": [7, 9], "about": "digits; mlp"}


def shown(screen: Screen) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(screen.table())
    return captured.get()


def test_the_screen_says_who_is_connected_who_trains_what_and_the_accuracy_so_far(capsys):
    screen = Screen()
    screen(JOINED)
    assert "client 7: 30 samples" in shown(screen) and "is connected" in shown(screen)
    screen(SETTLED)
    screen({"event": "sent", "host": 1, "detail": "epoch 0: model 0 at host 1"})
    screen({"event": "done", "host": 0, "detail": "round 0"})
    screen({"event": "epoch", "method": "perm", "epoch": 1, "metric": "accuracy", "score": 0.5})
    screen({"event": "absent", "host": 0, "detail": "no answer within 30 s"})
    screen.title = screen.line({"event": "finished", "metric": "accuracy", "score": 0.75})
    text = shown(screen)
    assert "finished: the mean test accuracy is 0.750" in text
    assert "epoch 0: model 0 at host 1" in text and "perm: epoch 1, accuracy 0.500" in text
    assert "absent: no answer within 30 s" in text
    screen({"event": "back", "host": 0, "detail": ""})
    assert "is back" in shown(screen) and "absent: no answer" not in shown(screen)


def test_elsewhere_there_is_a_line_for_everything_that_matters(capsys):
    lines = Lines()
    lines({"event": "starting", "detail": "starting the server on 127.0.0.1:8000"})
    for event in (JOINED, SETTLED, {"event": "sent", "host": 1, "detail": "x"}):
        lines(event)
    lines({"event": "failed", "host": 1, "detail": "epoch 0: it was lost"})
    said = [line.partition(" s  ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "starting the server on 127.0.0.1:8000",
        "client 7: 30 samples joined",
        "digits; mlp",
        "client 9 failed: epoch 0: it was lost",
    ]
