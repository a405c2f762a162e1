"""What `rimuru serve` chooses besides the engine.

Room: plain data of the server. Rule: needs nothing that is not in the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ServerSettings:
    """How to answer HTTP. Times in seconds, sizes in bytes."""

    served_names: list[str]
    api_keys: list[str] = field(default_factory=list)
    max_queue: int | None = None  # requests waiting for their first token; beyond: 429
    max_body_bytes: int = 64 * 2**20
    request_timeout: float | None = None  # a request that takes longer ends with 504
    stream_interval: int = 1  # tokens gathered into one chunk after the first
    honour_priority: bool = True
    default_sampling: dict[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    tool_parser: str | None = None  # a name of `parsers.TOOL_STYLES`
    reasoning_parser: str | None = None  # a name of `parsers.REASONING_STYLES`
    log_requests: bool = False
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    described: dict[str, Any] = field(default_factory=dict)  # shown by /server_info
