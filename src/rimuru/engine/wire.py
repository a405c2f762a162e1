"""What crosses the socket between a front end and the core's process.

Room: the seam's vocabulary. Rule: arrays of plain data, one message a step whatever it brought; both
sides of a session come from one installation, so there are no versions.
"""

from __future__ import annotations

from array import array

import msgspec

from rimuru.errors import RequestError

from .client import EngineInfo
from .request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from .stats import EngineStats


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base of all messages: an array that begins with the class's name."""


# -- to the core -----------------------------------------------------------------------------


class Add(Message):
    """Queue one sequence; answered by `Outputs`, or once by `Refused`."""

    request_id: str
    tokens: bytes  # int32 in the machine's order: four bytes a token and nothing to parse
    params: SamplingParams
    priority: int
    cache_salt: str


class Abort(Message):
    request_id: str


class Call(Message):
    """Run a method of the core without arguments; answered by `Answer` with the same number."""

    number: int
    method: str


class Stop(Message):
    """Leave the loop and end the process."""


# -- to the front end ------------------------------------------------------------------------


class Loading(Message):
    """How far loading is: what goes on, and a share from 0 to 1."""

    what: str
    share: float


class Ready(Message):
    info: EngineInfo


class Failed(Message):
    """Loading ended with an error: its class's name, its message, and a field where it names one."""

    kind: str
    message: str


class Output(msgspec.Struct, array_like=True, gc=False):
    """`TokenOutput` without its names."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    finish: FinishReason | None
    stop_reason: int | str | None
    num_cached: int
    error: str | None
    error_param: str | None


class Outputs(Message):
    """All that one step brought."""

    outputs: list[Output]


class Refused(Message):
    request_id: str
    message: str
    param: str | None


class Answer(Message):
    """The value of a `Call`, or the error it raised."""

    number: int
    value: EngineStats | bool | None
    error: str | None


class Died(Message):
    """The core's loop ended with an error; nothing follows."""

    message: str


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Add | Abort | Call | Stop).decode
decode_event = msgspec.msgpack.Decoder(Loading | Ready | Failed | Outputs | Refused | Answer | Died).decode


def pack_tokens(tokens: list[int]) -> bytes:
    """Token ids for `Add`; `RequestError` for what is no id."""
    try:
        return array("i", tokens).tobytes()
    except (TypeError, OverflowError):
        raise RequestError("the prompt holds something that is no token id", "prompt") from None


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    return array("i", packed).tolist()


def pack_outputs(outputs: list[TokenOutput]) -> bytes:
    """A step's outputs as one message."""
    return encode(
        Outputs(
            [
                Output(
                    o.request_id, o.tokens, o.logprobs, o.prompt_logprobs, o.finish, o.stop_reason,
                    o.num_cached, o.error, o.error_param,
                )
                for o in outputs
            ]
        )
    )  # fmt: skip


def unpack_outputs(message: Outputs) -> list[TokenOutput]:
    """The inverse of `pack_outputs`, after decoding."""
    return [
        TokenOutput(
            o.request_id, o.tokens, o.logprobs, o.prompt_logprobs, o.finish, o.stop_reason, o.num_cached,
            o.error, o.error_param,
        )
        for o in message.outputs
    ]  # fmt: skip
