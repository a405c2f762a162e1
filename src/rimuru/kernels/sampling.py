"""From logits to tokens: masks, penalties, temperature, min-p, top-k, top-p, and the draw itself.

Room: `rimuru.kernels`; torch operations that run on any device, with fused kernels on a GPU. Rule:
a row's token depends on that row's logits and parameters alone. Randomness is counter-based, a
function of (seed, step, token id), so neither the batch nor the device changes what is drawn.

Equal logits are ordered by token id everywhere: greedy takes the lowest, top-k keeps exactly k,
and a rank agrees with the position in the list of top logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM

# splitmix64 (Steele et al., 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)
# The two-round 32-bit mixer of C. Wellons' hash prospector, as signed 32-bit integers.
_WEYL = 0x9E3779B1 - (1 << 32)
_HASH_A = 0x7FEB352D
_HASH_B = 0x846CA68B - (1 << 32)


@dataclass(slots=True)
class Penalties:
    """Penalties for tokens already seen, one row per sequence of the batch.

    repetition, presence, frequency: float32 `[S]`, off at 1, 0 and 0. output_counts: int32 `[S, V]`,
    how often each token was generated; prompt_seen: bool `[S, V]`. Repetition looks at prompt and
    output (Keskar et al., 2019), presence and frequency at the output only (OpenAI's definition).
    """

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    output_counts: torch.Tensor
    prompt_seen: torch.Tensor

    def record(self, tokens: torch.Tensor) -> None:
        """Count the sampled `tokens [S]` as generated."""
        one = torch.ones_like(tokens, dtype=torch.int32)[:, None]
        self.output_counts.scatter_add_(1, tokens[:, None], one)


@dataclass(slots=True)
class SamplingBatch:
    """How each of `S` rows of logits becomes a token. Tensors lie on the logits' device.

    The flags are facts the host knows without asking the device; they only skip work.
    """

    temperature: torch.Tensor  # float32 [S], 0: greedy
    top_k: torch.Tensor  # int32 [S], 0: off
    top_p: torch.Tensor  # float32 [S], 1: off
    min_p: torch.Tensor  # float32 [S], 0: off
    seeds: torch.Tensor  # int64 [S]
    steps: torch.Tensor  # int64 [S], tokens this sequence has sampled before
    penalties: Penalties | None = None
    # (rows int64 [N], token ids int64 [N], values float32 [N]), added; -inf bans a token.
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    allowed_mask: torch.Tensor | None = None  # bool [S, V], False: never sampled
    all_greedy: bool = False  # every temperature is 0
    needs_top: bool = True  # some row uses top_k or top_p
    num_logprobs: int = -1  # -1: none; 0: only the sampled token's; n: also the n largest

    def check(self, vocab: int) -> None:
        """Raise ValueError where a field's shape, dtype or value range is wrong (waits for the device)."""
        rows = self.temperature.shape[0]
        floats, ints = (self.temperature, self.top_p, self.min_p), (self.seeds, self.steps)
        if any(t.shape != (rows,) or t.dtype != torch.float32 for t in floats):
            raise ValueError("temperature, top_p and min_p must be float32 of one length")
        if any(t.shape != (rows,) or t.dtype != torch.int64 for t in ints):
            raise ValueError("seeds and steps must be int64, as long as temperature")
        if self.top_k.shape != (rows,) or self.top_k.dtype != torch.int32:
            raise ValueError("top_k must be int32, as long as temperature")
        if self.allowed_mask is not None and self.allowed_mask.shape != (rows, vocab):
            raise ValueError(f"allowed_mask must be [{rows}, {vocab}]")
        if self.all_greedy and bool((self.temperature >= GREEDY_BELOW).any()):
            raise ValueError("all_greedy is set but a row has a temperature")
        if not self.needs_top and bool(((self.top_k > 0) | (self.top_p < 1)).any()):
            raise ValueError("needs_top is off but a row uses top_k or top_p")


@dataclass(slots=True)
class SampleOutput:
    """What `sample` drew. Logprobs are those of the raw logits; ranks count from 1."""

    tokens: torch.Tensor  # int64 [S]
    logprob: torch.Tensor | None = None  # float32 [S], of the sampled token
    rank: torch.Tensor | None = None  # int32 [S]
    top_ids: torch.Tensor | None = None  # int64 [S, n]
    top_logprobs: torch.Tensor | None = None  # float32 [S, n], descending


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
    """Draw one token from each row of `logits [S, V]` (any float dtype; not modified).

    The steps follow vLLM's: allowed mask, bias, penalties, temperature, min-p, top-k, top-p, draw;
    logprobs are the log-softmax of the logits as given, in float32. A row without any allowed token
    yields token 0.
    """
    tokens = choose(edit_logits(logits, batch), batch)
    if batch.num_logprobs < 0:
        return SampleOutput(tokens)
    return SampleOutput(tokens, *token_logprobs(logits, tokens, batch.num_logprobs))


def edit_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Apply the allowed mask, the bias and the penalties: float32 `[S, V]`, or `logits` if none is set."""
    pen = batch.penalties
    if pen is None and batch.bias is None and batch.allowed_mask is None:
        return logits
    out = logits.float() if logits.dtype != torch.float32 else logits.clone()
    if batch.allowed_mask is not None:
        out.masked_fill_(~batch.allowed_mask, float("-inf"))
    if batch.bias is not None:
        rows, ids, values = batch.bias
        out.index_put_((rows, ids), values, accumulate=True)
    if pen is not None:
        generated = pen.output_counts > 0
        factor = torch.where(generated | pen.prompt_seen, pen.repetition[:, None], 1.0)
        out = torch.where(out > 0, out / factor, out * factor)
        out -= pen.frequency[:, None] * pen.output_counts
        out -= pen.presence[:, None] * generated
    return out


def choose(
    logits: torch.Tensor, batch: SamplingBatch, *, out: torch.Tensor | None = None,
    latest: torch.Tensor | None = None, slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Temperature, min-p, top-k, top-p and the draw, on edited `logits [S, V]` -> tokens int64 `[S]`.

    out: int32 or int64 `[S]`, takes the tokens and is returned. latest: int32 or int64 by slot, given
    together with slots (int32 `[S]`, no slot twice); row s also writes its token to
    `latest[slots[s]]`, unless the slot is negative.

    On a GPU two launches whatever the rows ask for, nothing read back: a captured graph replays them
    with other parameters in the same tensors. A padding row (temperature 0, slot -1) yields some token
    of the vocabulary, NaN or not.
    """
    if logits.is_cuda:
        from .triton import sampling  # needs a GPU's driver

        return sampling.choose(logits, batch, out=out, latest=latest, slots=slots)
    tokens = logits.argmax(-1) if batch.all_greedy else choose_by_sort(logits, batch)
    if latest is not None and slots is not None:
        named = slots >= 0
        latest[slots[named]] = tokens[named].to(latest.dtype)
    return tokens if out is None else out.copy_(tokens)


def choose_by_sort(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The twin of the fused draw, in torch operations on any device."""
    greedy = batch.temperature < GREEDY_BELOW
    score = logits.float() * torch.where(greedy, 1.0, 1.0 / batch.temperature)[:, None]
    keep = keep_mask(score, batch)
    noise = gumbel(batch.seeds, batch.steps, logits.shape[-1])
    # The largest score + Gumbel noise is a draw from the softmax, with no need to normalise it. The
    # filters keep the first largest score always, so greedy rows need only go without the noise.
    score = score + torch.where(greedy[:, None], 0.0, noise)
    return score.masked_fill(~keep, float("-inf")).argmax(-1)


def keep_mask(score: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Which tokens min-p, then top-k, then top-p keep: bool `[S, V]` for `score = logits / temperature`.

    top-p keeps the smallest set whose probability, among what min-p and top-k kept, reaches p.
    """
    keep = score >= score.amax(-1, keepdim=True) + batch.min_p.log()[:, None]
    if not batch.needs_top:
        return keep
    ordered, ids = score.masked_fill(~keep, float("-inf")).sort(dim=-1, descending=True, stable=True)
    place = torch.arange(score.shape[-1], device=score.device)
    k = torch.where(batch.top_k > 0, batch.top_k, score.shape[-1])[:, None]
    ordered = ordered.masked_fill(place >= k, float("-inf"))
    mass = ordered.softmax(-1, dtype=torch.float64)
    before = mass.cumsum(-1) - mass
    inside = (ordered > float("-inf")) & ((before < batch.top_p[:, None]) | (batch.top_p[:, None] >= 1))
    inside[:, 0] = True  # also where p is 0
    return torch.zeros_like(keep).scatter_(1, ids, inside)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Logprob float32 `[S]` and rank int32 `[S]` of `tokens [S]`, then ids and logprobs of the `top` largest.

    The last two are int64 and float32 `[S, top]`, None with `top == 0`. Ties rank by token id. Prompt
    logprobs come from here too.
    """
    values = logits.float()
    norm = values.logsumexp(-1, keepdim=True)
    own = values.gather(1, tokens[:, None])
    lower_id = torch.arange(values.shape[-1], device=values.device) < tokens[:, None]
    rank = ((values > own) | ((values == own) & lower_id)).sum(-1, dtype=torch.int32) + 1
    logprob = (own - norm).squeeze(1)
    if top == 0:
        return logprob, rank, None, None
    ids = _tie_free_keys(values).topk(top, dim=-1).indices
    return logprob, rank, ids, values.gather(1, ids) - norm


def _tie_free_keys(values: torch.Tensor) -> torch.Tensor:
    """int64 keys that order like (value, -index), because topk leaves the order of equal values open."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 one value
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) + (values.shape[-1] - 1 - torch.arange(values.shape[-1], device=values.device))


def gumbel(seeds: torch.Tensor, steps: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 `[S, vocab]`, a function of (seed, step, token id) alone."""
    v = _uniform(seeds, steps, vocab)
    # -log(1 - v), by series where the subtraction would round away the bits that decide the draw.
    series = v * (1 + v * (0.5 + v * (1 / 3 + v * 0.25)))
    exponential = torch.where(v < 1 / 64, series, -(1 - v).log())
    return -exponential.log()


def _uniform(seeds: torch.Tensor, steps: torch.Tensor, vocab: int) -> torch.Tensor:
    """Uniform float32 in (0, 1), 31 random bits each: a 64-bit row key, then a keyed hash of the token id."""
    key = _mix64(seeds ^ _mix64(steps + _GOLDEN))
    low, high = key.int()[:, None], (key >> 32).int()[:, None]
    token = torch.arange(vocab, dtype=torch.int32, device=seeds.device)
    bits = _mix32(_mix32(token * _WEYL + low) ^ high)
    unit = ((bits >> 1) & 0x7FFFFFFF).float().add(0.5).mul(2.0**-31)
    return unit.clamp_max(1 - 2.0**-24)


def _shift(x: torch.Tensor, n: int, width: int) -> torch.Tensor:
    """Logical right shift of a signed integer tensor."""
    return (x >> n) & ((1 << (width - n)) - 1)


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30, 64)) * _MIX_A
    z = (z ^ _shift(z, 27, 64)) * _MIX_B
    return z ^ _shift(z, 31, 64)


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16, 32)) * _HASH_A
    x = (x ^ _shift(x, 15, 32)) * _HASH_B
    return x ^ _shift(x, 16, 32)
