"""Memory that the graphs read and write: of the host, or of a device through ONNX Runtime.

Graphs are bound to addresses. A `Tensor` is a typed window on a block, so all shapes of a tensor
can share one block, and a slice of the cache is a cache.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from ....graphs.errors import DraftgraphError

# ONNX's element type, and the numpy type of the same size: bf16 travels as its bits.
ELEMENTS: dict[str, tuple[int, Any]] = {
    "fp32": (1, np.float32),
    "int64": (7, np.int64),
    "fp16": (10, np.float16),
    "bf16": (16, np.uint16),
}
# Inputs that share one staging block start at multiples of this many bytes.
_ALIGNMENT = 256
# Device memory is cleared in pieces of at most this many bytes.
_CLEAR_BYTES = 16 << 20


class Block:
    """Consecutive bytes of one memory; `owner` keeps them allocated."""

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.address, self.nbytes, self.owner = address, nbytes, owner


class Tensor:
    """A window on a block. `key`: what a binding to it depends on."""

    __slots__ = ("address", "block", "dtype", "key", "shape", "value")

    def __init__(self, block: Block, shape: tuple[int, ...], dtype: str, offset: int = 0) -> None:
        self.block, self.shape, self.dtype = block, shape, dtype
        self.address = block.address + offset
        self.key = (self.address, shape)
        self.value: Any = None  # of `DeviceMemory.read`

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape, self.dtype)

    def rows(self, first: int, count: int) -> Tensor:
        """The window on some entries of the first axis."""
        offset = self.address - self.block.address + first * nbytes(self.shape[1:], self.dtype)
        return Tensor(self.block, (count, *self.shape[1:]), self.dtype, offset)


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * int(np.dtype(ELEMENTS[dtype][1]).itemsize)


class Staging:
    """Small inputs of one binding: written on the host, sent in one copy.

    arrays: by input name, what to write to. tensors: what the graph reads, after `send`.
    """

    def __init__(self, memory: Memory, inputs: dict[str, tuple[tuple[int, ...], str]]) -> None:
        starts, end = {}, 0
        for name, (shape, dtype) in inputs.items():
            starts[name] = end
            end += -(-nbytes(shape, dtype) // _ALIGNMENT) * _ALIGNMENT
        self.block = memory.allocate(end)
        self.host = memory.alias(self.block)
        self._memory = memory
        self._copies = self.host is None
        if self.host is None:
            self.host = np.zeros(self.block.nbytes, np.uint8)
        self.arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in inputs.items():
            start, stop = starts[name], starts[name] + nbytes(shape, dtype)
            self.arrays[name] = self.host[start:stop].view(ELEMENTS[dtype][1]).reshape(shape)
            self.tensors[name] = Tensor(self.block, shape, dtype, start)

    def send(self) -> None:
        if self._copies:
            self.block.owner.update_inplace(self.host)

    def on_host(self, name: str) -> Tensor:
        """The host's copy of an input, for a graph that wants it there."""
        array = self.arrays[name]
        block = Block(array.ctypes.data, array.nbytes, self.host)
        return Tensor(block, array.shape, self.tensors[name].dtype)


class Memory(Protocol):
    """Where tensors live. New memory is zero: a masked NaN would still poison a sum."""

    device: str
    index: int

    def allocate(self, size: int) -> Block: ...

    def alias(self, block: Block) -> np.ndarray | None:
        """The bytes of a block if the host can write them in place."""

    def read(self, tensor: Tensor) -> np.ndarray:
        """The content; may share memory with the tensor."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy all bytes; both have as many."""


class HostMemory:
    """Ordinary memory; of a large block, what was never written takes none where systems allow."""

    device, index = "cpu", 0

    def allocate(self, size: int) -> Block:
        array = np.zeros(max(1, size), np.uint8)
        return Block(array.ctypes.data, array.nbytes, array)

    def alias(self, block: Block) -> np.ndarray | None:
        array: np.ndarray = block.owner
        return array

    def read(self, tensor: Tensor) -> np.ndarray:
        start = tensor.address - tensor.block.address
        data: np.ndarray = tensor.block.owner[start : start + tensor.nbytes]
        return data.view(ELEMENTS[tensor.dtype][1]).reshape(tensor.shape)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.read(target)[...] = self.read(source)


class DeviceMemory:
    """Memory of ONNX Runtime on a device, as blocks of bytes.

    Python has no constructor of an OrtValue over a given address, but an IOBinding makes one when
    an output is bound by address; `session` is any session of the device, `output` a name of an
    output of it. Copies return when they are done.
    """

    def __init__(self, device: str, index: int, session: ort.InferenceSession) -> None:
        self.device, self.index = device, index
        self._windows = session.io_binding()
        self._output = session.get_outputs()[0].name
        self._zeros: Any = None

    def allocate(self, size: int) -> Block:
        size = max(1, size)
        try:
            value = ort.OrtValue.ortvalue_from_shape_and_type(
                [size], np.uint8, self.device, self.index
            )
        except Exception as error:  # the binding raises its own types, all of them unspecific
            raise DraftgraphError(
                f"{self.device}:{self.index}: cannot allocate {size / 2**20:.0f} MiB ({error}); "
                "use fewer max_requests, a smaller capacity or shorter prompts"
            ) from None
        block = Block(value.data_ptr(), size, value)
        if size <= _CLEAR_BYTES:
            value.update_inplace(np.zeros(size, np.uint8))
            return block
        if self._zeros is None:
            self._zeros = self.allocate(_CLEAR_BYTES)
        for start in range(0, size, _CLEAR_BYTES):
            self._copy(self._zeros.address, block.address + start, min(_CLEAR_BYTES, size - start))
        return block

    def alias(self, block: Block) -> np.ndarray | None:
        return None

    def read(self, tensor: Tensor) -> np.ndarray:
        if tensor.value is None:
            tensor.value = self._window(tensor.address, tensor.nbytes)
        data: np.ndarray = tensor.value.numpy()
        return data.view(ELEMENTS[tensor.dtype][1]).reshape(tensor.shape)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._copy(source.address, target.address, source.nbytes)

    def extend(self, old: Tensor, new: Tensor) -> None:
        """Copy `old` to the front of `new`, which is longer in its last axis but one."""
        source, target = (nbytes(t.shape[-2:], t.dtype) for t in (old, new))
        for i in range(math.prod(old.shape[:-2])):
            self._copy(old.address + i * source, new.address + i * target, source)

    def _copy(self, source: int, target: int, size: int) -> None:
        self._window(target, size).update_inplace(self._window(source, size))

    def _window(self, address: int, size: int) -> Any:
        """An OrtValue of `size` bytes at an address of the device; it does not own them."""
        self._windows.bind_output(self._output, self.device, self.index, np.uint8, [size], address)
        return self._windows.get_outputs()[0]
