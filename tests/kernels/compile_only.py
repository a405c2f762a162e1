"""Compile Triton kernels for a chip that is not there, and read what the assembler says of them.

Run in a process of its own (`python -m kernels.compile_only moe 90`, optionally with how many of
the kernels; `attention+sampling` for both): the interpreter, where it is on, changes every kernel of
a process. Prints one JSON object a line: name, registers, spills (bytes of stack of a thread, which
nothing else uses), shared memory, and whether wgmma and TMA are used. What is compiled stays in
Triton's cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from itertools import chain, islice
from pathlib import Path

TESTS = Path(__file__).parent.parent
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}  # bytes a block, CUDA guide


def compiled(subject: str, chip: int, first: int | None = None) -> dict[str, dict]:
    """Reports of `subject`'s (first) kernels on `chip` (90 for sm_90), by name, from a fresh process."""
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"}
    command = [sys.executable, "-m", "kernels.compile_only", subject, str(chip)]
    if first is not None:
        command.append(str(first))
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return {r["name"]: r for r in map(json.loads, run.stdout.splitlines())}


def _pretend(chip: int) -> None:
    """Answer what the Triton runtime asks of a driver up to the launch itself."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Utils:
        @staticmethod
        def get_device_properties(_):
            return {
                "max_shared_mem": SHARED_LIMIT[chip], "multiprocessor_count": 132,
                "max_num_regs": 65536, "warpSize": 32,
            }  # fmt: skip

    class Driver:
        utils = Utils

        def get_current_target(self):
            return GPUTarget("cuda", chip, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, _=0):
            return 0

        def get_active_torch_device(self):
            return torch.device("cpu")

        def map_python_to_cpp_type(self, kind):
            return kind

        def launcher_cls(self, *_, **__):
            return lambda *a, **k: None

    driver.set_active(Driver())


def _inspect(kernel) -> dict:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        text = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return {
        "registers": int(used[1]),
        "spills": int(used[2]) + int(used[3]),
        "shared": kernel.metadata.shared,
        "wgmma": "wgmma.mma" in kernel.asm["ptx"],
        "tma": "cp.async.bulk.tensor" in kernel.asm["ptx"],
    }


def main(subject: str, chip: int, first: int | None = None) -> None:
    _pretend(chip)
    # A subject module has `kernels(chip)` that yields (name, what `kernel.warmup` returns).
    kernels: Iterator = chain.from_iterable(
        import_module(f"kernels.compile_{part}").kernels(chip) for part in subject.split("+")
    )
    for name, kernel in islice(kernels, first):
        print(json.dumps({"name": name} | _inspect(kernel)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
