"""Folders with the configs of the benchmarked models, for engines with random weights."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

_COMMON = {"torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 151936}
CONFIGS = {
    "qwen1.5-moe": {
        **_COMMON, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "intermediate_size": 5632, "norm_topk_prob": False, "decoder_sparse_step": 1,
        "max_position_embeddings": 8192, "rope_theta": 1e6, "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "qwen3-30b": {
        **_COMMON, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
}  # fmt: skip


@functools.cache
def folder(name: str) -> str:
    """A folder that holds only the model's config.json."""
    path = Path(tempfile.mkdtemp(prefix="rimuru-shape-")) / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    return str(path)
