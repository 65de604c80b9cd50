"""Packets over Flower's own messages, on a grid in this process. Left out where Flower is not installed."""

import datetime
import errno
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterable
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from flower_loopback import FIRST, nodes_of, same_models, settled, small, trained

pytest.importorskip("flwr", reason="Flower is not installed here (extra `flower`, an environment of its own)")

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.proto import message_pb2, runtime_pb2
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from hetperm.engine.flower_grid import SMALL, TYPE, GridPost, content_of, packet_of
from hetperm.engine.flower_post import Lost
from hetperm.federated import apps, certificates, fleet, flower_private, serve, server_post
from hetperm.federated.deploy import deploy
from hetperm.federated.options import DeployOptions
from hetperm.federated.places import ServerPlace, node_place, server_place
from hetperm.federated.server_post import ServerPost
from hetperm.runs import files
from hetperm.runs.setting import from_config


class InProcess(Grid):
    """A grid whose nodes are functions. Messages are taken apart and put together as on the wire."""

    def __init__(self, handlers):
        self.handlers = dict(enumerate(handlers, FIRST))
        self.sent: dict[str, Message] = {}
        self.dead: set[int] = set()
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 0, 1

    run = property(lambda self: None)

    def set_run(self, run) -> None:
        pass

    def create_message(self, *args, **options):
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.handlers if node not in self.dead]

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = str(len(self.sent))
            message.metadata.__dict__["_message_id"] = name
            self.sent[name] = message
            names.append(name)
        return names

    def pull_messages(self, message_ids):
        replies = []
        for message in [self.sent.pop(name) for name in message_ids if name in self.sent]:
            node = message.metadata.dst_node_id
            if node in self.dead:
                replies.append(Message(Error(5, "Node\n unavailable"), reply_to=message))
            else:
                answer = self.handlers[node](packet_of(message.content))
                replies.append(Message(content_of(answer), reply_to=message))
        return replies

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["perm", "heterofl-ft"])
def test_the_numbers_of_a_simulation_come_back_over_messages_of_flower(tmp_path, name):
    config = small(tmp_path, algorithm=name, steps=20, epochs=1)
    grid = InProcess([node.handle for node in nodes_of(config)])
    assert same_models(trained(settled(config, GridPost(grid))), trained(from_config(config)))


@pytest.mark.parametrize("size", [0, 10, SMALL, SMALL + 1])
def test_packets_of_every_size_come_out_as_they_went_in(size):
    packet = bytes(size)
    assert packet_of(content_of(packet)) == packet


def test_a_message_without_a_packet_is_refused():
    with pytest.raises(ValueError, match="without a packet of hetperm"):
        packet_of(RecordDict())


def test_an_error_of_flower_is_a_lost_packet_with_its_reason():
    grid = InProcess([lambda packet: packet])
    post = GridPost(grid)
    name = post.push(FIRST, b"x", ttl=10)
    grid.dead.add(FIRST)
    (answer,) = post.pull([name]).values()
    assert isinstance(answer, Lost) and str(answer) == "Node unavailable, code 5"
    assert post.online() == set()


