"""What references are handed, which must not call the package: clients and models as lists, and all that a run draws.

Draws are made here once more, by the keys they are drawn under.
"""

import torch
from federation import CLASSES, HIDDEN, NAMES, SEED, scalable
from reference import hetero, perm_maths

from hetperm.randomness import seed_for
from hetperm.server import shuffle
from submodels import Random


def batches(n, size, steps, generator):
    """Mini-batches without replacement, shard after shard; what is left at the end of a shard is not used."""
    size, out = min(size, n), []
    while len(out) < steps:
        order = torch.randperm(n, generator=generator).tolist()
        out += [order[first : first + size] for first in range(0, n - size + 1, size)]
    return out[:steps]


def kept(index):
    """The units of the two hidden layers in an index set; groups are told apart by where they appear."""
    by_layer = {}
    for group, channels in zip(index.axis_map.groups, index.kept, strict=True):
        layer = next(name for name, axis in group.members if axis == 0 and name.endswith("weight"))
        by_layer[layer] = channels.tolist()
    return [by_layer["0.weight"], by_layer["2.weight"]]


class Draw:
    """The draws of a run of some clients; ``options`` are in one table."""

    def __init__(self, clients, options, *, seed=SEED):
        self.clients, self.options, self.seed = clients, options, seed

    def generator(self, *what):
        return torch.Generator().manual_seed(seed_for(self.seed, *what))

    def key(self, i):
        return self.clients[i].key

    def some(self, generator, i, steps=None):
        options = self.options
        return batches(self.clients[i].n_train, options.batch_size, steps or options.local_steps, generator)

    def choices(self, generator, i, count):
        """One of ``count`` for every step, drawn after the batches."""
        self.some(generator, i)
        return [int(torch.randint(count, (), generator=generator)) for _ in range(self.options.local_steps)]

    def global_batches(self, i, r):
        return self.some(self.generator("global", r, self.key(i)), i)

    def global_choices(self, i, r, count):
        return self.choices(self.generator("global", r, self.key(i)), i, count)

    def width_choice(self, i, r, count):
        """Which of the widths that it can hold client i trains in round r of an ordered warm-up."""
        return int(torch.randint(count, (), generator=self.generator("width", r, self.key(i))))

    def tune_batches(self, i):
        return self.some(self.generator("fine-tune", self.key(i)), i, self.options.fine_tune_steps)

    def visit_batches(self, i, j, r):
        return self.some(self.generator("visit", r, self.key(i), self.key(j)), j)

    def visit_choices(self, i, j, r, count):
        return self.choices(self.generator("visit", r, self.key(i), self.key(j)), j, count)

    def large_batch(self, i, r):
        order = torch.randperm(self.clients[i].n_train, generator=self.generator("step", r, self.key(i)))
        return order[: self.options.global_batch]

    def pieces(self, i, r):
        order = torch.randperm(self.clients[i].n_train, generator=self.generator("report", r, self.key(i)))
        return order.tensor_split(self.options.noise_batches)

    def rounds(self, r, alpha):
        generator = self.generator("schedule", r)
        if self.options.schedule == "ring":
            ring = perm_maths.ring(torch.randperm(len(alpha), generator=generator).tolist())
            return [list(enumerate(hosts)) for hosts in zip(*ring, strict=True)]
        return shuffle.schedule(torch.as_tensor(alpha, dtype=torch.float64), generator)

    def here(self, j, clock):
        """Whether host j is there in a round: it draws a number, and comes if that is below the share that comes."""
        draw = float(torch.rand((), generator=self.generator("present", clock, self.key(j))))
        return draw < self.options.participation

    def units(self, i, t, width=None):
        extractor = Random(seed_for(self.seed, "part", t, self.key(i)))
        return kept(scalable().index(self.clients[i].width if width is None else width, extractor, round=t))

    def nested_units(self, i, j, t):
        inside = scalable().axis_map.counts(self.clients[i].width)
        extractor = Random(seed_for(self.seed, "part", t, self.key(i), self.key(j)))
        return kept(scalable().index(self.clients[j].width, extractor, round=t, within=inside))


def as_list(params):
    return [params[name] for name in NAMES]


def as_shards(clients):
    everything = list(range(CLASSES))
    known = [everything if c.classes is None else c.classes.nonzero().flatten().tolist() for c in clients]
    return [(*client.train, classes) for client, classes in zip(clients, known, strict=True)]


def sliced(model, width):
    """The static part of a full-size model, cut with plain slices."""
    one, two = (len(units) for units in hetero.first(width, HIDDEN))
    W1, b1, W2, b2, W3, b3 = model
    return [W1[:one], b1[:one], W2[:two, :one], b2[:two], W3[:, :two], b3]


def assert_close(params, model, width=1.0, atol=1e-12):
    for name, expected in zip(NAMES, sliced(model, width), strict=True):
        assert params[name].shape == expected.shape and (params[name] - expected).abs().max() <= atol, name
