"""How many experts come in after a step: as many as the link has time for, and those worth waiting for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.cores import cap_for, make_bench
from support.tiny import tiny_prompts

from rimuru.engine.memory import DEAR_GAIN, IDLE_SHARE, PROMOTIONS, Memory, promotions_idle, promotions_worth

LINK = 0.19e-3  # seconds of one expert


def test_promotions_take_a_share_of_what_misses_leave_of_the_link():
    step = 20e-3
    carried = step / LINK  # experts the link could bring in a step
    assert promotions_idle(step, carried / 2, LINK) == int(IDLE_SHARE * carried / 2)
    assert promotions_idle(step, 0, LINK) == int(IDLE_SHARE * carried)


@pytest.mark.parametrize("missed", [20e-3 / LINK, 200])
def test_a_link_that_misses_fill_has_no_time_for_promotions(missed):
    assert promotions_idle(20e-3, missed, LINK) == 0


def test_before_the_first_step_is_known_nothing_is_idle():
    assert promotions_idle(0.0, 0.0, LINK) == 0


def test_idle_time_is_spent_on_any_gain_and_steps_wait_for_great_ones_only():
    gains = np.array([0.9, DEAR_GAIN + 0.01, DEAR_GAIN - 0.01, 0.05])
    assert promotions_worth(gains, 0).tolist() == [True, True, False, False]
    assert promotions_worth(gains, 1).tolist() == [True, True, False, False]
    assert promotions_worth(gains, 3).tolist() == [True, True, True, False]
    assert promotions_worth(gains, 9).all()
    assert promotions_worth(np.zeros(0), 2).shape == (0,)


def bench(link_share_of_hbm: float) -> tuple[list[int], Memory]:
    """Half of the experts resident, and a link so fast. Returns the promotions made after each step."""
    b = make_bench("qwen3_moe", device_memory=cap_for("qwen3_moe", 0.5, 512))
    memory = b.core.memory
    card = memory.cost.card
    card = replace(card, link_bytes_s=card.hbm_bytes_s * link_share_of_hbm)
    memory.know(replace(memory.cost, card=card))
    memory.know = lambda cost: None  # what is measured here says otherwise
    came, before = [], 0
    for i, prompt in enumerate(tiny_prompts()):
        b.add(f"r{i}", prompt)

    def note(step: int) -> None:
        nonlocal before
        came.append(memory.promotions - before)
        before = memory.promotions

    b.run(note)
    return came, memory


def test_where_host_and_pool_are_one_memory_few_experts_move():
    came, _ = bench(1.0)
    assert 0 < max(came) <= PROMOTIONS[0]


def test_more_experts_move_than_the_least_where_the_link_is_idle():
    came, memory = bench(0.5)
    assert PROMOTIONS[0] < max(came) <= PROMOTIONS[1]
    memory.check()
