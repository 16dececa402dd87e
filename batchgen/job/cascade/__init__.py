"""Cascades: a small model answers all rows, and a large one those in which the small one is not sure enough."""
