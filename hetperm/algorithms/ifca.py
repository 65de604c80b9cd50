"""IFCA: a few global models. In every round each client joins the one that fits its data best.

Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning", 2020. With clients of
different widths the models are trained by parts, as in Diao, Ding and Tarokh, "HeteroFL", 2021.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.partial_training import own_parts
from hetperm.algorithms.steps import FineTuneOptions, fine_tuning, in_rounds
from hetperm.device.gradients import MeanLoss
from hetperm.engine.task import Task
from hetperm.params import NotFinite, Params, num_bytes
from hetperm.randomness import generator_for
from hetperm.server.federation import Federation
from hetperm.server.global_model import covered_mean
from hetperm.state import State, Work

MOST = 100  # clusters, or starts of them: every client compares all of them in every round


@dataclass(frozen=True)
class Options(FineTuneOptions):
    """Options of IFCA beyond those of every rival. Without fine-tuning, `fine_tune_steps` is 0.

    Attributes:
        restarts: how many starts of the clusters are tried.
        probe_rounds: the rounds after which they are compared, if there are several.
        choice_samples: the largest number of samples on which a client compares clusters; 0 means its whole shard.
    """

    clusters: int
    restarts: int = 1
    probe_rounds: int = 5
    choice_samples: int = 128

    def __post_init__(self):
        for name in ("clusters", "restarts", "probe_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{getattr(self, name)} {name}: ifca needs at least 1")
        for name in ("clusters", "restarts"):
            if getattr(self, name) > MOST:
                raise ValueError(f"{getattr(self, name)} {name}: ifca takes at most {MOST}")

    @property
    def loss(self) -> MeanLoss:
        """The update by which a client judges a cluster."""
        return MeanLoss(most=self.choice_samples)

    @property
    def compares(self) -> bool:
        """Whether losses are needed: one cluster from one start leaves nothing to choose."""
        return self.clusters > 1 or self.restarts > 1

    @property
    def probed(self) -> int:
        """The rounds before the start is settled."""
        return self.probe_rounds if self.restarts > 1 else 0


def ifca(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""IFCA with model averaging: clients choose the cluster of lowest loss and train its model; the server averages.

    .. math:: c_i = \arg\min_c f_i(m_i \odot \theta_c), \quad
        \theta_{c,k} \leftarrow \operatorname{mean}_{i : c_i = c, k \in m_i} (m_i \odot \theta_c)_{i,K,k}

    where :math:`(m_i \odot \theta_c)_{i,K}` is the part of :math:`\theta_c` that client i can hold after K steps at
    client i. A coordinate that no member of the cluster holds keeps its value, and so does a cluster that nobody chose.
    If all clients hold the whole model this is the paper's IFCA; else it is IFCA over HeteroFL.

    Clients choose right after the server has averaged. The choice decides the model of the next round and the one to
    deploy. Personal models: the static part of :math:`\theta_{c_i}`; w is the average over all clients. Cluster models
    are in `State.memory` as ``"cluster c"``, the choices as ``"choice"``. The first cluster begins at the start, the
    others at random models. With several ``restarts``, the further ones draw all clusters anew. Each runs the probing
    rounds, and the one with the lowest mean loss of the chosen clusters goes on. If the options have steps for it,
    clients fine-tune at the end.

    A step costs one gradient and a loss for the choice a third of one, those of all restarts included; the models sent
    for the choice count as bytes. So that clients with large shards do not spend everything on choosing, a loss is
    taken on at most `choice_samples` samples, drawn anew in every round. (The paper takes the whole shard.)
    """
    clients = federation.clients
    N = len(clients)
    indices = federation.handed_out("static", round=0)

    def begin() -> State:
        best, work = None, Work()
        for restart in range(options.restarts):
            models = _starts(start, options.clusters, seed=federation.seed, restart=restart)
            state = choose(State(0, start, ()), models, round=0)
            for round in range(options.probed):
                state = train(state, round)
            work += state.work
            if best is None or _mean_loss(state) < _mean_loss(best):
                best = state
        return replace(best, work=work)

    def train(state: State, round: int) -> State:
        choice = state.memory["choice"]["choice"].tolist()
        models = [state.memory[f"cluster {c}"] for c in range(options.clusters)]
        trained = federation.train_at_home([options.sgd] * N, state.v, round=round)
        # Only the chosen clusters: one that nobody chose keeps its model and may be chosen again.
        for c in set(choice):
            members = [i for i in range(N) if choice[i] == c]
            models[c] = mean_of(members, models[c], trained)
        w = mean_of(range(N), state.w, trained)
        # The trained model, and the number of its cluster.
        up = sum(num_bytes(params) + 8 for params in trained if params is not None)
        work = Work(rounds=1, bytes_up=up) + federation.work_at_home([options.sgd] * N, options.batch_size, trained)
        return choose(replace(state, w=w, work=state.work + work), models, round=round + 1)

    def mean_of(members: Sequence[int], model: Params, trained: Sequence[Params]) -> Params:
        among = replace(federation, clients=[clients[i] for i in members])
        return covered_mean(among, model, [trained[i] for i in members], [indices[i] for i in members])

    def choose(state: State, models: Sequence[Params], *, round: int) -> State:
        """The state in which every client has the cluster whose model has the lowest loss on its data.

        Absent clients keep the cluster that they had, at first the first one.
        """
        parts = [own_parts(federation, model) for model in models]  # (C, N)
        before = state.memory.get("choice", {"choice": torch.zeros(N, dtype=torch.long)})
        choice, loss, work = before["choice"], torch.zeros((), dtype=torch.float64), Work()
        here = federation.present(round)
        if options.compares:
            tasks = list(_judgements(federation, parts, options.loss, round))
            outcomes = federation.run(tasks, round=round)
            losses, here = _finite_losses(outcomes, N, round)
            choice = torch.where(torch.tensor(here), losses.argmin(dim=1), choice)
            order = [i for i in federation.order if here[i]]
            # Without anybody to judge them these clusters are not known to be better than others.
            loss = losses.amin(dim=1)[order].mean() if order else torch.tensor(math.inf, dtype=torch.float64)
            work = federation.work_of(tasks, options.batch_size, outcomes)
        # Every client gets its part of all models to choose from, so none is sent again for training.
        down = sum(num_bytes(part) for of_cluster in parts for part, came in zip(of_cluster, here) if came)
        work += Work(bytes_down=down)
        memory = {f"cluster {c}": model for c, model in enumerate(models)}
        memory["choice"] = {"choice": choice, "loss": loss}
        v = tuple(parts[c][i] for i, c in enumerate(choice.tolist()))
        return replace(state, v=v, memory=memory, work=state.work + work)

    choosing = _cost_of_choosing(federation, options)
    cost = options.local_steps + choosing
    begins = options.restarts * (choosing + options.probed * cost)
    epoch = in_rounds(
        # Rounds are counted through from the probing, so that a restart does not see the same batches twice.
        lambda state, round: train(state, round + options.probed),
        options,
        cost=cost,
        spare=begins + options.fine_tune_steps,
    )
    return Algorithm(begin, epoch, fine_tuning(federation, options))


