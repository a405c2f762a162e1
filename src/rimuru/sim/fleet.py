"""Many replicas behind a router that knows which of them holds a conversation's prefix.

Room: the simulator. Rule: replicas are whole `Simulation`s; the router sees what a real one sees: what it
sent where, and what has come back.

A large fleet is sampled: of N replicas, S are stepped with S/N of the load, and the router chooses among
those S. Means hardly depend on S; the busiest of many replicas is further out than the busiest of few
(`docs/simulator.md` has numbers).

The load is steady: conversations began long before the first second, so that from then on requests come at
their rate and at every turn. What was cached before is not, so the first seconds are not counted.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from .trace import Arrival

ROUTERS = ("prefix", "least", "random")
WARM_UP = 2.0  # times the mean pause between turns, until prefixes are cached
SLICE = 0.05  # seconds that a replica is stepped ahead of the others at most


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


def steady_load(
    rows: Sequence[Arrival], rate: float, think: float, seconds: float, seed: int = 0
) -> list[Arrival]:
    """`seconds` of requests at `rate` a second over all, whose conversations began as a Poisson process.

    Each turn comes `think` seconds after the one before it on average, finished or not. Conversations are
    those of `rows` in turn, over and over, each time with a number of its own.
    """
    rng = np.random.default_rng(seed)
    turns: dict[int, list[Arrival]] = {}
    for row in rows:
        turns.setdefault(row.conversation, []).append(row)
    talks = list(turns.values())
    begin, number = -think * max(map(len, talks)), 0
    out: list[Arrival] = []
    while begin < seconds:
        begin += rng.exponential(len(rows) / len(talks) / rate)
        talk = talks[number % len(talks)]
        gaps = rng.exponential(think, len(talk)) if len(talk) > 1 else np.zeros(1)
        at = begin
        for row, gap in zip(talk, gaps.tolist(), strict=True):
            if 0 <= at < seconds:
                out.append(replace(row, at=at, conversation=number))
            at += gap
        number += 1
    return sorted(out, key=lambda row: row.at)


class Fleet:
    """Replicas on one clock behind a router. Work before `since` seconds is done and not counted."""

    def __init__(self, replicas: Sequence[Simulation], router: Router, since: float = 0.0):
        self.replicas, self.router, self.since = replicas, router, since
        self._before = [0, 0, 0, 0]  # the counters at `since`
        self._busy: list[tuple[float, int]] = []  # (clock, replica) of those with work
        self._outstanding = [0] * len(replicas)
        self.until = 0.0  # the last arrival

    def serve(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all arrivals (in order of time) to the end."""
        warm = True
        for number, arrival in enumerate(arrivals):
            self._catch_up(arrival.at)
            if warm and arrival.at >= self.since:
                self._before, warm = self._counters(), False
            i = self.router.choose(arrival.conversation, self._outstanding)
            replica = self.replicas[i]
            idle = not replica.scheduler.has_work
            replica.advance(arrival.at)
            if replica.add(arrival, number) and idle:
                heapq.heappush(self._busy, (replica.now, i))
            self._outstanding[i] = len(replica.scheduler.requests)
        self.until = arrivals[-1].at
        self._catch_up(float("inf"))

    def _catch_up(self, until: float) -> None:
        busy, replicas = self._busy, self.replicas
        while busy and busy[0][0] < until:
            _, i = heapq.heappop(busy)
            replica = replicas[i]
            replica.advance(min(until, replica.now + SLICE))
            self._outstanding[i] = len(replica.scheduler.requests)
            if replica.scheduler.has_work:
                heapq.heappush(busy, (replica.now, i))

    def _counters(self) -> list[int]:
        schedulers = [r.scheduler for r in self.replicas]
        return [
            sum(s.prefix_hits for s in schedulers), sum(s.prefix_queries for s in schedulers),
            sum(sum(s.preemptions.values()) for s in schedulers), self.router.moved,
        ]  # fmt: skip

    def summary(
        self, scale: float = 1.0, ttft_slo_ms: float | None = None, itl_slo_ms: float | None = None
    ) -> dict[str, Any]:
        """The fleet's numbers; counts and rates are `scale` times the sample's.

        Requests are those that arrived after `since`, tokens those between `since` and the last arrival.
        With objectives, `met_objectives` is the share of requests whose first token came within
        `ttft_slo_ms` and the others within `itl_slo_ms` of each other in the mean. Raises `ConfigError`
        where nothing was served.
        """
        replicas = self.replicas
        counted = [
            sample
            for r in replicas
            for (arrival, _), sample in zip(r.first_tokens, r.scheduler.samples, strict=True)
            if arrival >= self.since
        ]
        if not counted:
            refused = next((line for r in replicas for line in r.refused), "none came after the warm-up")
            raise ConfigError(f"no request was served: {refused}")
        span = max(self.until - self.since, 1e-9)
        tokens, link = np.zeros(len(replicas)), 0.0
        for i, r in enumerate(replicas):
            clock = np.asarray(r.series.clock)
            inside = (clock >= self.since) & (clock < self.until)
            tokens[i] = np.asarray(r.series.outputs)[inside].sum()
            link += float(np.asarray(r.series.link_bytes)[inside].sum())
        ttft = np.array([s.ttft for s in counted])
        hits, queries, preempted, moved = np.subtract(self._counters(), self._before).tolist()
        out = {
            "replicas": round(len(replicas) * scale),
            "replicas_stepped": len(replicas),
            "seconds": span,
            "requests": round(len(counted) * scale),
            "refused": round(sum(len(r.refused) for r in replicas) * scale),
            "requests_per_s": len(counted) * scale / span,
            "output_tokens_per_s": float(tokens.sum()) * scale / span,
            "ttft_mean_s": float(ttft.mean()),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "prefix_hit_rate": hits / max(1, queries),
            "moved_turns": round(moved * scale),
            "preemptions": round(preempted * scale),
            "busiest_to_mean": float(tokens.max() / max(1e-9, tokens.mean())),
            "peak_concurrency_a_replica": max(max(r.series.running, default=0) for r in replicas),
            "link_bytes": round(link * scale),
        }
        if ttft_slo_ms is not None or itl_slo_ms is not None:
            tpot = np.array([s.decode_time / max(1, s.output_tokens - 1) for s in counted])
            met = (ttft * 1e3 <= (ttft_slo_ms or np.inf)) & (tpot * 1e3 <= (itl_slo_ms or np.inf))
            out["met_objectives"] = float(met.mean())
        return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload's flags; `--rate` is the whole fleet's."""
    add_workload(parser, several=False)
    group = parser.add_argument_group("fleet (--rate is of all replicas together, and is needed)")
    group.add_argument("--replicas", type=int, default=1000, metavar="N", help="default %(default)s")
    group.add_argument(
        "--sample", type=int, default=16, metavar="S",
        help="replicas that stand for all and are stepped, with S/N of the load; default %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--router", default="prefix", metavar="R[,R...]",
        help="prefix: where the conversation was last, unless that is overloaded; least: the less loaded of "
        "two drawn at random; random; several are compared; default %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--think", type=float, default=20.0, metavar="S",
        help="mean seconds from a turn of a conversation to the next; default %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--seconds", type=float, default=60.0, metavar="S",
        help=f"seconds that count, after a warm-up of {WARM_UP:g} times --think; default %(default)s",
    )  # fmt: skip
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
    if not 0 < args.seconds < float("inf"):
        raise ConfigError(f"--seconds must be above 0, got {args.seconds:g}")
    policy, *others = policies(args)
    if others:
        raise ConfigError(f"a fleet runs under one --memory-policy, got {args.memory_policy}")
    ttft, itl = objectives(args)
    stepped = min(args.sample, args.replicas)
    hardware, model = machine(args), model_of(args.model)
    check_reachable(ttft, itl, model, "auto", [hardware])
    rows = workload(args)  # their times are made anew, turn after turn
    warm_up = WARM_UP * args.think
    share = args.rate * stepped / args.replicas
    arrivals = steady_load(rows, share, args.think, warm_up + args.seconds, args.seed)
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
        fleet = Fleet(replicas, Router(name, seed=args.seed), since=warm_up)
        fleet.serve(arrivals)
        results[name] = fleet.summary(args.replicas / stepped, ttft, itl)
    if args.json:
        given = assumptions(replicas[0], hardware) | {
            "trace": Path(args.trace).name, "rate": args.rate, "think_s": args.think, "seed": args.seed,
            "warm_up_s": warm_up,
            "sampled": f"{stepped} of {args.replicas} replicas are stepped, with as much of the load",
        }  # fmt: skip
        print(json.dumps({"assumptions": given, "routers": results}, indent=1))
        return 0
    print(
        f"{stepped:,} of {args.replicas:,} replicas stepped, counts and rates scaled to all; "
        f"{args.seconds:g} s after {warm_up:g} s of warm-up"
    )
    for name, result in results.items():
        print(f"{name}:")
        for key, value in result.items():
            print(f"  {key:<28}{value:,.3f}" if isinstance(value, float) else f"  {key:<28}{value:,}")
    return 0
