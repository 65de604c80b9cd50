"""What commands show of a federation: lines as things happen, or a table that is kept up to date."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hetperm.texts import printable

LOUD = ("failed", "absent", "back", "restarted")


class Lines:
    """Prints a line for everything that a user should know."""

    def __init__(self, *, quiet: bool = False):
        self.quiet, self.began = quiet, time.monotonic()
        self.keys: list[int] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show an event."""
        text = self.line(event)
        if text and not self.quiet:
            print(f"{time.monotonic() - self.began:6.1f} s  {printable(text)}", file=sys.stderr, flush=True)

    def line(self, event: Mapping[str, Any]) -> str:
        """What an event says; empty if it is not worth a line."""
        match event:
            case {"event": "starting", "detail": detail}:
                return str(detail)
            case {"event": "started"}:
                return "the server is up and waits for nodes"
            case {"event": "joined", "detail": detail}:
                return f"{detail} joined"
            case {"event": "settled", "about": about, "keys": list(keys)}:
                self.keys = keys
                return str(about)
            case {"event": "epoch", "method": method, "epoch": epoch, "metric": metric, "score": score}:
                return f"{method}: epoch {epoch}" + ("" if score is None else f", {metric} {score:.3f}")
            case {"event": "finished", "metric": metric, "score": score}:
                return "finished" + ("" if score is None else f": the mean test {metric} is {score:.3f}")
            case {"event": what, "host": int(host), "detail": detail} if what in LOUD:
                return f"client {self.name(host)} {what}" + (f": {detail}" if detail else "")
        return ""

    def name(self, host: int) -> int:
        """The key of a client."""
        return self.keys[host] if host < len(self.keys) else host


class Screen(Lines):
    """A table of nodes on a terminal: who is there, what each does, and the accuracy so far. Elsewhere, lines."""

    def __init__(self):
        super().__init__()
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        self.joined: list[str] = []
        self.widths: list[float] = []
        self.so_far = ""
        self.doing: dict[int, str] = {}
        self.done: dict[int, int] = {}
        self.failed: dict[int, int] = {}
        self.title = "waiting for nodes"

    def __enter__(self) -> "Screen":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show an event."""
        match event:
            case {"event": "joined", "detail": detail}:
                self.joined.append(detail)
            case {"event": "settled", "widths": list(widths)}:
                self.widths = widths
            case {"event": "epoch"}:
                self.so_far = self.line(event)
            case {"event": "sent", "host": int(host), "detail": label}:
                self.doing[host] = label
            case {"event": "done", "host": int(host)}:
                self.doing[host] = ""
                self.done[host] = self.done.get(host, 0) + 1
            case {"event": "absent", "host": int(host), "detail": detail}:
                self.doing[host] = f"absent: {detail}"
            case {"event": "back", "host": int(host)}:
                self.doing[host] = "is back"
            case {"event": "failed", "host": int(host)}:
                self.failed[host] = self.failed.get(host, 0) + 1
        if self.live is None:
            return super().__call__(event)
        self.title = self.line(event) or self.title
        self.live.update(self.table())

    def table(self) -> Table:
        """The nodes, one row each, with what was said last and the score so far."""
        caption = printable(self.so_far) or None
        table = Table("client", "width", "tasks done", "failed", "now", title=printable(self.title), caption=caption)
        if not self.widths:
            for detail in self.joined:
                table.add_row(printable(detail), "", "", "", "is connected")
        for host, width in enumerate(self.widths):
            counts = self.done.get(host, 0), self.failed.get(host, 0)
            row = [self.name(host), f"{width:g}", *counts, printable(self.doing.get(host) or "waits")]
            table.add_row(*map(str, row))
        return table
