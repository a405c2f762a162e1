"""`rimuru plan MODEL`: where every byte would go; with a trace, which card, cap and policy would do.

Room: the simulator; the `plan` command. Rule: without a trace it is the engine's own planner; with one,
every answer is a simulation of the load, and what it says a server would do is what was simulated.

A case (card, cap, policy) does if `ENOUGH` of the requests meet the objectives; one that is refused or
never started meets none. Cards are tried from the smallest, each at a share of its memory; on the first
that does, smaller caps are tried until none does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rimuru.engine import plan_cli
from rimuru.engine.config import EngineConfig
from rimuru.engine.core import local_models
from rimuru.engine.plan import show
from rimuru.errors import ConfigError, MemoryPlanError
from rimuru.models.config import ModelConfig, load_model_config
from rimuru.models.registry import resolve_model
from rimuru.policy.cost import GPU, GPUS, gpu

from .engine import Hardware, Simulation
from .options import (
    add_assumptions,
    add_load,
    add_objectives,
    check_cap,
    check_reachable,
    machine,
    objectives,
)
from .report import assumptions, summary
from .routing import Routing, load_routing
from .trace import Arrival, read_trace, shape

REQUESTS = 200  # of a trace, unless more are asked for
TTFT_MS, ITL_MS = 2000.0, 100.0  # objectives where none is given: as fast as people read
ENOUGH = 0.99  # of the requests
NEAR = 0.01  # goodput this close to the best is as good
CAPS = (0.75, 0.6, 0.45, 0.3)  # of the card, below the share that is tried first
SIZE_STEP = 10**8  # caps are rounded down to 0.1 GB
TRIED = ("fixed", "economic", "reactive")


@dataclass(frozen=True, slots=True)
class Objectives:
    """In milliseconds; None where there is none."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __str__(self) -> str:
        first = None if self.ttft_ms is None else f"first token within {self.ttft_ms:g} ms"
        other = None if self.itl_ms is None else f"{self.itl_ms:g} ms between tokens"
        return ", ".join(filter(None, (first, other)))


@dataclass(frozen=True, slots=True)
class Case:
    """One card at one cap (bytes) under one policy, and what came of it; shares are of all requests.

    `reason` says why it does not start, or why it refused requests; `numbers` is empty in the first case.
    """

    card: str
    cap: int
    policy: str
    within: float = 0.0
    ttft_within: float = 0.0
    itl_within: float = 0.0
    refused: int = 0
    reason: str = ""
    host_bytes: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)  # `report.summary`

    @property
    def does(self) -> bool:
        return self.within >= ENOUGH

    @property
    def goodput(self) -> float:
        return self.numbers["goodput_tokens_per_s"] if self.numbers else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "card": self.card, "device_memory": self.cap, "policy": self.policy, "does": self.does,
            "within_objectives": self.within, "ttft_within": self.ttft_within, "itl_within": self.itl_within,
            "refused": self.refused, "reason": self.reason or None, "host_bytes": self.host_bytes,
            **self.numbers,
        }  # fmt: skip


