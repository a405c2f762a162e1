"""What a plan must know of a model on one device, in bytes.

Room: between a model's configuration and the memory plan. Rule: no torch, arithmetic on the configuration
alone; bounds are of one step, and on a GPU what was measured there is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rimuru.models.config import ModelConfig
from rimuru.pool.geometry import AttentionKind, PoolSpec, RecurrentKind

from .config import EngineConfig

GRAPH_TOKENS = 512  # of the largest captured step
# What a CUDA context, loaded kernels, cuBLAS and captured graphs take beside torch's allocations (0.61 GB on
# an H200, 0.44 of it the context), and torch's reserved bytes over those counted: it loses some between them.
GPU_DRIVER = 648 << 20
GPU_SLACK = 1.3
GPU_LOST = 96 << 20
FEW_ROWS = 32  # rows of logits of which copies exist at one time
GRANT = 256  # alignment of single allocations and of the parts of an expert page, bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a plan must know of a model on one device, in bytes where nothing else is said."""

    positions: int  # tokens
    experts: int  # routed, of all layers
    weights: int  # everything outside the routed experts
    rope_row: int  # of the rotary table, a position
    workspace: int
    gpu: int  # workspace on a GPU
    spec: PoolSpec
    notes: tuple[str, ...] = ()
    embedding: int = 0  # of the weights, an embedding table that nothing else reads


def sizes_of(model: ModelConfig, config: EngineConfig, itemsize: int) -> Sizes:
    """The sizes of a model that the engine serves."""
    return Sizes(
        positions=model.max_position_embeddings, experts=model.routed_experts,
        weights=model.dense_parameters() * itemsize, rope_row=4 * model.rotary_dim,
        workspace=workspace_bytes(model, config, itemsize),
        gpu=gpu_bytes(model, config, itemsize),
        spec=pool_spec(model, config.block_size, itemsize),
        embedding=0 if model.tie_embeddings else model.vocab_size * model.hidden_size * itemsize,
    )  # fmt: skip


def pool_spec(model: ModelConfig, block_tokens: int, itemsize: int) -> PoolSpec:
    """What the pool must know of a model: bytes of a token's KV, of an expert, of a recurrent state."""
    inter, hidden = model.moe_intermediate, model.hidden_size
    expert = _up(2 * inter * hidden * itemsize) + _up(hidden * inter * itemsize)
    attention = AttentionKind("kv", model.kv_layers, 2 * model.kv_size * itemsize, block_tokens)
    state = conv = None
    if (r := model.recurrent) is not None:
        state = RecurrentKind(r.layers, r.state_bytes)
        conv = RecurrentKind(r.layers, r.conv_elements * itemsize)
    return PoolSpec(attention=(attention,), expert_bytes=expert, state=state, conv=conv)


def _up(n: int) -> int:
    return -(-n // GRANT) * GRANT


def workspace_bytes(model: ModelConfig, config: EngineConfig, itemsize: int) -> int:
    """An upper bound of what one step holds at once beside weights and pages.

    Its activations, and for each sampled row the logits with the sampler's copies (float32, at most six).
    """
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    rows = max(config.max_num_seqs, 128)
    return tokens * activation_bytes(model, itemsize) + rows * model.vocab_size * 4 * 6


def gpu_bytes(model: ModelConfig, config: EngineConfig, itemsize: int) -> int:
    """The same on a GPU, in torch's allocator: the largest step, and the captured steps, which share the
    memory of the largest. Each has its logits; copies of logits are of few rows, when activations are gone.
    """
    most = max(config.max_num_batched_tokens, config.max_num_seqs)
    graphs = max(min(config.max_num_batched_tokens, GRAPH_TOKENS), config.max_num_seqs)
    token, vocab = activation_bytes(model, itemsize) * GPU_SLACK, model.vocab_size
    scores = max(0, FEW_ROWS * 4 * 6 * vocab - most * token)
    return int((most + graphs) * token + 2 * config.max_num_seqs * itemsize * vocab + scores) + GPU_LOST


def activation_bytes(model: ModelConfig, itemsize: int) -> int:
    """Of a token: residual, norm, qkv, attention out, the MoE's gathered rows, activations and float32 sum,
    router."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    inter = max(
        model.top_k * 3 * model.moe_intermediate,
        3 * max(model.dense_intermediate or 0, model.shared_intermediate or 0),
    )
    per_token = (6 * model.hidden_size + 2 * heads + inter + model.top_k * model.hidden_size) * itemsize
    per_token += 4 * (2 * model.hidden_size + 4 * model.num_experts)
    if (r := model.recurrent) is not None:  # float32 copies of q, k, v, their heads repeated
        per_token += 4 * (4 * r.channels + 6 * r.value_heads * (r.key_dim + r.value_dim))
    return per_token
