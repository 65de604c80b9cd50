"""What all tests share: torch computes on one thread, which is faster for small models and rounds alike everywhere."""

import pytest
import torch

pytest.register_assert_rewrite("federation", "reference_inputs", "engine_models")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
