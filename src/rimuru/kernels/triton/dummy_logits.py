"""The dummy router's logits of all layers in one launch.

Room: the triton back end. Rule: the numbers of the torch twin `rimuru.kernels.dummy_logits`, up to
the last bits of logarithms; where those decide between two windows of drift, an expert may differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..types import StepMeta

if TYPE_CHECKING:
    from ..dummy_logits import RoutingNoise, RoutingTrace, Sequences


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _absorb(word, value):
    return _mix(word + value.to(tl.uint32) * 0x9E3779B1)


@triton.jit
def _low(word):
    return ((word & 0xFFFF).to(tl.float32) + 0.5) * (1 / 65536)


@triton.jit
def _high(word):
    return ((word >> 16).to(tl.float32) + 0.5) * (1 / 65536)


@triton.jit
def _normal(word):
    return tl.sqrt(-2 * tl.log(_high(word))) * tl.cos(6.283185307179586 * _low(word))


# Step sizes are not specialised: a size met for the first time must not compile anything.
@triton.jit(do_not_specialize=["count"])
def follow_kernel(query_start, positions, slots, seq_lens, salts, expected, count, BLOCK: tl.constexpr):
    """A sequence whose first position is not the one expected is a new one. Grid: (blocks of S,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(seq_lens + i, mask=i < count, other=0)
    live = length > 0
    slot = tl.load(slots + i, mask=live, other=0)
    first = tl.load(positions + tl.load(query_start + i, mask=live, other=0), mask=live, other=0)
    salt = tl.load(salts + slot, mask=live, other=0)
    fresh = _mix(salt.to(tl.uint32, bitcast=True) + 0x9E3779B1).to(tl.int32, bitcast=True)
    goes_on = first == tl.load(expected + slot, mask=live, other=0)
    tl.store(salts + slot, tl.where(goes_on, salt, fresh), mask=live)
    tl.store(expected + slot, length, mask=live)


@triton.jit(do_not_specialize=["first", "tokens"])
def model_kernel(
    positions, token_slots, salts, popularity, scales, out, first, tokens, rate,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid: (T, layers)."""
    token, layer = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + token)
    slot = tl.maximum(tl.load(token_slots + token), 0)
    salt = tl.load(salts + slot).to(tl.uint32, bitcast=True)
    expert = tl.arange(0, EXPERTS_PAD)
    live = expert < EXPERTS
    word = _absorb(_absorb(_mix(salt), first + layer), expert)
    length = _mix(word ^ 0x2545F491)
    per_window = rate / -(tl.log(_low(length)) + tl.log(_high(length)))
    window = tl.floor(position * per_window + _high(_mix(word ^ 0x3C6EF372))).to(tl.int32)
    scale = scales + (first + layer) * 3
    x = tl.load(popularity + (first + layer) * EXPERTS + expert, mask=live, other=0.0)
    x += tl.load(scale) * _normal(_mix(word ^ 0x1B873593))
    x += tl.load(scale + 1) * _normal(_absorb(word ^ 0x510E527F, window))
    x += tl.load(scale + 2) * _normal(_absorb(word ^ 0x6A09E667, position))
    row = (layer * tokens + token).to(tl.int64)
    tl.store(out + row * EXPERTS + expert, x, mask=live)


@triton.jit(do_not_specialize=["first", "tokens"])
def trace_kernel(
    positions, token_slots, salts, ids, starts, out, tracks, all_layers, first, tokens,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, REFUSED: tl.constexpr,
    FALL: tl.constexpr,
):  # fmt: skip
    """Grid: (T, layers)."""
    token, layer = tl.program_id(0), tl.program_id(1)
    slot = tl.maximum(tl.load(token_slots + token), 0)
    salt = tl.load(salts + slot).to(tl.uint32, bitcast=True)
    track = (salt.to(tl.int64) % tracks).to(tl.int32)
    start = tl.load(starts + track)
    row = start + tl.load(positions + token) % (tl.load(starts + track + 1) - start)
    choice = ids + (row.to(tl.int64) * all_layers + first + layer) * TOP_K
    expert = tl.arange(0, EXPERTS_PAD)
    x = tl.full([EXPERTS_PAD], REFUSED, tl.float32)
    for j in tl.static_range(TOP_K):
        x = tl.where(expert == tl.load(choice + j).to(tl.int32), -FALL * j, x)
    at = (layer * tokens + token).to(tl.int64)
    tl.store(out + at * EXPERTS + expert, x, mask=expert < EXPERTS)


def follow(meta: StepMeta, held: Sequences) -> None:
    """See `kernels.dummy_logits.follow`."""
    count = len(meta.slots)
    follow_kernel[(triton.cdiv(count, 128),)](
        meta.query_start, meta.positions, meta.slots, meta.seq_lens, held.salts, held.expected, count,
        BLOCK=128,
    )  # fmt: skip


def model_logits(
    noise: RoutingNoise, held: Sequences, meta: StepMeta, first: int, layers: int
) -> torch.Tensor:
    """See `kernels.dummy_logits.model_logits`."""
    tokens, experts = len(meta.positions), noise.popularity.shape[1]
    out = torch.empty((layers, tokens, experts), dtype=torch.float32, device=meta.positions.device)
    pad = triton.next_power_of_2(experts)
    model_kernel[(tokens, layers)](
        meta.positions, meta.token_slots, held.salts, noise.popularity, noise.scales, out, first, tokens,
        noise.rate, EXPERTS=experts, EXPERTS_PAD=pad, num_warps=1 if pad <= 128 else 4,
    )  # fmt: skip
    return out


def trace_logits(
    trace: RoutingTrace, held: Sequences, meta: StepMeta, first: int, layers: int
) -> torch.Tensor:
    """See `kernels.dummy_logits.trace_logits`."""
    from ..dummy_logits import FALL, REFUSED

    tokens, (_, all_layers, top_k) = len(meta.positions), trace.ids.shape
    out = torch.empty((layers, tokens, trace.experts), dtype=torch.float32, device=meta.positions.device)
    pad = triton.next_power_of_2(trace.experts)
    trace_kernel[(tokens, layers)](
        meta.positions, meta.token_slots, held.salts, trace.ids, trace.starts, out, len(trace.starts) - 1,
        all_layers, first, tokens, EXPERTS=trace.experts, EXPERTS_PAD=pad, TOP_K=top_k, REFUSED=REFUSED,
        FALL=FALL, num_warps=1 if pad <= 128 else 4,
    )  # fmt: skip
    return out
