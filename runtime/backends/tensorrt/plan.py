"""What the TensorRT backend decides before anything runs: sizes, tiers, profiles, memory.

Pure functions of the manifest and of what the engines were built for, so all of it is tested
without a GPU. Symbols as in graphs/contract.py; axes as in docs/bundle.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....graphs.errors import DraftgraphError
from ...bundle import Bundle, TensorInfo
from ...engine_cache import Sidecar
from ..calls import GraphCall

ALIGNMENT = 256  # of every address that TensorRT is given (setTensorAddress)
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int64": 8}
NUMPY: dict[str, Any] = {"fp32": np.float32, "int64": np.int64}  # what crosses to the host
# The graph input that reads an intermediate tensor of another name.
SOURCES = {"target_logits": "logits"}

Shape = tuple[int, ...]
# profile, input: smallest, optimal, largest shape
Profiles = Mapping[str, Mapping[str, list[list[int]]]]


@dataclass(frozen=True)
class EngineSpec:
    """What the engines of one build can do; the profiles of each graph in the engine's order."""

    capacity: int  # cache rows per request
    max_batch: int
    prefill_len: int
    hold_rows: int
    profiles: Mapping[str, Profiles]

    @classmethod
    def of(cls, sidecars: Mapping[str, Sidecar]) -> EngineSpec:
        """From the sidecars of one folder, by graph."""
        settings = next(iter(sidecars.values())).key.settings
        names = ("capacity", "max_batch", "prefill_len", "hold_rows")
        missing = [n for n in names if n not in settings]
        if missing:
            folder = next(iter(sidecars.values())).file.parent
            raise DraftgraphError(
                f"{folder}: built by another version of draftgraph (no {', '.join(missing)} in its "
                "settings); run `draftgraph build` again"
            )
        profiles = {graph: s.key.profiles for graph, s in sidecars.items()}
        return cls(**{n: int(settings[n]) for n in names}, profiles=profiles)


# Tiers: rounds are padded up to few shapes, so that few CUDA graphs cover all of them.


