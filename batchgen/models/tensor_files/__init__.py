"""Tensors in files: headers, and the reading of bytes and numbers."""
