"""Loading and starting: files in the page cache to the device, and a large model of random weights.

The folder holds six layers of Qwen3-30B, 8.5 GB in shards of one layer. Rates are bytes on disk over the
time of the whole `load_weights`, plan and all; beside them what the parts alone can do.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from harness import Report
from shapes import CONFIGS, folder

from rimuru.engine.config import EngineConfig
from rimuru.engine.core import EngineCore
from rimuru.kernels import backend_for
from rimuru.kernels.host_memory import HostMemory, threads
from rimuru.models.config import load_model_config
from rimuru.models.decoder import Decoder
from rimuru.models.loader import dummy_weights, load_weights
from rimuru.models.registry import build_model
from rimuru.models.transfer import CHUNK_BYTES, MAX_READERS

LAYERS = 6
CHUNK = CHUNK_BYTES["cuda"]
CAP = 40_000_000_000  # bytes of device memory for the start of the whole model


class Experts:
    """All experts of a model side by side in one tensor of bytes."""

    def __init__(self, model: Decoder, memory: torch.Tensor | None = None):
        self.layout, self.per_layer = model.expert_layout, model.config.num_experts
        count = len(model.config.moe_layers) * self.per_layer
        nbytes = count * self.layout.page_bytes
        self.data = torch.empty(nbytes, dtype=torch.uint8, device="cuda") if memory is None else memory

    def sink(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        lay = self.layout
        at = (layer * self.per_layer + expert) * lay.page_bytes
        part = lay.intermediate * lay.hidden * lay.dtype.itemsize
        gate_up = self.data[at : at + 2 * part].view(lay.dtype)
        down = self.data[at + lay.down_offset : at + lay.down_offset + part].view(lay.dtype)
        return gate_up.view(-1, lay.hidden), down.view(lay.hidden, lay.intermediate)


def seconds(work) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def make_model(path: Path) -> Decoder:
    config = load_model_config(path)
    ops = backend_for(torch.device("cuda"), torch.bfloat16)
    return build_model(config, ops, "cuda", torch.bfloat16, 4096)


def save(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """As safetensors does, which needs a second to a gigabyte."""
    entries, at = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]
        }  # fmt: skip
        at += tensor.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb", buffering=0) as f:
        f.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            f.write(tensor.cpu().view(-1).view(torch.uint8).numpy())


def write(path: Path) -> tuple[Decoder, Experts]:
    """The folder, and what it holds."""
    path.mkdir()
    config = CONFIGS["qwen3-30b"] | {"num_hidden_layers": LAYERS}
    (path / "config.json").write_text(json.dumps(config))
    model = make_model(path)
    experts = Experts(model)
    dummy_weights(model, 1, experts.sink)
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(LAYERS + 1)]
    for name, tensor in model.parameters.items():
        shard = int(name.split(".")[1]) if name.startswith("layers.") else LAYERS
        shards[shard][name if name.startswith("lm_head") else f"model.{name}"] = tensor
    for layer in range(LAYERS):
        for e in range(experts.per_layer):
            gate_up, down = experts.sink(layer, e)
            gate, up = gate_up.chunk(2)
            for part, tensor in (("gate", gate), ("up", up), ("down", down)):
                shards[layer][f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"] = tensor
    with ThreadPoolExecutor(len(shards)) as pool:
        list(pool.map(save, (path / f"model-{i}.safetensors" for i in range(len(shards))), shards))
    return model, experts


def read_rate(files: list[Path], count: int, memory: HostMemory) -> float:
    """GB/s of `count` threads that read the files into buffers and do nothing else."""
    ranges = [(f, at) for f in files for at in range(0, f.stat().st_size, CHUNK)]
    handles = {f: os.open(f, os.O_RDONLY) for f in files}

    def read(worker: int) -> None:
        buffer = memory.tensor[worker * CHUNK : (worker + 1) * CHUNK].numpy()
        for file, at in ranges[worker::count]:
            os.preadv(handles[file], [buffer], at)

    with ThreadPoolExecutor(count) as pool:
        took = seconds(lambda: list(pool.map(read, range(count))))
    for handle in handles.values():
        os.close(handle)
    return sum(f.stat().st_size for f in files) / took / 1e9


def link_rate(memory: HostMemory) -> float:
    """GB/s of the copy engine, 64 MiB at a time."""
    target = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    source = memory.tensor[: 64 << 20]

    def copy() -> None:
        for _ in range(32):
            target.copy_(source, non_blocking=True)

    copy()
    return 32 * (64 << 20) / min(seconds(copy) for _ in range(3)) / 1e9


def loading(report: Report) -> None:
    root = Path(tempfile.mkdtemp(prefix="rimuru-load-"))
    try:
        began = time.monotonic()
        model, experts = write(root / "m")
        files = sorted((root / "m").glob("*.safetensors"))
        size = sum(f.stat().st_size for f in files)
        report.say(f"wrote {size / 1e9:.2f} GB in {time.monotonic() - began:.1f} s; {threads()} threads")
        buffers = HostMemory(16 * CHUNK)
        link = link_rate(buffers)
        for count in (1, 4, MAX_READERS):
            rate = read_rate(files, count, buffers)
            report.bar(f"page cache to memory, {count} threads", rate, "GB/s", higher_is_better=True)
        buffers.close()

        other = make_model(root / "m")
        host = HostMemory(experts.data.numel())
        for place, memory in (("the device", None), ("page-locked memory", host.tensor)):
            there = Experts(other, memory)
            there.data.zero_()
            for tensor in other.parameters.values():
                tensor.zero_()
            rates = [
                size / seconds(lambda there=there: load_weights(root / "m", other, there.sink)) / 1e9
                for _ in range(5)
            ]
            report.say("experts to " + place + ": " + " / ".join(f"{r:.1f}" for r in rates) + " GB/s")
            bar = 0.8 * link if memory is None else None
            rate = statistics.median(rates)
            report.bar(f"load, experts to {place}", rate, "GB/s", bar, link, higher_is_better=True)
            wrong = sum(int((a != b).sum()) for a, b in
                        zip(other.parameters.values(), model.parameters.values(), strict=True))  # fmt: skip
            step = 1 << 30
            for at in range(0, experts.data.numel(), step):
                wrong += int((there.data[at : at + step].cuda() != experts.data[at : at + step]).sum())
            report.check(f"experts to {place}: bytes that differ", wrong, 0)
        host.close()
    finally:
        shutil.rmtree(root)


def starting(report: Report) -> None:
    """Qwen3-30B at the cap: every expert has a host copy, 58 GB; then each part of that alone."""
    began = time.monotonic()
    core = EngineCore(
        EngineConfig(
            model=folder("qwen3-30b"), load_format="dummy", device="cuda", device_memory=CAP,
            max_model_len=8192, dummy_routing="uniform",
        ),
        lambda what, share: None,
    )  # fmt: skip
    report.bar("start of Qwen3-30B at 40 GB, random weights", time.monotonic() - began, "s", 45.0)
    report.say(f"{int(core.store.resident.sum())} of {core.store.resident.size} experts resident")
    report.bar("of it compiling and capturing", core.runner.prepare_seconds, "s")
    report.bar("of that compiling", core.runner.compile_seconds, "s")
    nbytes = core.store.host_bytes
    del core
    gc.collect()
    torch.cuda.empty_cache()

    host: list[HostMemory] = []
    model = make_model(Path(folder("qwen3-30b")))
    report.bar("of it mapping, touching, registering", seconds(lambda: host.append(HostMemory(nbytes))), "s")
    experts = Experts(model, host[0].tensor)
    report.bar("of it drawing weights", seconds(lambda: dummy_weights(model, 0, experts.sink)), "s")
    host[0].close()


def run(report: Report) -> None:
    loading(report)
    gc.collect()
    torch.cuda.empty_cache()
    starting(report)
