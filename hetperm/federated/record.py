"""The record of a federation: everything that happened, who took part, and what it cost."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetperm.client import Client
from hetperm.engine.flower_mail import Mail
from hetperm.federated.places import COSTS
from hetperm.runs import files


class Record:
    """Everything that happened, line by line in a file, and what it cost. Also told to ``also``, such as a display."""

    def __init__(self, path: Path | None, also: Callable[[Mapping[str, Any]], None] | None = None):
        self.path, self.also = path, also
        self.counts: dict[int, dict[str, int]] = {}
        self.reasons: dict[int, list[str]] = {}

    def __call__(self, what: str, host: int, detail: str) -> None:
        """Note an event."""
        counts = self.counts.setdefault(host, {})
        counts[what] = counts.get(what, 0) + 1
        if what in ("failed", "absent", "restarted"):
            self.reasons.setdefault(host, []).append(detail or what)
        self.tell({"event": what, "host": host, "detail": detail})

    def tell(self, event: Mapping[str, Any]) -> None:
        """Write an event, with the time."""
        event = {"time": round(time.time(), 3), **event}
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(event) + "\n")
        if self.also:
            self.also(event)

    def write(self, folder: Path, clients: Sequence[Client], mail: Mail) -> None:
        """Write who took part, what failed and why, and what each kind of job cost."""
        nodes = [
            {
                "client": one.key,
                "n_train": one.n_train,
                "absent_now": mail.roster.absent.get(i, ""),
                "events": self.counts.get(i, {}),
                "reasons": self.reasons.get(i, [])[-20:],
            }
            for i, one in enumerate(clients)
        ]
        costs = {kind: asdict(cost) for kind, cost in mail.costs.items()}
        files.write_json(folder / COSTS, {"nodes": nodes, "costs": costs})
