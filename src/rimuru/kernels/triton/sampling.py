"""The draw of `rimuru.kernels.sampling.choose` in two launches, without a sort.

Room: the triton back end. Rule: the same token as the torch twin draws, up to the last bits of
logarithms and sums.

The token to draw has the largest score + Gumbel noise among those that the filters keep. The filters
keep a prefix of the tokens ordered by (score, id), so a token that they drop rules out all behind it:
take the winner among all tokens; while it is dropped, take the winner among those ahead of it. One
pass over the logits finds the mass and the number of tokens ahead of a candidate, and the next
candidate; few candidates are ever needed. Only top-k together with top-p needs the k-th score itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from ..sampling import SamplingBatch

SPLIT = 4096  # tokens of a row that one program of the first launch reads
BLOCK = 8192  # tokens of a row that the second launch reads at a time
GREEDY_BELOW = tl.constexpr(1e-5)
# One value a row: slices of larger buffers, at any alignment, must not mean another kernel.
ROW_VALUES = [
    "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "steps_ptr", "out_ptr",
    "latest_ptr", "slots_ptr",
]  # fmt: skip


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, step, token):
    """Noise of tokens `[N]`; `sampling.gumbel` says why it looks like this."""
    key = _mix64(seed.to(tl.uint64) ^ _mix64(step.to(tl.uint64) + 0x9E3779B97F4A7C15))
    bits = _mix32(_mix32(token.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)) ^ (key >> 32).to(tl.uint32))
    v = tl.minimum(((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 1 - 2**-24)
    series = v * (1 + v * (0.5 + v * (1 / 3 + v * 0.25)))
    return -tl.log(tl.where(v < 0.015625, series, -tl.log(1 - v)))


@triton.jit
def _scores(row_ptr, i, VOCAB: tl.constexpr, inverse):
    return tl.load(row_ptr + i, mask=i < VOCAB, other=-float("inf")).to(tl.float32) * inverse


@triton.jit
def _inverse(temperature):
    return tl.where(temperature < GREEDY_BELOW, 1.0, tl.div_rn(1.0, tl.maximum(temperature, GREEDY_BELOW)))


@triton.jit
def _winner(value, token):
    """The largest value and its token, the lowest on a tie."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, token, 2147483647), 0)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "seeds_ptr", "steps_ptr"])
