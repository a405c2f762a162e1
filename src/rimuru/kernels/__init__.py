"""Compute kernels: one contract (`types`, `reference`) and its back ends.

Room: everything that multiplies. Rule: a back end is a module with the functions of `reference`,
same names, same meaning; callers ask `backend_for` and never import one by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def backend_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The fastest back end for weights and activations of `dtype` on `device`.

    Back ends are imported when first asked for: `triton` needs a GPU driver, `cpu` compiles its
    kernels. What no other back end covers runs on the torch twin, `reference`.
    """
    if device.type == "cuda":
        name = "triton"
    elif device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
        name = "cpu"
    else:
        name = "reference"
    return importlib.import_module(f"{__name__}.{name}")


def operation(ops: ModuleType, name: str) -> Callable[..., Any]:
    """The function `name` of a back end, or the torch twin where the back end has none of its own."""
    return getattr(ops, name, None) or getattr(importlib.import_module(f"{__name__}.reference"), name)
