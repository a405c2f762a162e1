"""The offline front door: `rimuru.LLM(model).generate(prompts)`.

Room: the top of the engine. Rule: tokenizing, text and stop strings live here, not in the core; the
core is stepped on the caller's thread, so there is no other thread or process to care for.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rimuru.errors import RequestError
from rimuru.models.tokenizer import load_tokenizer

from .config import EngineConfig, parse_size
from .core import EngineCore
from .request import MAX_SEED, SamplingParams, TokenLogprobs, TokenOutput
from .text import TextStream, Vocabulary

Prompt = str | Sequence[int]


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's `n` continuations. `text` excludes what a stop string cut off."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its continuations, in the order they were asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False


class LLM:
    """A model ready to generate. Keyword arguments are the fields of `EngineConfig`.

    Sizes may be strings: `LLM("demo", device_memory="1.5GB")`.
    """

    def __init__(self, model: str, *, progress: Callable[[str, float], None] | None = None, **options: Any):
        for name in ("device_memory", "host_memory"):
            if options.get(name) is not None:
                options[name] = parse_size(options[name], name)
        self.config = EngineConfig(model=model, **options)
        self.core = EngineCore(self.config, progress)
        self.info = self.core.info
        self.tokenizer = load_tokenizer(
            self.config.tokenizer or self.info.model_path,
            self.config.revision,
            self.config.trust_remote_code,
        )
        self.vocabulary = Vocabulary(self.tokenizer.backend)
        self._ids = itertools.count()
        self._live: dict[str, tuple[_Job, int]] = {}  # of every call and stream under way

    # -- whole answers ---------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids), batched together; results in prompt order.

        Raises `RequestError` before anything runs if one of them can never be served.
        """
        jobs = self._jobs(prompts, params)
        for _ in self._run(jobs):
            pass
        return [job.output for job in jobs]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template."""
        talks: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        ids = [self.tokenizer.apply_chat_template(list(t), **template) for t in talks]
        return self.generate(ids, params)

    # -- as it comes -----------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the growing output of one prompt after every step that added to it.

        Closing the iterator early aborts the request.
        """
        jobs = self._jobs([prompt], params)
        steps = self._run(jobs)
        try:
            for _ in steps:
                yield jobs[0].output
        finally:
            steps.close()

    # -- inside ----------------------------------------------------------------------------

    def _jobs(self, prompts: Any, params: Any) -> list[_Job]:
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: list[Prompt] = [prompts] if one else list(prompts)
        each = (
            list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * len(batch)
        )
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(each)} sampling parameters")
        jobs = []
        for prompt, p in zip(batch, each, strict=True):
            text = prompt if isinstance(prompt, str) else None
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            p.check(self.info.vocab_size)
            output = RequestOutput(
                f"llm-{next(self._ids)}", text, ids, [CompletionOutput(i) for i in range(p.n)]
            )
            jobs.append(_Job(output, p, [TextStream(self.vocabulary, p) for _ in range(p.n)]))
        return jobs

    def _run(self, jobs: list[_Job]) -> Generator[None, None, None]:
        ids: list[str] = []
        try:
            for job in jobs:
                for i in range(job.params.n):
                    request_id = f"{job.output.request_id}-{i}"
                    self.core.add(request_id, job.output.prompt_token_ids, job.branch(i))
                    self._live[request_id] = job, i
                    ids.append(request_id)
            while not all(job.output.finished for job in jobs):
                self._step()
                for job in jobs:
                    if job.error is not None:
                        raise RequestError(job.error)
                yield
        finally:
            for request_id in ids:
                if self._live.pop(request_id, None) is not None:
                    self.core.abort(request_id)

    def _step(self) -> None:
        """Step the core. What other streams' requests gained is kept for them."""
        outputs = self.core.step()
        if self.core.stalled:
            time.sleep(0.001)  # a grammar is being compiled on another thread
        for output in outputs:
            known = self._live.get(output.request_id)
            if known is None:
                continue
            job, i = known
            if job.take(i, output):
                del self._live[output.request_id]
                if output.finish is None:  # a stop string the core cannot see
                    self.core.abort(output.request_id)


@dataclass(slots=True)
class _Job:
    """One prompt under way."""

    output: RequestOutput
    params: SamplingParams
    texts: list[TextStream]
    error: str | None = None

    def branch(self, index: int) -> SamplingParams:
        """The parameters of the index-th continuation: the same, but with draws of its own."""
        seed = self.params.seed
        if seed is not None:
            seed = seed + index if seed + index <= MAX_SEED else seed - index
        return dataclasses.replace(self.params, n=1, seed=seed)

    def take(self, index: int, new: TokenOutput) -> bool:
        """Add what a step brought to the index-th continuation; true when it is done."""
        out, text = self.output.outputs[index], self.texts[index]
        if new.error is not None:
            self.error = new.error
            return True
        out.text += text.push(new.tokens, new.finish, new.stop_reason)
        out.token_ids += new.tokens[: text.consumed]
        if new.logprobs:
            out.logprobs = (out.logprobs or []) + new.logprobs[: text.consumed]
        if new.prompt_logprobs is not None:
            self.output.prompt_logprobs = new.prompt_logprobs
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, new.num_cached)
        if text.finish is None:
            return False
        out.finish_reason, out.stop_reason = text.finish.value, text.stop_reason
        self.output.finished = all(o.finish_reason is not None for o in self.output.outputs)
        return True
