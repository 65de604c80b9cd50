"""The flower engine: the numbers of the sequential one, whoever is slow, gone or lying."""

import json
from dataclasses import replace

import pytest
import torch
from flower_loopback import FIRST, Loopback, changed, nodes_of, same_models, settled, small, tasks_in, trained
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

from hetperm.device import packet
from hetperm.engine import flower_roster
from hetperm.engine.flower_jobs import Job, Step
from hetperm.engine.flower_mail import Mail
from hetperm.engine.flower_post import Lost, Rules
from hetperm.federated import kept, shard
from hetperm.federated.members import gather, member
from hetperm.federated.node import Limits, Node
from hetperm.federated.record import Record
from hetperm.federated.server import settle
from hetperm.runs import client_models, training
from hetperm.runs.export.export import export_folder
from hetperm.runs.export.options import Options
from hetperm.runs.placement import one_thread
from hetperm.runs.scores import load_for_evaluation
from hetperm.runs.setting import from_config, problem_of
from submodels import zoo


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(flower_roster, "LOOK", 0.0)
    monkeypatch.setattr(flower_roster, "PING", 0.05)


METHODS = ("perm", "perm-two-stage", "heterofl-ft", "fjord-ft")


@pytest.mark.parametrize("name", [*METHODS, "apfl"])
def test_nodes_end_with_the_bits_of_a_simulation(tmp_path, name):
    config = small(tmp_path, algorithm=name)
    setting = settled(config, Loopback(nodes_of(config)))
    assert sorted({client.width for client in setting.clients}) == [0.25, 0.5, 1.0]
    assert same_models(trained(setting), trained(from_config(config)))


def normed(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    first, last = nn.Conv2d(in_channels, 8, 3), nn.Linear(8, num_classes)
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


@pytest.mark.parametrize("name", METHODS)
def test_so_they_do_with_batch_norms_whose_statistics_stay_at_the_node(tmp_path, monkeypatch, name):
    monkeypatch.setitem(zoo.MODELS, "normed", normed)
    config = small(tmp_path, algorithm=name, model="normed", steps=20, epochs=1, warmup_rounds=1)
    real, setting = from_config(config), settled(config, Loopback(nodes_of(config, tmp_path)))
    state = trained(setting)
    assert same_models(state, trained(real))
    setting.nodes.hand_over(setting, state.deployed, [client.width for client in setting.clients], name)
    for i, client in enumerate(real.clients):
        bench = real.shop.at(client.width)
        load_for_evaluation(bench, state.deployed[i], client)
        kept = load_file(tmp_path / f"node-{i}" / "models" / f"client_00{i}.safetensors")
        assert all([torch.equal(kept[name], x) for name, x in bench.module.state_dict().items()])


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "lr_schedule": "cosine", "lr_warmup": 0.2, "weight_decay": 0.01},
        {"optimizer": "momentum", "augment": "flip-crop", "accumulate": 2},
        {"participation": 0.5},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_so_they_do_with_every_recipe_and_with_rounds_of_some_nodes(tmp_path, settings):
    config = small(tmp_path, steps=40, epochs=2, warmup_rounds=1, **settings)
    assert same_models(trained(settled(config, Loopback(nodes_of(config)))), trained(from_config(config)))


class Slides(Dataset):
    """Samples that are read one by one."""

    def __init__(self, pair):
        self.pair = pair

    def __len__(self):
        return len(self.pair[1])

    def __getitem__(self, k):
        return self.pair[0][k], int(self.pair[1][k])


def test_a_node_may_hold_a_dataset_and_be_scored_by_another_metric(tmp_path):
    config = small(tmp_path, steps=20, epochs=1, metric="perplexity")
    nodes = nodes_of(config, tmp_path)
    for node in nodes:
        stored = replace(node.shard.client, train=Slides(node.shard.client.train))
        node.shard = replace(shard.of_client(stored, 10), metric="perplexity")
    setting = settled(config, Loopback(nodes))
    assert setting.metric.name == "perplexity"
    state, real = trained(setting), from_config(config)
    assert same_models(state, trained(real))
    setting.nodes.hand_over(setting, state.deployed, [client.width for client in setting.clients], "perm")
    manifest = client_models.read_manifest(tmp_path / "node-1", 1)
    assert (
        manifest["data"] is None
        and manifest["input"] == [1, 8, 8]
        and manifest["perplexity"] > 1
        and manifest["n_train"] == 24
    )


