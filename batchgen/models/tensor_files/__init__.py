"""Tensors in files: headers, and how bytes and numbers are read."""
