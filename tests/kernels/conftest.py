"""Triton kernels run in Triton's interpreter where there is no GPU; here its faults are mended.

Must run before any kernel is decorated. In Triton 3.6 the interpreter keeps bfloat16 as raw 16-bit
words: products, sums and casts of those words are silently wrong. Giving NumPy a real bfloat16 type
mends them all. Its loop bounds also rely on `int()` of a one-element array, gone in NumPy 2.4.
"""

import os

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"


def _mend_interpreter() -> None:
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    half = np.dtype(ml_dtypes.bfloat16)
    plain = interpreter._get_np_dtype
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def numpy_dtype(kind):
        return half if getattr(kind, "scalar", kind) == tl.bfloat16 else plain(kind)

    def cast(self, value, target, *_):
        return handle(value.data.astype(numpy_dtype(target)), target.scalar)

    def dot(self, a, b, acc, *_):
        wide = [v.data.astype(np.float32) if v.data.dtype == half else v.data for v in (a, b)]
        return handle(np.matmul(*wide, dtype=acc.data.dtype) + acc.data, acc.dtype.scalar)

    interpreter._get_np_dtype = numpy_dtype
    builder.cast_impl = builder.create_fp_to_fp = cast
    builder.create_dot = dot
    builder.get_bf16 = lambda self, v: handle(np.array([v], dtype=half), tl.bfloat16)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, *args):
        patch_tensor(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


if INTERPRETED:
    _mend_interpreter()
