"""The experiments of the paper and ours: cells that are run once and kept, and the tables and pictures made of them."""
