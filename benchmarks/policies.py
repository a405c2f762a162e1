"""Memory policies against the best static split in hindsight, on the simulator.

`python benchmarks/policies.py --shared DIR --out FILE.jsonl` runs the cases that FILE lacks, one at a time;
with `--again economic,static` it runs those policies again for the cases that FILE holds (static with the
split found before), and with `--table` it prints them as Markdown (`docs/benchmarks/policies.md`).

A case is a model under a cap, a card, a routing, a rate, an overlap and a seed: of the arrivals, and which
requests of the trace they are. Static splits are searched over the
number of experts lent: a grid, then the two neighbours' middles around the best, twice. Hindsight
knows the load; a policy does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from rimuru.engine.config import EngineConfig
from rimuru.errors import MemoryPlanError
from rimuru.models.config import load_model_config
from rimuru.policy.cost import ZERO_COPY, gpu
from rimuru.sim.engine import Hardware, Simulation
from rimuru.sim.report import summary
from rimuru.sim.routing import load_routing
from rimuru.sim.trace import read_trace, shape

MODELS = {
    "Qwen1.5-MoE 30.9 GB": ("Qwen1.5-MoE-A2.7B-Chat", 30.9e9, 1_050_000_000),
    "Qwen3-30B 64 GB": ("Qwen3-30B-A3B", 64e9, 1_050_000_000),
    "Qwen3-30B 40 GB": ("Qwen3-30B-A3B", 40e9, 1_050_000_000),
}
# Requests a second: light, about what the best split can serve, and far beyond.
RATES = {
    ("Qwen1.5-MoE 30.9 GB", "h200"): (4, 14, 60),
    ("Qwen1.5-MoE 30.9 GB", "rtx-5090"): (2, 7, 30),
    ("Qwen1.5-MoE 30.9 GB", "rtx-4090"): (1, 4, 20),
    ("Qwen3-30B 64 GB", "h200"): (5, 20, 100),
    ("Qwen3-30B 64 GB", "rtx-5090"): (2, 8, 40),
    ("Qwen3-30B 64 GB", "rtx-4090"): (1, 5, 25),
    ("Qwen3-30B 40 GB", "h200"): (0.3, 1, 5),
    ("Qwen3-30B 40 GB", "rtx-5090"): (0.3, 1, 5),
    ("Qwen3-30B 40 GB", "rtx-4090"): (0.15, 0.5, 3),
}
GRID = (0, 6, 15, 30, 60, 120, 300)  # experts lent beyond those that cannot fit
KEEP = (
    "output_tokens_per_s", "ttft_mean_s", "ttft_p99_s", "peak_concurrency", "preemptions", "steps",
    "experts_resident_mean", "link_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    card: str
    routing: str
    rate: float
    overlap: str = "layer"
    requests: int = 150
    seed: int = 0


def cases(requests: int, overlap: str, seed: int) -> list[Case]:
    """All of them, the largest spread of questions first."""
    out = []
    for level, (model, card), routing in product((2, 1, 0), RATES, ("uniform", "model")):
        out.append(Case(model, card, routing, RATES[model, card][level], overlap, requests, seed))
    return out


class Bench:
    """Runs one case under any policy."""

    def __init__(self, case: Case, shared: Path):
        folder, cap, reserve = MODELS[case.model]
        self.case = case
        self.config = load_model_config(shared / "models" / folder)
        self.cap = int(cap)
        card = gpu(case.card)
        if case.overlap == "layer":
            card = replace(card, link_bytes_s=card.link_bytes_s * ZERO_COPY)
        self.hardware = Hardware(card, overlap=case.overlap, reserve_bytes=reserve)
        source = "uniform" if case.routing == "uniform" else str(shared / "routing" / "routing_model.json")
        c = self.config
        self.routing = load_routing(source, len(c.moe_layers), c.num_experts, c.top_k, folder)
        rows = read_trace(shared / "traces" / "sharegpt_vllm_style.csv")[case.seed * case.requests :]
        self.arrivals = shape(rows, requests=case.requests, rate=case.rate, seed=case.seed, output_scale=0.43)

    def run(self, policy: str, **options: Any) -> dict[str, Any] | None:
        """The result, or None where the policy cannot start."""
        try:
            engine = EngineConfig(
                model=self.case.model, device_memory=self.cap, memory_policy=policy, max_num_seqs=256,
                max_model_len=2048, **options,
            )  # fmt: skip
            sim = Simulation(self.config, engine, self.hardware, self.routing)
        except MemoryPlanError:
            return None
        began = time.process_time()
        sim.run(self.arrivals)
        sim.check()
        full = summary(sim)
        return {key: full[key] for key in KEEP} | {"cpu_s": round(time.process_time() - began, 2)}

    def best_static(self) -> tuple[int, dict[str, Any]]:
        """Experts lent and the result of the best split found."""
        total = self.config.routed_experts
        blocked = self._unfit(total)
        results: dict[int, dict[str, Any]] = {}

        def rate(lent: int) -> float:
            if lent not in results:
                got = self.run("static", resident_experts=total - blocked - lent)
                results[lent] = got or {"output_tokens_per_s": 0.0}
            return results[lent]["output_tokens_per_s"]

        grid = [n for n in GRID if blocked + n < total]
        for _ in range(3):
            best = max(grid, key=rate)
            at = grid.index(best)
            around = grid[max(0, at - 1) : at + 2]
            middles = {(a + b) // 2 for a, b in pairwise(around)}
            grid = sorted({*grid, *middles})
        best = max(results, key=rate)
        return blocked + best, results[best]

    def _unfit(self, total: int) -> int:
        """The fewest experts that must be out for one longest request to fit."""
        low, high = 0, total
        while low < high:
            middle = (low + high) // 2
            engine = EngineConfig(
                model="", device_memory=self.cap, memory_policy="static", max_num_seqs=256,
                max_model_len=2048, resident_experts=total - middle,
            )  # fmt: skip
            try:
                Simulation(self.config, engine, self.hardware, self.routing)
                high = middle
            except MemoryPlanError:
                low = middle + 1
        return low


def measure(case: Case, shared: Path) -> dict[str, Any]:
    bench = Bench(case, shared)
    lent, static = bench.best_static()
    policies = {name: bench.run(name) for name in ("fixed", "reactive", "economic")}
    return asdict(case) | {"static_lent": lent, "static": static} | policies


def markdown(rows: list[dict[str, Any]]) -> str:
    head = ("model, cap", "card", "routing", "rate /s", "best static (lent)", "fixed", "reactive", "economic")
    head += ("economic / best", "TTFT s, best static / economic")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in sorted(rows, key=lambda r: (r["model"], r["card"], r["routing"], r["rate"])):

        def speed(name: str, row: dict[str, Any] = row) -> float:
            return row[name]["output_tokens_per_s"] if row[name] else 0.0

        best = max(speed(name) for name in ("static", "fixed", "reactive"))
        ratio = speed("economic") / best
        text = f"{ratio:.3f}" if ratio >= 0.98 else f"**{ratio:.3f}**"
        fixed = f"{speed('fixed'):,.0f}" if row["fixed"] else "cannot start"
        ttft = f"{row['static']['ttft_mean_s']:.2f} / {row['economic']['ttft_mean_s']:.2f}"
        lines.append(
            f"| {row['model']} | {row['card']} | {row['routing']} | {row['rate']:g} "
            f"| {speed('static'):,.0f} ({row['static_lent']}) | {fixed} | {speed('reactive'):,.0f} "
            f"| {speed('economic'):,.0f} | {text} | {ttft} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, help="folder with models/, routing/ and traces/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overlap", choices=("layer", "step"), default="layer")
    parser.add_argument("--only", default="", help="cases whose text holds this")
    parser.add_argument("--again", metavar="P[,P...]", help="run these policies again for the cases in FILE")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if args.table:
        print(markdown([r for r in rows if r["overlap"] == args.overlap and r["seed"] == args.seed]))
        return
    names = list(asdict(Case("", "", "", 0)))
    if args.again:
        for row in rows:
            case = Case(**{k: row[k] for k in names})
            if args.only in str(case) and case.seed == args.seed:
                bench = Bench(case, args.shared)
                split = {"resident_experts": bench.config.routed_experts - row["static_lent"]}
                for policy in args.again.split(","):
                    row[policy] = bench.run(policy, **(split if policy == "static" else {}))
                print(markdown([row]).splitlines()[-1], file=sys.stderr, flush=True)
                args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    done = [{k: r[k] for k in names} for r in rows]
    for case in cases(args.requests, args.overlap, args.seed):
        if asdict(case) in done or args.only not in str(case):
            continue
        row = measure(case, args.shared)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(markdown([row]).splitlines()[-1], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
