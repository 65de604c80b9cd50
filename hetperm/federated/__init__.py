"""Federations of real machines: nodes that hold the data, the server that they train with, and what starts both."""
