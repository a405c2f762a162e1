"""The block pool of vLLM at the same work, for ratios: compiled from its source files, never installed.

Room: the benchmarks. Rule: nothing of vLLM is kept here; its two files are read where the user unpacked
them, and what they import beyond the standard library is replaced by a stand-in that is never called.
"""

from __future__ import annotations

import ast
import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NewType

FILES = {
    "kv_cache_utils.py": (
        "BlockHash", "BlockHashWithGroupId", "FreeKVCacheBlockQueue", "KVCacheBlock", "get_block_hash",
        "get_group_id", "hash_block_tokens", "make_block_hash_with_group_id",
    ),
    "block_pool.py": ("BlockHashToBlockMap", "BlockPool"),
}  # fmt: skip


class VllmPool:
    """Works as in `bench.allocator`, on vLLM's BlockPool with one group. Raises OSError without its files."""

    def __init__(self, root: Path, blocks: int, block_tokens: int, requests: int, per_request: int):
        (core,) = {path.parent for path in root.rglob("v1/core/block_pool.py")} or {root}
        self._names = _load(core)
        self._blocks, self._tokens = blocks, block_tokens
        self._requests, self._per_request = requests, per_request

    def bulk(self, order: Sequence[int]) -> Callable[[], object]:
        pool = self._pool(caching=False)

        def work() -> None:
            held = [pool.get_new_blocks(self._per_request) for _ in range(self._requests)]
            for slot in order:
                pool.free_blocks(reversed(held[slot]))

        return work

    def growth(self, order: Sequence[int]) -> Callable[[], object]:
        pool = self._pool(caching=False)

        def work() -> None:
            held: list[list[Any]] = [[] for _ in range(self._requests)]
            take = pool.get_new_blocks
            for _ in range(self._per_request):
                for blocks in held:
                    blocks += take(1)
            for slot in order:
                pool.free_blocks(reversed(held[slot]))

        return work

    def steady(self, order: Sequence[int], tokens: Sequence[Sequence[int]]) -> Callable[[], object]:
        """With its default keys: SHA-256 of the pickled block."""
        pool, size, n = self._pool(caching=True), self._tokens, self._per_request
        turn = 0

        def sha256(value: object) -> bytes:
            return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()

        def work() -> None:
            nonlocal turn
            turn += 1
            hash_block, held = self._names["hash_block_tokens"], []
            for slot in range(self._requests):
                hashes: list[bytes] = []
                parent = turn.to_bytes(32, "big")
                for at in range(0, n * size, size):
                    parent = hash_block(sha256, parent, tokens[slot][at : at + size], None)
                    hashes.append(parent)
                blocks = pool.get_new_blocks(n)
                pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, n, size, 0)
                held.append(blocks)
            for slot in order:
                pool.free_blocks(reversed(held[slot]))

        for _ in range(self._blocks // (self._requests * n) + 2):
            work()
        return work

    def _pool(self, caching: bool) -> Any:
        return self._names["BlockPool"](self._blocks, caching, self._tokens)


class _Anything:
    """Stands for a name that the pool mentions and never uses here."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *args: object, **more: object) -> _Anything:
        return self


def _load(core: Path) -> dict[str, Any]:
    """The names of `FILES`, defined from the files in `core`."""
    module = ModuleType("_vllm_block_pool")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    names = vars(module)
    names.update(
        Any=Any, Callable=Callable, Iterable=Iterable, Sequence=Sequence, NewType=NewType,
        dataclass=dataclass, field=field, logger=_Anything(), NONE_HASH=bytes(32), MEDIUM_GPU="GPU",
        # One group, whose blocks are as long as the hashes'.
        resolve_block_hashes=lambda hashes, hash_size, block_size: hashes,
    )  # fmt: skip
    for file, wanted in FILES.items():
        path = core / file
        parts: list[ast.stmt] = []
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            if any(getattr(t, "name", getattr(t, "id", None)) in wanted for t in targets):
                parts.append(node)
        # As under this import, annotations are not evaluated: they name what was not loaded.
        late = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        body = ast.fix_missing_locations(ast.Module([late, *parts], []))
        exec(compile(body, str(path), "exec"), names)
    return names
