"""The router: which experts a token goes to, and with what weight.

Room: `route`. Rule: scores are float32 whatever the logits are, and ties go to the lower expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import begin, dependent


@triton.jit(do_not_specialize_on_alignment=["padding"])
def _route_kernel(
    logits, bias, padding, weights, ids, experts, row_stride,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BIAS: tl.constexpr, PADDING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PAD)
    live = expert < experts
    begin(PDL)
    x = tl.load(logits + token * row_stride + expert, mask=live, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.where(live, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        e = tl.exp(x - tl.max(x, axis=0))
        score = e / tl.sum(e, axis=0)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=live, other=0.0).to(tl.float32)
    choice = tl.where(live, choice, float("-inf"))

    rank = tl.arange(0, TOP_K_PAD)
    chosen = tl.zeros([TOP_K_PAD], tl.int32)
    weight = tl.zeros([TOP_K_PAD], tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0)
        chosen = tl.where(rank == j, best, chosen)
        weight = tl.where(rank == j, tl.sum(tl.where(expert == best, score, 0.0), axis=0), weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if NORMALIZE:
        weight /= tl.maximum(tl.sum(weight, axis=0), 1e-20)
    if PADDING:
        used = tl.load(padding + token) >= 0
        weight, chosen = tl.where(used, weight, 0.0), tl.where(used, chosen, -1)
    tl.store(weights + token * TOP_K + rank, weight, mask=rank < TOP_K)
    tl.store(ids + token * TOP_K + rank, chosen, mask=rank < TOP_K)


def route(
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    bias: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: `logits [T, E]` -> `(weights float32 [T, k], ids int32 [T, k])`.

    As `rimuru.kernels.reference.route`. Raises ValueError for an unknown scoring rule or `k > E`.
    """
    tokens, experts = logits.shape
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"unknown router scoring {scoring!r}; 'softmax' and 'sigmoid' work")
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k is {top_k}, but the layer has {experts} experts")
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        pad, pdl = triton.next_power_of_2(experts), dependent(logits)
        _route_kernel[(tokens,)](
            logits, logits if bias is None else bias, logits if live is None else live, weights, ids,
            experts, logits.stride(0),
            TOP_K=top_k, TOP_K_PAD=triton.next_power_of_2(top_k), EXPERTS_PAD=pad,
            SIGMOID=scoring == "sigmoid", NORMALIZE=normalize, BIAS=bias is not None,
            PADDING=live is not None, PDL=pdl, num_warps=1 if pad <= 256 else 4, launch_pdl=pdl,
        )  # fmt: skip
    return weights, ids