def test_a_node_exports_its_model_with_its_own_data(tmp_path):
    config, folder = small(tmp_path, steps=4, epochs=1), tmp_path / "node-2"
    setting = settled(config, Loopback(nodes_of(config, tmp_path)))
    folder.mkdir()
    (folder / "node.toml").write_text('server = "127.0.0.1:8000"\nclient = 2\n')
    (folder / "run.toml").write_text(config.to_toml())
    with pytest.raises(FileNotFoundError, match="this node gets one when its federation ends"):
        export_folder(folder, Options(), data=kept.data_of(folder))
    models = [setting.slicer.cut(setting.start, setting.slicer.index(one.width)) for one in setting.clients]
    setting.nodes.hand_over(setting, models, [client.width for client in setting.clients], "perm")
    data = kept.data_of(folder)
    assert kept.is_node(folder) and list(data.clients) == [2] and data.preparation is not None
    assert torch.equal(data.clients[2].val[0], problem_of(config).clients[2].val[0])
    (folder / "run.toml").write_text(config.override(samples_per_client=12).to_toml())
    with pytest.raises(ValueError, match="was trained on 24 samples, and the data here have 12"):
        kept.data_of(folder)


def test_the_server_has_nothing_of_the_data(tmp_path):
    config = small(tmp_path)
    setting = settled(config, Loopback(nodes_of(config)))
    for client, real in zip(setting.clients, from_config(config).clients, strict=True):
        assert (client.key, client.n_train, client.n_val, client.width) == (
            real.key,
            real.n_train,
            real.n_val,
            real.width,
        )
        assert not any([x.any() for pair in (client.train, client.val, client.test) for x in pair])


def liar(kind):
    """What a node makes of its answer once, and what the server says of it."""
    return {
        "nan": lambda x: torch.full_like(x, torch.nan),
        "shape": lambda x: x.new_zeros((*x.shape, 1)),
        "type": lambda x: x.half(),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("nan", "not finite"), ("shape", "was due"), ("type", "torch.float16"), ("lost", "it was lost")],
)
def test_an_answer_that_is_wrong_once_is_asked_for_again_and_changes_nothing(tmp_path, kind, reason):
    config, told = small(tmp_path, steps=20, epochs=1), []

    def change(node, answer):
        if node != FIRST + 1 or told or not tasks_in(answer):
            return answer
        told.append(1)
        return Lost("cut off") if kind == "lost" else changed(answer, liar(kind))

    record = Record(None)
    setting = settled(config, Loopback(nodes_of(config), change), record=record)
    assert same_models(trained(setting), trained(from_config(config)))
    assert [reason in one for one in record.reasons[1]] == [True]


def test_a_node_that_always_lies_is_absent_and_the_others_go_on(tmp_path):
    config, record = small(tmp_path, steps=20, epochs=1), Record(None)

    def change(node, answer):
        lies = node == FIRST + 2 and tasks_in(answer)
        return changed(answer, lambda x: torch.full_like(x, torch.inf)) if lies else answer

    setting = settled(config, Loopback(nodes_of(config), change), Rules(tries=2), record)
    state = trained(setting)
    assert all([bool(x.isfinite().all()) for v in state.deployed for x in v.values()])
    assert record.counts[2]["absent"] >= 1
    assert state.work.absent[2] > 0 and state.work.absent[0] == 0


def test_a_node_that_is_silent_past_the_deadline_is_absent_until_it_answers(tmp_path):
    config, record = small(tmp_path, steps=20, epochs=2), Record(None)
    silent = []

    def change(node, answer):
        if node == FIRST + 3 and tasks_in(answer) and len(silent) < 1:
            silent.append(1)
            return None
        return answer

    post = Loopback(nodes_of(config), change)
    state = trained(settled(config, post, Rules(deadline=0.3), record))
    assert record.counts[3]["absent"] == 1 and record.counts[3]["back"] == 1
    assert state.work.absent[3] >= 1


