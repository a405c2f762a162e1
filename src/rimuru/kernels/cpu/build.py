"""Compiles `kernels.c` on first use and loads it.

Room: the CPU back end's toolchain. Rule: never a reason not to start; whatever goes wrong is logged
once and the torch twin serves instead.

The library is kept in `$XDG_CACHE_HOME/rimuru/kernels` (`~/.cache` by default) under a name that
hashes everything it depends on: source, compiler, options, CPU features. `CC` chooses the compiler,
`RIMURU_CPU_KERNELS=torch` the torch twin.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

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
        path = _library()
        try:
            ctypes.CDLL(str(path))
        except OSError:  # a machine that crashed while writing leaves an empty file
            path.unlink()
            path = _library()
        return ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning(
            "the CPU kernels could not be compiled, so the CPU back end runs on torch operators, several "
            "times slower; install gcc or clang, or set CC (%s)",
            str(detail).strip(),
        )
        return None


def _library() -> Path:
    """Path of the kernels' shared library for this machine."""
    # Linked without -fopenmp: that would load a second OpenMP runtime beside torch's, and the two
    # thread pools would fight for the cores. Its symbols resolve to the one already loaded.
    entry = "__kmpc_fork_call" if "clang" in _run([*_compiler(), "--version"]) else "GOMP_parallel"
    return library(SOURCE, FLAGS + (["-fopenmp"] if _share_openmp_runtime(entry) else []), "cpu")


def library(source: Path, flags: list[str], name: str) -> Path:
    """Path of `source`'s shared library for this machine, compiled if it is not in the cache.

    Raises `OSError` without a compiler, `subprocess.SubprocessError` where it fails.
    """
    compiler = _compiler()
    key = "\0".join([*compiler, _run([*compiler, "--version"]), *flags, _cpu_features()]).encode()
    name = f"{name}-{hashlib.blake2b(key + source.read_bytes(), digest_size=12).hexdigest()}.so"
    folder = _cache_folder()
    if (folder / name).is_file():
        return folder / name
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as build:
        made = f"{build}/kernels"
        _run([*compiler, *flags, "-c", str(source), "-o", f"{made}.o"])
        _run([*compiler, "-shared", f"{made}.o", "-o", f"{made}.so", "-lm"])
        os.replace(f"{made}.so", folder / name)  # atomic: another process may be doing the same
    return folder / name


def _compiler() -> list[str]:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        program, *options = shlex.split(name)
        if found := shutil.which(program):
            return [found, *options]
    raise FileNotFoundError(f"no C compiler: looked for {', '.join(names)}")


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


def _cpu_features() -> str:
    try:
        features = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        features = None
    return platform.machine() + (features.group() if features else platform.processor())


def _cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "rimuru" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="rimuru-kernels-"))  # private to this process


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
