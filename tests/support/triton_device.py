"""The device that Triton's kernels are checked on: a card (BATCHGEN_CHECK_DEVICE=cuda), or Triton's interpreter.

Import this before any kernel: kernels are made for the one or the other.
"""

import os

import numpy as np
import torch

DEVICE = torch.device(os.environ.get("BATCHGEN_CHECK_DEVICE", "cpu"))


def teach_bf16():
    """The interpreter keeps bf16 as its bits, and multiplies those: here is what it lacks."""
    import triton.language as tl
    from triton.runtime import interpreter

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return torch.from_numpy(handle.data.view(np.int16).copy()).view(torch.bfloat16).float().numpy()

    def rounded_to_nearest(convert):
        def converted(self, source, to, *rest):
            if to.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
                numbers = torch.from_numpy(source.data.astype(np.float32)).bfloat16()
                return interpreter.TensorHandle(numbers.view(torch.int16).numpy().view(np.uint16), to.scalar)
            if source.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
                return interpreter.TensorHandle(wide(source), to.scalar)
            return convert(self, source, to, *rest)

        return converted

    def dot(self, a, b, total, *_):
        made = np.matmul(wide(a), wide(b), dtype=total.data.dtype)
        return interpreter.TensorHandle(made + total.data, total.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    builder.cast_impl = rounded_to_nearest(builder.cast_impl)
    builder.create_fp_to_fp = rounded_to_nearest(builder.create_fp_to_fp)
    builder.create_dot = dot


def teach_new_numpy():
    """Triton before 3.7 takes arrays of one number for numbers, which NumPy since 2.4 does not."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patched


def patch_once():
    """Has the interpreter patch the language's functions once a launch, not once more for each function of a kernel."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    outermost, done = None, set()

    def patched(function):
        nonlocal outermost
        modules = frozenset(
            id(m) for m in function.__globals__.values() if m is interpreter.tl or m is interpreter.tl.core
        )
        if not getattr(outermost, "_changes", None):  # of a launch that is over
            done.clear()
            outermost = patch(function)
        elif modules not in done:
            patch(function)
        done.add(modules)
        return outermost

    interpreter._patch_lang = patched


def teach_interpreter():
    """Has kernels that are made from now on interpreted, with what the interpreter lacks."""
    os.environ["TRITON_INTERPRET"] = "1"
    teach_bf16()
    teach_new_numpy()
    patch_once()


if DEVICE.type == "cpu":
    teach_interpreter()
