"""Dealing: (n,) the owner of every sample of the training pool, -1 for nobody."""

import numpy as np


def deal_alike(n: int, N: int, samples: int | None, rng: np.random.Generator) -> np.ndarray:
    """Deal equal parts of a random order, or ``samples`` to each of N clients."""
    sizes = [n // N + (i < n % N) for i in range(N)] if samples is None else [samples] * N
    owner = np.full(n, -1)
    owner[rng.permutation(n)[: sum(sizes)]] = np.repeat(np.arange(N), sizes)
    return owner


def deal_all(y: np.ndarray, mix: np.ndarray, partition: str, rng: np.random.Generator) -> np.ndarray:
    """Deal every sample to a client that may hold its class, drawn by the log shares ``mix`` (N, C)."""
    owner = np.full(len(y), -1)
    for c, weights in enumerate(mix.T):
        if weights.max() > -np.inf:
            rows = np.flatnonzero(y == c)
            owner[rows] = rng.choice(len(mix), size=len(rows), p=_shares(weights))
    # Nobody may stay without images, and one is too few for batch statistics: the richest give, one image at a time.
    # Everybody has a first image before anybody is given a second.
    for least in (1, 2):
        _level(owner, y, mix > -np.inf, least, rng)
    sizes = np.bincount(owner[owner >= 0], minlength=len(mix))
    if sizes.min() == 0:
        raise ValueError(
            f"{partition}: {len(mix)} clients are too many for {len(y)} training samples: "
            f"client {sizes.argmin()} would hold none; lower num_clients"
        )
    return owner


def _level(owner: np.ndarray, y: np.ndarray, may_hold: np.ndarray, least: int, rng: np.random.Generator) -> None:
    """Move images, in place, to clients with fewer than ``least`` from the richest clients that hold more."""
    sizes = np.bincount(owner[owner >= 0], minlength=len(may_hold))
    # argmax takes the first of equals: in this order, the image is drawn from all those of the richest.
    order = rng.permutation(len(y))
    for i in np.flatnonzero(sizes < least):
        while sizes[i] < least:
            # Images without an owner (-1) would show the size of the last client; the condition masks them.
            wealth = np.where((owner[order] >= 0) & may_hold[i, y[order]], sizes[owner[order]], 0)
            row = order[wealth.argmax()]
            # Nobody who could give has more than is needed: moving an image would only move the gap.
            if wealth.max() <= least:
                break
            sizes[owner[row]] -= 1
            sizes[i] += 1
            owner[row] = i


def deal_some(y: np.ndarray, mix: np.ndarray, samples: int, partition: str, rng: np.random.Generator) -> np.ndarray:
    """Deal ``samples`` to each client, of classes drawn by the log shares ``mix`` (N, C)."""
    owner = np.full(len(y), -1)
    decks = [rng.permutation(np.flatnonzero(y == c)) for c in range(mix.shape[1])]
    # In random order, because those who come late find some classes used up.
    for i in rng.permutation(len(mix)):
        need = samples
        while need:  # every pass is the last or empties a deck
            weights = np.where([len(deck) > 0 for deck in decks], mix[i], -np.inf)
            if weights.max() == -np.inf:
                held = np.flatnonzero(mix[i] > -np.inf)
                raise ValueError(
                    f"{partition}: client {i} finds {samples - need} of its {samples} samples; the training pool holds "
                    f"{np.isin(y, held).sum()} images of class {', '.join(map(str, held))}, for all clients that hold "
                    "them; lower samples_per_client"
                )
            for c, count in enumerate(rng.multinomial(need, _shares(weights))):
                taken, decks[c] = decks[c][:count], decks[c][count:]
                owner[taken] = i
                need -= len(taken)
    return owner


def _shares(weights: np.ndarray) -> np.ndarray:
    """Log weights as shares that sum to one."""
    # Relative to the largest, or all might be too small for a float.
    shares = np.exp(weights - weights.max())
    return shares / shares.sum()
