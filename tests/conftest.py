"""What all tests share: torch computes on one thread, which is faster for small models and rounds alike everywhere."""

from importlib.util import find_spec

import pytest
import torch

pytest.register_assert_rewrite("federation", "reference_inputs", "engine_models")
# Programs of federations, which import Flower and what it brings.
OF_FLOWER = [
    "federation_endings.py",
    "federation_machines.py",
    "federation_processes.py",
    "federation_refusals.py",
    "hostile_server.py",
    "lying_node.py",
    "real_federation.py",
]
collect_ignore = [] if find_spec("flwr") else OF_FLOWER


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
