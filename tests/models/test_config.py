"""Reading `config.json`: the published files, what is refused, and that nothing slips through."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from support.rewrite import change_json, rewrite
from support.tiny import FAMILIES, tiny_checkpoint

from rimuru.errors import ConfigError, UnsupportedModelError
from rimuru.layers.norm_rope import inverse_frequencies, rope_table
from rimuru.models.config import load_model_config

# folder -> what its README derived: (MoE layers, all experts GB, other weights GB, parameters in billions)
PUBLISHED = {
    "Qwen1.5-MoE-A2.7B-Chat": (24, 24.91, 3.72, 14.316),
    "OLMoE-1B-7B-0924": (16, 12.88, 0.95, 6.919),
    "Qwen3-30B-A3B": (48, 57.98, 3.08, 30.532),
    "Mixtral-8x7B-v0.1": (32, 90.19, 3.21, 46.703),
    "Qwen3-Next-80B-A3B-Instruct": (48, 154.62, 4.73, 79.674),
    "Qwen3.5-35B-A3B": (40, 64.42, 4.90, 34.661),
    "Qwen3.5-122B-A10B": (48, 231.93, 12.29, 122.112),
    "Qwen3.5-397B-A17B": (60, 773.09, 19.60, 396.346),
}


def changed(tmp_path: Path, family: str, **fields) -> Path:
    return rewrite(tiny_checkpoint(family), tmp_path / "m", config=lambda c: c.update(fields))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_sizes(name, shared_file):
    config = load_model_config(shared_file(f"data/models/{name}"))
    layers, experts, other, billions = PUBLISHED[name]
    assert len(config.moe_layers) == layers
    assert config.dtype == "bfloat16"
    assert config.routed_experts * config.expert_parameters * 2 / 1e9 == pytest.approx(experts, abs=0.01)
    assert config.dense_parameters() * 2 / 1e9 == pytest.approx(other, abs=0.01)
    total = config.routed_experts * config.expert_parameters + config.dense_parameters()
    assert total / 1e9 == pytest.approx(billions, abs=0.001)


def test_kv_bytes_of_a_published_model(shared_file):
    config = load_model_config(shared_file("data/models/Qwen3-30B-A3B"))
    assert config.kv_bytes_per_token_per_layer("bfloat16") == 2048
    assert config.attention_layers == 48
    assert config.eos_ids == (151645,)


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3", "DeepSeek-V4-Flash", "gpt-oss-20b", "GLM-4.5-Air", "DeepSeek-V2-Lite"]
)
def test_other_architectures_are_refused_with_the_list_of_served_ones(name, shared_file):
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_config(shared_file(f"data/models/{name}"))
    assert all(family in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize("model_type", ["llama", None, 7, ["mixtral"], "../olmoe"])
def test_an_unknown_model_type_is_refused_by_name(model_type, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"model_type .* is not served; served are mixtral"):
        load_model_config(changed(tmp_path, "mixtral", model_type=model_type))


def test_a_dense_model_is_told_that_only_mixtures_of_experts_are_served(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64, "num_experts": null}')
    with pytest.raises(UnsupportedModelError, match="'qwen3' has no experts, and dense models") as caught:
        load_model_config(tmp_path)
    assert all(family in str(caught.value) for family in FAMILIES)


def test_generation_config_decides_where_answers_end(tmp_path):
    assert load_model_config(tiny_checkpoint("olmoe")).eos_ids == (2, 0)
    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m")
    (path / "generation_config.json").unlink()
    assert load_model_config(path).eos_ids == (2,)


def test_everything_wrong_is_named_at_once(tmp_path):
    path = changed(
        tmp_path, "qwen3_moe", hidden_size=-64, num_attention_heads="four", num_experts_per_tok=9,
        rms_norm_eps=None, hidden_act="gelu", vocab_size=True, torch_dtype=None, dtype="int8",
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_model_config(path)
    text = str(caught.value)
    for part in (
        "hidden_size must be an integer from 1 to 131072, got -64", "num_attention_heads must be",
        "num_experts_per_tok 9 is more than the 8 experts", "rms_norm_eps is missing", "'gelu'",
        "vocab_size must be", "'int8'", "config.json",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mixtral", {"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ("mixtral", {"head_dim": 31}, "head_dim must be even"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "'fp8' is not served"),
        ("mixtral", {"sliding_window": -1}, "sliding_window must be"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "leave no layer with experts"),
        ("qwen2_moe", {"mlp_only_layers": [4]}, "mlp_only_layers must be a list of layers from 0 to 3"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": ["full"] * 4}, "layer_types must be 4 of"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv must be a number above 0"),
        ("olmoe", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("olmoe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("olmoe", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ("olmoe", {"rope_parameters": {"rope_type": ["yarn"]}}, "is not served"),
        ("olmoe", {"rope_parameters": {"rope_type": "yarn"}}, "rope: factor is missing"),
        ("olmoe", {"rope_parameters": {"rope_theta": -1.0}}, "rope: rope_theta must be"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused(family, fields, message, tmp_path):
    path = changed(tmp_path, family, **fields)
    change_json(path / "generation_config.json", lambda c: c.pop("eos_token_id", None) and None)
    with pytest.raises(ConfigError) as caught:
        load_model_config(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_junk_in_any_field_is_refused_or_read_and_never_crashes(family, tmp_path):
    path = rewrite(tiny_checkpoint(family), tmp_path / "m")
    file = path / "config.json"
    good = json.loads(file.read_text())
    junk = [None, True, -1, 0, 10**30, 1e308, "x", [], {}, [{}], {"rope_theta": []}]
    for key in good:
        if key != "model_type":
            for value in junk:
                file.write_text(json.dumps({**good, key: value}))
                try:
                    config = load_model_config(path)
                except ConfigError:
                    continue
                assert dataclasses.is_dataclass(config)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "null", '"x"', "\x00\xff", "[" * 90000], ids=lambda text: str(len(text))
)
def test_a_config_that_is_no_object_is_named(content, tmp_path):
    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m")
    (path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json: "):
        load_model_config(path)


def test_a_folder_without_config_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        load_model_config(tmp_path)


def test_reading_a_configuration_needs_no_torch():
    code = (
        "import sys; from rimuru.models.config import load_model_config as load;"
        f"load({str(tiny_checkpoint('qwen2_moe'))!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ROPES = {
    "default": {},
    "linear": {"factor": 2.5},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-all": {
        "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 24.0, "beta_slow": 2.0,
        "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.707,
    },
    "yarn-factor": {"factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_are_those_of_transformers(name, tmp_path):
    kind = name.split("-")[0]
    rope = {"rope_type": kind, "rope_theta": 1e6, **ROPES[name]}
    shape = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 256}
    path = changed(tmp_path, "mixtral", rope_parameters=rope, max_position_embeddings=131072, **shape)
    config = load_model_config(path)
    theirs = transformers.models.mixtral.modeling_mixtral.MixtralRotaryEmbedding(
        transformers.AutoConfig.from_pretrained(path)
    )
    inverse, magnitude = inverse_frequencies(kind, config.rope_base, 128, dict(config.rope_scaling))
    # llama3 and yarn blend in another order of operations: within one unit in the last place.
    torch.testing.assert_close(inverse, theirs.inv_freq, rtol=2e-7, atol=0)
    assert magnitude == pytest.approx(theirs.attention_scaling, rel=1e-12)
    table = rope_table(kind, config.rope_base, 128, dict(config.rope_scaling), 512, torch.device("cpu"))
    cos, sin = theirs(torch.zeros(1), torch.arange(512)[None])
    torch.testing.assert_close(table, torch.cat([cos[0, :, :64], sin[0, :, :64]], -1), rtol=0, atol=1e-4)
