"""The survey of published configurations against independently counted sizes."""

from __future__ import annotations

import json

import pytest

from rimuru.engine.survey import FORMATS, survey
from rimuru.errors import ConfigError
from rimuru.models.config import FAMILIES, load_model_config
from rimuru.pool.geometry import plan_geometry

MODELS = (
    "Qwen1.5-MoE-A2.7B-Chat", "OLMoE-1B-7B-0924", "DeepSeek-V2-Lite", "gpt-oss-20b", "Qwen3-30B-A3B",
    "Qwen3.5-35B-A3B", "Mixtral-8x7B-v0.1", "Qwen3-Next-80B-A3B-Instruct", "GLM-4.5-Air", "Qwen3.5-122B-A10B",
    "DeepSeek-V4-Flash", "Qwen3.5-397B-A17B", "DeepSeek-V3",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_sizes_equal_those_counted_on_the_built_model(shared_file, name):
    counted = json.loads(shared_file("data/models/derived.json").read_text())[name]
    s = survey(shared_file(f"data/models/{name}"))
    assert s.experts_total == counted["n_experts"]
    # Each bias is aligned by itself: up to 256 bytes a part.
    assert 0 <= s.spec.expert_bytes - counted["expert_bytes"] < 512
    # Norms, biases and sinks are left out; DeepSeek-V4's small mixers too.
    assert s.dense_bytes == pytest.approx(counted["nonexpert_bytes"], rel=0.006)
    growing = sum(
        a.bytes_per_token_per_layer * len(a.layers)
        for a in s.spec.attention
        if a.name not in ("sliding", "window")
    )
    assert growing == counted["kv_token"]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_is_planned_within_the_bound_or_named(shared_file, name, tp):
    whole = survey(shared_file(f"data/models/{name}")).expert_width
    for form in FORMATS:
        # The only cuts that cannot be made: neither 60 experts nor 1408 in whole scale blocks divide by 8.
        if name.startswith("Qwen1.5") and tp == 8 and form in ("fp8", "mxfp4"):
            with pytest.raises(ConfigError, match=f"{whole}.*--tensor-parallel-size {tp}"):
                survey(shared_file(f"data/models/{name}"), tp=tp, form=form)
            continue
        s = survey(shared_file(f"data/models/{name}"), tp=tp, form=form)
        # Raw and packed in one pool must suit two parents at once; single formats keep the product's bound.
        assert plan_geometry(s.spec).worst_waste <= (0.04 if form == "raw+packed" else 0.02), form
        assert s.expert_width * tp == whole or any("expert parallel" in n for n in s.notes)


def test_what_is_served_reads_the_same_as_the_engine_reads_it(shared_file):
    for name in MODELS:
        folder = shared_file(f"data/models/{name}")
        s = survey(folder)
        if s.family not in FAMILIES or s.family.startswith(("qwen3_next", "qwen3_5")):
            continue
        model = load_model_config(folder)
        assert s.experts_total == model.routed_experts
        assert s.spec.attention[0].bytes_per_token_per_layer == model.kv_bytes_per_token_per_layer("bfloat16")
        assert s.dense_bytes == pytest.approx(2 * model.dense_parameters(), rel=0.001)


def test_a_dense_model_and_a_wrong_format_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "vocab_size": 9,
            }
        )
    )
    with pytest.raises(ConfigError, match="no routed experts"):
        survey(tmp_path)
    with pytest.raises(ConfigError, match="--expert-format"):
        survey(tmp_path, form="int3")