def _cost_of_choosing(federation: Federation, options: Options) -> float:
    """The losses of a choice, in mini-batch gradients."""
    # Of the client that takes most, because no client may exceed its steps.
    if not options.compares:
        return 0.0
    sizes = [client.n_train for client in federation.clients]
    return max(options.clusters * options.loss.samples(n) / min(options.batch_size, n) for n in sizes)


def _judgements(
    federation: Federation, parts: Sequence[Sequence[Params]], loss: MeanLoss, round: int
) -> Iterator[Task]:
    """Yield the task of every client (outer) to judge its part of every cluster (inner)."""
    for i, client in enumerate(federation.clients):
        for c, of_cluster in enumerate(parts):
            yield Task(
                loss,
                of_cluster[i],
                host=i,
                seed=federation.seed_for("choice", round, client.key),  # the same samples for all clusters
                width=client.width,
                label=f"round {round}: cluster {c} at client {i}",
            )


def _finite_losses(losses: Sequence[Tensor | None], clients: int, round: int) -> tuple[Tensor, list[bool]]:
    """(N, C) the losses, infinite where they are not finite, and whether each client has sent them.

    It is an error if a client sent losses and none of them is finite.
    """
    numbers = [math.inf if loss is None else float(loss) for loss in losses]
    table = torch.tensor(numbers, dtype=torch.float64).reshape(clients, -1)
    clusters = table.shape[1]
    came = [None not in losses[i * clusters : (i + 1) * clusters] for i in range(clients)]
    # A cluster whose loss is not finite is never chosen.
    finite = table.isfinite()
    for i in range(clients):
        if came[i] and not finite[i].any():
            raise NotFinite(
                f"round {round}: client {i}: the loss of no cluster is finite; lower the learning rate (lr)"
            )
    return table.where(finite, math.inf), came


def _mean_loss(state: State) -> float:
    return float(state.memory["choice"]["loss"])


def _starts(start: Params, clusters: int, *, seed: int, restart: int) -> list[Params]:
    """The models that the clusters begin with: the start and random ones, other random ones for every restart."""
    again = (restart,) if restart else ()
    others = [_redrawn(start, generator_for(seed, "cluster", c, *again)) for c in range(1, clusters)]
    first = _redrawn(start, generator_for(seed, "cluster", 0, restart)) if restart else start
    return [first, *others]


def _redrawn(start: Params, generator: torch.Generator) -> Params:
    """Another start: weights drawn anew with the same root mean square; biases and the scales of norms stay.

    Clusters with equal starts would stay equal for ever. Weights that are all zero get the size of a new layer's.
    """
    return {name: x.clone() if x.dim() < 2 else _like(x, generator) for name, x in start.items()}


def _like(x: Tensor, generator: torch.Generator) -> Tensor:
    # 1 / sqrt(3 fan_in) is the standard deviation of the weights that torch draws for a new layer.
    size = float(x.square().mean().sqrt()) or (3 * x[0].numel()) ** -0.5
    return size * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
