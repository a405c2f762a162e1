"""The openai library against a real socket: what its users do, and what they get back."""

from __future__ import annotations

import json

import pytest

from rimuru.models.tokenizer import Tokenizer
from server.conftest import Live
from server.stub_engine import EOS, StubEngine

HI = [{"role": "user", "content": "hi"}]
PARTS = ["the", " of", " Grüße", " 東京", " 🙂", "\n", "the end"]


@pytest.fixture
def spoken(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("".join(PARTS))


@pytest.fixture
def live(serve, spoken: list[int]) -> Live:
    """A server whose model always says PARTS and ends."""
    return serve(StubEngine(answer=lambda prompt, params: [*spoken, EOS]))


def test_chat_answers_with_the_text_and_its_usage(live: Live, spoken: list[int]) -> None:
    answer = live.openai().chat.completions.create(model="stub", messages=HI)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "".join(PARTS))
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(spoken) + 1
    prompt = live.engine.seen[0][1]
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) // 2


def test_chat_renders_the_model_s_template(live: Live, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    live.openai().chat.completions.create(model="stub", messages=messages)
    text = tokenizer.decode(live.engine.seen[0][1], skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_streamed_chat_is_the_whole_answer_in_whole_characters(live: Live) -> None:
    chunks = list(
        live.openai().chat.completions.create(
            model="stub", messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    pieces = [c.choices[0].delta.content for c in chunks if c.choices]
    assert "".join(pieces) == "".join(PARTS)
    assert len(pieces) > len(PARTS)
    assert "\ufffd" not in "".join(pieces)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert (
        chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    )
    assert len({c.id for c in chunks}) == 1


def test_usage_comes_only_when_asked_for_and_on_every_chunk_when_asked_for(live: Live) -> None:
    create = live.openai().chat.completions.create
    assert all(c.choices for c in create(model="stub", messages=HI, stream=True))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(create(model="stub", messages=HI, stream=True, stream_options=options))
    counts = [c.usage.completion_tokens for c in chunks[1:]]
    assert counts == sorted(counts)
    assert counts[0] == 1


def test_the_raw_stream_has_the_shape_of_server_sent_events(live: Live) -> None:
    answer = live.post("/v1/chat/completions", {"messages": HI, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk"
        assert isinstance(chunk["created"], int)


def test_completions_take_text_ids_and_lists_of_both(live: Live, tokenizer: Tokenizer) -> None:
    create = live.openai().completions.create
    ids = tokenizer.encode("the of")
    for prompt, expected in (
        ("the of", [ids]),
        (["the of", "the"], [ids, tokenizer.encode("the")]),
        (ids, [ids]),
        ([ids, ids[:1]], [ids, ids[:1]]),
    ):
        live.engine.seen.clear()
        answer = create(model="stub", prompt=prompt, max_tokens=64)
        assert [c.text for c in answer.choices] == ["".join(PARTS)] * len(expected)
        assert [c.index for c in answer.choices] == list(range(len(expected)))
        assert sorted(seen[1] for seen in live.engine.seen) == sorted(expected)
        assert answer.usage.prompt_tokens == sum(map(len, expected))
    assert answer.object == "text_completion"


def test_n_choices_differ_and_are_counted_together(serve) -> None:
    live = serve()
    answer = live.openai().chat.completions.create(model="stub", messages=HI, n=3, seed=7, max_tokens=8)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 3
    assert answer.usage.completion_tokens == 24
    assert sorted(seen[2].seed for seen in live.engine.seen) == [7, 8, 9]
    chunks = live.openai().chat.completions.create(
        model="stub", messages=HI, n=3, seed=7, max_tokens=8, stream=True
    )
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert texts == {c.index: c.message.content for c in answer.choices}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_token_edges_ends_the_text(live: Live, stream: bool) -> None:
    def text(**options: object) -> tuple[str, str, object]:
        answer = live.openai().chat.completions.create(model="stub", messages=HI, stream=stream, **options)
        if not stream:
            choice = answer.choices[0]
            return choice.message.content, choice.finish_reason, choice.stop_reason
        choices = [chunk.choices[0] for chunk in answer]
        return "".join(c.delta.content for c in choices), choices[-1].finish_reason, choices[-1].stop_reason

    assert text(stop="京 🙂") == ("the of Grüße 東", "stop", "京 🙂")
    assert text(stop=["no", "üß"]) == ("the of Gr", "stop", "üß")
    shown = text(stop="京 🙂", extra_body={"include_stop_str_in_output": True})
    assert shown == ("the of Grüße 東京 🙂", "stop", "京 🙂")
    live.wait_until(lambda: not live.engine.running)
    assert len(live.engine.aborted) == 3, "the engine was told to stop each of them"


def test_completion_stream_adds_up_and_carries_its_usage(live: Live) -> None:
    chunks = list(
        live.openai().completions.create(
            model="stub", prompt="hi", max_tokens=64, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "".join(PARTS)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == live.engine.tokens_made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_echo_puts_the_prompt_before_the_text(
    live: Live, tokenizer: Tokenizer, stream: bool, ids: bool
) -> None:
    prompt = tokenizer.encode("hi the") if ids else "hi the"
    answer = live.openai().completions.create(
        model="stub", prompt=prompt, max_tokens=64, echo=True, stream=stream
    )
    text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
    assert text == "hi the" + "".join(PARTS)


def test_echo_with_logprobs_covers_the_prompt_as_evaluations_ask_for_it(
    live: Live, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the of that")
    answer = live.openai().completions.create(
        model="stub", prompt=[ids, ids], max_tokens=1, echo=True, logprobs=1, temperature=0.0, seed=1
    )
    for choice in answer.choices:
        table = choice.logprobs
        assert len(table.tokens) == len(table.token_logprobs) == len(table.top_logprobs) == len(ids) + 1
        assert table.token_logprobs[0] is None
        assert table.top_logprobs[0] is None
        assert "".join(table.tokens[: len(ids)]) == "the of that"
        assert table.text_offset == [sum(map(len, table.tokens[:i])) for i in range(len(table.tokens))]
        assert max(table.top_logprobs[1], key=table.top_logprobs[1].get) == table.tokens[1]


def test_max_tokens_0_with_echo_returns_the_prompt_alone(live: Live) -> None:
    answer = live.openai().completions.create(
        model="stub", prompt="the of", max_tokens=0, echo=True, logprobs=1
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("the of", "length")
    assert "".join(answer.choices[0].logprobs.tokens) == "the of"
    assert answer.usage.completion_tokens == 0


def test_chat_logprobs_have_bytes_that_join_to_the_text(live: Live) -> None:
    answer = live.openai().chat.completions.create(model="stub", messages=HI, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert b"".join(bytes(e.bytes) for e in entries[:-1]).decode() == "".join(PARTS)
    assert all(len(e.top_logprobs) == 2 for e in entries)
    streamed = live.openai().chat.completions.create(
        model="stub", messages=HI, logprobs=True, top_logprobs=2, stream=True
    )
    pieces = [c.choices[0].logprobs for c in streamed]
    assert [e for piece in pieces if piece for e in piece.content] == entries


def test_vllm_s_extra_fields_reach_the_engine(live: Live) -> None:
    live.openai().chat.completions.create(
        model="stub",
        messages=HI,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        logit_bias={"5": 2.0},
        presence_penalty=0.1,
        frequency_penalty=0.2,
        max_completion_tokens=9,
        extra_body={
            "top_k": 7,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 2,
            "stop_token_ids": [600],
            "skip_special_tokens": False,
            "allowed_token_ids": [4, 5],
            "priority": -3,
            "cache_salt": "tenant",
            "request_id": "mine",
        },
    )
    request_id, _, params, priority, salt = live.engine.seen[0]
    assert (priority, salt) == (-3, "tenant")
    assert request_id.startswith("chatcmpl-mine-0")
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (params.ignore_eos, params.min_tokens, params.max_tokens, params.seed) == (True, 2, 9, 3)
    assert (params.logit_bias, params.stop_token_ids, params.allowed_token_ids) == ({5: 2.0}, [600], [4, 5])
    assert params.skip_special_tokens is False


def test_fields_left_out_take_the_model_s_suggestion(serve) -> None:
    live = serve(default_sampling={"temperature": 0.6, "top_k": 20})
    client = live.openai()
    client.chat.completions.create(model="stub", messages=HI)
    client.chat.completions.create(model="stub", messages=HI, temperature=0.0)
    assert [s[2].temperature for s in live.engine.seen] == [0.6, 0.0]
    assert [s[2].top_k for s in live.engine.seen] == [20, 20]


def test_token_ids_come_back_when_asked_for(live: Live, spoken: list[int]) -> None:
    answer = live.post("/v1/chat/completions", {"messages": HI, "return_token_ids": True}).json()
    assert answer["choices"][0]["token_ids"] == [*spoken, EOS]
    assert answer["prompt_token_ids"] == live.engine.seen[0][1]
    answer = live.post(
        "/v1/completions", {"prompt": [5, 6], "max_tokens": 99, "return_token_ids": True}
    ).json()
    assert answer["choices"][0]["token_ids"] == [*spoken, EOS]
    assert answer["choices"][0]["prompt_token_ids"] == [5, 6]


def test_prompt_logprobs_are_a_table_by_token_id(live: Live) -> None:
    body = {"prompt": [5, 6, 7], "prompt_logprobs": 1}
    rows = live.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert rows[1]["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": "$"}
    body = {"messages": HI, "prompt_logprobs": 1}
    rows = live.post("/v1/chat/completions", body).json()["prompt_logprobs"]
    assert len(rows) == len(live.engine.seen[-1][1])


def test_a_prompt_can_be_truncated_from_the_left(live: Live) -> None:
    live.post("/v1/completions", {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2})
    assert live.engine.seen[0][1] == [7, 8]
    live.post("/v1/completions", {"prompt": [9] * 600, "truncate_prompt_tokens": -1, "max_tokens": 12})
    assert len(live.engine.seen[1][1]) == 500


def test_a_final_message_can_be_continued(live: Live, tokenizer: Tokenizer) -> None:
    messages = [*HI, {"role": "assistant", "content": "the end of"}]
    live.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True})
    assert tokenizer.decode(live.engine.seen[0][1], skip_special_tokens=False).endswith(
        "assistant\nthe end of"
    )


def test_text_parts_of_a_message_are_joined(live: Live, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    live.openai().chat.completions.create(model="stub", messages=[{"role": "user", "content": parts}])
    assert "user\none\ntwo<|im_end|>" in tokenizer.decode(live.engine.seen[0][1], skip_special_tokens=False)


def test_tokens_can_be_gathered_into_larger_chunks(serve, spoken: list[int]) -> None:
    live = serve(StubEngine(answer=lambda prompt, params: [*spoken, EOS]), stream_interval=4)
    chunks = list(live.openai().chat.completions.create(model="stub", messages=HI, stream=True))
    assert "".join(c.choices[0].delta.content for c in chunks) == "".join(PARTS)
    # The role, the first token at once, then four at a time.
    assert len(chunks) <= 2 + -(-len(spoken) // 4)


def test_models_are_listed_as_clients_and_benchmarks_read_them(serve) -> None:
    live = serve(served_names=["stub", "alias"])
    client = live.openai()
    assert [m.id for m in client.models.list()] == ["stub", "alias"]
    card = client.models.retrieve("stub")
    assert (card.object, card.root, card.max_model_len) == ("model", "models/stub", 512)
    assert isinstance(card.created, int)
    assert client.chat.completions.create(model="alias", messages=HI, max_tokens=1).model == "alias"


def test_tokenize_and_detokenize_undo_each_other(live: Live, tokenizer: Tokenizer) -> None:
    answer = live.post("/tokenize", {"prompt": "the of", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("the of")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert len(answer["token_strs"]) == answer["count"]
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "the of"}
    chat = live.post("/tokenize", {"messages": HI}).json()["tokens"]
    live.openai().chat.completions.create(model="stub", messages=HI)
    assert chat == live.engine.seen[0][1]


def test_a_long_text_is_tokenized_like_a_short_one(live: Live, tokenizer: Tokenizer) -> None:
    text = "the of that " * 2000
    assert live.post("/tokenize", {"prompt": text}).json()["tokens"] == tokenizer.encode(text)
