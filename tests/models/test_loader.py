"""Checkpoints as they are found in the wild: every spelling loads alike, every fault is named."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import Harness
from support.rewrite import change_json, rewrite, stack_experts
from support.tiny import FAMILIES, tiny_checkpoint, tiny_prompts

from rimuru.errors import CheckpointError
from rimuru.kernels import reference
from rimuru.models import transfer
from rimuru.models.config import load_model_config
from rimuru.models.loader import dummy_weights, load_weights
from rimuru.models.registry import build_model
from rimuru.models.transfer import CHUNK_BYTES

PROMPTS = tiny_prompts((5, 9))


def logits(path: Path) -> torch.Tensor:
    return Harness(path, max_len=16, slots=2).step([(i, 0, p) for i, p in enumerate(PROMPTS)])


def attempt(path: Path) -> None:
    """Load without computing."""
    Harness(path, max_len=16, slots=1)


@pytest.fixture(scope="module")
def plain():
    return {family: logits(tiny_checkpoint(family)) for family in FAMILIES}


# -- the same weights in other dress -------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_experts_load_like_single_ones(family, tmp_path, plain):
    path = rewrite(tiny_checkpoint(family), tmp_path / "m", stack_experts)
    assert torch.equal(logits(path), plain[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_load_like_one_file(family, tmp_path, plain):
    path = rewrite(tiny_checkpoint(family), tmp_path / "m", shards=3)
    assert torch.equal(logits(path), plain[family])


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_prefixes_of_other_savers_are_read(prefix, tmp_path, plain):
    def rename(tensors):
        return {
            n.replace("model.", prefix, 1) if n.startswith("model.") else n: t for n, t in tensors.items()
        }

    path = rewrite(tiny_checkpoint("qwen3_moe"), tmp_path / "m", rename)
    assert torch.equal(logits(path), plain["qwen3_moe"])


def test_several_files_without_an_index_are_read(tmp_path, plain):
    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m", shards=2)
    (path / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(path), plain["olmoe"])


def test_harmless_extras_of_old_savers_are_passed_over(tmp_path, plain):
    def add(tensors):
        more = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(16) for i in range(4)}
        return {**tensors, **more, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    path = rewrite(tiny_checkpoint("qwen2_moe"), tmp_path / "m", add)
    assert torch.equal(logits(path), plain["qwen2_moe"])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_values_are_converted_as_torch_would(stored, served, tmp_path):
    source = tiny_checkpoint("mixtral")
    path = rewrite(source, tmp_path / "m", lambda ts: {n: t.to(stored) for n, t in ts.items()})
    harness = Harness(path, dtype=served, max_len=16, slots=1)
    disk = load_file(path / "model.safetensors")
    k = harness.model.parameters["layers.1.self_attn.k_proj.weight"]
    assert torch.equal(k, disk["model.layers.1.self_attn.k_proj.weight"].to(served))
    gate_up, down = harness.store.sink(2, 5)
    name = "model.layers.2.block_sparse_moe.experts.5.w{}.weight"
    assert torch.equal(gate_up, torch.cat([disk[name.format(1)], disk[name.format(3)]]).to(served))
    assert torch.equal(down, disk[name.format(2)].to(served))


def test_progress_rises_to_one():
    seen = []
    path = tiny_checkpoint("mixtral")
    model = build_model(load_model_config(path), reference, "cpu", torch.float32)
    scrap = torch.empty(2 * 96, 64), torch.empty(64, 96)
    load_weights(path, model, lambda layer, e: scrap, lambda what, share: seen.append(share))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_the_interpreter_is_as_before_after_a_load():
    """In between it collects no garbage and changes threads more often."""
    path, seen, interval = tiny_checkpoint("mixtral"), [], sys.getswitchinterval()
    model = build_model(load_model_config(path), reference, "cpu", torch.float32)

    def sink(layer, expert):
        seen.append((gc.isenabled(), sys.getswitchinterval() < interval))
        if len(seen) == 5:
            raise MemoryError("no page left")
        return torch.empty(2 * 96, 64), torch.empty(64, 96)

    with pytest.raises(MemoryError, match="no page left"):
        load_weights(path, model, sink)
    assert set(seen) == {(False, True)}
    assert (gc.isenabled(), sys.getswitchinterval()) == (True, interval)


# -- what is wrong is named, all of it -----------------------------------------------------


def test_missing_extra_and_misshaped_are_named_in_one_error(tmp_path):
    gone = ["model.norm.weight", "model.layers.1.block_sparse_moe.experts.6.w2.weight"]

    def damage(tensors):
        for name in gone:
            del tensors[name]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(128, 63)
        tensors["model.layers.2.block_sparse_moe.experts.0.w3.weight"] = torch.zeros(95, 64)
        tensors["model.layers.0.block_sparse_moe.experts.8.w1.weight"] = torch.zeros(96, 64)
        tensors["model.visual.weight"] = torch.zeros(3)
        return tensors

    path = rewrite(tiny_checkpoint("mixtral"), tmp_path / "m", damage)
    with pytest.raises(CheckpointError) as caught:
        attempt(path)
    text = str(caught.value)
    assert "missing (2)" in text
    assert all(name in text for name in gone)
    assert "not part of this model (2): " in text
    assert "experts.8.w1" in text
    assert "model.visual.weight" in text
    assert "wrong shape (2)" in text
    assert "q_proj.weight is [128, 63], needs [128, 64]" in text
    assert "experts.0.w3.weight is [95, 64], needs [96, 64]" in text


def test_nothing_is_written_when_names_do_not_match(tmp_path):
    def damage(tensors):
        del tensors["model.norm.weight"]
        return tensors

    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m", damage)
    model = build_model(load_model_config(path), reference, "cpu", torch.float32)
    for tensor in model.parameters.values():
        tensor.fill_(7.0)

    def refuse(layer, expert):
        raise AssertionError("an expert was written")

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_weights(path, model, refuse)
    assert all(bool((t == 7).all()) for t in model.parameters.values())


def test_of_a_long_list_of_faults_every_sort_is_named_with_its_count(tmp_path):
    def drop(tensors):
        return {n: t for n, t in tensors.items() if ".experts." not in n}

    path = rewrite(tiny_checkpoint("qwen3_moe"), tmp_path / "m", drop)
    text = r"missing \(96\): " + ", ".join(
        rf"model\.layers\.0\.mlp\.experts\.0\.{part}_proj\.weight and 31 like it"
        for part in ("down", "gate", "up")
    )
    with pytest.raises(CheckpointError, match=text):
        attempt(path)


def test_a_stack_of_too_few_experts_is_misshaped(tmp_path):
    def cut(tensors):
        tensors = stack_experts(tensors)
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = tensors[name][:7].contiguous()
        return tensors

    path = rewrite(tiny_checkpoint("qwen3_moe"), tmp_path / "m", cut)
    with pytest.raises(CheckpointError, match=r"down_proj is \[7, 64, 64\], needs \[8, 64, 64\]"):
        attempt(path)


def test_an_expert_stored_twice_is_refused(tmp_path):
    def both(tensors):
        return {**tensors, **stack_experts(tensors)}

    path = rewrite(tiny_checkpoint("qwen3_moe"), tmp_path / "m", both)
    with pytest.raises(CheckpointError, match=r"stored twice \(\d+\)"):
        attempt(path)


def test_a_dtype_that_is_not_served_is_named(tmp_path):
    def quantise(tensors):
        name = "model.layers.0.mlp.experts.0.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        return tensors

    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m", quantise)
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\.weight is F8_E4M3"):
        attempt(path)


def test_experts_of_a_dense_layer_are_extra(tmp_path):
    path = rewrite(
        tiny_checkpoint("qwen2_moe", mlp_only_layers=[]),
        tmp_path / "m",
        config=lambda c: c.update(mlp_only_layers=[1]),
    )
    with pytest.raises(CheckpointError, match=r"missing .*layers\.1\.mlp\.gate_proj.*not part of this model"):
        attempt(path)


# -- what one read serves, and what several do ---------------------------------------------


@pytest.mark.parametrize("chunk", [256, 4096, 100_000])
def test_tensors_are_whole_however_they_are_cut_and_joined(chunk, tmp_path, plain, monkeypatch):
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk)
    for shards in (1, 3):
        path = rewrite(tiny_checkpoint("mixtral"), tmp_path / f"{shards}", shards=shards)
        assert torch.equal(logits(path), plain["mixtral"])


@pytest.fixture
def without_c(monkeypatch):
    """Everything is read the way what has to be converted is."""
    monkeypatch.setattr(transfer, "_library", lambda: None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("without_c")
def test_without_a_compiler_everything_loads_the_same(family, plain):
    assert torch.equal(logits(tiny_checkpoint(family)), plain[family])


@pytest.mark.usefixtures("without_c")
def test_reads_that_end_early_are_continued(plain, monkeypatch):
    whole = os.preadv

    def a_little(descriptor, views, at):
        return whole(descriptor, [views[0][:1000]], at)

    monkeypatch.setattr("os.preadv", a_little)
    assert torch.equal(logits(tiny_checkpoint("olmoe")), plain["olmoe"])


@pytest.mark.parametrize("chunk", [264, 100_000])
def test_files_of_several_dtypes_are_read_through_the_buffers(chunk, tmp_path, monkeypatch):
    """Also a tensor of odd length before one of wider values, which would not be aligned behind it."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk)
    kinds = [torch.bfloat16, torch.float32, torch.float64, torch.float16]

    def mix(tensors):
        return {n: t.to(kinds[i % 4]) for i, (n, t) in enumerate(sorted(tensors.items()))}

    path = rewrite(tiny_checkpoint("qwen2_moe"), tmp_path / "m", mix)
    harness = Harness(path, dtype=torch.float32, max_len=16, slots=1)
    disk = load_file(path / "model.safetensors")
    for name, tensor in harness.model.parameters.items():
        if f"model.{name}" in disk:
            assert torch.equal(tensor, disk[f"model.{name}"].float()), name
    gate_up, _ = harness.store.sink(0, 3)
    parts = [disk[f"model.layers.0.mlp.experts.3.{p}_proj.weight"].float() for p in ("gate", "up")]
    assert torch.equal(gate_up, torch.cat(parts))