def test_a_run_without_a_quorum_stops_with_the_reasons(tmp_path):
    config = small(tmp_path, steps=20, epochs=1)
    post = Loopback(nodes_of(config), lambda node, answer: Lost("gone") if tasks_in(answer) else answer)
    setting = settled(config, post, Rules(tries=1, quorum=3))
    with pytest.raises(RuntimeError, match=r"2 of 4 nodes are there and the quorum is 3 .*gone.*--resume"):
        trained(setting)


def test_a_node_that_is_lost_has_as_long_as_the_rules_say_to_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(flower_roster, "LOOK", 0.05)
    config, record = small(tmp_path, steps=20, epochs=1), Record(None)

    def change(node, answer):
        if node == FIRST and tasks_in(answer):
            post.away.add(node)  # whoever asks a moment later is told so
            return Lost("gone")
        return answer

    post = Loopback(nodes_of(config), change)
    trained(settled(config, post, Rules(deadline=5, tries=2, patience=0.2), record))
    assert record.reasons[0][-1] == "it was lost and did not come back within 0.2 s"
    assert record.counts[0]["failed"] == 1


def test_a_node_is_lost_when_a_ping_is_though_its_answer_was_announced(tmp_path):
    config, record, asked = small(tmp_path, steps=20, epochs=1), Record(None), []

    def change(node, answer):
        if node == FIRST and tasks_in(answer) and not asked:
            asked.append("task")  # its answer was cut off in the middle, and nobody tells
            return None
        if asked == ["task"] and packet.read(answer)[0]["kind"] == "pong":
            asked.append("ping")
            return Lost("gone")
        return answer

    post = Loopback(nodes_of(config), change)
    state = trained(settled(config, post, Rules(deadline=60, patience=60), record))
    assert record.counts[0]["failed"] == 1 and "it was lost (gone)" in record.reasons[0][0]
    assert "absent" not in record.counts[0] and same_models(state, trained(from_config(config)))


def test_a_node_that_was_restarted_is_told_everything_again(tmp_path):
    config = small(tmp_path, steps=20, epochs=2)
    post, fresh, done = None, nodes_of(config), []

    def change(node, answer):
        done.append(node)
        if len(done) == 14:
            post.nodes[FIRST] = fresh[0]  # another process with the same data
        return answer

    post, record = Loopback(nodes_of(config), change), Record(None)
    assert same_models(trained(settled(config, post, record=record)), trained(from_config(config)))
    assert record.counts[0]["restarted"] == 1


def test_what_a_node_still_has_is_not_sent_again(tmp_path):
    config = small(tmp_path, algorithm="local")
    costs = {}
    for lean in (True, False):
        setting = settled(config, Loopback(nodes_of(config)), Rules(lean=lean))
        trained(setting)
        costs[lean] = setting.nodes.mail.costs
    # Models that were trained at home are scored there: only their digests travel.
    assert costs[True]["score"].bytes_down < 0.2 * costs[False]["score"].bytes_down
    assert costs[True]["score"].packets < costs[True]["score"].jobs  # tests, and validation in the last epoch, together


class Scripted:
    """A carrier without nodes: node 10 answers only when something was sent to node 12."""

    def __init__(self):
        self.log: list[int] = []
        self.waiting: dict[str, int] = {}

    def push(self, node: int, content: bytes, ttl: float) -> str:
        self.log.append(node)
        self.waiting[str(len(self.log))] = node
        return str(len(self.log))

    def pull(self, ids) -> dict[str, bytes]:
        ready = [name for name in ids if name in self.waiting and (self.waiting[name] != 10 or 12 in self.log)]
        answer = {"kind": "answer", "session": "s", "outcomes": [{"value": {"value": None}, "seconds": 0}]}
        return {name: packet.write(answer) for name in ready if self.waiting.pop(name) >= 0}

    def online(self) -> set[int]:
        return {10, 11, 12}


