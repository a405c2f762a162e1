"""`rimuru serve`: load a model, answer HTTP until told to stop.

Room: the server's command. Rule: importing this module needs no server dependency; a flag acts or
is refused by name; SIGTERM drains with a limit and ends with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rimuru.engine.arguments import add_engine_arguments, engine_config
from rimuru.engine.config import EngineConfig, parse_size
from rimuru.errors import ConfigError, EngineDeadError, RimuruError

from .parsers import REASONING_STYLES, TOOL_STYLES
from .settings import ServerSettings

if TYPE_CHECKING:
    from rimuru.engine.client import EngineClient
    from rimuru.engine.inprocess import InProcessClient
    from rimuru.engine.process import ProcessClient

    from .frontend import Frontend

log = logging.getLogger("rimuru.server")

_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag that acts. Names are vLLM's where the meaning is vLLM's."""
    parser.add_argument("model", help="local folder, Hub id, or 'demo'")

    # fmt: off
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="0.0.0.0", help="address to listen on; default %(default)s, all")
    http.add_argument("--port", type=int, default=8000, help="default %(default)s; 0 takes a free one")
    http.add_argument("--api-key", nargs="+", default=[], metavar="KEY",
                      help="clients must send one of these, or RIMURU_API_KEY's; default: no key")
    http.add_argument("--served-model-name", nargs="+", metavar="NAME",
                      help="names to answer to, the first is reported; default: MODEL as given")
    for what, meaning in (
        ("origins", "web pages whose scripts may use this server"), ("methods", "HTTP methods they may use"),
        ("headers", "headers they may send"),
    ):
        http.add_argument(f"--allowed-{what}", type=_json_list, default=["*"], metavar="JSON",
                          help=f"{meaning}; default [\"*\"], all")
    http.add_argument("--allow-credentials", action="store_true",
                      help="they may send cookies; off by default")
    http.add_argument("--ssl-keyfile", metavar="FILE", help="for HTTPS: the key; default: plain HTTP")
    http.add_argument("--ssl-certfile", metavar="FILE",
                      help="for HTTPS: the certificate; default: plain HTTP")
    http.add_argument("--root-path", default="", metavar="PATH",
                      help="path prefix that a proxy strips; default: none")
    http.add_argument("--max-queue", type=int, metavar="N",
                      help="answer 429 while N requests wait for their first token; default: no limit")
    http.add_argument("--max-body-size", default="64MiB", metavar="SIZE",
                      help="of a request, beyond it 413; default %(default)s")
    http.add_argument("--request-timeout", type=float, metavar="SECONDS",
                      help="stop longer requests with 504; default: no limit")
    http.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
                      help="how long running requests may take to end at shutdown; default %(default)g")
    http.add_argument("--stream-interval", type=int, default=1, metavar="N",
                      help="tokens in one chunk of a stream; default %(default)s")
    http.add_argument("--scheduling-policy", choices=["fcfs", "priority"], default="priority",
                      help="fcfs refuses requests that set a priority; default %(default)s")
    http.add_argument("--engine-process", action=argparse.BooleanOptionalAction, default=True,
                      help="run the engine in a process of its own; on by default")
    http.add_argument("--enable-log-requests", action="store_true",
                      help="a line for each request; off by default")
    http.add_argument("--disable-log-stats", action="store_true",
                      help="no line every 10 s in which something ran; off by default")
    http.add_argument("--log-level", default="info",
                      choices=["critical", "error", "warning", "info", "debug"],
                      help="of rimuru's own lines; default %(default)s")
    http.add_argument("--uvicorn-log-level", default="warning",
                      choices=["critical", "error", "warning", "info", "debug", "trace"],
                      help="of the HTTP server's, from info on a line for each access; default %(default)s")

    text = parser.add_argument_group("text")
    text.add_argument("--chat-template", metavar="TEMPLATE",
                      help="file or template text; default: the model's")
    text.add_argument("--trust-request-chat-template", action="store_true",
                      help="let requests bring their own template, which is a program; off by default")
    text.add_argument("--response-role", default="assistant", metavar="ROLE",
                      help="role of the answer's message; default %(default)s")
    text.add_argument("--tool-call-parser", choices=sorted(TOOL_STYLES),
                      help="how the model writes tool calls; default: none are looked for")
    text.add_argument("--enable-auto-tool-choice", action="store_true",
                      help="needs --tool-call-parser, which is enough by itself; off by default")
    text.add_argument("--reasoning-parser", choices=sorted(REASONING_STYLES),
                      help="tell what is between <think> and </think> from the answer; default: it is all "
                      "answer")
    text.add_argument("--generation-config", default="auto", metavar="SOURCE",
                      help="sampling defaults: auto (the model's), vllm (none), or a folder; default auto")
    text.add_argument("--override-generation-config", type=_json_object, default={}, metavar="JSON",
                      help="sampling defaults that come before those, as {\"temperature\": 0.6}; default {}")
    # fmt: on
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the exit code."""
    config = engine_config(args)
    settings = server_settings(args)
    _need_server_extra()
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        import uvloop
    except ModuleNotFoundError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    # Bound before the model is loaded: a taken port should not cost minutes to find out.
    with bind(args.host, args.port) as listener, asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve(args, config, settings, listener))


def _need_server_extra() -> None:
    for module in ("fastapi", "uvicorn", "prometheus_client", "zmq", "msgspec"):
        if importlib.util.find_spec(module) is None:
            raise RimuruError(
                f"rimuru serve needs {module}, which is missing: pip install '.[server]' in the checkout"
            )


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, or `ConfigError`. It listens, and is not refused, once served."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"--host {host} --port {port}: {exc.strerror}; choose another port, or 0 for a free one"
        ) from None
    return listener


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The server's part of the flags, checked."""
    for flag, value, low in (
        ("--max-queue", args.max_queue, 1),
        ("--stream-interval", args.stream_interval, 1),
        ("--port", args.port, 0),
        ("--shutdown-timeout", args.shutdown_timeout, 0),
    ):
        if value is not None and value < low:
            raise ConfigError(f"{flag} must be at least {low}, got {value}")
    if args.port > 65535:
        raise ConfigError(f"--port must be at most 65535, got {args.port}")
    if args.request_timeout is not None and args.request_timeout <= 0:
        raise ConfigError(f"--request-timeout must be more than 0 seconds, got {args.request_timeout:g}")
    if args.enable_auto_tool_choice and args.tool_call_parser is None:
        raise ConfigError(
            f"--enable-auto-tool-choice needs --tool-call-parser: {', '.join(sorted(TOOL_STYLES))}"
        )
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise ConfigError("--ssl-keyfile and --ssl-certfile go together")
    keys = list(args.api_key)
    if os.environ.get("RIMURU_API_KEY"):
        keys.append(os.environ["RIMURU_API_KEY"])
    shown = {name: value for name, value in vars(args).items() if name not in ("api_key", "run")}
    return ServerSettings(
        served_names=args.served_model_name or [args.model],
        api_keys=keys,
        max_queue=args.max_queue,
        max_body_bytes=parse_size(args.max_body_size, "--max-body-size", bare=1),
        request_timeout=args.request_timeout,
        stream_interval=args.stream_interval,
        honour_priority=args.scheduling_policy == "priority",
        response_role=args.response_role,
        tool_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        log_requests=args.enable_log_requests,
        allowed_origins=args.allowed_origins,
        allowed_methods=args.allowed_methods,
        allowed_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        described=shown,
    )


