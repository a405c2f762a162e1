"""Bodies of requests: every field of the OpenAI API and of vLLM's additions that clients send.

Room: what the server accepts. Rule: a field has its effect or is refused by name with what would work;
wrong types are refused; unknown fields are accepted and logged once.

Answers are built as plain dicts where they are made (`chat.py`, `completions.py`), because a streamed
token must not pass through a model class.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rimuru.engine.request import MAX_COUNT, MAX_LOGPROBS, MAX_SEED, SamplingParams
from rimuru.errors import RequestError

from .errors import ApiError
from .structured import grammar_of

log = logging.getLogger("rimuru.server")


def _whole(value: Any) -> Any:
    """4.0 is a whole number, as JSON (and vLLM) has it; 4.5, "4" and true are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
# What crosses to the engine as a 64-bit number; narrower limits are the engine's to name.
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), le=2**63 - 1)]


def _limits(**keywords: float) -> Any:
    """Limits for the OpenAPI description; `SamplingParams.check` holds requests to them, in its own words."""
    return Field(json_schema_extra=dict(keywords))


Tokens = Annotated[Whole | None, _limits(minimum=1)]
Logprobs = Annotated[Int | None, _limits(minimum=0, maximum=MAX_LOGPROBS)]
Penalty = Annotated[float | None, _limits(minimum=-2, maximum=2)]

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # a model may suggest these


