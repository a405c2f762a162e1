"""Router logits that follow a routing model or a recording, for models whose weights are random.

Room: `rimuru.kernels`; torch operations that run on any device, with fused kernels on a GPU. Rule: a
row is a function of (sequence, layer, position) alone, by counter-based hashing, so that nothing of
it is kept between steps and a captured graph makes it anew on each replay.

The model of a row is

    sqrt(a) popularity + sqrt(b) taste + sqrt(c) drift + sqrt(1 - a - b - c) noise,

each term standard normal for every expert: popularity belongs to the layer, taste to the sequence,
noise to the token. Drift must correlate by exp(-rate d) between two tokens `d` positions apart, and
a hash knows no previous value: it is constant over windows of positions, one row of windows for each
expert of a sequence, of length W and random phase. Tokens `d` apart share a window with probability
max(0, 1 - d / W); with W drawn from Gamma(2, rate) that averages to exp(-rate d) exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch

from .types import StepMeta

REFUSED = -100.0  # the logit of an expert that a recording did not choose
FALL = 0.25  # between the logits of two experts next to each other in a recorded choice

_WORD = 0xFFFFFFFF
_WEYL = 0x9E3779B1
# The two-round 32-bit mixer of C. Wellons' hash prospector.
_HASH_A = 0x7FEB352D
_HASH_B = 0x846CA68B
# One stream of random words for each quantity of an expert.
TASTE, LENGTH, PHASE, DRIFT, NOISE = 0x1B873593, 0x2545F491, 0x3C6EF372, 0x510E527F, 0x6A09E667


@dataclass(frozen=True, slots=True)
class RoutingNoise:
    """A routing model of `L` MoE layers with `E` experts each, on the device."""

    popularity: torch.Tensor  # float32 [L, E], times sqrt(a) of the layer
    scales: torch.Tensor  # float32 [L, 3]: sqrt(b), sqrt(c), sqrt(1 - a - b - c)
    rate: float  # at which drift is forgotten, per token


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """Recorded choices of `N` tokens in several sequences, on the device."""

    ids: torch.Tensor  # int16 [N, L, k], by falling weight
    starts: torch.Tensor  # int32 [sequences + 1], row of each sequence's first token; the last is N
    experts: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which sequence each table row holds: a new one wherever positions do not go on from the last step."""

    salts: torch.Tensor  # int32 [slots], a random word for the sequence
    expected: torch.Tensor  # int32 [slots], the position its next token will have


def sequences(slots: int, seed: int, device: torch.device | str) -> Sequences:
    """Of an engine with `slots` table rows."""
    salts = _mix((torch.arange(slots, dtype=torch.int64) + seed * 65_537) & _WORD)
    return Sequences(_signed(salts).to(device), torch.full((slots,), -1, dtype=torch.int32, device=device))


def follow(meta: StepMeta, held: Sequences) -> None:
    """Note the step's sequences in `held`, in place. Once a step, before its logits."""
    if meta.slots.is_cuda:
        from .triton import dummy_logits  # needs a GPU's driver

        return dummy_logits.follow(meta, held)
    live = meta.seq_lens > 0
    slots = meta.slots[live].long()
    first = meta.positions[meta.query_start[:-1][live].long()]
    salts = held.salts[slots].long() & _WORD
    fresh = _signed(_mix((salts + _WEYL) & _WORD))
    held.salts[slots] = torch.where(first != held.expected[slots], fresh, held.salts[slots])
    held.expected[slots] = meta.seq_lens[live]
    return None


def model_logits(
    noise: RoutingNoise, held: Sequences, meta: StepMeta, first: int, layers: int
) -> torch.Tensor:
    """Logits of the step's tokens in MoE layers `[first, first + layers)`: float32 `[layers, T, E]`."""
    if meta.positions.is_cuda:
        from .triton import dummy_logits

        return dummy_logits.model_logits(noise, held, meta, first, layers)
    salt = (held.salts[meta.token_slots.clamp_min(0).long()].long() & _WORD)[None, :, None]
    position = meta.positions.long()[None, :, None]
    layer = torch.arange(first, first + layers)[:, None, None]
    expert = torch.arange(noise.popularity.shape[1])
    word = _absorb(_absorb(_mix(salt), layer), expert)  # [layers, T, E]
    low, high = _halves(_mix(word ^ LENGTH))
    # 1 / W: the sum of two exponential numbers has the distribution Gamma(2).
    per_window = noise.rate / -(low.log() + high.log())
    phase = _halves(_mix(word ^ PHASE))[1]
    window = (position * per_window + phase).floor().long()
    taste, drift, white = noise.scales[first : first + layers, :, None, None].unbind(1)
    return (
        noise.popularity[first : first + layers, None]
        + taste * _normal(_mix(word ^ TASTE))
        + drift * _normal(_absorb(word ^ DRIFT, window))
        + white * _normal(_absorb(word ^ NOISE, position))
    )


def trace_logits(
    trace: RoutingTrace, held: Sequences, meta: StepMeta, first: int, layers: int
) -> torch.Tensor:
    """As `model_logits`: every sequence follows a recorded one, chosen at random, round and round."""
    if meta.positions.is_cuda:
        from .triton import dummy_logits

        return dummy_logits.trace_logits(trace, held, meta, first, layers)
    track = (held.salts[meta.token_slots.clamp_min(0).long()].long() & _WORD) % (len(trace.starts) - 1)
    start = trace.starts[track].long()
    row = start + meta.positions % (trace.starts[track + 1] - start)
    ids = trace.ids[row, first : first + layers].long().transpose(0, 1)  # [layers, T, k]
    out = torch.full((*ids.shape[:2], trace.experts), REFUSED)
    return out.scatter_(2, ids, (-FALL * torch.arange(ids.shape[2])).expand(ids.shape))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A permutation of 32-bit words, held in int64 (products wrap and keep their low words)."""
    x = ((x ^ (x >> 16)) * _HASH_A) & _WORD
    x = ((x ^ (x >> 15)) * _HASH_B) & _WORD
    return x ^ (x >> 16)


def _absorb(word: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return _mix((word + value * _WEYL) & _WORD)


def _halves(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two uniform numbers in (0, 1), float32, of 16 bits each."""
    return ((word & 0xFFFF).float() + 0.5) / 65_536, ((word >> 16).float() + 0.5) / 65_536


def _normal(word: torch.Tensor) -> torch.Tensor:
    """A standard normal number, float32 (Box and Muller, 1958)."""
    low, high = _halves(word)
    return (-2 * high.log()).sqrt() * (2 * pi * low).cos()


def _signed(word: torch.Tensor) -> torch.Tensor:
    """A 32-bit word as int32."""
    return (word - ((word & 0x80000000) << 1)).int()
