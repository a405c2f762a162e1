"""The sizes of thirteen published MoE models, and how a rank and a weight format cut them.

The numbers are facts of the models' config files; `spec_of` is this test's own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from rimuru.pool import AttentionKind, PoolSpec, RecurrentKind

FORMATS = ("bf16", "fp8", "mxfp4", "packed")


@dataclass(frozen=True)
class Heads:
    """Plain attention: K and V in bf16."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    def kind(self, tp: int) -> AttentionKind:
        token = 2 * max(1, self.kv_heads // tp) * self.head_dim * 2
        return AttentionKind(self.name, tuple(range(self.layers)), token)


@dataclass(frozen=True)
class Latent:
    """One stream a token that every rank keeps whole (MLA and compressed attention)."""

    name: str
    layers: int
    bytes_per_token: int
    block: int = 16

    def kind(self, tp: int) -> AttentionKind:
        return AttentionKind(self.name, tuple(range(self.layers)), self.bytes_per_token, self.block)


@dataclass(frozen=True)
class Model:
    hidden: int
    inter: int  # width of one expert
    attention: tuple[Heads | Latent, ...]
    bias: bool = False
    linear_layers: int = 0
    state_bytes: int = 0  # float32 recurrent state of one layer
    conv_bytes: int = 0


MODELS = {
    "Qwen1.5-MoE-A2.7B": Model(2048, 1408, (Heads("full", 24, 16, 128),)),
    "OLMoE-1B-7B": Model(2048, 1024, (Heads("full", 16, 16, 128),)),
    "DeepSeek-V2-Lite": Model(2048, 1408, (Latent("mla", 27, 1152),)),
    "gpt-oss-20b": Model(2880, 2880, (Heads("full", 12, 8, 64), Heads("sliding", 12, 8, 64)), bias=True),
    "Qwen3-30B-A3B": Model(2048, 768, (Heads("full", 48, 4, 128),)),
    "Qwen3.5-35B-A3B": Model(
        2048, 512, (Heads("full", 10, 2, 256),), linear_layers=30, state_bytes=2 << 20, conv_bytes=48 << 10
    ),
    "Mixtral-8x7B": Model(4096, 14336, (Heads("full", 32, 8, 128),)),
    "Qwen3-Next-80B-A3B": Model(
        2048, 512, (Heads("full", 12, 2, 256),), linear_layers=36, state_bytes=2 << 20, conv_bytes=48 << 10
    ),
    "GLM-4.5-Air": Model(4096, 1408, (Heads("full", 46, 8, 128),)),
    "Qwen3.5-122B-A10B": Model(
        3072, 1024, (Heads("full", 12, 2, 256),), linear_layers=36, state_bytes=4 << 20, conv_bytes=72 << 10
    ),
    "DeepSeek-V4-Flash": Model(
        4096, 2048, (Latent("csa", 21, 320), Latent("hca", 20, 8, 128), Latent("window", 43, 1024))
    ),
    "Qwen3.5-397B-A17B": Model(
        4096, 1024, (Heads("full", 15, 2, 256),), linear_layers=45, state_bytes=4 << 20, conv_bytes=72 << 10
    ),
    "DeepSeek-V3": Model(7168, 2048, (Latent("mla", 61, 1152),)),
}


def _aligned(n: int) -> int:
    return -(-n // 256) * 256


def expert_bytes(model: Model, tp: int, form: str) -> int:
    """gate_up, down, their scales and biases, each 256-byte aligned."""
    inter, total = model.inter // tp, 0
    for rows, cols in ((2 * inter, model.hidden), (model.hidden, inter)):
        n = rows * cols
        if form == "bf16":
            total += _aligned(2 * n)
        elif form == "fp8":  # one float32 scale per 128 x 128
            total += _aligned(n) + _aligned(-(-rows // 128) * -(-cols // 128) * 4)
        elif form == "mxfp4":  # one byte per 32 values
            total += _aligned(n // 2) + _aligned(n // 32)
        else:  # 12 bits a weight
            total += _aligned(3 * n // 2)
    return total + (_aligned(4 * inter) + _aligned(2 * model.hidden) if model.bias else 0)


def spec_of(name: str, tp: int, form: str) -> PoolSpec:
    """What one rank of `tp` keeps in its pool. `form`: one of FORMATS, or "raw+packed"."""
    model = MODELS[name]
    state = conv = None
    if model.linear_layers:
        layers = tuple(range(model.linear_layers))
        state = RecurrentKind(layers, model.state_bytes // tp)
        conv = RecurrentKind(layers, model.conv_bytes // tp)
    mixed = form == "raw+packed"
    return PoolSpec(
        tuple(a.kind(tp) for a in model.attention),
        expert_bytes(model, tp, "bf16" if mixed else form),
        expert_bytes(model, tp, "packed") if mixed else None,
        state,
        conv,
    )
