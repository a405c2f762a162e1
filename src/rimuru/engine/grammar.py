"""Grammars that outputs must follow: compiled on threads, applied token by token.

Room: between requests and the sampler. Rule: compiling never holds up a step or another request; what is
wrong, too slow or too much is refused with the request that brought it. xgrammar does the grammar work.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.errors import RequestError

from .request import Grammar, Request

COMPILE_SECONDS = 10.0  # a grammar that takes longer is refused
MAX_COMPILING = 16  # at one time; those that were given up run on, because a thread cannot be stopped
MAX_CACHED = 128  # compiled grammars kept, least recently used out first
MAX_TEXT = 256 * 1024  # characters
MAX_DEPTH = 48  # of a schema: compiling time grows with a power of it
MAX_WHITESPACE = 32  # in a row between JSON tokens: a model may not idle there for ever
_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


class Constraint:
    """How far one request has come in its grammar."""

    def __init__(self, matcher: Any, grammar: Grammar, eos_ids: Iterable[int], vocab_size: int):
        self._matcher, self._after = matcher, list(grammar.after)
        self._eos_ids = list(eos_ids)
        self._bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._taken = 0  # output tokens accounted for
        self._free = bool(self._after)  # until the tokens that end the free part
        self._broken = False

    def advance(self, tokens: list[int], num_prompt: int) -> None:
        """Take in the output tokens not seen so far."""
        for at in range(num_prompt + self._taken, len(tokens)):
            self._taken += 1
            if self._free:
                ended = at + 1 - len(self._after) >= num_prompt
                self._free = not (ended and tokens[at + 1 - len(self._after) : at + 1] == self._after)
            elif not self._matcher.accept_token(tokens[at]):
                self._broken = True

    def fill(self, allowed: np.ndarray) -> None:
        """Write which tokens may come next into `allowed`, bool `[vocab]`, all true before."""
        if self._free:
            return
        if self._broken or self._matcher.is_terminated():
            allowed[:] = False
        elif self._matcher.fill_next_token_bitmask(_torch_view(self._bits)):
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=len(allowed))
            np.copyto(allowed, bits.view(bool))
        if not allowed.any():  # a vocabulary may have no token for what must come: the output ends
            allowed[self._eos_ids] = True


def _torch_view(bits: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(bits)


class _Compiling:
    """One grammar on its thread. `result` or `error` is there once `done` is set."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: str | None = None


