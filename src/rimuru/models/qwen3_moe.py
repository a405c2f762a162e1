"""Qwen3-MoE: q and k normalised head by head before the rotation, no shared expert.

Room: one family. Rule: only what sets the family apart; shared structure is in `decoder` and `layers`.
"""

from __future__ import annotations

from typing import Any

from rimuru.models.config import RawConfig, common_fields, expert_fields, sparse_layers


def read_fields(raw: RawConfig) -> dict[str, Any]:
    """`ModelConfig` fields from a Qwen3-MoE `config.json`."""
    fields = common_fields(raw)
    layers = fields["num_layers"]
    fields |= expert_fields(raw, "moe_intermediate_size", normalize=False)
    fields["moe_layers"] = sparse_layers(raw, layers)
    if len(fields["moe_layers"]) < layers:
        fields["dense_intermediate"] = raw.integer("intermediate_size", high=1 << 20)
    fields["qkv_bias"] = fields["output_bias"] = raw.flag("attention_bias", False)
    fields["qk_norm"] = "head"
    if raw.flag("use_sliding_window", False):
        fields["windows"] = (raw.integer("sliding_window", default=4096),) * layers
    return fields
