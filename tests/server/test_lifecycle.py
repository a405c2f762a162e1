"""Clients that leave, queues that are full, keys, deadlines, death and shutdown."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import httpx
import openai
import pytest

from rimuru.engine import process
from server.conftest import Live
from server.stub_engine import StubEngine

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def endless(delay: float = 0.002) -> StubEngine:
    return StubEngine(max_model_len=100_000, answer=lambda prompt, params: [70] * 50_000, delay=delay)


def start_in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_client_that_leaves_mid_stream_aborts_its_request(serve) -> None:
    live: Live = serve(endless())
    stream = live.openai().chat.completions.create(model="stub", messages=HI, stream=True, n=2)
    next(iter(stream))
    assert len(live.engine.running) == 2
    stream.close()
    live.wait_until(lambda: len(live.engine.aborted) == 2, seconds=1)
    assert not live.engine.running
    assert not live.frontend.active


def test_a_client_that_leaves_without_streaming_aborts_its_request(serve) -> None:
    live: Live = serve(endless())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.url + CHAT, json={"messages": HI}, timeout=0.3)
    live.wait_until(lambda: len(live.engine.aborted) == 1, seconds=1)
    assert not live.frontend.active


def test_a_client_that_leaves_while_queued_aborts_its_request(serve) -> None:
    live: Live = serve()
    live.call(live.engine.hold.clear)
    for stream in (False, True):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + CHAT, json={"messages": HI, "stream": stream}, timeout=0.3)
    live.wait_until(lambda: len(live.engine.aborted) == 2, seconds=1)
    assert not live.frontend.waiting


def test_a_connection_cut_in_mid_request_disturbs_nobody(serve, caplog: pytest.LogCaptureFixture) -> None:
    live: Live = serve()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        assert live.post(CHAT, {"messages": HI, "max_tokens": 1}).status_code == 200
    assert live.post(CHAT, {"messages": HI, "max_tokens": 1}).status_code == 200
    live.wait_until(lambda: live.frontend.metrics.http["/v1/chat/completions", "POST", 499] == 1)
    assert not caplog.records, "a client that leaves is no error of ours"


def test_a_full_queue_answers_429_and_when_to_come_back(serve) -> None:
    live: Live = serve(max_queue=2)
    live.call(live.engine.hold.clear)
    waiting = [start_in_thread(lambda: live.post(CHAT, {"messages": HI, "max_tokens": 1})) for _ in range(2)]
    live.wait_until(lambda: len(live.frontend.waiting) == 2)
    with pytest.raises(openai.RateLimitError) as caught:
        live.openai().chat.completions.create(model="stub", messages=HI)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert "--max-queue 2" in str(caught.value)
    live.call(live.engine.hold.set)
    for thread in waiting:
        thread.join(5)
    assert live.post(CHAT, {"messages": HI, "max_tokens": 1}).status_code == 200


def test_keys_are_asked_for_everywhere_but_at_the_probes(serve) -> None:
    live: Live = serve(api_keys=["secret", "other"])
    for key in ("none", ""):
        with pytest.raises(openai.AuthenticationError, match="API key"):
            live.openai(api_key=key or "x").models.list()
    assert live.openai(api_key="other").models.list().data
    for path in ("/health", "/ping", "/metrics", "/version"):
        assert live.get(path).status_code == 200
    for path in ("/v1/models", "/server_info", "/rimuru/pool"):
        answer = live.get(path)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "AuthenticationError"


def test_request_ids_come_back_and_may_be_reused(serve) -> None:
    live: Live = serve(endless())
    headers = {"x-request-id": "mine"}
    body = {"messages": HI, "stream": True}
    with (
        httpx.stream("POST", live.url + CHAT, json=body, headers=headers) as one,
        httpx.stream("POST", live.url + CHAT, json=body, headers=headers) as two,
    ):
        for answer in (one, two):
            assert answer.headers["x-request-id"] == "mine"
            assert '"id":"chatcmpl-mine"' in next(answer.iter_lines())
    live.post(CHAT, {"messages": HI, "max_tokens": 1}, headers=headers)
    assert len({seen[0] for seen in live.engine.seen}) == 3, "an aborted request's name is never used again"
    assert live.get("/version", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"
    assert live.get("/version").headers["x-request-id"]


def test_browsers_of_other_origins_are_let_in(serve) -> None:
    live: Live = serve()
    headers = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    answer = httpx.options(live.url + CHAT, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    closed: Live = serve(allowed_origins=["http://home"])
    assert httpx.options(closed.url + CHAT, headers=headers).status_code == 400


def test_a_request_beyond_its_deadline_is_stopped(serve) -> None:
    live: Live = serve(endless(), request_timeout=0.2)
    answer = live.post(CHAT, {"messages": HI})
    assert answer.status_code == 504
    assert "--request-timeout 0.2" in answer.json()["error"]["message"]
    text = live.post(CHAT, {"messages": HI, "stream": True}).text
    assert '"code":504' in text
    assert text.endswith("data: [DONE]\n\n")
    assert not live.engine.running


def test_one_failing_request_fails_alone(serve) -> None:
    live: Live = serve()
    live.engine.fail_with = "its last page could not be had"
    answer = live.post(CHAT, {"messages": HI})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "its last page could not be had"
    live.engine.fail_with = None
    assert live.post(CHAT, {"messages": HI, "max_tokens": 1}).status_code == 200


def test_an_unforeseen_error_shows_no_detail_to_the_client(serve, caplog: pytest.LogCaptureFixture) -> None:
    live: Live = serve(StubEngine(answer=lambda prompt, params: [1 // 0]))
    for stream in (False, True):
        answer = live.post(CHAT, {"messages": HI, "stream": stream})
        assert answer.status_code == 500
        assert "division" not in answer.text
        assert answer.json()["error"]["type"] == "InternalServerError"
    assert "ZeroDivisionError" in caplog.text


def test_death_of_the_engine_reaches_every_client_and_the_probes(serve) -> None:
    live: Live = serve(endless())
    results: list[object] = []

    def plain() -> None:
        results.append(live.post(CHAT, {"messages": HI}).status_code)

    def streamed() -> None:
        try:
            for _ in live.openai().chat.completions.create(model="stub", messages=HI, stream=True):
                pass
        except openai.APIError as exc:
            results.append(str(exc))

    threads = [start_in_thread(plain), start_in_thread(streamed)]
    live.wait_until(lambda: len(live.engine.running) == 2 and not live.frontend.waiting)
    live.engine.dead = True
    for thread in threads:
        thread.join(5)
    assert 503 in results
    assert any("The engine has stopped" in str(r) for r in results)
    assert live.get("/health").status_code == 503
    assert live.post(CHAT, {"messages": HI}).status_code == 503
    with pytest.raises(openai.InternalServerError):
        live.openai().chat.completions.create(model="stub", messages=HI)
    assert live.get("/metrics").status_code == 200


def test_draining_lets_requests_end_and_refuses_new_ones(serve) -> None:
    live: Live = serve(StubEngine(answer=lambda prompt, params: [70] * 50, delay=0.01))
    results: list[int] = []
    thread = start_in_thread(lambda: results.append(live.post(CHAT, {"messages": HI}).status_code))
    live.wait_until(lambda: bool(live.engine.running))
    draining = asyncio.run_coroutine_threadsafe(live.frontend.drain(10), live.loop)
    live.wait_until(lambda: live.frontend.draining)
    refused = live.post(CHAT, {"messages": HI})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert live.get("/health").status_code == 503
    draining.result(10)
    thread.join(5)
    assert results == [200]


def test_draining_stops_what_outlasts_the_limit(serve) -> None:
    live: Live = serve(endless())
    results: list[str] = []
    body = {"messages": HI, "stream": True}
    thread = start_in_thread(lambda: results.append(live.post(CHAT, body).text))
    live.wait_until(lambda: bool(live.engine.running))
    began = time.monotonic()
    asyncio.run_coroutine_threadsafe(live.frontend.drain(0.2), live.loop).result(10)
    assert time.monotonic() - began < 2
    thread.join(5)
    assert '"code":503' in results[0]
    assert results[0].endswith("data: [DONE]\n\n")


def test_the_engine_s_threads_leave_a_core_to_the_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    process._leave_a_core()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    for cores, threads in ((1, "1"), (2, "1"), (16, "15")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)), raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS")
        process._leave_a_core()
        assert os.environ["OMP_NUM_THREADS"] == threads


def test_slow_and_silent_clients_do_not_hold_up_others(serve) -> None:
    live: Live = serve()
    host, port = live.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(1000)]
    try:
        for i, connection in enumerate(idle):
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"[: 10 + i % 40])
        began = time.monotonic()
        assert live.post(CHAT, {"messages": HI, "max_tokens": 1}).status_code == 200
        assert time.monotonic() - began < 2
    finally:
        for connection in idle:
            connection.close()


def test_a_priority_is_refused_under_first_come_first_served(serve) -> None:
    live: Live = serve(honour_priority=False)
    answer = live.post(CHAT, {"messages": HI, "priority": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"
