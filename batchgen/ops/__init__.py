"""Tensors in, tensors out: `dispatch` chooses between C++ (`cpp`), Triton and torch (`reference`)."""
