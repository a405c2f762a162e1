"""The pre-norm decoder that all served families share.

Room: models. Rule: a step's Python is one short loop; every tensor and kernel it needs is bound in
`__init__`. Dense parameters are owned here; KV and experts live in pages that the caller passes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

from rimuru.kernels import operation
from rimuru.kernels.types import ExpertLayout, KVView, RecurrentView, StepMeta
from rimuru.layers.attention import Attention, ClippedAttention, GatedAttention
from rimuru.layers.gated_delta import GatedDeltaNet
from rimuru.layers.linear import DenseWeights, GatedMlp
from rimuru.layers.moe import SparseMoe
from rimuru.layers.norm_rope import rope_table
from rimuru.models.config import ModelConfig


class RouterLogits(Protocol):
    """What gives the routers' logits where the routers themselves do not."""

    def logits(self, layer: int, meta: StepMeta) -> torch.Tensor:
        """Of MoE layer `layer` for the step's tokens: float32 `[T, experts]`; asked for layer by layer."""
        ...


@dataclass(slots=True)
class DecoderLayer:
    """One layer; exactly one of `moe` and `mlp` is there. A gated delta layer takes attention's place."""

    input_norm: torch.Tensor
    attention: Attention | GatedDeltaNet
    post_norm: torch.Tensor
    moe: SparseMoe | None
    mlp: GatedMlp | None


