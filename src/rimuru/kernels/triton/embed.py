"""The embedding: a row of the table a token, also where only the device knows the token yet.

Room: `embed`. Rule: a sampled token goes from one step to the next through device memory; the host
never waits for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# Arrays of a step may be cut out of one buffer: where they begin must not decide what is compiled.
@triton.jit(do_not_specialize_on_alignment=["tokens", "slots", "latest"])
def embed_kernel(
    tokens, slots, latest, weight, out, WIDTH: tl.constexpr, LATEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (T, blocks of the width)."""
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    if LATEST:
        slot = tl.load(slots + row)
        known = tl.load(latest + slot, mask=(token < 0) & (slot >= 0), other=0).to(tl.int64)
        token = tl.where(token < 0, known, token)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(weight + token * WIDTH + i, mask=i < WIDTH)
    tl.store(out + row.to(tl.int64) * WIDTH + i, value, mask=i < WIDTH)


def embed(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None = None,
    latest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of `weight [V, H]` by token id `[T]` -> `[T, H]`; a negative id is read from `latest` by slot.

    As `rimuru.kernels.reference.embed`; ids are not checked against V. `weight` may lie in page-locked host
    memory: a row crosses the link for each token.
    """
    (count,), width = tokens.shape, weight.shape[1]
    out = torch.empty((count, width), dtype=weight.dtype, device=tokens.device)
    if count:
        deferred = slots is not None and latest is not None
        embed_kernel[(count, triton.cdiv(width, 1024))](
            tokens, slots if deferred else tokens, latest if deferred else tokens, weight, out,
            WIDTH=width, LATEST=deferred, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out
