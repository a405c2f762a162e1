"""The engine's flags, the same for the server and the benchmarks.

Room: the command line's way to `EngineConfig`. Rule: one flag a field, named as in vLLM where it means the
same; no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

from .config import POLICIES, EngineConfig, parse_size

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Every field of `EngineConfig` but the model."""
    default = EngineConfig(model="")
    model = parser.add_argument_group("model")
    model.add_argument("--tokenizer", help="folder or Hub id, where it is not the model's")
    model.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    model.add_argument("--load-format", default="auto", choices=["auto", "safetensors", "dummy"])
    model.add_argument("--dummy-routing", metavar="uniform|model:FILE|trace:FILE",
                       help="with --load-format dummy: choose experts as real models do")  # fmt: skip
    model.add_argument("--revision")
    model.add_argument("--trust-remote-code", action="store_true")
    model.add_argument("--seed", type=int, default=0)

    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    engine.add_argument(
        "--max-model-len", type=count, metavar="N",
        help="tokens of prompt and output together: 32768, 32k (32000), 32K (32768), 1.5m or 1M",
    )  # fmt: skip
    engine.add_argument("--max-num-seqs", type=int, default=default.max_num_seqs, metavar="N")
    engine.add_argument("--max-num-batched-tokens", type=count, default=default.max_num_batched_tokens,
                        metavar="N")  # fmt: skip
    engine.add_argument("--block-size", type=int, default=default.block_size, metavar="TOKENS")
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    engine.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    engine.add_argument("--schedule-replay", action="store_true",
                        help="plan steps by token counts alone, never by predicted time")  # fmt: skip
    engine.add_argument("--debug-pool", action="store_true", help="check every page after every step (slow)")

    memory = parser.add_argument_group("memory (sizes: bytes, '24GB' = 24e9, '24GiB' = 24 * 2^30)")
    memory.add_argument("--device-memory", metavar="SIZE", help="cap on every byte taken on the device")
    memory.add_argument("--host-memory", metavar="SIZE", help="cap on the experts' host copies")
    memory.add_argument("--gpu-memory-utilization", type=float, default=default.gpu_memory_utilization,
                        metavar="SHARE", help="the same cap as a share of the device")  # fmt: skip
    memory.add_argument("--memory-policy", default=default.memory_policy, choices=POLICIES)
    memory.add_argument("--resident-experts", type=int, metavar="N", help="for --memory-policy static")
    memory.add_argument("--max-boundary-wait", type=float, default=default.max_boundary_wait,
                        metavar="SECONDS")  # fmt: skip
    memory.add_argument("--ttft-slo", type=float, metavar="MS",
                        help="objective of economic: milliseconds to the first token")  # fmt: skip
    memory.add_argument("--itl-slo", type=float, metavar="MS",
                        help="objective of economic: milliseconds between tokens")  # fmt: skip


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's part of the flags, checked."""
    names = {f.name for f in dataclasses.fields(EngineConfig)}
    chosen: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
    for name in ("device_memory", "host_memory"):
        if chosen[name] is not None:
            chosen[name] = parse_size(chosen[name], f"--{name.replace('_', '-')}")
    config = EngineConfig(**chosen)
    config.check()
    return config


def count(text: str) -> int:
    """A count such as 4096, 1.5k (1000s) or 32K (1024s, whole ones only), as vLLM reads it."""
    match = re.fullmatch(r"(\d+)([kKmM]?)|(\d*\.\d+)([km])", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"cannot read {text!r} as a count; write 32768, 32k or 32K")
    if match[1]:
        return int(match[1]) * _COUNT_UNITS[match[2]]
    return round(float(match[3]) * _COUNT_UNITS[match[4]])