def request_tiers(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, … and max_batch itself."""
    return _doubling(max_batch)


def width_tiers(gamma: int) -> tuple[int, ...]:
    """Tokens per request of a verified round: 1, 2, 4, … and γ + 1."""
    return _doubling(gamma + 1)


def _doubling(largest: int) -> tuple[int, ...]:
    steps = {1 << i for i in range(largest.bit_length()) if 1 << i < largest}
    return tuple(sorted({*steps, largest}))


def tier(value: int, tiers: Iterable[int]) -> int:
    """The smallest tier that holds `value`."""
    return min(t for t in tiers if t >= value)


def token_tier(requests: int, tokens: int, widest: int, gamma: int) -> tuple[int, int]:
    """(tokens, width) of the tier of a verified round of that many slots.

    tokens: packed tokens of all requests. widest: most tokens of one of them. A round of plain
    decoding has width 1, every other one width γ + 1: attention follows the capacity far more than
    the width, and the rest follows the tokens.
    """
    tiers = [requests * w for w in width_tiers(gamma)]
    return tier(tokens, tiers), 1 if widest <= 1 else gamma + 1


def pad_call(
    call: GraphCall, inputs: Iterable[TensorInfo], sizes: Mapping[str, int], idle: np.ndarray
) -> GraphCall:
    """The same call at larger axes, with the same effect.

    idle [new R - R]: where the slots that the larger R takes in may be written: at or past their
    last row in use. Everything else repeats the last entry along its axis. Repeated packed tokens
    and blocks are exact duplicates: they read the same cell as the original and no cell reads
    them. Wider cells and other slots only write more rows past the ones in use, as cells
    without a token always do (docs/bundle.md, Caches).
    """
    feeds = {}
    for tensor in inputs:
        if tensor.name not in call.feeds:
            continue
        array = call.feeds[tensor.name]
        if tensor.name == "token_cell":  # r·S + s, of another S now
            old, new = call.feeds["cell_token"].shape[1], sizes["S"]
            array = array // old * new + array % old
        grow = [
            (0, sizes[axis] - have if isinstance(axis, str) else 0)
            for axis, have in zip(tensor.shape, array.shape, strict=True)
        ]
        padded = np.pad(array, grow, mode="edge")
        if tensor.name == "past_length":
            padded[len(array) :] = idle
        feeds[tensor.name] = padded
    return replace(call, feeds=feeds, sizes={**call.sizes, **sizes})


# Shapes and profiles


def call_axes(call: GraphCall, inputs: Iterable[TensorInfo], fixed: Mapping[str, int]) -> dict:
    """The size of every symbolic axis of a call: from its arrays, its sizes and `fixed`."""
    axes = {**fixed, **call.sizes}
    for tensor in inputs:
        if tensor.name in call.feeds:
            shape = call.feeds[tensor.name].shape
            axes |= {a: n for a, n in zip(tensor.shape, shape, strict=True) if isinstance(a, str)}
    return axes


def concrete(tensor: TensorInfo, axes: Mapping[str, int]) -> Shape:
    """The shape of a tensor with its symbolic axes filled in."""
    return tuple(n if isinstance(n, int) else axes[n] for n in tensor.shape)


def choose_profile(
    spec: EngineSpec, graph: str, inputs: Iterable[TensorInfo], axes: Mapping[str, int]
) -> int:
    """Index of the first profile of a graph's engine that covers a call."""
    problems = []
    for index, (name, ranges) in enumerate(spec.profiles[graph].items()):
        outside = [
            f"{t.name} {list(concrete(t, axes))} outside {low} .. {high}"
            for t in inputs
            for low, _, high in [ranges[t.name]]
            if any(not a <= n <= b for n, a, b in zip(concrete(t, axes), low, high, strict=True))
        ]
        if not outside:
            return index
        problems.append(f"{name}: {outside[0]}")
    raise DraftgraphError(
        f"{graph}: no profile of the engine covers this call ({'; '.join(problems)}); verify at "
        "most γ + 1 tokens per request and prefill only the last logits, or run `draftgraph build` "
        "with larger --max-batch or --prefill-len"
    )


def check_room(graph: str, past: np.ndarray, width: int, capacity: int) -> None:
    """Refuse a call that would write past the end of a cache: TensorRT drops such rows silently.

    past [R]: first row that each slot writes; width: rows written per slot, padding included.
    """
    end = int(past.max(initial=0)) + width
    if end > capacity:
        raise DraftgraphError(
            f"{graph}: {end} cache rows needed, the engines' capacity is {capacity}; run "
            "`draftgraph build` with a larger --capacity"
        )


# Memory


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything the backend allocates, before it does.

    caches: of one slot. tensors: intermediates at their largest. staging: the arrays of one phase
    that come from the host; each has a pinned mirror. results: what goes to the host, pinned.
    """

    caches: dict[str, dict[str, int]]  # graph, tensor
    tensors: dict[str, int]
    staging: dict[str, int]  # phase
    results: dict[str, int]

    @property
    def slot_bytes(self) -> int:
        return sum(n for tensors in self.caches.values() for n in tensors.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(self.staging.values()) + sum(self.results.values())

    def device_bytes(self, slots: int) -> int:
        """All device memory for that many slots, without engines and their scratch."""
        fixed = sum(self.tensors.values()) + sum(self.staging.values())
        return fixed + slots * self.slot_bytes

    def check(self, slots: int, budget: int) -> None:
        """Refuse what does not fit `budget` bytes."""
        if (needed := self.device_bytes(slots)) > budget:
            total, caches, tensors, found = (
                f"{n / (1 << 20):.1f}"
                for n in (needed, slots * self.slot_bytes, sum(self.tensors.values()), budget)
            )
            raise DraftgraphError(
                f"{slots} requests need {total} MiB of device memory (caches {caches}, tensors "
                f"{tensors}), {found} MiB can be had; take fewer requests, or run `draftgraph "
                "build` with a smaller --capacity or --max-batch"
            )


def phase_of(graph: str) -> str:
    """The staging block of a graph: graphs that run as one CUDA graph share theirs."""
    if graph.startswith("accept"):
        return "accept"
    return "target" if graph == "target" else "draft"


def plan_memory(bundle: Bundle, spec: EngineSpec, graphs: Iterable[str]) -> MemoryPlan:
    """Sizes for `graphs` at the largest shapes of their profiles."""
    caches: dict[str, dict[str, int]] = {}
    tensors: dict[str, int] = {}
    staging: dict[str, dict[str, int]] = {}
    produced = {t.name for g in graphs for t in bundle.graphs[g].outputs}
    for graph in graphs:
        info, most = bundle.graphs[graph], largest_axes(bundle, spec, graph)
        staged = 0
        for tensor in info.inputs:
            shape = concrete(tensor, most)
            if tensor.name.startswith("past_") and len(shape) == 4:
                caches.setdefault(graph, {})[tensor.name] = _bytes(tensor, shape[1:])
            elif SOURCES.get(tensor.name, tensor.name) not in produced:
                staged += aligned(_bytes(tensor, shape))
        staging.setdefault(phase_of(graph), {})[graph] = staged
        for tensor in info.outputs:
            if not tensor.name.startswith("present_"):
                size = aligned(_bytes(tensor, concrete(tensor, most)))
                tensors[tensor.name] = max(tensors.get(tensor.name, 0), size)
    # The drafter gathers its context from the target's features and the held rows behind them.
    features = next(t for t in bundle.graphs["backbone"].inputs if t.name == "features")
    rows = concrete(features, largest_axes(bundle, spec, "backbone"))
    tensors["features"] = aligned(_bytes(features, rows))
    return MemoryPlan(
        caches,
        tensors,
        # Of the three forms of a phase's graph (greedy, sampled, filtered) one runs at a time.
        {
            "target": staging["target"]["target"],
            "draft": _draft_staging(staging["draft"]),
            "feed": staging["draft"]["backbone"],
            "accept": max(staging["accept"].values()),
        },
        {
            name: tensors[name]
            for name in ("draft_ids", "confidence_logits", "accepted", "next_id")
            if name in tensors
        },
    )


def _draft_staging(graphs: Mapping[str, int]) -> int:
    heads = [n for graph, n in graphs.items() if graph.startswith("markov")]
    return graphs["backbone"] + max(heads) + graphs.get("confidence", 0)


def largest_axes(bundle: Bundle, spec: EngineSpec, graph: str) -> dict[str, int]:
    """The largest size of every symbolic axis over the profiles of a graph."""
    most: dict[str, int] = {}
    for ranges in spec.profiles[graph].values():
        for tensor in bundle.graphs[graph].inputs:
            for axis, n in zip(tensor.shape, ranges[tensor.name][2], strict=True):
                if isinstance(axis, str):
                    most[axis] = max(most.get(axis, 0), n)
    return most


def check_slot_stride(plan: MemoryPlan, capacity: int) -> None:
    """Slots other than the first start at a multiple of their size, which must stay aligned."""
    for graph, tensors in plan.caches.items():
        for size in set(tensors.values()):
            if size % ALIGNMENT:
                raise DraftgraphError(
                    f"{graph}: the cache of one request has {size} bytes at capacity {capacity}, "
                    f"not a multiple of {ALIGNMENT}, so only one request can be held; run "
                    "`draftgraph build` with a --capacity that is a multiple of 16"
                )


def layout(arrays: Iterable[np.ndarray]) -> tuple[list[int], int]:
    """Aligned offsets of arrays in one block, and the bytes up to the end of the last."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end = aligned(end + array.nbytes)
    return offsets, end


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(tensor: TensorInfo, shape: Shape) -> int:
    return int(np.prod(shape)) * ITEM_BYTES[tensor.dtype]
