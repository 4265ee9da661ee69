"""What the TensorRT backend needs of a device: memory, copies, engines, graphs, one stream.

Everything but `capture`, `sync` and the allocations is asynchronous and in order. Addresses are
plain integers. `cuda.py` implements it with CUDA; the tests implement it with ONNX Runtime over
ordinary memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """One input or output of an engine in device memory."""

    address: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineCall:
    """One run of an engine: every input and output, cache inputs and outputs at one address."""

    graph: str
    profile: int
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


class CaptureRefused(Exception):
    """The device cannot make a graph of this work; the message says why."""


class Device(Protocol):
    """One device with the engines of one bundle loaded."""

    name: str
    backend: str  # "tensorrt" or "tensorrt-rtx"
    version: str

    def free_bytes(self) -> int:
        """Device memory that can still be allocated."""

    def allocate(self, size: int) -> int:
        """Zeroed device memory, aligned for TensorRT; its address stays until `free`."""

    def free(self, address: int) -> None: ...

    def pinned(self, size: int) -> np.ndarray:
        """Zeroed host memory [size] u8 that copies reach without a detour."""

    def upload(self, address: int, source: np.ndarray) -> None: ...

    def download(self, target: np.ndarray, address: int) -> None: ...

    def copy(self, target: int, source: int, size: int) -> None: ...

    def zero(self, address: int, size: int) -> None: ...

    def enqueue(self, call: EngineCall) -> None: ...

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` does, without doing it. The work has run once before.

        Raises `CaptureRefused`.
        """

    def launch(self, graph: Any) -> None: ...

    def mark(self) -> Any:
        """A point in the stream."""

    def seconds(self, start: Any, end: Any) -> float:
        """Device time between two marks that `sync` has passed."""

    def sync(self) -> None:
        """Wait until everything before has run."""

    def save_compiled(self) -> None:
        """Keep what the device compiled for the shapes it met, for the next process."""
