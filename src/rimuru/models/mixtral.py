"""Mixtral (Jiang et al., 2024): every layer MoE, top-k weights renormalised, no biases, no q/k norm.

Room: one family. Rule: only what sets the family apart; shared structure is in `decoder` and `layers`.
"""

from __future__ import annotations

from typing import Any

from rimuru.models.config import RawConfig, common_fields, expert_fields


def read_fields(raw: RawConfig) -> dict[str, Any]:
    """`ModelConfig` fields from a Mixtral `config.json`."""
    fields = common_fields(raw)
    layers = fields["num_layers"]
    fields |= expert_fields(raw, "intermediate_size", normalize=True)
    fields["norm_topk"] = True  # by construction: the softmax is taken over the chosen experts
    fields["moe_layers"] = tuple(range(layers))
    fields["windows"] = (raw.integer("sliding_window", default=0, low=0),) * layers
    return fields
