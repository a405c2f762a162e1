"""Which requests compute how many tokens in the next step.

Room: the engine's scheduler; the simulator steps the same class. Rule: no torch, no clock of its
own (the caller passes `now`), no bytes: pages are asked for through `Memory`, and what to sacrifice
when they run short is the boundary policy's decision, not this file's.

A request is `num_computed` catching up with `num_tokens`, so a prompt's chunk, a decode and the
recomputation after a preemption are one case:

    tokens   [ prompt ............ | output ... ]
             [ computed ... | this step | later ]

A step counts as computed when it is launched (`advance`), so that the next can be planned while it runs. The
tokens it will sample are placeholders until `update` knows them. What a finished step says of a request that
ended or yielded its pages meanwhile is dropped.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from rimuru.errors import RequestError

from .budget import PromptBudget
from .memory import Memory
from .request import FinishReason, Phase, Request, TokenLogprobs, TokenOutput
from .stats import RequestSample

MAX_PREEMPTIONS_PER_STEP = 8
UNKNOWN = -1  # a token that a step under way will sample


@dataclass(slots=True)
class StepPlan:
    """One step: `counts[i]` new tokens of `requests[i]`, from position `starts[i]`.

    `samples[i]` is true where the step reaches the end of the known tokens, so that its last
    logits choose the next one. `failed` are requests this step ended without computing.
    """

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)  # how often each had been preempted before
    num_tokens: int = 0
    failed: list[TokenOutput] = field(default_factory=list)
    launched: bool = False

    def add(self, request: Request, count: int) -> None:
        start = request.num_computed
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(start + count == len(request.tokens))
        self.lives.append(request.preemptions)
        self.num_tokens += count


@dataclass(slots=True)
class StepResult:
    """What a step chose: one entry per request of its plan, -1 where nothing was sampled."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in the plan
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class Scheduler:
    """First come, first served, by priority; chunks of prompts share steps with decodes."""

    def __init__(
        self,
        memory: Memory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        slack_blocks: int = 1,
        budget: PromptBudget | None = None,
    ):
        """`slack_blocks`: blocks an admission leaves free for each running request's next growth.
        `budget` gathers prompts by predicted time, once `memory` knows the machine's rates.
        """
        self.memory = memory
        self.slack_blocks = slack_blocks
        self.budget = budget
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.block_tokens = memory.block_tokens
        self.running: list[Request] = []
        self.waiting: list[tuple[int, float, int, Request]] = []  # sorted by (priority, arrival, number)
        self.requests: dict[str, Request] = {}
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.prompt_outputs: dict[str, list[TokenLogprobs | None]] = {}
        self.samples: list[RequestSample] = []
        self.prompt_tokens = self.generation_tokens = 0
        self.prefix_queries = self.prefix_hits = 0
        self.preemptions: dict[str, int] = {}
        self.preempted_tokens = 0
        self.growing = False  # whether pages are being asked for running requests or for waiting ones
        self.admissible = True  # False keeps new requests waiting (draining)
        self._number = 0
        self._preempted_now = 0
        self._prompts_left = max_num_batched_tokens  # prompt tokens that this step may still take
        self.max_num_seqs = max_num_seqs
        self.mean_prompt = self.mean_output = 0.0  # tokens of the requests that finished lately
        self._finished_count = 0

    # -- requests in and out ---------------------------------------------------------------

    def check_admissible(self, request: Request) -> None:
        """Raise `RequestError` if the request can never be served, however long it waits."""
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is already in use", "request_id")
        request.check()
        prompt, limit = request.num_prompt, min(self.max_model_len, self.memory.max_request_tokens)
        if prompt < 1:
            raise RequestError("the prompt has no tokens; send at least one", "prompt")
        if prompt >= limit:
            which = (
                f"the model's length of {self.max_model_len} tokens"
                if limit == self.max_model_len
                else f"the {limit} tokens that memory can ever hold for one request (raise --device-memory)"
            )
            raise RequestError(
                f"the prompt has {prompt} tokens; with at least one output token that is above {which}; "
                f"send at most {limit - 1}",
                "prompt",
            )
        if prompt + request.max_tokens > limit:
            raise RequestError(
                f"prompt ({prompt}) plus max_tokens ({request.max_tokens}) is above the limit of {limit} "
                f"tokens; ask for max_tokens of at most {limit - prompt}",
                "max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queue a request; raises `RequestError` where it can never be served."""
        self.check_admissible(request)
        self.requests[request.request_id] = request
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._number += 1
        insort(self.waiting, (request.priority, request.arrival, self._number, request))

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request wherever it is; its pages are free when this returns."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        return self._finish(request, FinishReason.ABORT)

    def fail(self, request: Request, error: str, now: float) -> TokenOutput:
        """End one request with an error of its own; the others go on."""
        return self._finish(request, FinishReason.ERROR, error=error, now=now)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | None = None,
        error: str | None = None,
        now: float | None = None,
    ) -> TokenOutput:
        request.forget_unknown()
        if request.phase == Phase.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting = [entry for entry in self.waiting if entry[3] is not request]
        request.phase = Phase.FINISHED
        del self.requests[request.request_id]
        self.prompt_outputs.pop(request.request_id, None)
        self._record(request, reason, now)
        return TokenOutput(request.request_id, [], finish=reason, stop_reason=stop_reason, error=error)

    def _release(self, request: Request) -> None:
        self.memory.release(request.slot)
        self.free_slots.append(request.slot)
        request.slot = -1

    def _record(self, request: Request, reason: FinishReason, now: float | None) -> None:
        first, last = request.first_token_at, now if now is not None else request.last_token_at
        began = request.scheduled_at
        if began is None or last is None:
            began = last = request.arrival
        first = first if first is not None else last
        self._finished_count += 1
        weight = max(0.02, 1 / self._finished_count)
        self.mean_prompt += (request.num_prompt - self.mean_prompt) * weight
        self.mean_output += (request.num_output - self.mean_output) * weight
        self.samples.append(
            RequestSample(
                finish=reason.value, prompt_tokens=request.num_prompt, output_tokens=request.num_output,
                max_tokens=request.max_tokens, queue_time=began - request.arrival, prefill_time=first - began,
                decode_time=last - first, ttft=first - request.arrival, e2e=last - request.arrival,
            )
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def oldest_wait(self) -> float | None:
        """Arrival time of the request that would be admitted next; None when nobody waits."""
        return self.waiting[0][1] if self.waiting else None

    # -- one step --------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Choose the next step's tokens and give them pages. Running requests come first."""
        plan = StepPlan()
        self._prompts_left = self._prompt_tokens(now)
        self.growing = True
        self._schedule_running(plan, now)
        self.growing = False
        if self.waiting and not self._preempted_now:
            self._schedule_waiting(plan, now)
        return plan

    def _prompt_tokens(self, now: float) -> int:
        """Prompt tokens this step may compute, see `PromptBudget`."""
        limit, cost = self.max_num_batched_tokens, self.memory.cost
        if self.budget is None or cost is None:
            return limit
        missing = self.memory.missing_share
        if not missing and self.budget.itl_slo is None:
            return limit
        prompts, oldest, decoding = 0, now, 0
        for request in self.running:
            left = len(request.tokens) - request.num_computed
            if left > 1:
                prompts += left
                oldest = min(oldest, request.arrival)
            else:
                decoding += 1
        for _, arrival, _, request in self.waiting[: self.max_num_seqs]:
            if prompts >= limit:
                break
            prompts += len(request.tokens)
            oldest = min(oldest, arrival)
        return self.budget.tokens(
            limit, now=now, prompts=prompts, oldest=oldest, decoding=decoding,
            missing=missing, step_seconds=self.memory.step_seconds, cost=cost,
        )  # fmt: skip

    def _schedule_running(self, plan: StepPlan, now: float) -> None:
        self._preempted_now = 0
        memory, size = self.memory, self.block_tokens
        held = memory.held
        left = self.max_num_batched_tokens
        work: list[tuple[Request, int]] = []
        missing = 0
        grow: list[tuple[Request, int]] = []
        for request in self.running:
            if request.unknown and (
                request.sequential or request.num_output + request.unknown >= request.max_tokens
            ):
                continue  # nothing can be said of its next token before the last one is known
            count = len(request.tokens) - request.num_computed
            if count > 1:
                count = self._chunk(request, min(count, self._prompts_left))
                if not count:
                    continue
                self._prompts_left -= count
            if count > left:
                count = left
                if not count:
                    break
            left -= count
            work.append((request, count))
            blocks = -(-(request.num_computed + count) // size)
            short = blocks - held[request.slot]
            if short > 0:
                missing += short
                grow.append((request, blocks))
        while missing and not memory.make_room(missing, self, now):
            # Nothing cheaper is left to give: the youngest, least urgent request yields its pages.
            victim = self._victim()
            lone = len(self.running) == 1
            if lone or self._preempted_now >= MAX_PREEMPTIONS_PER_STEP:
                if lone and memory.arriving:
                    work, grow = [], []  # what has arrived may leave again
                elif lone:
                    message = (
                        f"out of KV pages at {victim.num_computed} tokens and nothing else can yield memory; "
                        "raise --device-memory or --host-memory"
                    )
                    plan.failed.append(self._finish(victim, FinishReason.ERROR, error=message, now=now))
                    work, grow = [], []
                else:  # what still fits goes on; the rest waits for the next step
                    work, grow = self._fitting(work, memory.room())
                break
            self.preempt(victim, "memory")
            work = [(r, n) for r, n in work if r is not victim]
            grow = [(r, b) for r, b in grow if r is not victim]
            missing = sum(b - held[r.slot] for r, b in grow)
        if grow:
            memory.grow([(r.slot, blocks) for r, blocks in grow])
        for request, count in work:
            plan.add(request, count)

    def _fitting(self, work: list[tuple[Request, int]], room: int) -> tuple[list, list]:
        kept, grow = [], []
        for request, count in work:
            blocks = -(-(request.num_computed + count) // self.block_tokens)
            short = blocks - self.memory.held[request.slot]
            if short <= room:
                kept.append((request, count))
                if short > 0:
                    room -= short
                    grow.append((request, blocks))
        return kept, grow

    def _victim(self) -> Request:
        return max(self.running, key=lambda r: (r.priority, r.arrival))

    def preempt(self, request: Request, cause: str) -> None:
        """Drop a running request's pages and queue it again; it recomputes what is not cached."""
        self.running.remove(request)
        request.forget_unknown()  # sampled again, and the same, when it is resumed
        self.preempted_tokens += request.num_computed
        self.preemptions[cause] = self.preemptions.get(cause, 0) + 1
        self._release(request)
        self.prompt_outputs.pop(request.request_id, None)  # recomputed with the prompt
        request.num_computed = 0
        request.phase = Phase.PREEMPTED
        request.preemptions += 1
        self._preempted_now += 1
        self._enqueue(request)

    def _schedule_waiting(self, plan: StepPlan, now: float) -> None:
        memory, size = self.memory, self.block_tokens
        left = min(self.max_num_batched_tokens - plan.num_tokens, self._prompts_left)
        while self.waiting and left > 0 and self.free_slots and self.admissible:
            request = self.waiting[0][3]
            hit = 0
            if memory.prefix_caching:
                memory.extend_keys(request)
                if request.params.prompt_logprobs is None or request.first_token_at is not None:
                    # The last known token is always computed: its logits choose the next one.
                    hit = memory.match(request.block_keys[: (len(request.tokens) - 1) // size])
            # The whole known sequence gets its pages now, so that no two admissions count the same
            # free page and a resumed request never stalls half-way; the slack for each running request
            # keeps the next growth from evicting what was just admitted.
            blocks = -(-len(request.tokens) // size)
            slot = self.free_slots[-1]
            slack = self.slack_blocks * len(self.running)
            if not memory.try_admit(slot, request.block_keys, hit, blocks, slack, self, now):
                break
            self.free_slots.pop()
            self.waiting.pop(0)
            request.slot = slot
            if request.phase == Phase.WAITING:
                request.num_cached = hit * size
                request.scheduled_at = now
                self.prompt_tokens += request.num_prompt
                if memory.prefix_caching:
                    self.prefix_queries += request.num_prompt
                    self.prefix_hits += hit * size
            request.phase = Phase.RUNNING
            request.num_computed = hit * size
            self.running.append(request)
            count = self._chunk(request, min(len(request.tokens) - request.num_computed, left))
            left -= count
            plan.add(request, count)

    def _chunk(self, request: Request, count: int) -> int:
        """Of `count` tokens to compute, those up to the end of the last full block that a repetition of
        the request could start after, where a recurrent state has to be copied there."""
        mark = (len(request.tokens) - 1) // self.block_tokens * self.block_tokens - request.num_computed
        return mark if 0 < mark < count and self.memory.can_save_state() else count

    # -- after the step --------------------------------------------------------------------

    def advance(self, plan: StepPlan) -> None:
        """Count a launched step's tokens as computed; `update` follows when its result is there."""
        plan.launched = True
        for request, start, count, samples in zip(
            plan.requests, plan.starts, plan.counts, plan.samples, strict=True
        ):
            request.num_computed = start + count
            if samples:
                request.tokens.append(UNKNOWN)
                request.unknown += 1

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOutput]:
        """Fill in what the step chose, publish full blocks, end what is done."""
        if not plan.launched:
            self.advance(plan)
        memory, size = self.memory, self.block_tokens
        if self.budget is not None and plan.num_tokens > len(plan.requests):
            self.budget.passed_at = now
        outputs: list[TokenOutput] = list(plan.failed)
        for index, request in enumerate(plan.requests):
            if request.phase != Phase.RUNNING or request.preemptions != plan.lives[index]:
                continue  # it ended, or yielded its pages, while the step ran
            before = plan.starts[index]
            after = before + plan.counts[index]
            if memory.prefix_caching and after // size > before // size:
                memory.extend_keys(request)
                memory.commit(request.slot, request.block_keys, after // size)
                if after % size == 0 and plan.counts[index] > 1:  # not for each block of a decode
                    memory.save_state(request.slot, request.block_keys, after // size)
            if index in result.prompt_logprobs:
                known = self.prompt_outputs.setdefault(request.request_id, [None])
                known.extend(result.prompt_logprobs[index])
            if not plan.samples[index]:
                continue
            token = request.tokens[after] = result.tokens[index]
            request.unknown -= 1
            self.generation_tokens += 1
            request.last_token_at = now
            prompt_logprobs = None
            if request.first_token_at is None:
                request.first_token_at = now
                prompt_logprobs = self.prompt_outputs.pop(request.request_id, None)
            finish, stop_reason = self._finished(request, token)
            output = TokenOutput(
                request.request_id, [token],
                logprobs=[result.logprobs[index]] if index in result.logprobs else None,
                prompt_logprobs=prompt_logprobs, finish=finish, stop_reason=stop_reason,
                num_cached=request.num_cached,
            )  # fmt: skip
            if finish is not None:
                self._finish(request, finish, now=now)
            outputs.append(output)
        return outputs

    def _finished(self, request: Request, token: int) -> tuple[FinishReason | None, int | None]:
        if token in request.stop_ids and request.num_output > request.params.min_tokens:
            return FinishReason.STOP, None if token in request.eos_ids else token
        if request.num_output >= request.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    # -- truth -----------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between steps; raises AssertionError naming what does not."""
        slots = [r.slot for r in self.running]
        assert sorted(slots + self.free_slots) == list(range(self.max_num_seqs)), "a slot is lost or doubled"
        assert len(self.requests) == len(self.running) + len(self.waiting), (
            "a request is in no queue or in two"
        )
        for request in self.running:
            assert request.phase == Phase.RUNNING
            assert request.num_computed <= len(request.tokens)
            assert request.tokens.count(UNKNOWN) == request.unknown, f"{request.request_id} lost a token"
            assert self.memory.held[request.slot] * self.block_tokens >= request.num_computed, (
                f"{request.request_id} computed more tokens than its blocks hold"
            )
        for *_, request in self.waiting:
            assert request.slot == -1, f"waiting {request.request_id} holds a slot"
        self.memory.check()
