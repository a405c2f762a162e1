"""Runs a model without the engine: a small paged KV pool, tables, and experts strewn over host memory.

Room: the tests' own plumbing. Rule: independent of pool, cache and engine (nothing of theirs takes
part), and hostile: pages and experts lie in random order in buffers filled with NaN, so that a read
of anything not written shows at once.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import torch

from rimuru.kernels import reference
from rimuru.kernels.types import (
    ALIGN,
    ExpertLayout,
    KVLayout,
    KVView,
    RecurrentView,
    StateLayout,
    StateView,
    StepMeta,
)
from rimuru.models.config import ModelConfig, load_model_config
from rimuru.models.loader import load_weights
from rimuru.models.registry import build_model

NAN_BYTE = 0xFF  # every float of every width made of these bytes is NaN


class ExpertStore:
    """Experts at random aligned addresses of one NaN-filled buffer, with gaps between them."""

    def __init__(self, layout: ExpertLayout, layers: int, experts: int, seed: int = 0):
        self.layout = layout
        stride = layout.page_bytes + 3 * ALIGN
        self.buffer = torch.full((layers * experts * stride + ALIGN,), NAN_BYTE, dtype=torch.uint8)
        start = -self.buffer.data_ptr() % ALIGN
        places = list(range(layers * experts))
        random.Random(seed).shuffle(places)
        self.offset = torch.tensor(places).view(layers, experts) * stride + start
        self.table = self.offset + self.buffer.data_ptr()

    def sink(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views to write: gate_up and down of one expert."""
        at, lay = int(self.offset[layer, expert]), self.layout
        page = self.buffer[at : at + lay.page_bytes]
        size = lay.hidden * lay.intermediate * lay.dtype.itemsize
        gate_up = page[: lay.gate_up_bytes].view(lay.dtype).view(2 * lay.intermediate, lay.hidden)
        down = (
            page[lay.down_offset : lay.down_offset + size].view(lay.dtype).view(lay.hidden, lay.intermediate)
        )
        return gate_up, down


class PagedKV:
    """KV pages of `groups` layer groups at random grain offsets of one NaN-filled pool."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        slots: int = 16,
        max_len: int = 256,
        block: int = 16,
        groups: int = 2,
        grain: int = 2048,
        seed: int = 0,
    ):
        self.slots, self.max_len = slots, max_len
        blocks = -(-max_len // block)
        sizes = [len(part) for part in torch.arange(config.attention_layers).chunk(groups)]
        layouts = [KVLayout(n, block, config.num_kv_heads, config.head_dim, grain, dtype) for n in sizes]
        grains = [-(-lay.page_bytes // grain) for lay in layouts]
        order = [(g, s, b) for g in range(len(sizes)) for s in range(slots) for b in range(blocks)]
        random.Random(seed).shuffle(order)
        self.table = torch.zeros(len(sizes), slots, blocks, dtype=torch.int32)
        at = 1
        for g, s, b in order:
            self.table[g, s, b] = at
            at += grains[g]
        self.pool = torch.full((at * grain,), NAN_BYTE, dtype=torch.uint8)
        flat = self.pool.view(dtype)
        attention = iter(
            [KVView(flat, self.table[g], i, layouts[g]) for g, n in enumerate(sizes) for i in range(n)]
        )
        states = iter(recurrent_views(config, dtype, slots, grain, seed))
        self.views = [
            next(attention) if i in config.kv_layers else next(states) for i in range(config.num_layers)
        ]


def recurrent_views(
    config: ModelConfig, dtype: torch.dtype, slots: int, grain: int, seed: int
) -> list[RecurrentView]:
    """A page of all layers' states for each slot, and one of convolution inputs, in NaN-filled pools."""
    r = config.recurrent
    if r is None:
        return []

    def views(shape: tuple[int, ...], kind: torch.dtype) -> list[StateView]:
        layout = StateLayout(len(r.layers), shape, grain, kind)
        step = -(-layout.page_bytes // grain)
        pool = torch.full(((slots + 1) * step * grain,), NAN_BYTE, dtype=torch.uint8).view(kind)
        places = list(range(slots))
        random.Random(seed).shuffle(places)
        table = torch.tensor(places, dtype=torch.int32) * step + 1
        return [StateView(pool, table, i, layout) for i in range(len(r.layers))]

    state = views((r.value_heads, r.key_dim, r.value_dim), torch.float32)
    conv = views((r.kernel - 1, r.channels), dtype)
    return [RecurrentView(*pair) for pair in zip(state, conv, strict=True)]


def step_meta(queries: list[tuple[int, int, int]]) -> StepMeta:
    """A step of sequences given as (slot, tokens computed before, tokens of this step)."""
    positions, owners, starts = [], [], [0]
    for slot, before, n in queries:
        positions += range(before, before + n)
        owners += [slot] * n
        starts.append(starts[-1] + n)
    lens = [before + n for _, before, n in queries]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepMeta(
        positions=ints(positions),
        token_slots=ints(owners),
        query_start=ints(starts),
        slots=ints([slot for slot, _, _ in queries]),
        seq_lens=ints(lens),
        max_query_len=max(n for _, _, n in queries),
        max_seq_len=max(lens),
    )


class Harness:
    """A loaded model with memory of its own, driven step by step."""

    def __init__(
        self,
        path: Path,
        ops: ModuleType = reference,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **kv_options: int,
    ):
        self.config = load_model_config(path)
        self.model = build_model(self.config, ops, "cpu", dtype)
        shape = (len(self.config.moe_layers), self.config.num_experts)
        self.store = ExpertStore(self.model.expert_layout, *shape, seed=seed)
        load_weights(path, self.model, self.store.sink)
        self.touched = torch.zeros(shape, dtype=torch.int32)
        self.kv = PagedKV(self.config, dtype, seed=seed, **kv_options)

    def step(self, queries: list[tuple[int, int, list[int]]]) -> torch.Tensor:
        """Run (slot, tokens computed before, this step's tokens); logits `[all tokens, vocab]`."""
        meta = step_meta([(slot, before, len(tokens)) for slot, before, tokens in queries])
        tokens = torch.tensor([t for _, _, part in queries for t in part])
        hidden = self.model.forward(tokens, meta, self.kv.views, self.store.table, self.touched)
        return self.model.logits(hidden)

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, chunk: int = 1 << 20
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Greedy, batched: at most `chunk` prompt tokens of each sequence a step, decodes mixed in.

        Returns as `support.tiny.oracle` does: new tokens and the logits each was chosen from.
        """
        tokens = [list(p) for p in prompts]
        done = [0] * len(prompts)
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        while active := [i for i in range(len(prompts)) if len(logits[i]) < max_new_tokens]:
            queries = [(i, done[i], tokens[i][done[i] : done[i] + chunk]) for i in active]
            out = self.step(queries).split([len(part) for _, _, part in queries])
            for (i, before, part), rows in zip(queries, out, strict=True):
                done[i] = before + len(part)
                if done[i] == len(tokens[i]):
                    logits[i].append(rows[-1])
                    tokens[i].append(int(rows[-1].argmax()))
        return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], [torch.stack(x) for x in logits]
