"""What once went wrong, or nearly: requests, caps and clients that try to break the engine."""

from __future__ import annotations

import asyncio
import re
import threading
import time

import pytest
from support.cores import cap_for, greedy
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine.config import EngineConfig
from rimuru.engine.core import EngineCore, plan_for
from rimuru.engine.inprocess import InProcessClient
from rimuru.engine.llm import LLM
from rimuru.engine.request import FinishReason, SamplingParams
from rimuru.errors import ConfigError, EngineDeadError, MemoryPlanError, RequestError

PROMPT = tiny_prompts((20,))[0]


@pytest.mark.parametrize(
    ("params", "more", "field"),
    [
        (SamplingParams(top_k=2**40), {}, "top_k"),
        (SamplingParams(repetition_penalty=1e-45), {}, "repetition_penalty"),
        (SamplingParams(stop_token_ids=None), {}, "stop_token_ids"),  # type: ignore[arg-type]
        (SamplingParams(allowed_token_ids=7), {}, "allowed_token_ids"),  # type: ignore[arg-type]
        (SamplingParams(logit_bias=[7]), {}, "logit_bias"),  # type: ignore[arg-type]
        (SamplingParams(allowed_token_ids=[2, 0], min_tokens=2), {}, "min_tokens"),
        (SamplingParams(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1), {}, "min_tokens"),
        (greedy(), {"cache_salt": "\ud800"}, "cache_salt"),
        (greedy(), {"priority": "high"}, "priority"),
    ],
)
def test_what_would_stop_a_later_step_is_refused_on_arrival(bench, params, more, field):
    b = bench("mixtral")
    b.add("good", PROMPT)
    b.step()
    with pytest.raises(RequestError) as error:
        b.add("bad", PROMPT, params, **more)
    assert error.value.param == field
    b.run()
    assert b.tokens("good") == oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]


@pytest.fixture(scope="module")
def llm():
    return LLM(
        str(tiny_checkpoint("mixtral")), dtype="float32", device="cpu", max_num_seqs=4, max_model_len=256
    )


def test_streams_read_in_turn_lose_no_tokens_to_each_other(llm):
    prompts = tiny_prompts((20, 9))
    want = oracle(tiny_checkpoint("mixtral"), prompts, 12)[0]
    first, second = (llm.stream(p, greedy()) for p in prompts)
    next(first)
    next(second)
    assert llm.generate(prompts[1], greedy(3))[0].outputs[0].token_ids == want[1][:3]
    *_, a = first  # steps the other stream's request to its end
    *_, b = second
    assert [a.outputs[0].token_ids, b.outputs[0].token_ids] == want


def test_a_stream_closed_early_leaves_the_others_alone(llm):
    prompts = tiny_prompts((20, 9))
    first, second = (llm.stream(p, greedy()) for p in prompts)
    next(first)
    next(second)
    first.close()
    *_, b = second
    assert [b.outputs[0].token_ids] == oracle(tiny_checkpoint("mixtral"), prompts, 12)[0][1:]
    assert not llm.core.has_work
    assert sum(llm.core.memory.held) == 0


class Clock:
    """Runs faster than the wall's, so that what waits a quarter of a second happens within a few steps."""

    def __init__(self, speed: float):
        self.speed = speed

    def monotonic(self) -> float:
        return time.monotonic() * self.speed


# 20 tokens a block: the KV pages of this model are cut from huge pages that hold four experts each, so an
# expert that leaves alone makes room for no block.
SCATTERED = {"block_size": 20, "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 240}


@pytest.mark.parametrize("policy", ["reactive", "economic"])
def test_a_lone_request_grows_though_each_expert_that_leaves_shares_its_huge_page(bench, monkeypatch, policy):
    family = "qwen3_moe"
    monkeypatch.setattr("rimuru.engine.core.time", Clock(100))
    b = bench(family, memory_policy=policy, device_memory=cap_for(family, 0.9, 160, **SCATTERED), **SCATTERED)
    assert b.plan.units.experts_per_huge > 1
    assert b.plan.units.per_block * b.plan.units.page_bytes < b.plan.geometry.huge_bytes
    prompts = tiny_prompts((30, 100))
    for _ in range(3):
        b.add("both", prompts[1], greedy(2))  # lends, then finishes, so that experts come back where they can
        b.add("lone", prompts[0], greedy(180))
        b.run()
        assert b.finish("lone") == FinishReason.LENGTH, b.outputs["lone"][-1].error
        assert b.tokens("lone") == oracle(tiny_checkpoint(family), prompts, 180)[0][0]
        b.outputs.clear()


@pytest.mark.parametrize("experts", [0, 5])
def test_static_keeps_its_number_of_experts_also_where_all_would_fit(bench, experts):
    b = bench("mixtral", memory_policy="static", resident_experts=experts)
    assert b.core.store.resident.sum() == experts
    b.add("a", PROMPT)
    b.run()
    assert b.tokens("a") == oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]
    assert b.core.store.resident.sum() == experts


def test_a_block_larger_than_an_expert_is_refused_with_one_that_starts(bench):
    with pytest.raises(ConfigError, match=r"--block-size 256.*--block-size \d+ works") as error:
        bench("mixtral", block_size=256)
    size = int(re.findall(r"--block-size (\d+) works", str(error.value))[0])
    b = bench("mixtral", block_size=size)
    b.add("a", PROMPT)
    b.run()
    assert b.tokens("a") == oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]


