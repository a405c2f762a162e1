"""Many replicas behind a router that knows which of them holds a conversation's prefix.

Room: the simulator. Rule: replicas are whole `Simulation`s; the router sees what a real one sees: what it
sent where, and what has come back.

A large fleet is sampled: of N replicas, S are stepped with S/N of the load, and the router chooses among
those S. With loads of two choices or bounded affinity the spread over replicas hardly depends on S.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.errors import ConfigError

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
from .report import assumptions
from .routing import load_routing
from .trace import Arrival, spread_turns

ROUTERS = ("prefix", "least", "random")


@dataclass(slots=True)
class Router:
    """Chooses a replica for each request from the requests outstanding at each.

    `prefix`: where the conversation was last, unless that replica has `slack` requests more than
    `bound` times the mean; else, and for new conversations, the less loaded of two drawn at random.
    `least`: the less loaded of two. `random`: any.
    """

    kind: str
    bound: float = 1.25
    slack: int = 4
    seed: int = 0
    homes: dict[int, int] = field(default_factory=dict)
    moved: int = 0  # turns sent away from their prefix
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def choose(self, conversation: int, outstanding: Sequence[int]) -> int:
        """The replica's index."""
        n = len(outstanding)
        if self.kind == "random" or n == 1:
            return self._rng.randrange(n)
        home = self.homes.get(conversation) if self.kind == "prefix" else None
        if home is not None:
            if outstanding[home] <= self.bound * sum(outstanding) / n + self.slack:
                return home
            self.moved += 1
        a, b = self._rng.sample(range(n), 2)
        chosen = a if outstanding[a] <= outstanding[b] else b
        self.homes[conversation] = chosen
        return chosen


def serve(replicas: Sequence[Simulation], router: Router, arrivals: Sequence[Arrival]) -> None:
    """Serve all arrivals (in order of time) to the end, all replicas on one clock."""
    busy: list[tuple[float, int]] = []  # (clock, replica) of those with work

    def catch_up(until: float) -> None:
        while busy and busy[0][0] < until:
            _, i = heapq.heappop(busy)
            replicas[i].advance(min(until, replicas[i].now + 0.05))
            if replicas[i].scheduler.has_work:
                heapq.heappush(busy, (replicas[i].now, i))

    outstanding = [0] * len(replicas)
    for number, arrival in enumerate(arrivals):
        catch_up(arrival.at)
        for i, replica in enumerate(replicas):
            outstanding[i] = len(replica.scheduler.requests)
        i = router.choose(arrival.conversation, outstanding)
        replica = replicas[i]
        idle = not replica.scheduler.has_work
        replica.advance(arrival.at)
        if replica.add(arrival, number) and idle:
            heapq.heappush(busy, (replica.now, i))
    catch_up(float("inf"))