def generation_defaults(source: str, model_path: str, override: dict[str, Any]) -> dict[str, Any]:
    """Sampling defaults from a `generation_config.json`, then from the command line."""
    folder = {"auto": model_path, "vllm": None}.get(source, source)
    suggested: dict[str, Any] = {}
    if folder is not None:
        path = Path(folder) / "generation_config.json"
        if path.is_file():
            suggested = json.loads(path.read_text(encoding="utf-8"))
        elif source != "auto":
            raise ConfigError(f"--generation-config: there is no {path}")
    unknown = sorted(override.keys() - set(_GENERATION_DEFAULTS))
    if unknown:
        raise ConfigError(
            f"--override-generation-config: {', '.join(unknown)} cannot be set; "
            f"these can: {', '.join(_GENERATION_DEFAULTS)}"
        )
    merged = {**suggested, **override}
    return {name: merged[name] for name in _GENERATION_DEFAULTS if merged.get(name) is not None}


async def _serve(
    args: argparse.Namespace, config: EngineConfig, settings: ServerSettings, listener: socket.socket
) -> int:
    from rimuru.models.tokenizer import load_tokenizer

    from .frontend import Frontend
    from .prompts import Prompts, read_template

    template = read_template(args.chat_template)
    config.tokenizer = tokenizer_folder(config.tokenizer)
    client = await start_engine(config, args.engine_process)
    try:
        info = client.info
        settings.default_sampling = generation_defaults(
            args.generation_config, info.model_path, args.override_generation_config
        )
        if settings.default_sampling:
            log.info("sampling defaults of the model: %s", settings.default_sampling)
        tokenizer = load_tokenizer(
            config.tokenizer or info.model_path, trust_remote_code=config.trust_remote_code
        )
        prompts = Prompts(tokenizer, info, template, args.trust_request_chat_template)
        frontend = Frontend(client, prompts, settings)
        return await listen(frontend, args, listener)
    finally:
        await client.close()


