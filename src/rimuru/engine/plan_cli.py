"""`rimuru plan MODEL`: where every byte would go, without reading a weight.

Room: the command line's view of `plan.py`. Rule: for a model and format the engine serves it prints what
the engine would do; anything else is surveyed, and the plan says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from rimuru.errors import ConfigError, MemoryPlanError
from rimuru.models.config import FAMILIES, read_json
from rimuru.models.registry import resolve_model
from rimuru.policy.cost import GPUS, gpu
from rimuru.pool.allocator import Allocator
from rimuru.pool.draw import text_map
from rimuru.pool.geometry import Kind

from .arguments import count
from .config import POLICIES, EngineConfig, parse_size
from .core import local_models, plan_for
from .device import choose_device, host_available
from .plan import MemoryPlan, plan_memory, show
from .survey import FORMATS, survey

DEFAULTS = EngineConfig(model="")
ON_CPU = f"planned for the CPU, for want of a GPU; --gpu NAME plans for a card: {', '.join(GPUS)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that change the plan."""
    parser.add_argument("model", metavar="MODEL", help="folder with config.json, Hub id, or 'demo'")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--gpu", metavar="NAME", help=f"plan for a card: {', '.join(GPUS)}; default: this machine's device"
    )
    machine.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="of the device, default 0.9"
    )
    machine.add_argument(
        "--device-memory", metavar="SIZE", help="cap on the device: bytes, 24GB (1e9) or 24GiB (2^30)"
    )
    machine.add_argument(
        "--host-memory", metavar="SIZE", help="cap on the experts' host copies; default: what is free here"
    )
    machine.add_argument("--device", metavar="D", help="cpu or cuda; default: cuda where there is one")
    machine.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="plan one of N ranks; default 1"
    )
    engine = parser.add_argument_group("engine, as in `rimuru serve`")
    engine.add_argument(
        "--memory-policy", choices=POLICIES, metavar="P", help=f"{', '.join(POLICIES)}; default economic"
    )
    engine.add_argument(
        "--resident-experts", type=int, metavar="N", help="experts in the pool, with --memory-policy static"
    )
    for flag, what in (
        ("--max-model-len", "longest request in tokens; default: the model's"),
        ("--max-num-seqs", f"requests that run at once; default {DEFAULTS.max_num_seqs}"),
        ("--max-num-batched-tokens", f"tokens of a step; default {DEFAULTS.max_num_batched_tokens}"),
    ):
        engine.add_argument(flag, type=int if flag == "--max-num-seqs" else count, metavar="N", help=what)
    engine.add_argument("--dtype", metavar="T", help="bfloat16, float16 or float32; default: the model's")
    engine.add_argument(
        "--expert-format", choices=FORMATS, default="bf16", metavar="F",
        help=f"how experts are stored, to see what would fit: {', '.join(FORMATS)}; default bf16, which is "
        "what is served",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--map", action="store_true", help="draw the pool, filled to the brim")
    output.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; a plan that cannot start raises `MemoryPlanError` with one that does."""
    if args.tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size must be at least 1, got {args.tensor_parallel_size}")
    config = config_of(args)
    if args.gpu:
        card = gpu(args.gpu)
        cap = config.device_memory or int(card.memory_bytes * config.gpu_memory_utilization)
        if cap > card.memory_bytes:
            raise ConfigError(
                f"--device-memory {args.device_memory} is above the {show(card.memory_bytes)} of {card.name}"
            )
        config.device_memory = cap
    plan = _plan(config, args)
    print(json.dumps(plan.to_json(), indent=1) if args.json else plan.describe())
    if args.map:
        print("\n" + _map(plan))
    return 0


def config_of(args: argparse.Namespace) -> EngineConfig:
    """The engine's flags among `args`, checked; sizes in bytes."""
    names = {f.name for f in dataclasses.fields(EngineConfig)} - {"ttft_slo", "itl_slo"}
    options = {k: v for k, v in vars(args).items() if k in names and v is not None}
    for name in ("device_memory", "host_memory"):
        if name in options:
            options[name] = parse_size(options[name], "--" + name.replace("_", "-"))
    config = EngineConfig(**options)
    config.check()
    return config


def _plan(config: EngineConfig, args: argparse.Namespace) -> MemoryPlan:
    folder = resolve_model(config.model, config.revision, local=local_models(), weights=False)
    family = read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else ""
    served = family in FAMILIES and args.tensor_parallel_size == 1 and args.expert_format == "bf16"
    if served and not args.gpu:
        unasked = config.device == "auto" and choose_device("auto").type == "cpu"
        try:
            plan = plan_for(config)
        except MemoryPlanError as error:
            if not unasked:
                raise
            raise MemoryPlanError(f"{error}\n{ON_CPU}") from None
        if unasked:
            plan.notes.append(ON_CPU)
        return plan
    found = survey(
        folder, tp=args.tensor_parallel_size, form=args.expert_format, block_tokens=config.block_size
    )
    if config.device_memory is None:
        raise ConfigError(
            "give --gpu NAME or --device-memory SIZE: this plan is not for the machine it runs on"
        )
    host = host_available()
    return plan_memory(
        config,
        found.sizes(config),
        device_available=config.device_memory,
        host_available=host,
        device_is_host=False,
    )


def _map(plan: MemoryPlan) -> str:
    """The pool as the plan fills it at start: resident experts, then KV in all that is left."""
    geometry = plan.geometry
    try:
        books = Allocator(geometry, plan.pool_bytes)
    except ValueError as error:
        raise MemoryPlanError(f"there is no pool to draw: {error}") from None
    books.take(plan.expert_class, plan.experts_resident, "experts")
    kv = [g.page_class for g in geometry.groups_of(Kind.KV)]
    for cls in dict.fromkeys(kv):
        share = books.obtainable(cls) * kv.count(cls) // len(kv)
        books.take(cls, share, "kv")
    return text_map(books, width=72, rows=32)
