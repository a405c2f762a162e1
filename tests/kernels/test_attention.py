"""The attention kernels against the torch twin, over pages whose other bytes are NaN."""

from __future__ import annotations

import importlib

import pytest
import torch
from kernels.kv_cases import DEVICE, make_layout, make_step, pad_step

from rimuru.kernels import reference

kernels = importlib.import_module(
    "rimuru.kernels.triton.attention"
)  # the package has a function of that name

# Both sides read the same rounded inputs and accumulate in float32. What differs is the result's rounding
# (the two sides may round apart: one ulp of the value, the relative part) and the weights rounded to the KV
# type before the second product: half an ulp each of weights that sum to 1, against values of a few units,
# averaging out over the tokens (the absolute part, half an ulp of 1).
EPS = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Memory that nobody has written is NaN: each row of a result must be written, padding too."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def compare(layout, lengths, queries, q_heads, window=0, padded=None, **step) -> None:
    """`padded`: sequences and tokens of the graph that the step is to be replayed by."""
    kv, meta = make_step(layout, lengths, queries, **step)
    if padded:
        meta = pad_step(meta, *padded)
    torch.manual_seed(7)
    q = torch.randn(len(meta.positions), q_heads, layout.head_dim).to(layout.dtype).to(DEVICE)
    scale = layout.head_dim**-0.5
    got = kernels.attention(q, kv, meta, scale, window)
    want = reference.attention(q, kv, meta, scale, window)
    torch.testing.assert_close(got, want, rtol=EPS[layout.dtype], atol=EPS[layout.dtype] / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "q_heads"), [(2, 6), (3, 3)])
