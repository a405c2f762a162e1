"""The flags that simulations share: model, machine, engine, load and objectives.

Room: the simulator's command line. Rule: flags become the same `EngineConfig` the server gets; everything
wrong with them is one error that names the flag.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rimuru.engine.arguments import count
from rimuru.engine.config import POLICIES, EngineConfig, parse_size
from rimuru.engine.plan import show
from rimuru.engine.rates import model_cost
from rimuru.errors import ConfigError
from rimuru.models.config import DTYPE_BYTES, ModelConfig, load_model_config
from rimuru.policy.cost import GPU, GPUS, ZERO_COPY, CostModel, Factors, Step, gpu

from .engine import Hardware
from .trace import Arrival, read_trace, shape

PCIE4 = 0.5  # of a PCIe 5 link
DEFAULTS = EngineConfig(model="")


def add_workload(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """Model, machine, engine, load, objectives and assumptions; one or `several` policies."""
    machine = parser.add_argument_group("model and machine")
    machine.add_argument("--model", required=True, help="folder with config.json, or a Hub id")
    machine.add_argument("--gpu", required=True, metavar="NAME", help=f"one of {', '.join(GPUS)}")
    machine.add_argument("--device-memory", metavar="SIZE", help="cap on the device; default 0.9 of the card")
    machine.add_argument(
        "--host-memory", metavar="SIZE", help="cap on the experts' host copies; default 0.8 of 256 GiB"
    )
    add_load(parser)
    engine = parser.add_argument_group("engine, as in `rimuru serve`")
    engine.add_argument(
        "--memory-policy", default="economic", metavar="P[,P...]" if several else "P",
        help=f"of {', '.join(POLICIES)};{' several are compared;' if several else ''} default %(default)s",
    )  # fmt: skip
    engine.add_argument(
        "--resident-experts", type=int, metavar="N", help="experts in the pool, with --memory-policy static"
    )
    for flag, default, what in (
        ("--max-num-seqs", DEFAULTS.max_num_seqs, "requests that run at once"),
        ("--max-num-batched-tokens", DEFAULTS.max_num_batched_tokens, "tokens of a step"),
        ("--max-model-len", None, "longest request in tokens; default: the model's"),
    ):
        text = what if default is None else f"{what}; default %(default)s"
        kind = int if flag == "--max-num-seqs" else count
        engine.add_argument(flag, type=kind, default=default, metavar="N", help=text)
    engine.add_argument(
        "--max-boundary-wait", type=float, default=DEFAULTS.max_boundary_wait, metavar="S",
        help="seconds a request may stand first in the queue under economic before experts lend pages "
        "however dear that is; default %(default)s",
    )  # fmt: skip
    engine.add_argument("--no-prefix-caching", action="store_true", help="every prompt is computed whole")
    add_objectives(parser)
    assumed = add_assumptions(parser)
    assumed.add_argument(
        "--reserve", metavar="SIZE",
        help="device bytes that are neither weights nor pages; default: the bound `rimuru plan` takes",
    )  # fmt: skip


def add_load(parser: argparse.ArgumentParser, default_rows: int | None = None) -> argparse._ArgumentGroup:
    """Which requests come, and when. With `default_rows` there may be no load at all."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--trace", required=default_rows is None, metavar="FILE",
        help="CSV with columns prompt_tokens,output_tokens and maybe arrival_s,conv_id",
    )  # fmt: skip
    group.add_argument(
        "--rate", type=float, metavar="R",
        help="mean requests a second, arriving at random (Poisson); default: at the trace's arrival_s",
    )  # fmt: skip
    group.add_argument(
        "--requests", type=int, metavar="N",
        help="the first N rows, over again if there are fewer; default: "
        + ("all" if default_rows is None else f"{default_rows}, or all if there are fewer"),
    )  # fmt: skip
    group.add_argument(
        "--output-scale", type=float, default=1.0, metavar="X", help="the trace's output lengths times X"
    )
    group.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of random arrivals and routing; default 0"
    )
    return group


