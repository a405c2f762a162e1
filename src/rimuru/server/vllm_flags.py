"""Flags of `vllm serve` that do not act here, and what to use instead.

Room: data of the command line. Rule: such a flag is never accepted in silence. One that only asks for
what is always so here passes with a note; every other ends the command and names the way that works.
"""

from __future__ import annotations

_PARALLEL = "one device serves the model for now; leave it out (or give 1)"
_SPECULATIVE = "speculative decoding is not served; leave it out"
_LORA = "adapters are not served; merge them into the checkpoint"
_MEDIA = "only text is served; leave it out"
_POOLING = "only generation is served; leave it out"
_KV_SIZE = "size the pool with --device-memory; --memory-policy and --resident-experts divide it"
_OFFLOAD = (
    "experts move between device and host by themselves; set --device-memory for the device's share and "
    "--host-memory for the host's"
)
_KV_TRANSFER = "KV cache is not moved between servers; leave it out"
_COMPILE = "there is nothing to compile; --enforce-eager switches CUDA graphs off"
_GRAMMAR = "xgrammar constrains output, and nothing about it needs to be set; leave it out"
_TRACE = "traces are not exported; /metrics has the measurements"
_KERNELS = "kernels are chosen by device; leave it out"
_WORKERS = "workers are started by rimuru itself; leave it out"
_SLIDING = "the model's own configuration decides; leave it out"
_LOADER = "checkpoints are read from safetensors; --load-format auto or dummy"
_LOGS = "--log-level, --uvicorn-log-level and --enable-log-requests set what is logged"
_HTTP = "put a proxy in front for this; --root-path tells the server about it"

_ADVICE: dict[str, str] = {
    _PARALLEL: "tensor-parallel-size tp pipeline-parallel-size pp data-parallel-size dp data-parallel-rank "
    "data-parallel-start-rank data-parallel-size-local data-parallel-address data-parallel-rpc-port "
    "data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb enable-expert-parallel "
    "all2all-backend enable-eplb eplb-config expert-placement-strategy decode-context-parallel-size dcp "
    "prefill-context-parallel-size pcp enable-dbo dbo-decode-token-threshold dbo-prefill-token-threshold "
    "disable-custom-all-reduce nnodes node-rank master-addr master-port distributed-executor-backend "
    "distributed-timeout-seconds headless numa-bind api-server-count",
    _SPECULATIVE: "speculative-config speculative-model num-speculative-tokens spec-method spec-model "
    "spec-tokens ngram-prompt-lookup-max ngram-prompt-lookup-min num-lookahead-slots",
    _LORA: "enable-lora enable-lora-bias lora-modules max-loras max-lora-rank lora-dtype "
    "lora-extra-vocab-size max-cpu-loras fully-sharded-loras default-mm-loras lora-target-modules "
    "enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token qlora-adapter-name-or-path",
    _MEDIA: "limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type "
    "mm-encoder-tp-mode mm-encoder-only mm-encoder-attn-backend media-io-kwargs interleave-mm-strings "
    "skip-mm-profiling video-pruning-rate allowed-local-media-path allowed-media-domains "
    "disable-mm-preprocessor-cache enable-mm-embeds enable-prompt-embeds disable-chunked-mm-input "
    "language-model-only",
    _POOLING: "runner task convert pooler-config override-pooler-config io-processor-plugin",
    _KV_SIZE: "kv-cache-memory-bytes kv-cache-memory num-gpu-blocks-override max-seq-len-to-capture "
    "long-prefill-token-threshold max-num-partial-prefills max-long-partial-prefills "
    "gpu-memory-utilization-per-model",
    _OFFLOAD: "cpu-offload-gb cpu-offload-params swap-space offload-backend offload-group-size "
    "offload-num-in-group offload-prefetch-step offload-params kv-offloading-size kv-offloading-backend",
    "the KV cache has the model's dtype; leave it out (or give auto)": "kv-cache-dtype "
    "kv-cache-dtype-skip-layers calculate-kv-scales quantization-param-path",
    "the checkpoint says its own format, and one that is not served is named at load": "quantization q "
    "quantization-config allow-deprecated-quantization",
    _KV_TRANSFER: "kv-transfer-config kv-events-config ec-transfer-config kv-sharing-fast-prefill "
    "disable-hybrid-kv-cache-manager no-disable-hybrid-kv-cache-manager weight-transfer-config",
    _COMPILE: "compilation-config cc O optimization-level cudagraph-capture-sizes max-cudagraph-capture-size "
    "cuda-graph-sizes cudagraph-mode performance-mode",
    _GRAMMAR: "structured-outputs-config guided-decoding-backend reasoning-config logits-processors "
    "logits-processor-pattern",
    "parsers are built in; --tool-call-parser and --reasoning-parser choose one": "tool-parser-plugin "
    "reasoning-parser-plugin enable-reasoning",
    "tools run at the client": "tool-server",
    "tools are left out of the prompt where tool_choice is none": "exclude-tools-when-tool-choice-none",
    _TRACE: "otlp-traces-endpoint collect-detailed-traces show-hidden-metrics-for-version profiler-config "
    "kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics enable-layerwise-nvtx-tracing "
    "enable-mfu-metrics enable-logging-iteration-details enable-per-request-metrics",
    _KERNELS: "attention-backend attention-config moe-backend kernel-config mamba-backend "
    "gdn-prefill-backend linear-backend enable-flashinfer-autotune",
    _WORKERS: "worker-cls worker-extension-cls ray-workers-use-nsight max-parallel-loading-workers "
    "worker-use-ray scheduler-cls additional-config tokenizer-pool-size tokenizer-pool-type "
    "stream-output-worker",
    _SLIDING: "disable-sliding-window disable-cascade-attn hf-config-path config-format hf-overrides "
    "rope-scaling rope-theta model-impl code-revision tokenizer-revision tokenizer-mode mamba-cache-dtype "
    "mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode model-class-overrides",
    _LOADER: "model-loader-extra-config ignore-patterns safetensors-load-strategy use-tqdm-on-load "
    "pt-load-map-location",
    "set HF_HOME for the folder of downloads": "download-dir",
    "log in with `hf auth login` or set HF_TOKEN": "hf-token",
    "the tokenizer is needed for text; send token ids to /v1/completions to pass it by": "tokens-only "
    "skip-tokenizer-init",
    "at most 20 log-probabilities a token are returned": "max-logprobs logprobs-mode",
    "preempted requests are recomputed; leave it out": "preemption-mode recompute-method",
    "one step at a time is scheduled; leave it out": "num-scheduler-steps multi-step-stream-outputs "
    "scheduler-delay-factor async-scheduling no-async-scheduling disable-async-output-proc "
    "scheduler-reserve-full-isl disable-chunked-prefill no-enable-chunked-prefill",
    "prefix blocks are keyed with blake2b; leave it out": "prefix-caching-hash-algo prefix-match-threshold",
    "stop the server instead; starting again is a clean state": "enable-sleep-mode",
    _LOGS: "log-config-file max-log-len enable-log-outputs enable-log-deltas log-error-stack "
    "disable-uvicorn-access-log disable-access-log-for-endpoints disable-log-requests "
    "disable-log-stats-per-engine aggregate-engine-logging",
    _HTTP: "uds middleware ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh disable-fastapi-docs "
    "enable-offline-docs h11-max-incomplete-event-size h11-max-header-count",
    "clients ask for it with stream_options": "enable-force-include-usage",
    "clients ask for it with return_token_ids": "return-tokens-as-token-ids",
    "pass them with each request as chat_template_kwargs": "default-chat-template-kwargs",
    "text parts are joined for every template; leave it out": "chat-template-content-format",
    "answers carry no fingerprint": "fingerprint-mode fingerprint-value",
    "write the flags on the command line": "config",
    "give the model as the first argument": "model",
    "the demo and every model take --device-memory instead": "max-gpu-memory",
    "use --shutdown-timeout": "graceful-shutdown-timeout",
}

