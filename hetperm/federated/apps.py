"""The Flower app: a ServerApp for `flwr run`, and a ClientApp for `flower-supernode`. Needs the extra `flower`."""

import contextlib
import json
import logging
import os
import traceback
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from hetperm.config import Config, from_text
from hetperm.engine.flower_grid import content_of, packet_of
from hetperm.engine.flower_post import Post, Rules
from hetperm.federated import node, server
from hetperm.federated.members import gather
from hetperm.federated.options import ServeOptions
from hetperm.federated.orphans import end_with_parent
from hetperm.federated.record import Record
from hetperm.federated.server_post import ServerPost
from hetperm.runs import experiment
from hetperm.runs.setting import Setting
from hetperm.texts import one_line

log = logging.getLogger(__name__)

EVENTS = "events.jsonl"


def server_app() -> ServerApp:
    """The server of a federation. Its run configuration names a job that `hetperm serve` wrote."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        # Without its SuperLink it would try for minutes to reach it. Whatever it is doing, --resume goes on.
        end_with_parent(os.getppid(), lambda: os._exit(1))
        job = Path(str(context.run_config["job"]))
        table = json.loads(job.read_text())
        run_job(ServerPost(grid), from_text(table["config"], str(job)), table, job.with_name(EVENTS))

    return app


def run_job(post: Post, config: Config, job: dict[str, Any], events: Path) -> None:
    """Run a federation from beginning to end; what happens is written to ``events``, line by line."""
    record = Record(events)
    record.tell({"event": "started", "pid": os.getpid()})
    try:
        _run(post, config.override(out=Path(job["out"]), resume=job["resume"]), job, record)
    except Exception as error:
        if os.environ.get("HETPERM_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        with contextlib.suppress(OSError):  # of a disk that is full
            record.tell({"event": "error", "detail": told(error)})
        raise


def told(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return one_line(f"{where}{error.strerror}; see to it, and go on with --resume")
    return one_line(str(error)) or type(error).__name__


def _run(post: Post, config: Config, job: dict[str, Any], record: Record) -> None:
    options = ServeOptions(**job["options"])
    rules = Rules(options.deadline, options.patience, options.tries, max(1, round(options.quorum * job["nodes"])))
    settled: list[Setting] = []

    def settle(config: Config) -> Setting:
        # Who is missing after the wait comes late; without a quorum, or without widths, that is an error.
        least = rules.quorum if job["widths"] else None
        members = gather(post, job["nodes"], wait=options.wait, on_event=record, least=least)
        setting = server.settle(config, members, post, rules, record, job["widths"])
        settled.append(setting)
        # Before the report, which shows it, and the checksums, which hold it.
        setting.nodes.at_end = lambda: record.write(Path(job["out"]), setting.clients, setting.nodes.mail)
        record.tell({"event": "settled", "widths": [client.width for client in setting.clients],
                     "keys": [client.key for client in setting.clients], "about": setting.description})  # fmt: skip
        return setting

    def on_epoch(method: str, row: Any) -> None:
        metric = settled[0].metric.name
        score = row.get(f"{metric}_mean")
        record.tell({"event": "epoch", "method": method, "epoch": row["epoch"], "metric": metric, "score": score})

    try:
        result = experiment.run(config, on_epoch=on_epoch, settle=settle)
    except RuntimeError:
        if settled and config.out.is_dir():
            record.write(config.out, settled[0].clients, settled[0].nodes.mail)  # who was missing
        raise
    metric = settled[0].metric.name
    record.tell({"event": "finished", "metric": metric, "score": result.score, "folder": str(result.folder)})


def client_app() -> ClientApp:
    """A node for Flower's own SuperNode, whose configuration names the folder of the node (``folder="..."``).

    Every message is handled by a process of its own, which loads data and builds the model anew.
    """
    app = ClientApp()

    @app.query("hetperm")
    def handle(message: Message, context: Context) -> Message:
        one = node.from_folder(Path(str(context.node_config["folder"])), stateless=True)
        return Message(content_of(one.handle(packet_of(message.content))), reply_to=message)

    return app