# -- damaged files -------------------------------------------------------------------------


def damaged(tmp_path: Path, change) -> Path:
    path = rewrite(tiny_checkpoint("mixtral"), tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b[:-1],
        lambda b: b[: len(b) // 2],
        lambda b: b[:5],
        lambda b: b"",
        lambda b: b + b"more",
        lambda b: b"\xff" * 8 + b[8:],
        lambda b: b[:8] + b"}" + b[9:],
        lambda b: b"<!DOCTYPE html><html>not found</html>" * 40,
        lambda b: b.replace(b'"F32"', b'"F16"', 1),
        lambda b: b.replace(b'"shape":[', b'"shope":[', 1),
        lambda b: (2).to_bytes(8, "little") + b"[]",
        lambda b: (90000).to_bytes(8, "little") + b"[" * 90000,
        lambda b: re.sub(
            rb'"data_offsets":\[0,(\d+)', lambda m: b'"data_offsets":[0,1e' + b"9" * (len(m[1]) - 2), b
        ),
    ],
)
def test_a_damaged_file_is_named(change, tmp_path):
    path = damaged(tmp_path, change)
    with pytest.raises(CheckpointError, match=re.escape(str(path / "model.safetensors"))):
        attempt(path)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    path = rewrite(tiny_checkpoint("mixtral"), tmp_path / "m")
    file = path / "model.safetensors"
    model = build_model(load_model_config(path), reference, "cpu", torch.float32)
    half = file.stat().st_size // 2

    def shrink(layer, expert):
        with file.open("r+b") as f:
            f.truncate(half)
        return torch.empty(2 * 96, 64), torch.empty(64, 96)

    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\..* is truncated"):
        load_weights(path, model, shrink)


