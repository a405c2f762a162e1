"""The `rimuru serve` command with a real, tiny model in its own process, and the clients on its socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

from rimuru import cli

FLAGS = ["--host", "127.0.0.1", "--port", "0", "--dtype", "float32", "--device", "cpu", "--device-memory",
         "100MB", "--max-num-seqs", "16", "--served-model-name", "tiny"]  # fmt: skip


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def kv_used(self) -> int:
        return httpx.get(f"{self.url}/rimuru/pool", timeout=20).json()["kinds"]["kv"]["used"]["bytes"]


def start(*flags: str) -> Served:
    path = str(tiny_checkpoint("qwen3_moe"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rimuru.cli", "serve", path, *FLAGS, *flags],
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        found = re.search(r"at (http://\S+)/v1", line)
        if found:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # keeps the pipe empty
            return Served(process, found[1])
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for the whole module, because it takes seconds to start; the last test ends it."""
    served = start()
    yield served
    served.process.kill()
    served.process.wait()


def test_greedy_answers_over_http_are_those_of_transformers(served: Served) -> None:
    prompts = tiny_prompts()
    expected, _ = oracle(tiny_checkpoint("qwen3_moe"), prompts, 12)
    body = {
        "prompt": prompts,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == expected


def test_streamed_and_whole_answers_are_the_same_text(served: Served) -> None:
    create = served.openai().chat.completions.create
    messages = [{"role": "user", "content": "Gruß aus 東京 🙂"}]
    whole = create(model="tiny", messages=messages, max_tokens=40, temperature=0)
    chunks = create(model="tiny", messages=messages, max_tokens=40, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 5


def test_seeded_choices_repeat(served: Served) -> None:
    def texts() -> list[str]:
        answer = served.openai().completions.create(
            model="tiny", prompt="the of", n=3, seed=5, max_tokens=10, temperature=1.0
        )
        return [choice.text for choice in answer.choices]

    first = texts()
    assert texts() == first
    assert len(set(first)) > 1


def test_pages_return_when_a_client_leaves(served: Served) -> None:
    before = served.kv_used()
    stream = served.openai().completions.create(
        model="tiny", prompt="the of", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert served.kv_used() > before
    stream.close()
    end = time.monotonic() + 2
    while served.kv_used() != before:
        assert time.monotonic() < end, "the pages did not come back"


def test_health_and_metrics_speak_of_the_engine(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").status_code == 200
    text = httpx.get(f"{served.url}/metrics").text
    made = re.search(r'vllm:generation_tokens_total{engine="0",model_name="tiny"} (\S+)', text)
    assert made
    assert float(made[1]) > 0
    sizes = [float(v) for v in re.findall(r"^rimuru_pool_bytes{\S+} (\S+)$", text, re.MULTILINE)]
    pool = re.search(r"^rimuru_pool_size_bytes (\S+)$", text, re.MULTILINE)
    assert pool
    assert sum(sizes) == float(pool[1])


def test_constrained_output_parses_and_a_bad_grammar_is_a_400_that_stalls_nobody(served: Served) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is missing")
    create = served.openai().chat.completions.create
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 150,
    }
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for seed in range(3):
        said = create(**asked, seed=seed, response_format=format_).choices[0].message.content
        assert json.loads(said)["n"] in range(10)
    pieces = create(**asked, stream=True, extra_body={"structured_outputs": {"choice": ["ja", "nein"]}})
    assert "".join(p.choices[0].delta.content or "" for p in pieces) in ("ja", "nein")

    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("required", named):
        answer = create(**asked, tools=[tool], tool_choice=choice, parallel_tool_calls=False).choices[0]
        (call,) = answer.message.tool_calls
        assert (call.function.name, answer.finish_reason) == ("add", "tool_calls")
        assert json.loads(call.function.arguments)["n"] in range(10)

    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="Unclosed") as caught:
            create(**asked, stream=stream, extra_body={"guided_regex": "[a-"})
        assert caught.value.param == "guided_regex"
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_the_terminal_chat_prints_the_answer_and_keeps_the_conversation(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--url", served.url, "--max-tokens", "8", "--temperature", "0"]
    assert cli.main(["chat", *options, "-m", "hi"]) == 0
    once = capsys.readouterr().out
    assert once.strip()
    lines = iter(["hi", "/undo", "hi", "again", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    assert cli.main(["chat", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(once + once), "the same turn after /undo has the same answer"
    assert len(printed) > 2 * len(once)


def test_the_terminal_chat_shows_the_server_s_refusal(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", "--url", served.url, "-m", "hi", "--model", "other"]) == 1
    assert "the server answered 404: The model 'other' does not exist" in capsys.readouterr().err


def spawned_by(pid: int) -> list[int]:
    """Child processes that run Python code of the parent's, not multiprocessing's helpers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def test_the_engine_has_a_process_and_its_death_ends_the_server_with_an_error_for_everyone() -> None:
    served = start()
    (core,) = spawned_by(served.process.pid)
    chunks = served.openai().completions.create(
        model="tiny", prompt="the of", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(chunks))
    os.kill(core, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(openai.APIError, match="SIGKILL"):
        list(chunks)
    assert time.monotonic() - began < 5
    assert served.process.wait(10) == 1


def test_sigterm_lets_a_stream_end_and_exits_with_0(served: Served) -> None:
    chunks = served.openai().completions.create(
        model="tiny", prompt="the of", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(chunks))
    served.process.send_signal(signal.SIGTERM)
    assert list(chunks)[-1].choices[0].finish_reason == "length"
    assert served.process.wait(20) == 0
