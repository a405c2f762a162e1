"""Whole models that do not fit: decode, prefill and a trace of requests under a cap, experts in host memory.

Random weights. Routing as a real model's where `RIMURU_ROUTING` names a file of routing models, else uniform;
the trace runs where `RIMURU_TRACE` names a CSV of prompt and output lengths. `RIMURU_OFFLOAD` picks routings
("" for none), `RIMURU_TRACE_CASES` cases of the trace.
"""

from __future__ import annotations

import csv
import gc
import os
import random
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from harness import Report
from shapes import folder

from checks.decode import end, fill, memory
from checks.engine import compiles, last_compiled
from rimuru.engine.config import EngineConfig
from rimuru.engine.core import EngineCore
from rimuru.engine.request import SamplingParams
from rimuru.errors import RimuruError

LINK = 54.5e9  # bytes/s of the copy engine; the kernel's own reads reach 51e9
STEPS = 24
# Steps in which the residency policy learns what requests touch; uniform routing has nothing to be learnt.
SETTLE = {"model": 120, "uniform": 20}
QWEN3_BARS = {1: 6.5, 4: 21.0, 16: 100.0}  # ms a step, routing as a real model's
VLLM = {1: 67.5, 16: 461.0}  # ms a step with its own offloading, uniform routing
EXPERT = 3 * 2048 * 768 * 2
_CAPPED = {"device_memory": int(30.9e9), "host_memory": int(26e9)}
TRACES = {  # the engine's options, and what vLLM 0.26.0 reached: output tokens/s, mean TTFT in s
    "uncapped": ({}, None, 0.030),
    "fixed": ({"memory_policy": "fixed", **_CAPPED}, 2384, 6.1),
    "economic": ({"memory_policy": "economic", **_CAPPED}, 2384, 6.1),
    "reactive": ({"memory_policy": "reactive", **_CAPPED}, 2384, 6.1),
}


def make(name: str, routing: str, **options: object) -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=folder(name), load_format="dummy", device="cuda", dummy_routing=routing, **options,
        )
    )  # fmt: skip


def run(report: Report) -> None:
    models = os.environ.get("RIMURU_ROUTING")
    routings = {"uniform": "uniform"}
    if models:
        routings = {
            "model": f"model:{models}#{os.environ.get('RIMURU_ROUTING_ENTRY', 'Qwen3-30B-A3B')}",
            **routings,
        }
    for name in filter(None, os.environ.get("RIMURU_OFFLOAD", ",".join(routings)).split(",")):
        capped(report, name, routings[name])
    if os.environ.get("RIMURU_TRACE"):
        for case in os.environ.get("RIMURU_TRACE_CASES", ",".join(TRACES)).split(","):
            try:
                trace(report, case, Path(os.environ["RIMURU_TRACE"]))
            except RimuruError as error:
                report.say(f"the trace, {case}: {error}")


def drop(core: EngineCore) -> None:
    core.__dict__.clear()
    gc.collect()
    torch.cuda.empty_cache()


def capped(report: Report, name: str, routing: str) -> None:
    """Qwen3-30B at 40 GB: 57 GB of experts, of which about half are resident."""
    began = time.monotonic()
    core = make(
        "qwen3-30b", routing, device_memory=int(40e9), host_memory=int(60e9), max_model_len=8192,
        max_num_batched_tokens=4096, max_num_seqs=64,
    )  # fmt: skip
    report.bar(f"qwen3-30b at 40 GB, {name}: start", time.monotonic() - began, "s", 45.0)
    report.bar(f"qwen3-30b at 40 GB, {name}: of it compiling and capturing", core.runner.prepare_seconds, "s")
    resident = int(core.store.resident.sum())
    report.say(f"{resident} of {core.plan.experts_total} resident; {core.model.routing.describe((1, 4, 16))}")
    compiled = compiles()
    for batch, bar in QWEN3_BARS.items():
        fill(core, batch, 400)
        times, misses, hits = [], [], []
        for step in range(SETTLE[name] + STEPS):
            before = core.memory.expert_misses, core.memory.expert_hits
            began = time.perf_counter()
            core.step()
            if step >= SETTLE[name]:
                times.append((time.perf_counter() - began) * 1e3)
                misses.append(core.memory.expert_misses - before[0])
                hits.append(core.memory.expert_hits - before[1])
        ms, missed = statistics.median(times), statistics.mean(misses)
        link = missed * EXPERT / LINK * 1e3
        label = f"qwen3-30b at 40 GB, {name}: decode, batch {batch}"
        report.bar(label, ms, "ms", bar if name == "model" else VLLM.get(batch), link)
        report.say(
            f"{label}: mean {statistics.mean(times):.2f}, missed {missed:.1f} of "
            f"{missed + statistics.mean(hits):.1f} touched, {link:.2f} ms of link, "
            f"promotions {core.memory.promotions}"
        )
        end(core)
    chunk(report, core, name)
    report.check(f"qwen3-30b at 40 GB, {name}: kernels compiled while serving", compiles() - compiled, 0)
    if compiles() > compiled:
        report.say(f"the last of them: {last_compiled[-1]}")
    free, total = torch.cuda.mem_get_info()
    report.bar(f"qwen3-30b at 40 GB, {name}: device memory used / cap", (total - free) / 40e9, "", 1.0)
    drop(core)


