"""Algorithms: each is a function of a federation, a start and options, and returns an `Algorithm`."""
