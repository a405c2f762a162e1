"""Random tiny checkpoints of every served family, with a tokenizer of their own, and the oracle.

Room: the tests' material. Rule: deterministic, made by `transformers` alone (nothing of ours takes
part), so that whatever is compared with it is compared with an independent path.

Weights are drawn so that the residual stream keeps its size and logits spread over about +-10:
greedy choices and routing then have margins far above float32 rounding. Norm weights, biases and
every expert differ, so that a swapped one shows. The gated norm behind a recurrent state divides by the
size of what the state returns, which may be small, and so enlarges rounding: hybrid models have a larger
epsilon and smaller weights after it and in the router, which keep float32 logits within 0.5e-4 of float64's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

transformers.utils.logging.disable_progress_bar()

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
HYBRID_FAMILIES = ("qwen3_next", "qwen3_5_moe")
VOCAB = 640
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = [2, 0]  # <|im_end|> and <|endoftext|>, as chat checkpoints list them in generation_config.json
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What varies between the families on purpose: GQA ratio, head_dim apart from hidden / heads, a dense
# layer, a shared expert, both kinds of router weight, tied and untied output heads.
_COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.0,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 32, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "qwen2_moe": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 160, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 96, "norm_topk_prob": False, "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "olmoe": {
        "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False,
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 8,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48, "norm_topk_prob": True,
        "mlp_only_layers": [3], "rms_norm_eps": 1e-4, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 2 + ["full_attention"],
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe": {
        "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 64, "rms_norm_eps": 1e-4,
        "linear_num_key_heads": 4, "linear_num_value_heads": 4,
        "linear_key_head_dim": 24, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True,
    },
}  # fmt: skip
_CLASSES = {
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
}


def tiny_checkpoint(family: str, cache_dir: str | Path | None = None, **overrides: Any) -> Path:
    """A folder with a float32 checkpoint of `family`, its tokenizer and chat template.

    `overrides` replace fields of the `transformers` config (`tiny_checkpoint("olmoe", clip_qkv=1.0)`).
    The folder is made once per content and reused; treat it as read-only.
    """
    spec = {**_COMMON, **_SHAPES[family], **overrides}
    key = hashlib.sha256(
        json.dumps([family, spec, transformers.__version__], sort_keys=True).encode()
        + Path(__file__).read_bytes()
    ).hexdigest()[:16]
    root = Path(cache_dir) if cache_dir else Path(tempfile.gettempdir()) / f"rimuru-tiny-{os.getuid()}"
    target = root / f"{family}-{key}"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root))
    config_class, model_class = _CLASSES[family]
    model = model_class(config_class(**spec)).float()
    draw_weights(model, seed=int(key[:8], 16))
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(scratch)
    tiny_tokenizer().save_pretrained(scratch)
    try:
        os.rename(scratch, target)  # atomic: parallel test processes may race to make the same one
    except OSError:
        shutil.rmtree(scratch)
    return target


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter; see the module docstring for the aim."""
    rng = torch.Generator().manual_seed(seed)
    hybrid = model.config.model_type in ("qwen3_next", "qwen3_5_moe_text")  # norms multiply by 1 + weight
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=rng)
            if name.endswith("A_log"):
                p.copy_(noise - 3)  # some heads remember hundreds of tokens, so that a stale state shows
            elif hybrid and "norm" in name and "linear_attn" not in name:
                p.copy_(0.3 * noise)
            elif "norm" in name:
                p.copy_(1 + 0.3 * noise)
            elif p.dim() == 1:
                p.copy_(0.3 * noise)
            elif "embed" in name or "lm_head" in name:
                p.copy_(noise * 3 / p.shape[-1] ** 0.5)
            elif name.endswith("mlp.gate.weight"):
                p.copy_(noise * (1.2 if hybrid else 2) / p.shape[-1] ** 0.5)
            elif name.endswith("linear_attn.out_proj.weight"):
                p.copy_(noise * 0.36 / p.shape[-1] ** 0.5)
            else:
                p.copy_(noise * 1.2 / p.shape[-1] ** 0.5)


def training_text() -> list[str]:
    """A few thousand sentences of invented words: text enough for a small BPE, the same everywhere."""
    rng = random.Random(0)
    heads, tails = ["b", "d", "k", "l", "m", "n", "p", "r", "s", "t", "st", "tr"], ["a", "e", "i", "o", "u"]
    words = [
        "".join(rng.choice(heads) + rng.choice(tails) for _ in range(rng.randint(1, 3))) for _ in range(300)
    ]
    return [" ".join(rng.choices(words, k=rng.randint(4, 14))).capitalize() + "." for _ in range(3000)]


@functools.cache
def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCAB` entries: any text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        training_text(),
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_prompts(lengths: tuple[int, ...] = (1, 3, 8, 13, 16, 17, 31, 90), seed: int = 0) -> list[list[int]]:
    """Random token ids, one prompt a length; the default has one longer than a chunk of 64."""
    rng = random.Random(seed)
    return [[rng.randrange(len(SPECIAL), VOCAB) for _ in range(n)] for n in lengths]


@functools.lru_cache(maxsize=8)
def load_oracle(path: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The checkpoint in `transformers`, eager attention and experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.generation_config.eos_token_id = None  # else `generate` stops there whatever it is told
    return model.eval()


def oracle(
    path: Path, prompts: list[list[int]], max_new_tokens: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy continuation of each prompt alone, end-of-sequence tokens ignored.

    Returns the new tokens of each prompt, and the float32 logits `[max_new_tokens, vocab]` each was
    chosen from.
    """
    answers = [_continue(Path(path), tuple(p), max_new_tokens) for p in prompts]
    return [list(tokens) for tokens, _ in answers], [logits for _, logits in answers]


@functools.lru_cache(maxsize=256)
def _continue(path: Path, prompt: tuple[int, ...], n: int) -> tuple[tuple[int, ...], torch.Tensor]:
    model = load_oracle(path)
    settings = transformers.GenerationConfig(
        max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return tuple(out.sequences[0, len(prompt) :].tolist()), torch.cat(out.logits).float()


def oracle_logits(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float32 logits `[len(tokens), vocab]` of one forward in `dtype` over the whole sequence."""
    with torch.no_grad():
        return load_oracle(Path(path), dtype)(input_ids=torch.tensor([tokens])).logits[0].float()
