"""The engine behind a socket: the same answers, the same errors, and deaths that are noticed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny import oracle, tiny_checkpoint, tiny_prompts

from rimuru.engine import process as process_module
from rimuru.engine.config import EngineConfig
from rimuru.engine.inprocess import InProcessClient
from rimuru.engine.process import ProcessClient
from rimuru.engine.request import FinishReason, SamplingParams, TokenOutput
from rimuru.errors import EngineDeadError, MemoryPlanError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def config(**options: Any) -> EngineConfig:
    path = str(tiny_checkpoint("qwen3_moe"))
    chosen = {
        "dtype": "float32",
        "device": "cpu",
        "device_memory": 100_000_000,
        "max_num_seqs": 16,
        **options,
    }
    return EngineConfig(**{"model": path, **chosen})


def engine(work: Callable[[Any], Coroutine[Any, Any, Any]], client: Any = None) -> Any:
    """Run `work` with a started client, and close it."""

    async def whole() -> Any:
        used = client or ProcessClient(config())
        await used.start()
        try:
            return await work(used)
        finally:
            await used.close()

    return asyncio.run(asyncio.wait_for(whole(), 60))


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[Callable[[Any], Coroutine[Any, Any, Any]]], Any]]:
    """`shared(work)` runs with one started client that the tests of this module share."""
    client = ProcessClient(config())
    with asyncio.Runner() as runner:
        runner.run(client.start())
        yield lambda work: runner.run(asyncio.wait_for(work(client), 60))
        runner.run(client.close())


async def collect(client: Any, name: str, prompt: list[int], params: SamplingParams) -> list[TokenOutput]:
    return [out async for out in client.generate(name, prompt, params)]


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for out in outputs for token in out.tokens]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "it never came to be"
        await asyncio.sleep(0.01)


def test_answers_are_those_of_transformers_and_of_the_engine_on_a_thread(shared: Any) -> None:
    prompts = tiny_prompts()
    params = SamplingParams(
        temperature=0.8, seed=7, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2,
        logit_bias={5: 1.5}, allowed_token_ids=list(range(3, 300)), min_tokens=2, stop_token_ids=[4],
    )  # fmt: skip

    async def work(client: Any) -> Any:
        greedy = await asyncio.gather(*(collect(client, f"g{i}", p, GREEDY) for i, p in enumerate(prompts)))
        return greedy, await collect(client, "rich", prompts[4], params)

    greedy, rich = shared(work)
    expected, _ = oracle(tiny_checkpoint("qwen3_moe"), prompts, 12)
    assert [tokens_of(outs) for outs in greedy] == expected
    assert all(outs[-1].finish is FinishReason.LENGTH for outs in greedy)
    _, other = engine(work, InProcessClient(config()))
    assert rich == other, "every field crosses the socket unchanged"


def test_refusals_name_their_field_and_leave_the_engine_running(shared: Any) -> None:
    async def work(client: Any) -> list[int]:
        for prompt, params, param in (
            ([3] * 600, GREEDY, "prompt"),
            ([3, 10**9], GREEDY, "prompt"),
            ([3, 2**40], GREEDY, "prompt"),
            ([3, "x"], GREEDY, "prompt"),
            ([3], SamplingParams(temperature=-1), "temperature"),
            ([3], SamplingParams(stop=[3]), "stop"),  # type: ignore[list-item]
            ([3], SamplingParams(max_tokens=5000), "max_tokens"),
        ):
            with pytest.raises(RequestError) as caught:
                await collect(client, "bad", prompt, params)
            assert caught.value.param == param
        await client.check_health()
        return tokens_of(await collect(client, "good", [3, 4], GREEDY))

    assert len(shared(work)) == 12


def test_errors_of_loading_keep_their_class_and_words() -> None:
    small = config(device_memory=100_000)
    with pytest.raises(MemoryPlanError) as there:
        engine(nothing, ProcessClient(small))
    with pytest.raises(MemoryPlanError) as here:
        engine(nothing, InProcessClient(small))
    words = [re.sub(r"[\d.]+ \wiB is free", "", str(error.value)) for error in (there, here)]  # it changes
    assert words[0] == words[1]
    assert "what would start" in words[0]


async def nothing(client: Any) -> None:
    return None


def test_a_core_killed_in_mid_decode_fails_every_request_at_once_and_a_new_one_starts_clean() -> None:
    async def work(client: ProcessClient) -> float:
        started = asyncio.Event()

        async def stream(name: str) -> None:
            async for _ in client.generate(name, [3, 4, 5], LONG):
                started.set()

        streams = [asyncio.create_task(stream(f"r{i}")) for i in range(8)]
        await started.wait()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        began = time.monotonic()
        ended = await asyncio.gather(*streams, return_exceptions=True)
        took = time.monotonic() - began
        assert all(isinstance(e, EngineDeadError) and "SIGKILL" in str(e) for e in ended)
        for call in (client.check_health, client.stats, client.reset_prefix_cache):
            with pytest.raises(EngineDeadError):
                await call()
        with pytest.raises(EngineDeadError):
            await collect(client, "late", [3], GREEDY)
        return took

    client = ProcessClient(config())
    assert engine(work, client) < 2.0
    assert not Path(client._folder).exists()

    async def again(client: ProcessClient) -> list[int]:
        return tokens_of(await collect(client, "g", tiny_prompts()[3], GREEDY))

    assert [engine(again)] == oracle(tiny_checkpoint("qwen3_moe"), [tiny_prompts()[3]], 12)[0]


def test_the_core_ends_when_its_parent_is_killed_in_mid_decode() -> None:
    script = (
        "import asyncio, sys\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from engine.test_process import ProcessClient, config, LONG\n"
        "async def main():\n"
        "    client = ProcessClient(config())\n"
        "    await client.start()\n"
        "    async for _ in client.generate('r', [3, 4], LONG):\n"
        "        print(client.pid, client._folder, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *sys.path[:1], str(Path(__file__).parents[1])],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while _runs(int(pid)):
        assert time.monotonic() < end, "the core outlived its parent"
        time.sleep(0.02)
    assert not Path(folder).exists()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_core_whose_loop_raises_says_why() -> None:
    async def work(client: ProcessClient) -> None:
        client._send(process_module.wire.Call(0, "no_such_method"))
        future = client._calls[0] = asyncio.get_running_loop().create_future()
        with pytest.raises(RuntimeError, match="AttributeError"):
            await future
        client._outbox.send(b"\xc1 no message at all")
        with pytest.raises(EngineDeadError, match="DecodeError"):
            await collect(client, "r", [3], LONG)

    engine(work)


def test_a_core_that_hangs_is_reported_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "STALL_SECONDS", 0.2)

    async def work(client: ProcessClient) -> None:
        assert client.pid is not None
        await client.check_health()
        assert (await client.stats()).experts_total > 0
        os.kill(client.pid, signal.SIGSTOP)  # stands for a step that never ends
        began = time.monotonic()
        snapshot = await client.stats()
        assert snapshot.experts_total > 0, "a busy core does not keep /metrics waiting"
        assert time.monotonic() - began < 2
        await client.check_health()
        await asyncio.sleep(0.3)
        with pytest.raises(EngineDeadError, match="one step"):
            await client.check_health()
        with pytest.raises(EngineDeadError):
            await collect(client, "r", [3], GREEDY)

    client = ProcessClient(config())
    engine(work, client)
    assert client.pid is not None
    assert not _runs(client.pid)


def test_samples_of_finished_requests_are_handed_over_once(shared: Any) -> None:
    async def work(client: ProcessClient) -> None:
        await client.stats()
        await collect(client, "r", [3, 4], GREEDY)
        assert [s.output_tokens for s in (await client.stats()).finished] == [12]
        assert not (await client.stats()).finished

    shared(work)


def test_closing_an_iterator_frees_its_pages(shared: Any) -> None:
    async def work(client: ProcessClient) -> None:
        before = (await client.stats()).pool.bytes_by["kv", "used"]
        stream = client.generate("r", [3] * 40, LONG)
        await anext(stream)
        assert (await client.stats()).running == 1
        await stream.aclose()
        await until(lambda: _idle(client))
        assert (await client.stats()).pool.bytes_by["kv", "used"] == before

    async def _idle(client: ProcessClient) -> bool:
        return (await client.stats()).running == 0

    shared(work)
