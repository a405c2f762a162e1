"""OLMoE (Muennighoff et al., 2024): q and k normalised over all heads together, then optionally clipped.

Room: one family. Rule: only what sets the family apart; shared structure is in `decoder` and `layers`.
"""

from __future__ import annotations

from typing import Any

from rimuru.models.config import RawConfig, common_fields, expert_fields


def read_fields(raw: RawConfig) -> dict[str, Any]:
    """`ModelConfig` fields from an OLMoE `config.json`."""
    fields = common_fields(raw)
    fields |= expert_fields(raw, "intermediate_size", normalize=False)
    fields["moe_layers"] = tuple(range(fields["num_layers"]))
    fields["qkv_bias"] = fields["output_bias"] = raw.flag("attention_bias", False)
    fields["qk_norm"] = "all"
    if raw.get("clip_qkv") is not None:
        fields["clip_qkv"] = raw.number("clip_qkv")
    return fields
