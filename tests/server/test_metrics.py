"""The exposition: names that boards query, values that add up."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

import rimuru
from rimuru.engine.stats import EngineStats, RequestSample
from rimuru.server.metrics import MOVE_CAUSES, MOVE_DIRECTIONS, PREEMPTION_CAUSES
from server.stub_engine import EOS, StubEngine

HI = [{"role": "user", "content": "hi"}]
GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
COUNTERS = {
    "prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total",
}  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "iteration_tokens_total",
}  # fmt: skip


def samples(live) -> dict[str, list]:
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(live.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_every_name_that_boards_and_routers_query_is_there(serve) -> None:
    found = samples(serve())
    for name in (
        GAUGES | COUNTERS | {f"{h}_{part}" for h in HISTOGRAMS for part in ("bucket", "sum", "count")}
    ):
        assert f"vllm:{name}" in found, name
        labels = found[f"vllm:{name}"][0].labels
        assert (labels["model_name"], labels["engine"]) == ("stub", "0")
    assert "vllm:cache_config_info" in found


def test_requests_show_in_counters_and_histograms(serve) -> None:
    live = serve(StubEngine(answer=lambda prompt, params: [70, 71, 72, EOS]))
    client = live.openai()
    client.chat.completions.create(model="stub", messages=HI)
    client.chat.completions.create(model="stub", messages=HI, max_tokens=2)
    live.wait_until(lambda: not live.frontend.active)
    found = samples(live)
    reasons = {s.labels["finished_reason"]: s.value for s in found["vllm:request_success_total"]}
    assert reasons == {"stop": 1, "length": 1, "abort": 0, "error": 0}
    assert found["vllm:time_to_first_token_seconds_count"][0].value == 2
    assert found["vllm:inter_token_latency_seconds_count"][0].value == 4
    assert found["vllm:e2e_request_latency_seconds_count"][0].value == 2
    buckets = [s.value for s in found["vllm:time_to_first_token_seconds_bucket"]]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2
    answered = {(s.labels["route"], s.labels["status"]): s.value for s in found["rimuru_http_requests_total"]}
    assert answered["/v1/chat/completions", "200"] == 2


def test_pool_gauges_sum_to_the_pool(serve) -> None:
    live = serve()
    found = samples(live)
    assert sum(s.value for s in found["rimuru_pool_bytes"]) == found["rimuru_pool_size_bytes"][0].value
    moves = {
        (m.labels["policy"], m.labels["cause"], m.labels["direction"]): m.value
        for m in found["rimuru_boundary_moves_total"]
    }
    assert moves["reactive", "admission", "lend"] == 3
    assert sum(moves.values()) == 3
    assert {p.labels["cause"]: p.value for p in found["rimuru_preemptions_total"]} == {"memory": 1}
    pool = live.get("/rimuru/pool").json()
    assert pool["kinds"]["expert"]["resident"] == {"bytes": 8192, "pages": 2}
    assert pool["boundary_moves"] == 3


def test_every_move_and_preemption_has_its_series_before_the_first_one(serve, monkeypatch) -> None:
    live = serve()

    async def fresh() -> EngineStats:
        return EngineStats()

    monkeypatch.setattr(live.engine, "stats", fresh)
    found = samples(live)
    moves = found["rimuru_boundary_moves_total"]
    wanted = set(itertools.product(["reactive"], MOVE_CAUSES, MOVE_DIRECTIONS))
    assert {tuple(m.labels[k] for k in ("policy", "cause", "direction")) for m in moves} == wanted
    preemptions = found["rimuru_preemptions_total"]
    assert {p.labels["cause"] for p in preemptions} == set(PREEMPTION_CAUSES)
    assert {s.value for s in [*moves, *preemptions]} == {0}


def test_the_causes_with_series_are_those_that_policies_and_the_scheduler_give() -> None:
    source = Path(rimuru.__file__).parent
    policies = "".join(path.read_text() for path in (source / "policy").glob("*.py"))
    given = set(re.findall(r'cause="(\w+)"', policies)) | set(re.findall(r'cause = "(\w+)"', policies))
    given |= set(re.findall(r'else "(\w+)"', "".join(re.findall(r"cause=.*|cause = .*", policies))))
    assert given - {"hold", "swing"} == set(MOVE_CAUSES)  # no move; and the policy for tests
    scheduler = (source / "engine" / "scheduler.py").read_text()
    assert set(re.findall(r'preempt\(\w+, "(\w+)"\)', scheduler)) == set(PREEMPTION_CAUSES)


def test_sglang_s_names_show_the_same_values(serve) -> None:
    live = serve(StubEngine(answer=lambda prompt, params: [70, 71, EOS]))
    live.openai().chat.completions.create(model="stub", messages=HI)
    live.wait_until(lambda: not live.frontend.active)
    found = samples(live)
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "cache_hit_rate"):
        assert found[f"sglang:{name}"][0].labels == {"model_name": "stub"}
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        count = found[f"sglang:{name}_count"][0].value
        assert count == found[f"vllm:{name}_count"][0].value > 0


def test_samples_of_the_engine_are_counted_once(serve, monkeypatch) -> None:
    live = serve()
    sample = RequestSample("stop", 10, 5, 16, 0.1, 0.2, 0.3, 0.3, 0.6)
    pending = [sample, sample]

    async def stats() -> EngineStats:
        taken = EngineStats(finished=list(pending), step_tokens=[3, 4])
        pending.clear()
        return taken

    monkeypatch.setattr(live.engine, "stats", stats)
    live.get("/metrics")
    found = samples(live)
    assert found["vllm:request_queue_time_seconds_count"][0].value == 2
    assert found["vllm:request_prompt_tokens_sum"][0].value == 20


def test_bytes_moved_together_are_counted(serve, monkeypatch) -> None:
    live = serve()

    async def stats() -> EngineStats:
        return EngineStats(moved_bytes=1 << 20)

    assert samples(live)["rimuru_moved_bytes_total"][0].value == 0
    monkeypatch.setattr(live.engine, "stats", stats)
    assert samples(live)["rimuru_moved_bytes_total"][0].value == 1 << 20


def test_the_other_routes_of_operators_answer(serve) -> None:
    live = serve(described={"max_queue": 3})
    assert live.get("/version").json()["version"]
    assert live.get("/load").json() == {"server_load": 0, "waiting": 0}
    assert live.get("/ping").status_code == live.post("/ping").status_code == 200
    assert live.get("/health").text == ""
    for path in ("/health", "/ping", "/v1/models", "/metrics"):
        answer = httpx.head(live.url + path)
        assert (answer.status_code, answer.text) == (200, ""), path
    assert httpx.head(live.url + "/v1/completions").status_code == 405
    assert live.get("/v1/models/").json() == live.get("/v1/models").json()
    info = live.get("/server_info").json()
    assert (info["engine"]["max_model_len"], info["config"]) == (512, {"max_queue": 3})
    assert live.post("/reset_prefix_cache").json() == {"reset": True}
    assert live.engine.resets == 1
    assert live.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"
    schema = live.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}
    assert "messages" in schema["components"]["schemas"]["ChatBody"]["properties"]
