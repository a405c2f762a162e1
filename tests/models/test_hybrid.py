"""Gated delta layers between attention layers: `transformers`' logits and tokens, any chunking."""

from __future__ import annotations

import json

import pytest
import torch
from support.harness import Harness, step_meta
from support.rewrite import rewrite, stack_experts
from support.tiny import HYBRID_FAMILIES, oracle, oracle_logits, tiny_checkpoint, tiny_prompts

from rimuru.errors import ConfigError
from rimuru.kernels import backend_for, reference
from rimuru.models.config import load_model_config
from rimuru.models.loader import dummy_weights
from rimuru.models.registry import build_model

STEPS = 8
BOUND = 1e-4

# name -> (family, config overrides): what the tiny defaults leave out
VARIANTS = {
    **{family: (family, {}) for family in HYBRID_FAMILIES},
    "next-plain-weights-bias-all-sparse": (
        "qwen3_next",
        {"norm_topk_prob": False, "attention_bias": True, "mlp_only_layers": [], "num_hidden_layers": 4,
         "layer_types": None, "tie_word_embeddings": True},
    ),
    "next-half-rotary": (
        "qwen3_next",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "3.5-one-key-head": ("qwen3_5_moe", {"linear_num_key_heads": 1, "tie_word_embeddings": False}),
    "3.5-attention-only": ("qwen3_5_moe", {"layer_types": ["full_attention"] * 4}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_prompts_gives_the_oracles_tokens_and_logits(variant):
    family, overrides = VARIANTS[variant]
    path = tiny_checkpoint(family, **overrides)
    prompts = tiny_prompts() if variant in HYBRID_FAMILIES else tiny_prompts((1, 17, 60))
    want_tokens, want_logits = oracle(path, prompts, STEPS)
    tokens, logits = Harness(path).generate(prompts, STEPS)
    assert tokens == want_tokens
    for got, want in zip(logits, want_logits, strict=True):
        torch.testing.assert_close(got, want, atol=BOUND, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_chunked_prefill_mixed_with_decode_changes_nothing(family, chunk):
    path = tiny_checkpoint(family)
    prompts = tiny_prompts()
    want_tokens, want_logits = oracle(path, prompts, STEPS)
    tokens, logits = Harness(path, seed=chunk).generate(prompts, STEPS, chunk)
    assert tokens == want_tokens
    for got, want in zip(logits, want_logits, strict=True):
        torch.testing.assert_close(got, want, atol=BOUND, rtol=0)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_every_position_of_a_prompt_of_several_chunks_has_the_oracles_logits(family):
    path = tiny_checkpoint(family)
    prompt = tiny_prompts((200,), seed=3)[0]
    got = Harness(path).step([(0, 0, prompt)])
    torch.testing.assert_close(got, oracle_logits(path, prompt), atol=BOUND, rtol=0)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_the_back_end_of_this_machine_gives_the_oracles_tokens_and_logits(family):
    path = tiny_checkpoint(family)
    prompts = tiny_prompts()
    want_tokens, want_logits = oracle(path, prompts, STEPS)
    ops = backend_for(torch.device("cpu"), torch.float32)
    tokens, logits = Harness(path, ops).generate(prompts, STEPS, chunk=16)
    assert tokens == want_tokens
    for got, want in zip(logits, want_logits, strict=True):
        torch.testing.assert_close(got, want, atol=BOUND, rtol=0)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_rounding_in_float32_moves_logits_by_less_than_half_the_bound(family):
    path = tiny_checkpoint(family)
    prompts = [tiny_prompts((n,), seed=n)[0] for n in (1, 3, 31, 90)]
    exact = torch.cat([oracle_logits(path, p, torch.float64) for p in prompts])
    theirs = torch.cat([oracle_logits(path, p) for p in prompts])
    ours = Harness(path).step([(i, 0, p) for i, p in enumerate(prompts)])
    assert (theirs - exact).abs().max() < BOUND / 2
    assert (ours - exact).abs().max() < BOUND / 2


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_in_bfloat16_rounding_costs_no_more_than_in_the_oracle(family):
    """As for the other families: the median distance to the float32 logits, 1.3 for the small sample."""
    path = tiny_checkpoint(family)
    prompts = [tiny_prompts((60,), seed=seed)[0] for seed in range(3)]
    exact = torch.cat([oracle_logits(path, p) for p in prompts])
    ours = Harness(path, dtype=torch.bfloat16).step([(i, 0, p) for i, p in enumerate(prompts)])
    theirs = torch.cat([oracle_logits(path, p, torch.bfloat16) for p in prompts])

    def median_error(got: torch.Tensor) -> float:
        return ((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()

    assert median_error(ours) < 1.3 * median_error(theirs)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_stale_state_shows(family):
    """The comparison can fail: a step that starts from another sequence's state differs."""
    path = tiny_checkpoint(family)
    first, second = tiny_prompts((40, 41))
    harness = Harness(path)
    harness.step([(0, 0, first[:39]), (1, 0, second[:39])])
    views = [v for i, v in enumerate(harness.kv.views) if i not in harness.config.kv_layers]
    table = views[-1].state.table
    table[[0, 1]] = table[[1, 0]]
    got = harness.step([(0, 39, first[39:])])
    assert (got[0] - oracle_logits(path, first)[-1]).abs().max() > 0.1


def test_a_padding_sequence_reads_and_writes_nothing():
    """A captured graph pads its batch with sequences of no length; slot 5 here, with one token."""
    harness = Harness(tiny_checkpoint("qwen3_next"))
    meta = step_meta([(0, 0, 3), (5, 0, 1)])
    meta.seq_lens[1], meta.token_slots[3] = 0, -1
    tokens = torch.tensor([5, 6, 7, 0])
    hidden = harness.model.forward(tokens, meta, harness.kv.views, harness.store.table)
    alone = Harness(tiny_checkpoint("qwen3_next")).step([(0, 0, [5, 6, 7])])
    torch.testing.assert_close(harness.model.logits(hidden[:3]), alone, atol=BOUND, rtol=0)
    view = harness.kv.views[0]
    for part in (view.state, view.conv):
        at = int(part.table[5]) * part.layout.grain_elems
        assert part.pool[at : at + part.layout.layer_elems].isnan().all()


def composite(path, target):
    """The text checkpoint as the text part of a larger one, with parts that are not served."""

    def tensors(values):
        out = {n.replace("model.", "model.language_model.", 1): v for n, v in values.items()}
        return out | {"model.visual.patch_embed.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(3)}

    def config(data):
        text = {k: v for k, v in data.items() if k not in ("architectures", "tie_word_embeddings")}
        outer = {k: data[k] for k in ("architectures", "tie_word_embeddings")}
        return {**outer, "model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 2}}

    return rewrite(path, target, tensors, config)


def test_the_text_part_of_a_composite_checkpoint_is_the_same_model(tmp_path):
    path = tiny_checkpoint("qwen3_5_moe")
    prompt = tiny_prompts((33,))[0]
    inner = Harness(composite(path, tmp_path / "composite"))
    assert inner.config == load_model_config(path)
    torch.testing.assert_close(inner.step([(0, 0, prompt)]), Harness(path).step([(0, 0, prompt)]))


def test_stacked_experts_load_too(tmp_path):
    path = tiny_checkpoint("qwen3_next")
    prompt = tiny_prompts((33,))[0]
    stacked = Harness(rewrite(path, tmp_path / "stacked", stack_experts))
    torch.testing.assert_close(stacked.step([(0, 0, prompt)]), Harness(path).step([(0, 0, prompt)]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes_from_the_configuration_are_the_models(variant):
    family, overrides = VARIANTS[variant]
    config = load_model_config(tiny_checkpoint(family, **overrides))
    model = build_model(config, reference, "meta", torch.float32)
    rope = config.max_position_embeddings * config.rotary_dim * 4
    assert config.dense_parameters() * 4 + rope == model.nbytes


def test_dummy_weights_keep_activations_finite_and_norms_neutral():
    config = load_model_config(tiny_checkpoint("qwen3_next"))
    harness = Harness(tiny_checkpoint("qwen3_next"))
    dummy_weights(harness.model, 0, harness.store.sink)
    assert (harness.model.parameters["norm.weight"] == 0).all()
    assert (harness.model.parameters["layers.0.linear_attn.norm.weight"] == 1).all()
    assert harness.step([(0, 0, list(range(3, 40)))]).isfinite().all()
    assert config.recurrent is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is no multiple of linear_num_key_heads 2"),
        ({"layer_types": ["linear_attention"] * 5}, "without any full_attention layer"),
        ({"layer_types": ["mamba"] * 5}, "layer_types must be 5 of full_attention, linear_attention"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be an integer from 2 to 64"),
        ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "partial_rotary_factor 0.01"),
    ],
)
def test_what_cannot_be_right_is_named(tmp_path, change, words):
    path = rewrite(tiny_checkpoint("qwen3_next"), tmp_path / "bad", config=lambda data: {**data, **change})
    with pytest.raises(ConfigError, match=words):
        load_model_config(path)
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen3_next"
