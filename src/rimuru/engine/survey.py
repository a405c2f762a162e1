"""What any published MoE configuration would need of memory, whether or not its family is served.

Room: the planner's reader of `config.json`. Rule: sizes only, no torch; what a served family needs is
read by `rimuru.models.config` and must agree with this (a test compares them). Weights outside the
experts of families that are not served are counted from their projections, to within a few per cent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rimuru.errors import ConfigError
from rimuru.models.config import FAMILIES, read_json
from rimuru.pool.geometry import AttentionKind, PoolSpec, RecurrentKind

from .config import EngineConfig
from .plan import FIXED_KINDS
from .sizes import GPU_LOST, GPU_SLACK, GRAPH_TOKENS, Sizes

FORMATS = ("bf16", "fp8", "mxfp4", "packed", "raw+packed")
ALIGN = 256  # bytes: each part of an expert's page starts on such a boundary
SCALE_BLOCK = {"fp8": 128, "mxfp4": 32}  # values that share a scale along the width of an expert


@dataclass(frozen=True, slots=True)
class Survey:
    """One rank's share of a model, in bytes; `served` tells whether the engine can run the family."""

    family: str
    served: bool
    layers: int
    moe_layers: int
    experts: int  # a layer
    top_k: int
    hidden: int
    vocab: int
    max_positions: int
    expert_width: int
    spec: PoolSpec
    dense_bytes: int  # weights outside the routed experts
    notes: tuple[str, ...] = ()

    def sizes(self, config: EngineConfig) -> Sizes:
        """What `plan_memory` needs. A step's workspace is bounded as for the served families, roughly."""
        tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
        per_token = 2 * (12 * self.hidden + 4 * self.top_k * self.expert_width) + 16 * self.experts
        rows = max(config.max_num_seqs, 128)
        on_gpu = (tokens + min(tokens, GRAPH_TOKENS)) * per_token * GPU_SLACK
        return Sizes(
            positions=self.max_positions, experts=self.experts_total, weights=self.dense_bytes, rope_row=256,
            workspace=tokens * per_token + rows * self.vocab * 24,
            gpu=int(on_gpu) + rows * self.vocab * 8 + GPU_LOST,
            spec=self.spec, notes=self.notes,
        )  # fmt: skip

    @property
    def experts_total(self) -> int:
        """Experts of all layers on this rank."""
        return self.moe_layers * self.experts


def survey(folder: str | Path, *, tp: int = 1, form: str = "bf16", block_tokens: int = 16) -> Survey:
    """Read `config.json` in `folder` for one of `tp` ranks, with experts in `form` (one of FORMATS).

    KV, states and the other weights are taken in bf16 (recurrent states in float32). Raises
    `ConfigError` for files without experts or attention sizes, and for cuts that split a scale block.
    """
    if form not in FORMATS:
        raise ConfigError(f"--expert-format {form!r} is unknown; choose one of {', '.join(FORMATS)}")
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder}: no config.json there")
    root = read_json(file)
    c = root.get("text_config", root)
    family = str(root.get("model_type"))
    missing = [
        n for n in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if n not in c
    ]
    experts = _first(c, "n_routed_experts", "num_experts", "num_local_experts")
    if missing or not experts:
        what = f"lacks {', '.join(missing)}" if missing else "names no routed experts"
        raise ConfigError(f"{file}: {what}; only Mixture-of-Experts decoders can be planned or served")
    layers = c["num_hidden_layers"]
    dense_first = c.get("first_k_dense_replace", 0)
    step = c.get("decoder_sparse_step", 1)
    only = c.get("mlp_only_layers") or []
    moe = [i for i in range(dense_first, layers) if i not in only and (i + 1) % step == 0]
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    width, experts_here, notes = _cut_experts(width, experts, tp, form, family)
    bias = family == "gpt_oss"
    raw = "bf16" if form == "raw+packed" else form
    attention, state, conv = _tenants(c, layers, tp, block_tokens)
    spec = PoolSpec(
        attention,
        expert_page(c["hidden_size"], width, raw, bias),
        expert_page(c["hidden_size"], width, "packed", bias) if form == "raw+packed" else None,
        state,
        conv,
    )
    for kind in attention:
        if kind.name in FIXED_KINDS and c.get("sliding_window"):
            held = kind.bytes_per_token_per_layer * len(kind.layers) * c["sliding_window"]
            notes.append(f"{kind.name} attention holds {held:,} bytes a request, whatever its length")
    if family not in FAMILIES:
        notes.append(f"family {family!r} can be planned but not served; served are {', '.join(FAMILIES)}")
    return Survey(
        family=family, served=family in FAMILIES, layers=layers, moe_layers=len(moe), experts=experts_here,
        top_k=_first(c, "num_experts_per_tok", "experts_per_token") or 1, hidden=c["hidden_size"],
        vocab=c["vocab_size"], max_positions=c.get("max_position_embeddings", 4096), expert_width=width,
        spec=spec,
        dense_bytes=2 * _dense_parameters(c, root, layers, len(moe), experts) // tp, notes=tuple(notes),
    )  # fmt: skip


