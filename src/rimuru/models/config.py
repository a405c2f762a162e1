"""What a model is made of, read once from `config.json` and checked before anything is built.

Room: the models' plain data. Rule: no torch; every value is checked here, so that nothing further
down meets a nonsensical one; all that is wrong with a file is named in one error.

Both spellings of a field are read: `num_local_experts` and `num_experts`, `rope_parameters` and
`rope_theta` with `rope_scaling`, `dtype` and `torch_dtype`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rimuru.errors import ConfigError, UnsupportedModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
ROPE_KINDS = ("default", "linear", "yarn", "llama3")
_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only MoE model. Sizes count elements; tuples have one entry per layer or per id."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_eps: float
    num_experts: int
    top_k: int
    moe_intermediate: int
    norm_topk: bool  # the chosen experts' weights are made to sum to 1
    moe_layers: tuple[int, ...]  # the layers with routed experts, ascending; the others are dense
    rope_base: float = 10000.0
    rope_kind: str = "default"  # one of ROPE_KINDS
    rope_scaling: tuple[tuple[str, float], ...] = ()  # the kind's parameters, sorted by name
    rotary_dim: int = 0  # leading elements of a head that turn
    windows: tuple[int, ...] = ()  # per layer: the last positions attended to, 0 for all
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection
    qk_norm: str = "none"  # "none", "head" (each head alone) or "all" (all heads together)
    clip_qkv: float | None = None
    scoring: str = "softmax"
    shared_intermediate: int = 0  # 0: no shared expert
    shared_gate: bool = False
    dense_intermediate: int = 0
    tie_embeddings: bool = False
    dtype: str = "float32"  # what the checkpoint says it holds
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_layers(self) -> int:
        """Layers that keep KV: all of them in the families served."""
        return self.num_layers

    @property
    def routed_experts(self) -> int:
        """Experts of all MoE layers together."""
        return len(self.moe_layers) * self.num_experts

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert: gate, up and down."""
        return 3 * self.moe_intermediate * self.hidden_size

    def kv_bytes_per_token_per_layer(self, dtype: str) -> int:
        """K and V of one token in one attention layer."""
        return 2 * self.kv_size * DTYPE_BYTES[dtype]

    def dense_parameters(self) -> int:
        """Parameters outside the routed experts: what stays on the device whatever the boundary."""
        h = self.hidden_size
        attention = h * (self.q_size + 2 * self.kv_size) + self.q_size * h + 2 * h
        attention += (self.q_size + 2 * self.kv_size) * self.qkv_bias + h * self.output_bias
        attention += {"none": 0, "head": 2 * self.head_dim, "all": self.q_size + self.kv_size}[self.qk_norm]
        moe = h * self.num_experts + 3 * h * self.shared_intermediate + h * self.shared_gate
        dense = 3 * h * self.dense_intermediate
        return (
            self.num_layers * attention
            + len(self.moe_layers) * moe
            + (self.num_layers - len(self.moe_layers)) * dense
            + (1 if self.tie_embeddings else 2) * self.vocab_size * h
            + h
        )


