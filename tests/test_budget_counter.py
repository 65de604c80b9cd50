"""A second count of the work: what workbenches really compute, against what every method says it has spent."""

import pytest
import torch
from torch import Tensor, nn

from hetperm import Client, Config
from hetperm.device import updates
from hetperm.device.bench import Workbench
from hetperm.engine import sequential
from hetperm.methods import METHODS
from hetperm.runs.setting import from_model
from hetperm.runs.training import epochs

SIZES = (70, 23, 9, 40, 12)  # of shards: above, at and below the size of a batch
WIDTHS = (1.0, 0.5, 0.5, 1.0, 0.25)
BATCH, STEPS = 8, 130

# Options that make methods compute in other ways than by default.
VARIANTS = [
    *((name, {}) for name in METHODS),
    ("perm", {"share": 0.7}),
    ("perm", {"validation": False}),
    ("perfedavg", {"table": {"variant": "hessian-free"}}),
    ("pfedme", {"table": {"inner_steps": 3}}),
    ("ifca", {"table": {"clusters": 3, "restarts": 2, "probe_rounds": 1, "choice_samples": 16}}),
    ("heterofl-clustered-ft", {"table": {"restarts": 2, "probe_rounds": 1, "fine_tune_steps": 10}}),
    ("heterofl", {"table": {"scaler": True, "masked_loss": True}}),
    ("fjord-ft", {"table": {"draws": "round"}}),
    ("fjord", {"table": {"distil": 1.0}}),
    ("fedrep", {"table": {"head_steps": 2, "fine_tune_steps": 7}}),
]


def make_clients(*, validation: bool) -> list[Client]:
    clients = []
    for i, (n, width) in enumerate(zip(SIZES, WIDTHS, strict=True)):
        x = torch.randn(n, 6, generator=torch.Generator().manual_seed(i))
        pair = (x, (x[:, :3].argmax(1) + i % 2) % 3)
        clients.append(Client(pair, pair if validation else None, pair, width=width))
    return clients


def make_setting(*, table=None, method="perm", validation=True, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    few = {"steps": STEPS, "epochs": 4, "local_steps": 3, "batch_size": BATCH, "engine": "sequential", "baselines": ()}
    config = Config(**few | changes, num_clients=len(SIZES), rivals={method: table} if table else {})
    return from_model(model, make_clients(validation=validation), config, loss=None, metric=None)


class Counter:
    """Counts, for every host, the samples that run forward (a third of a gradient each) and backward (two thirds)."""

    def __init__(self, monkeypatch):
        self.spent = [0.0] * len(SIZES)  # mini-batch gradients of every host
        self._host, self._batch = None, 0
        run_task, outputs, gradient_of, backward = (
            *(sequential.run_task, Workbench.outputs),
            *(Workbench.gradient_of, Tensor.backward),
        )

        def at_host(task, clients, shop):
            self._host = task.host
            try:
                return run_task(task, clients, shop)
            finally:
                self._host = None

        def forward(bench, x):
            self._batch = len(x)
            self._count(1 / 3)
            return outputs(bench, x)

        def gradient(bench, value):
            self._count(2 / 3)
            return gradient_of(bench, value)

        def accumulate(value, *args, **options):
            self._count(2 / 3)
            return backward(value, *args, **options)

        monkeypatch.setattr(sequential, "run_task", at_host)
        monkeypatch.setattr(Workbench, "outputs", forward)
        monkeypatch.setattr(Workbench, "gradient_of", gradient)
        monkeypatch.setattr(Tensor, "backward", accumulate)

    def _count(self, share: float) -> None:
        # Outside tasks a backward pass is that of a cost model, on no data.
        if self._host is not None:
            self.spent[self._host] += share * self._batch / min(BATCH, SIZES[self._host])


@pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=lambda value: value if isinstance(value, str) else str(value)
)
def test_what_a_method_says_it_spent_is_what_it_computed_and_within_the_budget(name, options, monkeypatch):
    setting, counter = make_setting(method=name, **options), Counter(monkeypatch)
    *_, last = epochs(setting, name, steps=STEPS)
    stated = last.state.work.client_steps
    assert sum(counter.spent) == pytest.approx(stated, rel=1e-9)
    assert stated <= len(SIZES) * STEPS + 1e-6
    assert max(counter.spent) > 0.75 * STEPS  # and somebody makes use of what all may spend
    if not METHODS[name].mixes:
        assert max(counter.spent) <= STEPS + 1e-6


# The counter itself


def spent_by_fedavg(monkeypatch) -> tuple[float, float]:
    """(what was computed, what was stated)."""
    setting, counter = make_setting(), Counter(monkeypatch)
    *_, last = epochs(setting, "fedavg", steps=STEPS)
    return sum(counter.spent), last.state.work.client_steps


def test_a_gradient_more_than_stated_is_noticed(monkeypatch):
    honest = updates.Sgd.__call__

    def greedy(self, bench, params, shard, generator):
        after = honest(self, bench, params, shard, generator)
        bench.gradient(shard[0][:1], shard[1][:1])
        return after

    monkeypatch.setattr(updates.Sgd, "__call__", greedy)
    computed, stated = spent_by_fedavg(monkeypatch)
    assert computed > stated + 1


def test_a_loss_more_than_stated_is_noticed(monkeypatch):
    honest = updates.Sgd.__call__

    def curious(self, bench, params, shard, generator):
        with torch.no_grad():
            bench.value(*shard)
        return honest(self, bench, params, shard, generator)

    monkeypatch.setattr(updates.Sgd, "__call__", curious)
    computed, stated = spent_by_fedavg(monkeypatch)
    assert computed > stated + 1


def test_the_counter_by_hand(monkeypatch):
    setting, counter = make_setting(), Counter(monkeypatch)
    clients, shop = setting.clients, setting.shop
    sgd = sequential.Task(updates.Sgd(5, BATCH, 0.1), setting.start, host=1, seed=0)
    sequential.run_task(sgd, clients, shop)
    assert counter.spent == pytest.approx([0, 5, 0, 0, 0])