def objects_of(packet: bytes) -> dict[str, bytes]:
    """number -> object of a message with a packet; the message is the last."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 0, 1
    message = Message(content_of(packet), FIRST, TYPE)
    ids = [one.object_id for one in flower_private.iterate_object_tree(flower_private.get_object_tree(message))]
    return {number: flower_private.get_all_nested_objects(message)[number].deflate() for number in ids}


def test_objects_are_fetched_until_there_are_too_many_bytes_of_them():
    objects, asked = objects_of(bytes(SMALL + 1)), []
    assert flower_private.readable(list(objects), objects.__getitem__) == objects

    def fetch(number):
        asked.append(number)
        return objects[number]

    with pytest.raises(flower_private.ObjectPullError, match=r"the message has more than 1,000 bytes"):
        flower_private.readable(list(objects), fetch, 1000)
    assert len(asked) < len(objects)


def test_objects_that_make_no_message_are_the_fault_of_their_sender():
    objects = objects_of(b"x")
    *_, message = objects
    objects[message] = objects[message].replace(b"\0", b"\0not protobuf", 1)
    with pytest.raises(flower_private.ObjectPullError, match="the message cannot be read"):
        flower_private.readable(list(objects), objects.__getitem__)


class Store:
    """What a SuperLink holds of answers, as the client of its runtime interface sees it."""

    def __init__(self):
        self.announced: dict[str, tuple] = {}  # number of the message that is answered -> answer, tree of its objects
        self.objects: dict[str, bytes] = {}  # empty until it is uploaded
        self.confirmed: list[str] = []

    def announce(self, answer: bytes) -> tuple[str, dict[str, bytes]]:
        """Announce an answer; return the number of the message that it answers, and its objects, still to upload."""
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 0, 1
        sent = Message(content_of(b"a question"), FIRST, TYPE)
        sent.metadata.__dict__["_message_id"] = name = f"question {len(self.announced)}"
        reply = Message(content_of(answer), reply_to=sent)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        proto = flower_private.message_to_proto(flower_private.remove_content_from_message(reply))
        self.announced[name] = proto, flower_private.get_object_tree(reply)
        objects = {number: one.deflate() for number, one in flower_private.get_all_nested_objects(reply).items()}
        self.objects |= dict.fromkeys(objects, b"")
        return name, objects

    def PullMessages(self, request):
        pairs = [self.announced.pop(name) for name in request.message_ids if name in self.announced]
        messages, trees = [[pair[k] for pair in pairs] for k in range(2)]
        return runtime_pb2.PullAppMessagesResponse(messages_list=messages, message_object_trees=trees)

    def PullObject(self, request):
        content = self.objects.get(request.object_id)
        return message_pb2.PullObjectResponse(
            object_found=content is not None, object_available=bool(content), object_content=content or b""
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def post(store):
    grid = HttpGrid(token="x")
    grid._client = store
    grid.set_run(Run.create_empty(1))
    return ServerPost(grid)


def test_an_answer_whose_sender_stops_in_mid_upload_keeps_no_other_waiting(store, post):
    (slow, late), (other, soon) = store.announce(b"slow"), store.announce(b"other")
    *some, last = late
    store.objects |= {**soon, **{number: late[number] for number in some}}
    assert post.pull([slow, other]) == {other: b"other"}
    assert post.pull([slow]) == {} and set(store.confirmed) < soon.keys()
    store.objects[last] = late[last]
    assert post.pull([slow]) == {slow: b"slow"}  # what had come before was kept
    assert post.pull([slow, other]) == {} and len(store.confirmed) == 2


def test_an_answer_that_nobody_asks_for_any_more_is_dropped(store, post, monkeypatch):
    name, objects = store.announce(b"late")
    assert post.pull([name]) == {}
    monkeypatch.setattr(server_post, "FORGET", -1.0)
    assert post.pull([]) == {} and len(store.confirmed) == 1
    store.objects |= objects
    assert post.pull([name]) == {}


def test_an_answer_whose_objects_are_gone_or_make_no_message_is_lost(store, post):
    gone, objects = store.announce(b"x")
    store.objects.clear()
    (answer,) = post.pull([gone]).values()
    assert isinstance(answer, Lost) and "could not be found" in str(answer)
    odd, objects = store.announce(b"y")
    proto, tree = store.announced[odd]
    store.announced[odd] = proto, tree.children[0]  # a part of a message instead of one
    store.objects |= objects
    (answer,) = post.pull([odd]).values()
    assert isinstance(answer, Lost) and str(answer) == "a RecordDict instead of a message"


def test_a_job_runs_from_beginning_to_end_and_is_resumed(tmp_path):
    config = small(tmp_path, steps=20, epochs=1)
    grid = InProcess([node.handle for node in nodes_of(config, tmp_path)])
    options = {"deadline": 60.0, "patience": 5.0, "tries": 2, "quorum": 0.5, "wait": 10.0}
    job = {"out": str(tmp_path / "run"), "resume": False, "nodes": 4, "widths": [], "options": options}
    events = tmp_path / "events.jsonl"
    apps.run_job(GridPost(grid), config, job, events)
    assert '"event": "finished"' in events.read_text()
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "run" / "federation.json").exists()
    assert (tmp_path / "node-0" / "models" / "client_000.safetensors").exists()
    assert not (tmp_path / "run" / "models").exists()
    assert files.is_whole(tmp_path / "run")
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Nodes</h2>" in report and "Personal models are on the nodes, not here" in report
    apps.run_job(GridPost(grid), config, {**job, "resume": True}, events)
    assert files.is_whole(tmp_path / "run")
    assert events.read_text().count('"event": "finished"') == 2


def test_a_deployment_that_cannot_be_written_names_its_folder_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"^cannot make the folder \S+/file/fed \(Not a directory\); name another folder$"
    ):
        deploy(DeployOptions(folder=tmp_path / "file" / "fed"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / ".fed.1" / "README"))
    monkeypatch.setattr("shutil.copy", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"^cannot make the folder \S+/fed \(No space left on device\)"):
        deploy(DeployOptions(folder=tmp_path / "fed"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_deployment_has_what_every_machine_needs_and_no_more(tmp_path):
    folder = deploy(DeployOptions(folder=tmp_path / "fed", nodes=2, address="192.0.2.7:9000", widths=(1.0, 0.25)))
    assert server_place(folder).address == "192.0.2.7:9000"
    place = node_place(folder / "nodes" / "1")
    assert (place.client, place.width, place.config.num_clients) == (1, 0.25, 2)
    private = list(folder.rglob("*.key"))
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    assert not list((folder / "nodes").rglob("ca.key")) and not list((folder / "server").rglob("node.key"))
    text = (folder / "README").read_text()
    assert re.search(r"server at 192\.0\.2\.7:9000", text) and "nodes/K/start.sh" in text
    start = subprocess.run(["/bin/sh", folder / "nodes" / "1" / "start.sh"], env={"PATH": "/bin"}, capture_output=True)
    assert start.returncode == 2 and start.stderr.startswith(b"error: no hetperm on the path")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server" / "server.pem", folder / "server" / "server.key")
    before = (folder / "server" / "server.pem").read_bytes()
    deploy(DeployOptions(folder=folder, renew=True))
    assert (folder / "server" / "server.pem").read_bytes() != before
    with pytest.raises(ValueError, match="exists; name another folder"):
        deploy(DeployOptions(folder=folder))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[::0]"])
def test_no_server_listens_on_every_address_of_its_machine(tmp_path, host):
    with pytest.raises(ValueError, match="stands for every address of a machine; name the one at which nodes reach"):
        deploy(DeployOptions(folder=tmp_path / "fed", address=f"{host}:9000"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="stands for every address of a machine"):
        serve.check_free(host.strip("[]"), 0)  # also if server.toml was changed


@pytest.mark.parametrize("name", flower_private.USED)
def test_what_is_private_of_flower_is_there(name):
    assert getattr(flower_private, name) is not None


def test_another_version_of_flower_is_refused_with_one_sentence(monkeypatch):
    monkeypatch.setattr(flower_private.metadata, "version", lambda name: "1.43.0")
    assert serve.missing_flower().startswith("federations need Flower 1.41.x and 1.43.0 is installed here; install")
    monkeypatch.delitem(vars(flower_private), "Fab", raising=False)
    with pytest.raises(ImportError, match=r"1\.43\.0 is installed here"):
        _ = flower_private.Fab


def test_keys_of_nodes_differ(tmp_path):
    for k in range(2):
        certificates.node_key(tmp_path / f"{k}.key", tmp_path / f"{k}.pub")
    assert (tmp_path / "0.pub").read_bytes() != (tmp_path / "1.pub").read_bytes()


@pytest.mark.parametrize(
    ("off", "said"),
    [
        (0, "does not know this node; is its key in server/nodes there?"),
        (60, "the clock of this device is 60 s ahead of that of the server here:1, which refuses it; set the clock"),
        (-900, "the clock of this device is 900 s behind that of the server here:1, which refuses it; set the clock"),
        (None, "does not know this node"),
    ],
)
def test_a_node_that_is_refused_looks_at_its_clock_first(monkeypatch, off, said):
    present = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)
    monkeypatch.setattr(fleet, "now", lambda: present)
    request = httpx.Request("POST", "https://here:1")
    date = {} if off is None else {"date": format_datetime(present - datetime.timedelta(seconds=off), usegmt=True)}
    error = httpx.HTTPStatusError("", request=request, response=httpx.Response(401, headers=date, request=request))
    assert said in fleet.explained(error, fleet.Address("here:1", None, None))


def test_what_cannot_be_read_of_an_answer_does_not_end_a_node(monkeypatch, caplog):
    class Enough(BaseException):
        pass

    def tired(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise Enough

    def nonsense(*args: object) -> None:
        raise KeyError("no such field")

    naps: list[float] = []
    monkeypatch.setattr(fleet, "_client", nonsense)
    monkeypatch.setattr(fleet.time, "sleep", tired)
    with pytest.raises(Enough):
        fleet.attend(bytes, fleet.Address("here:1", None, None))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the server here:1 sent what Flower cannot read (KeyError); trying again every 2 s"


@pytest.mark.parametrize(("content", "said"), [(None, "there is none"), ("", "it cannot be read")])
def test_a_node_without_a_certificate_to_check_the_server_by_does_not_start(tmp_path, content, said):
    certificates.node_key(tmp_path / "node.key", tmp_path / "node.pub")
    if content is not None:
        (tmp_path / "ca.crt").write_text(content)
    with pytest.raises(ValueError, match=f"ca.crt: the server's certificate is checked by this one, and {said}"):
        fleet.attend(bytes, fleet.Address("here:1", tmp_path / "ca.crt", tmp_path / "node.key"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("certificate has expired", "has expired; make a new one with `hetperm deploy --renew` (this device's clock"),
        ("certificate is not yet valid", "is not valid yet; set the clock (this device's clock says"),
        ("self-signed certificate", "is not one that ca.crt has signed"),
    ],
)
def test_a_node_says_what_is_wrong_with_a_certificate(text, said):
    error = httpx.ConnectError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {text} (_ssl.c:1006)")
    assert said in fleet.explained(error, fleet.Address("here:1", Path("ca.crt"), None))


def test_the_process_that_starts_the_others_does_without_torch():
    code = "import sys, hetperm.federated.local, hetperm.cli.federation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TRACE = """
