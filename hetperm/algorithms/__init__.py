"""Algorithms: each is a function of a federation, a start and options that says how to begin, go on and end."""
