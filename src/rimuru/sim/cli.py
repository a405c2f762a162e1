"""`rimuru simulate`: serve a trace on paper and see what each memory policy would do.

Room: the simulator's command line. Rule: one sub-command a module; nothing is computed here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import case_study, fleet, residency
from .engine import Simulation
from .options import (
    add_workload,
    check_reachable,
    engine_config,
    machine,
    model_of,
    objectives,
    policies,
    workload,
)
from .report import assumptions, check_writable, plots, summary, table
from .routing import load_routing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`run`, `case-study`, `residency` and `fleet`."""
    parser.description = (
        "Steps the engine's own scheduler, pool and policies with predicted times; no GPU, no weights."
    )
    parser.epilog = "`rimuru simulate COMMAND --help` lists a command's flags; docs/simulator.md says more."
    commands = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)

    def add(name: str, summary: str, more: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=more, allow_abbrev=False)

    run_parser = add(
        "run",
        "a trace under one or several memory policies",
        "Serves a trace on one GPU under each memory policy and prints a line for each: output tokens a "
        "second, time to first token (TTFT), time per output token (TPOT), experts in the pool, bytes over "
        "the link.",
    )
    add_workload(run_parser)
    run_parser.add_argument("--plots", metavar="FILE", help="write SVG charts over time")
    run_parser.add_argument("--json", action="store_true", help="print JSON")
    run_parser.set_defaults(call=run_policies)
    study = add(
        "case-study",
        "Qwen1.5-MoE on an RTX 5090 under four ways to share its memory",
        "Qwen1.5-MoE on an RTX 5090 under four ways to share its memory, beside the published peaks and "
        "steps. The setting is part of the result and has no flags.",
    )
    replay = add(
        "residency",
        "recorded routing replayed: which experts to keep",
        "Replays recorded routing and counts misses under lru, lfu, static, ours and Belady, which knows "
        "the future.",
    )
    many = add(
        "fleet",
        "many replicas behind a router that knows where prefixes are",
        "Serves a steady load of conversations on many replicas behind a router. Of a large fleet a sample "
        "is stepped with its share of the load, and counts and rates are scaled.",
    )
    for sub, module in ((study, case_study), (replay, residency), (many, fleet)):
        module.add_arguments(sub)
        sub.set_defaults(call=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen simulation."""
    if getattr(args, "plots", None):
        check_writable(args.plots)
    return args.call(args)


def run_policies(args: argparse.Namespace) -> int:
    """Serve the same requests under each policy."""
    ttft, itl = objectives(args)
    configs = {policy: engine_config(args, policy) for policy in policies(args)}
    hardware, model, arrivals = machine(args), model_of(args.model), workload(args)
    check_reachable(ttft, itl, model, "auto", [hardware])
    routing = load_routing(
        args.routing, len(model.moe_layers), model.num_experts, model.top_k, args.model, args.seed
    )
    sims: dict[str, Simulation] = {}
    results: dict[str, dict[str, Any]] = {}
    for policy, config in configs.items():
        # The server takes objectives under `economic` only; the others are measured by them.
        own = (ttft, itl) if policy == "economic" else (None, None)
        sim = Simulation(model, config, hardware, routing, ttft_slo_ms=own[0], itl_slo_ms=own[1])
        sim.run(arrivals)
        sims[policy] = sim
        results[policy] = summary(sim, ttft_slo_ms=ttft, itl_slo_ms=itl)
    if args.plots:
        rate = "" if args.rate is None else f", {args.rate:g} a second"
        title = (
            f"{Path(args.model).name} on {hardware.card.name} at {sim.plan.device_bytes / 1e9:.1f} GB: "
            f"{len(arrivals):,} requests of {Path(args.trace).stem}{rate}"
        )
        Path(args.plots).write_text(plots(title, sims), encoding="utf-8")
    if args.json:
        given = assumptions(next(iter(sims.values())), hardware)
        given |= {
            "trace": str(args.trace), "requests": len(arrivals), "rate": args.rate, "seed": args.seed,
            "output_scale": args.output_scale,
        }  # fmt: skip
        print(json.dumps({"assumptions": given, "policies": results}, indent=1))
    else:
        print(table(results))
        for sim in sims.values():
            for line in sim.refused[:3]:
                print(f"refused: {line}")
    return 0
