"""What a plan counts on a GPU, without one."""

import dataclasses
import re

import pytest
import torch
from support.tiny import tiny_checkpoint

from rimuru import cli
from rimuru.engine.config import EngineConfig
from rimuru.engine.plan import STREAM_PAGES, MemoryPlan, plan_memory
from rimuru.engine.sizes import sizes_of
from rimuru.errors import MemoryPlanError
from rimuru.models.config import load_model_config


def gpu_plan(tied: bool = False, positions: int = 512, cpu: int = 0, **options) -> MemoryPlan:
    """`cpu`: bytes that are free on a CPU, in the GPU's place."""
    path = tiny_checkpoint("qwen3_moe", tie_word_embeddings=tied)
    config = EngineConfig(**{"model": str(path), "max_num_seqs": 4, "max_num_batched_tokens": 64, **options})
    model = dataclasses.replace(load_model_config(path), max_position_embeddings=positions)
    return plan_memory(
        config, sizes_of(model, config, 4), device_available=cpu or 16 << 30, host_available=cpu or 1 << 30,
        device_is_host=cpu > 0,
    )  # fmt: skip


def parts(plan: MemoryPlan) -> int:
    beside = plan.weights_bytes + plan.workspace_bytes + plan.tables_bytes + plan.driver_bytes
    return beside + plan.streaming_bytes + plan.pool_bytes


def expert_bytes(plan: MemoryPlan) -> int:
    return plan.geometry.classes[plan.expert_class].page_bytes


@pytest.mark.parametrize("policy", ["reactive", "economic"])
def test_where_all_experts_begin_resident_no_memory_waits_for_streamed_ones(policy):
    everything = gpu_plan(tied=True)
    cap = everything.device_bytes - everything.geometry.huge_bytes  # KV wishes for more
    plan = gpu_plan(tied=True, device_memory=cap, memory_policy=policy)
    assert plan.experts_lendable
    assert plan.experts_resident == plan.experts_total
    assert plan.streaming_bytes == 0
    # As much KV as a policy that never lends has.
    assert plan.kv_tokens == gpu_plan(tied=True, device_memory=cap, memory_policy="fixed").kv_tokens
    assert parts(plan) <= cap


def test_where_experts_begin_in_host_memory_pages_for_streamed_ones_are_counted():
    everything = gpu_plan(tied=True)
    # Room for half the experts.
    cap = everything.device_bytes - everything.pool_bytes
    cap += (everything.experts_total // 2 + STREAM_PAGES) * expert_bytes(everything)
    plan = gpu_plan(tied=True, device_memory=cap, memory_policy="economic")
    assert 0 < plan.experts_resident < plan.experts_total
    assert plan.streaming_bytes == STREAM_PAGES * expert_bytes(plan)
    assert cap - plan.geometry.huge_bytes < parts(plan) <= cap


def test_where_memory_is_short_the_embedding_table_makes_room_for_pages():
    roomy = gpu_plan()
    assert roomy.embedding_host_bytes == 0
    cap = roomy.device_bytes - roomy.pool_bytes // 2
    plan = gpu_plan(device_memory=cap)
    table = plan.embedding_host_bytes
    assert table > 0
    assert plan.weights_bytes == roomy.weights_bytes - table
    assert cap - plan.geometry.huge_bytes < parts(plan) <= cap


def test_an_embedding_table_that_is_the_output_head_too_stays_on_the_device():
    roomy = gpu_plan(tied=True)
    plan = gpu_plan(device_memory=roomy.device_bytes - roomy.pool_bytes // 2, tied=True)
    assert plan.embedding_host_bytes == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"host_memory": 1},  # more alone would not do
        {"host_memory": 100_000},
        {"host_memory": 100_000, "max_model_len": 512, "memory_policy": "reactive"},
        {"host_memory": 100_000, "cpu": 1 << 30},
        {"cpu": 2 << 20},
        {"memory_policy": "fixed"},  # nor would another policy
        {"memory_policy": "static", "resident_experts": 20, "max_model_len": 16},
        # A length beyond what memory that is not short holds for everybody.
        {"memory_policy": "fixed", "max_model_len": 4096, "max_num_seqs": 1, "positions": 4096},
    ],
)
def test_all_that_a_refusal_advises_starts(options):
    with pytest.raises(MemoryPlanError) as refusal:
        gpu_plan(device_memory=1, **options)
    said = str(refusal.value)
    assert "needed at least:" in said
    flags = {"device_memory": r"--device-memory (\d+)", "host_memory": r"--host-memory (\d+)"}
    advice = [
        {name: int(found[1]) for name, flag in flags.items() if (found := re.search(flag, line))}
        for line in said.splitlines()
        if re.search("|".join(flags.values()), line)
    ]
    if "--memory-policy reactive" in said:
        advice.append({"memory_policy": "reactive", "resident_experts": None})
    assert advice
    for change in advice:
        gpu_plan(**{"device_memory": 1, **options, **change})


