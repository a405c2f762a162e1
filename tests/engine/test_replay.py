"""Under `schedule_replay` the steps of a run are the same wherever experts lie."""

from __future__ import annotations

import torch
from support.cores import Bench, cap_for, greedy, make_bench, run_ahead
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine.budget import PromptBudget
from rimuru.engine.config import EngineConfig
from rimuru.engine.core import prompt_budget
from rimuru.policy.boundary import Swing
from rimuru.policy.cost import CostModel, ModelCost, gpu

FAMILY = "qwen3_moe"
# A link so slow beside the steps that prompts would wait for one another.
SLOW = CostModel(ModelCost(4, 8, 2, 1 << 30, 1 << 20, 1024, 1e6), gpu("h200"))


def residencies() -> dict[str, Bench]:
    """Everything in the pool, a boundary that swings on every step, and no expert in the pool."""
    options = {"schedule_replay": True, "max_num_batched_tokens": 24}
    half, none = cap_for(FAMILY, 0.5, 512, **options), cap_for(FAMILY, 0.1, 1024, **options)
    benches = {
        "resident": make_bench(FAMILY, **options),
        "swing": make_bench(FAMILY, device_memory=half, **options),
        "host": make_bench(FAMILY, device_memory=none, memory_policy="static", resident_experts=0, **options),
    }
    benches["swing"].core.memory.boundary = Swing(0.8)
    return benches


def steps_of(bench: Bench, budget: PromptBudget | None) -> list[list[tuple[str, int, int]]]:
    """Serve the prompts, two at first and one more every other step; (request, start, count) of each step."""
    scheduler = bench.core.scheduler
    if budget is not None:
        scheduler.budget = budget
        bench.core.memory.know(SLOW)
    schedule, plans = scheduler.schedule, []

    def noted(now: float):
        plan = schedule(now)
        if plan.requests:
            names = [r.request_id for r in plan.requests]
            plans.append(list(zip(names, plan.starts, plan.counts, strict=True)))
        return plan

    scheduler.schedule = noted
    late = {2 * i: i for i in range(2, 8)}
    for i in range(2):
        bench.add(f"r{i}", tiny_prompts()[i], greedy())

    def arrive(step: int) -> None:
        if step in late:
            bench.add(f"r{late[step]}", tiny_prompts()[late[step]], greedy())

    bench.run(arrive)
    return plans


def test_steps_tokens_and_logits_are_the_same_with_any_residency() -> None:
    benches = {name: run_ahead(bench) for name, bench in residencies().items()}
    plans = {name: steps_of(bench, None) for name, bench in benches.items()}
    assert plans["swing"] == plans["host"] == plans["resident"]
    assert benches["swing"].core.memory.promotions > 0
    assert not benches["host"].core.store.resident.any()
    tokens, _ = oracle(tiny_checkpoint(FAMILY), tiny_prompts(), 12)
    for bench in benches.values():
        assert [bench.tokens(f"r{i}") for i in range(8)] == tokens
        for name, rows in bench.logits.items():
            assert torch.equal(torch.stack(rows), torch.stack(benches["resident"].logits[name])), name


def test_predicted_time_would_make_steps_differ() -> None:
    benches = residencies()
    plans = {name: steps_of(bench, PromptBudget()) for name, bench in benches.items()}
    assert plans["host"] != plans["resident"]


def test_only_a_gpu_without_replay_plans_by_predicted_time() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    usual = EngineConfig("m", ttft_slo=2000.0)
    assert prompt_budget(usual, cuda) == PromptBudget(ttft_slo=2.0)
    assert prompt_budget(usual, cpu) is None
    assert prompt_budget(EngineConfig("m", schedule_replay=True), cuda) is None
