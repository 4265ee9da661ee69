"""TensorRT engines behind the `Backend` protocol, in CUDA graphs where they repeat.

One stream. Each phase (draft, target, accept) is one upload of small arrays, its engines, and one
download of ids and confidences; a phase that repeats at a padded shape is captured and replayed.
`backbone` only notes its call: draft and heads run together when `markov` asks for the ids.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ....graphs.errors import DraftgraphError
from ...bundle import WEIGHTS, Bundle, TensorInfo
from ..base import AcceptSampling, ContextBatch, DraftSampling, TokenBatch
from ..calls import (
    GraphCall,
    LogitRows,
    accept_call,
    backbone_call,
    markov_call,
    markov_head,
    runs,
    target_call,
)
from .device import CaptureRefused, Device, EngineCall, Tensor
from .plan import (
    NUMPY,
    SOURCES,
    EngineSpec,
    call_axes,
    check_room,
    check_slot_stride,
    choose_profile,
    concrete,
    layout,
    pad_call,
    plan_memory,
    request_tiers,
    tier,
    token_tier,
)

Key = tuple[Any, ...]


@dataclass
class GraphReport:
    """What became of CUDA graphs. A key is the phase, its engines, their axes and first slot."""

    captured: list[Key] = field(default_factory=list)
    refused: dict[Key, str] = field(default_factory=dict)  # why
    replayed: Counter[str] = field(default_factory=Counter)  # by phase
    eager: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Planned:
    """A call with its engine's profile; axes: the size of every symbolic axis."""

    call: GraphCall
    profile: int
    axes: dict[str, int]

    @property
    def key(self) -> Key:
        return self.call.graph, self.profile, self.call.first_slot, *sorted(self.axes.items())


