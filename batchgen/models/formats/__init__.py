"""The formats of weights that other programs write."""