class Planner:
    """Simulates a load on cards; `cases` keeps every case tried, in order."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        routing: Routing,
        arrivals: Sequence[Arrival],
        aims: Objectives,
        policies: Sequence[str] = TRIED,
    ):
        self.model, self.config, self.routing = model, config, routing
        self.arrivals, self.aims, self.policies = arrivals, aims, policies
        self.cases: list[Case] = []
        self.last: Simulation | None = None  # that ran, for what was assumed

    def search(self, cards: Sequence[Hardware], share: float, cap: int | None = None) -> Case | None:
        """Try all cards at `share` of their memory, or at `cap` bytes; the case to recommend, if any does."""
        found: Case | None = None
        for hardware in sorted(cards, key=lambda h: (h.card.memory_bytes, h.card.hbm_bytes_s)):
            best = self.best(self._on(hardware, cap or int(share * hardware.card.memory_bytes)))
            if best is None or found is not None:
                continue
            found = best
            for smaller in () if cap else (s for s in CAPS if s < share):
                if self.best(self._on(hardware, int(smaller * hardware.card.memory_bytes))) is None:
                    break
        return found

    def best(self, cases: Sequence[Case]) -> Case | None:
        """Of those that do, the one that needs least host memory among the highest goodputs."""
        good = [case for case in cases if case.does]
        most = max((case.goodput for case in good), default=0.0)
        good = [case for case in good if case.goodput >= (1 - NEAR) * most]
        return min(good, key=lambda case: (case.host_bytes, self.policies.index(case.policy)), default=None)

    def least_cap(self, found: Case) -> Case | None:
        """What to take at the smallest cap that does on the card of `found`, if that is below its own."""
        smaller = [c for c in self.cases if c.card == found.card and c.does and c.cap < found.cap]
        least = min((c.cap for c in smaller), default=0)
        return self.best([c for c in smaller if c.cap == least])

    def closest(self) -> Case | None:
        """The case with most requests within the objectives, or where none has any, within one of them."""
        ran = [case for case in self.cases if case.numbers]
        return max(
            ran,
            key=lambda case: (case.within, case.ttft_within + case.itl_within, -self._excess(case)),
            default=None,
        )

    def _excess(self, case: Case) -> float:
        """The mean times over their objectives, the worse of the two."""
        n, aims = case.numbers, self.aims
        return max(
            n["ttft_mean_s"] * 1e3 / (aims.ttft_ms or np.inf),
            n["tpot_mean_s"] * 1e3 / (aims.itl_ms or np.inf),
        )

    def _on(self, hardware: Hardware, cap: int) -> list[Case]:
        cap = cap - cap % SIZE_STEP if cap > SIZE_STEP else cap
        cases: list[Case] = []
        for policy in self.policies:
            cases.append(self._simulate(hardware, cap, policy))
            if policy == "fixed" and cases[-1].within == 1.0:
                break  # with all experts in the pool and every request in time there is nothing to gain
        self.cases += cases
        return cases

    def _simulate(self, hardware: Hardware, cap: int, policy: str) -> Case:
        config = replace(self.config, device_memory=cap, memory_policy=policy)
        name = hardware.card.name
        print(f"simulating {name:<9}{size(cap):>9}  {policy}", file=sys.stderr)
        aims = self.aims if policy == "economic" else Objectives()  # as the server takes them
        try:
            sim = Simulation(
                self.model, config, hardware, self.routing, ttft_slo_ms=aims.ttft_ms, itl_slo_ms=aims.itl_ms
            )
        except MemoryPlanError as error:
            return Case(name, cap, policy, reason=_short(error))
        sim.run(self.arrivals)
        self.last = sim
        numbers = summary(sim, ttft_slo_ms=self.aims.ttft_ms, itl_slo_ms=self.aims.itl_ms)
        samples, all_of_them = sim.scheduler.samples, len(self.arrivals)
        first = sum(s.ttft * 1e3 <= (self.aims.ttft_ms or np.inf) for s in samples)
        other = sum(
            s.decode_time * 1e3 <= (self.aims.itl_ms or np.inf) * max(1, s.output_tokens - 1) for s in samples
        )
        return Case(
            name, cap, policy, within=numbers["met_objectives"] * len(samples) / all_of_them,
            ttft_within=first / all_of_them, itl_within=other / all_of_them, refused=len(sim.refused),
            reason=sim.refused[0].partition(": ")[2] if sim.refused else "",
            host_bytes=sim.plan.host_bytes, numbers=numbers,
        )  # fmt: skip


def size(n: int) -> str:
    """Bytes as `--device-memory` reads them."""
    return f"{n / 1e9:.1f}GB" if n % SIZE_STEP == 0 else str(n)


def _short(error: MemoryPlanError) -> str:
    """Why it does not start, in a few words."""
    least = re.search(r"what would start: --device-memory \d+ \((.+)\)", str(error))
    return f"does not start below {least[1]}" if least else str(error).splitlines()[0]


COLUMNS = ("card", "cap", "policy", "tok/s", "TTFT s", "p99 s", "ITL p99 ms", "within", "refused")


def table(cases: Sequence[Case]) -> str:
    """One line a case, columns aligned; reasons at the end of the line."""
    rows = [list(COLUMNS)]
    for case in cases:
        row = [case.card, size(case.cap), case.policy]
        if not case.numbers:
            row += ["-"] * 6
        else:
            n = case.numbers
            row += [
                f"{n['output_tokens_per_s']:,.0f}", f"{n['ttft_mean_s']:,.2f}", f"{n['ttft_p99_s']:,.2f}",
                f"{n['itl_p99_s'] * 1e3:,.0f}", f"{case.within:.1%}", f"{case.refused:,}",
            ]  # fmt: skip
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, reason in zip(rows, ["", *(case.reason for case in cases)], strict=True):
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2])]
        cells += [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join([*cells, reason]).rstrip())
    return "\n".join(lines)


def answer(planner: Planner, found: Case | None) -> str:
    """The recommendation, or what comes closest, in a line or two."""
    aims = planner.aims
    if found is None:
        near = planner.closest()
        assert near is not None, "a card on which nothing starts was let in"
        n, shares = near.numbers, []
        if aims.ttft_ms is not None:
            shares.append(
                f"first token: {near.ttft_within:.0%} in time, {n['ttft_mean_s'] * 1e3:,.0f} ms mean"
            )
        if aims.itl_ms is not None:
            shares.append(f"between tokens: {near.itl_within:.0%}, {n['tpot_mean_s'] * 1e3:,.1f} ms mean")
        return (
            f"No case keeps {ENOUGH:.0%} of the requests within the objectives ({aims}).\n"
            f"Closest: {near.card} at {size(near.cap)} under {near.policy}, {near.within:.1%} of the "
            f"requests ({'; '.join(shares)})."
        )
    flags = f"--device-memory {size(found.cap)} --memory-policy {found.policy}"
    if found.policy == "economic":
        flags += "".join(
            f" --{flag} {value:g}"
            for flag, value in (("ttft-slo", aims.ttft_ms), ("itl-slo", aims.itl_ms))
            if value is not None
        )
    text = (
        f"Take {found.card}: under {found.policy}, {found.within:.1%} of the requests are within the "
        f"objectives ({aims}) at {found.numbers['output_tokens_per_s']:,.0f} tokens/s"
    )
    if found.host_bytes:
        text += f", with {show(found.host_bytes)} of host memory"
    least = planner.least_cap(found)
    if least is not None:
        host = f" and {show(least.host_bytes)} of host memory" if least.host_bytes else ""
        text += f"; {size(least.cap)} of it do too, under {least.policy}{host}"
    return f"{text}.\n  rimuru serve {planner.config.model} {flags}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The planner's flags, and with `--trace` those of a load."""
    plan_cli.add_arguments(parser)
    _add_trace_arguments(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Where every byte would go, without loading a weight. With --trace: which card, cap and memory\n"
        "policy would serve that load; it is simulated on every known card, or on --gpu, and the answer is\n"
        f"the smallest that keeps {ENOUGH:.0%} of the requests within the objectives (exit code 1: none)."
    )
    parser.epilog = (
        "examples:\n"
        "  rimuru plan MODEL --device-memory 24GB --host-memory 64GB\n"
        "  rimuru plan MODEL --gpu rtx-5090 --map\n"
        "  rimuru plan MODEL --trace lengths.csv --rate 4 --ttft-slo 1000 --itl-slo 50"
    )


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    add_load(parser, default_rows=REQUESTS)
    goals = add_objectives(parser)
    goals.description = f"with --trace; where neither is given, {TTFT_MS:g} and {ITL_MS:g} ms"
    add_assumptions(parser).description = "with --trace; host memory is 256 GiB unless --host-memory is given"