def summary(
    replicas: Sequence[Simulation],
    router: Router,
    scale: float,
    ttft_slo_ms: float | None = None,
    itl_slo_ms: float | None = None,
) -> dict[str, Any]:
    """The fleet's numbers; counts and rates are `scale` times the sample's.

    With objectives, `met_objectives` is the share of requests whose first token came within `ttft_slo_ms`
    and the others within `itl_slo_ms` of each other in the mean. Raises `ConfigError` where all were refused.
    """
    samples = [s for replica in replicas for s in replica.scheduler.samples]
    if not samples:
        raise ConfigError(f"no request can be served: {next(r for x in replicas for r in x.refused)}")
    each = np.array([sum(s.output_tokens for s in r.scheduler.samples) for r in replicas], float)
    queries = sum(r.scheduler.prefix_queries for r in replicas)
    ttft = np.array([s.ttft for s in samples])
    span = max(r.series.clock[-1] for r in replicas if r.series.clock)
    out = {
        "replicas": round(len(replicas) * scale),
        "replicas_stepped": len(replicas),
        "requests": round(len(samples) * scale),
        "refused": round(sum(len(r.refused) for r in replicas) * scale),
        "seconds": span,
        "output_tokens_per_s": float(each.sum()) * scale / span,
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "prefix_hit_rate": sum(r.scheduler.prefix_hits for r in replicas) / max(1, queries),
        "moved_turns": round(router.moved * scale),
        "preemptions": round(sum(sum(r.scheduler.preemptions.values()) for r in replicas) * scale),
        "busiest_to_mean": float(each.max() / each.mean()),
        "peak_concurrency_a_replica": max(max(r.series.running, default=0) for r in replicas),
        "link_bytes": round(sum(sum(r.series.link_bytes) for r in replicas) * scale),
    }
    if ttft_slo_ms is not None or itl_slo_ms is not None:
        tpot = np.array([s.decode_time / max(1, s.output_tokens - 1) for s in samples])
        met = (ttft * 1e3 <= (ttft_slo_ms or np.inf)) & (tpot * 1e3 <= (itl_slo_ms or np.inf))
        out["met_objectives"] = float(met.mean())
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload's flags; `--rate` is the whole fleet's."""
    add_workload(parser)
    parser.add_argument("--replicas", type=int, default=1000, metavar="N")
    parser.add_argument("--sample", type=int, default=16, metavar="S", help="replicas that are stepped")
    parser.add_argument("--router", default="prefix", metavar="R[,R...]", help=", ".join(ROUTERS))
    parser.add_argument("--think", type=float, default=20.0, metavar="S", help="mean seconds between turns")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Serve the load under each router."""
    routers = args.router.split(",")
    for name in routers:
        if name not in ROUTERS:
            raise ConfigError(f"--router {name!r} is unknown; choose of {', '.join(ROUTERS)}")
    for flag, count in (("--replicas", args.replicas), ("--sample", args.sample)):
        if count < 1:
            raise ConfigError(f"{flag} must be at least 1, got {count}")
    if args.rate is None:
        raise ConfigError("--rate R is needed: requests a second of the whole fleet")
    if not 0 <= args.think < float("inf"):
        raise ConfigError(f"--think must be at least 0 seconds, got {args.think:g}")
    policy, *others = policies(args)
    if others:
        raise ConfigError(f"a fleet runs under one --memory-policy, got {args.memory_policy}")
    ttft, itl = objectives(args)
    stepped = min(args.sample, args.replicas)
    hardware, model = machine(args), model_of(args.model)
    check_reachable(ttft, itl, model, "auto", [hardware])
    rows = workload(args)  # their times are made anew, turn after turn
    arrivals = spread_turns(rows, args.rate * stepped / args.replicas, args.think, seed=args.seed)
    routing = load_routing(
        args.routing, len(model.moe_layers), model.num_experts, model.top_k, args.model, args.seed
    )
    config = engine_config(args, policy)
    own = (ttft, itl) if policy == "economic" else (None, None)
    results: dict[str, dict[str, Any]] = {}
    for name in routers:
        replicas = [
            Simulation(model, config, hardware, routing, ttft_slo_ms=own[0], itl_slo_ms=own[1])
            for _ in range(stepped)
        ]
        router = Router(name, seed=args.seed)
        serve(replicas, router, arrivals)
        results[name] = summary(replicas, router, args.replicas / stepped, ttft, itl)
    if args.json:
        given = assumptions(replicas[0], hardware) | {
            "trace": Path(args.trace).name, "rate": args.rate, "think_s": args.think, "seed": args.seed,
            "sampled": f"{stepped} of {args.replicas} replicas are stepped, with as much of the load",
        }  # fmt: skip
        print(json.dumps({"assumptions": given, "routers": results}, indent=1))
        return 0
    print(f"{stepped} of {args.replicas} replicas stepped, counts and rates scaled to all")
    for name, result in results.items():
        print(f"{name}:")
        for key, value in result.items():
            print(f"  {key:<28}{value:,.3f}" if isinstance(value, float) else f"  {key:<28}{value:,}")
    return 0
