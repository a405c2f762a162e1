"""Weights from safetensors files, each straight to where it will be served from.

Room: models. Rule: everything is compared with what the model needs before a byte is copied; then
the files are read in their own order, by several threads, with nothing but a few buffers besides the
destination.

Dense parameters go in place. Experts go wherever the caller's `ExpertSink` says, one expert at a
time, whether the files hold them one by one or stacked.
"""

from __future__ import annotations

import gc
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rimuru.errors import CheckpointError, ConfigError
from rimuru.kernels.host_memory import threads
from rimuru.models.config import ModelConfig, read_json
from rimuru.models.decoder import Decoder
from rimuru.models.safetensors_file import DTYPES, StoredTensor, read_header
from rimuru.models.transfer import Piece, Transfer

# (index of the MoE layer, expert) -> its gate_up [2 * intermediate, hidden] and down [hidden,
# intermediate], to be written. Called up to once for every stored piece, so three times an expert, and on
# the thread that loads.
ExpertSink = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
Progress = Callable[[str, float], None]  # what is under way, the share of it done

_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)+")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.)?(gate|up|down|gate_up)_proj(?:\.weight)?")
# Parts of these families' checkpoints that are not served: a vision tower, a head for several tokens.
_OTHER_PARTS = {"qwen3_next": ("mtp.",), "qwen3_5_moe": ("mtp.", "visual.")}
_SHOWN = 24  # names of one kind of fault that an error message spells out


def canonical_name(name: str) -> str:
    """The name a tensor has here, whatever the family or the saver called it.

    `model.layers.0.block_sparse_moe.experts.1.w2.weight` -> `layers.0.mlp.experts.1.down_proj.weight`
    """
    name = _PREFIX.sub("", name)
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+\.)(w[123])\b", lambda m: m[1] + _MIXTRAL[m[2]], name)