def tokenizer_folder(name: str | None) -> str | None:
    """`--tokenizer` with names of ours, such as `demo`, turned into their folders."""
    if name is None:
        return None
    from rimuru.engine.core import local_models  # brings torch, which a server without this flag never needs

    ours = local_models().get(name)
    return name if ours is None else str(ours())


async def start_engine(config: EngineConfig, own_process: bool) -> EngineClient:
    """A client whose engine has loaded its model; raises what loading raised."""
    client: InProcessClient | ProcessClient
    if own_process:
        from rimuru.engine.process import ProcessClient

        client = ProcessClient(config)
    else:
        from rimuru.engine.inprocess import InProcessClient

        client = InProcessClient(config)
    await client.start()
    return client


async def listen(frontend: Frontend, args: argparse.Namespace, listener: socket.socket) -> int:
    """Answer HTTP until SIGTERM or SIGINT (0) or the engine's death (1)."""
    import uvicorn

    from .app import create_app

    options = uvicorn.Config(
        create_app(frontend, None if args.disable_log_stats else 10.0),
        log_level=args.uvicorn_log_level,
        access_log=args.uvicorn_log_level in ("info", "debug", "trace"),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        root_path=args.root_path,
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    server = uvicorn.Server(options)
    # Its own handlers would end the process by signal instead of with 0.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)  # the second one ends it at once
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(_engine_death(frontend.client))
    announced = asyncio.create_task(_announce(server, frontend, listener))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            log.critical("the engine has stopped (%s); the server ends", watching.result())
            frontend.draining = True
            await asyncio.sleep(1.0)  # requests under way get their error first
        elif stopping.done():
            log.info("stopping: %d requests may end within %g s", len(frontend.active), args.shutdown_timeout)
            await frontend.drain(args.shutdown_timeout)
        server.should_exit = True
        await serving
        return 1 if watching.done() or not server.started else 0
    finally:
        for task in (watching, announced, stopping):
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _engine_death(client: EngineClient) -> str:
    """Returns, with the reason, once the engine is dead."""
    while True:
        await asyncio.sleep(1.0)
        try:
            await client.check_health()
        except EngineDeadError as exc:
            return str(exc)


async def _announce(server: Any, frontend: Frontend, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    while not server.started:
        await asyncio.sleep(0.02)
    names = ", ".join(frontend.settings.served_names)
    print(f"rimuru serves {names} at http://{host}:{port}/v1", file=sys.stderr, flush=True)


def _json_list(text: str) -> list[str]:
    value = json.loads(text)
    if not isinstance(value, list):
        raise argparse.ArgumentTypeError("must be a JSON list")
    return value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