def test_a_refusal_names_the_other_ways_that_do_start():
    everything = gpu_plan()
    cap = everything.device_bytes - everything.pool_bytes + 24 * expert_bytes(everything)
    with pytest.raises(MemoryPlanError, match="or --memory-policy reactive"):
        gpu_plan(device_memory=cap, memory_policy="fixed")
    with pytest.raises(MemoryPlanError, match=r"or --host-memory \d+ .*; now, 0 B"):
        gpu_plan(device_memory=cap, host_memory=1)


def test_a_refusal_names_the_host_memory_with_which_less_of_the_device_starts():
    with pytest.raises(MemoryPlanError) as refusal:
        gpu_plan(device_memory=1, host_memory=100_000)
    first, host, device = map(
        int,
        re.search(
            r"what would start: --device-memory (\d+)[\s\S]*--host-memory (\d+).* with --device-memory (\d+)",
            str(refusal.value),
        ).groups(),
    )
    assert device < first
    plan = gpu_plan(device_memory=device, host_memory=host)
    assert plan.experts_lendable == plan.experts_total
    assert plan.host_bytes == host
    with pytest.raises(MemoryPlanError):
        gpu_plan(device_memory=device - 1, host_memory=host)


def test_a_refusal_on_a_cpu_says_what_both_parts_of_its_memory_come_to():
    free = 2 << 20
    with pytest.raises(MemoryPlanError, match="device and host are one memory on a CPU") as refusal:
        gpu_plan(device_memory=1, cpu=free)
    said = str(refusal.value)
    assert "2.0 MiB is free" in said
    assert "so that every expert may leave" not in said  # a machine that small has no room for all copies
    with pytest.raises(MemoryPlanError, match=r"one memory on a CPU[\s\S]*every expert may leave"):
        gpu_plan(device_memory=1, host_memory=100_000, cpu=1 << 30)


def test_a_plan_says_that_kv_grows_where_it_begins_with_far_less_than_it_may_reach():
    everything = gpu_plan()
    assert not any("KV begins" in note for note in everything.notes)
    half = (everything.experts_total // 2 + STREAM_PAGES) * expert_bytes(everything)
    plan = gpu_plan(device_memory=everything.device_bytes - everything.pool_bytes + half)
    assert plan.kv_tokens * 4 < plan.kv_tokens_reachable
    assert any("KV begins" in note for note in plan.notes)


def test_where_too_few_experts_have_a_host_copy_no_device_memory_is_advised():
    with pytest.raises(MemoryPlanError, match="raise --host-memory or --resident-experts") as refusal:
        gpu_plan(device_memory=1, memory_policy="static", resident_experts=5, host_memory=100_000)
    assert "--device-memory" not in str(refusal.value)


def test_a_plan_for_want_of_a_gpu_says_so_and_how_to_plan_for_a_card(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = str(tiny_checkpoint("qwen3_moe"))
    assert cli.main(["plan", path]) == 0
    assert capsys.readouterr().out.count("--gpu NAME plans for a card: rtx-4090") == 1
    assert cli.main(["plan", path, "--device-memory", "1B"]) == 1
    assert "--gpu NAME plans for a card" in capsys.readouterr().err
    for asked in (["--device", "cpu"], ["--gpu", "rtx-4090"]):
        assert cli.main(["plan", path, *asked]) == 0
        assert "plans for a card" not in capsys.readouterr().out
