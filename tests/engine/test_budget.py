"""The step budget in predicted time: when prompts are held back, when a pass begins, what it may hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rimuru.engine.budget import PromptBudget
from rimuru.policy.cost import CostModel, ModelCost, gpu

MODEL = ModelCost(48, 128, 8, 9 << 20, 2_500_000_000, 98_304, 6e9)
COST = CostModel(MODEL, gpu("h200"))
PASS = PromptBudget.pass_seconds(4000, 0.4, COST)  # 40 % of the experts are out: about 0.4 s


def ask(budget: PromptBudget, limit: int = 8192, **over) -> int:
    given = {
        "now": 10.0, "prompts": 500, "oldest": 10.0, "decoding": 8, "missing": 0.4, "step_seconds": 0.02,
        "cost": COST,
    }  # fmt: skip
    return budget.tokens(limit, **(given | over))


def test_a_pass_is_priced_by_the_missing_experts_it_streams():
    streamed = 48 * 128 * 0.4 * (9 << 20) / 54.5e9
    assert PromptBudget.pass_seconds(4000, 0.4, COST) == pytest.approx(streamed, rel=0.01)
    assert PromptBudget.pass_seconds(300, 0.4, COST) == pytest.approx(PASS, rel=0.01)
    assert PromptBudget.pass_seconds(1, 0.4, COST) == pytest.approx(PASS * 8 / 128, rel=0.01)


@pytest.mark.parametrize(
    "free", [{"missing": 0.0}, {"decoding": 0}, {"prompts": 0}, {"prompts": 9000}, {"oldest": 10.0 - PASS}]
)
def test_prompts_are_not_held_back_where_nothing_is_gained_by_it(free):
    assert ask(PromptBudget(), **free) == 8192


def test_a_fresh_prompt_waits_for_others_half_a_pass_at_most():
    budget = PromptBudget()
    assert ask(budget) == 0
    assert ask(budget, now=10.0 + 0.49 * PASS) == 0
    assert ask(budget, now=10.0 + 0.51 * PASS) == 8192


def test_the_first_token_objective_shortens_the_wait():
    assert ask(PromptBudget(ttft_slo=PASS * 1.2), now=10.0 + 0.25 * PASS) == 8192
    assert ask(PromptBudget(ttft_slo=PASS / 2)) == 8192


def test_decoders_have_their_steps_between_passes():
    budget = PromptBudget(passed_at=10.0)
    assert ask(budget, now=10.0 + 0.4 * PASS, oldest=5.0) == 0
    assert ask(budget, now=10.0 + 0.6 * PASS, oldest=5.0) == 8192
    slow = PromptBudget(itl_slo=0.05, passed_at=10.0)  # mean gap: (PASS + n x 0.02) / (n + 1) <= 0.05
    steps = (PASS - 0.05) / (0.05 - 0.02)
    assert ask(slow, now=10.0 + 0.02 * (steps - 1), oldest=5.0) == 0
    assert ask(slow, now=10.0 + 0.02 * (steps + 1), oldest=5.0) > 0


def test_prompts_do_not_wait_for_an_inter_token_objective_that_is_as_good_as_out_of_reach():
    late = {"oldest": 5.0, "now": 10.0 + 0.6 * PASS}
    assert ask(PromptBudget(itl_slo=0.025, passed_at=10.0), **late) == 0  # under four passes of decoding
    assert ask(PromptBudget(itl_slo=0.021, passed_at=10.0), **late) > 0  # some twenty


def test_the_inter_token_objective_bounds_a_chunk_s_compute():
    got = ask(PromptBudget(itl_slo=0.03), missing=0.0, prompts=8000)
    assert 64 < got < 8192
    assert 0.02 + COST.factors.mix + COST.recompute_seconds(got) <= 0.03
    assert ask(PromptBudget(itl_slo=0.001), missing=0.0, prompts=8000) == 64


def test_a_pass_is_not_cut_in_two_for_an_objective_that_neither_half_meets():
    """64 tokens stream nearly what 8,000 do: cutting would cost the decoders a second pass of 0.4 s."""
    late = {"now": 20.0, "prompts": 8000}
    assert ask(PromptBudget(itl_slo=0.03), **late) == 8192
    assert ask(PromptBudget(itl_slo=0.001), **late) == 8192
    # Where the chunk's compute outweighs what is streamed again, it is cut.
    got = ask(PromptBudget(itl_slo=0.03), missing=0.01, **late)
    assert 64 < got < 8192


@pytest.mark.parametrize("objective", [0.001, 0.03, float("inf")])
def test_an_objective_bounds_nothing_where_prompt_tokens_cost_nothing(objective):
    """A fit may end with compute that costs no time, as where a step's reads hide it."""
    free = replace(COST, factors=replace(COST.factors, prefill=0.0))
    got = ask(PromptBudget(itl_slo=objective), missing=0.0, prompts=8000, cost=free)
    assert got == (64 if objective < 0.02 + COST.factors.mix else 8192)
    assert ask(PromptBudget(itl_slo=float("inf")), missing=0.0, prompts=8000) == 8192
