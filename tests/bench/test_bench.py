"""`rimuru bench serve|throughput|latency`: workloads that repeat, figures that add up, clear errors."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server.conftest import serve, tokenizer  # noqa: F401  fixtures
from server.stub_engine import StubEngine
from support.cores import cap_for

from rimuru import cli
from rimuru.bench import _workload
from rimuru.bench import serve as bench_serve
from rimuru.bench._workload import Planned
from rimuru.errors import ConfigError

VLLM_KEYS = {
    "date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    *(f"{c}_{m}_ms" for c in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip


def bench(capsys: Any, *argv: str) -> dict[str, Any]:
    assert cli.main(["bench", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_against_a_server_counts_what_the_server_made(serve: Any, capsys: Any, tmp_path: Path) -> None:  # noqa: F811
    live = serve(StubEngine(delay=0.002, answer=lambda prompt, params: [70] * params.max_tokens))
    file = tmp_path / "result.json"
    result = bench(
        capsys, "serve", "--base-url", live.url, "--num-prompts", "20", "--input-len", "30", "--output-len",
        "10", "--ignore-eos", "--max-concurrency", "4", "--goodput", "ttft:60000", "tpot:60000",
        "--save-detailed", "--result-filename", str(file), "--metric-percentiles", "50,99",
    )  # fmt: skip
    assert result.keys() >= VLLM_KEYS
    assert (result["completed"], result["failed"], result["model_id"]) == (20, 0, "stub")
    assert result["total_input_tokens"] == 20 * 30
    assert result["total_output_tokens"] == 20 * 10
    assert result["max_concurrent_requests"] <= 4
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["output_throughput"] == pytest.approx(200 / result["duration"])
    assert result["mean_itl_ms"] >= 2.0
    assert result["p50_e2el_ms"] == pytest.approx(result["median_e2el_ms"])
    assert json.loads(file.read_text()) == result
    assert [len(gaps) for gaps in result["itls"]] == [9] * 20
    assert result["mean_ttft_ms"] == pytest.approx(statistics.fmean(result["ttfts"]) * 1000)


def test_chat_is_measured_from_its_first_text(serve: Any, capsys: Any) -> None:  # noqa: F811
    live = serve(StubEngine(delay=0.01))
    result = bench(
        capsys, "serve", "--base-url", f"{live.url}/v1", "--endpoint", "/v1/chat/completions",
        "--num-prompts", "3", "--input-len", "5", "--output-len", "6", "--ignore-eos", "--num-warmups", "0",
    )  # fmt: skip
    assert result["completed"] == 3
    assert result["mean_ttft_ms"] >= 10
    assert result["total_output_tokens"] == 18


def test_failures_are_counted_apart_and_shown(serve: Any, capsys: Any, tmp_path: Path) -> None:  # noqa: F811
    live = serve(StubEngine(max_model_len=100))
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens,arrival_s\n20,5,0\n500,5,0.01\n30,5,0.02\n")
    code = cli.main(
        ["bench", "serve", "--base-url", live.url, "--trace", str(trace), "--ignore-eos", "--json"]
    )
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert code == 0
    assert (result["completed"], result["failed"]) == (2, 1)
    assert "maximum context length is 100" in printed.err
    assert result["total_input_tokens"] == 50


def test_no_server_and_a_wrong_address_are_one_sentence(capsys: Any) -> None:
    assert cli.main(["bench", "serve", "--port", "1", "--num-prompts", "1"]) == 1
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--base-url", "nowhere"]) == 2
    assert "http://host:port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--num-prompts", "0"], "at least 1"),
        (["--trace", "/nowhere.csv"], "cannot be read"),
        (["--goodput", "speed:3"], "ttft, tpot, e2el"),
        (["--goodput", "ttft"], "NAME:MILLISECONDS"),
        (["--request-rate", "0"], "above 0"),
        (["--request-rate", "2", "--burstiness", "0"], "--burstiness"),
        (["--arrival", "trace"], "arrival_s"),
        (["--random-range-ratio", "1"], "[0, 1)"),
        (["--metric-percentiles", "high"], "commas"),
        (["--max-concurrency", "0"], "at least 1"),
        (["--extra-body", "{"], "JSON object"),
    ],
)
def test_a_wrong_choice_ends_with_2_before_anything_is_sent(capsys: Any, argv: list[str], says: str) -> None:
    assert cli.main(["bench", "serve", *argv]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "no column output_tokens, prompt_tokens"),
        ("prompt_tokens,output_tokens\n", "no requests"),
        ("prompt_tokens,output_tokens\n5,x\n", "line 2"),
        ("prompt_tokens,output_tokens\n5\n", "line 2"),
        ("prompt_tokens,output_tokens\n5,0\n", "line 2: 0 is no count"),
        ("prompt_tokens,output_tokens,arrival_s\n5,5,2\n5,5,1\n", "line 3: arrival_s 1"),
        ("prompt_tokens,output_tokens,arrival_s\n5,5,nan\n", "line 2"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        _workload.read_trace(file)


def test_arrivals_have_the_rate_and_the_shape_asked_for() -> None:
    planned = [Planned(0.0, 5, 5)] * 4000
    poisson = [p.at for p in _workload.arrive(planned, "poisson", 10.0, seed=1)]
    even = [p.at for p in _workload.arrive(planned, "poisson", 10.0, burstiness=100.0, seed=1)]
    assert poisson[-1] == pytest.approx(400, rel=0.05)
    assert even[-1] == pytest.approx(400, rel=0.05)
    gaps = [statistics.stdev([b - a for a, b in itertools.pairwise(x)]) for x in (poisson, even)]
    assert gaps[0] == pytest.approx(0.1, rel=0.1)  # an exponential's deviation is its mean
    assert gaps[1] == pytest.approx(0.01, rel=0.1)  # a gamma's of shape k is the mean over sqrt(k)
    assert poisson == [p.at for p in _workload.arrive(planned, "poisson", 10.0, seed=1)]
    assert [p.at for p in _workload.arrive(planned[:3], "constant", 2.0)] == [0.0, 0.5, 1.0]
    assert [p.at for p in _workload.arrive(planned[:5], "burst", 2.0, burst=2)] == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert {p.at for p in _workload.arrive(planned[:3], "poisson", float("inf"))} == {0.0}


def test_goodput_counts_requests_that_met_every_objective() -> None:
    def outcome(ttft: float, latency: float) -> bench_serve.Outcome:
        return bench_serve.Outcome(Planned(0, 1, 11), ttft=ttft, latency=latency, output_tokens=11)

    outcomes = [outcome(0.1, 1.1), outcome(0.3, 1.3), outcome(0.1, 3.1)]
    result = bench_serve.summarise(outcomes, 2.0, {"ttft": 200.0, "tpot": 150.0}, [99.0])
    assert result["request_goodput"] == 0.5
    assert result["median_tpot_ms"] == pytest.approx(100)
    assert bench_serve.summarise([], 1.0, {}, [99.0])["mean_ttft_ms"] == 0.0


# What a machine without the server's extra lacks.
BLOCKED = (
    "fastapi",
    "uvicorn",
    "starlette",
    "pydantic",
    "msgspec",
    "zmq",
    "xgrammar",
    "prometheus_client",
    "httpx",
)
TINY = {
    "model_type": "qwen3_moe", "vocab_size": 640, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "intermediate_size": 64, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of an engine with random weights, whose folder holds a config.json alone."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return ["--model", str(folder), "--load-format", "dummy", "--dummy-routing", "uniform", "--dtype",
            "float32", "--device", "cpu", "--device-memory", "100MB", "--max-num-seqs", "8"]  # fmt: skip


@pytest.mark.parametrize(
    "argv",
    [
        ["throughput", "--num-prompts", "2", "--input-len", "8", "--output-len", "3"],
        ["latency", "--batch-size", "1", "--output-len", "2", "--num-iters", "1", "--decode-steps", "2"],
    ],
)
def test_the_engine_is_measured_without_any_package_of_the_server(engine: list[str], argv: list[str]) -> None:
    block = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED!r}))\n"
    code = f"{block}from rimuru.cli import main\nsys.exit(main(['bench', *{[*argv, *engine, '--json']!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["routing"], result["experts_per_layer"]) == ("uniform", 8)
    assert result["steps" if argv[0] == "throughput" else "decode_ms"] > 0


def test_throughput_counts_what_was_served_and_says_with_what(
    engine: list[str], capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    result = bench(
        capsys, "throughput", *engine, "--num-prompts", "6", "--input-len", "12", "--output-len", "5",
        "--output-json", str(file),
    )  # fmt: skip
    assert json.loads(file.read_text()) == result
    assert result["total_num_tokens"] == 6 * 17
    assert result["tokens_per_second"] == pytest.approx(6 * 17 / result["elapsed_time"])
    assert result["output_tokens_per_second"] == pytest.approx(6 * 5 / result["elapsed_time"])
    assert 0 < result["mean_ttft_ms"] <= result["p99_ttft_ms"] <= result["elapsed_time"] * 1e3
    assert result["steps"] >= 5
    assert result["peak_running"] == 6
    assert 2 <= result["touched_per_layer"] <= 8
    assert (result["experts_resident"], result["experts_total"], result["missed_share"]) == (16, 16, 0)
    assert 0 < result["device_memory_bytes"] <= result["device_memory_cap_bytes"] == 100_000_000


def test_requests_of_a_trace_arrive_at_their_rate_and_wait_from_then_on(
    engine: list[str], capsys: Any, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n20,8\n30,2\n")
    result = bench(
        capsys, "throughput", *engine, "--trace", str(trace), "--num-prompts", "5", "--rate", "10",
        "--arrival", "constant", "--output-scale", "0.5",
    )  # fmt: skip
    assert result["total_num_tokens"] == 20 + 30 + 20 + 30 + 20 + 4 + 1 + 4 + 1 + 4
    assert result["elapsed_time"] >= 0.4
    assert result["mean_ttft_ms"] < result["elapsed_time"] * 1e3 - 200  # the last came 400 ms after the first


def test_latency_has_vllm_s_keys_for_one_batch_size_and_a_row_for_each_of_several(
    engine: list[str], capsys: Any
) -> None:
    common = ["--output-len", "4", "--num-iters", "2", "--num-iters-warmup", "1", "--decode-steps", "5"]
    one = bench(capsys, "latency", *engine, *common, "--batch-size", "2")
    assert len(one["latencies"]) == 2
    assert one["avg_latency"] == pytest.approx(statistics.fmean(one["latencies"]))
    assert one["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    both = bench(capsys, "latency", *engine, *common, "--batch-size", "1,4", "--context", "100")
    small, large = both["batches"]
    assert (small["batch_size"], large["batch_size"], large["context"]) == (1, 4, 100)
    assert small["touched_per_layer"] == 2  # one token chooses two experts a layer
    assert 2 < large["touched_per_layer"] <= 8
    assert 0 < large["mean_ttft_ms"] < large["avg_latency"] * 1e3
    assert 0 < large["decode_ms"] <= large["p99_decode_ms"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["latency", "--batch-size", "9"], "--max-num-seqs, which is 8"),
        (["latency", "--batch-size", "0,1"], "from 1"),
        (["latency", "--context", "500", "--input-len", "8"], "--context 500: no 57 output tokens fit"),
        (["latency", "--num-iters", "0"], "--num-iters must be at least 1"),
        (["throughput", "--input-len", "510"], "at most 512 in all"),
        (["throughput", "--request-rate", "0"], "above 0"),
        (["throughput", "--device-memory", "1000B"], "what would start"),
    ],
)
def test_what_the_engine_cannot_do_is_said_instead_of_measured(
    engine: list[str], capsys: Any, argv: list[str], says: str
) -> None:
    assert cli.main(["bench", argv[0], *engine, *argv[1:]]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_batch_that_cannot_decode_at_once_is_no_measurement(engine: list[str], capsys: Any) -> None:
    # Room for three requests at that context, and no expert may leave.
    cap = cap_for("qwen3_moe", 1, 1000, model=engine[1], max_num_batched_tokens=64, max_model_len=512)
    tight = ["--device-memory", str(cap), "--memory-policy", "static", "--resident-experts", "16",
             "--max-num-batched-tokens", "64"]  # fmt: skip
    argv = ["--batch-size", "4", "--context", "300", "--input-len", "8", "--output-len", "2"]
    assert cli.main(["bench", "latency", *engine, *argv, *tight, "--num-iters", "1"]) == 1
    assert "of 4 requests with 300 tokens of context decode at once" in capsys.readouterr().err


def test_benchmarks_go_by_hyphen_or_underscore(capsys: Any) -> None:
    for name in ("host-step", "host_step", "serve"):
        with pytest.raises(SystemExit) as caught:
            cli.main(["bench", name, "--help"])
        assert caught.value.code == 0
        assert f"rimuru bench {name.replace('_', '-')}" in capsys.readouterr().out
    assert cli.main(["bench"]) == 0
    assert "_workload" not in capsys.readouterr().out
