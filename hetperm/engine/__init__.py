"""Engines: ways to run a list of tasks. All give the same numbers, the batched engine up to rounding."""
