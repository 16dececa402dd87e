"""Triton kernels for CUDA tensors: the counterparts of batchgen/kernels.py, with the signatures of `ops`.

Nothing imports this but `ops`, and only where a tensor lies on a card and Triton is installed.
"""
