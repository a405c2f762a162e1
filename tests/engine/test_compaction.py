"""Pages that move together while requests run: nobody's tokens change, and nothing is read where it was."""

from __future__ import annotations

import pytest
import torch
from support.cores import GREEDY, cap_for, greedy, run_ahead
from support.tiny import HYBRID_FAMILIES, oracle, tiny_checkpoint, tiny_prompts

from rimuru.pool.geometry import Kind

# Recurrent layers do not run ahead of the host.
CASES = [("qwen3_moe", False), ("qwen3_moe", True), *((family, False) for family in HYBRID_FAMILIES)]
LENGTHS = [3, 12, 7, 12, 9, 5, 11, 10]  # they end at different times, so that holes are left between them


def partly_used(core) -> dict[int, int]:
    """Page classes of KV and states -> parents with both used and free pages."""
    allocator, geometry = core.memory.cache.allocator, core.plan.geometry
    kinds = (Kind.KV, Kind.STATE, Kind.CONV)
    return {cls: len(allocator.open_parents(cls)) for kind in kinds for cls in geometry.classes_of(kind)}


@pytest.mark.parametrize(("family", "ahead"), CASES)
def test_tokens_stay_the_same_when_pages_move_on_every_step(bench, family, ahead):
    prompts = tiny_prompts()
    b = bench(family, device_memory=cap_for(family, 0.5, 640))
    if ahead:
        run_ahead(b)
    core, rounds = b.core, ("first-", "again-")

    def move(step: int) -> None:
        core.memory.compact(over_cached=step % 3 == 2)
        core.memory.check()
        if step % 3 == 2:
            spare = {cls: set(core.memory.cache.spare_pages(cls).tolist()) for cls in partly_used(core)}
            assert all(n <= 1 or spare[cls] for cls, n in partly_used(core).items())

    for prefix in rounds:
        for i, prompt in enumerate(prompts):
            b.add(f"{prefix}{i}", prompt, greedy(LENGTHS[i]))
        b.run(move)
    assert core.stats().moved_bytes == core.memory.moved_bytes > 0
    tokens, logits = oracle(tiny_checkpoint(family), prompts, GREEDY)
    for prefix in rounds:
        for i, n in enumerate(LENGTHS):
            assert b.tokens(f"{prefix}{i}") == tokens[i][:n], f"{prefix}{i}"
            rows = torch.stack(b.logits[f"{prefix}{i}"][-n:])
            assert (rows - logits[i][:n]).abs().max() < 1e-4
    core.check()


def test_a_page_for_an_expert_is_made_by_moving_before_any_prefix_is_forgotten(bench):
    b = bench(device_memory=cap_for("qwen3_moe", 0.5, 640))
    memory, cache, expert = b.core.memory, b.core.memory.cache, b.core.plan.expert_class
    made: list[int] = []

    def ask(step: int) -> None:
        moved, cached = memory.moved_bytes, cache.evictable_blocks()
        wanted = cache.allocator.obtainable(expert) + 1
        if not made and cached and cache.allocator.free_inside(b.core.plan.geometry.class_of(Kind.KV)) >= 3:
            memory._whole_pages(wanted, wanted)
            assert memory.moved_bytes > moved
            assert cache.allocator.obtainable(expert) >= wanted
            assert cache.evictable_blocks() == cached
            made.append(step)

    for i, n in enumerate((13, 40, 17, 60, 21, 15, 33, 12)):
        b.add(f"r{i}", tiny_prompts()[i], greedy(n))
    b.run(ask)
    assert made
    tokens, _ = oracle(tiny_checkpoint("qwen3_moe"), tiny_prompts(), GREEDY)
    assert [b.tokens(f"r{i}")[:GREEDY] for i in range(8)] == tokens
