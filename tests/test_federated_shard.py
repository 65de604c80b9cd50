"""What a node reads: its data, its folder, its flags."""

import numpy as np
import pytest

from hetperm.config import Config
from hetperm.federated import shard
from hetperm.federated.options import DeployOptions, NodeOptions, ServeOptions
from hetperm.federated.places import check_insecure, is_loopback, node_place, server_place, split_address

CONFIG = Config(num_clients=3, samples_per_client=20)

MINE = """
import torch
from hetperm import Client

def load_client():
    return Client(train=(torch.ones(6, 1, 8, 8), torch.arange(6)))

def with_classes():
    return load_client(), 10

def measurements():
    return Client(train=(torch.ones(6, 3), torch.ones(6)))

def nothing():
    return 7

def raises():
    raise KeyError("user 7")

def one_number_each():
    return Client(train=(torch.ones(6), torch.arange(6)))

def below_zero():
    return Client(train=(torch.ones(6, 3), torch.arange(6) - 1))

def too_few_classes():
    return load_client(), 3

def no_number():
    return load_client(), "ten"

def of_a_broken_set():
    return Client(train=Broken()), 10

def more_to_test():
    return Client(train=(torch.ones(6, 3), torch.arange(6)), test=(torch.ones(6, 3), torch.arange(6) + 2))

class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, row):
        raise OSError("no such picture")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_here.py").write_text(MINE)
    (tmp_path / "mine_torn.py").write_text("def load_client(:")
    monkeypatch.chdir(tmp_path)


def test_a_node_takes_its_share_of_the_data_set_of_the_run():
    found = [shard.load(None, CONFIG, key) for key in range(3)]
    assert [one.client.key for one in found] == [0, 1, 2]
    assert {(one.client.n_train, one.num_classes, one.client.group) for one in found} == {(20, 10, None)}


def test_a_node_reads_a_file_that_is_all_its_own(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(40, 7)).astype(np.float32), np.arange(40) % 4
    np.savez(tmp_path / "own.npz", x=x, y=y)
    found = shard.load(f"npz:{tmp_path / 'own.npz'}", Config(samples_per_client=2), 5)
    assert found.client.key == 5 and found.num_classes == 4 and found.client.n_train > 20


def test_a_function_of_the_user_loads_the_data(mine):
    assert shard.load("mine_here:load_client", CONFIG, 2).num_classes == 6
    found = shard.load("mine_here:with_classes", CONFIG, 2)
    assert (found.num_classes, found.client.key, found.client.n_train) == (10, 2, 6)
    assert shard.load("mine_here:more_to_test", CONFIG, 2).num_classes == 8


@pytest.mark.parametrize(
    ("source", "key", "sentence"),
    [
        (None, None, "which data are this node's"),
        (None, 3, "client 3 is not one of the 3"),
        ("digitz", 0, "give a data set"),
        ("mine_here:load_clients", 0, "cannot be loaded"),
        ("mine_there:load_client", 0, "is the file in this folder"),
        ("mine_here:nothing", 0, "it returned a int; it must return a hetperm.Client"),
        ("mine_here:measurements", 0, "labels must be classes"),
        ("mine_here:raises", 0, "--data mine_here:raises: KeyError: 'user 7'"),
        ("mine_here:one_number_each", 0, r"a sample must have a shape, .* inputs are \(1,\)"),
        ("mine_here:below_zero", 0, "labels go from -1 to 4; with 5 classes they must be 0 to 4"),
        ("mine_here:too_few_classes", 0, "labels go from 0 to 5; with 3 classes they must be 0 to 2"),
        ("mine_here:no_number", 0, "the number of classes must be a whole number above 0, not 'ten'"),
        ("mine_here:of_a_broken_set", 0, "OSError: no such picture"),
        ("mine_torn:load_client", 0, "cannot be loaded .SyntaxError: "),
    ],
)
def test_data_that_are_none_are_refused(mine, source, key, sentence):
    with pytest.raises(ValueError, match=sentence):
        shard.load(source, CONFIG, key)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('width = "half"', "width"),
        ("width = 3", "width is 3; it must be a number above 0, at most 1"),
        ("device_mb = -1", "device.mb is -1; it must be a number of MiB above 0"),
        ("data = 7", "data"),
        ('client = "x"', "client is .x.; it must be a whole number"),
        ("wdith = 1", "unknown key 'wdith'"),
    ],
)
def test_a_node_file_with_a_wrong_value_is_refused(tmp_path, line, sentence):
    (tmp_path / "node.toml").write_text(f'server = "127.0.0.1:8000"\n{line}\n')
    with pytest.raises(ValueError, match=rf"node.toml: {sentence}"):
        node_place(tmp_path)


def test_addresses_are_read_and_only_this_machine_may_be_without_tls():
    assert split_address("[::1]:80") == ("::1", 80)
    assert [is_loopback(f"{host}:1") for host in ("127.0.0.1", "localhost", "[::1]", "10.0.0.1")] == [True] * 3 + [
        False
    ]
    check_insecure("127.0.0.1:8000")
    with pytest.raises(ValueError, match=r"--insecure is for this machine only, and 0\.0\.0\.0:8000 is another"):
        check_insecure("0.0.0.0:8000")
    for wrong in ("8000", "host:", "host:99999", ":80", "host:²"):
        with pytest.raises(ValueError, match="is not host:port"):
            split_address(wrong)
    assert split_address("learn.example-1.org:8000")[0] == "learn.example-1.org"
    for wrong in ("1.2.3.4:80", "a b", "*", "\x1b", "x" * 300, "999.1.1.1", "/dev/null", "-x"):
        with pytest.raises(ValueError, match="is no IP address or name of a machine"):
            split_address(f"{wrong}:8000")


def test_folders_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not the folder of a node: it has no node\.toml; `hetperm deploy FOLDER`"):
        node_place(tmp_path)
    with pytest.raises(ValueError, match="is not the folder of a federation"):
        server_place(tmp_path)
    (tmp_path / "node.toml").write_text('server = "127.0.0.1:8000"\nwidht = 1')
    with pytest.raises(ValueError, match="unknown key 'widht'"):
        node_place(tmp_path)


@pytest.mark.parametrize(
    ("kind", "given", "sentence"),
    [
        (NodeOptions, {"width": 0.0}, "--width is 0"),
        (NodeOptions, {"device_mb": -1.0}, "--device-mb is -1"),
        (ServeOptions, {"quorum": 2.0}, "--quorum is 2"),
        (ServeOptions, {"deadline": 0.0}, "--deadline is 0"),
        (DeployOptions, {"widths": (1.0, 2.0)}, "--widths is 2"),
    ],
)
def test_flags_that_make_no_sense_are_refused(kind, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        kind(**given)
