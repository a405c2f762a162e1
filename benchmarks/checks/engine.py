"""The whole engine on the GPU: greedy tokens of tiny float32 checkpoints equal transformers' on the CPU.

Paths: everything resident; a boundary that swings on every step; every expert in host memory; each with
graphs and without. Poison on freed pages, `check()` after every step. Nothing compiles once an engine stands.
In bfloat16 the same steps give the same bits wherever experts lie.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import torch
import triton
from harness import Report

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from support.cores import cap_for, greedy, make_bench
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine import plan
from rimuru.policy.boundary import Swing

# Tiny models have 32 experts: a ring for streamed ones of the usual 16 pages would hold half of them.
plan.STREAM_PAGES = 2

# Heads and experts of a width the kernels serve.
SHAPES = {
    "mixtral": {"head_dim": 64, "intermediate_size": 128},
    "qwen2_moe": {"hidden_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 128},
    "olmoe": {"hidden_size": 128, "intermediate_size": 128},
    "qwen3_next": {"head_dim": 64, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3_5_moe": {"head_dim": 64, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
}
KINDS = {"graphs": {}, "eager": {"enforce_eager": True}}
HYBRIDS = ("qwen3_next", "qwen3_5_moe")  # of which no step is captured
TOKENS = 10
# Sums in float32 differ by their order: a few thousand additions of values near 1.
LOGITS = 2e-4


def compiles() -> int:
    """Kernels that Triton has compiled or loaded so far."""
    return _compiled[0]


_compiled = [0]
last_compiled: deque[str] = deque(maxlen=4)


def _count(**kernel: object) -> None:
    _compiled[0] += 1
    last_compiled.append(str(kernel.get("repr"))[:200])


triton.knobs.runtime.jit_post_compile_hook = _count


def run(report: Report) -> None:
    tokens_equal(report)
    bits_equal(report)


def bits_equal(report: Report) -> None:
    for family, shape in SHAPES.items():
        folder = str(tiny_checkpoint(family, **shape))
        options = {"model": folder, "device": "cuda", "dtype": "bfloat16", "schedule_replay": True}
        half, none = (cap_for(family, share, kv, **options) for share, kv in ((0.5, 512), (0.2, 1024)))
        paths = {
            "swing": {"device_memory": half},
            "host": {"device_memory": none, "memory_policy": "static", "resident_experts": 0},
        }
        rows = {}
        for path, more in {"resident": {}, **paths}.items():
            bench = make_bench(family, **options, **more)
            if path == "swing":
                bench.core.memory.boundary = Swing(0.8)
            for i, prompt in enumerate(tiny_prompts()):
                bench.add(f"r{i}", prompt, greedy(TOKENS))
            bench.run()
            moved = bench.core.memory.demotions > 0
            report.check(f"{family}, bfloat16, {path}: no expert ever left", (path == "swing") > moved, 0)
            rows[path] = torch.stack([row for name in sorted(bench.logits) for row in bench.logits[name]])
        for path in paths:
            report.equal(f"{family}, bfloat16, {path}: logits that differ", rows[path], rows["resident"])


def tokens_equal(report: Report) -> None:
    for family, shape in SHAPES.items():
        folder = str(tiny_checkpoint(family, **shape))
        prompts = tiny_prompts()
        tokens, logits = oracle(Path(folder), prompts, TOKENS)
        paths = {
            "resident": {},
            "swing": {"device_memory": cap_for(family, 0.5, 512, model=folder, device="cuda")},
            "host": {
                "device_memory": cap_for(family, 0.2, 2048, model=folder, device="cuda"),
                "memory_policy": "static", "resident_experts": 0,
            },
        }  # fmt: skip
        kinds = {"eager": {}} if family in HYBRIDS else KINDS
        for path, options in {f"{p}, {k}": o | e for p, o in paths.items() for k, e in kinds.items()}.items():
            bench = make_bench(family, model=folder, device="cuda", **options)
            compiled = compiles()
            if path.startswith("swing"):
                bench.core.memory.boundary = Swing(0.8)
            for i, prompt in enumerate(prompts):
                bench.add(f"r{i}", prompt, greedy(TOKENS))
            bench.run()
            wrong = sum(bench.tokens(f"r{i}") != tokens[i] for i in range(len(prompts)))
            report.check(f"{family}, {path}: prompts with wrong tokens", wrong, 0)
            worst = max(
                (row.cpu() - want).abs().max().item()
                for i in range(len(prompts))
                for row, want in zip(bench.logits[f"r{i}"][-TOKENS:], logits[i], strict=True)
            )
            report.check(f"{family}, {path}: logits", worst, LOGITS)
            report.check(f"{family}, {path}: kernels compiled while serving", compiles() - compiled, 0)
            if path.startswith("swing"):
                report.check(f"{family}, {path}: no expert ever left", bench.core.memory.demotions == 0, 0)
                report.say(
                    f"{bench.core.memory.demotions} demotions, {bench.core.memory.promotions} promotions"
                )
