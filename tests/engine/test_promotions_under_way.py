"""Requests in pools whose experts come in beside the steps, on a copy stream that advances as it pleases.

As on a GPU an expert is torn until its copy has ended, and the device's table names its page before the host
knows. No layer may find an entry whose page is not that expert's own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import test_random_lives as lives
from support.cores import Bench, cap_for, greedy
from support.tiny import FAMILIES, oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine.request import FinishReason
from rimuru.experts.side_copy import SideStreamCopy
from rimuru.experts.store import Arrival
from rimuru.kernels.types import EXPERT_HOST


class Happened:
    done = False

    def query(self) -> bool:
        return self.done

    def happen(self) -> None:
        self.done = True


class Lane:
    """The copy stream of a core on a CPU, whose launched steps have always ended."""

    def __init__(self, bench: Bench, ahead: int):
        self.store = bench.core.store
        self.work: deque[Callable[[], object]] = deque()
        self.early = 0  # entries that a layer found before the host knew of them
        self.store._copy = self.side = SideStreamCopy(self, ahead)

    def launched(self) -> None:
        return None

    def copy(self, arrival: Arrival, after: None) -> Happened:
        event, half = Happened(), arrival.to.numel() // 2
        self.work += (
            lambda: arrival.to[:half].copy_(arrival.source[:half]),
            lambda: arrival.to[half:].copy_(arrival.source[half:]),
            lambda: arrival.cell.fill_(arrival.entry),
            event.happen,
        )
        return event

    def advance(self, parts: int) -> None:
        for _ in range(min(parts, len(self.work))):
            self.work.popleft()()

    def finish(self) -> None:
        while self.side.pending:
            self.advance(len(self.work))
            self.side.pump()

    def check_entries(self) -> None:
        """What a layer finds now: the expert's own page, whole, or its host copy."""
        store, entries = self.store, self.store._table.device_table.numpy()
        in_pool = (entries & EXPERT_HOST) == 0
        own = (store._page >= 0) & (entries == store._pool_address(store._page))
        assert (own | ~in_pool).all(), "an entry names a page that is another's"
        host = store._host_entry(store._host_slot)
        assert (entries == host)[~in_pool].all(), "an entry names another's host copy"
        self.early += int(np.count_nonzero(in_pool & ~store.resident))


def test_a_request_alone_waits_for_pages_that_promotions_have_taken_until_they_arrive(bench):
    family, prompt = "qwen3_moe", tiny_prompts((16,))[0]
    options = {"max_num_seqs": 2, "max_model_len": 128}
    b = bench(family, device_memory=cap_for(family, 0.25, 64, **options), **options)
    lane, store = Lane(b, ahead=64), b.core.store
    b.add("r", prompt, greedy(20))
    b.step()  # computes the one block; the next token needs another
    store.demote([tuple(x) for x in np.argwhere(store.resident)])
    store.promote([tuple(x) for x in np.argwhere(~store.resident)])
    assert store.in_flight.any()
    assert b.core.memory.room() == 0
    for _ in range(3):
        assert b.step() == [], "there is no page for the next token"
    lane.finish()
    b.run()
    assert b.finish("r") is FinishReason.LENGTH
    assert b.tokens("r") == oracle(tiny_checkpoint(family), [prompt], 20)[0][0]


def test_swaps_keep_a_fixed_number_of_experts_pages_while_some_are_on_their_way(bench):
    family, prompts = "qwen3_moe", tiny_prompts()[:4]
    options = {"memory_policy": "static", "resident_experts": 12, "max_num_seqs": 4}
    b = bench(family, device_memory=cap_for(family, 12 / 32, 1024, **options), **options)
    lane, floor, below = Lane(b, ahead=4), b.plan.experts_floor, []
    for i, prompt in enumerate(prompts):
        b.add(f"r{i}", prompt)

    def move_on(step: int) -> None:
        store = b.core.store
        below.append(store.resident.sum() < floor)
        assert np.count_nonzero(store.resident | store.in_flight) == floor
        lane.advance(step % 3)

    b.run(move_on)
    assert any(below)
    assert [b.tokens(f"r{i}") for i in range(len(prompts))] == oracle(tiny_checkpoint(family), prompts, 12)[0]


def on_a_lane(monkeypatch, seed: int) -> list[Lane]:
    """Let promotions of the next life take a lane, moved on around steps and around each layer's experts."""
    rng, lanes, launching = random.Random(seed), [], []

    def prepare(b: Bench) -> Bench:
        core, ops = b.core, b.core._ops
        lane = Lane(b, rng.choice((1, 4, 64)))
        lanes.append(lane)
        if rng.random() < 0.5:  # a link worth many promotions a step
            card = core.memory.cost.card
            core.memory.know(
                replace(core.memory.cost, card=replace(card, link_bytes_s=card.hbm_bytes_s / 10))
            )
            core.memory.know = lambda cost: None
        step, moe = core.step, ops.moe

        def advance() -> None:
            lane.advance(rng.choice((0, 0, 1, 2, 3, 5, 40)))

        def stepped():
            advance()
            launching.append(True)
            outputs = step()
            launching.clear()
            advance()
            lane.side.check()
            return outputs

        def layer(*given, **more):
            if not launching:  # another engine's
                return moe(*given, **more)
            advance()
            lane.check_entries()
            out = moe(*given, **more)
            advance()
            return out

        core.step = stepped
        monkeypatch.setattr(ops, "moe", layer)
        return b

    monkeypatch.setattr(lives, "tight", lambda *given, tight=lives.tight: prepare(tight(*given)))
    return lanes


@pytest.mark.parametrize(("seed", "family"), [(2, "mixtral"), (10, "qwen3_moe")])
def test_random_lives_with_experts_arriving_amid_steps(monkeypatch, seed, family):
    lanes = on_a_lane(monkeypatch, seed)
    lives.live(seed, family, requests=6)
    assert lanes[0].early > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(200, 208))
def test_many_random_lives_with_experts_arriving_amid_steps(monkeypatch, seed, family):
    on_a_lane(monkeypatch, seed)
    lives.live(seed, family, requests=12)