def smallest_start(family: str, **options) -> int:
    """The cap that the refusal of a hopeless one suggests."""
    with pytest.raises(MemoryPlanError) as error:
        plan_for(EngineConfig(str(tiny_checkpoint(family)), device="cpu", device_memory=1, **options))
    return int(re.findall(r"what would start: --device-memory (\d+)", str(error.value))[0])


# 7 tokens a block: two page classes. 20: pages cut from huge pages of four experts. 12 experts stay.
@pytest.mark.parametrize(
    ("family", "block"), [("mixtral", 7), ("mixtral", 14), ("qwen3_moe", 20), ("olmoe", 13)]
)
@pytest.mark.parametrize("host_experts", [None, 19])
def test_the_longest_request_promised_by_the_smallest_start_is_served(bench, family, block, host_experts):
    options = {"block_size": block, "max_num_seqs": 2, "max_num_batched_tokens": 64, "dtype": "float32"}
    if host_experts is not None:
        plan = plan_for(EngineConfig(str(tiny_checkpoint(family)), device="cpu", **options))
        options["host_memory"] = host_experts * plan.geometry.classes[plan.expert_class].page_bytes
    b = bench(family, device_memory=smallest_start(family, **options), max_model_len=None, **options)
    limit = b.plan.max_request_tokens
    assert limit >= block
    length = min(limit, 150)
    prompt = tiny_prompts((length - 4,))[0]
    b.add("first", prompt, greedy(limit - len(prompt)) if limit < 300 else greedy(4))
    b.add("second", prompt, greedy(4))
    b.run(limit=400)
    want = oracle(tiny_checkpoint(family), [prompt], 4)[0][0]
    assert b.tokens("first")[:4] == b.tokens("second") == want


def test_the_suggested_cap_starts_where_it_takes_from_the_host_copies(monkeypatch):
    # 3 MB in all for device and host copies: of what the device gets the copies have to do without.
    monkeypatch.setattr("rimuru.engine.core.host_available", lambda: 3_000_000)
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "dtype": "float32", "max_model_len": 64}
    cap = smallest_start("mixtral", **options)
    plan_for(EngineConfig(str(tiny_checkpoint("mixtral")), device="cpu", device_memory=cap, **options))


def test_a_pool_beyond_the_machine_is_a_plain_error(bench):
    with pytest.raises(MemoryPlanError, match="lower --device-memory"):
        bench("mixtral", device_memory=10**15)


def test_statistics_nobody_reads_stay_bounded(bench, monkeypatch):
    monkeypatch.setattr("rimuru.engine.core.MAX_UNREAD", 8)
    b = bench("mixtral", max_num_seqs=2)
    for i in range(20):
        b.add(f"r{i}", PROMPT, greedy(2))
    b.run()
    stats = b.core.stats()
    assert 4 <= len(stats.finished) <= 8
    assert 4 <= len(stats.step_tokens) <= 8


def test_a_first_step_that_hangs_fails_the_health_check(monkeypatch):
    monkeypatch.setattr("rimuru.engine.inprocess.STALL_SECONDS", 0.2)
    let_go = threading.Event()
    monkeypatch.setattr(EngineCore, "step", lambda self: let_go.wait(30) and [])

    async def hang() -> None:
        path = str(tiny_checkpoint("mixtral"))
        client = InProcessClient(EngineConfig(path, device="cpu", max_num_seqs=2, max_num_batched_tokens=16))
        await client.start()
        stream = client.generate("a", PROMPT, greedy())
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        with pytest.raises(EngineDeadError, match="one step has taken"):
            await client.check_health()
        waiting.cancel()
        let_go.set()
        await client.close()

    asyncio.run(hang())


def test_an_id_used_again_gets_nothing_of_the_request_before():
    prompts = tiny_prompts((20, 90))

    async def use_again() -> None:
        path = str(tiny_checkpoint("mixtral"))
        client = InProcessClient(
            EngineConfig(path, device="cpu", dtype="float32", max_num_seqs=2, max_model_len=256)
        )
        await client.start()
        want = oracle(tiny_checkpoint("mixtral"), prompts, 3)[0][0]
        for pause in range(40):
            left = client.generate("same", prompts[1], greedy(100))
            await anext(left)
            await asyncio.sleep(0.0005 * (pause % 7))  # leaves at any point of a step
            await left.aclose()
            outputs = [out async for out in client.generate("same", prompts[0], greedy(3))]
            assert [t for out in outputs for t in out.tokens] == want
            assert {out.request_id for out in outputs} == {"same"}
        await client.close()

    asyncio.run(use_again())


def test_a_request_an_idle_engine_cannot_place_is_given_up_and_the_next_one_runs(bench, monkeypatch):
    """The net below a wrong count of pages: admission is made to say no, once and for ever."""
    b = bench("mixtral")
    b.add("stuck", PROMPT)
    allowed = b.core.memory.try_admit

    def refuse(slot, keys, *rest, **more):
        return b.core.scheduler.waiting[0][3].request_id != "stuck" and allowed(slot, keys, *rest, **more)

    monkeypatch.setattr(b.core.memory, "try_admit", refuse)
    monkeypatch.setattr("rimuru.engine.core.STUCK_SECONDS", 0.05)
    b.add("next", PROMPT, greedy(3))
    b.run(each_step=lambda i: time.sleep(0.01))
    assert b.finish("stuck") == FinishReason.ERROR
    assert len(b.tokens("next")) == 3


def test_a_token_id_that_is_no_whole_number_is_refused(bench):
    b = bench("mixtral")
    with pytest.raises(RequestError, match=r"1\.5"):
        b.add("a", [3, 1.5])
