"""Engines: ways to run a list of tasks. On one machine all give the same numbers, the batched one up to rounding."""
