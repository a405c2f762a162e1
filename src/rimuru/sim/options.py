"""The flags that every simulation shares: model, machine, engine and load.

Room: the simulator's command line. Rule: flags become the same `EngineConfig` the server gets; everything
wrong with them is one error that names the flag.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rimuru.engine.config import EngineConfig, parse_size
from rimuru.models.config import ModelConfig, load_model_config
from rimuru.policy.cost import GPUS, ZERO_COPY, Factors, gpu

from .engine import Hardware
from .trace import Arrival, read_trace, shape

PCIE4 = 0.5  # of a PCIe 5 link


def add_workload(parser: argparse.ArgumentParser, policy: str = "economic") -> None:
    """Model, machine, engine and load."""
    parser.add_argument("--model", required=True, help="folder with config.json, or a Hub id")
    parser.add_argument("--gpu", required=True, help=", ".join(GPUS))
    parser.add_argument("--pcie", type=int, choices=(4, 5), help="the link's generation; default: the card's")
    parser.add_argument("--trace", required=True, metavar="FILE", help="CSV of request lengths")
    parser.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals a second; else the trace's")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N rows")
    parser.add_argument("--output-scale", type=float, default=1.0, metavar="X", help="output lengths times X")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-policy", default=policy, metavar="P[,P...]")
    parser.add_argument("--resident-experts", type=int, metavar="N", help="with --memory-policy static")
    parser.add_argument("--device-memory", metavar="SIZE", help="default: 0.9 of the card's")
    parser.add_argument("--host-memory", metavar="SIZE", help="cap on the experts' host copies")
    parser.add_argument("--reserve", metavar="SIZE", help="device bytes that are neither weights nor pages")
    parser.add_argument("--max-num-seqs", type=int, default=128, metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N")
    parser.add_argument("--max-model-len", type=int, metavar="N")
    parser.add_argument("--max-boundary-wait", type=float, default=2.0, metavar="S")
    parser.add_argument("--ttft-slo", type=float, metavar="MS")
    parser.add_argument("--itl-slo", type=float, metavar="MS")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--routing", default="uniform", metavar="R", help="uniform, a model's .json, a .npz")
    parser.add_argument(
        "--overlap", choices=("layer", "step"), default="layer",
        help="misses read in place beside their layer, or prefetched beside the whole step",
    )  # fmt: skip


def machine(args: argparse.Namespace) -> Hardware:
    """The hardware that the flags describe."""
    card = gpu(args.gpu)
    if args.pcie:
        best = max(g.link_bytes_s for g in GPUS.values())
        card = replace(card, link_bytes_s=best * (PCIE4 if args.pcie == 4 else 1.0))
    if args.overlap == "layer":
        card = replace(card, link_bytes_s=card.link_bytes_s * ZERO_COPY)
    reserve = None if args.reserve is None else parse_size(args.reserve, "--reserve")
    return Hardware(card, Factors(), args.overlap, reserve)


def engine_config(args: argparse.Namespace, policy: str) -> EngineConfig:
    """The engine's flags under one policy."""
    options: dict[str, Any] = {
        name: parse_size(value, "--" + name.replace("_", "-"))
        for name, value in (("device_memory", args.device_memory), ("host_memory", args.host_memory))
        if value is not None
    }
    config = EngineConfig(
        model=str(args.model), memory_policy=policy, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens, max_model_len=args.max_model_len,
        max_boundary_wait=args.max_boundary_wait, enable_prefix_caching=not args.no_prefix_caching,
        resident_experts=args.resident_experts if policy == "static" else None, **options,
    )  # fmt: skip
    config.check()
    return config


def model_of(name: str) -> ModelConfig:
    """The model's configuration, from a folder or the Hub."""
    if Path(name).is_dir():
        return load_model_config(name)
    from rimuru.models.registry import resolve_model  # needs torch

    return load_model_config(resolve_model(name, weights=False))


def workload(args: argparse.Namespace) -> list[Arrival]:
    """The requests to come."""
    return shape(
        read_trace(args.trace), requests=args.requests, rate=args.rate, seed=args.seed,
        output_scale=args.output_scale, source=args.trace,
    )  # fmt: skip
