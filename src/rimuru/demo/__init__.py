"""The demo: a real model, small enough for any machine, served under a cap that cannot hold it all.

Room: on top, beside the server, which it talks to over HTTP only. Rule: nothing below imports it.
"""

from .build import ensure_demo

__all__ = ["ensure_demo"]
