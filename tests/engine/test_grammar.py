"""Constrained output: always of the grammar, never in anyone's way, unmoved by preemption."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

from support.cores import make_bench
from support.tiny import tiny_checkpoint, tiny_tokenizer

from rimuru.engine import grammar as grammar_module
from rimuru.engine.config import EngineConfig
from rimuru.engine.inprocess import InProcessClient
from rimuru.engine.request import FinishReason, Grammar, SamplingParams
from rimuru.errors import RequestError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "müde 🙂"]},
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["name", "kind", "ok", "n"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))


def drawn(grammar: Grammar, seed: int, **more: Any) -> SamplingParams:
    # Hot, so that almost every token is drawn against the model's will.
    return SamplingParams(temperature=2.0, seed=seed, max_tokens=200, grammar=grammar, **more)


def run(bench: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while bench.core.has_work:
        if not bench.step():
            time.sleep(0.001)
        assert time.monotonic() < end


def text_of(bench: Any, name: str) -> str:
    assert bench.finish(name) is FinishReason.STOP, (bench.finish(name), bench.outputs[name][-1].error)
    return tiny_tokenizer().decode(bench.tokens(name), skip_special_tokens=True)


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == set(PERSON["required"])  # type: ignore[call-overload]
        and len(value["name"]) <= 6
        and value["kind"] in ("cat", "dog", "müde 🙂")
        and isinstance(value["ok"], bool)
        and 0 <= value["n"] <= 20
    )


@pytest.fixture(scope="module")
def bench() -> Any:
    return make_bench()


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (SCHEMA, is_person),
        (Grammar("regex", r"[a-c]{2,4}-\d{3}"), lambda t: re.fullmatch(r"[a-c]{2,4}-\d{3}", t)),
        (
            Grammar("choice", json.dumps(['say "hi"\n', "tab\t\\", "東京"])),
            lambda t: t in ('say "hi"\n', "tab\t\\", "東京"),
        ),
        (
            Grammar("grammar", 'root ::= "(" root ")" | [xy]'),
            lambda t: t.count("(") == t.count(")") and t.strip("()") in ("x", "y"),
        ),
    ],
    ids=["schema", "regex", "choice", "grammar"],
)
def test_whatever_the_model_would_say_the_output_is_of_the_grammar(
    bench: Any, grammar: Any, fits: Any
) -> None:
    for seed in range(6):
        bench.add(f"{grammar.kind}{seed}", [3 + seed, 9], drawn(grammar, seed))
    bench.add(f"{grammar.kind}-greedy", [5], SamplingParams(temperature=0, max_tokens=200, grammar=grammar))
    run(bench)
    texts = [text_of(bench, f"{grammar.kind}{seed}") for seed in range(6)]
    assert all(fits(text) for text in texts), texts
    assert len(set(texts)) > 1
    assert fits(text_of(bench, f"{grammar.kind}-greedy"))


def test_neighbours_of_a_constrained_request_are_left_alone(bench: Any) -> None:
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    bench.add("alone", [7, 8, 9], plain)
    run(bench)
    bench.add("beside", [7, 8, 9], plain)
    bench.add("constrained", [3], drawn(SCHEMA, 1))
    run(bench)
    assert bench.tokens("beside") == bench.tokens("alone")


def test_preemption_does_not_lose_the_place_in_the_grammar(bench: Any) -> None:
    def answer(name: str, preempt_every: int | None) -> list[int]:
        bench.add(name, [3, 4, 5], drawn(SCHEMA, 11))
        steps = 0
        while bench.core.has_work:
            bench.step()
            steps += 1
            running = bench.core.scheduler.running
            if preempt_every and running and steps % preempt_every == 0:
                bench.core.scheduler.preempt(running[0], "test")
        assert is_person(text_of(bench, name))
        return bench.tokens(name)

    assert answer("preempted", 3) == answer("undisturbed", None)
    assert bench.core.scheduler.preemptions["test"] > 2


def test_the_grammar_begins_after_the_tokens_that_end_the_reasoning(bench: Any) -> None:
    grammar = Grammar("choice", '["yes","no"]', after=(70, 71))
    # The model is led to say 70 71 by a bias; a bare 71 or 70 does not begin the grammar.
    bench.add("r", [3], drawn(grammar, 0, logit_bias={70: 60.0, 71: 60.0}))
    run(bench)
    tokens = bench.tokens("r")
    start = next(i for i in range(len(tokens)) if tokens[i : i + 2] == [70, 71]) + 2
    assert set(tokens[: start - 2]) <= {70, 71}
    assert tiny_tokenizer().decode(tokens[start:], skip_special_tokens=True) in ("yes", "no")


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("json_schema", '{"type": "thing"}', param="response_format"), "Unsupported type"),
        (Grammar("json_schema", '{"type":', param="response_format"), "JSON"),
        (Grammar("regex", "[a-z", param="structured_outputs"), "Unclosed"),
        (Grammar("grammar", 'start ::= "a"', param="structured_outputs"), "root"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_field_that_brought_it(
    bench: Any, grammar: Grammar, says: str
) -> None:
    bench.add("bad", [3], drawn(grammar, 0))
    bench.outputs.pop("bad", None)
    run(bench)
    (output,) = bench.outputs["bad"]
    assert output.finish is FinishReason.ERROR
    assert output.error_param == grammar.param
    assert output.error is not None
    assert says in output.error
    assert ".cc" not in output.error


def test_what_is_too_large_or_contradicts_itself_is_refused_at_once(bench: Any) -> None:
    deep = '{"items":' * 60 + "{}" + "}" * 60
    for params, says in (
        (drawn(Grammar("json_schema", deep), 0), "deeper than 48"),
        (drawn(Grammar("regex", "a" * 300_000), 0), "at most 262144"),
        (drawn(SCHEMA, 0, ignore_eos=True), "ignore_eos"),
        (drawn(SCHEMA, 0, min_tokens=2), "min_tokens"),
        (drawn(SCHEMA, 0, allowed_token_ids=[4]), "allowed_token_ids"),
        (drawn(Grammar("poem", ""), 0), "poem"),
    ):
        with pytest.raises(RequestError, match=says):
            bench.add("bad", [3], params)
    assert not bench.core.has_work


def test_a_grammar_that_takes_for_ever_holds_up_nobody(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(compiler: Any, text: str) -> Any:
        time.sleep(2.0)

    monkeypatch.setitem(grammar_module._COMPILE, "regex", slow)
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.3)
    bench.add("slow", [3], drawn(Grammar("regex", "never ready"), 0))
    bench.add("aborted", [3], drawn(Grammar("regex", "never ready"), 0))
    bench.add("plain", [3, 4], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    bench.add("quick", [3, 4], drawn(SCHEMA, 0))
    bench.core.abort("aborted")
    began = time.monotonic()
    run(bench)
    assert time.monotonic() - began < 1.5
    assert len(bench.tokens("plain")) == 5
    assert is_person(text_of(bench, "quick"))
    assert "longer than 0.3 s" in (bench.outputs["slow"][-1].error or "")
    assert "aborted" not in bench.outputs
    monkeypatch.setattr(grammar_module, "MAX_COMPILING", 1)
    with pytest.raises(RequestError, match="try again later"):
        bench.add("more", [3], drawn(Grammar("regex", "another"), 0))


def test_a_client_gets_a_request_error_and_an_idle_engine_wakes_up_for_a_grammar() -> None:
    config = EngineConfig(
        model=str(tiny_checkpoint("qwen3_moe")), dtype="float32", device="cpu", device_memory=100_000_000
    )

    async def whole() -> str:
        client = InProcessClient(config)
        await client.start()
        with pytest.raises(RequestError, match="Unclosed") as caught:
            async for _ in client.generate("bad", [3], drawn(Grammar("regex", "[a", param="field"), 0)):
                pass
        assert caught.value.param == "field"
        tokens = [t async for out in client.generate("good", [3], drawn(SCHEMA, 2)) for t in out.tokens]
        await client.close()
        return tiny_tokenizer().decode(tokens, skip_special_tokens=True)

    assert is_person(asyncio.run(asyncio.wait_for(whole(), 60)))
