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
    switch = argparse.BooleanOptionalAction
    # fmt: off
    model = parser.add_argument_group("model")
    model.add_argument("--tokenizer", metavar="MODEL", help="folder or Hub id; default: the model's own")
    model.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"],
                       help="of weights and KV; default auto, the model's")
    model.add_argument("--load-format", default="auto", choices=["auto", "safetensors", "dummy"],
                       help="auto is safetensors, dummy makes random weights; default auto")
    model.add_argument("--dummy-routing", metavar="uniform|model:FILE|trace:FILE",
                       help="with --load-format dummy: choose experts as real models do; default: as the "
                       "random router does")
    model.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the Hub; default: main")
    model.add_argument("--trust-remote-code", action="store_true",
                       help="let a tokenizer run code of its own; off by default")
    model.add_argument("--seed", type=int, default=0, metavar="N",
                       help="of sampling and of random weights; default %(default)s")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="auto",
                        help="auto, cpu, cuda or cuda:N; default auto, a GPU where there is one")
    engine.add_argument(
        "--max-model-len", type=count, metavar="N",
        help="tokens of prompt and output together: 32768, 32k (32000), 32K (32768), 1.5m or 1M; default: "
        "the model's",
    )
    engine.add_argument("--max-num-seqs", type=int, default=default.max_num_seqs, metavar="N",
                        help="requests that run at once, the others wait; default %(default)s")
    engine.add_argument("--max-num-batched-tokens", type=count, default=default.max_num_batched_tokens,
                        metavar="N", help="tokens of a step, fewer take less workspace; default %(default)s")
    engine.add_argument("--block-size", type=int, default=default.block_size, metavar="TOKENS",
                        help="tokens in a block of KV, the unit of prefix caching; default %(default)s")
    engine.add_argument("--enable-prefix-caching", action=switch, default=default.enable_prefix_caching,
                        help="keep the KV of ended requests for prompts that begin alike; on by default")
    engine.add_argument("--enforce-eager", action=switch, default=default.enforce_eager,
                        help="no CUDA graphs: slower steps; off by default")
    engine.add_argument("--schedule-replay", action="store_true",
                        help="plan steps by token counts alone, never by predicted time; off by default")
    engine.add_argument("--debug-pool", action="store_true",
                        help="check every page after every step (slow); off by default")

    memory = parser.add_argument_group("memory (sizes: bytes, '24GB' = 24e9, '24GiB' = 24 * 2^30)")
    memory.add_argument("--device-memory", metavar="SIZE",
                        help="cap on every byte taken on the device; default: the share below of a GPU, on a "
                        "CPU what the model can use, at most half of what is free")
    memory.add_argument("--host-memory", metavar="SIZE",
                        help="cap on the experts' host copies; default: 0.8 of what is free")
    memory.add_argument("--gpu-memory-utilization", type=float, default=default.gpu_memory_utilization,
                        metavar="SHARE", help="the device's cap as a share of a GPU; default %(default)s")
    memory.add_argument("--memory-policy", default=default.memory_policy, choices=POLICIES,
                        help="when experts lend pages to KV: where it pays, on demand (reactive), or never; "
                        "default %(default)s")
    memory.add_argument("--resident-experts", type=int, metavar="N",
                        help="experts in the pool, with --memory-policy static; no default")
    memory.add_argument("--max-boundary-wait", type=float, default=default.max_boundary_wait,
                        metavar="SECONDS", help="economic lends to a request first in the queue for so long, "
                        "however dear that is; default %(default)s")
    memory.add_argument("--ttft-slo", type=float, metavar="MS",
                        help="objective of economic: milliseconds to the first token; default: none")
    memory.add_argument("--itl-slo", type=float, metavar="MS",
                        help="objective of economic: milliseconds between tokens; default: none")
    # fmt: on


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
