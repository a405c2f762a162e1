"""Log-probabilities in the three shapes clients read: chat, completions, and vLLM's prompt table.

Room: answers. Rule: token strings and bytes come from the vocabulary, never from the text; JSON has
no infinity, so impossible tokens show as -9999.
"""

from __future__ import annotations

from typing import Any

from rimuru.engine.request import TokenLogprobs
from rimuru.engine.text import Vocabulary

LOWEST = -9999.0


def chat_logprobs(vocabulary: Vocabulary, entries: list[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one entry a token with its likeliest rivals."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = vocabulary.bytes_of(token)
        text = spelled.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(spelled)}

    return {
        "content": [
            {
                **entry(e.token, e.logprob),
                "top_logprobs": [entry(t, p) for t, p in zip(e.top_ids, e.top_logprobs, strict=True)],
            }
            for e in entries
        ]
    }


class CompletionLogprobs:
    """`choices[].logprobs` of completions, built piece by piece: offsets run on between pieces."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.offset = 0

    def piece(self, entries: list[TokenLogprobs | None], tokens: list[int]) -> dict[str, Any]:
        """Parallel lists over `tokens`; an entry of None is a first prompt token, which nothing predicts."""
        offsets, strings, values, tops = [], [], [], []
        for token, entry in zip(tokens, entries, strict=True):
            string = self.vocabulary.text_of(token)
            offsets.append(self.offset)
            strings.append(string)
            self.offset += len(string)
            values.append(None if entry is None else max(entry.logprob, LOWEST))
            tops.append(None if entry is None else self._top(entry))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": strings, "top_logprobs": tops}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # The sampled token is always listed, and likelier tokens win where two spell the same.
        table: dict[str, float] = {}
        pairs = [*zip(entry.top_ids, entry.top_logprobs, strict=True), (entry.token, entry.logprob)]
        for token, logprob in pairs:
            table.setdefault(self.vocabulary.text_of(token), max(logprob, LOWEST))
        return table


def prompt_table(
    vocabulary: Vocabulary, entries: list[TokenLogprobs | None] | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: one dict by token id for every prompt token, None for the first."""
    if entries is None:
        return None
    rows: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        ranked = [
            (t, p, i) for i, (t, p) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        ]
        ranked.append((entry.token, entry.logprob, entry.rank))
        rows.append(
            {
                str(token): {
                    "logprob": max(logprob, LOWEST),
                    "rank": rank,
                    "decoded_token": vocabulary.text_of(token),
                }
                for token, logprob, rank in ranked
            }
        )
    return rows