def _disk_name(name: str, family: str) -> str:
    """What the family's own files call `name`: the inverse of `canonical_name`, for messages."""
    if family == "mixtral":
        for short, long in _MIXTRAL.items():
            name = re.sub(rf"(\.experts\.\d+\.){long}", rf"\1{short}", name)
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if name.startswith("lm_head"):
        return name
    return f"model.language_model.{name}" if family == "qwen3_5_moe" else f"model.{name}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint; `CheckpointError` names what is not there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
            absent = [n for n in names if not (folder / n).is_file()]
        except (ConfigError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{index}: not a valid index of shards; fetch it again") from None
        if absent:
            raise CheckpointError(f"{folder}: shards named in {index.name} are missing: {_listed(absent)}")
        return [folder / n for n in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if not files:
        raise CheckpointError(
            f"{folder}: no *.safetensors there; other formats are not read. Save the model with "
            "save_pretrained, or use --load-format dummy for random weights"
        )
    return files


def _listed(names: list[str]) -> str:
    """All names; where they are many, one of each sort (names that differ in numbers only)."""
    if len(names) <= _SHOWN:
        return ", ".join(names)
    sorts: dict[str, list[str]] = {}
    for name in names:
        sorts.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    shown = [f"{same[0]} and {len(same) - 1} like it" for same in list(sorts.values())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(sorts) - _SHOWN} other sorts" if len(sorts) > _SHOWN else "")


class _Plan:
    """Where every stored tensor goes, and everything that is wrong with the checkpoint."""

    def __init__(self, config: ModelConfig, model: Decoder, stored: list[StoredTensor]):
        self.config, self.model = config, model
        self.moe_index = {layer: i for i, layer in enumerate(config.moe_layers)}
        self.dense: list[tuple[StoredTensor, torch.Tensor]] = []
        # (tensor, MoE layer, expert or None for a stack of all, part)
        self.experts: list[tuple[StoredTensor, int, int | None, str]] = []
        self.extra: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: list[str] = []
        self.twice: list[str] = []
        self.missing_dense = set(model.parameters)
        self.missing_parts = {
            (layer, expert, part)
            for layer in range(len(config.moe_layers))
            for expert in range(config.num_experts)
            for part in ("gate", "up", "down")
        }
        for tensor in stored:
            self._place(tensor)

    def _place(self, tensor: StoredTensor) -> None:
        name = canonical_name(tensor.name)
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tie_embeddings):
            return  # savers of old wrote these; nothing is lost without them
        if name.startswith(_OTHER_PARTS.get(self.config.family, ())):
            return
        target = self.model.parameters.get(name)
        if target is not None:
            if self._fits(tensor, tuple(target.shape), {name}, self.missing_dense):
                self.dense.append((tensor, target))
            return
        match = _EXPERT.fullmatch(name)
        layer = self.moe_index.get(int(match[1])) if match else None
        if match is None or layer is None or (match[2] is None and match[3] not in ("gate_up", "down")):
            self.extra.append(tensor.name)
            return
        expert, part = None if match[2] is None else int(match[2]), match[3]
        if expert is not None and (expert >= self.config.num_experts or part == "gate_up"):
            self.extra.append(tensor.name)
            return
        hidden, inter = self.config.hidden_size, self.config.moe_intermediate
        rows = 2 * inter if part == "gate_up" else inter
        shape: tuple[int, ...] = (hidden, inter) if part == "down" else (rows, hidden)
        if expert is None:
            shape = (self.config.num_experts, *shape)
        covered = {(layer, expert, part)}
        if expert is None:
            parts = ("gate", "up") if part == "gate_up" else (part,)
            covered = {(layer, e, p) for e in range(self.config.num_experts) for p in parts}
        if self._fits(tensor, shape, covered, self.missing_parts):
            self.experts.append((tensor, layer, expert, part))

    def _fits(self, tensor: StoredTensor, shape: tuple[int, ...], covers: set, missing: set) -> bool:
        if not covers <= missing:
            self.twice.append(tensor.name)
            return False
        missing -= covers
        if tensor.dtype not in DTYPES:
            self.dtypes.append(f"{tensor.name} is {tensor.dtype}")
            return False
        if tensor.shape != shape:
            self.shapes.append(f"{tensor.name} is {list(tensor.shape)}, needs {list(shape)}")
            return False
        return True

    def check(self, folder: Path) -> None:
        """Raise `CheckpointError` naming every fault of every kind."""
        family, layers = self.config.family, self.config.moe_layers
        missing = [_disk_name(n, family) for n in self.model.parameters if n in self.missing_dense]
        missing += [
            _disk_name(f"layers.{layers[layer]}.mlp.experts.{expert}.{part}_proj.weight", family)
            for layer, expert, part in sorted(self.missing_parts)
        ]
        kinds = {
            "missing": missing,
            "not part of this model": self.extra,
            "wrong shape": self.shapes,
            f"dtype not served (only {', '.join(DTYPES)})": self.dtypes,
            "stored twice": self.twice,
        }
        faults = [f"{what} ({len(names)}): {_listed(names)}" for what, names in kinds.items() if names]
        if faults:
            raise CheckpointError(f"{folder}: weights do not match config.json; " + "; ".join(faults))

    @property
    def placed(self) -> list[StoredTensor]:
        """The tensors that are read, in no order."""
        return [tensor for tensor, _ in self.dense] + [tensor for tensor, *_ in self.experts]

    def pieces(self, sink: ExpertSink) -> Iterator[Piece]:
        """All that is read and where it goes, in the order of the files."""
        sink = lru_cache(maxsize=1)(sink)  # an expert's tensors mostly follow each other
        tensors = [(t, iter([(0, target)])) for t, target in self.dense]
        for tensor, layer, expert, part in self.experts:
            tensors.append((tensor, self._expert_targets(layer, expert, part, sink)))
        for tensor, targets in sorted(tensors, key=lambda job: (job[0].file, job[0].start)):
            for skip, target in targets:
                yield Piece(tensor, tensor.start + skip * DTYPES[tensor.dtype].itemsize, target.view(-1))

    def _expert_targets(
        self, layer: int, expert: int | None, part: str, sink: ExpertSink
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Where one stored tensor's values go: (elements to skip, target) of one expert, or of each."""
        inter = self.config.moe_intermediate
        for skipped, e in enumerate(range(self.config.num_experts) if expert is None else (expert,)):
            gate_up, down = sink(layer, e)
            if part == "down":
                target = down
            else:
                target = {"gate_up": gate_up, "gate": gate_up[:inter], "up": gate_up[inter:]}[part]
            yield skipped * target.numel(), target


def load_weights(
    folder: str | Path, model: Decoder, expert_sink: ExpertSink, progress: Progress | None = None
) -> None:
    """Fill `model.parameters` in place and every expert through `expert_sink`, converting dtypes.

    Raises `CheckpointError`: before anything is written where names or shapes do not match (all
    named in one message), and with the file's name where a file is corrupt.
    """
    folder = Path(folder)
    with _interpreter_for_threads(), Transfer(model.device) as transfer:
        stored = [tensor for file in weight_files(folder) for tensor in read_header(file)]
        plan = _Plan(model.config, model, stored)
        plan.check(folder)
        total = sum(tensor.nbytes for tensor in plan.placed)

        def on_done(nbytes: int) -> None:
            if progress is not None:
                progress("loading weights", nbytes / total)

        transfer.run(plan.pieces(expert_sink), on_done)


@contextmanager
def _interpreter_for_threads() -> Iterator[None]:
    """No garbage is collected: all that a load makes lives to its end, and one full collection takes 0.1 s,
    half of what 9 GB take out of the page cache. And threads that make buffers do not wait 5 ms, the default,
    for each turn while this one reads headers."""
    enabled, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if enabled:
            gc.enable()


def dummy_weights(
    model: Decoder, seed: int, expert_sink: ExpertSink, progress: Progress | None = None
) -> None:
    """Random weights from the configuration alone: the same for a seed whatever the order or layout.

    Each tensor is a window of one block of normal numbers, at an offset that follows from its name,
    scaled by 1/sqrt(fan-in): fast enough for tens of gigabytes, and no two experts are alike.
    """
    block = torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(seed))
    scaled: dict[tuple[float, torch.device, torch.dtype], Any] = {}
    under_way: list[Future[None]] = []

    def fill(name: str, target: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            centred = model.config.zero_centred_norm and not name.endswith("linear_attn.norm.weight")
            target.fill_(0.0 if centred else 1.0)
            return
        host = target.device.type == "cpu"
        key = (target.shape[-1] ** -0.5 if target.dim() > 1 else 0.02, target.device, target.dtype)
        if key not in scaled:
            source = (block * key[0]).to(target.device, target.dtype)
            scaled[key] = source.view(torch.uint8).numpy() if host else source
        source, at = scaled[key], zlib.crc32(name.encode()) % len(block)
        if host:  # in bytes, because numpy has no bfloat16; and numpy, because it leaves threads to us
            flat = target.view(-1).view(torch.uint8).numpy()
            under_way.append(pool.submit(_repeat, source, at * target.dtype.itemsize, flat))
        else:
            _repeat(source, at, target.view(-1))

    with ThreadPoolExecutor(threads(), "loader") as pool:
        for name, target in model.parameters.items():
            fill(name, target)
        layers = len(model.config.moe_layers)
        for layer in range(layers):
            for expert in range(model.config.num_experts):
                gate_up, down = expert_sink(layer, expert)
                fill(f"{layer}.{expert}.gate_up", gate_up)
                fill(f"{layer}.{expert}.down", down)
            while under_way:
                under_way.pop().result()
            if progress is not None:
                progress("drawing weights", (layer + 1) / layers)


def _repeat(source: Any, at: int, target: Any) -> None:
    """Fill a flat `target` with `source`, over and over, from its element `at` on."""
    written = 0
    while written < len(target):
        n = min(len(source) - at, len(target) - written)
        target[written : written + n] = source[at : at + n]
        at, written = 0, written + n
