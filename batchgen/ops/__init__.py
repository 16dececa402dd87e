"""The operations on tensors: `dispatch` chooses between the C++ kernels (`cpp`), Triton and torch (`reference`)."""
