"""ONNX Runtime on the CPU.

Every graph runs through IOBinding over fixed buffers. A cache tensor is bound as input and as
output of the same run, so TensorScatter updates it in place. Bindings are kept per shape.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from ...graphs.contract import DecoderSpec
from ...graphs.errors import DraftgraphError
from ..bundle import WEIGHTS, Bundle
from ..machine import available_cores, processor_name
from .base import AcceptSampling, ContextBatch, DraftSampling, TokenBatch
from .calls import GraphCall, LogitRows, accept_call, backbone_call, markov_call, target_call
from .hugepages import large_pages

_NUMPY = {"fp32": np.float32, "fp16": np.float16, "int64": np.int64}
# numpy has no bf16: its bits travel as 16-bit integers, tagged with ONNX's element type.
_BF16_BITS, _BF16_ONNX = np.uint16, 16
# Graph inputs that read an intermediate tensor of another name.
_SOURCES = {"target_logits": "logits", "features": "context_features"}
# Bindings of rounds are kept; those of long prefill chunks are one-offs and would pin memory.
_KEEP_UP_TO_TOKENS = 64
# A batch meets many combinations of shapes; this many are remembered, about 30 KB each.
_MOST_BINDINGS = 512

_thread_pool_size: int | None = None


def capacity_step(rows: int) -> int:
    """The smallest step of the capacity ladder that holds `rows`.

    Attention cost follows the capacity, so steps are fine where they matter: multiples of 256 up to
    2048, of 1024 above. Growing copies the cache once per step.
    """
    step = 256 if rows <= 2048 else 1024
    return -(-rows // step) * step


def _use_one_thread_pool(threads: int | None) -> None:
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


class OnnxRuntimeCpu:
    """Implements `Backend`; see there."""

    def __init__(self, bundle: Bundle, *, threads: int | None = None, markov: str = "auto") -> None:
        if markov not in ("auto", "full", "topk"):
            raise DraftgraphError(f'markov is {markov!r}, expected "auto", "full" or "topk"')
        if markov == "topk" and "markov_topk" not in bundle.graphs:
            raise DraftgraphError(
                f"{bundle.path}: no truncated Markov graph in this bundle; export it with "
                '--markov-top-k, or use markov="full"'
            )
        _use_one_thread_pool(threads)
        self.bundle = bundle
        self.seconds: dict[str, float] = defaultdict(float)
        truncated = markov != "full" and "markov_topk" in bundle.graphs
        self._markov = "markov_topk" if truncated else "markov"
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._caches: dict[str, dict[str, np.ndarray]] = {"target": {}, "backbone": {}}
        self._capacity = {"target": 0, "backbone": 0}
        self._slots = 0
        self._rows = LogitRows()
        self._held: dict[int, list[np.ndarray]] = {}  # features of requests that skip drafting
        self._constants: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._buffers: dict[str, np.ndarray] = {}  # one growing buffer per intermediate tensor
        self._draft_temperature = np.zeros(0, np.float32)
        self._bindings: dict[tuple[Any, ...], _Binding] = {}
        self._tensors: dict[str, Any] = {}  # intermediate OrtValues by name
        for name in ("target", "backbone", f"{self._markov}_greedy", "accept_greedy"):
            self._session(name)

    # Sessions

    def _session(self, name: str) -> ort.InferenceSession:
        """The session of a graph, made on first use."""
        if name not in self._sessions:
            with large_pages():
                self._sessions[name] = open_session(self.bundle.graph_path(name, cpu=True))
        return self._sessions[name]

    def fingerprint(self) -> dict[str, Any]:
        graphs = ("target", "backbone", self._markov, "confidence")
        used = [g for g in graphs if g in self.bundle.graphs]
        files = [self.bundle.graph_path(g, cpu=True).name for g in used] + [WEIGHTS]
        return {
            "device": f"{processor_name()}, {os.cpu_count()} cores",
            "backend": "onnxruntime-cpu",
            "backend_version": ort.__version__,
            "graphs": {name: self.bundle.files[name]["sha256"][:16] for name in files},
            "dtype": self.bundle.dtype,
            "threads": _thread_pool_size,
        }

    # Caches

    def reset(self, slots: int) -> None:
        self._held.clear()
        smallest = capacity_step(1)
        if slots != self._slots or any(c > smallest for c in self._capacity.values()):
            self._slots = slots
            self._capacity = {"target": 0, "backbone": 0}
            self._caches = {"target": {}, "backbone": {}}
            self._tensors = {}
            self._bindings.clear()

    def reserve(self, slots: int, target_rows: int, draft_rows: int) -> None:
        if slots != self._slots:
            self.reset(slots)
        specs = {"target": self.bundle.target.decoder, "backbone": self.bundle.draft.decoder}
        for graph, rows in (("target", target_rows), ("backbone", draft_rows)):
            if rows > self._capacity[graph]:
                self._grow(graph, specs[graph], capacity_step(rows))

    def _grow(self, graph: str, spec: DecoderSpec, capacity: int) -> None:
        bf16 = self.bundle.dtype == "bf16"
        dtype = _BF16_BITS if bf16 else _NUMPY[self.bundle.dtype]
        shape = (self._slots, spec.num_kv_heads, capacity, spec.head_dim)
        caches = {}
        for name in _cache_names(spec):
            # Zeros, not empty memory: a masked NaN would still poison 0 · NaN.
            caches[name] = np.zeros(shape, dtype)
            if name in self._caches[graph]:
                old = self._caches[graph][name]
                caches[name][:, :, : old.shape[2]] = old
        self._caches[graph] = caches
        self._capacity[graph] = capacity
        self._bindings.clear()

    def _cache_views(self, graph: str, first_slot: int, slots: int) -> dict[str, Any]:
        """The caches of consecutive slots as OrtValues over the same memory."""
        views = {}
        for name, array in self._caches.get(graph, {}).items():
            view = array[first_slot : first_slot + slots]
            views[name] = (
                ort.OrtValue.ortvalue_from_numpy_with_onnx_type(view, _BF16_ONNX)
                if self.bundle.dtype == "bf16"
                else ort.OrtValue.ortvalue_from_numpy(view)
            )
        return views

    def _check_room(self, graph: str, past_length: np.ndarray, rows: int) -> None:
        """ONNX Runtime would clamp and overwrite valid rows, TensorRT would drop the write."""
        end = int(past_length.max(initial=0)) + rows
        if end > self._capacity[graph]:
            raise DraftgraphError(
                f"{graph}: {end} cache rows needed, the capacity is {self._capacity[graph]}; "
                "call reserve first"
            )

    # Phases

    def target(self, batch: TokenBatch) -> None:
        self._check_room("target", batch.past_length, int(batch.lengths.max()))
        call, self._rows = target_call(batch)
        self._run(call, cached=len(batch.ids) <= _KEEP_UP_TO_TOKENS)

    def backbone(self, context: ContextBatch) -> None:
        width = max(1, int(context.counts.max()))
        self._check_room("backbone", context.past_length, width + self.bundle.draft.block_size)
        features, index = self._with_held(context)
        self._tensors["context_features"] = features
        self._run(
            backbone_call(context, index),
            cached=len(index) <= _KEEP_UP_TO_TOKENS and features is self._tensors["features"],
        )
        self._slot_block = np.zeros(self._slots, np.int64)
        self._slot_block[context.slots] = np.arange(len(context.slots))

    def _with_held(self, context: ContextBatch) -> tuple[Any, np.ndarray]:
        """Features and row index of the new context, with rows that were held before in front."""
        features = self._tensors["features"]
        first = context.first_slot
        if not any(first <= slot < first + len(context.counts) for slot in self._held):
            return features, context.index
        rows, at = [], 0
        current = features.numpy()
        for slot, count in enumerate(context.counts, start=first):
            held = self._held.pop(slot, []) if count else []
            fresh = int(count) - sum(len(h) for h in held)
            rows += [*held, current[context.index[at : at + fresh]]]
            at += fresh
        joined = np.concatenate(rows)
        return ort.OrtValue.ortvalue_from_numpy(joined), np.arange(len(joined))

    def hold(self, slot: int, index: np.ndarray) -> None:
        self._held.setdefault(slot, []).append(self._tensors["features"].numpy()[index])

    def release(self, slot: int) -> None:
        self._held.pop(slot, None)

    def markov(self, anchor: np.ndarray, sampling: DraftSampling) -> np.ndarray:
        self._draft_temperature = sampling.temperature
        if sampling.uniforms is None:
            self._tensors.pop("draft_logits", None)  # those of an earlier draft are void
        self._run(markov_call(self._markov, anchor, sampling), phase="markov")
        return self._tensors["draft_ids"].numpy()

    def confidence(self) -> np.ndarray | None:
        if "confidence" not in self.bundle.graphs:
            return None
        sizes = {"B": len(self._draft_temperature)}
        self._run(GraphCall("confidence", {}, sizes, ("hidden", "prev_embeddings")))
        return self._tensors["confidence_logits"].numpy()

    def accept(self, sampling: AcceptSampling) -> tuple[np.ndarray, np.ndarray]:
        gamma, v = self.bundle.draft.block_size, self.bundle.draft.vocab_size
        if not sampling.verify_length.any():  # nothing was drafted: any block will do
            self._tensors["draft_ids"] = self._zeros("draft_ids", (1, gamma), np.int64)
            self._tensors.pop("draft_logits", None)
            self._slot_block = np.zeros(self._slots, np.int64)
            self._draft_temperature = np.zeros(1, np.float32)
        call = accept_call(sampling, self._rows, self._slot_block, self._draft_temperature, gamma)
        if "draft_logits" in call.tensors and "draft_logits" not in self._tensors:
            blocks = len(self._draft_temperature)  # none was drawn at random: any q will do
            self._tensors["draft_logits"] = self._zeros("draft_logits", (blocks, gamma, v))
        self._run(call, phase="accept")
        return self._tensors["accepted"].numpy(), self._tensors["next_id"].numpy()

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """A constant tensor that stands in for a draft where there is none."""
        key = name, shape
        if key not in self._constants:
            self._constants[key] = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))
        return self._constants[key]

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name].numpy().copy()

    def _takes(self, graph: str, tensor: str) -> bool:
        names = {_SOURCES.get(t.name, t.name) for t in self.bundle.graphs[graph].inputs}
        return tensor in names

    def _run(self, call: GraphCall, *, cached: bool = True, phase: str | None = None) -> None:
        """Run a graph over host arrays and intermediate tensors; keep its outputs."""
        graph, feeds, sizes = call.graph, call.feeds, call.sizes
        tensors = [name for name in call.tensors if self._takes(graph, name)]
        values = [self._tensors[name] for name in tensors]
        key = (
            graph,
            *((name, array.shape) for name, array in feeds.items()),
            *((value.data_ptr(), *value.shape()) for value in values),
            *sizes.items(),
            call.first_slot,
        )
        binding = self._bindings.get(key)
        if binding is None:
            caches = self._cache_views(graph, call.first_slot, sizes.get("R", 0))
            known = dict(zip(tensors, values, strict=True))
            binding = self._bind(graph, feeds, known, caches, sizes)
            if cached:
                if len(self._bindings) >= _MOST_BINDINGS:
                    self._bindings.clear()
                self._bindings[key] = binding
        for name, array in feeds.items():
            binding.inputs[name][...] = array
        start = time.perf_counter()
        binding.session.run_with_iobinding(binding.io)
        self.seconds[phase or graph] += time.perf_counter() - start
        self._tensors.update(binding.outputs)

    def _bind(
        self,
        graph: str,
        feeds: dict[str, np.ndarray],
        tensors: dict[str, Any],
        caches: dict[str, Any],
        sizes: dict[str, int],
    ) -> _Binding:
        session, info = self._session(graph), self.bundle.graphs[graph]
        io = session.io_binding()
        inputs, outputs = {}, {}
        for tensor in info.inputs:
            source = _SOURCES.get(tensor.name, tensor.name)
            if tensor.name in caches:
                value = caches[tensor.name]
            elif source in tensors:
                value = tensors[source]
            else:
                buffer = np.zeros(feeds[tensor.name].shape, _NUMPY[tensor.dtype])
                inputs[tensor.name] = buffer
                value = ort.OrtValue.ortvalue_from_numpy(buffer)
            io.bind_ortvalue_input(tensor.name, value)
        for tensor in info.outputs:
            cache = tensor.name.replace("present", "past")
            if cache in caches:
                value = caches[cache]
            else:
                shape = [n if isinstance(n, int) else sizes[n] for n in tensor.shape]
                value = ort.OrtValue.ortvalue_from_numpy(
                    self._buffer(tensor.name, shape, _NUMPY[tensor.dtype])
                )
                outputs[tensor.name] = value
            io.bind_ortvalue_output(tensor.name, value)
        return _Binding(session, io, inputs, outputs, list(tensors.values()))

    def _buffer(self, name: str, shape: list[int], dtype: Any) -> np.ndarray:
        """Output memory: all shapes of one tensor share one buffer, since one is live at a time."""
        size = int(np.prod(shape))
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.zeros(size, dtype)
        return self._buffers[name][:size].reshape(shape)


class _Binding:
    """An IOBinding with the buffers that it points to, kept alive together."""

    def __init__(
        self,
        session: ort.InferenceSession,
        io: Any,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, Any],
        borrowed: list[Any],
    ) -> None:
        self.session, self.io = session, io
        self.inputs, self.outputs, self.borrowed = inputs, outputs, borrowed


def open_session(path: Path) -> ort.InferenceSession:
    """A CPU session on the shared thread pool. Large weights are mapped from the weights file."""
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the binding raises its own types, all of them unspecific
        raise DraftgraphError(
            f"{path}: ONNX Runtime {ort.__version__} cannot load this graph on the CPU: {error}"
        ) from None


def _cache_names(spec: DecoderSpec) -> list[str]:
    return [f"past_{kind}.{i}" for i in range(spec.num_layers) for kind in ("key", "value")]
