"""Launches under `compiling`, then what is left to compile; prints one JSON object.

Run in a process of its own (`python -m kernels.compile_ahead`). The chip is not there: nothing is launched.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .compile_only import _pretend


def launches() -> None:
    """As the engine makes them, of two kernels, each with two specialisations and again."""
    embed, tables = (import_module(f"rimuru.kernels.triton.{n}") for n in ("embed", "tables"))
    table, slots = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32)
    cells, edited = torch.zeros(8, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    for _ in range(2):
        for latest in (None, slots):
            embed.embed(slots, table, slots, latest)
        for count in (1, 5, 7, 16):
            tables.apply_edits(edited, cells[:count], cells[:count])


def main() -> None:
    _pretend(90)
    from rimuru.kernels.triton.ahead import compiling

    compiled: list[str] = []
    launchers: list[str] = []  # built from (source, metadata)
    driver.active.launcher_cls = lambda source, metadata: launchers.append(metadata.name)
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
    run = JITFunction.run
    with compiling():
        launches()
    during, restored = len(compiled), JITFunction.run is run
    JITFunction.run = lambda kernel, *args, warmup, **options: run(kernel, *args, warmup=True, **options)
    launches()
    after = len(compiled) - during
    print(json.dumps({"during": during, "launchers": len(launchers), "after": after, "restored": restored}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        main()
    sys.exit()