# Flags that ask for what is always so, with the values that do (None: the bare flag).
_ALWAYS: dict[str, tuple[str | None, str]] = {
    "tensor-parallel-size": ("1", "one device is used"),
    "tp": ("1", "one device is used"),
    "pipeline-parallel-size": ("1", "one device is used"),
    "pp": ("1", "one device is used"),
    "data-parallel-size": ("1", "one replica is run"),
    "dp": ("1", "one replica is run"),
    "api-server-count": ("1", "one front end is run"),
    "cpu-offload-gb": ("0", "no weights are set apart for the host; experts go there by themselves"),
    "swap-space": ("0", "KV does not leave the device"),
    "kv-cache-dtype": ("auto", "the KV cache has the model's dtype"),
    "tokenizer-mode": ("auto", "the fast tokenizer is used"),
    "enable-chunked-prefill": (None, "prefill is always chunked"),
    "enable-prompt-tokens-details": (None, "usage always has the cached tokens"),
    "enable-server-load-tracking": (None, "/load is always there"),
    "enable-request-id-headers": (None, "answers always carry x-request-id"),
    "enable-tokenizer-info-endpoint": (None, "/tokenizer_info is always there"),
    "disable-log-requests": (None, "requests are logged only with --enable-log-requests"),
    "no-enable-log-requests": (None, "requests are logged only with --enable-log-requests"),
    "disable-uvicorn-access-log": (None, "accesses are logged only from --uvicorn-log-level info on"),
}

_BY_FLAG = {flag: text for text, flags in _ADVICE.items() for flag in flags.split()}


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")


def advice(flag: str) -> str | None:
    """What to use instead of a flag of vLLM's; None for a flag that vLLM does not know either."""
    name = _name(flag)
    if name in _ALWAYS:
        value, fact = _ALWAYS[name]
        return _BY_FLAG.get(name) or f"{fact}; leave it out" + (
            "" if value is None else f" (or give {value})"
        )
    return _BY_FLAG.get(name)


def split_granted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Take out flags that ask for what is always so: the arguments left, and a note for each one taken."""
    left, notes = [], []
    rest = iter(arguments)
    for argument in rest:
        flag, _, value = argument.partition("=")
        wanted, fact = _ALWAYS.get(_name(flag), ("", ""))
        if not flag.startswith("-") or not fact:
            left.append(argument)
            continue
        given = [argument]
        if wanted is not None and not value:
            value = next(rest, "")
            given.append(value)
        if value.lower() in ((wanted,) if wanted is not None else ("", "true")):
            notes.append(f"{flag}: {fact}")
        else:
            left += given
    return left, notes
