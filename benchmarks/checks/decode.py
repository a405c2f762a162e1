"""Decode steps of whole models with random weights, through the engine's own loop.

Times are wall clock between finished steps, context 1,024, everything resident, uniform routing; beside each
the time of the captured graph alone: what lies between the two is host time that was not hidden.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

import torch
from harness import Report
from shapes import folder

from checks.engine import compiles, last_compiled
from rimuru.engine.config import EngineConfig
from rimuru.engine.core import EngineCore
from rimuru.engine.request import SamplingParams
from rimuru.engine.step_io import StepShape

BARS = {  # ms a step at batch 1, 8, 32, 128
    "qwen1.5-moe": {1: 1.7, 8: 4.5, 32: 8.5, 128: 14.6},
    "qwen3-30b": {1: 2.4, 8: 7.6, 32: 15.0, 128: 19.5},
}
FLOORS = {
    "qwen1.5-moe": {1: 1.3, 8: 3.8, 32: 7.8, 128: 13.3},
    "qwen3-30b": {1: 1.5, 8: 6.3, 32: 13.7, 128: 17.8},
}
CONTEXT = 1024
STEPS = 40


def make(model: str, **options: object) -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=folder(model), load_format="dummy", device="cuda", max_num_batched_tokens=8192,
            dummy_routing="uniform", **options,
        )
    )  # fmt: skip


def run(report: Report) -> None:
    for model, bars in BARS.items():
        began = time.monotonic()
        core = make(model, memory_policy="fixed")
        report.bar(f"{model}: start with random weights", time.monotonic() - began, "s")
        report.bar(f"{model}: compiling and capturing", core.runner.prepare_seconds, "s")
        report.bar(f"{model}: capturing alone", core.runner.capture_seconds, "s", 20.0)
        report.say(f"{model}: {len(core.runner._graphs)} graphs for up to {core.plan.max_model_len:,} tokens")
        report.say(f"{model}: {core.model.routing.describe(tuple(bars))}")
        compiled, walls = compiles(), {}
        for batch, bar in bars.items():
            walls[batch], graph = decode(core, batch)
            report.bar(f"{model}: decode, batch {batch}", walls[batch], "ms", bar, FLOORS[model][batch])
            report.bar(f"{model}: its graph alone", graph, "ms")
        mixed(core, report, model)
        report.check(f"{model}: kernels compiled while serving", compiles() - compiled, 0)
        if compiles() > compiled:
            report.say(f"the last of them: {last_compiled[-1]}")
        memory(core, report, model)
        launched = launches(core)
        core.__dict__.clear()
        gc.collect()
        torch.cuda.empty_cache()
        if model == "qwen1.5-moe":
            lendable(report, model, walls, launched)


def lendable(report: Report, model: str, walls: dict[int, float], launched: int) -> None:
    """All experts resident, but each with a host copy and free to leave: against the same without copies."""
    core = make(model, memory_policy="economic", device_memory=int(45e9), host_memory=int(26e9))
    assert core.plan.experts_lendable == core.plan.experts_resident == core.plan.experts_total
    for batch in (1, 32):
        wall, _ = decode(core, batch)
        name = f"{model}: decode with host copies / without, batch {batch}"
        report.bar(name, wall / walls[batch], "", 1.01)
    report.check(f"{model}: kernels of a step beyond those without host copies", launches(core) - launched, 0)
    core.__dict__.clear()
    gc.collect()
    torch.cuda.empty_cache()


def launches(core: EngineCore) -> int:
    """Kernels and copies in the graph of a decode step of one sequence."""
    shape = min(core.runner._graphs, key=lambda s: (s.tokens, s.max_query_len, s.seqs, s.max_seq_len))
    core.runner._send_padding(shape)  # its inputs lie where another shape's may have been written since
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        core.runner._graphs[shape][0].replay()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())


def fill(core: EngineCore, batch: int, output: int) -> None:
    """Start `batch` requests and bring them all to decoding at the context."""
    for i in range(batch):
        prompt = [random.randrange(1000, 100000) for _ in range(CONTEXT - STEPS // 2)]
        core.add(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True))
    while any(r.num_output < 3 for r in core.scheduler.requests.values()):
        core.step()


def end(core: EngineCore) -> None:
    for name in list(core.scheduler.requests):
        core.abort(name)
    while core.has_work:
        core.step()
    core.reset_prefix_cache()


def decode(core: EngineCore, batch: int) -> tuple[float, float]:
    """ms a step: through the engine, and the graph replayed alone on the last step's inputs."""
    fill(core, batch, STEPS + 64)  # the first has decoded for long when the last begins
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        core.step()
        times.append((time.perf_counter() - began) * 1e3)
    alone = replay_ms(
        core, [s for s in core.runner.small_shapes() if s.max_query_len == 1 and s.seqs >= batch]
    )
    end(core)
    return statistics.median(times), alone


def replay_ms(core: EngineCore, shapes: list[StepShape]) -> float:
    """ms of the smallest shape's graph, replayed on the inputs of the step launched last."""
    torch.cuda.synchronize()
    graph = core.runner._graphs[min(shapes, key=lambda s: (s.tokens, s.seqs, s.max_seq_len))][0]
    begin, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        graph.replay()
    after.record()
    after.synchronize()
    return begin.elapsed_time(after) / 20


def mixed(core: EngineCore, report: Report, model: str) -> None:
    """64 decodes beside 256 tokens of a prompt, step after step."""
    fill(core, 64, STEPS + 64)
    core.scheduler.max_num_batched_tokens = 64 + 256
    prompt = [random.randrange(1000, 100000) for _ in range(256 * 12)]
    core.add("long", prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    times = []
    for _ in range(11):
        began = time.perf_counter()
        core.step()
        times.append((time.perf_counter() - began) * 1e3)
    core.scheduler.max_num_batched_tokens = core.config.max_num_batched_tokens
    busy = replay_ms(core, [s for s in core.runner.small_shapes() if s.max_query_len > 1 and s.tokens >= 320])
    end(core)
    wall = statistics.median(times[2:])
    report.bar(f"{model}: 64 decodes + 256 prompt tokens", wall, "ms", 1.15 * busy, busy)


def memory(core: EngineCore, report: Report, model: str) -> None:
    """Everything this process took on the device against the cap."""
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    reserved, allocated = stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]
    plan = core.plan
    report.say(
        f"cap {plan.device_bytes:,}, used {total - free:,}, reserved {reserved:,}, allocated {allocated:,}, "
        f"pool {plan.pool_bytes:,}, weights {plan.weights_bytes:,}, workspace {plan.workspace_bytes:,}, "
        f"tables {plan.tables_bytes:,}; beside the pool, weights and tables: "
        f"{reserved - plan.pool_bytes - plan.weights_bytes - plan.tables_bytes:,} of torch, "
        f"{total - free - reserved:,} of the driver"
    )
    report.bar(f"{model}: device memory used / cap", (total - free) / plan.device_bytes, "", 1.0)
