"""Whatever a client gets wrong is answered in one shape, and the next request is served."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rimuru.models.tokenizer import Tokenizer
from rimuru.server.frontend import Frontend
from rimuru.server.prompts import Prompts
from rimuru.server.protocol import ChatBody, CompletionBody
from rimuru.server.settings import ServerSettings
from server.conftest import Live, listening
from server.stub_engine import StubEngine

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    engine = StubEngine()
    frontend = Frontend(
        engine, Prompts(tokenizer, engine.info), ServerSettings(["stub"], max_body_bytes=50_000)
    )
    with listening(frontend, engine) as live:
        yield live


@pytest.fixture(autouse=True)
def _serves_the_next_request(live: Live) -> Iterator[None]:
    yield
    assert live.post(CHAT, {"messages": HI, "max_tokens": 2}).status_code == 200
    live.wait_until(lambda: not live.engine.running and not live.frontend.active)


def error_of(answer, status: int, param: str | None = None) -> str:
    """The message, once the shape is as clients expect it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    assert "Traceback" not in error["message"]
    return error["message"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", "hot", "number"),
        ("temperature", -1, "[0, 100]"),
        ("temperature", 1e400, "number"),
        ("top_p", 0, "(0, 1]"),
        ("top_p", 1.5, "(0, 1]"),
        ("top_k", -2, "-1"),
        ("top_k", 1.5, "integer"),
        ("min_p", 2, "[0, 1]"),
        ("repetition_penalty", 0, "[0.01, 100]"),
        ("presence_penalty", 3, "[-2, 2]"),
        ("frequency_penalty", -3, "[-2, 2]"),
        ("n", 0, "from 1 to 128"),
        ("n", 1000, "from 1 to 128"),
        ("n", True, "integer"),
        ("max_tokens", 4.5, "integer"),
        ("max_tokens", "4", "integer"),
        ("seed", 1e300, "whole number"),
        ("max_tokens", 0, " 0"),
        ("max_tokens", -5, "at least 1"),
        ("max_tokens", "many", "integer"),
        ("max_tokens", 10**6, "maximum context length is 512"),
        ("min_tokens", -1, "at least 0"),
        ("seed", 2**80, "whole number"),
        ("stop", [""], "non-empty"),
        ("stop", 5, "string"),
        ("stop", [1], "string"),
        ("stop_token_ids", [10**6], "from 0 to 639"),
        ("logit_bias", {"x": 1.0}, "token ids"),
        ("logit_bias", {"10000": 1.0}, "from 0 to 639"),
        ("logit_bias", {"5": 1000.0}, "[-100, 100]"),
        ("allowed_token_ids", [], "not be empty"),
        ("prompt_logprobs", 100, "from 0 to 20"),
        ("truncate_prompt_tokens", 0, "from 1 to 512"),
        ("priority", "high", "integer"),
        ("stream", "yes", "boolean"),
        ("stream_options", {"include_usage": True}, "stream: true"),
        ("structured_outputs", {"structural_tag": "{}"}, "not supported"),
        ("structured_outputs", {"regex": ""}, "non-empty string"),
        ("structured_outputs", {"choice": ["a", 5]}, "list of non-empty strings"),
        ("structured_outputs", {"choice": ["a"], "regex": "b"}, "more than once"),
        ("guided_json", 5, "JSON schema"),
        ("guided_regex", ["a"], "string"),
        ("guided_choice", [], "list of non-empty strings"),
        ("response_format", {"type": "poem"}, "json_schema"),
        ("response_format", {"type": "json_schema"}, "json_schema.schema"),
        ("use_beam_search", True, "not supported"),
        ("best_of", 4, "not supported"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_wrong_field_is_named_with_its_limit(live: Live, path: str, field: str, value, says: str) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    raw = json.dumps({**body, field: value}).replace("Infinity", "1e400")
    answer = httpx.post(live.url + path, content=raw, headers={"content-type": "application/json"})
    assert says in error_of(answer, 400, field)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("messages", [], "at least 1"),
        ("messages", "hi", "array"),
        ("messages", [{"content": "hi"}], "role"),
        ("messages", [{"role": "user", "content": 5}], "string or a list"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "only text"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "must be a string"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "function.name"),
        ("logprobs", 5, "boolean"),
        ("top_logprobs", 5, "logprobs: true"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "--tool-call-parser"),
        ("tool_choice", "required", "they have: none"),
        ("tool_choice", "sometimes", "'required'"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "they have: none"),
        ("chat_template", "{{ 1 }}", "--trust-request-chat-template"),
        ("chat_template_kwargs", {"tokenize": True}, "cannot set"),
        ("echo", True, "/v1/completions"),
        ("modalities", ["audio"], "only text"),
    ],
)
def test_a_wrong_field_of_chat_is_named(live: Live, field: str, value, says: str) -> None:
    assert says in error_of(live.post(CHAT, {"messages": HI, field: value}), 400, field)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prompt", None, "string"),
        ("prompt", "", "no tokens"),
        ("prompt", [], "not be empty"),
        ("prompt", [[]], "no tokens"),
        ("prompt", [1, "a"], "integer"),
        ("prompt", {"a": 1}, "string"),
        ("prompt", [640], "from 0 to 639"),
        ("prompt", [-1], "from 0 to 639"),
        ("prompt", [5] * 512, "has 512 tokens"),
        ("prompt", [[5]] * 5000, "At most 4096"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", True, "integer"),
        ("suffix", "end", "not supported"),
    ],
)
def test_a_wrong_field_of_completions_is_named(live: Live, field: str, value, says: str) -> None:
    assert says in error_of(live.post(COMPLETIONS, {"prompt": "hi", field: value}), 400, field)


