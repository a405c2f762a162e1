"""The OpenAPI description: its limits are the server's, and nothing it lets through is the server's fault."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rimuru.models.tokenizer import Tokenizer
from rimuru.server.frontend import Frontend
from rimuru.server.prompts import Prompts
from rimuru.server.protocol import ChatBody, CompletionBody
from rimuru.server.settings import ServerSettings
from server.conftest import Live, listening
from server.stub_engine import StubEngine
from server.test_end_to_end import Served, start

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
WITH = {"top_logprobs": {"logprobs": True}, "max_tokens": {"echo": True}}
LONGEST = 512  # of the stub: counts of tokens end there, not at the description's 64 bits


def limits() -> list[tuple[str, str, str, float]]:
    """Every limit in the description: route, field, keyword, value."""
    out = []
    for path, body in zip(BASES, (ChatBody, CompletionBody), strict=True):
        for name, field in body.model_json_schema()["properties"].items():
            for branch in (field, *field.get("anyOf", ())):
                out += [
                    (path, name, key, branch[key]) for key in branch if "inimum" in key or "aximum" in key
                ]
    return out


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    engine = StubEngine(max_model_len=LONGEST)
    frontend = Frontend(engine, Prompts(tokenizer, engine.info), ServerSettings(["stub"]))
    with listening(frontend, engine) as live:
        yield live


@pytest.mark.parametrize(("path", "name", "keyword", "limit"), limits())
def test_a_limit_in_the_description_is_where_the_server_draws_it(
    live: Live, path: str, name: str, keyword: str, limit: float
) -> None:
    up = 1 if "aximum" in keyword else -1
    beyond = limit if "exclusive" in keyword else limit + up * (1 if isinstance(limit, int) else 1e-6)
    with_it = WITH.get(name, {}) if path.endswith("/v1/completions") or name == "top_logprobs" else {}
    base = {"max_tokens": 2, **BASES[path], **with_it}
    answer = live.post(path, {**base, name: beyond})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name
    reachable = not (name.endswith("_tokens") and abs(limit) > LONGEST)
    if reachable and "exclusive" not in keyword:
        assert live.post(path, {**base, name: limit}).status_code == 200


def fuzz(served: Served, folder: Path, seconds: int, phases: str) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is missing")
    command = ["-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--checks",
               "not_a_server_error", "--phases", phases, "--max-time", str(seconds), "--seed", "1",
               "--no-color", "--warnings", "off"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=seconds + 120
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert served.process.poll() is None


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # Short outputs and every optional way in, so that much is tried in little time.
    served = start("--max-model-len", "64", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
                   "--trust-request-chat-template")  # fmt: skip
    yield served
    served.process.kill()
    served.process.wait()


def test_generated_requests_never_are_the_server_s_fault(served: Served, tmp_path: Path) -> None:
    fuzz(served, tmp_path, 8, "fuzzing")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_generated_requests_never_are_the_server_s_fault(served: Served, tmp_path: Path) -> None:
    fuzz(served, tmp_path, 100, "coverage,fuzzing")
