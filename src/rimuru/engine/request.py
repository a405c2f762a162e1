"""A request, from the client's parameters to the tokens that come back.

Room: plain data of the engine. Rule: no torch and no tokenizer here; the scheduler, the simulator
and the server all share these types.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from rimuru.errors import RequestError

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1  # of what kernels hold as int32


def _number(name: str, value: object, low: float, high: float, low_open: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < low or value > high or (low_open and value == low):  # type: ignore[operator]
        opening = "(" if low_open else "["
        raise RequestError(f"{name} must be a number in {opening}{low:g}, {high:g}], got {value!r}", name)


def _count(name: str, value: object, low: int, high: int | None = None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {limit}, got {value!r}", name)


def _ids(name: str, value: object, top: int | None) -> None:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list of token ids, got {value!r}", name)
    for token in value:
        _count(name, token, 0, top)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output has to look like, in words; the engine compiles it.

    `kind` is "json_schema" (`text`: the schema as JSON), "regex", "choice" (`text`: a JSON list of strings)
    or "grammar" (`text`: EBNF with a rule `root`). With `after`, token ids, the output is free until those
    ids have come (the end of a reasoning). `param` names the client's field in errors.
    """

    kind: str
    text: str
    after: tuple[int, ...] = field(default=(), compare=False)
    param: str | None = field(default=None, compare=False)


GRAMMAR_KINDS = ("json_schema", "regex", "choice", "grammar")


@dataclass(slots=True)
class SamplingParams:
    """How to choose each next token. Names and defaults follow the OpenAI and vLLM parameters.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch those filters off.
    `logprobs` k returns the sampled token's log-probability and the k likeliest, from the raw
    logits; `prompt_logprobs` the same for every prompt token but the first. `max_tokens` None
    means up to the model's length. Call `check()` before use: it raises `RequestError`.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    grammar: Grammar | None = None

    @property
    def penalised(self) -> bool:
        """Whether tokens seen before change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def check(self, vocab_size: int | None = None) -> None:
        """Raise `RequestError` naming the first field that cannot be honoured."""
        _count("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _count("max_tokens", self.max_tokens, 1)
        _count("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens"
            )
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _count("top_k", self.top_k, -1, MAX_COUNT)
        _number("min_p", self.min_p, 0.0, 1.0)
        # A factor near 0 would make infinities of the logits, and no choice could be told from another.
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _count("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.stop, list) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop must be a list of non-empty strings, got {self.stop!r}", "stop")
        top = None if vocab_size is None else vocab_size - 1
        _ids("stop_token_ids", self.stop_token_ids, top)
        if self.allowed_token_ids is not None:
            _ids("allowed_token_ids", self.allowed_token_ids, top)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        if not isinstance(self.logit_bias, dict | None):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}", "logit_bias"
            )
        for token, bias in (self.logit_bias or {}).items():
            _count("logit_bias", token, 0, top)
            _number("logit_bias", bias, -100.0, 100.0)
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_grammar(self, grammar: Grammar) -> None:
        if grammar.kind not in GRAMMAR_KINDS:
            raise RequestError(
                f"a grammar is one of {', '.join(GRAMMAR_KINDS)}, not {grammar.kind!r}", grammar.param
            )
        # The grammar alone decides where the output may end and what it may hold: a second word in that
        # could leave no token at all.
        for name, given in (
            ("ignore_eos", self.ignore_eos),
            ("min_tokens", self.min_tokens > 0),
            ("allowed_token_ids", self.allowed_token_ids is not None),
        ):
            if given:
                raise RequestError(f"{name} cannot go with constrained output; leave one of them out", name)


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's length reached
    ABORT = "abort"  # the client left or asked for it
    ERROR = "error"  # this request alone failed; `TokenOutput.error` says why


class Phase(enum.IntEnum):
    WAITING = 0  # queued, nothing allocated
    RUNNING = 1  # holds a slot and pages
    PREEMPTED = 2  # queued again; its computed tokens were dropped
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """Core-side state of one sequence: `num_computed` tokens catch up with `num_tokens`.

    There is no prefill or decode phase. `tokens` holds prompt and output ids together;
    `num_computed` counts those whose KV is in the cache (or reused from it), or will be when the steps
    launched so far have ended.
    """

    request_id: str
    tokens: list[int]
    params: SamplingParams
    max_tokens: int  # output limit after the model's length was applied
    stop_ids: frozenset[int] = frozenset()  # ids that end the sequence (eos unless ignored, stop_token_ids)
    eos_ids: frozenset[int] = frozenset()  # the eos subset: reported as a stop without a stop_reason
    arrival: float = 0.0  # seconds on the engine's clock
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    num_prompt: int = 0
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens that came from the prefix cache at first admission
    phase: Phase = Phase.WAITING
    slot: int = -1  # row of the device tables while running
    block_keys: list[bytes] = field(default_factory=list)  # prefix-cache keys of full blocks so far
    preemptions: int = 0
    unknown: int = 0  # placeholders at the end of `tokens`: sampled by steps still under way
    constraint: Any = None  # how far its grammar has come; kept across preemptions like the tokens
    seed: int | None = None  # of this request's draws; chosen at its first step where the client gave none
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        if not self.num_prompt:
            self.num_prompt = len(self.tokens)

    def check(self) -> None:
        """Raise `RequestError` for what would stop the step of every other request later on."""
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RequestError(f"priority must be a whole number, got {self.priority!r}", "priority")
        try:
            self.cache_salt.encode()
        except (AttributeError, UnicodeEncodeError):
            raise RequestError(
                f"cache_salt must be valid text, got {self.cache_salt!r}", "cache_salt"
            ) from None
        allowed = self.params.allowed_token_ids
        if self.params.min_tokens and allowed is not None and self.stop_ids.issuperset(allowed):
            raise RequestError(
                f"min_tokens {self.params.min_tokens}: each of the allowed_token_ids ends the output, so "
                "nothing can come before; allow one more token or set min_tokens to 0",
                "min_tokens",
            )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens that are known."""
        return len(self.tokens) - self.unknown - self.num_prompt

    @property
    def sequential(self) -> bool:
        """Whether the host must know each token before the step that chooses the next."""
        p = self.params
        return self.constraint is not None or p.penalised

    def forget_unknown(self) -> None:
        """Drop the placeholders; the steps that were to fill them no longer count."""
        if self.unknown:
            del self.tokens[-self.unknown :]
            self.unknown = 0


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, its rank (1 = likeliest) and the top k."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class TokenOutput:
    """What one step added to one request: token ids only, text is made by the front end."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    error: str | None = None
    error_param: str | None = None  # set where the request itself was wrong: the field (HTTP 400)