class Body(BaseModel):
    """Base of all bodies: strict types, unknown fields kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @classmethod
    def read(cls, raw: bytes) -> Any:
        """Parse and check one body; `ApiError` 400 names the first field that is wrong."""
        try:
            body = cls.model_validate_json(raw or b"{}")
        except ValidationError as exc:
            raise _explain(exc) from None
        _note_unknown(body)
        return body


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What chat and completions share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[Int | None, _limits(minimum=1, maximum=128)] = 1
    temperature: Annotated[float | None, _limits(minimum=0, maximum=100)] = None
    top_p: Annotated[float | None, _limits(exclusiveMinimum=0, maximum=1)] = None
    seed: Annotated[Int | None, _limits(minimum=-MAX_SEED - 1, maximum=MAX_SEED)] = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, float] | None = None
    max_tokens: Tokens = None
    user: str | None = None  # a label of the client's; nothing here depends on it

    top_k: Annotated[Int | None, _limits(minimum=-1, maximum=MAX_COUNT)] = None
    min_p: Annotated[float | None, _limits(minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[float | None, _limits(minimum=0.01, maximum=100)] = None
    ignore_eos: bool = False
    min_tokens: Annotated[Whole, _limits(minimum=0)] = 0
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: Annotated[Whole | None, _limits(minimum=-1)] = None
    prompt_logprobs: Logprobs = None
    allowed_token_ids: list[int] | None = None
    priority: Whole = 0
    cache_salt: str | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=128)
    return_token_ids: bool | None = False

    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    response_format: dict[str, Any] | None = None

    # Named so that they are refused instead of passed over.
    use_beam_search: bool | None = False
    best_of: Int | None = None
    logits_processors: Any = None
    bad_words: list[str] | None = None
    return_tokens_as_token_ids: bool | None = False
    kv_transfer_params: Any = None

    def refuse_unserved(self) -> None:
        """Raise for fields that cannot have their effect here."""
        if self.use_beam_search:
            raise RequestError(
                "use_beam_search is not supported; use n with a temperature", "use_beam_search"
            )
        if self.best_of not in (None, self.n or 1):
            raise RequestError("best_of is not supported beyond n; ask for n choices", "best_of")
        if self.logits_processors:
            raise RequestError(
                "logits_processors are not supported; logit_bias and allowed_token_ids are",
                "logits_processors",
            )
        if self.bad_words:
            raise RequestError("bad_words is not supported; logit_bias of -100 bans a token", "bad_words")
        if self.return_tokens_as_token_ids:
            raise RequestError(
                "return_tokens_as_token_ids is not supported; return_token_ids adds them as numbers",
                "return_tokens_as_token_ids",
            )
        if self.kv_transfer_params:
            raise RequestError(
                "kv_transfer_params is not supported: KV cache is not moved between servers",
                "kv_transfer_params",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed; set stream: false", "prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, defaults: dict[str, Any]
    ) -> SamplingParams:
        """Parameters of one choice; what the client left out comes from `defaults`, then from ours."""
        chosen = {name: getattr(self, name) for name in DEFAULTS if getattr(self, name) is not None}
        return SamplingParams(
            n=1 if self.n is None else self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stop_token_ids=self.stop_token_ids or [],
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logit_bias=self._biases(),
            allowed_token_ids=self.allowed_token_ids,
            grammar=grammar_of(self),
            **{**defaults, **chosen},
        )

    def _biases(self) -> dict[int, float] | None:
        try:
            return {int(token): bias for token, bias in self.logit_bias.items()} if self.logit_bias else None
        except ValueError:
            raise RequestError("logit_bias keys must be token ids", "logit_bias") from None


# What a message looks like at the least, for the OpenAPI description; `Prompts` reads them.
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
    },
}


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]] = Field(min_length=1, json_schema_extra={"items": MESSAGE})
    max_completion_tokens: Tokens = None
    logprobs: bool | None = False
    top_logprobs: Logprobs = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False
    echo: bool | None = False
    audio: Any = None
    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None

    def refuse_unserved(self) -> None:
        super().refuse_unserved()
        if self.echo:
            raise RequestError("echo belongs to /v1/completions", "echo")
        if self.functions is not None:
            raise RequestError("functions is not supported; it was replaced by tools", "functions")
        if self.function_call is not None:
            raise RequestError(
                "function_call is not supported; it was replaced by tool_choice", "function_call"
            )
        if self.audio is not None:
            raise RequestError("audio is not supported: only text is generated here", "audio")
        if any(mode != "text" for mode in self.modalities or ()):
            raise RequestError("only text is generated here", "modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools the model may call."""
        return self.tools if self.tool_choice != "none" else None

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs must be from 0 to {MAX_LOGPROBS}", "top_logprobs")
        return self.sampling(limit, (self.top_logprobs or 0) if self.logprobs else None, defaults)


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[Whole | None, _limits(minimum=0)] = 16
    logprobs: Logprobs = None
    echo: bool | None = False
    suffix: str | None = None
    add_special_tokens: bool = True
    prompt_embeds: Any = None

    def refuse_unserved(self) -> None:
        super().refuse_unserved()
        if self.suffix:
            raise RequestError(
                "suffix is not supported: this server continues a prompt, it fills no gap", "suffix"
            )
        if self.prompt_embeds is not None:
            raise RequestError("prompt_embeds are not supported; send text or token ids", "prompt_embeds")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 needs echo: true", "max_tokens")

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        # The prompt's own log-probabilities need one step of the model, so one token is made and left out.
        params = self.sampling(1 if self.max_tokens == 0 else self.max_tokens, self.logprobs, defaults)
        if self.echo and self.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = self.logprobs
        return params

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt, text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt must not be empty", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def _explain(exc: ValidationError) -> ApiError:
    """The first complaint, in the client's terms."""
    first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return ApiError(400, "The body must be a JSON object")
    # Branches of a union complain each on their own; together they say what would be accepted.
    field = str(first["loc"][0])
    complaints = [e for e in exc.errors(include_url=False) if e["loc"] and e["loc"][0] == field]
    if len(complaints) > 1:
        reasons = list(dict.fromkeys(e["msg"] for e in complaints))
        return ApiError(400, f"{field}: {'; or '.join(reasons[:4])}", field)
    place = ".".join(map(str, first["loc"]))
    return ApiError(400, f"{place}: {first['msg']}", field)


_unknown_seen: set[str] = set()


def _note_unknown(body: Body) -> None:
    fresh = set(body.model_extra or ()) - _unknown_seen
    if fresh and len(_unknown_seen) < 1000:
        _unknown_seen.update(fresh)
        log.warning("fields without effect here, ignored: %s", ", ".join(map(repr, sorted(fresh))))