def test_missing_fields_are_named(live: Live) -> None:
    assert "required" in error_of(live.post(CHAT, {}), 400, "messages")
    assert "required" in error_of(live.post(COMPLETIONS, {}), 400, "prompt")


@pytest.mark.parametrize("raw", [b"{", b"", b"[]", b'"x"', b"\xff\xfe", b"{'a': 1}", b"[" * 5000])
def test_a_body_that_is_no_json_object_is_refused(live: Live, raw: bytes) -> None:
    answer = httpx.post(live.url + CHAT, content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(live: Live) -> None:
    answer = live.post(COMPLETIONS, {"prompt": "x" * 60_000})
    assert "--max-body-size" in error_of(answer, 413)

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    assert "50000 bytes" in error_of(httpx.post(live.url + CHAT, content=endless()), 413)


def test_a_client_that_announces_a_huge_body_gets_its_answer_at_once(live: Live) -> None:
    connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=5)
    connection.putrequest("POST", CHAT)
    connection.putheader("content-length", str(10**12))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_unknown_fields_are_accepted_and_logged_once(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        body = {"messages": HI, "max_tokens": 1, "a_field_of_tomorrow": {"x": 1}}
        assert live.post(CHAT, body).status_code == 200
    assert caplog.text.count("a_field_of_tomorrow") == 1


def test_wrong_paths_and_methods_answer_in_the_same_shape(live: Live) -> None:
    assert "/v1/nothing" in error_of(live.get("/v1/nothing"), 404)
    assert "POST" in error_of(live.get(CHAT), 405)
    assert "'other'" in error_of(live.post(CHAT, {"model": "other", "messages": HI}), 404, "model")
    assert "'other'" in error_of(live.get("/v1/models/other"), 404, "model")


def test_the_openai_library_raises_its_own_classes(live: Live) -> None:
    create = live.openai().chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="stub", messages=HI, temperature=-1.0)
    assert caught.value.param == "temperature"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError):
        create(model="stub", messages=HI, temperature=-1.0, stream=True)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_whole_numbers_may_be_written_with_a_point(live: Live, path: str) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    whole = {"max_tokens": 4, "min_tokens": 1, "n": 2, "seed": 7, "top_k": 5, "priority": 0}
    answers = [
        live.post(path, {**body, **{name: kind(value) for name, value in whole.items()}})
        for kind in (int, float)
    ]
    assert [a.status_code for a in answers] == [200, 200], answers[1].text
    assert answers[0].json()["usage"] == answers[1].json()["usage"]


def test_a_request_the_engine_refuses_is_a_400_streamed_or_not(live: Live) -> None:
    live.engine.info.max_request_tokens, before = 100, live.engine.info.max_request_tokens
    try:
        for stream in (False, True):
            body = {"prompt": [5] * 20, "max_tokens": 200, "stream": stream}
            assert "reachable capacity" in error_of(live.post(COMPLETIONS, body), 400, "max_tokens")
    finally:
        live.engine.info.max_request_tokens = before


def test_tokenize_and_detokenize_refuse_what_they_cannot_do(live: Live) -> None:
    assert "either" in error_of(live.post("/tokenize", {}), 400, "prompt")
    assert "from 0 to 639" in error_of(live.post("/detokenize", {"tokens": [9999]}), 400, "tokens")
    assert "array" in error_of(live.post("/detokenize", {"tokens": "x"}), 400, "tokens")


def test_a_model_without_a_template_says_so(serve, tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "template", None)
    assert "no chat template" in error_of(serve().post(CHAT, {"messages": HI}), 400, "messages")


def test_a_template_that_refuses_the_messages_says_why(serve) -> None:
    live = serve(template="{{ raise_exception('system messages are not known here') }}")
    assert "not known here" in error_of(live.post(CHAT, {"messages": HI}), 400, "messages")


@pytest.fixture(scope="module")
def keep_alive() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20) as client:
        yield client


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), chat=st.booleans())
def test_no_body_whatever_is_the_server_s_fault(
    live: Live, keep_alive: httpx.Client, data: st.DataObject, chat: bool
) -> None:
    model = ChatBody if chat else CompletionBody
    names = sorted(model.model_fields.keys() - {"max_tokens", "max_completion_tokens", "n", "model"})
    odd = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=2))
    body = {"messages": HI, "max_tokens": 2} if chat else {"prompt": "hi", "max_tokens": 2}
    # Python writes infinities as `Infinity`, which is no JSON but what many a client sends.
    content = json.dumps({**body, **odd})
    answer = keep_alive.post(live.url + (CHAT if chat else COMPLETIONS), content=content.encode())
    assert answer.status_code in (200, 400), (odd, answer.text)
