"""Compiles `kernels.c` on first use and loads it.

Room: the CPU back end's toolchain. Rule: never a reason not to start; whatever goes wrong is logged
once and the torch twin serves instead. `RIMURU_CPU_KERNELS=torch` asks for the twin.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from pathlib import Path

import torch

from .. import c_library

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
# -ffp-contract=off: the kernels say where a multiply-add is fused. No -ffast-math: sums keep their order.
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-Wno-psabi"]


def load() -> tuple[ctypes.CDLL, ctypes.PyDLL] | None:
    """The compiled library as `(releases the GIL, holds the GIL)`, or None where the twin must serve."""
    choice = os.environ.get("RIMURU_CPU_KERNELS", "auto")
    if choice == "torch":
        log.warning("RIMURU_CPU_KERNELS=torch: the CPU back end runs on torch operators")
        return None
    if choice != "auto":
        raise ValueError(f"RIMURU_CPU_KERNELS={choice!r} is neither 'auto' nor 'torch'")
    try:
        return c_library.load(SOURCE, _flags())
    except OSError as error:
        log.warning(
            "the CPU kernels could not be compiled, so the CPU back end runs on torch operators, several "
            "times slower; install gcc or clang, or set CC (%s)",
            error,
        )
        return None


def _flags() -> list[str]:
    # The kernels resolve OpenMP's symbols to the runtime that torch has loaded: with one of their own, two
    # thread pools would fight for the cores.
    entry = "__kmpc_fork_call" if "clang" in c_library.version() else "GOMP_parallel"
    return FLAGS + (["-fopenmp"] if _share_openmp_runtime(entry) else [])


def _share_openmp_runtime(entry: str) -> bool:
    """Make the OpenMP runtime that torch loaded visible to libraries loaded later, if it has `entry`.

    A runtime without the compiler's entry point would not resolve; the kernels then use one thread.
    """
    torch.get_num_threads()
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return False
    found = re.search(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    if found is None:
        return False
    return hasattr(ctypes.CDLL(found.group(), mode=ctypes.RTLD_GLOBAL), entry)
