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
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "qwen3_next", "qwen3_5_moe")
TEXT_PARTS = {"qwen3_5_moe_text": "qwen3_5_moe"}  # model_type of a text part saved alone -> its family
ROPE_KINDS = ("default", "linear", "yarn", "llama3")
_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """The gated delta layers of a hybrid model."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int
    value_dim: int
    kernel: int  # of the convolution, in tokens
    fused: bool  # the projections lie in two tensors, not four

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """A sequence's recurrent state in one layer: float32 whatever the model's dtype."""
        return self.value_heads * self.key_dim * self.value_dim * 4

    @property
    def conv_elements(self) -> int:
        """What the convolution keeps of a sequence in one layer, in the model's dtype."""
        return (self.kernel - 1) * self.channels

    def parameters(self, hidden: int) -> int:
        """Parameters of one layer, its two norms on the hidden state apart."""
        values = self.value_heads * self.value_dim
        projections = hidden * (self.channels + values + 2 * self.value_heads) + values * hidden
        return projections + self.channels * self.kernel + 2 * self.value_heads + self.value_dim


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
    output_gate: bool = False  # q_proj also gives a gate on what attention returns
    zero_centred_norm: bool = False  # norms multiply by 1 + weight
    recurrent: RecurrentConfig | None = None  # the gated delta layers; the others have attention
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
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep KV, ascending."""
        recurrent = self.recurrent.layers if self.recurrent else ()
        return tuple(i for i in range(self.num_layers) if i not in recurrent)

    @property
    def attention_layers(self) -> int:
        """How many layers keep KV."""
        return len(self.kv_layers)

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
        q_rows = self.q_size * (2 if self.output_gate else 1)
        attention = h * (q_rows + 2 * self.kv_size) + self.q_size * h
        attention += (q_rows + 2 * self.kv_size) * self.qkv_bias + h * self.output_bias
        attention += {"none": 0, "head": 2 * self.head_dim, "all": self.q_size + self.kv_size}[self.qk_norm]
        moe = h * self.num_experts + 3 * h * self.shared_intermediate + h * self.shared_gate
        dense = 3 * h * self.dense_intermediate
        recurrent = len(self.recurrent.layers) * self.recurrent.parameters(h) if self.recurrent else 0
        return (
            self.attention_layers * attention
            + recurrent
            + self.num_layers * 2 * h
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


def common_fields(raw: RawConfig, partial_rotary: float | None = None) -> dict[str, Any]:
    """The fields every family of decoder shares, ready for `ModelConfig(**fields)`.

    `partial_rotary`: the share of a head that turns where the file does not say; None for families
    in which it is always all of it.
    """
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
        "windows": (0,) * layers,
        "tie_embeddings": raw.flag("tie_word_embeddings", False),
        "dtype": dtype,
        "bos_id": raw.get("bos_token_id"),
        **_rope_fields(raw, positions, head_dim, partial_rotary),
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


def recurrent_fields(raw: RawConfig, layers: int, fused: bool) -> RecurrentConfig | None:
    """The gated delta layers: those that `layer_types` or `full_attention_interval` say. None for none."""
    kinds = raw.get("layer_types")
    if kinds is None:
        interval = raw.integer("full_attention_interval", default=4)
        kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    known = ("full_attention", "linear_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raw.problems.append(f"layer_types must be {layers} of {', '.join(known)}, got {kinds!r}")
        return None
    found = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    if len(found) == layers:
        raw.problems.append("a model without any full_attention layer is not served")
    if not found:
        return None
    key_heads = raw.integer("linear_num_key_heads", default=16, high=4096)
    value_heads = raw.integer("linear_num_value_heads", default=32, high=4096)
    if value_heads % key_heads:
        raw.problems.append(
            f"linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}"
        )
    return RecurrentConfig(
        found, key_heads, value_heads,
        key_dim=raw.integer("linear_key_head_dim", default=128, high=1024),
        value_dim=raw.integer("linear_value_head_dim", default=128, high=1024),
        kernel=raw.integer("linear_conv_kernel_dim", default=4, low=2, high=64), fused=fused,
    )  # fmt: skip


def _rope_fields(
    raw: RawConfig, positions: int, head_dim: int, partial_rotary: float | None
) -> dict[str, Any]:
    """Rotary embedding: base, kind of scaling and its parameters, from either spelling."""
    given = raw.get("rope_parameters", "rope_scaling", default={})
    if not isinstance(given, dict):
        raw.problems.append(f"rope_parameters must be an object, got {given!r}")
        given = {}
    rope = RawConfig({"rope_theta": raw.get("rope_theta"), **given}, raw.source)
    kind = rope.get("rope_type", "type", default="default")
    usual = 1.0 if partial_rotary is None else partial_rotary
    partial = rope.get("partial_rotary_factor", default=raw.get("partial_rotary_factor", default=usual))
    if partial_rotary is None and partial != 1:
        raw.problems.append(f"partial_rotary_factor {partial!r} is not served for this family, only 1")
        partial = 1
    rotary_dim = int(head_dim * partial) if isinstance(partial, int | float) and 0 < partial <= 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        raw.problems.append(
            f"partial_rotary_factor {partial!r} of heads of {head_dim} must give an even number from 2 on"
        )
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
    return {
        "rotary_dim": rotary_dim,
        "rope_base": float(base),
        "rope_kind": str(kind),
        "rope_scaling": tuple(sorted(scaling.items())),
    }


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


def _text_part(data: dict[str, Any]) -> dict[str, Any]:
    """The decoder's own fields of a model with several parts; what both levels name counts once, outside."""
    text = data.get("text_config")
    return {**text, **{k: v for k, v in data.items() if v is not None}} if isinstance(text, dict) else data


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
    text = _text_part(read_json(file))
    raw = RawConfig(text, str(file))
    family = raw.get("model_type")
    family = TEXT_PARTS.get(family, family) if isinstance(family, str) else family
    if family not in FAMILIES:
        named = raw.get("architectures", default=[])
        what = f"model_type {family!r}" + (f" ({', '.join(map(str, named))})" if named else "")
        served = ", ".join(FAMILIES)
        if not any("expert" in name and value for name, value in text.items()):
            raise UnsupportedModelError(
                f"{file}: {what} has no experts, and dense models are not served, only Mixture-of-Experts: "
                f"{served}"
            )
        raise UnsupportedModelError(f"{file}: {what} is not served; served are {served}")
    fields = importlib.import_module(f"rimuru.models.{family}").read_fields(raw)
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    fields["eos_ids"] = _token_ids(raw.get("eos_token_id") if eos is None else eos, "eos_token_id", raw)
    raw.finish()
    return ModelConfig(family=family, **fields)
