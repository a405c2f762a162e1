"""`POST /v1/completions`: prompts in, their continuations out, with echo and log-probabilities.

Room: one endpoint. Rule: choices are numbered prompt by prompt (`index // n` is the prompt); a
streamed token is a prepared template around one escaped string.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from json.encoder import encode_basestring as quote
from typing import Any

from rimuru.errors import RequestError

from .chat_completions import dumps
from .frontend import Delta, Frontend, Job
from .logprobs import CompletionLogprobs, prompt_table
from .protocol import CompletionBody

MAX_SEQUENCES = 4096  # prompts times n of one request


class CompletionJob(Job):
    """A job that remembers the prompts' texts, for echo."""

    texts: list[str | None]  # None where the prompt came as token ids


async def start_completion(frontend: Frontend, body: CompletionBody, request_id: str | None) -> CompletionJob:
    """Check the body and turn it into a job; nothing runs yet."""
    model = frontend.admit(body.model, body.priority)
    body.refuse_unserved()
    params = body.params(frontend.settings.default_sampling)
    params.check(frontend.info.vocab_size)
    prompts = body.prompts()
    if len(prompts) * params.n > MAX_SEQUENCES:
        raise RequestError(f"At most {MAX_SEQUENCES} choices in one request (prompts times n)", "prompt")
    encoded = []
    for prompt in prompts:
        tokens = (
            await frontend.prompts.encode(prompt, body.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        encoded.append(
            frontend.prompts.check(tokens, params.max_tokens, body.truncate_prompt_tokens, "prompt")
        )
    job = CompletionJob(
        frontend,
        "cmpl",
        encoded,
        params,
        model=model,
        request_id=body.request_id or request_id,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
    )
    truncated = body.truncate_prompt_tokens is not None
    job.texts = [p if isinstance(p, str) and not truncated else None for p in prompts]
    return job


class _Choice:
    """What a choice needs across its deltas: the echoed prompt, and running offsets."""

    def __init__(self, job: CompletionJob, body: CompletionBody, index: int):
        self.job, self.body = job, body
        self.prompt = index // job.params.n
        self.logprobs = CompletionLogprobs(job.frontend.vocabulary) if body.logprobs is not None else None
        self.fresh = True

    def text(self, delta: Delta) -> str:
        """The delta's text, after the prompt where it is echoed; call once a delta, before `table`."""
        if not (self.fresh and self.body.echo):
            return delta.text
        known = self.job.texts[self.prompt]
        if known is None:
            known = self.job.frontend.prompts.backend.decode(
                self.job.prompts[self.prompt], skip_special_tokens=self.body.skip_special_tokens
            )
        return known + delta.text

    def table(self, delta: Delta) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        entries, tokens = list(delta.logprobs or []), delta.tokens
        if self.fresh and self.body.echo:
            entries = [*(delta.prompt_logprobs or []), *entries]  # type: ignore[list-item]
            tokens = [*self.job.prompts[self.prompt], *tokens]
        return self.logprobs.piece(entries, tokens)  # type: ignore[arg-type]

    def extras(self, delta: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.body.return_token_ids:
            extras["token_ids"] = delta.tokens
            if self.fresh:
                extras["prompt_token_ids"] = self.job.prompts[self.prompt]
        if self.fresh and self.body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_table(self.job.frontend.vocabulary, delta.prompt_logprobs)
        return extras


def _without_output(delta: Delta) -> Delta:
    """`max_tokens: 0` with echo: only the prompt is wanted, the one token made for it is not."""
    delta.text, delta.tokens, delta.stop_reason = "", [], None
    delta.logprobs = [] if delta.logprobs is not None else None
    if delta.finish is not None:
        delta.finish = type(delta.finish).LENGTH
    return delta


async def _deltas(job: CompletionJob, body: CompletionBody) -> AsyncGenerator[Delta, None]:
    async with aclosing(job.deltas()) as deltas:
        async for delta in deltas:
            if body.max_tokens == 0:
                job.completion_tokens -= len(delta.tokens)
                delta = _without_output(delta)
            yield delta


async def answer_completion(job: CompletionJob, body: CompletionBody) -> dict[str, Any]:
    """The whole answer, once every choice has ended."""
    wholes: dict[int, Delta] = {}
    async with aclosing(_deltas(job, body)) as deltas:
        async for delta in deltas:
            if delta.index in wholes:
                wholes[delta.index].absorb(delta)
            else:
                wholes[delta.index] = delta
    choices = []
    for index, whole in sorted(wholes.items()):
        choice = _Choice(job, body, index)
        choices.append(
            {
                "index": index,
                "text": choice.text(whole),
                "logprobs": choice.table(whole),
                "finish_reason": whole.finish,
                "stop_reason": whole.stop_reason,
                **choice.extras(whole),
            }
        )
    return {
        "id": job.id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "usage": job.usage(),
    }


async def stream_completion(job: CompletionJob, body: CompletionBody) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, without the final `[DONE]`."""
    head = (
        f'data: {{"id":{quote(job.id)},"object":"text_completion","created":{job.created},'
        f'"model":{quote(job.model)},"choices":['
    )
    plain = body.logprobs is None and not body.return_token_ids
    choices: dict[int, _Choice] = {}
    async with aclosing(_deltas(job, body)) as deltas:
        async for delta in deltas:
            choice = choices.get(delta.index)
            if choice is None:
                choice = choices[delta.index] = _Choice(job, body, delta.index)
            text = choice.text(delta)
            usage = f',"usage":{dumps(job.usage())}' if body.continuous_usage else ""
            if plain and delta.finish is None:
                # The first chunk goes out even without text: clients take its time for the first token's.
                if text or choice.fresh:
                    yield (
                        f'{head}{{"index":{delta.index},"text":{quote(text)},"logprobs":null,'
                        f'"finish_reason":null}}]{usage}}}\n\n'
                    ).encode()
            else:
                record = {
                    "index": delta.index,
                    "text": text,
                    "logprobs": choice.table(delta),
                    "finish_reason": delta.finish,
                    "stop_reason": delta.stop_reason,
                    **choice.extras(delta),
                }
                yield f"{head}{dumps(record)}]{usage}}}\n\n".encode()
            choice.fresh = False
    if body.include_usage:
        yield f'{head}],"usage":{dumps(job.usage())}}}\n\n'.encode()
