"""A run from beginning to end: its setting, training, evaluation, and every file of its folder."""
