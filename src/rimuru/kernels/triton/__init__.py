"""The Triton back end: the names of `rimuru.kernels.reference`, each from the module that owns it.

Room: dispatch for GPUs. Rule: nothing is imported until it is asked for, so that a process pays
(and needs) only the kernels it uses.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "linear": "..reference",  # cuBLAS
    "rope_table": "..reference",
    "rms_norm": ".norm_rope",
    "qkv_to_cache": ".norm_rope",
    "attention": ".attention",
    "route": ".route",
    "moe": ".moe",
    "moe_gather": ".moe",
    "apply_edits": ".tables",
    "move_pages": ".tables",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value
