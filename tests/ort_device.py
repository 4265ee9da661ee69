"""A device of the TensorRT backend without a GPU: ONNX Runtime over ordinary memory.

As with a CUDA stream, nothing runs before `sync`, so a host array that is overwritten too early
shows in the results. A graph is the list of what was asked for while capturing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from draftgraph.runtime import Bundle
from draftgraph.runtime.backends.onnxruntime.backend import use_one_thread_pool
from draftgraph.runtime.backends.onnxruntime.providers import (
    PROVIDERS,
    open_session,
    session_options,
)
from draftgraph.runtime.backends.tensorrt.backend import TensorRt
from draftgraph.runtime.backends.tensorrt.device import CaptureRefused, EngineCall, Tensor
from draftgraph.runtime.backends.tensorrt.plan import ALIGNMENT, EngineSpec
from draftgraph.runtime.bundle import TensorInfo
from draftgraph.runtime.profiles import HOLD_ROWS, Limits, profiles

NUMPY: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "int64": np.int64}
Work = Callable[[], None]


class OrtDevice:
    """refuse: graphs whose engines cannot be captured."""

    name, backend, version = "ONNX Runtime", "tensorrt", ort.__version__

    def __init__(self, bundle: Bundle, *, refuse: tuple[str, ...] = ()) -> None:
        use_one_thread_pool(None)
        self.bundle, self.refuse = bundle, refuse
        self.memory: dict[int, np.ndarray] = {}  # by address
        self.queue: list[Work] = []
        self.recording: list[Work] | None = None
        self.calls: list[EngineCall] = []  # every run of an engine, replays included
        self.saved = 0
        self._sessions: dict[str, ort.InferenceSession] = {}

    def free_bytes(self) -> int:
        return 1 << 30

    def pinned(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def allocate(self, size: int) -> int:
        raw = np.full(size + ALIGNMENT, 0x7F, np.uint8)  # unless zeroed, floats are NaN or huge
        address = -(-raw.ctypes.data // ALIGNMENT) * ALIGNMENT
        start = address - raw.ctypes.data
        self.memory[address] = raw[start : start + size]
        self.zero(address, size)
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def _at(self, address: int, size: int) -> np.ndarray:
        """Bytes of allocated memory; anything else is a bug of the backend."""
        for start, memory in self.memory.items():
            if start <= address and address + size <= start + len(memory):
                return memory[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} are not allocated")

    def _do(self, work: Work) -> None:
        (self.queue if self.recording is None else self.recording).append(work)

    def upload(self, address: int, source: np.ndarray) -> None:
        self._do(lambda: np.copyto(self._at(address, source.nbytes), source))

    def download(self, target: np.ndarray, address: int) -> None:
        self._do(lambda: np.copyto(target, self._at(address, target.nbytes)))

    def copy(self, target: int, source: int, size: int) -> None:
        self._do(lambda: np.copyto(self._at(target, size), self._at(source, size)))

    def zero(self, address: int, size: int) -> None:
        self._do(lambda: self._at(address, size).fill(0))

    def enqueue(self, call: EngineCall) -> None:
        if self.recording is not None and call.graph in self.refuse:
            raise CaptureRefused(f"{call.graph} cannot be captured")
        self._do(lambda: self._run(call))

    def _run(self, call: EngineCall) -> None:
        self.calls.append(call)
        if call.graph not in self._sessions:
            path = self.bundle.graph_path(call.graph, cpu=True)
            self._sessions[call.graph] = open_on_ort(path)
        session, info = self._sessions[call.graph], self.bundle.graphs[call.graph]
        io = session.io_binding()
        for tensor in info.inputs:
            io.bind_ortvalue_input(tensor.name, self._value(tensor, call.inputs[tensor.name]))
        for tensor in info.outputs:
            io.bind_ortvalue_output(tensor.name, self._value(tensor, call.outputs[tensor.name]))
        session.run_with_iobinding(io)

    def _value(self, tensor: TensorInfo, place: Tensor) -> Any:
        assert place.address % ALIGNMENT == 0, tensor.name
        dtype = np.dtype(NUMPY[tensor.dtype])
        raw = self._at(place.address, int(np.prod(place.shape)) * dtype.itemsize)
        return ort.OrtValue.ortvalue_from_numpy(raw.view(dtype).reshape(place.shape))

    def capture(self, work: Work) -> list[Work]:
        assert not self.queue, "a capture starts on an idle stream"
        self.recording = []
        try:
            work()
            return self.recording
        finally:
            self.recording = None

    def launch(self, graph: list[Work]) -> None:
        self.queue += graph

    def mark(self) -> list[float]:
        mark: list[float] = []
        self._do(lambda: mark.append(time.perf_counter()))
        return mark

    def seconds(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]

    def sync(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def save_compiled(self) -> None:
        self.saved += 1


def open_on_ort(path: Path) -> ort.InferenceSession:
    """A CPU session of a graph on the shared thread pool."""
    return open_session(path, PROVIDERS["cpu"], session_options(None), {}, 0)


def spec_of(bundle: Bundle, limits: Limits) -> EngineSpec:
    """What engines built for these limits could do, without building them."""
    assert limits.capacity is not None
    return EngineSpec(
        limits.capacity,
        limits.max_batch,
        limits.prefill_len,
        HOLD_ROWS,
        {
            graph: {
                p.name: {t.name: [list(s) for s in p.shape(t)] for t in bundle.graphs[graph].inputs}
                for p in profiles(bundle, graph, limits)
            }
            for graph in bundle.graphs
        },
    )


def open_on_cpu(
    bundle: Bundle,
    *,
    capacity: int = 256,
    max_batch: int = 4,
    prefill_len: int = 64,
    refuse: tuple[str, ...] = (),
    **options: Any,
) -> TensorRt:
    """The TensorRT backend over ONNX Runtime."""
    spec = spec_of(bundle, Limits(capacity, max_batch, prefill_len))
    return TensorRt(bundle, OrtDevice(bundle, refuse=refuse), spec, **options)