class Grammars:
    """Compiled grammars, and the requests that wait for theirs. One thread calls the methods."""

    def __init__(
        self, tokenizer: str | Path, trust_remote_code: bool, vocab_size: int, eos_ids: Iterable[int]
    ):
        self._tokenizer, self._trust = tokenizer, trust_remote_code
        self._vocab_size, self._eos_ids = vocab_size, sorted(eos_ids)
        self.waiting: dict[str, tuple[Request, _Compiling, float]] = {}
        self._cache: OrderedDict[Grammar, _Compiling] = OrderedDict()
        self._loading = threading.Lock()
        self._compiler: Any = None  # made on the first compiling thread: it reads the tokenizer
        self._loaded_at = float("inf")
        self._threads: list[threading.Thread] = []

    def begin(self, request: Request) -> None:
        """Have the request's grammar compiled; `RequestError` where that cannot even start."""
        grammar = request.params.grammar
        assert grammar is not None
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError(
                "constrained output needs xgrammar, which is missing here: "
                "pip install '.[server]' in the checkout",
                grammar.param,
            )
        _check_size(grammar)
        if request.request_id in self.waiting:
            raise RequestError(f"request id {request.request_id!r} is already in use", "request_id")
        self.waiting[request.request_id] = request, self._compiled(grammar), time.monotonic()

    def _compiled(self, grammar: Grammar) -> _Compiling:
        found = self._cache.get(grammar)
        if found is None:
            self._threads = [t for t in self._threads if t.is_alive()]
            if len(self._threads) >= MAX_COMPILING:
                raise RequestError(
                    f"{MAX_COMPILING} grammars are being compiled already; try again later", grammar.param
                )
            found = self._cache[grammar] = _Compiling()
            thread = threading.Thread(target=self._compile, args=(grammar, found), daemon=True)
            self._threads.append(thread)
            thread.start()
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(grammar)
        return found

    def forget(self, request_id: str) -> None:
        """Drop a waiting request; its grammar stays for the next."""
        self.waiting.pop(request_id, None)

    def ready(self, now: float) -> list[tuple[Request, RequestError | None]]:
        """The requests that need not wait any longer, with what is wrong with their grammars."""
        out: list[tuple[Request, RequestError | None]] = []
        for request, job, since in list(self.waiting.values()):
            grammar = request.params.grammar
            assert grammar is not None
            if job.done.is_set():
                error = None
                if job.error is not None:
                    error = RequestError(job.error, grammar.param)
                else:
                    request.constraint = self._constraint(job.result, grammar)
            elif now - max(since, self._loaded_at) > COMPILE_SECONDS:
                error = RequestError(
                    f"the grammar takes longer than {COMPILE_SECONDS:g} s to compile; make it smaller",
                    grammar.param,
                )
            else:
                continue
            del self.waiting[request.request_id]
            out.append((request, error))
        return out

    def _constraint(self, compiled: Any, grammar: Grammar) -> Constraint:
        from xgrammar import GrammarMatcher

        return Constraint(GrammarMatcher(compiled), grammar, self._eos_ids, self._vocab_size)

    # -- on a thread of the grammar's own --------------------------------------------------

    def _compile(self, grammar: Grammar, job: _Compiling) -> None:
        try:
            compiler = self._load()
            job.result = _COMPILE[grammar.kind](compiler, grammar.text)
        except Exception as error:
            job.error = f"the {grammar.kind} cannot be used: {_PREFIX.sub('', str(error)).strip()}"
        job.done.set()

    def _load(self) -> Any:
        with self._loading:
            if self._compiler is None:
                import xgrammar

                from rimuru.models.tokenizer import load_tokenizer

                tokenizer = load_tokenizer(self._tokenizer, trust_remote_code=self._trust)
                info = xgrammar.TokenizerInfo.from_huggingface(
                    tokenizer.fast, vocab_size=self._vocab_size, stop_token_ids=self._eos_ids
                )
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._loaded_at = time.monotonic()
        return self._compiler


def _check_size(grammar: Grammar) -> None:
    if len(grammar.text) > MAX_TEXT:
        raise RequestError(
            f"the {grammar.kind} has {len(grammar.text)} characters; at most {MAX_TEXT} are read",
            grammar.param,
        )
    if grammar.kind == "json_schema" and _depth(grammar.text) > MAX_DEPTH:
        raise RequestError(f"the schema is nested deeper than {MAX_DEPTH} levels", grammar.param)


def _depth(text: str) -> int:
    """Levels of brackets, those in strings left out."""
    depth = deepest = 0
    for bracket in re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        depth += (bracket in ("[", "{")) - (bracket in ("]", "}"))
        deepest = max(deepest, depth)
    return deepest


def _schema(compiler: Any, text: str) -> Any:
    try:
        schema = _with_patterns(json.loads(text))
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    return compiler.compile_json_schema(
        json.dumps(schema), any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE
    )


def _with_patterns(schema: Any) -> Any:
    """The schema with limits of a string's length said as a pattern.

    xgrammar (0.2) lets strings with `minLength` or `maxLength` hold bare control characters, which JSON
    forbids; strings with a pattern it gets right.
    """
    if isinstance(schema, list):
        return [_with_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        k: v if k in ("const", "enum", "default", "examples") else _with_patterns(v)
        for k, v in schema.items()
    }
    low, high = out.get("minLength"), out.get("maxLength")
    limited = type(low) is int or type(high) is int  # a property may be named so: then it is a schema
    if limited and "pattern" not in out and "format" not in out:
        out.pop("minLength", None)
        out.pop("maxLength", None)
        out["pattern"] = f"^.{{{low or 0},{'' if high is None else high}}}$"
    return out


def _choice(compiler: Any, text: str) -> Any:
    # JSON's escapes are a part of those of EBNF strings.
    rules = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(text))
    return compiler.compile_grammar(f"root ::= {rules}")


_COMPILE = {
    "json_schema": _schema,
    "regex": lambda compiler, text: compiler.compile_regex(text),
    "choice": _choice,
    "grammar": lambda compiler, text: compiler.compile_grammar(text),
}
