"""What a request may ask for, how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import random
import re

import pytest
import torch
from support.cores import cap_for, greedy
from support.tiny import load_oracle, oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine.request import FinishReason, SamplingParams
from rimuru.errors import ConfigError, MemoryPlanError, RequestError

PROMPT = tiny_prompts((20,))[0]


def used_blocks(b) -> int:
    return sum(b.core.memory.held)


def test_stop_token_ends_with_its_id_as_reason(bench):
    b = bench("mixtral")
    answer = oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]
    stop = answer[5]
    b.add("a", PROMPT, greedy(stop_token_ids=[stop]))
    b.run()
    assert b.tokens("a") == answer[: answer.index(stop) + 1]
    assert b.finish("a") == FinishReason.STOP
    assert b.outputs["a"][-1].stop_reason == stop


def test_min_tokens_bans_the_stop_until_then(bench):
    b = bench("mixtral")
    answer = oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]
    b.add("a", PROMPT, greedy(stop_token_ids=[answer[2]], min_tokens=6))
    b.run()
    assert answer[2] not in b.tokens("a")[:6]
    assert b.tokens("a")[:2] == answer[:2]


def test_end_of_sequence_stops_unless_ignored(bench):
    b = bench("mixtral")
    answer = oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]
    b.core.info.eos_ids = frozenset([answer[3]])
    b.add("a", PROMPT, SamplingParams(temperature=0, max_tokens=12))
    b.add("b", PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    b.run()
    first = answer.index(answer[3])
    assert b.tokens("a") == answer[: first + 1]
    assert b.outputs["a"][-1].stop_reason is None
    assert len(b.tokens("b")) == 12
    assert b.finish("b") == FinishReason.LENGTH


def test_seeded_draws_do_not_depend_on_the_batch_or_on_preemption(bench):
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7, max_tokens=20, ignore_eos=True)
    b = bench("olmoe")
    b.add("alone", PROMPT, params)
    b.run()
    for i, prompt in enumerate(tiny_prompts()):
        b.add(f"n{i}", prompt, SamplingParams(temperature=1.3, max_tokens=30, ignore_eos=True))
    b.add("among", PROMPT, params)

    def preempt(step: int) -> None:
        among = next((r for r in b.core.scheduler.running if r.request_id == "among"), None)
        if among and step % 7 == 6:
            b.core.scheduler.preempt(among, "forced")

    b.run(preempt)
    assert b.tokens("among") == b.tokens("alone")
    assert len(set(map(tuple, (b.tokens(f"n{i}") for i in range(8))))) == 8


def test_logprobs_and_prompt_logprobs_are_transformers_in_chunks_and_after_preemption(bench):
    b = bench("qwen2_moe", max_num_batched_tokens=8)
    b.add("a", PROMPT, greedy(6, logprobs=4, prompt_logprobs=3))

    def preempt(step: int) -> None:
        if step in (2, 6):
            b.core.scheduler.preempt(b.core.scheduler.running[0], "forced")

    b.run(preempt)
    with torch.no_grad():
        full = torch.tensor([PROMPT + b.tokens("a")])
        want = load_oracle(tiny_checkpoint("qwen2_moe"))(full).logits[0].float().log_softmax(-1)
    first = next(o for o in b.outputs["a"] if o.tokens)
    rows = first.prompt_logprobs
    assert rows[0] is None
    assert [r.token for r in rows[1:]] == PROMPT[1:]
    got = torch.tensor([r.logprob for r in rows[1:]])
    index = torch.arange(len(PROMPT) - 1)
    assert (got - want[index, torch.tensor(PROMPT[1:])]).abs().max() < 1e-4
    assert all(r.top_ids == want[i].topk(3).indices.tolist() for i, r in enumerate(rows[1:]))
    made = [o.logprobs[0] for o in b.outputs["a"] if o.tokens]
    for i, row in enumerate(made):
        at = want[len(PROMPT) - 1 + i]
        assert row.rank == 1
        assert row.top_ids == at.topk(4).indices.tolist()
        assert abs(row.logprob - at[row.token].item()) < 1e-4


def test_penalties_follow_their_formulas_across_preemption(bench):
    b = bench("mixtral")
    params = greedy(20, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)
    b.add("a", PROMPT, params)

    def preempt(step: int) -> None:
        if step == 9:
            b.core.scheduler.preempt(b.core.scheduler.running[0], "forced")

    b.run(preempt)
    model = load_oracle(tiny_checkpoint("mixtral"))
    made: list[int] = []
    for _ in range(20):
        with torch.no_grad():
            row = model(torch.tensor([PROMPT + made])).logits[0, -1].float()
        seen = torch.tensor(sorted(set(PROMPT + made)))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        for t in set(made):
            row[t] -= 0.5 + 0.4 * made.count(t)
        made.append(int(row.argmax()))
    assert b.tokens("a") == made


def test_bias_and_allowed_tokens(bench):
    b = bench("mixtral")
    b.add("bias", PROMPT, greedy(4, logit_bias={77: 100.0}))
    b.add("allowed", PROMPT, greedy(6, allowed_token_ids=[5, 9]))
    b.run()
    assert b.tokens("bias") == [77] * 4
    assert set(b.tokens("allowed")) <= {5, 9}


@pytest.mark.parametrize(
    ("tokens", "params", "field"),
    [
        (PROMPT * 20, greedy(), "prompt"),
        ([], greedy(), "prompt"),
        ([640], greedy(), "prompt"),
        ([-1], greedy(), "prompt"),
        (PROMPT, greedy(300), "max_tokens"),
        (PROMPT, SamplingParams(temperature=-1), "temperature"),
        (PROMPT, SamplingParams(temperature=float("nan")), "temperature"),
        (PROMPT, SamplingParams(top_p=0), "top_p"),
        (PROMPT, SamplingParams(top_k=-2), "top_k"),
        (PROMPT, SamplingParams(logprobs=21), "logprobs"),
        (PROMPT, SamplingParams(stop_token_ids=[640]), "stop_token_ids"),
        (PROMPT, SamplingParams(logit_bias={1: 101.0}), "logit_bias"),
        (PROMPT, SamplingParams(min_tokens=20, max_tokens=5), "min_tokens"),
        (PROMPT, SamplingParams(seed=2**64), "seed"),
    ],
)
def test_impossible_requests_are_refused_at_once_and_neighbours_go_on(bench, tokens, params, field):
    b = bench("mixtral")
    b.add("good", PROMPT)
    b.step()
    with pytest.raises(RequestError) as error:
        b.add("bad", tokens, params)
    assert error.value.param == field
    b.run()
    assert b.tokens("good") == oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]


def test_request_beyond_reachable_memory_is_refused_with_the_limit_that_works(bench):
    b = bench(
        "mixtral", max_model_len=None, memory_policy="static", resident_experts=0,
        device_memory=cap_for("mixtral", 0, 96, max_model_len=None),
    )  # fmt: skip
    limit = b.core.info.max_request_tokens
    assert limit < 256
    with pytest.raises(RequestError, match=f"at most {limit - 40}"):
        b.add("bad", tiny_prompts((40,))[0], greedy(limit))
    b.add("good", tiny_prompts((40,))[0], greedy(limit - 40))
    b.run()
    assert len(b.tokens("good")) == limit - 40


def test_priority_runs_first(bench):
    b = bench("mixtral", max_num_seqs=1)
    b.add("late", PROMPT, greedy(2), priority=5)
    b.add("soon", PROMPT, greedy(2), priority=-1)
    b.run()
    assert list(b.outputs) == ["soon", "late"]


def test_a_salt_keeps_prefixes_apart(bench):
    b = bench("mixtral")
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        b.add(name, PROMPT, cache_salt=salt)
        b.run()
    assert [b.outputs[n][-1].num_cached for n in "abc"] == [0, 0, 16]


def test_abort_frees_pages_at_once_in_every_phase(bench):
    b = bench("qwen3_moe", max_num_seqs=2, max_num_batched_tokens=16, enable_prefix_caching=False)
    level = used_blocks(b)
    b.add("a", PROMPT)
    b.add("long", tiny_prompts((90,))[0])
    b.add("queued", PROMPT)
    b.step()
    b.step()
    for name in ("long", "queued", "a"):
        b.core.abort(name)
        b.core.check()
    assert used_blocks(b) == level
    b.step()
    assert not b.core.has_work


def test_a_thousand_mixed_requests_with_random_aborts_leak_nothing(bench):
    family = "mixtral"
    b = bench(family, device_memory=cap_for(family, 0.4, 320), debug_pool=False)
    rng = random.Random(0)
    baseline = b.core.memory.cache.free_blocks() + b.core.memory.cache.evictable_blocks()
    shared = tiny_prompts((48,))[0]
    added, left = 0, []
    while added < 1000 or b.core.has_work:
        while added < 1000 and len(b.core.scheduler.requests) < 12:
            prompt = shared[: rng.randrange(1, 48)] + [
                rng.randrange(3, 640) for _ in range(rng.randrange(1, 40))
            ]
            b.add(f"q{added}", prompt, greedy(rng.randrange(1, 10)))
            added += 1
        b.step()
        if rng.random() < 0.3 and b.core.scheduler.requests:
            name = rng.choice(list(b.core.scheduler.requests))
            b.core.abort(name)
            left.append(name)
        if added % 50 == 0:
            b.core.check()
    b.core.check()
    assert used_blocks(b) == 0
    assert len(left) > 50
    b.core.reset_prefix_cache()
    b.core.memory.rest(b.core.scheduler, now=1e9)
    assert b.core.memory.cache.evictable_blocks() == 0
    assert b.core.memory.cache.free_blocks() >= baseline - b.plan.experts_total
    b.core.check()
    again = tiny_prompts((31,))
    b.add("after", again[0])
    b.run()
    assert b.tokens("after") == oracle(tiny_checkpoint(family), again, 12)[0][0]


def test_a_cap_that_is_too_small_is_refused_with_one_that_starts(bench):
    with pytest.raises(MemoryPlanError, match="what would start: --device-memory") as error:
        bench("mixtral", device_memory=1000)
    value = int(re.search(r"--device-memory (\d+) \(", str(error.value).split("what would start")[1])[1])
    with pytest.raises(MemoryPlanError):
        bench("mixtral", device_memory=int(value * 0.9))
    b = bench("mixtral", device_memory=value)
    b.add("a", PROMPT)
    b.run()
    assert b.tokens("a") == oracle(tiny_checkpoint("mixtral"), [PROMPT], 12)[0][0]


def test_fixed_refuses_to_start_unless_everything_fits(bench):
    with pytest.raises(MemoryPlanError, match="reactive"):
        bench("mixtral", memory_policy="fixed", device_memory=cap_for("mixtral", 0.7, 128))
    b = bench("mixtral", memory_policy="fixed", device_memory=cap_for("mixtral", 1, 1024))
    assert b.core.store.resident.all()


@pytest.mark.parametrize(
    "options",
    [
        {"memory_policy": "lend-all"},
        {"memory_policy": "static"},
        {"max_num_seqs": 0},
        {"max_model_len": 100_000},
        {"dtype": "int8"},
        {"device": "tpu"},
    ],
)
def test_options_that_cannot_work_are_named(bench, options):
    with pytest.raises(ConfigError, match="--"):
        bench("mixtral", **options)
