"""Kernels compiled before they are launched, several at a time.

Room: the compiler's side of the Triton back end. Rule: what is compiled follows from launches as they will be
made, so that no list of kernels has to agree with the code; a kernel that was missed is compiled when it is
launched, as without this file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..host_memory import threads


@contextmanager
def compiling() -> Iterator[None]:
    """Launches inside compile their kernels on other threads and launch nothing; on exit all are compiled.

    What kernels would have written holds whatever was there before. Of a compilation's time four fifths are
    spent in LLVM and in the assembler, which run beside each other. Raises what the compiler raises.
    """
    run = JITFunction.run
    seen: set[Hashable] = set()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kind = _kind(kernel, args, options)
        if kind in seen:
            return None
        seen.add(kind)
        return run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with _Compiler(threads(), "compiler") as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        JITFunction.run = run


class _Compiler(ThreadPoolExecutor):
    """Compiles a kernel and, with the machine's C compiler, what launches it: both stay in Triton's cache."""

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _kind(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """Equal only where Triton would launch the same compiled kernel; asking it takes much longer."""
    given = options | {p.name: x for p, x in zip(kernel.params, args, strict=False)}
    for p in kernel.params:
        if p.name in given and not p.is_constexpr:
            given[p.name] = _class(given[p.name])
    known = (x if isinstance(x, Hashable) else object() for x in given.values())
    return id(kernel), tuple(given), tuple(known)


def _class(x: object) -> object:
    """What Triton looks at in an argument that is no constant."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return int, x == 1, x % 16 == 0, x.bit_length() // 32
    return float if isinstance(x, float) else x
