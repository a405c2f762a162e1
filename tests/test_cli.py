"""The command line: flags that act, flags that are refused by name, and errors without tracebacks."""

from __future__ import annotations

import argparse
import dataclasses
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rimuru import __version__, cli
from rimuru.engine.config import EngineConfig, parse_size
from rimuru.errors import RimuruError
from rimuru.server import serve, vllm_flags


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out, printed.err


def parsed(*argv: str) -> argparse.Namespace:
    parser = cli.Parser(prog="rimuru serve", allow_abbrev=False)
    serve.add_arguments(parser)
    return parser.parse_args(list(argv))


def test_the_overview_and_the_version_need_nothing_heavy() -> None:
    code = (
        "import sys; from rimuru import cli; cli.main([]); cli.main(['version']);"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'pydantic'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rimuru serve" in done.stdout
    assert f"rimuru {__version__}" in done.stdout


def test_help_of_serve_lists_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    assert "--device-memory" in capsys.readouterr().out


def test_help_of_serve_gives_each_flag_a_meaning_and_a_default() -> None:
    parser = cli.Parser(prog="rimuru serve")
    serve.add_arguments(parser)
    flags = [a for a in parser._actions if a.option_strings and a.dest != "help"]
    formatter = parser._get_formatter()
    shown = {a.option_strings[0]: formatter._expand_help(a) if a.help else "" for a in flags}
    assert not [flag for flag, text in shown.items() if "default" not in text]
    for action in flags:
        text, value = shown[action.option_strings[0]], action.default
        if type(value) in (int, float, str) and value:
            assert re.search(rf"\b{re.escape(f'{value}'.removesuffix('.0'))}\b", text), text
        if value is True:
            assert "on by default" in text


def test_help_of_bench_says_what_each_benchmark_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "--help")
    assert code == 0
    lines = [line.split(maxsplit=1) for line in out.splitlines()[2:]]
    assert [name for name, _ in lines] == ["allocator", "host-step", "latency", "serve", "throughput"]
    assert all(len(about) > 30 for _, about in lines)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["srve"], "did you mean 'serve'?"),
        (["serve"], "model"),
        (["serve", "m", "n"], "'n' is one argument too many"),
        (["serve", "m", "--max-model-le", "5"], "did you mean --max-model-len?"),
        (["serve", "m", "--max-sequences", "5"], "did you mean --max-num-seqs?"),
        (["plan", "m", "--context-length=5"], "did you mean --max-model-len?"),
        (["serve", "m", "--dry-run"], "rimuru plan"),
        (["serve", "m", "--device-memory", "24"], "24 bytes; was 24GB meant?"),
        (["plan", "m", "--host-memory", "0.5"], "was 0.5GB meant?"),
        (["serve", "m", "--dtype", "int3"], "invalid choice"),
        (["serve", "m", "--port", "high"], "--port"),
        (["serve", "m", "--port", "99999"], "at most 65535"),
        (["serve", "m", "--device-memory", "3QB"], "'24GB' (1e9) or '24GiB'"),
        (["serve", "m", "--device-memory", "0"], "more than 0 bytes"),
        (["serve", "m", "--memory-policy", "static"], "--resident-experts"),
        (["serve", "m", "--max-num-seqs", "0"], "at least 1"),
        (["serve", "m", "--gpu-memory-utilization", "1.5"], "(0, 1]"),
        (["serve", "m", "--max-queue", "0"], "at least 1"),
        (["serve", "m", "--request-timeout", "0"], "more than 0 seconds"),
        (["serve", "m", "--ssl-keyfile", "x"], "go together"),
        (["serve", "m", "--enable-auto-tool-choice"], "needs --tool-call-parser"),
        (["serve", "m", "--cpu-offload-gb", "4"], "--host-memory"),
        (["serve", "m", "--cpu_offload_gb=4"], "--host-memory"),
        (["serve", "m", "--swap-space", "4"], "--device-memory"),
        (["serve", "m", "--kv-cache-dtype", "fp8"], "model's dtype"),
        (["serve", "m", "--kv-cache-memory-bytes", "1G"], "--device-memory"),
        (["serve", "m", "--tensor-parallel-size", "2"], "one device"),
        (["serve", "m", "-tp", "2"], "one device"),
        (["serve", "m", "--quantization", "fp8"], "checkpoint"),
        (["serve", "m", "--enable-lora"], "adapters are not served"),
        (["serve", "m", "--speculative-config", "{}"], "speculative decoding is not served"),
        (["serve", "m", "--no-enable-chunked-prefill"], "no effect here"),
        (["bench", "nothing"], "there is no benchmark 'nothing'"),
        (["chat", "--url", "ftp://nowhere", "-m", "hi"], "http://host:port"),
        (["serve", "m", "--max-model-len", "1.5K"], "32768, 32k or 32K"),
        (["serve", "m", "--max-model-len", "inf"], "32768, 32k or 32K"),
        (["serve", "m", "--ttft-slo", "soon"], "--ttft-slo"),
        (["serve", "m", "--memory-policy", "reactive", "--ttft-slo", "200"], "--memory-policy economic"),
        (["serve", "m", "--memory-policy", "economic", "--itl-slo", "0"], "more than 0 milliseconds"),
    ],
)
def test_a_wrong_choice_ends_with_2_and_says_what_would_work(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    code, _, err = run(capsys, *argv)
    assert (code, says in err) == (2, True), err


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "1"],
        ["--tensor-parallel-size=1"],
        ["--enable-chunked-prefill"],
        ["--cpu-offload-gb", "0"],
        ["--swap-space=0"],
    ],
)
def test_a_flag_that_asks_for_what_is_so_passes_with_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(serve, "run", lambda args: 0)
    code, _, err = run(capsys, "serve", "m", *flags)
    assert code == 0
    assert flags[0].split("=")[0] in err