def test_a_model_moves_on_while_another_host_is_still_busy_and_hosts_keep_their_order():
    post, done = Scripted(), []
    mail = Mail(post, [10, 11, 12], {"id": "x"}, Rules(deadline=5))

    def step(model, host):
        job = Job("visit", f"{model} at {host}", {}, {}, lambda value: None)
        return Step(host, lambda: job, lambda outcome: done.append((model, host)), model)

    # The second round. With a barrier model 1 would wait for host 0, and host 0 for what comes after.
    mail.deliver([step(0, 0), step(1, 1), step(1, 2), step(0, 1)])
    assert done.index((1, 2)) > done.index((1, 1)) and done.index((0, 1)) > done.index((0, 0))
    assert post.log == [10, 11, 12, 11]  # the third before node 10 had answered
    assert sorted(done) == [(0, 0), (0, 1), (1, 1), (1, 2)]


# Nodes


def node(tmp_path, width=0.5, **limits) -> Node:
    config = small(tmp_path)
    return Node(shard.of_problem(problem_of(config), 0, 0), Limits(width=width, **limits))


def asked(one: Node, table, tensors=None):
    return packet.read(one.handle(packet.write(table, tensors)))[0]


def test_a_node_refuses_what_is_wider_than_itself(tmp_path):
    config = small(tmp_path)
    nodes = nodes_of(config)
    setting = settled(config, Loopback(nodes))
    narrow = next(i for i, client in enumerate(setting.clients) if client.width == 0.25)
    engine = setting.nodes.engine(setting, 1.0)
    (outcome,) = engine.score([(narrow, setting.start, 1.0, "test")])
    assert "a model of width 1 is wider than this device's 0.25" in str(outcome)


PLUGIN = {"kind": "tasks", "server": "s", "number": 1, "setup": {"id": "x", "config": "plugins = ['os']"}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "header claims"),
        (b"\xff" * 64, "header claims"),
        (b"\x02" + b"\0" * 7 + b"{}", "without a table"),
        (packet.write({"kind": "dance"}), "of kind 'dance'"),
        (packet.write(PLUGIN), "runs only those of its own run.toml"),
        (
            packet.write({"kind": "ping", "protocol": 0}).replace(b'\\"protocol\\": 1', b'\\"protocol\\": 7'),
            "version 7",
        ),
        (packet.write({"kind": "ping"}, {"0" * 32: torch.ones(3)}), "another checksum"),
    ],
)
def test_a_node_answers_nonsense_with_the_reason(tmp_path, content, reason):
    table, _ = packet.read(node(tmp_path).handle(content))
    assert table["kind"] == "refused" and reason in table["reason"]


def test_a_node_refuses_a_packet_that_is_too_large_and_one_that_came_before_with_a_line_each(tmp_path, caplog):
    table = {"kind": "tasks", "server": "s", "number": 1, "setup_id": "x", "tasks": []}
    one = node(tmp_path, largest=2000)
    assert asked(one, table)["kind"] == "need"
    assert "replayed" in asked(one, table)["reason"]
    assert "larger than the 2,000" in asked(one, table | {"number": 2, "more": "x" * 3000})["reason"]
    assert [record.message.startswith("refused: BadPacket: ") for record in caplog.records] == [True, True]


def test_a_packet_is_replayed_also_if_other_servers_came_in_between(tmp_path):
    one, table = node(tmp_path), {"kind": "tasks", "number": 1, "setup_id": "x", "tasks": []}
    kinds = [asked(one, table | {"server": server})["kind"] for server in ("a", "b", "a", "b")]
    assert kinds == ["need", "need", "refused", "refused"]


def test_the_message_of_an_error_does_not_leave_the_device(tmp_path, caplog):
    config = small(tmp_path)
    nodes = nodes_of(config)
    setting = settled(config, Loopback(nodes))
    mail = setting.nodes.mail
    nodes[0].model.client = None  # whatever breaks
    content = packet.write(
        {
            "kind": "tasks",
            "server": "s",
            "number": 1,
            "setup_id": mail.setup["id"],
            "tasks": [{"score": "test", "width": 0.1, "params": {"model": {}}}],
        }
    )
    (outcome,) = packet.read(nodes[0].handle(content))[0]["outcomes"]
    assert outcome == {"error": "TypeError, see the log of the node"}


