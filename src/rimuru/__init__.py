"""rimuru: serve Mixture-of-Experts models whose weights and KV cache share one page pool.

`LLM` and `SamplingParams` are loaded on first use, so that `import rimuru` stays light.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rimuru.engine.llm import LLM, CompletionOutput, RequestOutput
    from rimuru.engine.request import SamplingParams

# OpenMP's waiting threads spin by default; where cores are shared that starves the very thread they wait
# for (a decode step on two busy cores took thirty times as long). Read once, when torch loads libgomp.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "rimuru.engine.llm",
    "CompletionOutput": "rimuru.engine.llm",
    "RequestOutput": "rimuru.engine.llm",
    "SamplingParams": "rimuru.engine.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
