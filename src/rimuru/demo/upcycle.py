"""From a dense llama-type GGUF file to a Mixtral-type MoE checkpoint that computes the same function.

Room: demo. Rule: each MLP becomes identical experts behind a random router whose chosen weights sum to
1, so the text is the dense model's whatever is routed where, while memory and routing are an MoE's.

The copies being equal, a wrong expert would not show here: that is for the tests on random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from rimuru.errors import RimuruError

EXPERTS = 8
TOP_K = 2
ROUTER_SEED = 0
SHARD_BYTES = 500_000_000
_CONTROL_TOKEN = 3  # GGUF token type


def upcycle(source: Path, target: Path, progress: bool = True) -> None:
    """Write `target` (an existing folder): bf16 shards, config, tokenizer with chat template.

    Holds one shard and one dequantised tensor in memory. Raises `RimuruError` where the optional
    package that reads GGUF is absent.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise RimuruError("building the demo model needs `pip install '.[demo]' in the checkout`") from error
    reader = GGUFReader(source)
    header = {name: field.contents() for name, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}

    config = _mixtral_config(header)
    _save_tokenizer(header, target)
    config.save_pretrained(target)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # The model's own makers sample it so; at temperature 1 a model this small rambles.
    sampling = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    (target / "generation_config.json").write_text(json.dumps(ids | sampling, indent=1))
    copies = sum(tensor.n_elements * (EXPERTS if _is_mlp(name) else 1) for name, tensor in stored.items())
    routers = config.num_hidden_layers * EXPERTS * config.hidden_size
    with tqdm(
        total=2 * int(copies + routers), desc="building the demo model", unit="B", unit_scale=True,
        disable=not progress,
    ) as bar:  # fmt: skip
        _save_shards(_mixtral_tensors(stored, config), target, bar)


def _is_mlp(name: str) -> bool:
    return name.endswith((".ffn_gate.weight", ".ffn_down.weight", ".ffn_up.weight"))


def _mixtral_config(header: dict[str, Any]) -> Any:
    from transformers import MixtralConfig

    heads = header["llama.attention.head_count"]
    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(header["tokenizer.ggml.tokens"]),
        hidden_size=header["llama.embedding_length"],
        intermediate_size=header["llama.feed_forward_length"],
        num_hidden_layers=header["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=header["llama.attention.head_count_kv"],
        head_dim=header["llama.embedding_length"] // heads,
        max_position_embeddings=header["llama.context_length"],
        # Stored as float32: the shortest decimal that rounds to it is what was meant.
        rms_norm_eps=float(str(np.float32(header["llama.attention.layer_norm_rms_epsilon"]))),
        rope_parameters={"rope_type": "default", "rope_theta": float(header["llama.rope.freq_base"])},
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        tie_word_embeddings=True,
        bos_token_id=header["tokenizer.ggml.bos_token_id"],
        eos_token_id=header["tokenizer.ggml.eos_token_id"],
        pad_token_id=header["tokenizer.ggml.padding_token_id"],
    )


def _save_tokenizer(header: dict[str, Any], target: Path) -> None:
    """The byte-level BPE of the header as a Hugging Face tokenizer."""
    from transformers import PreTrainedTokenizerFast

    tokens, types = header["tokenizer.ggml.tokens"], header["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in header["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What the header calls "smollm": one token a digit, then the usual byte-level split.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[header["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[header["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[header["tokenizer.ggml.padding_token_id"]],
        model_max_length=header["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=header["tokenizer.chat_template"],
    )
    wrapped.save_pretrained(target)


def _mixtral_tensors(stored: dict[str, Any], config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and bf16 tensors of the MoE, one dense tensor at a time."""
    from gguf.quants import dequantize

    rng = torch.Generator().manual_seed(ROUTER_SEED)

    def read(name: str) -> torch.Tensor:
        tensor = stored[name]
        return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))

    yield "model.embed_tokens.weight", read("token_embd.weight").bfloat16()
    for layer in range(config.num_hidden_layers):
        old, new = f"blk.{layer}", f"model.layers.{layer}"
        q = _half_rotary(read(f"{old}.attn_q.weight"), config.num_attention_heads)
        k = _half_rotary(read(f"{old}.attn_k.weight"), config.num_key_value_heads)
        yield f"{new}.input_layernorm.weight", read(f"{old}.attn_norm.weight").bfloat16()
        yield f"{new}.self_attn.q_proj.weight", q.bfloat16()
        yield f"{new}.self_attn.k_proj.weight", k.bfloat16()
        yield f"{new}.self_attn.v_proj.weight", read(f"{old}.attn_v.weight").bfloat16()
        yield f"{new}.self_attn.o_proj.weight", read(f"{old}.attn_output.weight").bfloat16()
        yield f"{new}.post_attention_layernorm.weight", read(f"{old}.ffn_norm.weight").bfloat16()
        # Logits of the router then have about the size of its normalised input: neither flat nor one-hot.
        router = torch.randn(EXPERTS, config.hidden_size, generator=rng) / config.hidden_size**0.5
        yield f"{new}.block_sparse_moe.gate.weight", router.bfloat16()
        for ours, theirs in (("w1", "ffn_gate"), ("w2", "ffn_down"), ("w3", "ffn_up")):
            weight = read(f"{old}.{theirs}.weight").bfloat16()
            for expert in range(EXPERTS):
                yield f"{new}.block_sparse_moe.experts.{expert}.{ours}.weight", weight.clone()
    yield "model.norm.weight", read("output_norm.weight").bfloat16()


def _half_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection from GGUF's order (pairs interleaved) to halves.

    GGUF rotates rows (2i, 2i+1) of a head together, Hugging Face rows (i, i + head_dim / 2).
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _save_shards(tensors: Iterable[tuple[str, torch.Tensor]], target: Path, bar: tqdm) -> None:
    """Safetensors files of about `SHARD_BYTES` and their index."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(pending, target / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        pending[name] = tensor
        total += tensor.nbytes
        bar.update(tensor.nbytes)
        if sum(t.nbytes for t in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (target / f"part-{number}").rename(target / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
