"""Steps over a poisoned pool: random pages in random places, for tests of kernels that touch KV."""

from __future__ import annotations

import torch

from rimuru.kernels.types import KVLayout, KVView, StepMeta

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_layout(
    dtype: torch.dtype, heads: int, dim: int, layers: int = 2, block_tokens: int = 16, grain: int = 2048
) -> KVLayout:
    return KVLayout(layers, block_tokens, heads, dim, grain, dtype)


def make_step(
    layout: KVLayout, lengths: list[int], queries: list[int], layer: int = 1, fill: bool = True, seed: int = 0
) -> tuple[KVView, StepMeta]:
    """Sequences of `lengths` tokens of which the last `queries` are this step's; length 0 is padding.

    The pool is NaN except for the live tokens of `layer` (all of them with `fill`, else none), so
    that a read of anything else shows in the result.
    """
    rng = torch.Generator().manual_seed(seed)
    stride = -(-layout.page_bytes // layout.grain)
    need = [-(-n // layout.block_tokens) for n in lengths]
    order = torch.randperm(sum(need) + 3, generator=rng) * stride
    pool = torch.full(((sum(need) + 3) * stride * layout.grain_elems,), float("nan"), dtype=layout.dtype)
    slots = torch.randperm(len(lengths) + 2, generator=rng)[: len(lengths)].int()
    table = torch.full((len(lengths) + 2, max(need) + 1), 2**30, dtype=torch.int32)
    taken = 0
    for slot, n, blocks in zip(slots.tolist(), lengths, need, strict=True):
        table[slot, :blocks] = order[taken : taken + blocks].int()
        taken += blocks
        for token in range(n if fill else 0):
            page, inside = divmod(token, layout.block_tokens)
            at = int(table[slot, page]) * layout.grain_elems + layer * layout.layer_elems
            row = layout.heads * layout.head_dim
            for part in (0, layout.kv_elems):
                start = at + part + inside * row
                pool[start : start + row] = torch.randn(row, generator=rng).to(layout.dtype)
    positions = [
        torch.arange(n - q, n) if n else torch.zeros(q) for n, q in zip(lengths, queries, strict=True)
    ]
    tokens = [
        torch.full((q,), s if n else -1) for s, n, q in zip(slots.tolist(), lengths, queries, strict=True)
    ]
    meta = StepMeta(
        positions=torch.cat(positions).int().to(DEVICE),
        token_slots=torch.cat(tokens).int().to(DEVICE),
        query_start=torch.tensor(
            [0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE
        ),
        slots=slots.to(DEVICE),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )
    return KVView(pool.to(DEVICE), table.to(DEVICE), layer, layout), meta


def pad_step(meta: StepMeta, seqs: int, tokens: int) -> StepMeta:
    """The step as a captured graph holds it: padded to `seqs` sequences and `tokens` tokens.

    Sequences added have no token of their own, tokens added no sequence, and the lengths' bounds are wide.
    """

    def longer(x: torch.Tensor, size: int, value: int) -> torch.Tensor:
        return torch.cat([x, torch.full((size - len(x),), value, dtype=x.dtype, device=x.device)])

    return StepMeta(
        positions=longer(meta.positions, tokens, 0),
        token_slots=longer(meta.token_slots, tokens, -1),
        query_start=longer(meta.query_start, seqs + 1, int(meta.query_start[-1])),
        slots=longer(meta.slots, seqs, 0),
        seq_lens=longer(meta.seq_lens, seqs, 0),
        max_query_len=meta.max_query_len if meta.max_query_len == 1 else tokens,
        max_seq_len=3 * meta.max_seq_len,
    )
