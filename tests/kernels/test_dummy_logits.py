"""The dummy router's kernels write what their torch twins say."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
from kernels.compile_only import compiled
from kernels.kv_cases import DEVICE

from rimuru.kernels import dummy_logits as twin
from rimuru.kernels.types import StepMeta

kernels = import_module("rimuru.kernels.triton.dummy_logits")


def on(device: str, meta: StepMeta) -> StepMeta:
    fields = (meta.positions, meta.token_slots, meta.query_start, meta.slots, meta.seq_lens)
    return StepMeta(*(t.to(device) for t in fields), meta.max_query_len, meta.max_seq_len)


def make_step(starts: list[int], counts: list[int], slots: list[int]) -> StepMeta:
    """With two padding sequences and three padding tokens behind."""
    ends = np.cumsum(counts)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])

    def ints(*parts):
        return torch.tensor(np.concatenate(parts), dtype=torch.int32)

    return StepMeta(
        ints(positions, [0] * 3), ints(np.repeat(slots, counts), [-1] * 3), ints([0], ends, [ends[-1]] * 2),
        ints(slots, [0, 0]), ints(np.add(starts, counts), [0, 0]), max(counts), 4096,
    )  # fmt: skip


STEPS = [make_step([0, 0, 5], [1, 3, 1], [2, 0, 7]), make_step([1, 9, 6], [1, 1, 2], [2, 0, 7])]


def both_held(slots: int = 8) -> tuple[twin.Sequences, twin.Sequences]:
    return twin.sequences(slots, 3, "cpu"), twin.sequences(slots, 3, DEVICE)


def test_sequences_are_followed_alike():
    mine, theirs = both_held()
    for meta in STEPS:
        twin.follow(meta, mine)
        kernels.follow(on(DEVICE, meta), theirs)
        assert torch.equal(mine.salts, theirs.salts.cpu())
        assert torch.equal(mine.expected, theirs.expected.cpu())


def test_more_sequences_than_one_program_holds_are_followed():
    order = np.random.default_rng(0).permutation(300).tolist()
    meta = make_step([0] * 300, [1] * 300, order)
    mine, theirs = both_held(300)
    for at in (meta, make_step([1] * 300, [1] * 300, order)):
        twin.follow(at, mine)
        kernels.follow(on(DEVICE, at), theirs)
    assert torch.equal(mine.salts, theirs.salts.cpu())


@pytest.mark.parametrize(("experts", "first", "layers"), [(60, 0, 2), (8, 2, 1)])
def test_a_model_s_logits_are_the_twin_s(experts, first, layers):
    generator = torch.Generator().manual_seed(0)
    popularity = torch.randn(3, experts, generator=generator) * 0.5
    scales = torch.tensor([[0.4, 0.5, 0.6]]).repeat(3, 1) + torch.arange(3)[:, None] * 0.01
    mine, theirs = both_held()
    for meta in STEPS:
        twin.follow(meta, mine)
        kernels.follow(on(DEVICE, meta), theirs)
        want = twin.model_logits(twin.RoutingNoise(popularity, scales, 0.07), mine, meta, first, layers)
        noise = twin.RoutingNoise(popularity.to(DEVICE), scales.to(DEVICE), 0.07)
        got = kernels.model_logits(noise, theirs, on(DEVICE, meta), first, layers).cpu()
        # Logarithms and cosines of float32 differ in their last bits. On the edge of a window of drift that
        # decides which window it is: with positions below 2^5 in about one of 10^5 experts.
        assert ((got - want).abs() > 2e-5).float().mean() < 1e-3


def test_terms_are_standard_normal_and_independent():
    meta = make_step([0] * 8, [60] * 8, list(range(8)))
    held = twin.sequences(8, 0, "cpu")
    twin.follow(meta, held)
    rows = []
    for scale in torch.eye(3):
        noise = twin.RoutingNoise(torch.zeros(4, 64), scale.repeat(4, 1), 1.5)
        rows.append(twin.model_logits(noise, held, meta, 0, 4)[:, :480].flatten())
    spread = torch.stack(rows)
    # 4 x 8 x 64 = 2,048 tastes, the fewest: a mean scatters by 0.022, a variance by 0.031.
    assert spread.mean(1).abs().max() < 0.09
    assert (spread.var(1) - 1).abs().max() < 0.13
    assert (torch.corrcoef(spread) - torch.eye(3)).abs().max() < 0.09


@pytest.mark.parametrize(("first", "layers"), [(0, 3), (2, 1)])
def test_a_recording_s_logits_are_the_twin_s(first, layers):
    rng = np.random.default_rng(1)
    ids = torch.from_numpy(np.argsort(rng.random((19, 3, 24)), axis=-1)[..., :3].astype(np.int16))
    starts = torch.tensor([0, 6, 7, 19], dtype=torch.int32)
    mine, theirs = both_held()
    for meta in STEPS:
        twin.follow(meta, mine)
        kernels.follow(on(DEVICE, meta), theirs)
        want = twin.trace_logits(twin.RoutingTrace(ids, starts, 24), mine, meta, first, layers)
        trace = twin.RoutingTrace(ids.to(DEVICE), starts.to(DEVICE), 24)
        assert torch.equal(kernels.trace_logits(trace, theirs, on(DEVICE, meta), first, layers).cpu(), want)
        assert ((want > twin.REFUSED).sum(-1) == 3).all()


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 90, 120])
def test_the_kernels_compile_without_spills(chip):
    assert all(report["spills"] == 0 for report in compiled("dummy_logits", chip).values())
