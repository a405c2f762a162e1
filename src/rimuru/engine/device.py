"""Which device, which dtype, and how much memory there is.

Room: the engine's only look at the machine before it allocates. Rule: reads, never reserves.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from rimuru.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

logger = logging.getLogger("rimuru.engine")

STACK = 256  # bytes a thread
OLDEST_GPU = (8, 0)  # compute capability; bfloat16 and asynchronous copies begin there


def choose_device(name: str) -> torch.device:
    """`auto` takes the first GPU that is new enough, else the CPU; asking for one that is not there, or too
    old, is a `ConfigError`."""
    gpu = torch.cuda.is_available()
    if name == "auto":
        usable = gpu and torch.cuda.get_device_capability(0) >= OLDEST_GPU
        return torch.device("cuda", 0) if usable else torch.device("cpu")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not gpu:
        raise ConfigError(
            "--device cuda: this torch build sees no GPU; use --device cpu, or install a CUDA build"
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--device cuda:{index}: there are {torch.cuda.device_count()} GPUs, counted from 0"
        )
    have = torch.cuda.get_device_capability(index)
    if have < OLDEST_GPU:
        raise ConfigError(
            f"--device cuda:{index}: {torch.cuda.get_device_name(index)} has compute capability "
            f"{have[0]}.{have[1]}; the kernels need 8.0 (Ampere) or newer: use --device cpu"
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, checkpoint: str) -> torch.dtype:
    """`auto` keeps the checkpoint's dtype."""
    return DTYPES[checkpoint if name == "auto" else name]


def host_available(root: Path = Path("/")) -> int:
    """Bytes the host can still give: MemAvailable, or what the container's limit leaves where that is lower.

    Cached files that nobody uses count as free there too: the system takes them back. `root`: of /proc, /sys.
    """
    available = None
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if available is None:
        raise ConfigError("cannot read MemAvailable; give --device-memory and --host-memory")
    try:
        group = root / "sys/fs/cgroup"
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= sum(int(value) for name, value, *_ in stat if name == "inactive_file")
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def small_stacks(device: torch.device) -> None:
    """Have a GPU's driver keep `STACK` bytes a thread for kernels whose stack no compiler could tell.

    It keeps them for every thread that the card can hold: of its 1,024 bytes 0.28 GB on an H200. A kernel
    known to need more gets more when it is launched. `device` is current; applies to the whole process.
    """
    torch.zeros(1, device=device)  # the context must stand
    set_stack = 0  # CU_LIMIT_STACK_SIZE
    if error := ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(set_stack, ctypes.c_size_t(STACK)):
        logger.warning("the driver keeps its own size of stacks (error %d): 0.2 GB more than planned", error)


def available_memory(device: torch.device) -> int:
    """Bytes a share of which the engine may take: a GPU's total memory, or what the host has free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_available()
