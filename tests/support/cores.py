"""Engines over tiny checkpoints, with what a test may look into.

Room: the tests' material. Rule: debug mode by default, so that every step ends with `check()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from rimuru.engine import plan as plan_module
from rimuru.engine.config import EngineConfig
from rimuru.engine.core import EngineCore, plan_for
from rimuru.engine.graphs import GraphRunner
from rimuru.engine.plan import MemoryPlan, state_pages
from rimuru.engine.request import FinishReason, SamplingParams, TokenOutput
from rimuru.engine.step_io import StepIO, StepShape
from rimuru.pool.geometry import Kind
from support.tiny import tiny_checkpoint

GREEDY = 12  # tokens generated where nothing else is said


def greedy(n: int = GREEDY, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, **more)


class Bench:
    """One core, stepped by the test, that records every logit row it sampled from."""

    def __init__(self, config: EngineConfig):
        self.core = EngineCore(config)
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}

        def record(requests, logits):
            for row, request in enumerate(requests):
                self.logits.setdefault(request.request_id, []).append(logits[row].float().clone())

        self.core.runner.on_logits = record

    @property
    def plan(self) -> MemoryPlan:
        return self.core.plan

    def add(self, name: str, prompt: list[int], params: SamplingParams | None = None, **more) -> None:
        self.core.add(name, prompt, params or greedy(), **more)

    def step(self) -> list[TokenOutput]:
        outputs = self.core.step()
        for out in outputs:
            self.outputs.setdefault(out.request_id, []).append(out)
        return outputs

    def run(self, each_step: Callable[[int], None] | None = None, limit: int = 5000) -> None:
        for i in range(limit):
            if not self.core.has_work:
                return
            if each_step:
                each_step(i)
            self.step()
        raise AssertionError(f"no end after {limit} steps")

    def tokens(self, name: str) -> list[int]:
        return [t for out in self.outputs[name] for t in out.tokens]

    def finish(self, name: str) -> FinishReason | None:
        return self.outputs[name][-1].finish


class Rerun:
    """Stands for a captured graph where there is no GPU: computes a shape again, into the same logits."""

    def __init__(self, runner: GraphRunner, shape: StepShape):
        self.runner, self.inputs = runner, runner.io.inputs(shape, keep=True)
        self.logits = torch.full((shape.rows, runner.sampling.vocab_size), torch.nan, dtype=torch.float32)

    def replay(self) -> None:
        self.logits.copy_(self.runner._compute(self.inputs))


def run_ahead(bench: Bench, padded: bool = False) -> Bench:
    """Let a CPU core step as a GPU's does: a step is launched before the last one is known.

    `padded`: each step takes the padded shape that a captured graph would have.
    """
    core, config = bench.core, bench.core.config
    old = core.runner
    experts = tuple(old.touched.shape)
    largest = max(config.max_num_batched_tokens, config.max_num_seqs)
    io = StepIO(largest, config.max_num_seqs, experts, core.device)
    runner = GraphRunner(
        old.model, old.kv, old.expert_table, old.builder, old.sampling, io,
        max_tokens=config.max_num_batched_tokens, max_seqs=config.max_num_seqs,
        max_model_len=core.plan.max_model_len, overlaps=core.model_config.recurrent is None,
    )  # fmt: skip
    runner.on_logits = old.on_logits
    if padded:
        runner._mixed = sorted({*range(8, config.max_num_batched_tokens, 24), config.max_num_batched_tokens})
        for shape in runner.small_shapes():
            rerun = Rerun(runner, shape)
            runner._graphs[shape] = rerun, rerun.logits
    core.runner = runner
    return bench


def make_bench(family: str = "qwen3_moe", **options) -> Bench:
    """`make_bench("mixtral", max_num_seqs=4, ...)`: options are fields of `EngineConfig`."""
    options = {
        "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32",
        "device": "cpu", "debug_pool": True, **options,
    }  # fmt: skip
    return Bench(EngineConfig(**{"model": str(tiny_checkpoint(family)), **options}))


def cap_for(family: str, expert_share: float, kv_tokens: int, **options) -> int:
    """A device cap whose pool holds about that share of the experts beside that many KV tokens.

    On a hybrid model beside the recurrent states of `max_num_seqs` requests too.
    """
    config = EngineConfig(
        **{
            "model": str(tiny_checkpoint(family)), "dtype": "float32", "device": "cpu", "max_num_seqs": 8,
            "max_num_batched_tokens": 64, "max_model_len": 256, **options,
        },
    )  # fmt: skip
    plan = plan_for(config)
    geometry = plan.geometry
    expert = geometry.classes[plan.expert_class].page_bytes
    block = sum(geometry.classes[g.page_class].page_bytes for g in geometry.groups_of(Kind.KV))
    pool = expert_share * plan.experts_total * expert + kv_tokens / plan.block_tokens * block
    pool += state_pages(geometry, plan.units, plan.max_num_seqs) * expert
    huge = -(-int(pool) // geometry.huge_bytes)
    fixed = plan.weights_bytes + plan.workspace_bytes + plan.tables_bytes + plan.driver_bytes
    cap = fixed + huge * geometry.huge_bytes
    if config.device == "cuda":
        cap += plan_module.STREAM_PAGES * expert
        # Under a cap the embedding table makes room, which is not asked for here.
        cap -= plan_for(replace(config, device_memory=cap)).embedding_host_bytes
    return cap
