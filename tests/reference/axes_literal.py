"""Axes spelled out position by position, with lists and loops; shares nothing with the package.

A tree is ``("fixed", n)``, ``("group", id)``, ``("product", [trees])`` or ``("sum", [trees])``.
"""

import itertools


def labels(tree, channels):
    """The label of every position: which channels, which fixed places and which parts it is made of.

    ``channels[id]`` are the channels of group ``id``, in the order they lie in.
    """
    kind, content = tree
    if kind == "fixed":
        return [("place", i) for i in range(content)]
    if kind == "group":
        return [("channel", content, i) for i in channels[content]]
    if kind == "product":
        return list(itertools.product(*(labels(part, channels) for part in content)))
    out = []
    for number, part in enumerate(content):
        for label in labels(part, channels):
            out.append(("part", number, label))
    return out


def positions(tree, kept, sizes):
    """Where the positions of the small axis lie in the whole one: look every label up."""
    whole = labels(tree, [range(size) for size in sizes])
    return [whole.index(label) for label in labels(tree, kept)]


def owner(label, group):
    """The channel of ``group`` in a label, -1 if there is none."""
    if label[0] == "channel":
        return label[2] if label[1] == group else -1
    if label[0] == "place":
        return -1
    if label[0] == "part":
        return owner(label[2], group)
    return max((owner(part, group) for part in label), default=-1)