def test_no_flag_of_ours_is_also_listed_as_without_effect() -> None:
    parser = cli.Parser(prog="rimuru serve")
    serve.add_arguments(parser)
    own = {option for action in parser._actions for option in action.option_strings}
    assert not [flag for flag in own if vllm_flags.advice(flag)]


def test_every_engine_setting_can_be_reached_by_a_flag() -> None:
    args = parsed(
        "m", "--tokenizer", "t", "--dtype", "float16", "--device", "cpu", "--load-format", "dummy",
        "--seed", "3", "--max-model-len", "4k", "--max-num-seqs", "9", "--max-num-batched-tokens", "77",
        "--block-size", "32", "--no-enable-prefix-caching", "--device-memory", "2GiB", "--host-memory", "3GB",
        "--gpu-memory-utilization", "0.5", "--memory-policy", "static", "--resident-experts", "7",
        "--max-boundary-wait", "1.5", "--enforce-eager", "--debug-pool", "--trust-remote-code",
        "--revision", "r",
    )  # fmt: skip
    assert serve.engine_config(args) == EngineConfig(
        model="m", tokenizer="t", dtype="float16", device="cpu", load_format="dummy", seed=3,
        max_model_len=4000, max_num_seqs=9, max_num_batched_tokens=77, block_size=32,
        enable_prefix_caching=False, device_memory=2 * 2**30, host_memory=3 * 10**9,
        gpu_memory_utilization=0.5, memory_policy="static", resident_experts=7,
        max_boundary_wait=1.5, enforce_eager=True, debug_pool=True, trust_remote_code=True, revision="r",
    )  # fmt: skip


def test_objectives_reach_the_engine_in_milliseconds() -> None:
    args = parsed("m", "--memory-policy", "economic", "--ttft-slo", "2000", "--itl-slo", "100.5")
    config = serve.engine_config(args)
    assert (config.memory_policy, config.ttft_slo, config.itl_slo) == ("economic", 2000.0, 100.5)


