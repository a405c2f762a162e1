"""How many prompt tokens the next step may compute, from what a step is predicted to take.

Room: the engine's scheduler; the simulator steps the same class. Rule: pure arithmetic, no clock, no torch.

Where all experts are resident a prompt's tokens cost their compute. Where many are not, a few hundred tokens
touch nearly all of them, and the step becomes a *pass*: it streams the missing experts over the link,
which takes as long for 300 tokens as for 3,000. So while others decode, prompts are gathered:

    arrivals   p    p  p        p     p          p
    steps    d d d d d [ pass: p p p ] d d d d d d [ pass: p p p ]
                                       |- spaced -|

A pass begins when the oldest prompt has waited a share of the pass's own time (less where the first-token
objective asks for it), at once where nobody decodes or no more prompts fit, and not before the decoders have
had their steps since the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from rimuru.policy.cost import CostModel, expected_touched

GATHER = 0.5  # of a pass's time: the longest a prompt waits for others to join it
MOST = 4  # passes' time that decoders may be owed after one
LEAST = 64  # prompt tokens of a step, however tight the objective


@dataclass(slots=True)
class PromptBudget:
    """Objectives in seconds: to the first token, and between tokens."""

    ttft_slo: float | None = None
    itl_slo: float | None = None
    passed_at: float = float("-inf")  # when the last step that held prompt tokens ended

    @classmethod
    def of(cls, ttft_slo_ms: float | None, itl_slo_ms: float | None) -> PromptBudget:
        """From the objectives as the command line has them, in milliseconds."""
        ttft, itl = (None if ms is None else ms / 1e3 for ms in (ttft_slo_ms, itl_slo_ms))
        return cls(ttft, itl)

    def tokens(
        self,
        limit: int,
        *,
        now: float,
        prompts: int,
        oldest: float,
        decoding: int,
        missing: float,
        step_seconds: float,
        cost: CostModel,
    ) -> int:
        """Prompt tokens that the next step may hold, at most `limit`; 0 holds them back.

        prompts: tokens that wait, `oldest` the first one's arrival; decoding: requests that would wait
        for the step; missing: share of the experts that is not resident; step_seconds: of a decode step.
        """
        if not prompts or not decoding:
            return limit
        per_token = cost.recompute_seconds(1)
        if self.itl_slo is not None:
            spare = self.itl_slo - step_seconds - cost.factors.mix
            if spare < limit * per_token:
                small = max(min(limit, LEAST), int(spare / per_token) if spare > 0 else 0)
                # A pass streams the missing experts however few its prompts are: cutting one in two spares
                # the decoders compute, and costs them another pass.
                another = self.pass_seconds(min(prompts, small), missing, cost)
                if another <= max(spare, (min(prompts, limit) - small) * per_token):
                    limit = small
        size = min(prompts, limit)
        streaming = self.pass_seconds(size, missing, cost)
        if streaming <= step_seconds or size >= limit:
            # Cheap enough beside the decoders, or full: but a pass still leaves them their steps.
            if streaming <= step_seconds:
                return limit
            return limit if now >= self.passed_at + self._spacing(streaming, step_seconds) else 0
        patience = GATHER * streaming
        if self.ttft_slo is not None:
            patience = min(patience, max(0.0, self.ttft_slo - streaming - size * per_token))
        due = max(oldest + patience, self.passed_at + self._spacing(streaming, step_seconds))
        return limit if now >= due else 0

    @staticmethod
    def pass_seconds(tokens: int, missing: float, cost: CostModel) -> float:
        """Link time of the missing experts that so many prompt tokens touch."""
        m = cost.model
        touched = m.moe_layers * expected_touched(m.experts, m.top_k, tokens) * missing
        return touched * m.expert_bytes / cost.card.link_bytes_s * cost.factors.link

    def _spacing(self, streaming: float, step_seconds: float) -> float:
        """Seconds of decoding owed after a pass: what brings the mean gap down to the objective, or,
        where there is none (or none that can be met), a share of the pass."""
        if self.itl_slo is None or self.itl_slo <= step_seconds:
            return GATHER * streaming
        steps = max(0.0, (streaming - self.itl_slo) / (self.itl_slo - step_seconds))
        owed = steps * step_seconds
        # Prompts that wait for four passes and more pay for an objective that so much decoding hardly meets.
        return owed if owed <= MOST * streaming else GATHER * streaming
