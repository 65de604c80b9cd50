"""Clients in groups of ten that should find each other, any number of them: for scaling and its benchmark."""

import torch

from hetperm.client import Client
from hetperm.randomness import generator_for

GROUP = 10  # clients that have the same kind of data
FEATURES, CLASSES, SAMPLES = 60, 10, 100


def grouped(N: int, *, seed: int = 0, test: int = 0) -> list[Client]:
    """Clients in groups of ten: a group has its own region of the inputs and its own labelling.

    Args:
        test: samples of test data that each client has.
    """
    clients = []
    for i in range(N):
        group = i // GROUP
        of_group = generator_for(seed, "group", group)  # drawn anew for every client, and so the same for a group
        centre, teacher = (torch.randn(*shape, generator=of_group) for shape in ((FEATURES,), (FEATURES, CLASSES)))
        sizes = {"client": SAMPLES} | ({"test": test} if test else {})
        xs = [centre + torch.randn(n, FEATURES, generator=generator_for(seed, use, i)) for use, n in sizes.items()]
        train, *rest = ((x, (x @ teacher).argmax(1)) for x in xs)
        clients.append(Client(train, test=rest[0] if rest else None, group=group, key=i))
    return clients
