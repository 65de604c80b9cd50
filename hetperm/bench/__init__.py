"""Benchmarks: speed (`hetperm bench`) and devices (`hetperm bench resources`)."""