import sys, torch
from hetperm.federated import node
before = set(sys.modules)
node.ScalableModel(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)), torch.zeros(2, 2))
sys.exit(len(set(sys.modules) - before) > 20)
"""


@pytest.mark.slow
def test_a_node_has_imported_what_a_model_needs_before_it_is_handed_one():
    assert subprocess.run([sys.executable, "-c", TRACE], check=False).returncode == 0


@pytest.mark.parametrize(
    ("free", "said"), [(100, "as the disk of .* is full; free some space"), (2**40, "; see .*log")]
)
def test_a_server_whose_app_ends_without_a_word_says_why(tmp_path, monkeypatch, free, said):
    (tmp_path / serve.EVENTS).write_text('{"event": "started", "pid": 999999999}\n')
    monkeypatch.setattr(serve.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(RuntimeError, match=f"ended without a word.*{said}.*--resume"):
        serve.follow(ServerPlace(tmp_path, "127.0.0.1:1", 1), 0, lambda event: None)


def test_an_error_of_the_disk_is_told_with_its_file_and_does_not_hide_behind_another(tmp_path):
    error = OSError(28, "No space left on device", str(tmp_path / "x"))
    assert apps.told(error) == f"{tmp_path / 'x'}: No space left on device; see to it, and go on with --resume"
    assert apps.told(ValueError("a\nb")) == "a b" and apps.told(KeyError()) == "KeyError"