class TensorRt:
    """Implements `Backend`; see there.

    markov: "auto" (the truncated head where there is one), "full" or "topk". memory_budget: bytes
    of device memory that may be allocated, default what is free. `graphs` reports captures.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: Device,
        spec: EngineSpec,
        *,
        markov: str = "auto",
        cuda_graphs: bool = True,
        memory_budget: int | None = None,
    ) -> None:
        self.bundle, self.device, self.spec = bundle, device, spec
        self.gamma = bundle.draft.block_size
        self.prefill_chunk = spec.prefill_len
        self.longest = spec.capacity - 2 * self.gamma  # each of the last two blocks has room
        self.seconds: dict[str, float] = defaultdict(float)
        self.graphs = GraphReport()
        names = engines_needed(bundle, markov)
        self._markov = next(n for n in names if n.startswith("markov")).removesuffix("_greedy")
        self._cuda_graphs = cuda_graphs
        self._captured: dict[Key, Any] = {}
        self._new_shapes = False

        self.plan = plan_memory(bundle, spec, names)
        self._budget = device.free_bytes() if memory_budget is None else memory_budget
        self.plan.check(1, self._budget)
        self._tensors = {name: device.allocate(n) for name, n in self.plan.tensors.items()}
        self._staging = {name: device.allocate(n) for name, n in self.plan.staging.items()}
        self._mirrors = {name: device.pinned(n) for name, n in self.plan.staging.items()}
        self._results = {name: device.pinned(n) for name, n in self.plan.results.items()}
        self._caches: dict[str, dict[str, int]] = {}
        self._allocated = self._slots = 0
        features = next(t for t in bundle.graphs["target"].outputs if t.name == "features")
        self._feature_bytes = int(features.shape[1]) * 4
        rows = self.plan.tensors["features"] // self._feature_bytes
        self._hold_start = rows - spec.max_batch * spec.hold_rows

        self._in_flight: set[str] = set()  # staging blocks whose upload may not have run
        self._timed: list[tuple[str, Any, Any]] = []
        self._pending: _Planned | None = None  # the backbone's call
        self._rows = LogitRows()
        self._extent: dict[str, int] = {}  # axes of the last calls, without padding
        self._pending_tiered = False
        self._blocks = 0  # drafted, padding included
        self._slot_block = np.zeros(0, np.int64)
        self._draft_temperature = np.zeros(0, np.float32)
        self._forget()

    # Slots and caches

    @property
    def capacity(self) -> tuple[int, int]:
        return self.spec.capacity, self.spec.capacity

    def reserve(self, slots: int, target_rows: int, draft_rows: int) -> None:
        if slots != self._slots:
            self.reset(slots)
        for graph, rows in (("target", target_rows), ("backbone", draft_rows)):
            check_room(graph, np.zeros(1, np.int64), rows, self.spec.capacity)

    def reset(self, slots: int) -> None:
        if slots > self.spec.max_batch:
            raise DraftgraphError(
                f"{slots} requests at a time, but the engines take {self.spec.max_batch}; pass "
                f"max_requests={self.spec.max_batch} to Engine.load, or run `draftgraph build` "
                f"with --max-batch {slots}"
            )
        self._finish()
        self._pending = None
        if slots > self._allocated:
            self._allocate(tier(slots, request_tiers(self.spec.max_batch)))
        elif slots != self._slots:
            for graph, tensors in self._caches.items():
                for name, address in tensors.items():
                    self.device.zero(address, self._allocated * self.plan.caches[graph][name])
        self._slots = slots
        self._forget()

    def _allocate(self, slots: int) -> None:
        """Caches for that many slots, zeroed; captured graphs held the old addresses."""
        if slots > 1:
            check_slot_stride(self.plan, self.spec.capacity)
        self.plan.check(slots, self._budget)
        for tensors in self._caches.values():
            for address in tensors.values():
                self.device.free(address)
        self._captured.clear()
        self._caches, self._allocated = {}, 0
        self._caches = {
            graph: {name: self.device.allocate(slots * n) for name, n in tensors.items()}
            for graph, tensors in self.plan.caches.items()
        }
        self._allocated = slots

    def _forget(self) -> None:
        """No slot holds a request."""
        self._target_rows = np.zeros(self._allocated, np.int64)  # no row in use at or past these
        self._draft_rows = np.zeros(self._allocated, np.int64)  # in the cache, as the engine knows
        self._fed = np.zeros(self._allocated, np.int64)  # and rows that it takes for held
        self._held = np.zeros(self._allocated, np.int64)  # rows in the hold area

    def release(self, slot: int) -> None:
        for state in (self._target_rows, self._draft_rows, self._fed, self._held):
            state[slot] = 0
        if self._new_shapes:  # between requests, and only until all tiers have been met
            self.device.save_compiled()
            self._new_shapes = False

    def _view(self, first_slot: int, requests: int) -> slice:
        if first_slot + requests > self._slots:
            raise DraftgraphError(
                f"slots {first_slot} to {first_slot + requests - 1} in a call, {self._slots} are "
                "reserved; call reserve first"
            )
        return slice(first_slot, first_slot + requests)

    def _idle(self, rows: np.ndarray, view: slice, width: int) -> np.ndarray:
        """Where the slots that round a view up to its tier may be written.

        rows: in use, of every slot. Empty where those slots are not there or have no room left.
        """
        grown = tier(view.stop - view.start, request_tiers(self.spec.max_batch))
        idle = rows[view.stop : view.start + grown]
        fits = len(idle) == view.start + grown - view.stop
        return idle if fits and (idle + width <= self.spec.capacity).all() else idle[:0]

    # Phases

    def target(self, batch: TokenBatch) -> None:
        self._flush()
        view = self._view(batch.first_slot, len(batch.lengths))
        call, rows = target_call(batch)
        self._extent |= {"N": len(batch.ids), "M": call.sizes["M"]}
        widest, past = int(batch.lengths.max()), batch.past_length
        tiered = not batch.last_only and widest <= self.gamma + 1
        if tiered:
            width = 1 if widest <= 1 else self.gamma + 1
            tiered = int(past.max()) + width <= self.spec.capacity
        if tiered:
            idle = self._idle(self._target_rows, view, width)
            requests = len(past) + len(idle)
            tokens, width = token_tier(requests, len(batch.ids), widest, self.gamma)
            sizes = {"R": requests, "S": width, "N": tokens, "M": tokens}
            call = pad_call(call, self.bundle.graphs["target"].inputs, sizes, idle)
        check_room(
            "target",
            call.feeds["past_length"],
            call.feeds["cell_token"].shape[1],
            self.spec.capacity,
        )
        planned = self._plan(call)
        self._run("target", [planned], [], captured=tiered)
        self._rows = replace(rows, total=planned.axes["M"])
        self._target_rows[view] = past + batch.lengths

    def backbone(self, context: ContextBatch) -> None:
        self._flush()
        view = self._view(context.first_slot, len(context.counts))
        self._draft_rows[view] = context.past_length
        rows = self._context_rows(context)
        for slot, kept in rows.items():  # what is wider than a round goes in alone, ahead of it
            self._feed(slot, kept[: -self.gamma - 1])
            rows[slot] = kept[-self.gamma - 1 :]
        used = self._draft_rows + self._fed
        counts = np.array([len(kept) for kept in rows.values()])
        index = np.concatenate(list(rows.values()))
        call = backbone_call(replace(context, counts=counts, past_length=used[view]), index)
        width = self.gamma + 1
        tiered = int(used[view].max()) + width + self.gamma <= self.spec.capacity
        if tiered:
            idle = self._idle(used, view, width + self.gamma)
            requests = len(counts) + len(idle)
            blocks = tier(len(context.slots), request_tiers(self.spec.max_batch))
            sizes = {"R": requests, "X": width, "P": requests * width, "B": blocks}
            call = pad_call(call, self.bundle.graphs["backbone"].inputs, sizes, idle)
        self._pending = self._plan_backbone(call)
        self._pending_tiered = tiered
        self._blocks, self._extent["B"] = call.sizes["B"], len(context.slots)
        self._slot_block = np.zeros(self._slots, np.int64)
        self._slot_block[context.slots] = np.arange(len(context.slots))
        fresh = context.counts > 0
        self._draft_rows[view] += context.counts
        self._fed[view][fresh] = 0
        self._held[view][fresh] = 0

    def _plan_backbone(self, call: GraphCall) -> _Planned:
        width = call.feeds["context_cell"].shape[1] + self.gamma
        check_room("backbone", call.feeds["past_length"], width, self.spec.capacity)
        return self._plan(call)

    def _context_rows(self, context: ContextBatch) -> dict[int, np.ndarray]:
        """Rows of `features` that each slot's drafter has not seen, held ones first."""
        rows, at = {}, 0
        for slot, count in enumerate(context.counts, start=context.first_slot):
            held = self._hold_rows(slot) if count else self._hold_rows(slot)[:0]
            fresh = int(count) - len(held) - int(self._fed[slot]) if count else 0
            rows[slot] = np.concatenate([held, context.index[at : at + fresh]])
            at += fresh
        return rows

    def _hold_rows(self, slot: int) -> np.ndarray:
        start = self._hold_start + slot * self.spec.hold_rows
        return np.arange(start, start + self._held[slot])

    def _feed(self, slot: int, rows: np.ndarray) -> None:
        """Write context into the drafter's cache of one slot; the block behind it is garbage."""
        for start in range(0, len(rows), self.spec.prefill_len):
            index = rows[start : start + self.spec.prefill_len]
            context = ContextBatch(
                counts=np.array([len(index)]),
                index=index,
                past_length=(self._draft_rows + self._fed)[slot : slot + 1],
                slots=np.array([slot]),
                anchor=np.zeros(1, np.int64),
                first_slot=slot,
            )
            self._run("feed", [self._plan_backbone(backbone_call(context, index))], [])
            self._fed[slot] += len(index)

    def hold(self, index: Mapping[int, np.ndarray]) -> None:
        """As `Backend` says; what would not fit the hold area goes into the drafter's cache now."""
        self._flush()
        features, size = self._tensors["features"], self._feature_bytes
        for slot, rows in index.items():
            if self._held[slot] + len(rows) > self.spec.hold_rows:
                self._feed(slot, np.concatenate([self._hold_rows(slot), rows]))
                self._held[slot] = 0
                continue
            at = self._hold_start + slot * self.spec.hold_rows + int(self._held[slot])
            for start, count in runs(rows):
                self.device.copy(features + at * size, features + start * size, count * size)
                at += count
            self._held[slot] += len(rows)

    def markov(self, anchor: np.ndarray, sampling: DraftSampling) -> np.ndarray:
        call = markov_call(self._markov, anchor, sampling)
        sizes = {"B": self._blocks}
        calls = [self._plan(pad_call(call, self.bundle.graphs[call.graph].inputs, sizes, _NONE))]
        outputs = ["draft_ids"]
        if "confidence" in self.bundle.graphs:
            calls.append(self._plan(GraphCall("confidence", {}, sizes)))
            outputs.append("confidence_logits")
        if self._pending is not None:
            calls.insert(0, self._pending)
        self._pending = None
        self._run("draft", calls, outputs, captured=self._pending_tiered)
        self._draft_temperature = sampling.temperature
        self._finish()
        return self._result("draft_ids")

    def confidence(self) -> np.ndarray | None:
        if "confidence" not in self.bundle.graphs:
            return None
        return self._result("confidence_logits")

    def accept(self, sampling: AcceptSampling) -> tuple[np.ndarray, np.ndarray]:
        self._flush()
        slot_block, temperature, blocks = self._slot_block, self._draft_temperature, self._blocks
        if not sampling.verify_length.any():  # nothing was drafted: any block will do
            slot_block, blocks = np.zeros(self._slots, np.int64), 1
            temperature = np.zeros(1, np.float32)
        call = accept_call(sampling, self._rows, slot_block, temperature, self.gamma)
        requests = tier(len(sampling.slots), request_tiers(self.spec.max_batch))
        sizes = {"R": requests, "B": blocks, "N": self._rows.total}
        call = pad_call(call, self.bundle.graphs[call.graph].inputs, sizes, _NONE)
        self._extent["R"] = len(sampling.slots)
        self._run("accept", [self._plan(call)], ["accepted", "next_id"], captured=True)
        self._finish()
        return self._result("accepted"), self._result("next_id")

    # Running

    def _plan(self, call: GraphCall) -> _Planned:
        inputs = self.bundle.graphs[call.graph].inputs
        fixed = {"C": self.spec.capacity}
        if call.graph == "backbone":  # gathers from all features, those of the call and the held
            fixed["N"] = self.plan.tensors["features"] // self._feature_bytes
        axes = call_axes(call, inputs, fixed)
        return _Planned(call, choose_profile(self.spec, call.graph, inputs, axes), axes)

    def _run(
        self,
        phase: str,
        calls: Sequence[_Planned],
        results: Sequence[str],
        *,
        captured: bool = False,
    ) -> None:
        """Upload what comes from the host, run the engines, download results, all asynchronous.

        captured: replay the phase as one graph; the first time at a shape it runs as it is, which
        also warms it up, and is captured after.
        """
        size, staged = self._stage(phase, calls)

        def work() -> None:
            self.device.upload(self._staging[phase], self._mirrors[phase][:size])
            for planned in calls:
                self.device.enqueue(self._engine_call(planned, staged))
            for name in results:
                self.device.download(self._results[name], self._tensors[name])

        key = (phase, *(planned.key for planned in calls))
        start = self.device.mark()
        if key in self._captured:
            self.device.launch(self._captured[key])
            self.graphs.replayed[phase] += 1
            self._book(phase, start)
        else:
            work()
            self.graphs.eager[phase] += 1
            self._book(phase, start)
            if captured and self._cuda_graphs and key not in self.graphs.refused:
                self._capture(key, work)

    def _capture(self, key: Key, work: Callable[[], None]) -> None:
        """Keep the phase as a graph; it has just run, so all of it is warm."""
        self._finish()
        self._new_shapes = True
        try:
            self._captured[key] = self.device.capture(work)
            self.graphs.captured.append(key)
        except CaptureRefused as error:
            self.graphs.refused[key] = str(error)

    def _stage(
        self, phase: str, calls: Sequence[_Planned]
    ) -> tuple[int, dict[tuple[str, str], int]]:
        """Write the host's arrays into the phase's pinned block: bytes used, device addresses."""
        if phase in self._in_flight:
            self._finish()
        self._in_flight.add(phase)
        arrays, places = [], []
        for planned in calls:
            for tensor in self.bundle.graphs[planned.call.graph].inputs:
                if tensor.name in planned.call.feeds:
                    array = planned.call.feeds[tensor.name]
                    arrays.append(np.ascontiguousarray(array, NUMPY[tensor.dtype]))
                    places.append((planned.call.graph, tensor.name))
        offsets, size = layout(arrays)
        staged = {}
        for place, array, offset in zip(places, arrays, offsets, strict=True):
            self._mirrors[phase][offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
            staged[place] = self._staging[phase] + offset
        return size, staged

    def _engine_call(self, planned: _Planned, staged: dict[tuple[str, str], int]) -> EngineCall:
        graph, first = planned.call.graph, planned.call.first_slot
        info = self.bundle.graphs[graph]

        def place(tensor: TensorInfo) -> Tensor:
            name = tensor.name.replace("present_", "past_")
            if name in self._caches.get(graph, {}):
                offset = first * self.plan.caches[graph][name]
                address = self._caches[graph][name] + offset
            elif (graph, name) in staged:
                address = staged[graph, name]
            else:
                address = self._tensors[SOURCES.get(name, name)]
            return Tensor(address, concrete(tensor, planned.axes))

        return EngineCall(
            graph,
            planned.profile,
            {t.name: place(t) for t in info.inputs},
            {t.name: place(t) for t in info.outputs},
        )

    def _flush(self) -> None:
        """Run a backbone call that no `markov` followed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._run("draft", [pending], [])

    def _book(self, phase: str, start: Any) -> None:
        """Count device time from `start` on for a phase, once it has run."""
        self._timed.append((_PHASE.get(phase, phase), start, self.device.mark()))

    def _finish(self) -> None:
        """Wait for the device, and book the time of what has run."""
        self.device.sync()
        self._in_flight.clear()
        for phase, start, end in self._timed:
            self.seconds[phase] += self.device.seconds(start, end)
        self._timed.clear()

    # Results

    def _result(self, name: str) -> np.ndarray:
        """What the last phase downloaded, without padding."""
        tensor = self._output(name)
        shape = concrete(tensor, self._extent)
        size = int(np.prod(shape)) * np.dtype(NUMPY[tensor.dtype]).itemsize
        return self._results[name][:size].view(NUMPY[tensor.dtype]).reshape(shape).copy()

    def _output(self, name: str) -> TensorInfo:
        outputs = [t for g in self.bundle.graphs.values() for t in g.outputs if t.name == name]
        if not outputs or name not in self._tensors:
            raise DraftgraphError(f"no tensor {name!r}, only {sorted(self._tensors)}")
        return outputs[0]

    def read(self, name: str) -> np.ndarray:
        self._flush()
        tensor = self._output(name)
        found = np.empty(concrete(tensor, self._extent), NUMPY[tensor.dtype])
        self.device.download(found.reshape(-1).view(np.uint8), self._tensors[name])
        self._finish()
        return found

    def report(self) -> dict[str, Any]:
        counts = {
            "eager": self.graphs.eager.total(),
            "captured": len(self.graphs.captured),
            "replayed": self.graphs.replayed.total(),
        }
        refused = {key[0]: reason for key, reason in self.graphs.refused.items()}
        return {
            "provider": f"{self.device.backend}-native",
            "placement": {},
            "cuda_graphs": counts if self._cuda_graphs else None,
            "without_cuda_graphs": refused,
        }

    def fingerprint(self) -> dict[str, Any]:
        used = [
            g for g in ("target", "backbone", self._markov, "confidence") if g in self.bundle.graphs
        ]
        files = [self.bundle.graphs[g].file for g in used] + [WEIGHTS]
        return {
            "device": self.device.name,
            "backend": f"{self.device.backend}-native",
            "backend_version": self.device.version,
            "graphs": {name: self.bundle.files[name]["sha256"][:16] for name in files},
            "dtype": self.bundle.dtype,
            "capacity": self.spec.capacity,
            "cuda_graphs": self._cuda_graphs,
        }


_NONE = np.zeros(0, np.int64)
# One launch each: a draft's time counts as the backbone's, as does context fed ahead of it.
_PHASE = {"draft": "backbone", "feed": "backbone"}


def engines_needed(bundle: Bundle, markov: str) -> list[str]:
    """The graphs that a backend loads: one Markov head, greedy and sampled."""
    head = markov_head(bundle, markov)
    unused = {"markov", "markov_greedy", "markov_topk", "markov_topk_greedy"}
    unused -= {head, f"{head}_greedy"}
    return [name for name in bundle.graphs if name not in unused]
