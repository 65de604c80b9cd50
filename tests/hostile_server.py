"""A Flower app whose server sends no packet at all, then one packet twice, and then one that is too large."""

import json
import os
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from hetperm.device import packet
from hetperm.engine.flower_grid import TYPE
from hetperm.federated.apps import EVENTS, client_app
from hetperm.federated.record import Record
from hetperm.federated.server_post import ServerPost

server, client = ServerApp(), client_app()
TASKS = {"kind": "tasks", "server": "s", "number": 1, "setup_id": "x", "tasks": []}


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Wait for a node, trouble it, and tell what it answers."""
    job = Path(str(context.run_config["job"]))
    record, post = Record(job.with_name(EVENTS)), ServerPost(grid)
    record.tell({"event": "started", "pid": os.getpid()})
    until = time.monotonic() + 300
    while not post.online() and time.monotonic() < until:
        time.sleep(0.2)
    (node, *_) = post.online()
    grid.push_messages([Message(RecordDict({"other": ConfigRecord({"a": 1})}), node, TYPE, ttl=60)])
    large = packet.write(TASKS | {"number": 2, "more": "x" * 2**21})
    for content in (packet.write(TASKS), packet.write(TASKS), large, packet.write({"kind": "ping"})):
        name, answers = post.push(node, content, ttl=300), {}
        while not answers and time.monotonic() < until:
            answers = post.pull([name])
            time.sleep(0.1)
        table, _ = packet.read(answers[name])
        record("answered", 0, f"{table['kind']} {table.get('reason', '')}")
    record.tell({"event": "finished", "folder": json.loads(job.read_text())["out"]})