def test_no_engine_setting_is_without_a_flag() -> None:
    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    assert settings <= vars(parsed("m")).keys()


def test_few_bytes_are_taken_at_their_word_where_the_unit_says_so() -> None:
    assert serve.engine_config(parsed("m", "--device-memory", "24B")).device_memory == 24
    assert serve.engine_config(parsed("m", "--device-memory", "1048576")).device_memory == 1 << 20
    assert serve.server_settings(parsed("m", "--max-body-size", "1000")).max_body_bytes == 1000
    assert parse_size(1000, "device_memory") == 1000


@pytest.mark.parametrize(
    ("text", "count"),
    [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("1m", 10**6), ("1M", 2**20)],
)
def test_counts_are_read_as_the_help_says(text: str, count: int) -> None:
    assert parsed("m", "--max-model-len", text).max_model_len == count


def test_no_flags_mean_the_engine_s_own_defaults() -> None:
    assert serve.engine_config(parsed("m")) == EngineConfig(model="m")
    assert serve.server_settings(parsed("m")).served_names == ["m"]


def test_a_tokenizer_may_go_by_a_name_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rimuru.engine.core.local_models", lambda: {"demo": lambda: tmp_path})
    assert serve.tokenizer_folder("demo") == str(tmp_path)
    assert serve.tokenizer_folder("org/name") == "org/name"
    assert serve.tokenizer_folder(None) is None


def test_keys_are_not_shown_with_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIMURU_API_KEY", "from-the-environment")
    settings = serve.server_settings(parsed("m", "--api-key", "secret"))
    assert settings.api_keys == ["secret", "from-the-environment"]
    assert "secret" not in str(settings.described)


def test_a_taken_port_is_found_out_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = run(capsys, "serve", "no-such-model", "--host", "127.0.0.1", "--port", port)
    assert code == 2
    assert f"--port {port}" in err


def test_a_model_that_is_not_there_ends_with_one_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(capsys, "serve", str(tmp_path / "absent"), "--port", "0")
    assert code != 0
    assert "absent" in err
    assert err.count("\n") < 5


def test_a_missing_server_dependency_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "fastapi" else object())
    code, _, err = run(capsys, "serve", "m")
    assert code == 1
    assert "pip install '.[server]'" in err


def test_chat_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}"):
        code, _, err = run(capsys, "chat", "--url", url, "-m", "hi")
        assert code == 1
        assert "rimuru serve demo" in err


def test_an_error_of_the_package_ends_with_1_and_its_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise RimuruError("the disk is full")

    monkeypatch.setattr(serve, "run", fail)
    assert run(capsys, "serve", "m") == (1, "", "rimuru: the disk is full\n")


def test_sampling_defaults_come_from_the_model_and_then_from_the_flag(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": 2}')
    assert serve.generation_defaults("auto", str(tmp_path), {}) == {"temperature": 0.6, "top_k": 20}
    assert serve.generation_defaults("vllm", str(tmp_path), {}) == {}
    merged = serve.generation_defaults("auto", str(tmp_path), {"temperature": 0.1})
    assert merged == {"temperature": 0.1, "top_k": 20}
    with pytest.raises(RimuruError, match="eos_token_id cannot be set"):
        serve.generation_defaults("auto", str(tmp_path), {"eos_token_id": 3})
    with pytest.raises(RimuruError, match="there is no"):
        serve.generation_defaults(str(tmp_path / "x"), str(tmp_path), {})


def test_a_chat_template_is_a_file_or_a_text_and_is_parsed_at_start(tmp_path: Path) -> None:
    from rimuru.server.prompts import read_template

    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert read_template(str(tmp_path / "t.jinja")) == "{{ messages }}"
    assert read_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(RimuruError, match="no file"):
        read_template("absent.jinja")
    with pytest.raises(RimuruError, match="line 1"):
        read_template("{% for %}")
