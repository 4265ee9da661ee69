"""The graphs of a bundle on one of ONNX Runtime's execution providers.

Every graph runs through IOBinding over fixed buffers. A cache tensor is bound as input and as
output of the same run, so TensorScatter updates it in place. Bindings are kept per shape.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from ....graphs.errors import DraftgraphError
from ...bundle import WEIGHTS, Bundle
from ...engine_cache import ENGINES
from ...machine import available_cores, gpu, processor_name
from ...profiles import Limits, check_limits, check_precision
from ..base import PREFILL_CHUNK, AcceptSampling, ContextBatch, DraftSampling, TokenBatch
from ..calls import (
    GraphCall,
    LogitRows,
    accept_call,
    backbone_call,
    markov_call,
    markov_head,
    target_call,
)
from ..hugepages import large_pages
from .caches import Caches
from .features import FeatureRows
from .graphs import Graphs, Worker
from .memory import ELEMENTS, DeviceMemory, HostMemory, Memory, Staging, Tensor, nbytes
from .placement import Placement, placement
from .providers import (
    Provider,
    most_feature_rows,
    open_session,
    provider_options,
    session_options,
    version,
)

# Graph inputs that read an intermediate tensor of another name.
_SOURCES = {"target_logits": "logits", "features": "context_features"}
# Bindings of rounds are kept, and of calls no wider than this many tokens in all; those of long
# prefill chunks are one-offs and would pin memory.
_KEEP_UP_TO_TOKENS = 64
# A batch meets many combinations of shapes; this many are remembered, about 30 KB each.
_MOST_BINDINGS = 512

_LOG = logging.getLogger(__name__)

_thread_pool_size: int | None = None


def capacity_step(rows: int, finest: int = 64) -> int:
    """The smallest step of the capacity ladder that holds `rows`.

    Attention cost follows the capacity, padded rows included, so steps are an eighth of it at most:
    64 rows up to 512, 128 up to 1024, 256 up to 2048, then 1024. Growing moves the rows once. It
    also voids captured graphs, so devices take no step below 512.
    """
    step = max(finest, next((s for s in (64, 128, 256) if rows <= 8 * s), 1024))
    return -(-rows // step) * step


def use_one_thread_pool(threads: int | None) -> None:
    """One spinning pool for all sessions of the process; a pool per session halves their speed."""
    global _thread_pool_size
    if _thread_pool_size is None:
        _thread_pool_size = threads or available_cores()
        ort.set_global_thread_pool_sizes(_thread_pool_size, 1)
    elif threads not in (None, _thread_pool_size):
        raise DraftgraphError(
            f"threads is {threads}, but this process already runs its thread pool with "
            f"{_thread_pool_size}; ONNX Runtime fixes it at the first session, use another process"
        )


class OnnxRuntime:
    """Implements `Backend`; see there.

    device_id: number of the GPU. capacity: cache rows per request, for providers that build
    TensorRT engines; the other caches grow. max_requests: most slots, likewise. cuda_graphs: None
    uses them where the provider can. strict_placement: an error where nodes do not run on the
    provider. engine_cache: folder of compiled engines or kernels, default in the bundle.
    """

    prefill_chunk = PREFILL_CHUNK

    def __init__(
        self,
        bundle: Bundle,
        provider: Provider,
        *,
        threads: int | None = None,
        markov: str = "auto",
        device_id: int = 0,
        capacity: int | None = None,
        max_requests: int = 8,
        cuda_graphs: bool | None = None,
        strict_placement: bool = False,
        engine_cache: str | Path | None = None,
    ) -> None:
        self._markov = markov_head(bundle, markov)
        _check_options(bundle, provider, capacity, cuda_graphs, device_id)
        self.bundle, self.provider, self.device_id = bundle, provider, device_id
        self._limits = None
        if provider.fixed_capacity:
            self._limits = _limits(bundle, capacity, max_requests)
        if problem := provider.problem(device_id):
            raise DraftgraphError(f"provider {provider.name}: {problem}")
        _check_bf16(bundle, provider, device_id)
        use_one_thread_pool(threads)
        self._strict = strict_placement
        self._engine_cache = self._cache_folder(engine_cache)
        self._sessions: dict[str, ort.InferenceSession] = {}
        self.placements: dict[str, Placement] = {}
        self._hosted: dict[str, frozenset[str]] = {}  # inputs that a graph wants on the host
        self._taken: dict[str, frozenset[str]] = {}  # of `_sources`
        self._cuda_graphs = cuda_graphs
        self._graphs = None
        if provider.graph_id and cuda_graphs is not False:
            self._graphs = Graphs(provider.graph_id)
            self._worker = Worker()
        self._without_graphs: dict[str, str] = {}  # sessions that refuse CUDA graphs, and why
        for name in ("target", "backbone", f"{self._markov}_greedy", "accept_greedy"):
            self._session(name)
        self._memory: Memory = (
            HostMemory()
            if provider.host
            else DeviceMemory(provider.device, device_id, self._sessions["accept_greedy"])
        )
        self._begin()

    def _begin(self) -> None:
        """With no slots, and nothing computed."""
        self.seconds: dict[str, float] = defaultdict(float)
        decoders = {
            "target": self.bundle.target.decoder,
            "backbone": self.bundle.draft.decoder,
        }
        self._caches = {
            graph: Caches(
                self._memory,
                [f"past_{kind}.{i}" for i in range(d.num_layers) for kind in ("key", "value")],
                d.num_kv_heads,
                d.head_dim,
                self.bundle.dtype,
                longest=capacity_step(self.bundle.max_seq_len + 2 * self.bundle.draft.block_size),
            )
            for graph, d in decoders.items()
        }
        self._slots = 0
        self._rows = LogitRows()
        self._constants: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._buffers: dict[str, Any] = {}  # one growing block per intermediate tensor
        self._draft_temperature = np.zeros(0, np.float32)
        self._slot_block = np.zeros(0, np.int64)
        self._bindings: dict[tuple[Any, ...], _Binding] = {}
        self._shared: dict[tuple[Any, ...], _Io] = {}  # by graph and slots
        self._tensors: dict[str, Tensor] = {}  # intermediate tensors by name
        self._features = self._feature_rows()

    # Sessions

    def _session(self, name: str) -> ort.InferenceSession:
        """The session of a graph, made on first use."""
        if name not in self._sessions:
            with large_pages() if self.provider.host else nullcontext():
                self._sessions[name] = self._open(name)
        return self._sessions[name]

    def _open(self, name: str) -> ort.InferenceSession:
        path = self.bundle.graph_path(name, cpu=self.provider.device == "cpu")
        graphs = self._graphs is not None
        try:
            session = self._open_with(name, path, graphs)
        except DraftgraphError as error:
            if not graphs or self._cuda_graphs or "graph capture" not in str(error):
                raise
            # Nodes that the provider leaves to the CPU need copies, which cannot be captured.
            self._without_graphs[name] = str(error)
            session = self._open_with(name, path, False)
        placed = placement(name, path, self.provider.ep, session)
        self.placements[name] = placed
        if placed.elsewhere:
            message = f"{path}: not on {self.provider.ep}: {', '.join(placed.elsewhere)}"
            if self._strict:
                raise DraftgraphError(
                    f"{message}; leave strict placement out to run them elsewhere"
                )
            _LOG.warning("%s; every step waits for them", message)
        self._hosted[name] = hosted_inputs(session, self.provider.device)
        lost = [t for t in self._hosted[name] if t.startswith("past_") and t != "past_length"]
        if lost:
            raise DraftgraphError(
                f"{path}: {self.provider.ep} leaves the cache update ({lost[0]}) to the CPU; "
                "use another provider"
            )
        return session

    def _open_with(self, name: str, path: Path, graphs: bool) -> ort.InferenceSession:
        limits = self._limits if name in ("target", "backbone") else None
        return open_session(
            path,
            self.provider,
            session_options(limits),
            provider_options(
                self.provider,
                self.bundle,
                name,
                device_id=self.device_id,
                cuda_graphs=graphs,
                limits=self._limits,
                cache=self._engine_cache,
            ),
            self.device_id,
        )

    def _cache_folder(self, folder: str | Path | None) -> Path | None:
        """The folder of what a provider compiles; made here, as native code writes to it."""
        if self._limits is None:
            return None
        name = f"{self.provider.name}-{self._limits.capacity}x{self._limits.max_batch}"
        path = Path(folder) if folder else self.bundle.path / ENGINES / f"onnxruntime-{name}"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DraftgraphError(
                f"{path}: cannot be made ({error.strerror}); name another folder as engine_cache"
            ) from None
        return path

    def fingerprint(self) -> dict[str, Any]:
        cpu = self.provider.device == "cpu"
        graphs = ("target", "backbone", self._markov, "confidence")
        used = [g for g in graphs if g in self.bundle.graphs]
        files = [self.bundle.graph_path(g, cpu=cpu).name for g in used] + [WEIGHTS]
        found = None if cpu else gpu(self.device_id)
        facts = {
            "device": f"{processor_name()}, {os.cpu_count()} cores",
            "backend": f"onnxruntime-{self.provider.name}",
            "backend_version": version(self.provider),
            "graphs": {name: self.bundle.files[name]["sha256"][:16] for name in files},
            "dtype": self.bundle.dtype,
            "threads": _thread_pool_size,
        }
        if found is not None:
            facts["device"] = f"{found.name}, driver {found.driver}"
            facts["cuda_graphs"] = self._graphs is not None
        if self._limits is not None:
            facts["capacity"] = self._limits.capacity
        return facts

    def report(self) -> dict[str, Any]:
        """Where every graph that was opened runs, and how its runs were launched."""
        return {
            "provider": self.provider.name,
            "placement": {
                name: {
                    "nodes": placed.nodes,
                    "elsewhere": list(placed.elsewhere),
                    "shapes": list(placed.shapes),
                }
                for name, placed in self.placements.items()
            },
            "cuda_graphs": None if self._graphs is None else dict(self._graphs.counts),
            "without_cuda_graphs": dict(self._without_graphs),
        }

    # Caches

    @property
    def longest(self) -> int | None:
        """Most tokens of a request; None where caches grow as needed."""
        gamma = self.bundle.draft.block_size
        return None if self._limits is None else self._limits.longest(gamma)

    @property
    def capacity(self) -> tuple[int, int]:
        return self._caches["target"].capacity, self._caches["backbone"].capacity

    def reset(self, slots: int) -> None:
        self._features.clear()
        # On a device grown caches stay, and with them the CUDA graphs of earlier requests.
        grown = self.provider.host and (
            self._features.too_large_to_keep or any(c > capacity_step(1) for c in self.capacity)
        )
        if slots != self._slots or grown:
            self._forget_bindings()
            self._slots = slots
            # Masked rows must be finite: without slots an error left them, and fp16 overflows.
            forget = not slots or self.bundle.dtype == "fp16"
            for caches in self._caches.values():
                caches.clear(forget=forget)
            self._tensors = {}
            if self._features.too_large_to_keep:
                self._features = self._feature_rows()

    def _step(self, rows: int) -> int:
        return capacity_step(rows) if self.provider.host else capacity_step(rows, 512)

    def reserve(self, slots: int, target_rows: int, draft_rows: int) -> None:
        if slots != self._slots:
            self.reset(slots)
        if self._limits is not None and slots > self._limits.max_batch:
            raise DraftgraphError(
                f"{slots} requests at a time, but the sessions were made for max_requests "
                f"{self._limits.max_batch}; load the engine with more"
            )
        for graph, rows in (("target", target_rows), ("backbone", draft_rows)):
            if self._limits is not None:
                if rows and not self._caches[graph].capacity:
                    assert self._limits.capacity is not None
                    self._grow(graph, self._limits.capacity)
            elif rows > self._caches[graph].capacity:
                self._grow(graph, self._step(rows))

    def _cache_tensors(self, graph: str) -> dict[str, Tensor]:
        return self._caches[graph].tensors if graph in self._caches else {}

    def _grow(self, graph: str, capacity: int) -> None:
        self._forget_bindings(graph)
        self._caches[graph].grow(self._slots, capacity)

    def _feature_rows(self) -> FeatureRows:
        width = len(self.bundle.draft.tap_ids) * self.bundle.target.decoder.hidden_size
        most = None if self._limits is None else most_feature_rows(self._limits)
        return FeatureRows(self._memory, width, most)

    def _check_room(self, graph: str, past_length: np.ndarray, rows: int) -> None:
        """ONNX Runtime would clamp and overwrite valid rows, TensorRT would drop the write."""
        end = int(past_length.max(initial=0)) + rows
        capacity = self._caches[graph].capacity
        if end > capacity:
            raise DraftgraphError(
                f"{graph}: {end} cache rows needed, the capacity is {capacity}; call reserve first"
            )

    # Phases

    def target(self, batch: TokenBatch) -> None:
        self._check_room("target", batch.past_length, int(batch.lengths.max()))
        call, self._rows = target_call(batch)
        tokens = len(batch.ids)
        if self._features.place(tokens):
            self._forget_bindings("target", "backbone")
        features = self._features.current
        cached = self._comes_again(tokens, int(batch.lengths.max()))
        self._run(call, cached=cached, into={"features": features})

    def backbone(self, context: ContextBatch) -> None:
        rows = self._features.take(context)
        if self._limits is not None:
            context, rows = self._write_ahead(context, rows)
        self._backbone(context, np.concatenate(rows))
        self._slot_block = np.zeros(self._slots, np.int64)
        self._slot_block[context.slots] = np.arange(len(context.slots))

    def _backbone(self, context: ContextBatch, index: np.ndarray) -> None:
        width = max(1, int(context.counts.max()))
        self._check_room("backbone", context.past_length, width + self.bundle.draft.block_size)
        self._tensors["context_features"] = self._features.all
        self._run(backbone_call(context, index), cached=self._comes_again(len(index), width))

    def _comes_again(self, tokens: int, width: int) -> bool:
        """Whether the shape of a call is one of a round, of however many requests, or short."""
        return tokens <= _KEEP_UP_TO_TOKENS or width <= self.bundle.draft.block_size + 1

    def _write_ahead(
        self, context: ContextBatch, rows: list[np.ndarray]
    ) -> tuple[ContextBatch, list[np.ndarray]]:
        """Write wide context slot by slot, in calls that draft a block nobody reads.

        A call of several slots writes up to X + γ rows in each, X being the widest context: with a
        fixed capacity one request's prompt must not cost the others that room.
        """
        assert self._limits is not None
        counts, past = context.counts.copy(), context.past_length.copy()
        for i, index in enumerate(rows):
            if len(index) <= self.bundle.draft.block_size + 1:
                continue
            for start in range(0, len(index), self._limits.prefill_len):
                part = index[start : start + self._limits.prefill_len]
                zero = np.zeros(1, np.int64)
                slot = context.first_slot + i
                call = ContextBatch(
                    counts=np.array([len(part)]),
                    index=part,
                    past_length=past[i : i + 1].copy(),
                    slots=zero + slot,
                    anchor=zero,
                    first_slot=slot,
                )
                self._backbone(call, part)
                past[i] += len(part)
            counts[i], rows[i] = 0, index[:0]
        return replace(context, counts=counts, past_length=past), rows

    def hold(self, index: Mapping[int, np.ndarray]) -> None:
        if self._features.hold(index):
            self._forget_bindings("target", "backbone")

    def release(self, slot: int) -> None:
        self._features.release(slot)

    def markov(self, anchor: np.ndarray, sampling: DraftSampling) -> np.ndarray:
        self._draft_temperature = sampling.temperature
        if sampling.uniforms is None:
            self._tensors.pop("draft_logits", None)  # those of an earlier draft are void
        self._run(markov_call(self._markov, anchor, sampling), phase="markov")
        return self._memory.read(self._tensors["draft_ids"])

    def confidence(self) -> np.ndarray | None:
        if "confidence" not in self.bundle.graphs:
            return None
        sizes = {"B": len(self._draft_temperature)}
        self._run(GraphCall("confidence", {}, sizes, ("hidden", "prev_embeddings")))
        return self._memory.read(self._tensors["confidence_logits"])

    def accept(self, sampling: AcceptSampling) -> tuple[np.ndarray, np.ndarray]:
        gamma, v = self.bundle.draft.block_size, self.bundle.draft.vocab_size
        if not sampling.verify_length.any():  # nothing was drafted: any block will do
            self._tensors["draft_ids"] = self._zeros("draft_ids", (1, gamma), "int64")
            self._tensors.pop("draft_logits", None)
            self._slot_block = np.zeros(self._slots, np.int64)
            self._draft_temperature = np.zeros(1, np.float32)
        call = accept_call(sampling, self._rows, self._slot_block, self._draft_temperature, gamma)
        if "draft_logits" in call.tensors and "draft_logits" not in self._tensors:
            blocks = len(self._draft_temperature)  # none was drawn at random: any q will do
            self._tensors["draft_logits"] = self._zeros("draft_logits", (blocks, gamma, v), "fp32")
        self._run(call, phase="accept")
        read, tensors = self._memory.read, self._tensors
        return read(tensors["accepted"]), read(tensors["next_id"])

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A constant tensor that stands in for a draft where there is none."""
        key = name, shape
        if key not in self._constants:
            self._constants[key] = Tensor(self._memory.allocate(nbytes(shape, dtype)), shape, dtype)
        return self._constants[key]

    def read(self, name: str) -> np.ndarray:
        return self._memory.read(self._tensors[name]).copy()

    # Runs

    def _run(
        self,
        call: GraphCall,
        *,
        cached: bool = True,
        phase: str | None = None,
        into: dict[str, Tensor] | None = None,
    ) -> None:
        """Run a graph over host arrays and intermediate tensors; keep its outputs.

        into: outputs that go to given places. cached: whether the same shapes will come again.
        """
        graph, feeds = call.graph, call.feeds
        tensors = {n: self._tensors[n] for n in call.tensors if n in self._sources(graph)}
        into = into or {}
        key = (
            graph,
            call.first_slot,
            *[array.shape for array in feeds.values()],
            *[tensor.key for tensor in tensors.values()],
            *[tensor.key for tensor in into.values()],
            *call.sizes.values(),
        )
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bind(call, tensors, into)
            if cached:
                if len(self._bindings) >= _MOST_BINDINGS:
                    self._forget_bindings()
                self._bindings[key] = binding
        arrays = binding.staging.arrays
        for name, array in feeds.items():
            arrays[name][...] = array
        start = time.perf_counter()
        binding.staging.send()
        binding.attach()
        if self._graphs is None:
            binding.session.run_with_iobinding(binding.io.handle)
        else:
            repeats = cached and graph not in self._without_graphs and not self._hosted.get(graph)
            options = self._graphs.options(binding, repeats)
            self._worker(binding.session.run_with_iobinding, binding.io.handle, options)
        self.seconds[phase or graph] += time.perf_counter() - start
        self._tensors.update(binding.outputs)

    def _sources(self, graph: str) -> frozenset[str]:
        """The tensors that a graph takes, by the names under which they are kept."""
        if graph not in self._taken:
            inputs = self.bundle.graphs[graph].inputs
            self._taken[graph] = frozenset(_SOURCES.get(t.name, t.name) for t in inputs)
        return self._taken[graph]

    def _bind(
        self, call: GraphCall, tensors: dict[str, Tensor], into: dict[str, Tensor]
    ) -> _Binding:
        graph, sizes = call.graph, call.sizes
        session, info = self._session(graph), self.bundle.graphs[graph]
        hosted = self._hosted.get(graph, frozenset())
        caches = self._cache_tensors(graph)
        staged = {
            t.name: (call.feeds[t.name].shape, t.dtype) for t in info.inputs if t.name in call.feeds
        }
        staging = Staging(self._memory, staged)
        inputs: dict[str, tuple[str, Tensor]] = {}  # device, tensor
        for tensor in info.inputs:
            source = _SOURCES.get(tensor.name, tensor.name)
            device = self._memory.device
            if tensor.name in caches:
                continue
            if source in tensors:
                value = tensors[source]
            elif tensor.name in hosted:
                device, value = "cpu", staging.on_host(tensor.name)
            else:
                value = staging.tensors[tensor.name]
            inputs[tensor.name] = device, value
        outputs = {}
        for tensor in info.outputs:
            if tensor.name.replace("present", "past") in caches:
                continue
            shape = tuple(n if isinstance(n, int) else sizes[n] for n in tensor.shape)
            outputs[tensor.name] = into.get(tensor.name) or self._buffer(
                tensor.name, shape, tensor.dtype
            )
        io = self._io(graph, call.first_slot, sizes.get("R", 0))
        return _Binding(session, io, staging, inputs, outputs)

    def _io(self, graph: str, first_slot: int, slots: int) -> _Io:
        """An IOBinding with the caches bound.

        These are most of a graph's tensors, and binding them takes longer than a step may lose, so
        all shapes of a graph with caches share one. Captured graphs get their own.
        """
        caches = self._cache_tensors(graph)
        key, share = (graph, first_slot, slots), bool(caches) and self._graphs is None
        if share and key in self._shared:
            return self._shared[key]
        io = _Io(self._session(graph), self._memory.device, self.device_id)
        for name, whole in caches.items():
            cache = whole.rows(first_slot, slots)
            io.bind_input(name, io.device, cache)
            io.bind_output(name.replace("past", "present"), cache)
        if share:
            self._shared[key] = io
        return io

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Output memory: all shapes of one tensor share one block, since one is live at a time."""
        size = nbytes(shape, dtype)
        if name not in self._buffers or self._buffers[name].nbytes < size:
            self._buffers[name] = self._memory.allocate(size)
        return Tensor(self._buffers[name], shape, dtype)

    def _forget_bindings(self, *graphs: str) -> None:
        """Of the given graphs, whose memory has moved; of all if none is given."""
        forgotten = [key for key in self._bindings if not graphs or key[0] in graphs]
        bindings = [self._bindings.pop(key) for key in forgotten]
        self._shared = {k: io for k, io in self._shared.items() if graphs and k[0] not in graphs}
        if self._graphs is not None:
            self._worker(self._graphs.release, bindings)


class _Io:
    """An IOBinding and the memory that it points to, kept alive together."""

    __slots__ = ("alive", "attached", "device", "device_id", "handle")

    def __init__(self, session: ort.InferenceSession, device: str, device_id: int) -> None:
        self.handle: Any = session.io_binding()
        self.device, self.device_id = device, device_id
        self.alive: dict[str, Tensor] = {}
        self.attached: Any = None  # the binding whose tensors are bound

    def bind_input(self, name: str, device: str, value: Tensor) -> None:
        index, element = 0 if device == "cpu" else self.device_id, ELEMENTS[value.dtype][0]
        self.handle.bind_input(name, device, index, element, value.shape, value.address)
        self.alive[name] = value

    def bind_output(self, name: str, value: Tensor) -> None:
        element = ELEMENTS[value.dtype][0]
        self.handle.bind_output(
            name, self.device, self.device_id, element, value.shape, value.address
        )
        self.alive[name] = value


class _Binding:
    """The tensors of one call; `attach` them before it runs."""

    __slots__ = ("graph", "inputs", "io", "options", "outputs", "runs", "session", "staging")

    def __init__(
        self,
        session: ort.InferenceSession,
        io: _Io,
        staging: Staging,
        inputs: dict[str, tuple[str, Tensor]],
        outputs: dict[str, Tensor],
    ) -> None:
        self.session, self.io, self.staging = session, io, staging
        self.inputs, self.outputs = inputs, outputs
        self.runs, self.graph, self.options = 0, -1, None  # of `Graphs`

    def attach(self) -> None:
        if self.io.attached is self:
            return
        for name, (device, value) in self.inputs.items():
            self.io.bind_input(name, device, value)
        for name, value in self.outputs.items():
            self.io.bind_output(name, value)
        self.io.attached = self


def hosted_inputs(session: ort.InferenceSession, device: str) -> frozenset[str]:
    """Inputs that a session of a device reads on the host.

    Binding device memory to one of them would copy it once, when it is bound.
    """
    if device == "cpu":
        return frozenset()
    infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return frozenset(node.name for node, info in infos if info.name == "Cpu")


def _check_options(
    bundle: Bundle,
    provider: Provider,
    capacity: int | None,
    graphs: bool | None,
    device_id: int,
) -> None:
    if not provider.fp32:
        check_precision(bundle)
    if device_id < 0 or (device_id and provider.device == "cpu"):
        raise DraftgraphError(
            f"device_id is {device_id}, expected the number of a GPU, for providers that use one"
        )
    if capacity is not None and not provider.fixed_capacity:
        raise DraftgraphError(
            f"capacity is {capacity}, but the caches of provider {provider.name} grow as needed; "
            "leave it out"
        )
    if graphs and not provider.graph_id:
        raise DraftgraphError(f"provider {provider.name} has no CUDA graphs; leave them out")


def _limits(bundle: Bundle, capacity: int | None, max_requests: int) -> Limits:
    """What the engines of a provider are built for; the engine's prompts come in chunks."""
    gamma = bundle.draft.block_size
    room = PREFILL_CHUNK if capacity is None else max(1, capacity - 2 * gamma - 1)
    limits = Limits(capacity, max_requests, min(PREFILL_CHUNK, room))
    check_limits(bundle, limits)
    return limits


def _check_bf16(bundle: Bundle, provider: Provider, device_id: int) -> None:
    if provider.device == "cpu" or bundle.dtype != "bf16":
        return
    found = gpu(device_id)
    if found is not None and int(found.compute_capability.split(".")[0]) < 8:
        raise DraftgraphError(
            f"{bundle.path}: a bf16 bundle, but {found.name} (compute capability "
            f"{found.compute_capability}) has no bf16 arithmetic; export with --dtype fp16"
        )
