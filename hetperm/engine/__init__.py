"""Engines: how a list of tasks is run. All of them give the same numbers, the batched one up to rounding."""
