"""Readers of input files, one module per format; each makes a `Source`."""