def race_kernel(
    logits_ptr, stride, temperature_ptr, seeds_ptr, steps_ptr, best_ptr, token_ptr, peak_ptr, mass_ptr,
    VOCAB: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Winner of one split of one row, and where it is drawn, largest score and mass. Grid: (splits, S)."""
    split, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    i = split * SPLIT + tl.arange(0, SPLIT)
    score = _scores(logits_ptr + row.to(tl.int64) * stride, i, VOCAB, _inverse(temperature))
    at = row * tl.num_programs(0) + split
    if temperature >= GREEDY_BELOW:
        noise = _gumbel(tl.load(seeds_ptr + row), tl.load(steps_ptr + row), i)
        best, token = _winner(score + noise, i)
        peak = tl.max(score, 0)
        mass = tl.sum(tl.exp(score - tl.where(peak == -float("inf"), 0.0, peak)), 0)
        tl.store(peak_ptr + at, peak)
        tl.store(mass_ptr + at, mass)
    else:
        best, token = _winner(score, i)
    tl.store(best_ptr + at, best)
    tl.store(token_ptr + at, token)


@triton.jit
def _ordered(x):
    """int32 keys in the order of floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _kth(row_ptr, inverse, low, high, k, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Key of the k-th largest score, or any key with exactly k scores at or above it.

    Keeps count(>= low) >= k and count(>= high) < k (int64, low < high), and in each turn asks for three
    keys between them and draws both in to keys that occur.
    """
    while high - low > 1:
        quarter = (high - low + 3) // 4
        a, b, c = low + quarter, low + 2 * quarter, tl.minimum(low + 3 * quarter, high)
        b = tl.minimum(b, high)
        # Counted a lane at a time: a sum over lanes in every turn would cost more than the turn. A lane's
        # three counts share a register, ten bits each: it sees VOCAB / BLOCK scores.
        tl.static_assert(VOCAB <= 1023 * BLOCK)
        counts = tl.zeros([BLOCK], tl.int32)
        lowest = tl.full([BLOCK], 2147483647, tl.int32)
        highest = tl.full([BLOCK], -2147483648, tl.int32)
        for start in range(0, VOCAB, BLOCK):
            key = _ordered(_scores(row_ptr, start + tl.arange(0, BLOCK), VOCAB, inverse))
            counts += tl.where(key >= a.to(tl.int32), 1, 0)
            counts += tl.where(key >= b.to(tl.int32), 1 << 10, 0)
            counts += tl.where(key >= c.to(tl.int32), 1 << 20, 0)
            lowest = tl.minimum(lowest, tl.where(key >= low.to(tl.int32), key, 2147483647))
            highest = tl.maximum(highest, tl.where(key < high.to(tl.int32), key, -2147483648))
        at_a, at_b = tl.sum(counts & 1023, 0), tl.sum((counts >> 10) & 1023, 0)
        at_c = tl.sum(counts >> 20, 0)
        least, most = tl.min(lowest, 0).to(tl.int64), tl.max(highest, 0).to(tl.int64)
        low = tl.where(at_c >= k, c, tl.where(at_b >= k, b, tl.where(at_a >= k, a, low)))
        high = tl.where(at_a < k, a, tl.where(at_b < k, b, tl.where(at_c < k, c, high)))
        exact = tl.where(at_c >= k, at_c, tl.where(at_b >= k, at_b, tl.where(at_a >= k, at_a, 0))) == k
        low = tl.maximum(low, least)
        high = tl.where(exact, low, tl.minimum(high, most + 1))
    return low


@triton.jit
def _emit(out_ptr, latest_ptr, slots_ptr, row, token):
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty))
    if latest_ptr is not None:
        slot = tl.load(slots_ptr + row)
        tl.store(latest_ptr + slot, token.to(latest_ptr.dtype.element_ty), mask=slot >= 0)


@triton.jit(do_not_specialize_on_alignment=ROW_VALUES)
def filter_kernel(
    logits_ptr, stride, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, steps_ptr,
    best_ptr, token_ptr, peak_ptr, mass_ptr, out_ptr, latest_ptr, slots_ptr,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge a row's splits, then step ahead until the filters keep the winner. Grid: (S,)."""
    row = tl.program_id(0)
    s = tl.arange(0, SPLITS_PAD)
    at = row * SPLITS + s
    best = tl.load(best_ptr + at, mask=s < SPLITS, other=-float("inf"))
    _, token = _winner(best, tl.load(token_ptr + at, mask=s < SPLITS, other=2147483647))
    token = tl.minimum(token, VOCAB - 1)  # a row of NaN has no winner
    temperature = tl.load(temperature_ptr + row)
    k, p, floor = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if (temperature < GREEDY_BELOW) | ((k <= 0) & (p >= 1) & (floor <= 0)):
        _emit(out_ptr, latest_ptr, slots_ptr, row, token)
        return

    peaks = tl.load(peak_ptr + at, mask=s < SPLITS, other=-float("inf"))
    peak = tl.max(peaks, 0)
    if peak == -float("inf"):
        _emit(out_ptr, latest_ptr, slots_ptr, row, token)
        return
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    inverse = _inverse(temperature)
    seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
    # Nothing under this key passes min-p or top-k; it may let through more than k only where scores tie.
    limit = _ordered(peak + tl.log(floor)).to(tl.int64)
    if (k > 0) & (k < VOCAB):
        # k splits hold a score at or above the k-th largest of their peaks.
        above = tl.sum((peaks[None, :] >= peaks[:, None]).to(tl.int32), 1)
        low = _ordered(tl.max(tl.where(above >= k, peaks, -float("inf")), 0)).to(tl.int64)
        high = _ordered(peak).to(tl.int64) + 1
        limit = tl.maximum(_kth(row_ptr, inverse, low, high, k, VOCAB, BLOCK), limit)
    total = tl.sum(tl.load(mass_ptr + at, mask=s < SPLITS, other=0.0) * tl.exp(peaks - peak), 0)
    if (p < 1) & ((k > 0) | (floor > 0)):
        # top-p takes its share of what min-p and top-k leave.
        above, ties = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        mass, tie_mass = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCAB, BLOCK):
            score = _scores(row_ptr, start + tl.arange(0, BLOCK), VOCAB, inverse)
            key = _ordered(score).to(tl.int64)
            weight = tl.exp(score - peak)
            mass += tl.where(key > limit, weight, 0.0)
            above += (key > limit).to(tl.int32)
            tie_mass += tl.where(key == limit, weight, 0.0)
            ties += (key == limit).to(tl.int32)
        tied = tl.sum(ties, 0)
        room = tl.where(k > 0, tl.minimum(tied, k - tl.sum(above, 0)), tied)
        total = tl.sum(mass, 0) + tl.sum(tie_mass, 0) * room / tl.maximum(tied, 1)

    searching = True
    while searching:
        pivot = tl.load(row_ptr + token).to(tl.float32) * inverse
        ahead_mass, ahead_count = 0.0, 0
        best_ahead, next_token = -float("inf"), 2147483647
        for start in range(0, VOCAB, BLOCK):
            i = start + tl.arange(0, BLOCK)
            score = _scores(row_ptr, i, VOCAB, inverse)
            ahead = (score > pivot) | ((score == pivot) & (i < token))
            ahead = ahead & (_ordered(score).to(tl.int64) >= limit)
            count = tl.sum(ahead.to(tl.int32), 0)
            if count > 0:
                ahead_count += count
                ahead_mass += tl.sum(tl.where(ahead, tl.exp(score - peak), 0.0), 0)
                raced = tl.where(ahead, score + _gumbel(seed, step, i), -float("inf"))
                value, winner = _winner(raced, i)
                if value > best_ahead:
                    best_ahead, next_token = value, winner
        kept = (
            (_ordered(pivot).to(tl.int64) >= limit)
            & ((k <= 0) | (ahead_count < k))
            & ((p >= 1) | (ahead_mass < p * total))
        )
        searching = (ahead_count > 0) & ~kept
        token = tl.where(searching, next_token, token)
    _emit(out_ptr, latest_ptr, slots_ptr, row, token)


def choose(
    logits: torch.Tensor, batch: SamplingBatch, *, out: torch.Tensor | None = None,
    latest: torch.Tensor | None = None, slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Temperature, min-p, top-k, top-p and the draw; see `kernels.sampling.choose`."""
    rows, vocab = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    splits = triton.cdiv(vocab, SPLIT)
    best, peak, mass = torch.empty(3, rows, splits, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    race_kernel[(splits, rows)](
        logits, logits.stride(0), batch.temperature, batch.seeds, batch.steps, best, token, peak, mass,
        VOCAB=vocab, SPLIT=SPLIT, num_warps=8,
    )  # fmt: skip
    filter_kernel[(rows,)](
        logits, logits.stride(0), batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds,
        batch.steps, best, token, peak, mass, out, latest, slots,
        VOCAB=vocab, SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return out
