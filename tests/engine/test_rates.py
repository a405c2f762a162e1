"""What the engine knows of its machine: a card's rates, and steps that correct them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sim.conftest import MODEL

from rimuru.engine.config import EngineConfig
from rimuru.engine.plan import plan_memory
from rimuru.engine.rates import EVERY, WARM_UP, Rates, card_of
from rimuru.engine.request import Request, SamplingParams
from rimuru.engine.scheduler import StepPlan
from rimuru.engine.sizes import sizes_of
from rimuru.policy.cost import CostModel, Factors, Step, gpu

LAYERS, EXPERTS = 6, 32


@pytest.fixture
def rates() -> Rates:
    config = EngineConfig(model="toy", device_memory=2 << 30)
    plan = plan_memory(
        config, sizes_of(MODEL, config, 2), device_available=2 << 30, host_available=8 << 30,
        device_is_host=False,
    )  # fmt: skip
    return Rates(MODEL, plan, gpu("rtx-4090"), 2)


def step_of(batch: int, prompt: int = 0) -> StepPlan:
    plan = StepPlan()
    for i in range(batch):
        request = Request(str(i), [0] * 101, SamplingParams(), max_tokens=9, arrival=0.0)
        request.num_computed = 100
        plan.add(request, 1)
    if prompt:
        plan.add(Request("p", [0] * prompt, SamplingParams(), max_tokens=9, arrival=0.0), prompt)
    return plan


def test_a_card_in_the_table_is_believed_until_steps_say_otherwise(rates):
    assert rates.cost.card == gpu("rtx-4090")
    assert (rates.cost.factors, rates.fitted) == (Factors(), 0)
    truth = CostModel(rates.cost.model, gpu("rtx-4090"), Factors(host=4e-3, mix=1e-3, hbm=1.6, link=1.3))
    rng = np.random.default_rng(0)
    for n in range(3000):
        batch, prompt = int(rng.integers(1, 60)), 300 if n % 9 == 0 else 0
        touched = (rng.random((LAYERS, EXPERTS)) < 1 - (1 - 4 / 32) ** (batch + prompt)).astype(np.int32)
        resident = rng.random((LAYERS, EXPERTS)) < 0.9
        hit = touched > 0
        step = Step(
            batch + prompt, batch * 101 + prompt, prompt, hit.sum(axis=1), (hit & ~resident).sum(axis=1)
        )
        rates.observe(step_of(batch, prompt), touched, resident, truth.seconds(step))
    assert rates.fitted > 3000 / 9
    assert rates.error < 0.01
    test = Step(20, 2000, touched=30.0, missed=3.0)
    assert rates.cost.seconds(test) == pytest.approx(truth.seconds(test), rel=0.03)


def test_most_decode_steps_are_left_out_and_every_prompt_s_step_is_taken_in(rates):
    touched, resident = np.ones((LAYERS, EXPERTS), np.int32), np.ones((LAYERS, EXPERTS), bool)
    for _ in range(WARM_UP):
        assert not rates.observe(step_of(4, 100), touched, resident, 0.003)
    taken = sum(rates.observe(step_of(4), touched, resident, 0.003) for _ in range(10 * EVERY))
    assert taken == 10
    assert rates.observe(step_of(4, 100), touched, resident, 0.003)
    assert rates.fitted == 11


def test_a_cpu_is_measured_once_and_reads_lent_experts_as_fast_as_its_own():
    card = card_of(torch.device("cpu"))
    assert card_of(torch.device("cpu")) is card
    assert card.link_bytes_s == card.hbm_bytes_s
    assert 2e8 < card.hbm_bytes_s < 1e12  # any machine's memory
    assert 1e8 < card.bf16_flops < 1e14


def test_a_slow_link_s_exposed_misses_are_seen_in_the_step_times(rates):
    """The slot may halve the link that the card could use: the fit says so in the link's factor."""
    slow = replace(rates.cost.card, link_bytes_s=rates.cost.card.link_bytes_s / 2)
    truth = CostModel(rates.cost.model, slow)
    rng = np.random.default_rng(0)
    for n in range(2000):
        batch = 1 + n % 30
        hit = rng.random((LAYERS, EXPERTS)) < 1 - (1 - 4 / 32) ** batch
        resident = rng.random((LAYERS, EXPERTS)) < 0.7
        step = Step(batch, batch * 101, 0, hit.sum(axis=1), (hit & ~resident).sum(axis=1))
        rates.observe(step_of(batch), hit.astype(np.int32), resident, truth.seconds(step))
    assert 1.7 < rates.cost.factors.link < 2.3
