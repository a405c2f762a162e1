"""Host time of a step: everything but the model, with a stub in the model's place.

Room: benchmarks. Rule: the engine's own scheduler, pool, tables and output handling run unchanged;
the stub answers every row with one token, so what is measured is the host's work alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

from rimuru.engine.config import EngineConfig
from rimuru.engine.core import EngineCore
from rimuru.engine.request import SamplingParams
from rimuru.engine.runner import Computed, Launched, Runner
from rimuru.engine.scheduler import StepPlan, StepResult

BARS = {1: 300.0, 128: 1500.0}  # microseconds
_MODEL = {
    "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32,
    "intermediate_size": 64, "eos_token_id": 2,
}  # fmt: skip


class StubRunner(Runner):
    """Builds everything a step would hand to the device, then answers token 7."""

    def launch(self, plan: StepPlan) -> Launched:
        arrays = self.builder.build(plan)
        self._meta(arrays)
        self.sampling.batch([plan.requests[i] for i in arrays.sampled])
        result = StepResult([-1] * len(plan.requests))
        for i in arrays.sampled:
            result.tokens[i] = 7
        return Computed(plan, result, self.touched.numpy())


def host_us_per_step(running: int, steps: int = 400, prompt: int = 200) -> dict[str, float]:
    """Microseconds of host work per decode step at `running` requests: median and 99th percentile.

    Counts schedule, page growth, table staging and flush, batch arrays, sampling parameters, the
    scheduler's update, outputs and the boundary; not the model, the draw or the detokenizer.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        core = EngineCore(
            EngineConfig(
                model=folder, dtype="float32", device="cpu", load_format="dummy",
                max_num_seqs=max(running, 1), max_num_batched_tokens=2048, max_model_len=prompt + steps + 128,
            )
        )  # fmt: skip
    r = core.runner
    core.runner = StubRunner(r.model, r.kv, r.expert_table, r.touched, r.builder, r.sampling, r.device)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps + 100)
    for i in range(running):
        core.add(f"r{i}", [3 + (i * 7 + j) % 1000 for j in range(prompt + i % 16)], params)
    while any(q.num_output < 1 for q in core.scheduler.requests.values()):
        core.step()
    times = []
    gc.collect()
    gc.disable()
    for _ in range(steps):
        began = time.perf_counter()
        core.step()
        times.append((time.perf_counter() - began) * 1e6)
    gc.enable()
    assert len(core.scheduler.running) == running, "requests ended inside the measurement"
    return {"median": statistics.median(times), "p99": sorted(times)[int(len(times) * 0.99)]}


def main(argv: list[str] | None = None) -> int:
    """`rimuru bench host-step`: print the table, or JSON."""
    parser = argparse.ArgumentParser(prog="rimuru bench host-step", description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 128], help="requests in a step")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = {n: host_us_per_step(n, args.steps) for n in args.running}
    if args.json:
        print(json.dumps({"host_us_per_step": rows}))
        return 0
    print(f"{'running':>8}{'median us':>12}{'p99 us':>10}{'bar':>10}")
    for n, row in rows.items():
        bar = f"{BARS[n]:.0f}" if n in BARS else "-"
        print(f"{n:>8}{row['median']:>12.0f}{row['p99']:>10.0f}{bar:>10}")
    return 0