def run(args: argparse.Namespace) -> int:
    """Print the memory plan, or answer for a load; 1 where nothing would do."""
    probe = argparse.ArgumentParser()
    _add_trace_arguments(probe)
    if args.trace is None:
        for action in probe._actions:
            if getattr(args, action.dest, action.default) != action.default:
                raise ConfigError(f"{action.option_strings[0]} goes with --trace FILE")
        return plan_cli.run(args)
    for flag, unlike in (
        ("--map", args.map), ("--device", args.device), ("--expert-format", args.expert_format != "bf16"),
        ("--tensor-parallel-size", args.tensor_parallel_size != 1),
    ):  # fmt: skip
        if unlike:
            raise ConfigError(f"{flag} does not go with --trace: one GPU with bf16 experts is simulated")
    return _answer_for_load(args)


def _answer_for_load(args: argparse.Namespace) -> int:
    config = plan_cli.config_of(args)
    ttft, itl = objectives(args)
    aims = Objectives(ttft, itl) if ttft or itl else Objectives(TTFT_MS, ITL_MS)
    cards = [machine(args, card) for card in _cards(args.gpu, config.device_memory)]
    rows = read_trace(args.trace)
    arrivals = shape(
        rows, requests=min(REQUESTS, len(rows)) if args.requests is None else args.requests, rate=args.rate,
        seed=args.seed, output_scale=args.output_scale, source=args.trace,
    )  # fmt: skip
    model = load_model_config(resolve_model(config.model, local=local_models(), weights=False))
    check_reachable(ttft, itl, model, config.dtype, cards)
    routing = load_routing(
        args.routing, len(model.moe_layers), model.num_experts, model.top_k, args.model, args.seed
    )
    policies = TRIED if args.memory_policy is None else (args.memory_policy,)
    planner = Planner(model, config, routing, arrivals, aims, policies)
    found = planner.search(cards, config.gpu_memory_utilization, config.device_memory)
    if planner.last is None:
        reasons = "; ".join(f"{c.card}, {c.policy}: {c.reason}" for c in planner.cases)
        raise ConfigError(f"{config.model} fits none of the cards: {reasons}")
    text = answer(planner, found)
    if args.json:
        print(json.dumps(_to_json(planner, cards, found, text, args), indent=1))
    else:
        print(
            f"{config.model}: {len(arrivals)} requests in {arrivals[-1].at:,.0f} s, {routing.name} routing, "
            f"{show(config.host_memory or cards[0].host_bytes)} of host memory"
        )
        print(f"objectives: {aims}\n")
        print(table(planner.cases))
        print("\n" + text)
    return 0 if found else 1


