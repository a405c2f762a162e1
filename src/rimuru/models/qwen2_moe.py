"""Qwen1.5-MoE and Qwen2-MoE: biases on q, k and v, a shared expert behind a sigmoid gate.

Room: one family. Rule: only what sets the family apart; shared structure is in `decoder` and `layers`.
"""

from __future__ import annotations

from typing import Any

from rimuru.models.config import RawConfig, common_fields, expert_fields, sparse_layers


def read_fields(raw: RawConfig) -> dict[str, Any]:
    """`ModelConfig` fields from a Qwen2-MoE `config.json`."""
    fields = common_fields(raw)
    layers = fields["num_layers"]
    fields |= expert_fields(raw, "moe_intermediate_size", normalize=False)
    fields["moe_layers"] = sparse_layers(raw, layers)
    fields["shared_intermediate"] = raw.integer("shared_expert_intermediate_size", high=1 << 20)
    fields["shared_gate"] = True
    if len(fields["moe_layers"]) < layers:
        fields["dense_intermediate"] = raw.integer("intermediate_size", high=1 << 20)
    fields["qkv_bias"] = raw.flag("qkv_bias", True)
    fields["windows"] = _windows(raw, layers)
    return fields


def _windows(raw: RawConfig, layers: int) -> tuple[int, ...]:
    if not raw.flag("use_sliding_window", False):
        return (0,) * layers
    window = raw.integer("sliding_window", default=4096)
    kinds = raw.get("layer_types")
    if kinds is None:
        below = raw.integer("max_window_layers", default=28, low=0)
        return tuple(window if i % 2 == 0 and i < below else 0 for i in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raw.problems.append(f"layer_types must be {layers} of {', '.join(known)}, got {kinds!r}")
        return (0,) * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