class RawConfig:
    """A parsed `config.json` that collects what is wrong instead of stopping at the first fault."""

    def __init__(self, data: dict[str, Any], source: str):
        self.data = data
        self.source = source
        self.problems: list[str] = []

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is present and not null."""
        return next((self.data[n] for n in names if self.data.get(n) is not None), default)

    def _checked(self, names: tuple[str, ...], default: Any, good: Callable[[Any], bool], want: str) -> Any:
        value = self.get(*names)
        if value is None and default is not _REQUIRED:
            return default
        if value is None:
            self.problems.append(f"{names[0]} is missing")
        elif good(value):
            return value
        else:
            self.problems.append(f"{names[0]} must be {want}, got {value!r}")
        return None

    def integer(self, *names: str, default: Any = _REQUIRED, low: int = 1, high: int = 1 << 24) -> int:
        """An integer in `[low, high]`; `low` after a recorded problem, so that reading can go on."""

        def good(v: Any) -> bool:
            return isinstance(v, int) and not isinstance(v, bool) and low <= v <= high

        value = self._checked(names, default, good, f"an integer from {low} to {high}")
        return low if value is None and default is not None else value

    def number(self, *names: str, default: Any = _REQUIRED, low: float = 0.0, high: float = 1e12) -> float:
        """A number in `(low, high]`."""

        def good(v: Any) -> bool:
            return isinstance(v, int | float) and not isinstance(v, bool) and low < v <= high

        value = self._checked(names, default, good, f"a number above {low:g} and at most {high:g}")
        return high if value is None and default is not None else value

    def flag(self, name: str, default: bool) -> bool:
        value = self._checked((name,), default, lambda v: isinstance(v, bool), "true or false")
        return default if value is None else value

    def layer_list(self, name: str, layers: int) -> tuple[int, ...]:
        """Distinct layer indices; empty where absent."""

        def good(v: Any) -> bool:
            return isinstance(v, list) and all(type(i) is int and 0 <= i < layers for i in v)

        return tuple(
            sorted(set(self._checked((name,), [], good, f"a list of layers from 0 to {layers - 1}") or []))
        )

    def finish(self) -> None:
        """Raise `ConfigError` naming every problem found."""
        if self.problems:
            raise ConfigError(f"{self.source} cannot be served: " + "; ".join(self.problems))


def common_fields(raw: RawConfig) -> dict[str, Any]:
    """The fields every family of decoder shares, ready for `ModelConfig(**fields)`."""
    heads = raw.integer("num_attention_heads", high=4096)
    kv_heads = raw.integer("num_key_value_heads", default=heads, high=4096)
    hidden = raw.integer("hidden_size", high=1 << 17)
    layers = raw.integer("num_hidden_layers", high=1024)
    if heads % kv_heads:
        raw.problems.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = raw.get("head_dim")
    if head_dim is None and hidden % heads:
        raw.problems.append(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = max(1, hidden // heads) if head_dim is None else raw.integer("head_dim", high=1024)
    if head_dim % 2:
        raw.problems.append(f"head_dim must be even for rotary embeddings, got {head_dim}")
    if raw.get("hidden_act", default="silu") not in ("silu", "swish"):
        raw.problems.append(f"hidden_act {raw.get('hidden_act')!r} is not served, only 'silu'")
    if raw.get("quantization_config") is not None:
        method = raw.get("quantization_config")
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raw.problems.append(
            f"quantization_config {method!r} is not served; use the float32, bfloat16 or float16 checkpoint"
        )
    positions = raw.integer("max_position_embeddings", low=2)
    dtype = str(raw.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raw.problems.append(f"dtype {dtype!r} is not served, only {', '.join(DTYPE_BYTES)}")
    return {
        "vocab_size": raw.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_eps": raw.number("rms_norm_eps", high=1.0),
        "rotary_dim": head_dim,
        "windows": (0,) * layers,
        "tie_embeddings": raw.flag("tie_word_embeddings", False),
        "dtype": dtype,
        "bos_id": raw.get("bos_token_id"),
        **_rope_fields(raw, positions),
    }


def expert_fields(raw: RawConfig, intermediate: str, normalize: bool) -> dict[str, Any]:
    """The fields of the routed experts; `intermediate` is the family's name for an expert's width."""
    experts = raw.integer("num_experts", "num_local_experts", high=1 << 14)
    top_k = raw.integer("num_experts_per_tok", high=1 << 14)
    if top_k > experts:
        raw.problems.append(f"num_experts_per_tok {top_k} is more than the {experts} experts there are")
    return {
        "num_experts": experts,
        "top_k": top_k,
        "moe_intermediate": raw.integer(intermediate, high=1 << 20),
        "norm_topk": raw.flag("norm_topk_prob", normalize),
    }


def sparse_layers(raw: RawConfig, layers: int) -> tuple[int, ...]:
    """The MoE layers of the Qwen families: every `decoder_sparse_step`-th, without `mlp_only_layers`."""
    step = raw.integer("decoder_sparse_step", default=1)
    dense = raw.layer_list("mlp_only_layers", layers)
    chosen = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not chosen:
        raw.problems.append("mlp_only_layers and decoder_sparse_step leave no layer with experts")
    return chosen


def _rope_fields(raw: RawConfig, positions: int) -> dict[str, Any]:
    """Rotary embedding: base, kind of scaling and its parameters, from either spelling."""
    given = raw.get("rope_parameters", "rope_scaling", default={})
    if not isinstance(given, dict):
        raw.problems.append(f"rope_parameters must be an object, got {given!r}")
        given = {}
    rope = RawConfig({"rope_theta": raw.get("rope_theta"), **given}, raw.source)
    kind = rope.get("rope_type", "type", default="default")
    partial = rope.get("partial_rotary_factor", default=raw.get("partial_rotary_factor", default=1.0))
    if partial != 1:
        raw.problems.append(f"partial_rotary_factor {partial!r} is not served for this family, only 1")
    base = rope.number("rope_theta", default=1e6 if raw.get("model_type") == "mixtral" else 1e4, low=1.0)
    scaling: dict[str, float] = {}
    if kind not in ROPE_KINDS:
        # "dynamic" and "longrope" turn old keys again once a sequence grows, which a cache cannot follow.
        raw.problems.append(f"rope_type {kind!r} is not served, only {', '.join(ROPE_KINDS)}")
    elif kind != "default":
        scaling["factor"] = rope.number("factor", low=0.0)
    if kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = rope.integer(
            "original_max_position_embeddings",
            default=raw.get("original_max_position_embeddings", default=positions),
        )
    if kind == "llama3":
        scaling["low_freq_factor"] = rope.number("low_freq_factor")
        scaling["high_freq_factor"] = rope.number("high_freq_factor")
        if scaling["high_freq_factor"] == scaling["low_freq_factor"]:
            raw.problems.append("rope: high_freq_factor must differ from low_freq_factor")
    if kind == "yarn":
        scaling["beta_fast"] = rope.number("beta_fast", default=32.0)
        scaling["beta_slow"] = rope.number("beta_slow", default=1.0)
        scaling["truncate"] = float(rope.flag("truncate", True))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.get(name) is not None:
                scaling[name] = rope.number(name)
    raw.problems += [f"rope: {problem}" for problem in rope.problems]
    return {"rope_base": float(base), "rope_kind": str(kind), "rope_scaling": tuple(sorted(scaling.items()))}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `ConfigError` names the file and the fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a JSON object, holds {type(data).__name__}")
    return data


def _token_ids(value: Any, what: str, raw: RawConfig) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raw.problems.append(f"{what} must be a token id or a list of them, got {value!r}")
        return ()
    return tuple(dict.fromkeys(ids))


def load_model_config(path: str | Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json`, whose end-of-sequence ids win) in folder `path`.

    Raises `UnsupportedModelError` for an architecture that is not served, `ConfigError` for values
    that cannot be right; the message names all of them.
    """
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder}: no config.json there; MODEL must be a folder with a Hugging Face checkpoint"
        )
    raw = RawConfig(read_json(file), str(file))
    family = raw.get("model_type")
    if family not in FAMILIES:
        named = raw.get("architectures", default=[])
        what = f"model_type {family!r}" + (f" ({', '.join(map(str, named))})" if named else "")
        raise UnsupportedModelError(f"{file}: {what} is not served; served are {', '.join(FAMILIES)}")
    fields = importlib.import_module(f"rimuru.models.{family}").read_fields(raw)
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    fields["eos_ids"] = _token_ids(raw.get("eos_token_id") if eos is None else eos, "eos_token_id", raw)
    raw.finish()
    return ModelConfig(family=family, **fields)