def expert_page(hidden: int, width: int, form: str, bias: bool = False) -> int:
    """Payload bytes of one expert: gate_up and down with their scales, each part aligned."""
    total = 0
    for rows, cols in ((2 * width, hidden), (hidden, width)):
        n = rows * cols
        if form == "bf16":
            total += _up(2 * n)
        elif form == "fp8":  # a float32 scale for 128 x 128
            total += _up(n) + _up(-(-rows // 128) * -(-cols // 128) * 4)
        elif form == "mxfp4":  # a byte for 32 values
            total += _up(n // 2) + _up(n // 32)
        else:  # packed: 12 bits a weight; bases and escapes lie outside the pool
            total += _up(3 * n // 2)
    return total + (_up(4 * width) + _up(2 * hidden) if bias else 0)


def _cut_experts(width: int, experts: int, tp: int, form: str, family: str) -> tuple[int, int, list[str]]:
    """Width of an expert and experts a layer on one rank: by width, or whole experts where a cut would
    split a scale block."""
    block = SCALE_BLOCK.get(form, 1)
    if tp == 1 or width % (tp * block) == 0:
        return width // tp, experts, []
    if experts % tp == 0:
        note = (
            f"an expert of width {width} cannot be cut in {tp} along scale blocks of {block} ({form}): "
            f"expert parallel instead, {experts // tp} whole experts a rank and layer"
        )
        return width, experts // tp, [note]
    raise ConfigError(
        f"{family}: neither the width {width} (scale blocks of {block}) nor the {experts} experts divide by "
        f"--tensor-parallel-size {tp}"
    )


def _tenants(
    c: dict[str, Any], layers: int, tp: int, block: int
) -> tuple[tuple[AttentionKind, ...], RecurrentKind | None, RecurrentKind | None]:
    kinds = c.get("layer_types")
    if kinds is None and c.get("full_attention_interval"):
        every = c["full_attention_interval"]
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    every_layer = tuple(range(layers))
    if c.get("compress_ratios"):  # DeepSeek-V4: compressed entries and a window, of one latent head
        ratios, dim = c["compress_ratios"][:layers], c["head_dim"]
        csa = tuple(i for i, r in enumerate(ratios) if 0 < r < 128)
        hca = tuple(i for i, r in enumerate(ratios) if r >= 128)
        ratio = ratios[csa[0]]
        return (
            (
                AttentionKind("csa", csa, 2 * (dim + c["index_head_dim"]) // ratio, block),
                AttentionKind("hca", hca, 2 * dim // 128, 128),
                AttentionKind("window", every_layer, 2 * dim, block),
            ),
            None,
            None,
        )
    if c.get("kv_lora_rank"):
        return (
            (AttentionKind("mla", every_layer, 2 * (c["kv_lora_rank"] + c["qk_rope_head_dim"]), block),),
            None,
            None,
        )
    heads = c.get("num_key_value_heads") or c["num_attention_heads"]
    token = 2 * max(1, heads // tp) * _head_dim(c) * 2
    if kinds is None:
        return (AttentionKind("full", every_layer, token, block),), None, None

    def of(name: str) -> tuple[int, ...]:
        return tuple(i for i, k in enumerate(kinds) if k == name)

    found = [("full", of("full_attention")), ("sliding", of("sliding_attention"))]
    attention = tuple(AttentionKind(name, where, token, block) for name, where in found if where)
    linear = of("linear_attention")
    if not linear:
        return attention, None, None
    k_size = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    v_size = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    taps = c["linear_conv_kernel_dim"] - 1
    state = 4 * c["linear_num_value_heads"] * c["linear_key_head_dim"] * c["linear_value_head_dim"]
    conv = 2 * taps * (2 * k_size + v_size)
    return attention, RecurrentKind(linear, state // tp), RecurrentKind(linear, conv // tp)


def _dense_parameters(c: dict[str, Any], root: dict[str, Any], layers: int, moe: int, experts: int) -> int:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    tied = c.get("tie_word_embeddings", root.get("tie_word_embeddings", False))
    total = (1 if tied else 2) * c["vocab_size"] * hidden
    total += sum(_attention_parameters(c, heads, hidden, i) for i in range(layers))
    total += moe * experts * hidden
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    shared = c.get("shared_expert_intermediate_size") or (c.get("n_shared_experts") or 0) * width
    total += moe * 3 * hidden * shared
    return total + (layers - moe) * 3 * hidden * (c.get("intermediate_size") or 0)


def _attention_parameters(c: dict[str, Any], heads: int, hidden: int, layer: int) -> int:
    if c.get("compress_ratios"):
        q, dim, rank = c["q_lora_rank"], c["head_dim"], c["o_lora_rank"]
        latent = hidden * q + q * heads * dim + hidden * dim
        return latent + heads * dim * rank + c["o_groups"] * rank * hidden + _compressor(c, hidden, layer)
    if c.get("kv_lora_rank"):
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        out = heads * (nope + rope)
        q = hidden * out if not c.get("q_lora_rank") else c["q_lora_rank"] * (hidden + out)
        kv = hidden * (c["kv_lora_rank"] + rope) + c["kv_lora_rank"] * heads * (nope + value)
        return q + kv + heads * value * hidden
    every = c.get("full_attention_interval")
    if every and (layer + 1) % every:
        k = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        v = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        gates = 2 * c["linear_num_value_heads"]
        return hidden * (2 * k + 2 * v + gates) + (2 * k + v) * c["linear_conv_kernel_dim"] + v * hidden
    dim = _head_dim(c)
    q = heads * dim * (2 if every else 1)  # with an output gate the query projection is twice as wide
    return hidden * (q + 2 * (c.get("num_key_value_heads") or heads) * dim) + heads * dim * hidden


def _compressor(c: dict[str, Any], hidden: int, layer: int) -> int:
    """Projections that make compressed entries, and the indexer's of the finer kind."""
    ratio = c["compress_ratios"][layer]
    if not ratio:
        return 0
    overlap = 2 if ratio < 128 else 1
    entries = 2 * overlap * hidden * c["head_dim"]
    if ratio >= 128:
        return entries
    index = 2 * overlap * hidden * c["index_head_dim"] + hidden * c["index_n_heads"]
    return entries + index + c["q_lora_rank"] * c["index_n_heads"] * c["index_head_dim"]


def _head_dim(c: dict[str, Any]) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _first(c: dict[str, Any], *names: str) -> int | None:
    found: Callable[[str], int | None] = c.get
    return next((value for value in map(found, names) if value), None)


def _up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
