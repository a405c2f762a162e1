"""Token ids to text, one request at a time: characters never broken, stop strings cut exactly.

Room: the front end's side of a request; needs `tokenizers`, never torch. Rule: constant work a token,
and the pieces of a request, joined, are the text: nothing is ever taken back.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Protocol

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from .request import FinishReason, SamplingParams

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META = "\u2581"  # SentencePiece writes a space as this character


def _byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class _Decoder(Protocol):
    """Text of one sequence, a token at a time."""

    def push(self, token: int) -> str:
        """The characters that `token` completed."""
        ...

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character show as U+FFFD."""
        ...


class Vocabulary:
    """What each token id of one tokenizer spells. Shared by all requests; built once.

    Byte-level and SentencePiece vocabularies are read as a table of bytes, so that decoding is a
    lookup and an incremental UTF-8 decoder. Any other decoder goes through `tokenizers.DecodeStream`.
    """

    def __init__(self, backend: Tokenizer):
        self.backend = backend
        self.size = backend.get_vocab_size(with_added_tokens=True)
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._added = {token: entry.content.encode() for token, entry in added.items()}
        self._bytes: dict[int, bytes] = {}
        steps = _decoder_steps(backend)
        self._byte_level = steps == ["ByteLevel"]
        self._alphabet = _byte_level_alphabet()
        self.table = self._byte_level or (bool(steps) and set(steps) <= _SENTENCEPIECE_STEPS)

    def bytes_of(self, token: int) -> bytes:
        """The bytes a token stands for inside a text; empty for ids outside the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def text_of(self, token: int) -> str:
        """A token on its own, for log-probability tables; partial characters show as U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence that continues another one."""
        decoder = self.decoder(skip_special_tokens)
        return "".join([*map(decoder.push, tokens), decoder.flush()])

    def decoder(self, skip_special_tokens: bool) -> _Decoder:
        if self.table:
            return _TableDecoder(self, skip_special_tokens)
        return _StreamDecoder(self.backend, skip_special_tokens)

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            if all(char in self._alphabet for char in piece):
                return bytes(self._alphabet[char] for char in piece)
            return piece.encode()
        if self.table:
            byte = _BYTE_TOKEN.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_META, " ").encode()
        return self.backend.decode([token], skip_special_tokens=False).encode()


_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _decoder_steps(backend: Tokenizer) -> list[str]:
    """Type names of the tokenizer's decoder, outermost sequence unrolled; empty when unreadable."""
    if backend.decoder is None:
        return []
    spec = json.loads(backend.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    for step in steps:
        if step["type"] == "Replace" and (step["pattern"], step["content"]) != ({"String": _META}, " "):
            return []
    return [step["type"] for step in steps]


class _TableDecoder:
    __slots__ = ("_bytes_of", "_skip", "_utf8")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool):
        self._bytes_of = vocabulary.bytes_of
        self._skip = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return "" if token in self._skip else self._utf8.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _StreamDecoder:
    def __init__(self, backend: Tokenizer, skip_special_tokens: bool):
        self._backend = backend
        self._skip_special = skip_special_tokens
        self._restart()

    def _restart(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._backend, token)
        except Exception:  # tokenizers raises a bare Exception when bytes never become a character
            return self.flush()
        if text is not None:
            self._held.clear()
        return text or ""

    def flush(self) -> str:
        text = self._backend.decode(self._held, skip_special_tokens=self._skip_special)
        self._restart()
        return text


class _NoText:
    """Where there is no vocabulary."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TextStream:
    """The text of one sequence as it grows, ended by the first stop string; without a vocabulary no text.

    Feed it every `TokenOutput`; it returns the text that is final. Text that could still turn out
    to begin a stop string is held back until it cannot. Stop strings are looked for in the text of
    the tokens after the first `min_tokens`.
    """

    __slots__ = ("_decoder", "_held", "_include", "_longest", "_min_tokens", "_stop", "consumed", "finish",
                 "num_tokens", "stop_reason")  # fmt: skip

    def __init__(self, vocabulary: Vocabulary | None, params: SamplingParams):
        self._decoder: _Decoder = (
            _NoText() if vocabulary is None else vocabulary.decoder(params.skip_special_tokens)
        )
        self._stop = params.stop
        self._longest = max(map(len, params.stop), default=0)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0  # output tokens so far, the stopping one included
        self.consumed = 0  # of the tokens of the last `push`, how many belong to the output

    def push(
        self, tokens: list[int], finish: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> str:
        """Text made final by these tokens. Once `finish` is set, later calls are an error."""
        assert self.finish is None, "text pushed after the end"
        # A token that ended the sequence is no text of it, unless the client wants to see what stopped it.
        hidden = finish is FinishReason.STOP and not self._include
        released = ""
        for index, token in enumerate(tokens):
            self.num_tokens += 1
            if hidden and index == len(tokens) - 1:
                break
            text = self._decoder.push(token)
            if not self._stop:
                released += text
            elif text:
                released += self._release(text)
                if self.finish is not None:
                    self.consumed = index + 1
                    return released
        self.consumed = len(tokens)
        if finish is not None:
            tail = self._decoder.flush()
            released += self._release(tail) if self._stop and tail else tail
            if self.finish is None:
                released, self._held = released + self._held, ""
                self.finish, self.stop_reason = finish, stop_reason
        return released

    def _release(self, text: str) -> str:
        if self.num_tokens <= self._min_tokens:
            return text
        text = self._held + text
        found = min(((text.find(s), -len(s), s) for s in self._stop if s in text), default=None)
        if found is not None:
            start, _, stop = found
            self.finish, self.stop_reason, self._held = FinishReason.STOP, stop, ""
            return text[: start + len(stop)] if self._include else text[:start]
        keep = self._overlap(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
