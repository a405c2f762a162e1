"""`rimuru.LLM`: token ids without a tokenizer, prompts as vLLM writes them, failures that stay alone."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from support.cores import greedy
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

from rimuru import LLM, SamplingParams
from rimuru.engine.request import Grammar, TokenOutput
from rimuru.errors import ConfigError, RequestError

OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 256}
PROMPTS = tiny_prompts((20, 9))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds only a config.json."""
    folder = tmp_path_factory.mktemp("bare")
    config = json.loads((tiny_checkpoint("mixtral") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def nameless(bare: Path) -> LLM:
    return LLM(str(bare), load_format="dummy", **OPTIONS)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny_checkpoint("mixtral")), **OPTIONS)


def test_random_weights_without_a_tokenizer_answer_token_ids(nameless: LLM) -> None:
    assert nameless.tokenizer is None
    outputs = nameless.generate(PROMPTS, greedy(7))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [7, 7]
    assert {(o.prompt, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs} == {
        (None, "", "length")
    }
    again = nameless.generate({"prompt_token_ids": PROMPTS[1]}, greedy(7))[0]
    assert again.outputs[0].token_ids == outputs[1].outputs[0].token_ids


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPTS[0], [PROMPTS[0]], {"prompt_token_ids": PROMPTS[0]}, [{"prompt_token_ids": PROMPTS[0]}],
        {"prompt_token_ids": PROMPTS[0], "prompt": "seen"}, tuple(PROMPTS[0]),
    ],
)  # fmt: skip
def test_token_ids_may_be_written_as_for_vllm(llm: LLM, prompt: object) -> None:
    want = oracle(tiny_checkpoint("mixtral"), PROMPTS[:1], 12)[0][0]
    (output,) = llm.generate(prompt, sampling_params=greedy())
    assert output.outputs[0].token_ids == want
    assert output.prompt_token_ids == PROMPTS[0]


def test_text_may_be_written_as_for_vllm(llm: LLM) -> None:
    plain, named = llm.generate(["the fox", {"prompt": "the fox"}], greedy())
    assert plain.prompt == named.prompt == "the fox"
    assert plain.outputs[0].text == named.outputs[0].text != ""


def test_skipping_the_tokenizer_takes_text_away_and_nothing_else() -> None:
    llm = LLM(str(tiny_checkpoint("mixtral")), skip_tokenizer_init=True, **OPTIONS)
    want = oracle(tiny_checkpoint("mixtral"), PROMPTS, 12)[0]
    outputs = llm.generate(PROMPTS, greedy())
    assert [o.outputs[0].token_ids for o in outputs] == want
    assert {o.outputs[0].text for o in outputs} == {""}


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("text", None),
        ({"prompt": "text"}, None),
        (PROMPTS[0], SamplingParams(stop=["."])),
        (PROMPTS[0], SamplingParams(grammar=Grammar("regex", "a+"))),
    ],
)
def test_what_needs_a_tokenizer_is_refused_in_one_sentence(
    nameless: LLM, prompt: object, params: SamplingParams | None
) -> None:
    with pytest.raises(RequestError, match="no tokenizer; send token ids"):
        nameless.generate([PROMPTS[0], prompt], [greedy(), params or greedy()])
    with pytest.raises(RequestError, match="no tokenizer"):
        nameless.chat([{"role": "user", "content": "text"}])
    assert not nameless.core.has_work


def test_real_weights_still_need_their_tokenizer(bare: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer there"):
        LLM(str(bare), load_format="dummy", tokenizer=str(bare), **OPTIONS)


def test_a_tokenizer_may_go_by_a_name_of_ours(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rimuru.engine.llm.local_models", lambda: {"demo": lambda: tiny_checkpoint("mixtral")}
    )
    llm = LLM(str(bare), load_format="dummy", tokenizer="demo", **OPTIONS)
    assert llm.config.tokenizer == str(tiny_checkpoint("mixtral"))
    assert llm.generate("the fox", greedy(3))[0].outputs[0].text != ""


def test_a_prompt_of_another_kind_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="'multi_modal_data' is not served"):
        llm.generate({"prompt": "the fox", "multi_modal_data": {}})


def test_one_that_fails_ends_alone_with_its_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = oracle(tiny_checkpoint("mixtral"), PROMPTS, 12)[0]
    core, step = llm.core, llm.core.step

    def failing() -> list[TokenOutput]:  # as where memory runs out in the middle of a request
        twins = [r for r in core.scheduler.running if r.request_id.endswith("-1") and r.num_output == 4]
        return [core.scheduler.fail(r, "out of KV pages", time.monotonic()) for r in twins] + step()

    monkeypatch.setattr(core, "step", failing)
    outputs = llm.generate(PROMPTS, [greedy(), dataclasses.replace(greedy(), n=2)])
    good, twins = outputs
    assert good.outputs[0].token_ids == want[0]
    assert [o.finish_reason for o in twins.outputs] == ["length", "error"]
    assert [o.token_ids for o in twins.outputs] == [want[1], want[1][:4]]
    assert twins.outputs[1].error == "out of KV pages"
    assert all(o.finished for o in outputs)
    core.check()


def test_a_grammar_that_cannot_be_compiled_fails_its_own_request_only(llm: LLM) -> None:
    pytest.importorskip("xgrammar")
    bad = SamplingParams(grammar=Grammar("regex", "a(+"))
    good, failed = llm.generate(PROMPTS, [greedy(), bad])
    assert good.outputs[0].finish_reason == "length"
    assert failed.outputs[0].finish_reason == "error"
    assert "regex cannot be used" in failed.outputs[0].error


def test_an_impossible_one_is_refused_before_any_begins(llm: LLM) -> None:
    steps = llm.core.steps
    with pytest.raises(RequestError, match="at most"):
        llm.generate(PROMPTS, [greedy(), greedy(10_000)])
    assert llm.core.steps == steps
    assert not llm.core.has_work
    assert not llm.has_unfinished_requests


def test_requests_added_one_by_one_grow_side_by_side_and_can_be_stopped(llm: LLM) -> None:
    want = oracle(tiny_checkpoint("mixtral"), PROMPTS, 12)[0]
    first = llm.add_request(PROMPTS[0], greedy())
    llm.step()
    second = llm.add_request(PROMPTS[1], greedy())
    third = llm.add_request(PROMPTS[1], greedy(100))
    seen = {o.request_id for _ in range(3) for o in llm.step()}
    assert seen == {first.request_id, second.request_id, third.request_id}
    llm.abort_request(third)
    while llm.has_unfinished_requests:
        llm.step()
    assert [first.outputs[0].token_ids, second.outputs[0].token_ids] == want
    assert not third.finished
    assert sum(llm.core.memory.held) == 0
