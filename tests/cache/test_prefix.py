"""Block keys: what they depend on and what they do not."""

from __future__ import annotations

from array import array

import numpy as np

from rimuru.cache import extend_keys, new_seed

SEED = bytes(range(32))


def keys(tokens, block=4, seed=SEED, salt=""):
    out: list[bytes] = []
    extend_keys(out, tokens, block, seed, salt)
    return out


def test_a_key_needs_a_full_block_and_has_128_bits():
    assert [len(k) for k in keys(list(range(11)))] == [16, 16]


def test_a_key_stands_for_everything_before_it():
    a, b = keys([1, 2, 3, 4, 5, 6, 7, 8]), keys([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[1] != b[1]
    assert keys([1, 2, 3, 4, 5, 6, 7, 8, 9])[:2] == a


def test_keys_grow_with_the_sequence_as_if_made_at_once():
    tokens = list(range(40))
    grown: list[bytes] = []
    for n in (3, 8, 9, 31, 40):
        extend_keys(grown, tokens[:n], 4, SEED)
    assert grown == keys(tokens)


def test_the_container_of_the_tokens_does_not_matter():
    tokens = [0, 7, 151_935, 2**31 - 1] * 4
    assert keys(tokens) == keys(array("i", tokens)) == keys(np.array(tokens)) == keys(tuple(tokens))


def test_salt_and_seed_separate_tenants_and_processes():
    tokens = list(range(8))
    found = [keys(tokens), keys(tokens, salt="a"), keys(tokens, salt="b"), keys(tokens, seed=new_seed())]
    assert len({k[0] for k in found}) == 4
