"""The key and value caches of one graph."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from .memory import Block, DeviceMemory, Memory, Tensor, nbytes

# Host memory is reserved for so many times the rows in use, within the longest request: what was
# never written takes no memory.
_ROOM = 8
# What a graph's idle caches may go on taking.
KEEP_BYTES = 256 << 20


class Caches:
    """Tensors [R, K, C, D] of one shape, in which requests keep their rows.

    On the host all lie in one block, one behind the other, and stay there: growing moves them
    within it, and the block stays for later requests. New memory is faulted in page by page, which
    takes longer than several decode steps (236 MB on a virtual machine: 200 to 1,000 ms, against
    22 ms for moving them). Rows that no request has written yet may thus hold those of an earlier
    one; masks hide both alike, as long as they are finite.

    longest: rows for which memory is reserved at most, unless more are needed.
    """

    def __init__(
        self,
        memory: Memory,
        names: Sequence[str],
        heads: int,
        size: int,
        dtype: str,
        longest: int,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.capacity = 0
        self._memory, self._names, self._heads, self._size = memory, names, heads, size
        self._dtype, self._longest = dtype, longest
        self._block: Block | None = None
        self._used = 0  # bytes of the block that were ever in use

    def grow(self, slots: int, capacity: int) -> None:
        """To so many rows for each slot; contents are kept."""
        shape = (slots, self._heads, capacity, self._size)
        if isinstance(self._memory, DeviceMemory):
            for name in self._names:
                new = Tensor(self._memory.allocate(nbytes(shape, self._dtype)), shape, self._dtype)
                if name in self.tensors:
                    self._memory.extend(self.tensors[name], new)
                self.tensors[name] = new
        else:
            self._grow_in_place(shape)
        self.capacity = capacity

    def _grow_in_place(self, shape: tuple[int, ...]) -> None:
        slots, heads, capacity, size = shape
        each = nbytes(shape, self._dtype)
        needed = each * len(self._names)
        before = self._block
        if before is None or before.nbytes < needed:
            if not self.tensors:
                before = self._block = None  # nothing to move: freed before there is another
            rows = max(capacity, min(_ROOM * capacity, self._longest))
            self._block, self._used = self._reserve(needed // capacity * rows, needed), 0
        block = self._block
        assert block is not None
        if self.tensors:
            assert before is not None and capacity >= self.capacity
            assert all(t.shape[0] == slots for t in self.tensors.values())
            row = nbytes((size,), self._dtype)
            old, new = self.capacity * row, capacity * row
            # From the back: every run of rows moves up or stays.
            for i in reversed(range(len(self._names) * slots * heads)):
                ctypes.memmove(block.address + i * new, before.address + i * old, old)
        self._used = max(self._used, needed)
        self.tensors = {
            name: Tensor(block, shape, self._dtype, i * each) for i, name in enumerate(self._names)
        }

    def _reserve(self, wanted: int, needed: int) -> Block:
        """As many bytes as the system lets us reserve."""
        try:
            return self._memory.allocate(wanted)
        except MemoryError:
            return self._memory.allocate(needed)

    def clear(self, *, forget: bool = False) -> None:
        """Without room for any row. forget: whatever is left in memory, too."""
        self.tensors, self.capacity = {}, 0
        if forget or self._used > KEEP_BYTES:
            self._block, self._used = None, 0
