"""rimuru: serve Mixture-of-Experts models whose weights and KV cache share one page pool."""

__version__ = "0.1.0"