def _cards(name: str | None, cap: int | None) -> list[GPU]:
    """The card called `name`, or every known one that has `cap` bytes."""
    if name is not None:
        return [gpu(name)]
    cards = [card for card in GPUS.values() if card.memory_bytes >= (cap or 0)]
    if cap is not None and not cards:
        check_cap(cap, max(GPUS.values(), key=lambda card: card.memory_bytes))
    return cards


def _to_json(
    planner: Planner, cards: Sequence[Hardware], found: Case | None, text: str, args: argparse.Namespace
) -> dict[str, Any]:
    assert planner.last is not None
    given = assumptions(planner.last, cards[0])
    shared = ("overlap", "factors", "routing", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")
    least = planner.least_cap(found) if found else None
    closest = None if found else planner.closest()
    return {
        "model": planner.config.model,
        "load": {
            "trace": str(args.trace), "requests": len(planner.arrivals), "rate": args.rate,
            "seed": args.seed, "output_scale": args.output_scale,
        },
        "objectives": {"ttft_ms": planner.aims.ttft_ms, "itl_ms": planner.aims.itl_ms, "share": ENOUGH},
        "assumptions": {key: given[key] for key in shared} | {
            "host_bytes": cards[0].host_bytes,
            "cards": {h.card.name: asdict(h.card) for h in cards},
        },
        "cases": [case.to_json() for case in planner.cases],
        "recommendation": found.to_json() if found else None,
        "least_cap": least.to_json() if least else None,
        "closest": closest.to_json() if closest else None,
        "answer": text,
    }  # fmt: skip
