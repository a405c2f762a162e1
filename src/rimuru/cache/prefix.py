"""Keys under which full blocks are shared: a keyed hash of everything up to the block's end.

Room: the cache. Rule: a key stands for tokens, so a collision would hand one user's KV to another:
128 bits of BLAKE2b, keyed with a secret of the process, never a faster weak hash.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

KEY_BYTES = 16


def new_seed() -> bytes:
    """A random seed for the keys of this process."""
    return secrets.token_bytes(32)


@lru_cache(maxsize=64)
def _hasher(seed: bytes, salt: str) -> Any:
    """BLAKE2b after a secret of 32 bytes made of `seed` and `salt`; copied for every block.

    A secret prefix is as good as the keyed mode (BLAKE2 knows no extension of what was hashed) and,
    with a block of 16 tokens, costs one compression instead of two.
    """
    secret = blake2b(salt.encode(), key=seed, digest_size=32).digest()
    return blake2b(secret, digest_size=KEY_BYTES)


def extend_keys(
    keys: list[bytes], tokens: Sequence[int], block_tokens: int, seed: bytes, salt: str = ""
) -> None:
    """Append the keys of blocks of `tokens` that are full and have none yet.

    tokens: all token ids of the sequence from its start (a list, `array('i')` or int32 numpy array;
    the last two need no conversion). The key of a block is the hash of (salt, key of the block
    before, token ids as int32) under a secret; the first block's "key before" is 16 zero bytes. `salt`
    separates tenants that must not share. `seed`: at most 64 bytes, secret, one a process.
    """
    first, full = len(keys), len(tokens) // block_tokens
    if first >= full:
        return
    part = tokens[first * block_tokens : full * block_tokens]
    if isinstance(part, np.ndarray):
        data = part.astype(np.int32, copy=False).tobytes()
    elif isinstance(part, array) and part.typecode in "iI":
        data = part.tobytes()
    else:
        data = array("I", part).tobytes()  # the same bytes as of "i", a third of the time
    step = 4 * block_tokens
    copy = _hasher(seed, salt).copy
    key = keys[-1] if keys else bytes(KEY_BYTES)
    for at in range(0, len(data), step):
        h = copy()
        h.update(key + data[at : at + step])
        key = h.digest()
        keys.append(key)
