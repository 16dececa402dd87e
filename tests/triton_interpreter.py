"""Triton's interpreter, which runs kernels on the CPU: import this before any kernel. It has no bf16 of its own."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def _wide(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return torch.from_numpy(handle.data.view(np.int16).copy()).view(torch.bfloat16).float().numpy()


def _converted(whole):
    """Conversions to and from bf16 by torch, rounded to nearest."""

    def convert(self, source, to, *rest):
        if to.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
            data = torch.from_numpy(source.data.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(data, to.scalar)
        if source.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
            return interpreter.TensorHandle(_wide(source), to.scalar)
        return whole(self, source, to, *rest)

    return convert


def _dot(self, a, b, total, input_precision, max_num_imprecise_acc):
    return interpreter.TensorHandle(np.matmul(_wide(a), _wide(b), dtype=np.float32) + total.data, total.dtype.scalar)


_builder = interpreter.InterpreterBuilder
_builder.cast_impl = _converted(_builder.cast_impl)
_builder.create_fp_to_fp = _converted(_builder.create_fp_to_fp)
_builder.create_dot = _dot
