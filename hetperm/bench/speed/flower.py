"""The rounds of a workload by Flower's simulation: a program that `hetperm.bench.speed.peers` runs.

It prints one line of JSON: the seconds of Flower's rounds and those of the bare loop. The loop is timed before and
after the simulation, because the simulation's threads would slow it down.
"""

import json
import math
import sys
import time
from functools import cache, partial
from itertools import pairwise

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from hetperm.bench.speed.timing import LEAST, Time, pinned, seconds
from hetperm.bench.speed.workloads import Setup, Workload, bare_loop, bare_steps, build


@cache
def asked(text: str) -> tuple[Setup, int]:
    """The workload and the number of rounds, made once in every process: in a message, data would be sent each time."""
    torch.set_num_threads(1)
    words = json.loads(text)
    return build(Workload(**words["workload"])), words["repeats"]


def train(message: Message, context: Context, setup: Setup) -> Message:
    """The reply of a client: its model after the steps of a round."""
    (module,) = setup.modules.values()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    pairs = setup.batches[context.node_config["partition-id"]]
    bare_steps(module, torch.optim.SGD(module.parameters(), lr=setup.workload.lr), pairs)
    # Flower weighs models by their examples; all clients of a workload have as many.
    answer = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(answer), reply_to=message)


def rounds(grid: Grid, setup: Setup, repeats: int) -> list[Time]:
    """Times of all rounds but the first, in which Ray starts its workers; CPU times are unknown here (nan)."""
    ends = []

    def after(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.perf_counter())

    def replies(records: list[RecordDict], weighted_by: str) -> MetricRecord:
        if len(records) < len(setup.clients):  # Flower would go on without them
            raise RuntimeError(f"only {len(records)} of {len(setup.clients)} clients answered")
        return MetricRecord()

    strategy = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_available_nodes=len(setup.clients),
        min_train_nodes=len(setup.clients),  # the fraction is one of those that have connected by then
        train_metrics_aggr_fn=replies,
    )
    strategy.start(grid, ArrayRecord(setup.start), num_rounds=1 + repeats, timeout=math.inf, evaluate_fn=after)
    return [(end - begin, math.nan) for begin, end in pairwise(ends[1:])]  # it is called before the first round, too


def main(text: str) -> None:
    """Run the simulation and print its times."""
    setup, repeats = asked(text)
    client, server = ClientApp(), ServerApp()
    times = []

    @client.train()
    def _train(message: Message, context: Context) -> Message:
        from hetperm.bench.speed import flower  # not the program's own functions: Ray would send what they refer to

        return flower.train(message, context, flower.asked(text)[0])

    @server.main()
    def _main(grid: Grid, context: Context) -> None:
        times.extend(rounds(grid, setup, repeats))

    with pinned(1):
        bare = [seconds(partial(bare_loop, setup), LEAST) for _ in range(1 + repeats)][1:]  # the first warms up
        one = {"num_cpus": 1}
        run_simulation(server, client, len(setup.clients), backend_config={"init_args": one, "client_resources": one})
        bare += [seconds(partial(bare_loop, setup), LEAST) for _ in range(repeats)]
    print(json.dumps({"bare": bare, "peer": times}))


if __name__ == "__main__":
    main(sys.argv[1])
