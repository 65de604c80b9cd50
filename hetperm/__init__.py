"""PERM for clients of unequal size: each learns, at the size it can afford, from the clients worth learning from."""

__version__ = "0.1.0"
