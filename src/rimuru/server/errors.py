"""Errors as clients of the OpenAI API read them.

Room: the server's floor. Rule: whatever goes wrong leaves as `{"error": {message, type, param, code}}`
with the status the client's library maps to the right exception, and never with a traceback.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from rimuru.errors import EngineDeadError, RequestError, RimuruError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(RimuruError):
    """An answer other than success: HTTP status, message, the field at fault, extra headers."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, object]:
        kind = _TYPES.get(self.status) or HTTPStatus(self.status).phrase.title().replace(" ", "") + "Error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return {"error": error}

    def json(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=False, separators=(",", ":")).encode()


def as_api_error(exc: BaseException) -> ApiError:
    """The answer to any exception; unknown ones show no detail (the log has it)."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        return ApiError(400, str(exc), exc.param)
    if isinstance(exc, EngineDeadError):
        return ApiError(503, f"The engine has stopped: {exc}")
    return ApiError(500, "Internal error; the server's log has the details.")
