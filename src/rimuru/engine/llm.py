"""The offline front door: `rimuru.LLM(model).generate(prompts)`.

Room: the top of the engine. Rule: tokenizing, text and stop strings live here, not in the core; the
core is stepped on the caller's thread, so there is no other thread or process to care for.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rimuru.errors import RequestError
from rimuru.models.tokenizer import Tokenizer, has_tokenizer, load_tokenizer

from .config import EngineConfig, parse_size
from .core import EngineCore, local_models
from .request import MAX_SEED, FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from .text import TextStream, Vocabulary

# Text, token ids, or one of them under vLLM's names: {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]

_NO_TOKENIZER = (
    "this engine has no tokenizer; send token ids, such as {'prompt_token_ids': [1, 2, 3]}, or name a folder "
    "with tokenizer=..."
)


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's `n` continuations. `text` excludes what a stop string cut off.

    `finish_reason` "error" is a continuation that failed alone, with `error` in words; it keeps what it
    had until then.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


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

    Sizes may be strings: `LLM("demo", device_memory="1.5GB")`. With `skip_tokenizer_init`, and with random
    weights (`load_format="dummy"`) in a folder that has no tokenizer, prompts are token ids and outputs have
    no text.
    """

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        progress: Callable[[str, float], None] | None = None,
        **options: Any,
    ):
        for name in ("device_memory", "host_memory"):
            if options.get(name) is not None:
                options[name] = parse_size(options[name], name)
        self.config = config = EngineConfig(model=model, **options)
        if config.tokenizer in (ours := local_models()):
            config.tokenizer = str(ours[config.tokenizer]())
        self.core = EngineCore(config, progress)
        self.info = self.core.info
        self.tokenizer = None if skip_tokenizer_init else self._find_tokenizer()
        self.vocabulary = None if self.tokenizer is None else Vocabulary(self.tokenizer.backend)
        self._ids = itertools.count()
        self._live: dict[str, tuple[_Job, int]] = {}  # of every call and stream under way

    def _find_tokenizer(self) -> Tokenizer | None:
        config = self.config
        if (
            config.load_format == "dummy"
            and config.tokenizer is None
            and not has_tokenizer(self.info.model_path)
        ):
            return None
        return load_tokenizer(
            config.tokenizer or self.info.model_path, config.revision, config.trust_remote_code
        )

    # -- whole answers ---------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, batched together; results in prompt order.

        Raises `RequestError` before anything runs if one of them can never be served. One that fails while it
        runs ends alone: its `finish_reason` is "error".
        """
        jobs = self._jobs(prompts, sampling_params)
        self._begin(jobs)
        try:
            while not all(job.output.finished for job in jobs):
                self.step()
        finally:
            self._abort(jobs)
        return [job.output for job in jobs]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template."""
        if self.tokenizer is None:
            raise RequestError(f"conversations cannot be rendered: {_NO_TOKENIZER}", "messages")
        talks: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        ids = [self.tokenizer.apply_chat_template(list(t), **template) for t in talks]
        return self.generate(ids, sampling_params)

    # -- as it comes -----------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the growing output of one prompt, after every step.

        Closing the iterator early aborts the request.
        """
        jobs = self._jobs([prompt], sampling_params)
        self._begin(jobs)
        try:
            while not jobs[0].output.finished:
                self.step()
                yield jobs[0].output
        finally:
            self._abort(jobs)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Queue one prompt beside those under way; its output grows in place with every `step`."""
        jobs = self._jobs([prompt], sampling_params)
        self._begin(jobs)
        return jobs[0].output

    def abort_request(self, output: RequestOutput) -> None:
        """Stop a request of `add_request`; one that has ended is left as it is."""
        for completion in output.outputs:
            name = _name(output, completion.index)
            if self._live.pop(name, None) is not None:
                self.core.abort(name)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a `step` has anything to do, for whichever call or stream."""
        return bool(self._live)

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; the outputs that gained something, of whichever call or stream."""
        outputs = self.core.step()
        if self.core.stalled:
            time.sleep(0.001)  # a grammar is being compiled on another thread
        grown: dict[str, RequestOutput] = {}
        for output in outputs:
            known = self._live.get(output.request_id)
            if known is None:
                continue
            job, i = known
            grown[job.output.request_id] = job.output
            if job.take(i, output):
                del self._live[output.request_id]
                if output.finish is None:  # a stop string the core cannot see
                    self.core.abort(output.request_id)
        return list(grown.values())

    # -- inside ----------------------------------------------------------------------------

    def _jobs(self, prompts: Any, params: Any) -> list[_Job]:
        one = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: list[Prompt] = [prompts] if one else list(prompts)
        each = (
            list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * len(batch)
        )
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(each)} sampling parameters")
        jobs = []
        for prompt, p in zip(batch, each, strict=True):
            text, ids = self._read(prompt)
            p.check(self.info.vocab_size)
            if self.tokenizer is None and (p.stop or p.grammar is not None):
                raise RequestError(f"stop strings and grammars need text: {_NO_TOKENIZER}", "stop")
            output = RequestOutput(
                f"llm-{next(self._ids)}", text, ids, [CompletionOutput(i) for i in range(p.n)]
            )
            jobs.append(_Job(output, p, [TextStream(self.vocabulary, p) for _ in range(p.n)]))
        return jobs

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, where there is one, and its token ids."""
        if isinstance(prompt, Mapping):
            if unknown := prompt.keys() - {"prompt", "prompt_token_ids"}:
                raise RequestError(
                    f"a prompt with {', '.join(map(repr, sorted(unknown)))} is not served; give 'prompt' or "
                    "'prompt_token_ids'",
                    "prompt",
                )
            if (ids := prompt.get("prompt_token_ids")) is not None:
                return prompt.get("prompt"), list(ids)
            prompt = prompt.get("prompt") or ""
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise RequestError(f"a prompt is text: {_NO_TOKENIZER}", "prompt")
        return prompt, self.tokenizer.encode(prompt)

    def _begin(self, jobs: list[_Job]) -> None:
        """Queue all of them, or none where one can never be served."""
        try:
            for job in jobs:
                for i in range(job.params.n):
                    name = _name(job.output, i)
                    self.core.add(name, job.output.prompt_token_ids, job.branch(i))
                    self._live[name] = job, i
        except BaseException:
            self._abort(jobs)
            raise

    def _abort(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self.abort_request(job.output)


def _name(output: RequestOutput, index: int) -> str:
    """What the core calls the index-th continuation."""
    return f"{output.request_id}-{index}"


@dataclass(slots=True)
class _Job:
    """One prompt under way."""

    output: RequestOutput
    params: SamplingParams
    texts: list[TextStream]

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
            out.finish_reason, out.error = FinishReason.ERROR.value, new.error
            self._settle()
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
        self._settle()
        return True

    def _settle(self) -> None:
        self.output.finished = all(o.finish_reason is not None for o in self.output.outputs)