def test_decode_reads_every_sequence_where_its_pages_lie(dtype, heads, q_heads):
    compare(make_layout(dtype, heads, 32), [1, 17, 150, 0, 33], [1] * 5, q_heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_sees_its_prefix_and_nothing_later(dtype):
    compare(make_layout(dtype, 1, 32), [70, 3, 130, 40], [70, 3, 5, 24], 2)


def test_prompts_and_decode_mix_in_a_step():
    compare(make_layout(torch.bfloat16, 2, 16), [40, 9, 20, 0, 75], [33, 1, 20, 1, 1], 4)


@pytest.mark.parametrize("padded", [(5, 75), (9, 250), (70, 90)])
@pytest.mark.parametrize("window", [0, 16])
def test_a_captured_mixed_step_with_padding_sequences_and_tokens(padded, window):
    compare(make_layout(torch.bfloat16, 2, 16), [40, 9, 20, 75], [33, 1, 20, 1], 4, window, padded)


@pytest.mark.parametrize("padded", [(4, 4), (9, 9), (9, 7), (4, 20)])
def test_a_captured_decode_step_with_padding_sequences_and_tokens(padded):
    compare(make_layout(torch.bfloat16, 2, 16), [40, 9, 0, 75], [1] * 4, 4, padded=padded)


def test_a_captured_mixed_step_may_hold_decode_alone_or_nothing():
    layout = make_layout(torch.bfloat16, 2, 16)
    kv, meta = make_step(layout, [40, 300], [1, 1])
    q = torch.randn(64, 4, 16, device=DEVICE).bfloat16()
    meta = pad_step(meta, 6, 64)
    meta.max_query_len = 64
    want = reference.attention(q, kv, meta, 0.25)
    torch.testing.assert_close(kernels.attention(q, kv, meta, 0.25), want, rtol=2**-7, atol=2**-8)
    meta.query_start.zero_()
    meta.seq_lens.zero_()
    assert not kernels.attention(q, kv, meta, 0.25).any()


@pytest.mark.parametrize("multiprocessors", [1, 3])  # 1 and 4 of the 8 splits that there are blocks for
def test_a_mixed_step_splits_by_how_many_sequences_decode(multiprocessors, monkeypatch):
    monkeypatch.setattr(kernels, "_device", lambda device: (multiprocessors, 99))
    monkeypatch.setattr(kernels.tiles, "MIN_SPLIT", 32)
    layout = make_layout(torch.float32, 1, 16)
    assert kernels.tiles.mixed_split_count(5, 1, 3 * 250) == 8
    compare(layout, [250, 20, 70], [1, 20, 1], 2, padded=(5, 40))
    assert not kernels._counters(DEVICE).any()


def test_many_prompts_take_turns_on_few_blocks():
    # One multiprocessor and 64 tokens: four blocks a head, for nine prompts.
    compare(make_layout(torch.float32, 1, 16), [3] * 6 + [20, 2, 40], [3] * 6 + [2, 2, 39], 1)


@pytest.mark.parametrize("window", [1, 16, 37])
def test_a_window_hides_what_lies_before_it(window):
    layout = make_layout(torch.float32, 1, 16)
    compare(layout, [90, 200, 5], [60, 1, 5], 2, window=window)


@pytest.mark.parametrize("multiprocessors", [4, 12])  # 4 splits, merged in the kernel; 10, merged by another
def test_splits_merge_in_order_and_leave_the_counters_at_zero(multiprocessors, monkeypatch):
    monkeypatch.setattr(kernels, "_device", lambda device: (multiprocessors, 99))
    layout = make_layout(torch.float32, 1, 16)
    compare(layout, [1200, 129, 1, 0], [1] * 4, 3)
    compare(layout, [1200, 129, 1], [1, 60, 1], 3, window=400)
    assert not kernels._counters(DEVICE).any()


@pytest.mark.parametrize(("lengths", "splits"), [([300, 129, 1, 0], 1), ([4000], 8)])
def test_wide_blocks_of_one_a_multiprocessor(lengths, splits, monkeypatch):
    multiprocessors = splits * len(lengths)
    monkeypatch.setattr(kernels, "_device", lambda device: (multiprocessors, 227))
    assert kernels.tiles.wide_split_count(len(lengths), 1, max(lengths), multiprocessors) == splits
    compare(make_layout(torch.bfloat16, 1, 128), lengths, [1] * len(lengths), 3)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_head_sizes_of_served_models(dim):
    compare(make_layout(torch.bfloat16, 1, dim, layers=3), [40, 20], [1, 20], 2, layer=2)


def test_blocks_of_other_sizes_and_grains():
    compare(make_layout(torch.float32, 1, 16, block_tokens=32, grain=4096), [50, 70], [1, 40], 2, layer=0)


def test_a_decode_token_does_not_depend_on_its_neighbours_prompt():
    layout = make_layout(torch.float32, 1, 16)
    kv, meta = make_step(layout, [300, 64], [1, 30])
    q = torch.randn(31, 2, 16, device=DEVICE)
    beside_thirty = kernels.attention(q, kv, meta, 0.25)[:1]
    meta.query_start[2], meta.max_query_len = 3, 2
    assert torch.equal(kernels.attention(q[:3], kv, meta, 0.25)[:1], beside_thirty)


def test_unsupported_layouts_are_named():
    with pytest.raises(ValueError, match="head_dim 16, 32, 64, 128 or 256, not 80"):
        kernels.check_supported(make_layout(torch.bfloat16, 1, 80), 1)
    with pytest.raises(ValueError, match="float64"):
        kernels.check_supported(make_layout(torch.float64, 1, 64), 1)
    with pytest.raises(ValueError, match="divide"):
        kernels.check_supported(make_layout(torch.bfloat16, 2, 64), 3)


def test_split_count_fills_the_gpu_without_starving_long_sequences():
    assert kernels.tiles.split_count(1, 4, 32_768, 132) == 99
    assert kernels.tiles.split_count(256, 4, 1024, 132) == 1
    assert kernels.tiles.split_count(256, 4, 32_768, 132) == 8
    assert kernels.tiles.split_count(1, 4, 100, 132) == 2
    # One sequence of few heads: smaller splits, so that more multiprocessors have one.
    assert [kernels.tiles.min_split(1, heads, 2048, 132) for heads in (4, 16)] == [64, 128]
    assert kernels.tiles.split_count(1, 4, 2048, 132) == 32


def test_wide_blocks_are_for_work_that_they_share_out_evenly():
    assert kernels.tiles.wide_split_count(32, 4, 1024, 132) == 1
    assert kernels.tiles.wide_split_count(32, 4, 32_768, 132) == 0  # a long sequence among short ones
    assert kernels.tiles.wide_split_count(1, 4, 32_768, 132) == 33
    assert kernels.tiles.wide_split_count(1, 4, 4096, 132) == 0  # too short for 33 blocks a head
    assert kernels.tiles.wide_split_count(8, 4, 32_768, 132) == 0  # four partials: narrow blocks merge them
    assert kernels.tiles.wide_split_count(17, 4, 1024, 132) == 0  # half of the multiprocessors would idle
    assert kernels.tiles.wide_split_count(64, 4, 1024, 132) == 0
    assert kernels.tiles.wide_tile(torch.bfloat16, 128, 8, 99) is None