def test_absent_shards_are_all_named(tmp_path):
    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m", shards=3)
    for i in (1, 3):
        (path / f"model-0000{i}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00001-of-00003\.safetensors, .*00003-of-00003"):
        attempt(path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_a_bad_index_is_named(content, tmp_path):
    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m")
    (path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        attempt(path)


def test_an_index_that_promises_too_much_is_a_missing_tensor(tmp_path):
    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m", shards=2)
    file = path / "model-00001-of-00002.safetensors"
    values = load_file(file)
    lost = sorted(values)[0]
    del values[lost]
    save_file(values, file)
    with pytest.raises(CheckpointError, match=re.escape(lost)):
        attempt(path)


def test_a_folder_without_safetensors_says_what_would_work(tmp_path):
    path = tmp_path / "m"
    shutil.copytree(tiny_checkpoint("olmoe"), path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"save_pretrained.*--load-format dummy"):
        attempt(path)


# -- random weights ------------------------------------------------------------------------


def dummy(path: Path, seed: int) -> Harness:
    harness = Harness(path, max_len=16, slots=2)
    dummy_weights(harness.model, seed, harness.store.sink)
    return harness


def test_dummy_weights_follow_from_the_seed_alone():
    path = tiny_checkpoint("qwen2_moe")
    one, same, other = dummy(path, 1), dummy(path, 1), dummy(path, 2)
    step = [(0, 0, PROMPTS[0]), (1, 0, PROMPTS[1])]
    assert torch.equal(one.step(step), same.step(step))
    assert not torch.allclose(one.step(step), other.step(step))
    assert one.step(step).isfinite().all()


def test_dummy_experts_differ():
    harness = dummy(tiny_checkpoint("olmoe"), 0)
    experts = [harness.store.sink(layer, e)[0] for layer in range(3) for e in range(8)]
    assert len({e.sum().item() for e in experts}) == len(experts)


# -- memory --------------------------------------------------------------------------------

_MEASURE = """
import sys, torch
from pathlib import Path
from rimuru.kernels import host_memory, reference
from rimuru.models.config import load_model_config
from rimuru.models.loader import load_weights
from rimuru.models.registry import build_model

host_memory.MAX_THREADS = 2

def resident():
    rows = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(rows["VmRSS"].split()[0]) * 1024

path = Path(sys.argv[1])
config = load_model_config(path)
for dtype in (torch.float32, torch.bfloat16):
    model = build_model(config, reference, "cpu", dtype)
    for tensor in model.parameters.values():
        tensor.fill_(0)
    inter, hidden = config.moe_intermediate, config.hidden_size
    scrap = torch.zeros(2 * inter, hidden, dtype=dtype), torch.zeros(hidden, inter, dtype=dtype)
    before, peak = resident(), 0

    def sink(layer, expert):
        global peak
        peak = max(peak, resident())
        return scrap

    load_weights(path, model, sink, lambda what, share: sink(0, 0))
    print(peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_holds_no_more_than_a_buffer_beside_the_destination(tmp_path):
    # 38 MB in one file, stacks of 8 and 4 MB. Two threads have two buffers of 2 MiB each, and those only
    # where the dtype changes; 3 MiB for all the rest.
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}

    def blow_up(tensors):
        shapes = {n: list(t.shape) for n, t in stack_experts(tensors).items()}
        sizes = {64: 256, 96: 512, 192: 1024, 128: 256, 32: 64}
        return {
            n: torch.ones([s if s in (8, 640) else sizes[s] for s in shape]) for n, shape in shapes.items()
        }

    path = rewrite(tiny_checkpoint("mixtral"), tmp_path / "m", blow_up, lambda c: c.update(wide))
    assert (path / "model.safetensors").stat().st_size > 37e6
    run = subprocess.run([sys.executable, "-c", _MEASURE, path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    as_stored, converted = map(int, run.stdout.split())
    assert as_stored < 3 << 20
    assert converted < 11 << 20


def test_both_spellings_of_a_config_give_the_same_model(tmp_path, plain):
    def older(c):
        rope = c.pop("rope_parameters")
        c |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": c.pop("dtype")}
        if "num_experts" in c:
            c["num_local_experts"] = c.pop("num_experts")
        else:
            c["num_experts"] = c.pop("num_local_experts")

    for family in FAMILIES:
        path = rewrite(tiny_checkpoint(family), tmp_path / family)
        change_json(path / "config.json", older)
        assert load_model_config(path) == load_model_config(tiny_checkpoint(family))
        assert torch.equal(logits(path), plain[family])
