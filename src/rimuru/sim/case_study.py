"""The published case study on paper: Qwen1.5-MoE on an RTX 5090 under four ways to share its memory.

Room: the simulator. Rule: one setting for all policies; what was published, what was assumed and how the
setting was found stand beside the result.

Published are the peak concurrency and the number of steps of three systems on one load, neither its length
nor its requests: the setting here was searched for until all six numbers came out (`SEARCH`). It shows that
they are consistent with each other, and predicts nothing. The second table says what was not published:
seconds, tokens a second and first-token times, behind both links and with both kinds of routing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from rimuru.engine.config import EngineConfig
from rimuru.models.config import ModelConfig
from rimuru.policy.cost import gpu

from .engine import Hardware, Simulation
from .options import PCIE4
from .report import assumptions, plots, summary, table
from .routing import UNIFORM, Routing, RoutingParams, draw
from .trace import Arrival, shape

PUBLISHED = {
    "fixed": {"peak_concurrency": 34, "steps": 2100},
    "offload": {"peak_concurrency": 74, "steps": 1300},
    "reactive": {"peak_concurrency": 90, "steps": 1000},
}
SEARCH = (
    "found in 220 simulations by hand-guided search: 75 loads under `fixed`, then for 22 of them 3 "
    "to 13 sizes of `offload` and `reactive`, a few with both routings; eight knobs for six numbers"
)
EXPERT_BYTES = 17_301_504
KEYS = (
    "peak_concurrency", "steps", "seconds", "output_tokens_per_s", "ttft_mean_s", "ttft_p99_s", "link_bytes"
)  # fmt: skip
# Fitted to recorded routing of DeepSeek-V2-Lite (64 experts, top 6); layer 0 to Qwen1.5-MoE's own counts.
MODEL_ROUTING = RoutingParams(((0.0, 0.012), (1.0, 0.08)), 0.12, 0.22, 0.88)


@dataclass(frozen=True, slots=True)
class Setting:
    """The eight knobs behind the six numbers."""

    requests: int = 104
    output_scale: float = 0.66
    seed: int = 2
    reserve_bytes: int = 400_000_000
    offload_lent: int = 146  # experts outside the pool under `offload`
    lendable: int = 280  # experts with a host copy under `reactive` and `economic`
    routing: str = "uniform"
    overlap: str = "step"  # misses are prefetched beside the whole step, as the published systems do
    rate: float = 10.0
    device_memory: int = int(0.9 * (32 << 30))


SETTING = Setting()


def model() -> ModelConfig:
    """Qwen1.5-MoE-A2.7B."""
    return ModelConfig(
        family="qwen2_moe", vocab_size=151_936, hidden_size=2048, num_layers=24, num_heads=16,
        num_kv_heads=16, head_dim=128, max_position_embeddings=32_768, rms_eps=1e-6, num_experts=60,
        top_k=4, moe_intermediate=1408, norm_topk=False, moe_layers=tuple(range(24)), rope_base=1e6,
        rotary_dim=128, windows=(0,) * 24, qkv_bias=True, shared_intermediate=5632, shared_gate=True,
        dtype="bfloat16",
    )  # fmt: skip


def lengths() -> list[Arrival]:
    """Prompt and output tokens of the first turns of 160 ShareGPT conversations."""
    data = json.loads((files(__package__) / "sharegpt_lengths.json").read_text(encoding="utf-8"))
    return [Arrival(0.0, p, o, i) for i, (p, o) in enumerate(data["lengths"])]


def policies(setting: Setting) -> dict[str, dict[str, Any]]:
    """The engine's flags of each policy."""
    host = setting.lendable * EXPERT_BYTES
    resident = model().routed_experts - setting.offload_lent
    return {
        "fixed": {"memory_policy": "fixed"},
        "offload": {"memory_policy": "static", "resident_experts": resident},
        "reactive": {"memory_policy": "reactive", "host_memory": host},
        "economic": {"memory_policy": "economic", "host_memory": host},
    }


