"""Algorithms: each is a function that is handed clients and an engine and returns how to begin and how to go on."""
