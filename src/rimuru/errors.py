"""Errors a user can cause or meet. Every message says what was wrong, what the limit is, what would work.

Room: the package's floor; imports nothing. Rule: one class per reaction of the caller, not per cause.
"""

from __future__ import annotations


class RimuruError(Exception):
    """Root of every error the package raises on purpose."""


class ConfigError(RimuruError, ValueError):
    """A flag, parameter or model configuration that cannot work (command line: exit code 2)."""


class UnsupportedModelError(ConfigError):
    """The architecture is not served; the message lists those that are."""


class CheckpointError(RimuruError):
    """Weights on disk are missing, extra, mis-shaped or corrupt; the message names all of them."""


class MemoryPlanError(RimuruError):
    """The memory given cannot hold what was asked; the message shows the plan and values that start."""


class RequestError(RimuruError, ValueError):
    """A request that can never be served as asked (HTTP 400). `param` names the field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class EngineDeadError(RimuruError):
    """The engine stopped; no request can be served until it is started again."""