def chunk(report: Report, core: EngineCore, name: str) -> None:
    """Prefill chunks of 4,096 tokens."""
    core.reset_prefix_cache()
    times = []
    for i in range(3):
        prompt = [random.randrange(1000, 100000) for _ in range(4096)]
        core.add(f"chunk{i}", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        began = time.perf_counter()
        while core.has_work:
            core.step()
        times.append((time.perf_counter() - began) * 1e3)
        core.reset_prefix_cache()
    missing = int(np.count_nonzero(~core.store.resident))
    link = missing * EXPERT / LINK * 1e3
    report.bar(f"qwen3-30b at 40 GB, {name}: prefill of 4,096", min(times), "ms", 1.1 * link, link)


def trace(report: Report, case: str, path: Path) -> None:
    """Qwen1.5-MoE, in 30.9 GB or all of the card: the first 400 requests, outputs x 0.43, Poisson arrivals at
    20 a second."""
    options, rate_bar, ttft_bar = TRACES[case]
    core = make(
        "qwen1.5-moe", "uniform", max_model_len=2048, max_num_batched_tokens=1024, max_num_seqs=128, **options
    )
    rng = np.random.default_rng(0)
    with path.open() as f:
        rows = [
            (int(r["prompt_tokens"]), max(1, round(int(r["output_tokens"]) * 0.43)))
            for r in csv.DictReader(f)
        ]
    arrivals = np.cumsum(rng.exponential(1 / 20, len(rows[:400])))
    first: dict[str, float] = {}
    begun, output, peak, at = time.monotonic(), 0, 0, 0
    due = {}
    while at < 400 or core.has_work:
        now = time.monotonic() - begun
        while at < 400 and arrivals[at] <= now:
            prompt, tokens = rows[at]
            ids = rng.integers(1000, 100000, prompt).tolist()
            due[f"q{at}"] = arrivals[at]
            core.add(f"q{at}", ids, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
            at += 1
        if not core.has_work:
            time.sleep(0.0005)
            continue
        for out in core.step():
            output += len(out.tokens)
            if out.error:
                report.say(f"{out.request_id}: {out.error}")
            first.setdefault(out.request_id, time.monotonic() - begun - due[out.request_id])
        peak = max(peak, len(core.scheduler.running))
    seconds = time.monotonic() - begun
    ttft = sorted(first.values())
    label = f"qwen1.5-moe, trace at 20/s, {case}"
    report.bar(f"{label}: output tokens/s", output / seconds, "/s", rate_bar, higher_is_better=True)
    report.bar(f"{label}: mean TTFT", statistics.mean(ttft), "s", ttft_bar)
    stats = core.stats()
    report.say(
        f"{label}: {seconds:.1f} s, p99 TTFT {ttft[int(len(ttft) * 0.99)]:.2f} s, peak {peak} running, "
        f"preemptions {stats.preemptions}, moves {stats.boundary_moves}, "
        f"resident {stats.experts_resident} of {stats.experts_total}, missed {stats.expert_misses:,} of "
        f"{stats.expert_misses + stats.expert_hits:,}; KV at start {core.plan.kv_tokens:,} tokens"
    )
    memory(core, report, label)
    drop(core)
