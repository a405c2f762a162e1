"""Rotary embedding tables (Su et al., 2021) with the scalings that a KV cache can follow.

Room: layers. Rule: computed once at start in float32, in the order of operations the models were
trained with, so that angles agree to the last bit at long positions too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def inverse_frequencies(
    kind: str, base: float, rotary_dim: int, scaling: Mapping[str, float]
) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair, float32 `[rotary_dim / 2]`, and the factor on cos and sin.

    kind: "default"; "linear" (`factor`); "llama3" (`factor`, `low_freq_factor`, `high_freq_factor`,
    `original_max_position_embeddings`); "yarn" (Peng et al., 2023: `factor`, `beta_fast`,
    `beta_slow`, `truncate`, `original_max_position_embeddings`, and `attention_factor` or `mscale`
    with `mscale_all_dim` where given). Others raise `KeyError`.
    """
    power = base ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)
    plain = 1.0 / power
    if kind == "default":
        return plain, 1.0
    factor = scaling["factor"]
    return {
        "linear": lambda: (plain / factor, 1.0),
        "llama3": lambda: (_llama3(plain, factor, scaling), 1.0),
        "yarn": lambda: (
            _yarn(plain, 1.0 / (factor * power), base, rotary_dim, scaling),
            _yarn_attention(factor, scaling),
        ),
    }[kind]()


def _llama3(plain: torch.Tensor, factor: float, scaling: Mapping[str, float]) -> torch.Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, a linear blend between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / plain)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


def _yarn(
    plain: torch.Tensor, stretched: torch.Tensor, base: float, dim: int, scaling: Mapping[str, float]
) -> torch.Tensor:
    """Pairs that turn often enough inside the trained length keep their speed, slow ones stretch."""
    trained = scaling["original_max_position_embeddings"]

    def pair_with(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling["beta_fast"]), pair_with(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return stretched * (1 - keep) + plain * keep


def _yarn_attention(factor: float, scaling: Mapping[str, float]) -> float:
    if "attention_factor" in scaling:
        return scaling["attention_factor"]

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def rope_table(
    kind: str,
    base: float,
    rotary_dim: int,
    scaling: Mapping[str, float],
    max_positions: int,
    device: torch.device,
) -> torch.Tensor:
    """cos and sin side by side, float32 `[max_positions, rotary_dim]`, as `qkv_to_cache` reads them."""
    inverse, magnitude = inverse_frequencies(kind, base, rotary_dim, scaling)
    angle = torch.outer(torch.arange(max_positions).float(), inverse)
    return torch.cat([angle.cos() * magnitude, angle.sin() * magnitude], dim=-1).to(device)
