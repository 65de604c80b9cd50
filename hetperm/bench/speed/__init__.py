"""How fast rounds and epochs are, against a bare torch loop, the paper's literal epoch and peers."""
