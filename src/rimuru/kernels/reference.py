"""The torch twin of every kernel: slow, obvious, on any device. It defines what the others compute.

Room: the reference back end. Rule: readable before fast; reductions in float32; no state. The
`cpu` and `triton` back ends expose the same names with the same meaning, and their tests compare
against this file.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType

import torch
import torch.nn.functional as F

from . import operation
from .types import EXPERT_ADDRESS, ExpertLayout, KVView, MoeBlock, StateView, StepMeta

DELTA_CHUNK = 64  # tokens whose updates are solved for at one time


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over raw host memory at `address` (bytes). The caller keeps the memory alive."""
    count = 1
    for n in shape:
        count *= n
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


def embed(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None = None,
    latest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of `weight [V, H]` by token id: tokens int32 or int64 `[T]` -> `[T, H]`.

    A negative token stands for one that only the device knows yet: its id is `latest[slots[t]]`
    (slots int32 `[T]`, latest int32 or int64 `[slots]`). Where the slot is negative too, the token is
    padding and takes row 0. Without slots and latest, all ids are at least 0.
    """
    ids = tokens.long()
    if slots is not None and latest is not None:
        known = torch.where(slots < 0, 0, latest.long()[slots.long().clamp_min(0)])
        ids = torch.where(ids < 0, known, ids)
    return F.embedding(ids, weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [T, K] @ weight [N, K].T + bias [N]` -> `[T, N]` in x's dtype, accumulated in float32."""
    return F.linear(x, weight, bias)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm (Zhang and Sennrich, 2019) of `x + residual`.

    x, residual: `[T, H]`. Returns `(normed, sum)`, both `[T, H]` in x's dtype; without a residual
    the sum is x itself. The normalised value is rounded to x's dtype before the weight multiplies.
    """
    if residual is not None:
        x = x + residual
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype), x


def zero_centred_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` with the weight `1 + weight`, multiplied in float32 and rounded once."""
    if residual is not None:
        x = x + residual
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * (1.0 + weight.float())).to(x.dtype), x


