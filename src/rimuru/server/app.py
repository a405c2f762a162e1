"""The HTTP application: routes, authentication, errors in one shape.

Room: the top of the server. Rule: routes read as a list; every answer, from a wrong path to a crash,
is JSON in the OpenAI shape; no middleware touches a streamed token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rimuru import __version__
from rimuru.errors import EngineDeadError, RequestError

from . import chat_completions, completions
from .errors import ApiError
from .frontend import Frontend, Job
from .protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .stream import ClientLeft, EventStream, answer_to, until_left

log = logging.getLogger("rimuru.server")

HEALTH_SECONDS = 5.0
_OPEN_PATHS = {"/health", "/ping", "/metrics", "/version"}  # probes and scrapers carry no key
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(frontend: Frontend, log_stats_seconds: float | None = None) -> ASGIApp:
    """The application over a started engine. The engine is the caller's: the app never closes it."""
    settings = frontend.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(frontend.metrics.watch(log_stats_seconds))
        yield
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    app = FastAPI(title="rimuru", version=__version__, lifespan=lifespan)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(RequestError, _on_error)
    app.add_exception_handler(EngineDeadError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_generation(app, frontend)
    _add_models(app, frontend)
    _add_tokenizer(app, frontend)
    _add_operations(app, frontend)
    _describe_bodies(app, settings.served_names)

    wrapped: ASGIApp = Edge(app, frontend)
    return CORSMiddleware(
        wrapped,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=["x-request-id"],
    )


class Edge:
    """Request ids, keys, body size and the count of answers, around every route."""

    def __init__(self, app: ASGIApp, frontend: Frontend):
        self.app = app
        self.frontend = frontend
        self.keys = [f"Bearer {key}".encode() for key in frontend.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["given_request_id"] = given if request_id == given else None
        # HEAD is GET without the body, which the server below leaves out.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            error = self._refusal(asked, headers)
            if error is not None:
                await _json_error(error)(asked, receive, tagged)
            else:
                await self.app(asked, receive, tagged)
        except Exception:
            # Starlette answers a crash with 500 and raises it again, for the server to log; it is logged.
            if not status:
                raise
        finally:
            route = getattr(asked.get("route"), "path", "other")
            self.frontend.metrics.http[route, scope["method"], status or 499] += 1

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.keys and path not in _OPEN_PATHS and scope["method"] != "OPTIONS":
            given = headers.get(b"authorization", b"")
            if not any(secrets.compare_digest(given, key) for key in self.keys):
                reason = "is wrong" if given else "is missing"
                return ApiError(401, f"The API key {reason}; send 'Authorization: Bearer KEY'.")
        return None


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; `ApiError` 413 beyond `limit` bytes, as soon as that is known."""
    declared = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size = int(declared) if declared.isdigit() else 0
    if size <= limit:
        size = 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    break
                parts.append(part)
        except ClientDisconnect:
            raise ClientLeft from None
    if size > limit:
        raise ApiError(
            413, f"The body has more than {limit} bytes, the most this server reads (--max-body-size)."
        )
    return b"".join(parts)


def _add_generation(app: FastAPI, frontend: Frontend) -> None:
    async def serve(
        request: Request,
        body: Any,
        start: Callable[..., Awaitable[Any]],
        answer: Callable[..., Any],
        stream: Callable[..., AsyncGenerator[bytes, None]],
    ) -> Any:
        job: Job = await start(frontend, body, request.state.given_request_id)
        if frontend.settings.log_requests:
            log.info("%s: %d prompt tokens, %s", job.id, job.prompt_tokens, job.params)
        if body.stream:
            return _Streamed(EventStream(stream(job, body), []))
        return JSONResponse(await until_left(request.receive, answer(job, body)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = ChatBody.read(await read_body(request, frontend.settings.max_body_bytes))
        return await serve(
            request,
            body,
            chat_completions.start_chat,
            chat_completions.answer_chat,
            chat_completions.stream_chat,
        )

    @app.post("/v1/completions")
    async def completion(request: Request) -> Any:
        body = CompletionBody.read(await read_body(request, frontend.settings.max_body_bytes))
        return await serve(
            request,
            body,
            completions.start_completion,
            completions.answer_completion,
            completions.stream_completion,
        )


class _Streamed(Response):
    """Lets FastAPI hand the connection to an `EventStream` untouched."""

    def __init__(self, events: EventStream):
        super().__init__()
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.events(scope, receive, send)


def _add_models(app: FastAPI, frontend: Frontend) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        info = frontend.info
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "rimuru",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
            "permission": [],
        }

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [card(name) for name in frontend.settings.served_names]}

    app.get("/v1/models/", include_in_schema=False)(models)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if name not in frontend.settings.served_names:
            raise ApiError(404, f"The model {name!r} does not exist here.", "model")
        return card(name)


def _add_tokenizer(app: FastAPI, frontend: Frontend) -> None:
    prompts = frontend.prompts

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        body = TokenizeBody.read(await read_body(request, frontend.settings.max_body_bytes))
        frontend.admit(body.model, 0)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if body.messages is not None:
            tokens = await prompts.chat(
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                add_special_tokens=bool(body.add_special_tokens),
                template=body.chat_template,
                template_kwargs=body.chat_template_kwargs,
            )
        else:
            assert body.prompt is not None
            tokens = await prompts.encode(body.prompt, body.add_special_tokens is not False)
        strings = [prompts.backend.id_to_token(t) for t in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": frontend.info.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Any:
        body = DetokenizeBody.read(await read_body(request, frontend.settings.max_body_bytes))
        frontend.admit(body.model, 0)
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < frontend.info.vocab_size:
            raise RequestError(f"Token ids must be from 0 to {frontend.info.vocab_size - 1}.", "tokens")
        return {"prompt": prompts.backend.decode(body.tokens, skip_special_tokens=False)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Any:
        tokenizer = prompts.tokenizer.fast
        special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "model_max_length": frontend.info.max_model_len,
            "chat_template": prompts.chosen_template or prompts.tokenizer.template,
            **special,
        }


def _add_operations(app: FastAPI, frontend: Frontend) -> None:
    client = frontend.client

    @app.get("/health")
    async def health() -> Response:
        if frontend.draining:
            raise ApiError(503, "The server is shutting down.")
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await client.check_health()
        except TimeoutError:
            raise ApiError(503, f"The engine did not answer within {HEALTH_SECONDS:g} s.") from None
        return Response(status_code=200)

    app.get("/ping", operation_id="ping")(health)
    app.post("/ping", operation_id="ping_post")(health)

    @app.get("/version")
    async def version() -> Any:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        text, content_type = await frontend.metrics.expose(request.headers.get("accept", ""))
        return PlainTextResponse(text, media_type=None, headers={"content-type": content_type})

    @app.get("/load")
    async def load() -> Any:
        return {"server_load": len(frontend.active), "waiting": len(frontend.waiting)}

    @app.get("/server_info")
    async def server_info() -> Any:
        info = dataclasses.asdict(frontend.info)
        info["eos_ids"] = sorted(info["eos_ids"])
        return {"version": __version__, "engine": info, "config": frontend.settings.described}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Any:
        return {"reset": await client.reset_prefix_cache()}

    @app.get("/rimuru/pool")
    async def pool() -> Any:
        stats = await frontend.metrics.refresh()
        kinds: dict[str, dict[str, dict[str, int]]] = {}
        for (kind, state), size in stats.pool.bytes_by.items():
            pages = stats.pool.pages_by.get((kind, state), 0)
            kinds.setdefault(kind, {})[state] = {"bytes": size, "pages": pages}
        return {
            "pool_bytes": stats.pool.pool_bytes,
            "kinds": kinds,
            "experts_resident": stats.experts_resident,
            "experts_total": stats.experts_total,
            "kv_usage": stats.kv_usage,
            "boundary_moves": sum(stats.boundary_moves.values()),
            "device_peak_bytes": stats.device_peak_bytes,
        }


def _json_error(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


async def _on_client_left(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)


async def _on_error(request: Request, exc: Exception) -> Response:
    return _json_error(answer_to(exc))


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path, method = request.url.path, request.method
    if exc.status_code == 404:
        message = f"There is no {path} here; the API begins at /v1, its description is at /docs."
    elif exc.status_code == 405:
        routes = [r for r in request.app.routes if getattr(r, "path", None) == path]
        allowed = ", ".join(sorted({method for r in routes for method in r.methods or ()}))
        return _json_error(
            ApiError(405, f"{path} does not answer {method}, only {allowed}.", headers={"allow": allowed})
        )
    else:
        message = str(exc.detail)
    return _json_error(ApiError(exc.status_code, message, headers=dict(exc.headers or {})))


_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def _describe_bodies(app: FastAPI, served_names: list[str]) -> None:
    """Put the bodies, which the routes parse themselves, into the OpenAPI description."""
    names = {"anyOf": [{"enum": served_names}, {"type": "null"}], "default": None, "title": "Model"}
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        schema = describe()
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        for path, model in _BODIES.items():
            definition = model.model_json_schema(ref_template="#/components/schemas/{model}")
            components.update(definition.pop("$defs", {}))
            definition["properties"]["model"] = names
            components[model.__name__] = definition
            reference = {"$ref": f"#/components/schemas/{model.__name__}"}
            schema["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