def test_nodes_that_cannot_be_one_federation_are_refused(tmp_path):
    config = small(tmp_path)
    one, other = nodes_of(config)[:2]
    with pytest.raises(ValueError, match="two nodes say that they are client 0"):
        gather(Loopback([one, one]), 2, wait=5, on_event=Record(None))
    with pytest.raises(RuntimeError, match=r"2 of 3 nodes came within 0\.5 s"):
        gather(Loopback([one, other]), 3, wait=0.5, on_event=Record(None))


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"num_classes": 2**39}, "more than 131,072 are not taken"),
        ({"in_channels": 2**20}, "more than 131,072 are not taken"),
        ({"input": [2**19, 2**19]}, "it says that samples have shape"),
        ({"n_train": -1}, "that must be a whole number"),
        ({"key": "0"}, "that must be a whole number"),
    ],
)
def test_an_introduction_that_would_fill_the_memory_or_is_none_is_refused(tmp_path, lie, reason):
    introduction = node(tmp_path).introduction()
    assert member(1, introduction).key == introduction["key"]
    with pytest.raises(ValueError, match=reason):
        member(1, introduction | lie)


@pytest.mark.parametrize("classes", ["x", "3,99", "-1", "", "1,,2"])
def test_classes_that_are_none_are_refused_when_a_node_joins(tmp_path, monkeypatch, classes):
    config = small(tmp_path, label_mask=True)
    nodes = nodes_of(config)
    honest = nodes[0]._work
    monkeypatch.setattr(
        nodes[0], "_work", lambda task, params: (1.0, classes) if "join" in task else honest(task, params)
    )
    with pytest.raises(RuntimeError, match=r"client 0 cannot take part: .*classes that are none"):
        settled(config, Loopback(nodes))


def test_a_memory_limit_decides_the_width(tmp_path):
    config = small(tmp_path)
    problem, widths = problem_of(config), []
    for mb in (100.0, 0.1):
        nodes = [Node(shard.of_problem(problem, i, i), Limits(device_mb=mb)) for i in range(4)]
        widths.append({client.width for client in settled(config, Loopback(nodes)).clients})
    assert widths[0] == {1.0}
    assert len(widths[1]) == 1 and max(widths[1]) < 1


def test_a_node_that_comes_late_gets_its_row_at_the_next_estimate(tmp_path):
    config, record = small(tmp_path, steps=60, epochs=4, share=1e6), Record(None)
    nodes = nodes_of(config)
    late = nodes.pop()
    post = Loopback(nodes)
    members = gather(post, 4, wait=0.5, on_event=record, least=3)
    assert [one.n_train for one in members][3] == 1  # nobody knows yet
    setting = settle(config, members, post, Rules(), record, [client.width for client in from_config(config).clients])
    states = []
    with one_thread():
        for saved in training.epochs(setting, "perm", steps=config.steps):
            states.append(saved.state)
            post.nodes[FIRST + 3] = late  # it comes after the first estimate
    record.write(tmp_path, setting.clients, setting.nodes.mail)
    told = json.loads((tmp_path / "federation.json").read_text())["nodes"][3]
    assert (told["n_train"], told["absent_now"]) == (late.shard.client.n_train, "") and told["events"]["done"] > 0
    assert record.counts[3]["back"] == 1
    assert float(states[0].alpha.to_dense()[0, 3]) == 0.0
    assert float(states[-1].alpha.to_dense()[:3, 3].sum()) > 0


@pytest.mark.parametrize(
    ("key", "classes", "reason"),
    [
        (0, 10, "another node is client 0"),
        (9, 10, "it says that it is client 9, and the run has none"),
        (3, 11, "it has 11 classes and the model 10"),
    ],
)
def test_a_node_that_comes_late_and_cannot_be_the_missing_one_is_refused(tmp_path, caplog, key, classes, reason):
    config, record = small(tmp_path, steps=20, epochs=1), Record(None)
    nodes = nodes_of(config)
    late = nodes.pop()
    post = Loopback(nodes)
    members = gather(post, 4, wait=0.5, on_event=record, least=3)
    setting = settle(config, members, post, Rules(), record, [client.width for client in from_config(config).clients])
    late.shard = replace(late.shard, client=replace(late.shard.client, key=key), num_classes=classes)
    post.nodes[FIRST + 3] = late
    trained(setting)
    assert [line.node for line in setting.nodes.mail.roster.lines] == [FIRST, FIRST + 1, FIRST + 2, 0]
    assert [reason in one.message for one in caplog.records if "cannot take part" in one.message] == [True]