def add_objectives(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What is fast enough."""
    group = parser.add_argument_group("objectives")
    group.add_argument(
        "--ttft-slo", type=float, metavar="MS",
        help="milliseconds to the first token that are fast enough; economic weighs it",
    )  # fmt: skip
    group.add_argument(
        "--itl-slo", type=float, metavar="MS",
        help="milliseconds between tokens, mean of a request, that are fast enough; economic weighs it",
    )  # fmt: skip
    return group


def add_assumptions(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What is made up."""
    group = parser.add_argument_group("assumptions")
    group.add_argument("--pcie", type=int, choices=(4, 5), help="the link's generation; default: the card's")
    group.add_argument(
        "--routing", default="uniform", metavar="R",
        help="which experts are touched: uniform, FILE.json (routing models) or FILE.npz (recorded); "
        "default %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--overlap", choices=("layer", "step"), default="layer",
        help="missing experts are read in place beside their layer, or prefetched beside the whole step; "
        "default %(default)s",
    )  # fmt: skip
    return group


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def policies(args: argparse.Namespace) -> list[str]:
    """The names in `--memory-policy`."""
    names = args.memory_policy.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--memory-policy {name!r} is unknown; choose of {', '.join(POLICIES)}")
    if args.resident_experts is not None and "static" not in names:
        raise ConfigError("--resident-experts goes with --memory-policy static")
    return list(dict.fromkeys(names))


def objectives(args: argparse.Namespace) -> tuple[float | None, float | None]:
    """`--ttft-slo` and `--itl-slo`, milliseconds. Raises `ConfigError` for what is no time."""
    for flag, value in (("--ttft-slo", args.ttft_slo), ("--itl-slo", args.itl_slo)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag} must be more than 0 milliseconds, got {value:g}")
    return args.ttft_slo, args.itl_slo


def check_reachable(
    ttft: float | None, itl: float | None, model: ModelConfig, dtype: str, cards: Sequence[Hardware]
) -> None:
    """Raise `ConfigError` for objectives (milliseconds) below a step with one token on every card."""
    itemsize = DTYPE_BYTES[model.dtype if dtype == "auto" else dtype]
    needs = model_cost(model, model.expert_parameters * itemsize, itemsize)
    for flag, value, prompt in (("--ttft-slo", ttft, 1), ("--itl-slo", itl, 0)):
        step = Step(1, 1, prefill_tokens=prompt, touched=float(model.top_k))
        least, name = min(
            (CostModel(needs, hw.card, hw.factors, hw.overlap).seconds(step), hw.card.name) for hw in cards
        )
        if value is not None and value / 1e3 < least:
            raise ConfigError(
                f"{flag} {value:g} cannot be met: a step with one token takes {least * 1e3:.2f} ms on {name}"
            )


def machine(args: argparse.Namespace, card: GPU | None = None) -> Hardware:
    """The hardware that the flags describe, `card` in place of `--gpu`."""
    card = card or gpu(args.gpu)
    if args.device_memory is not None:
        check_cap(parse_size(args.device_memory, "--device-memory"), card)
    if args.pcie:
        best = max(g.link_bytes_s for g in GPUS.values())
        card = replace(card, link_bytes_s=best * (PCIE4 if args.pcie == 4 else 1.0))
    if args.overlap == "layer":
        card = replace(card, link_bytes_s=card.link_bytes_s * ZERO_COPY)
    size = getattr(args, "reserve", None)
    reserve = None if size is None else parse_size(size, "--reserve")
    return Hardware(card, Factors(), args.overlap, reserve)


def check_cap(cap: int, card: GPU) -> None:
    """Raise `ConfigError` where a cap in bytes is above what the card has."""
    if cap > card.memory_bytes:
        raise ConfigError(
            f"--device-memory {show(cap)} is above the {show(card.memory_bytes)} ({card.memory_bytes} bytes) "
            f"of {card.name}"
        )


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
