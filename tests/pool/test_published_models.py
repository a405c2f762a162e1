"""Plans of thirteen published models at four ranks and four formats: golden shapes and bounds."""

from __future__ import annotations

import json

import pytest
from published_models import FORMATS, MODELS, spec_of

from rimuru.pool import Kind, plan_geometry

MIB = 1 << 20

# bf16 on one rank: experts a huge page, KV pages an expert of each layer group, groups of states and
# convolutions. Worked out by hand from the sizes: Qwen3-30B-A3B has 9 MiB experts and 1.5 MiB blocks.
GOLDEN = {
    "Qwen1.5-MoE-A2.7B": (1, [11, 11], 0, 0),
    "OLMoE-1B-7B": (1, [6], 0, 0),
    "DeepSeek-V2-Lite": (1, [67, 72], 0, 0),
    "gpt-oss-20b": (1, [126, 126], 0, 0),
    "Qwen3-30B-A3B": (1, [6], 0, 0),
    "Qwen3.5-35B-A3B": (1, [19], 10, 5),
    "Mixtral-8x7B": (1, [168], 0, 0),
    "Qwen3-Next-80B-A3B": (1, [16], 12, 2),
    "GLM-4.5-Air": (1, [33, 35, 35], 0, 0),
    "Qwen3.5-122B-A10B": (2, [48], 4, 1),
    "DeepSeek-V4-Flash": (1, [463, 2457, 71], 0, 0),
    "Qwen3.5-397B-A17B": (1, [51], 15, 9),
    "DeepSeek-V3": (1, [78], 0, 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_wastes_over_two_percent_in_its_worst_kind(name):
    for tp in (1, 2, 4, 8):
        for form in FORMATS:
            plan = plan_geometry(spec_of(name, tp, form))
            assert plan.worst_waste <= 0.02, (tp, form)
            expert = plan.classes[plan.class_of(Kind.EXPERT)].page_bytes
            assert plan.huge_bytes <= max(64 * MIB, expert), (tp, form)


@pytest.mark.parametrize("name", MODELS)
def test_the_shape_of_the_bf16_plan_is_the_known_one(name):
    plan = plan_geometry(spec_of(name, 1, "bf16"))
    per_huge, pages, states, convs = GOLDEN[name]
    expert = plan.class_of(Kind.EXPERT)
    assert plan.huge_bytes == per_huge * plan.classes[expert].page_bytes
    root = plan.huge_bytes // per_huge
    found = []
    for group in plan.groups_of(Kind.KV):
        found.append(root // plan.classes[group.page_class].page_bytes)
    assert found == pages
    assert (len(plan.groups_of(Kind.STATE)), len(plan.groups_of(Kind.CONV))) == (states, convs)


@pytest.mark.parametrize("name", MODELS)
def test_raw_and_packed_experts_share_a_huge_page(name):
    plan = plan_geometry(spec_of(name, 1, "raw+packed"))
    raw, packed = (plan.classes[plan.class_of(k)] for k in (Kind.EXPERT, Kind.EXPERT_PACKED))
    assert raw.per_parent * 4 == packed.per_parent * 3
    # Qwen3.5-122B: a huge page of three 18 MiB experts holds 13 states of 4 MiB and 2 MiB more, and
    # twice that page would be 108 MiB; whoever wants less waste there chooses one format.
    assert plan.worst_waste <= (0.04 if name == "Qwen3.5-122B-A10B" else 0.02)
    assert plan.huge_bytes <= max(64 * MIB, 4 * packed.page_bytes)


def test_the_sizes_here_are_those_of_the_shared_configs(shared_file):
    derived = json.loads(shared_file("data/models/derived.json").read_text())
    for name, facts in derived.items():
        ours = next(m for n, m in MODELS.items() if name.startswith(n))
        assert (ours.hidden, ours.inter) == (facts["hidden"], facts["moe_inter"])
        token = sum(
            a.kind(1).bytes_per_token_per_layer * len(a.kind(1).layers)
            for a in ours.attention
            if a.name not in ("sliding", "window")
        )
        assert token == facts["kv_token"], name
        assert ours.linear_layers == facts.get("ssm_layers", 0)
        assert ours.state_bytes == facts.get("rec_fp32", 0)
        assert ours.conv_bytes == facts.get("conv_bf16", 0)