def rope_table(
    max_positions: int, rotary_dim: int, base: float, device: torch.device, scaling: float = 1.0
) -> torch.Tensor:
    """cos and sin side by side, float32 `[max_positions, rotary_dim]` (Su et al., 2021)."""
    inv = 1.0 / (base ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim))
    angle = torch.outer(torch.arange(max_positions).float(), inv)
    return torch.cat([angle.cos() * scaling, angle.sin() * scaling], dim=-1).to(device)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def qkv_to_cache(
    qkv: torch.Tensor,
    q_heads: int,
    kv: KVView,
    meta: StepMeta,
    rope: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Per-head q/k norm, rotary embedding, and the write of K and V into their pages.

    qkv: `[T, (q_heads + 2 * kv_heads) * head_dim]`, q then k then v. rope: `rope_table(...)`,
    the first `rotary_dim` of each head turn (half-split pairs), the rest pass. q_norm, k_norm:
    `[head_dim]`, or `[heads * head_dim]` where the model normalises all heads together (OLMoE).
    Returns q `[T, q_heads, head_dim]`. Tokens with `token_slots == -1` write nothing.
    """
    lay = kv.layout
    tokens, dim = qkv.shape[0], lay.head_dim
    q, k, v = qkv.split([q_heads * dim, lay.heads * dim, lay.heads * dim], dim=-1)

    def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x.reshape(tokens, -1, dim)
        shaped = x.reshape(tokens, -1, dim) if weight.numel() == dim else x
        return rms_norm(shaped, weight, eps)[0].reshape(tokens, -1, dim)

    cos, sin = rope[meta.positions.long()].chunk(2, dim=-1)
    q, k = _rotate(norm(q, q_norm), cos, sin), _rotate(norm(k, k_norm), cos, sin)
    keep = meta.token_slots >= 0
    pos, slot = meta.positions[keep].long(), meta.token_slots[keep].long()
    page = kv.table[slot, pos // lay.block_tokens].long()
    at = page * lay.grain_elems + kv.layer * lay.layer_elems
    at = at + (pos % lay.block_tokens) * (lay.heads * dim)
    index = at[:, None] + torch.arange(lay.heads * dim, device=qkv.device)
    kv.pool[index] = k[keep].reshape(-1, lay.heads * dim).to(lay.dtype)
    kv.pool[index + lay.kv_elems] = v[keep].reshape(-1, lay.heads * dim).to(lay.dtype)
    return q


def attention(q: torch.Tensor, kv: KVView, meta: StepMeta, scale: float, window: int = 0) -> torch.Tensor:
    """Causal attention of this step's queries over the cached sequence, read where its pages lie.

    q: `[T, q_heads, head_dim]`; query i of a sequence with `n` queries and `seq_len` tokens is at
    position `seq_len - n + i`. `window > 0` keeps the last `window` positions. Returns
    `[T, q_heads * head_dim]`. Never reads a token at or past `seq_len`.
    """
    lay = kv.layout
    out = torch.zeros_like(q)
    starts, lens = meta.query_start.tolist(), meta.seq_lens.tolist()
    for s, (length, slot) in enumerate(zip(lens, meta.slots.tolist(), strict=True)):
        a, b = starts[s], starts[s + 1]
        if length == 0 or a == b:
            continue
        blocks = -(-length // lay.block_tokens)
        at = kv.table[slot, :blocks].long() * lay.grain_elems + kv.layer * lay.layer_elems
        index = at[:, None] + torch.arange(lay.kv_elems, device=q.device)
        shape = (blocks * lay.block_tokens, lay.heads, lay.head_dim)
        k = kv.pool[index].view(shape)[:length].float()
        v = kv.pool[index + lay.kv_elems].view(shape)[:length].float()
        group = q.shape[1] // lay.heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("qhd,khd->hqk", q[a:b].float(), k) * scale
        at_q = torch.arange(length - (b - a), length, device=q.device)[:, None]
        at_k = torch.arange(length, device=q.device)[None]
        hide = at_k > at_q
        if window > 0:
            hide = hide | (at_k <= at_q - window)
        score = score.masked_fill(hide, float("-inf")).softmax(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", score, v).to(q.dtype)
    return out.reshape(q.shape[0], -1)


def _state_index(view: StateView, slots: torch.Tensor) -> torch.Tensor:
    """Elements of the pool that hold the layer's values of each slot, int64 `[slots, *shape]`."""
    lay = view.layout
    at = view.table[slots.long()].long() * lay.grain_elems + view.layer * lay.layer_elems
    inside = torch.arange(lay.layer_elems, device=view.pool.device)
    return (at[:, None] + inside).view(-1, *lay.shape)


def _load_state(view: StateView, index: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """The values at `index`; zeros for sequences that begin now, whatever their pages hold."""
    return view.pool[index].masked_fill(fresh.view(-1, *[1] * len(view.layout.shape)), 0)


def causal_conv(x: torch.Tensor, weight: torch.Tensor, view: StateView, meta: StepMeta) -> torch.Tensor:
    """Depthwise causal convolution of each channel over its sequence, then SiLU.

    x `[T, C]`, weight `[C, K]`: `silu(sum_j weight[:, j] * x[t - K + 1 + j])`, accumulated in float32;
    returns `[T, C]` in x's dtype. The inputs before this step's come from the sequence's page (zeros
    at position 0), the last K - 1 inputs are left there.
    """
    taps = weight.shape[1] - 1
    counts = (meta.query_start[1:] - meta.query_start[:-1]).long()
    fresh, sequences = meta.seq_lens <= counts, len(counts)
    index = _state_index(view, meta.slots)
    # One list of rows: all sequences' old inputs, then this step's.
    rows = torch.cat([_load_state(view, index, fresh).flatten(0, 1).to(x.dtype), x])
    begin = meta.query_start[:-1].long()
    # Padding behind the last sequence's tokens is counted to that one; nothing reads it.
    at = torch.arange(len(x), device=x.device)
    owner = torch.searchsorted(meta.query_start[1:].long(), at, right=True).clamp_max(sequences - 1)

    def row(sequence: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Row of the sequence's input at `offset` of this step; a negative one is an old input."""
        return torch.where(
            offset < 0, (sequence + 1) * taps + offset, sequences * taps + begin[sequence] + offset
        )

    offset = at - begin[owner]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for j in range(taps + 1):
        out += rows[row(owner, offset - taps + j)].float() * weight[:, j].float()
    live = (meta.seq_lens > 0).nonzero().flatten()
    last = counts[live, None] - taps + torch.arange(taps, device=x.device)
    view.pool[index[live]] = rows[row(live[:, None], last)].to(view.layout.dtype)
    return F.silu(out).to(x.dtype)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    view: StateView,
    meta: StepMeta,
) -> torch.Tensor:
    """The gated delta rule (Yang et al., 2025) over each sequence, from the state in its page.

    q, k `[T, key heads, key dim]`, made unit vectors here, q then divided by sqrt(key dim);
    v `[T, value heads, value dim]`; each key head serves `value heads / key heads` value heads in
    turn. decay float32 `[T, value heads]`, the logarithm of what is kept of the state (at most 0); beta
    `[T, value heads]`, the rate of the update. For every token, with state S:

        S = exp(decay) * S;  S = S + k (beta * (v - k S));  out = q S

    A sequence at position 0 starts from zeros and its page is not read. Returns
    `[T, value heads, value dim]` in v's dtype; the state is float32 throughout.
    """
    repeat = v.shape[1] // k.shape[1]

    def unit(x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeat, 1)

    q, k, value, beta = unit(q) * q.shape[-1] ** -0.5, unit(k), v.float(), beta.float()
    starts = meta.query_start.tolist()
    lens = meta.seq_lens.tolist()
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    single = [s for s, n in enumerate(lens) if n and starts[s + 1] - starts[s] == 1]
    chunked = [s for s, n in enumerate(lens) if n and starts[s + 1] - starts[s] > 1]
    for together in [single] * bool(single) + [[s] for s in chunked]:
        a, b = starts[together[0]], starts[together[0] + 1]
        which = torch.tensor(together, device=v.device)
        index = _state_index(view, meta.slots[which])
        fresh = torch.tensor([lens[s] == starts[s + 1] - starts[s] for s in together], device=v.device)
        state = _load_state(view, index, fresh)
        if together is single:
            t = meta.query_start[which].long()
            out[t], state = _delta_step(state, *(x[t] for x in (q, k, value, decay, beta)))
        else:
            mixed, state = _delta_chunks(
                state[0], *(x[a:b].transpose(0, 1) for x in (q, k, value, decay, beta))
            )
            out[a:b] = mixed.transpose(0, 1)
        view.pool[index] = state.view(index.shape)
    return out.to(v.dtype)


def _delta_step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of many sequences: q, k `[S, H, K]`, v `[S, H, V]`, state `[S, H, K, V]`."""
    state = state * decay.exp()[..., None, None]
    known = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * ((v - known) * beta[..., None])[..., None, :]
    return (state * q[..., None]).sum(-2), state


def _delta_chunks(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many tokens of one sequence, a chunk at a time: q, k `[H, n, K]`, v `[H, n, V]`, state `[H, K, V]`.

    Inside a chunk each update depends on those before it: with `G` the decay summed from the chunk's
    start, the updates `u` solve the unit triangular system

        u_i + sum_{j<i} beta_i exp(G_i - G_j) (k_i k_j) u_j = beta_i (v_i - exp(G_i) k_i S)
    """
    out = torch.empty_like(v)
    for at in range(0, v.shape[1], DELTA_CHUNK):
        span = slice(at, at + DELTA_CHUNK)
        qc, kc, total = q[:, span], k[:, span], decay[:, span].cumsum(-1)
        rate = beta[:, span, None]
        later = torch.ones(qc.shape[1], qc.shape[1], dtype=torch.bool, device=q.device).triu(1)
        kept = (total[:, :, None] - total[:, None]).masked_fill(later, float("-inf")).exp()
        grown = total.exp()[..., None]
        system = rate * (kc @ kc.mT) * kept  # its diagonal is not read
        wanted = rate * (v[:, span] - grown * (kc @ state))
        update = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out[:, span] = grown * (qc @ state) + ((qc @ kc.mT) * kept) @ update
        left = (total[:, -1:] - total).exp()[..., None]
        state = state * grown[:, -1:] + (left * kc).mT @ update
    return out, state


def route(
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    bias: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: router logits `[T, E]` -> `(weights float32 [T, k], ids int32 [T, k])`.

    scoring: "softmax" or "sigmoid" in float32. `bias [E]` corrects the choice but not the weight
    (DeepSeek-V3). `normalize` makes the k weights sum to 1. Ties go to the lower expert id. Tokens
    with `live[t] < 0` (int32 `[T]`, a step's `token_slots`) are padding: ids -1, weights 0.
    """
    score = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    choice = score if bias is None else score + bias
    # A stable sort, because torch.topk leaves the order of equal scores open.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(-1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    if live is not None:
        padding = live[:, None] < 0
        weights, ids = weights.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)
    return weights, ids.int()


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    layout: ExpertLayout,
    touched: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """SwiGLU experts, each read where it lies: `sum_j w_j * down_j(silu(gate_j(x)) * up_j(x))`.

    x `[T, H]`, ids int32 `[T, k]` (-1: skip), weights float32 `[T, k]`; table: int64 `[E]`, raw
    addresses of this layer's expert pages (pool or host memory) with a tag in the low byte (`types`),
    laid out as `layout`. `touched`: int32 `[E]`, incremented by the number of tokens routed to each
    expert. `shared [T, H]`, what a dense expert gave, is added to the sum, times `sigmoid(gate)` where
    there is a gate (logits `[T]` or `[T, 1]`). Returns `[T, H]`.
    The hidden activation is rounded to x's dtype between the two products; the weighted sum with the
    shared expert is accumulated in float32. This twin reads host addresses only.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    inter, hidden = layout.intermediate, layout.hidden
    for e in sorted(set(ids.flatten().tolist()) - {-1}):
        row, choice = (ids == e).nonzero(as_tuple=True)
        if touched is not None:
            touched[e] += row.numel()
        base = int(table[e]) & EXPERT_ADDRESS
        gate_up = tensor_at(base, (2 * inter, hidden), layout.dtype)
        down = tensor_at(base + layout.down_offset, (hidden, inter), layout.dtype)
        act = silu_and_mul(F.linear(x[row], gate_up))
        out.index_add_(0, row, F.linear(act, down).float() * weights[row, choice, None])
    if shared is not None:
        out += shared.float() if gate is None else gate.reshape(-1, 1).float().sigmoid() * shared.float()
    return out.to(x.dtype)


def moe_block(
    x: torch.Tensor,
    residual: torch.Tensor,
    block: MoeBlock,
    table: torch.Tensor,
    next_norm: torch.Tensor,
    touched: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    ops: ModuleType = sys.modules[__name__],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decoder layer from the output of its attention to the input of the next layer's.

        h, sum = norm(x + residual);  y = moe(h, route(h)) + shared expert(h);  next_norm(y + sum)

    x, residual `[T, H]`, next_norm `[H]` -> (normed, sum), both `[T, H]`. table, touched and live as in
    `moe` and `route`; logits float32 `[T, E]` take the place of the router's. `ops`: the back end whose
    operations it is made of; one may give it as fewer launches.
    """
    norm = operation(ops, "zero_centred_rms_norm" if block.zero_centred else "rms_norm")
    h, residual = norm(x, block.norm, block.eps, residual)
    scores, experts = ops.linear(h, block.router), block.experts
    weights, ids = ops.route(
        scores[:, :experts] if logits is None else logits,
        block.top_k, block.scoring, block.normalize, block.bias, live,
    )  # fmt: skip
    shared = gate = None
    if block.shared_gate_up is not None:
        shared = ops.linear(ops.silu_and_mul(ops.linear(h, block.shared_gate_up)), block.shared_down)
        gate = scores[:, experts] if scores.shape[1] > experts else None
    y = ops.moe(h, ids, weights, table, block.layout, touched, shared, gate)
    return norm(y, next_norm, block.eps, residual)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `x [T, 2 * I]`, gate first: `[T, I]` in x's dtype, computed in float32."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def apply_edits(table: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
    """Write `value[i]` to the flattened `table[index[i]]`; indices are distinct. In stream order."""
    table.view(-1)[index.long()] = value.to(table.dtype)


def move_pages(
    pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, grain: int, nbytes: int
) -> None:
    """Copy pages of `nbytes` inside the uint8 pool. source, target: grain indices, disjoint sets."""
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        pool[b * grain : b * grain + nbytes] = pool[a * grain : a * grain + nbytes].clone()
