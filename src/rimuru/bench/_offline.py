"""An engine for benchmarks without a server.

Room: benchmarks. Rule: flags are those of `rimuru serve`, by the fields of `EngineConfig`.
"""

from __future__ import annotations

import argparse

from rimuru.engine.config import POLICIES
from rimuru.engine.llm import LLM

_FLAGS = ("tokenizer", "dtype", "device", "load_format", "dummy_routing", "device_memory", "host_memory",
          "max_model_len", "max_num_seqs", "max_num_batched_tokens", "memory_policy",
          "enable_prefix_caching")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="local folder, Hub id, or 'demo'")
    parser.add_argument("--tokenizer")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dummy-routing", metavar="uniform|model:FILE|trace:FILE")
    parser.add_argument("--device-memory", metavar="SIZE")
    parser.add_argument("--host-memory", metavar="SIZE")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--memory-policy", default="economic", choices=POLICIES)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)


def load(args: argparse.Namespace) -> LLM:
    """The engine that the flags describe, its model loaded."""
    return LLM(args.model, **{name: getattr(args, name) for name in _FLAGS})
