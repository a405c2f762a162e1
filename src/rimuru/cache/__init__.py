"""KV blocks, prefix sharing and recurrent states over the page pool.

Room: the cache. Rule: imports the pool and nothing else; no torch.
"""

from .kv import BlockCounts, KVCache, Move
from .prefix import extend_keys, new_seed
from .state import StateCache

__all__ = ["BlockCounts", "KVCache", "Move", "StateCache", "extend_keys", "new_seed"]
