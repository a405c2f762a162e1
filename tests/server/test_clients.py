"""Clients written for other servers, unchanged, against a real server with a real, tiny model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import oracle_logits, tiny_checkpoint, tiny_tokenizer

from server.test_end_to_end import Served, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = start()
    yield served
    served.process.kill()
    served.process.wait()


def test_litellm_completes_streams_and_maps_errors(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it fetches a price list
    litellm = pytest.importorskip("litellm", reason="litellm is missing")
    common: dict[str, Any] = {
        "api_base": f"{served.url}/v1",
        "api_key": "none",
        "max_tokens": 20,
        "temperature": 0,
    }
    for provider in ("hosted_vllm", "openai"):
        asked = {"model": f"{provider}/tiny", **common}
        whole = litellm.completion(messages=HI, **asked)
        assert whole.usage.completion_tokens <= 20
        pieces = list(
            litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **asked)
        )
        text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert text == whole.choices[0].message.content
        with pytest.raises(litellm.BadRequestError):
            litellm.completion(messages=HI, **{**asked, "max_tokens": 10**6})
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(messages=HI, **{**asked, "model": f"{provider}/other"})


def test_litellm_passes_tools_and_formats_through(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="litellm is missing")
    pytest.importorskip("xgrammar", reason="xgrammar is missing")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "vote", "parameters": schema}}
    answer = litellm.completion(
        model="hosted_vllm/tiny", api_base=f"{served.url}/v1", api_key="none", messages=HI, max_tokens=200,
        tools=[tool], tool_choice={"type": "function", "function": {"name": "vote"}},
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["ok"], bool)


def test_lm_eval_s_loglikelihoods_are_those_of_transformers(served: Served) -> None:
    models = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval is missing")
    from lm_eval.api.instance import Instance

    path = tiny_checkpoint("qwen3_moe")
    model = models.LocalCompletionsAPI(
        model="tiny", base_url=f"{served.url}/v1/completions", tokenizer=str(path),
        tokenizer_backend="huggingface", num_concurrent=1, batch_size=3, max_length=400,
    )  # fmt: skip
    pairs = [
        ("Pamo ruli te", " steka"),
        ("Du", " na bo"),
        ("Tre lo mi sa", " kira"),
        ("Be", " sto"),
        ("Ka di", "!"),
    ]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = model.loglikelihood(requests)
    encode = tiny_tokenizer().encode
    for (context, more), (logprob, greedy) in zip(pairs, found, strict=True):
        whole, start_at = encode(context + more), len(encode(context))
        rows = torch.log_softmax(oracle_logits(path, whole)[:-1], -1)[start_at - 1 :]
        target = torch.tensor(whole[start_at:])
        expected = rows.gather(1, target[:, None]).sum().item()
        # Float32 on both sides in another order of summation: logits of about 10 agree to 1e-5 or so.
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert greedy == bool((rows.argmax(-1) == target).all())


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_completes_every_request(served: Served, tmp_path: Path, route: str) -> None:
    if importlib.util.find_spec("guidellm") is None:
        pytest.skip("guidellm is missing")
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={served.url},model=tiny,request_format={route}",
        "--tokenizer", f"kind=huggingface_auto,model={tiny_checkpoint('qwen3_moe')}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)
