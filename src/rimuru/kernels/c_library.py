"""C files compiled on first use and loaded.

Room: the toolchain of whatever calls C. Rule: it says what went wrong; whether to do without is the caller's
to decide.

A library is kept in `$XDG_CACHE_HOME/rimuru/kernels` (`~/.cache` by default) under a name that hashes
everything it depends on: source, compiler, options, CPU features. `CC` chooses the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path


def load(source: Path, flags: list[str]) -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """The compiled file as `(releases the GIL, holds the GIL)`. `OSError` says why there is none."""
    path = compiled(source, flags)
    try:
        ctypes.CDLL(str(path))
    except OSError:  # a machine that crashed while writing leaves an empty file
        path.unlink()
        path = compiled(source, flags)
    return ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))


def compiled(source: Path, flags: list[str]) -> Path:
    """Path of the shared library of `source` for this machine, compiled if it is not in the cache."""
    compiler = _compiler()
    key = "\0".join([*compiler, version(), *flags, _cpu_features()]).encode() + source.read_bytes()
    name = f"{source.stem}-{hashlib.blake2b(key, digest_size=12).hexdigest()}.so"
    folder = _cache_folder()
    if (folder / name).is_file():
        return folder / name
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as build:
        made = f"{build}/made"
        # Linked without the options: -fopenmp would load a second OpenMP runtime beside torch's.
        _run([*compiler, *flags, "-c", str(source), "-o", f"{made}.o"])
        _run([*compiler, "-shared", f"{made}.o", "-o", f"{made}.so", "-lm"])
        os.replace(f"{made}.so", folder / name)  # atomic: another process may be doing the same
    return folder / name


def version() -> str:
    """What the compiler says of itself."""
    return _run([*_compiler(), "--version"])


def _compiler() -> list[str]:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        program, *options = shlex.split(name)
        if found := shutil.which(program):
            return [found, *options]
    raise FileNotFoundError(f"no C compiler: looked for {', '.join(names)}")


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
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr.strip() or str(error)) from None
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from None
