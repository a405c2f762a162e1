"""The engine without a server, under load and measured: what `throughput` and `latency` share.

Room: benchmarks. Rule: flags are the engine's own; requests are token ids and go through `rimuru.LLM`, so
that neither a tokenizer nor any package of the server is needed. Every report says which routing was used,
what the steps touched, and what the device holds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rimuru.engine.arguments import add_engine_arguments, engine_config
from rimuru.engine.dummy_routing import DummyRouting
from rimuru.engine.llm import LLM, RequestOutput
from rimuru.engine.request import SamplingParams
from rimuru.errors import ConfigError, RimuruError

from . import _workload
from ._workload import Planned


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """`rimuru bench NAME` with the engine's flags and those of the report."""
    out = argparse.ArgumentParser(prog=f"rimuru bench {name}", description=(about or "").split("\n")[0])
    out.add_argument("--model", required=True, help="local folder, Hub id, or 'demo'")
    out.add_argument("--disable-detokenize", "--skip-tokenizer-init", action="store_true",
                     help="make no text of the outputs; always so where there is no tokenizer")  # fmt: skip
    out.add_argument("--output-json", metavar="FILE", help="write the result there too")
    out.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_engine_arguments(out)
    return out


def load(args: argparse.Namespace) -> tuple[LLM, float]:
    """The engine that the flags describe, its model loaded, and the seconds that took."""
    config = engine_config(args)
    began = time.perf_counter()
    options = {name: getattr(config, name) for name in config.__slots__ if name != "model"}
    llm = LLM(config.model, skip_tokenizer_init=args.disable_detokenize, **options)
    return llm, time.perf_counter() - began


@dataclass(slots=True)
class Load:
    """What serving some requests took: seconds, one `ttft` a request, and means over the steps.

    `running`: the most requests at once; `touched`: experts a layer that a step read; `missed`: the share of
    them that lay in host memory.
    """

    seconds: float
    ttft: list[float]
    output_tokens: int
    running: int
    steps: int
    touched: float
    missed: float

    def ttft_ms(self) -> dict[str, float]:
        """Keys of the result, milliseconds from the arrival to the first token."""
        ms = [value * 1e3 for value in self.ttft]
        return {"mean_ttft_ms": sum(ms) / len(ms), "p99_ttft_ms": _workload.percentile(ms, 99)}


class Counters:
    """What the engine has counted since this was made."""

    def __init__(self, llm: LLM):
        self._core = llm.core
        self._before = self._now()

    def _now(self) -> tuple[int, int, int]:
        return self._core.steps, self._core.memory.expert_hits, self._core.memory.expert_misses

    def read(self) -> tuple[int, float, float]:
        """Steps, experts a layer and step that were touched, and the share of them that was missed."""
        steps, hits, misses = (now - before for now, before in zip(self._now(), self._before, strict=True))
        layers = len(self._core.model_config.moe_layers)
        touched = (hits + misses) / max(1, steps * layers)
        return steps, touched, misses / max(1, hits + misses)


def fit(llm: LLM, planned: Sequence[Planned]) -> None:
    """Raise `ConfigError` for the first request that can never be served."""
    limit = min(llm.info.max_model_len, llm.info.max_request_tokens)
    for number, p in enumerate(planned, 1):
        if p.prompt + p.output > limit:
            raise ConfigError(
                f"request {number} has {p.prompt} prompt and {p.output} output tokens; at most {limit} in "
                "all fit (--max-model-len, --device-memory)"
            )


def serve(llm: LLM, planned: Sequence[Planned], prompts: Sequence[list[int]], seed: int = 0) -> Load:
    """Send every request when it is due, and step until all have their full length.

    Raises `RimuruError` where one fails: figures of a part of the work are no figures.
    """
    outputs: list[RequestOutput] = []
    first: dict[str, float] = {}
    counters, began, at, running = Counters(llm), time.perf_counter(), 0, 0
    while at < len(planned) or llm.has_unfinished_requests:
        now = time.perf_counter() - began
        while at < len(planned) and planned[at].at <= now:
            params = SamplingParams(max_tokens=planned[at].output, ignore_eos=True, seed=seed + at)
            outputs.append(llm.add_request(prompts[at], params))
            at += 1
        if not llm.has_unfinished_requests:
            time.sleep(min(5e-4, planned[at].at - now))
            continue
        grown = llm.step()
        running = max(running, len(llm.core.scheduler.running))
        now = time.perf_counter() - began
        for output in grown:
            first.setdefault(output.request_id, now)
    seconds = time.perf_counter() - began
    for output in outputs:
        if (error := output.outputs[0].error) is not None:
            raise RimuruError(f"{output.request_id} failed: {error}")
    steps, touched, missed = counters.read()
    ttft = [first[o.request_id] - p.at for o, p in zip(outputs, planned, strict=True)]
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    return Load(seconds, ttft, made, running, steps, touched, missed)


def facts(llm: LLM, start_seconds: float) -> dict[str, Any]:
    """What was measured and what the device holds now; keys of the result.

    `device_memory_bytes` is all that is taken on a GPU, other processes' share included, and the engine's own
    count on a CPU; `device_memory_cap_bytes` is what it may come to.
    """
    core, routing = llm.core, llm.core.model.routing
    used = core.device_peak_bytes
    name = "cpu"
    if core.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(core.device)
        used, name = total - free, torch.cuda.get_device_name(core.device)
    return {
        "model": llm.info.model,
        "device": name,
        "dtype": llm.info.dtype,
        "routing": routing.name if isinstance(routing, DummyRouting) else "the router's own",
        "experts_per_layer": core.model_config.num_experts,
        "memory_policy": llm.info.memory_policy,
        "experts_resident": int(core.store.resident.sum()),
        "experts_total": core.plan.experts_total,
        "preemptions": sum(core.scheduler.preemptions.values()),
        "boundary_moves": sum(core.memory.log.moves.values()),
        "device_memory_bytes": used,
        "device_memory_cap_bytes": core.plan.device_bytes,
        "start_seconds": start_seconds,
    }


def describe(known: dict[str, Any]) -> str:
    """`facts` for people."""
    used, cap = known["device_memory_bytes"] / 1e9, known["device_memory_cap_bytes"] / 1e9
    return (
        f"{known['model']}, {known['dtype']} on {known['device']}; start {known['start_seconds']:.1f} s\n"
        f"routing {known['routing']}, memory policy {known['memory_policy']}: {known['experts_resident']} of "
        f"{known['experts_total']} experts resident at the end, {known['boundary_moves']} boundary moves, "
        f"{known['preemptions']} preemptions\n"
        f"device memory {used:.2f} GB of {cap:.2f}"
    )


def report(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Print the result, and write it where the flags ask for that."""
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(result), encoding="utf-8")
    print(json.dumps(result) if args.json else f"{text}\n{describe(result)}")