class Decoder:
    """Embedding, layers, final norm and output head.

    `parameters` maps canonical checkpoint names to the tensors to fill; `expert_layout` is how the
    caller must lay out every expert; `nbytes` counts all that the model holds on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: ModuleType,
        device: torch.device | str,
        dtype: torch.dtype,
        max_positions: int | None = None,
        embedding: torch.Tensor | None = None,
    ):
        """Allocate, uninitialised. `max_positions` caps the rotary table (default: the model's own).
        `embedding` `[vocab, hidden]`: where the embedding table is to lie, if not on the device; not where it
        is the output head too.
        """
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.expert_layout = ExpertLayout(config.hidden_size, config.moe_intermediate, dtype)
        weights = DenseWeights(self.device, dtype)
        hidden = config.hidden_size
        rope = rope_table(
            config.rope_kind,
            config.rope_base,
            config.rotary_dim,
            dict(config.rope_scaling),
            max_positions or config.max_position_embeddings,
            self.device,
        )
        if embedding is None:
            self.embedding = weights.take("embed_tokens.weight", config.vocab_size, hidden)
        else:
            assert not config.tie_embeddings
            self.embedding = weights.place("embed_tokens.weight", embedding)
        self.layers = [self._layer(i, weights, ops, rope) for i in range(config.num_layers)]
        self.norm = weights.take("norm.weight", hidden)
        self._norms_after = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        self.head = self.embedding
        if not config.tie_embeddings:
            self.head = weights.take("lm_head.weight", config.vocab_size, hidden)
        self.parameters = weights.views
        self.nbytes = weights.nbytes + rope.numel() * rope.dtype.itemsize
        self._linear, self._eps = ops.linear, config.rms_eps
        self._embed = operation(ops, "embed")
        self._norm_op = operation(ops, "zero_centred_rms_norm" if config.zero_centred_norm else "rms_norm")
        self.routing: RouterLogits | None = None  # stands in for the routers
        self._table: torch.Tensor | None = None
        self._rows: tuple[torch.Tensor, ...] = ()

    def _layer(self, i: int, weights: DenseWeights, ops: ModuleType, rope: torch.Tensor) -> DecoderLayer:
        config, name, hidden = self.config, f"layers.{i}", self.config.hidden_size
        attention = self._attention(i, weights, ops, rope)
        input_norm = weights.take(f"{name}.input_layernorm.weight", hidden)
        post_norm = weights.take(f"{name}.post_attention_layernorm.weight", hidden)
        moe = mlp = None
        if i in config.moe_layers:
            moe = SparseMoe(
                weights,
                ops,
                f"{name}.mlp",
                config.moe_layers.index(i),
                self.expert_layout,
                config.num_experts,
                config.top_k,
                norm=post_norm,
                eps=config.rms_eps,
                zero_centred=config.zero_centred_norm,
                normalize=config.norm_topk,
                scoring=config.scoring,
                shared=config.shared_intermediate,
                shared_gate=config.shared_gate,
            )
        else:
            mlp = GatedMlp(weights, ops, f"{name}.mlp", hidden, config.dense_intermediate)
        return DecoderLayer(input_norm, attention, post_norm, moe, mlp)

    def _attention(
        self, i: int, weights: DenseWeights, ops: ModuleType, rope: torch.Tensor
    ) -> Attention | GatedDeltaNet:
        config, hidden = self.config, self.config.hidden_size
        r = config.recurrent
        if r is not None and i in r.layers:
            shape = (r.key_heads, r.value_heads, r.key_dim, r.value_dim, r.kernel)
            return GatedDeltaNet(
                weights, ops, f"layers.{i}.linear_attn", hidden, *shape, eps=config.rms_eps, fused=r.fused
            )
        options: dict[str, Any] = {
            "qkv_bias": config.qkv_bias,
            "output_bias": config.output_bias,
            "qk_norm": config.qk_norm,
            "eps": config.rms_eps,
            "window": config.windows[i],
        }
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        arguments = (weights, ops, f"layers.{i}.self_attn", hidden, *heads, rope)
        if config.output_gate:
            return GatedAttention(*arguments, **options)
        if config.clip_qkv is not None:
            return ClippedAttention(*arguments, clip=config.clip_qkv, **options)
        return Attention(*arguments, **options)

    def forward(
        self,
        tokens: torch.Tensor,
        meta: StepMeta,
        kv: Sequence[KVView | RecurrentView],
        expert_table: torch.Tensor | Sequence[Iterable[torch.Tensor]],
        touched: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        latest: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step.

        tokens int32 or int64 `[T]`, negative where `latest` (int32 by slot) has the token; kv: one view a
        layer, of its kind; expert_table int64 `[MoE layers, experts]`, raw addresses, or what `moe` takes for
        each layer; touched int32 `[MoE layers, experts]`, incremented by the tokens routed to each expert;
        rows int32 or int64 `[S]`: the tokens whose hidden state is wanted (default all). Returns the normed
        hidden states `[T or S, hidden]`, input to `logits`.
        """
        addresses: Sequence[torch.Tensor | Iterable[torch.Tensor]]
        if not isinstance(expert_table, torch.Tensor):
            addresses = expert_table
        else:
            if expert_table is not self._table:
                self._table, self._rows = expert_table, expert_table.unbind(0)
            addresses = self._rows
        norm, eps, routing = self._norm_op, self._eps, self.routing
        counts: Sequence[torch.Tensor | None] = (None,) * len(self.config.moe_layers)
        if touched is not None:
            counts = touched.unbind(0)
        residual = self._embed(tokens, self.embedding, meta.token_slots, latest)
        x, _ = norm(residual, self.layers[0].input_norm, eps)
        for layer, after, view in zip(self.layers, self._norms_after, kv, strict=True):
            x = layer.attention.forward(x, meta, view)  # type: ignore[arg-type]
            if layer.moe is not None:
                at = layer.moe.index
                routed = None if routing is None else routing.logits(at, meta)
                x, residual = layer.moe.forward(
                    x, residual, after, addresses[at], counts[at], meta.token_slots, routed
                )
            else:
                x, residual = norm(x, layer.post_norm, eps, residual)
                x, residual = norm(layer.mlp.forward(x), after, eps, residual)  # type: ignore[union-attr]
        return x if rows is None else x.index_select(0, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[S, hidden]` -> `[S, vocab]` in the model's dtype."""
        return self._linear(hidden, self.head)
