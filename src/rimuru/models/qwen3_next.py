"""Qwen3-Next: three gated delta layers to one of gated attention, a shared expert, norms by 1 + weight.

Room: one family. Rule: only what sets the family apart; shared structure is in `decoder` and `layers`.
"""

from __future__ import annotations

from typing import Any

from rimuru.models.config import RawConfig, common_fields, expert_fields, recurrent_fields, sparse_layers


def read_fields(raw: RawConfig, fused: bool = True) -> dict[str, Any]:
    """`ModelConfig` fields from a Qwen3-Next `config.json`; `fused` says how projections are stored."""
    fields = common_fields(raw, partial_rotary=0.25)
    layers = fields["num_layers"]
    fields |= expert_fields(raw, "moe_intermediate_size", normalize=True)
    fields["moe_layers"] = sparse_layers(raw, layers)
    fields["shared_intermediate"] = raw.integer("shared_expert_intermediate_size", high=1 << 20)
    fields["shared_gate"] = True
    if len(fields["moe_layers"]) < layers:
        fields["dense_intermediate"] = raw.integer("intermediate_size", high=1 << 20)
    fields["qkv_bias"] = fields["output_bias"] = raw.flag("attention_bias", False)
    fields["qk_norm"] = "head"
    fields["output_gate"] = fields["zero_centred_norm"] = True
    fields["recurrent"] = recurrent_fields(raw, layers, fused)
    return fields
