"""An engine without a model, for tests of what lies above the engine: it keeps `EngineClient`'s contract.

It streams scripted or pseudo-random tokens, honours stop ids, limits and aborts, refuses, dies, fails
one request and is as slow as it is told to be.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

from rimuru.engine.client import EngineInfo
from rimuru.engine.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from rimuru.engine.stats import EngineStats, PoolStats
from rimuru.errors import EngineDeadError, RequestError

EOS = 2


def random_tokens(prompt: list[int], params: SamplingParams, vocab_size: int) -> list[int]:
    rng = random.Random(f"{prompt}{params.seed}")
    return [rng.randrange(3, vocab_size) for _ in range(params.max_tokens or 64)]


class StubEngine:
    """`answer(prompt, params)` gives the tokens of a request; an `EOS` among them ends it."""

    def __init__(
        self,
        vocab_size: int = 640,
        max_model_len: int = 512,
        answer: Callable[[list[int], SamplingParams], list[int]] | None = None,
        delay: float = 0.0,
    ):
        self.info = EngineInfo(
            model="models/stub", model_path="models/stub", max_model_len=max_model_len,
            max_request_tokens=max_model_len, vocab_size=vocab_size, eos_ids=frozenset({EOS}),
            dtype="float32", device="cpu", memory_policy="reactive", plan="", details={"block_size": 16},
        )  # fmt: skip
        self.answer = answer or (lambda prompt, params: random_tokens(prompt, params, vocab_size))
        self.delay = delay
        self.hold = asyncio.Event()  # cleared: requests wait in the queue
        self.hold.set()
        self.dead = False
        self.fail_with: str | None = None
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.seen: list[tuple[str, list[int], SamplingParams, int, str]] = []
        self.tokens_made = 0
        self.resets = 0
        self._stopping: set[str] = set()

    async def generate(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[TokenOutput]:
        if self.dead:
            raise EngineDeadError("the stub is dead")
        if len(tokens) + (params.max_tokens or 1) > self.info.max_request_tokens:
            raise RequestError("The request needs more than the reachable capacity", "max_tokens")
        self.seen.append((request_id, tokens, params, priority, cache_salt))
        self.running.add(request_id)
        finished = False
        try:
            await self.hold.wait()
            made = self.answer(tokens, params)[: params.max_tokens or self.info.max_model_len - len(tokens)]
            for i, token in enumerate(made):
                await asyncio.sleep(self.delay)
                if self.dead:
                    raise EngineDeadError("the stub died")
                out = TokenOutput(request_id, [token])
                if request_id in self._stopping:
                    out.tokens, out.finish = [], FinishReason.ABORT
                elif self.fail_with:
                    out.tokens, out.finish, out.error = [], FinishReason.ERROR, self.fail_with
                elif token in params.stop_token_ids:
                    out.finish, out.stop_reason = FinishReason.STOP, token
                elif token == EOS and not params.ignore_eos:
                    out.finish = FinishReason.STOP
                elif i == len(made) - 1:
                    out.finish = FinishReason.LENGTH
                if i == 0:
                    out.num_cached = len(tokens) // 2
                    if params.prompt_logprobs is not None:
                        k = params.prompt_logprobs
                        out.prompt_logprobs = [None, *(logprobs_of(t, k) for t in tokens[1:])]
                if params.logprobs is not None:
                    out.logprobs = [logprobs_of(t, params.logprobs) for t in out.tokens]
                self.tokens_made += len(out.tokens)
                finished = out.finish is not None
                yield out
                if finished:
                    return
        finally:
            self.running.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self._stopping.add(request_id)

    async def stats(self) -> EngineStats:
        pool = PoolStats(
            3 * 4096,
            {("kv", "used"): 4096, ("expert", "resident"): 8192},
            {("kv", "used"): 1, ("expert", "resident"): 2},
        )
        return EngineStats(
            running=len(self.running), pool=pool, generation_tokens=self.tokens_made, steps=self.tokens_made,
            boundary_moves={("reactive", "admission", "lend"): 3}, preemptions={"memory": 1}, experts_total=8,
        )  # fmt: skip

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("the stub is dead")

    async def close(self) -> None:
        self.dead = True


def logprobs_of(token: int, k: int) -> TokenLogprobs:
    """The token itself is likeliest, the next ids follow."""
    top = [token + i for i in range(k)]
    return TokenLogprobs(token, -0.5, 1, top, [-0.5 - i for i in range(k)])
