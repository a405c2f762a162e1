"""Qwen3.5-MoE, its text part: Qwen3-Next with the projections of the gated delta layers stored apart.

Room: one family. Rule: only what sets the family apart; shared structure is in `decoder` and `layers`.

With text alone the three position grids of its rotary embedding are one, which leaves the ordinary
embedding.
"""

from __future__ import annotations

from typing import Any

from rimuru.models import qwen3_next
from rimuru.models.config import RawConfig


def read_fields(raw: RawConfig) -> dict[str, Any]:
    """`ModelConfig` fields from a Qwen3.5-MoE `config.json`, whose `text_config` `raw` already shows."""
    fields = qwen3_next.read_fields(raw, fused=False)
    fields["norm_topk"] = True  # by construction: no field of the file says otherwise
    fields["moe_layers"] = tuple(range(fields["num_layers"]))
    fields["dense_intermediate"] = 0
    return fields
