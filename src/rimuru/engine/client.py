"""How a front end talks to an engine, wherever the engine runs.

Room: the seam between servers and the core. Rule: token ids and plain data cross it, never text,
tensors or tokenizers; every implementation behaves the same, in-process or across a socket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from .request import SamplingParams, TokenOutput
from .stats import EngineStats


@dataclass(slots=True)
class EngineInfo:
    """What a front end must know to admit requests and answer `/v1/models`."""

    model: str  # as the user named it
    model_path: str  # folder with config and tokenizer
    max_model_len: int  # tokens, prompt and output together
    max_request_tokens: int  # reachable capacity: no request above it can ever be placed
    vocab_size: int
    eos_ids: frozenset[int]
    dtype: str
    device: str
    memory_policy: str
    plan: str = ""  # the memory table printed at start
    details: dict[str, object] = field(default_factory=dict)


class EngineClient(Protocol):
    """One engine. Safe to use from one asyncio loop."""

    info: EngineInfo

    def generate(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[TokenOutput]:
        """Tokens as they come; the last output carries `finish`.

        `params.n` is ignored: a front end sends n requests. Raises `RequestError` before the first
        output where the request can never be served, `EngineDeadError` when the engine stops.
        Closing the iterator aborts the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; unknown or finished ids are ignored. Its pages are free within one step."""
        ...

    async def stats(self) -> EngineStats: ...

    async def reset_prefix_cache(self) -> bool: ...

    async def check_health(self) -> None:
        """Raise `EngineDeadError` unless the engine's loop answers."""
        ...

    async def close(self) -> None: ...