def routing_of(name: str, config: ModelConfig) -> Routing:
    """`uniform` or `model`."""
    params = UNIFORM if name == "uniform" else MODEL_ROUTING
    return draw(len(config.moe_layers), config.num_experts, config.top_k, params)


def simulate(
    policy: str, setting: Setting, arrivals: list[Arrival], link: float = 1.0, own_routing: str | None = None
) -> tuple[Simulation, Hardware]:
    """One policy under `setting`; `link` scales the link's rate, `own_routing` replaces the setting's."""
    config = model()
    card = gpu("rtx-5090")
    hardware = Hardware(
        replace(card, link_bytes_s=card.link_bytes_s * link),
        overlap=setting.overlap, reserve_bytes=setting.reserve_bytes,
    )  # fmt: skip
    engine = EngineConfig(
        model="Qwen1.5-MoE-A2.7B", device_memory=setting.device_memory, max_num_seqs=256,
        **policies(setting)[policy],
    )  # fmt: skip
    routing = routing_of(own_routing or setting.routing, config)
    # The published systems schedule by tokens, so no prompts are gathered here.
    sim = Simulation(config, engine, hardware, routing, gather=False)
    sim.run(arrivals)
    return sim, hardware


def study(setting: Setting = SETTING) -> tuple[dict[str, Any], dict[str, Simulation]]:
    """The four policies on the published load: plain data for JSON, and the simulations."""
    arrivals = shape(
        lengths(), requests=setting.requests, rate=setting.rate, seed=setting.seed,
        output_scale=setting.output_scale,
    )  # fmt: skip
    sims: dict[str, Simulation] = {}
    for policy in policies(setting):
        sims[policy], hardware = simulate(policy, setting, arrivals)
    given = assumptions(sims["fixed"], hardware) | asdict(setting) | {"search": SEARCH}
    given["kv_tokens_fixed"] = sims["fixed"].plan.kv_tokens
    results = {name: summary(sim) for name, sim in sims.items()}
    worst = max(
        abs(results[name][key] / value - 1) for name, row in PUBLISHED.items() for key, value in row.items()
    )
    data = {
        "assumptions": given,
        "policies": {name: {key: row[key] for key in KEYS} for name, row in results.items()},
        "published": PUBLISHED,
        "worst_error": worst,
    }
    return data, sims


def beside(requests: int, setting: Setting = SETTING) -> dict[str, dict[str, Any]]:
    """What was not published: a steady load of `requests` at the same rate, by link, routing and policy."""
    arrivals = shape(lengths(), requests=requests, rate=setting.rate, seed=setting.seed, output_scale=0.43)
    rows = {}
    for generation, link in ((5, 1.0), (4, PCIE4)):
        for routing in ("uniform", "model"):
            for policy in policies(setting):
                sim, _ = simulate(policy, setting, arrivals, link, routing)
                rows[f"PCIe {generation}, {routing}, {policy}"] = summary(sim)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Output only: the setting is part of the result."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plots", metavar="FILE", help="write SVG charts over time")
    parser.add_argument(
        "--steady", type=int, default=0, metavar="N",
        help="also N requests of steady load, PCIe 4 and 5, uniform and model routing",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the case study."""
    data, sims = study()
    if args.steady:
        data["steady"] = beside(args.steady)
    if args.plots:
        Path(args.plots).write_text(plots("Qwen1.5-MoE on an RTX 5090, case study", sims), encoding="utf-8")
    if args.json:
        print(json.dumps(data, indent=1))
        return 0
    print(table({name: summary(sim) for name, sim in sims.items()}))
    print("\npublished peak / steps, and here:")
    for name, row in PUBLISHED.items():
        ours = data["policies"][name]
        print(
            f"  {name:<9} {row['peak_concurrency']:>3} / {row['steps']:>5,}   "
            f"{ours['peak_concurrency']:>3} / {ours['steps']:>5,}"
        )
    print(f"worst error {data['worst_error']:.1%}; {SEARCH}")
    if args.steady:
        print(f"\nsteady load, {args.steady} requests:")
        print(table(data["steady"], first="link, routing, policy"))
    return 0
