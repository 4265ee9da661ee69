"""Target features that a drafter still needs.

Target calls write their features to the front of one tensor, always to the same address, so that
bindings and captured graphs stay valid. Rows that a request holds for a later draft are copied
behind them, and the backbone reads the whole tensor through its row index.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ....graphs.errors import DraftgraphError
from ..base import PREFILL_CHUNK, ContextBatch
from ..calls import runs
from .memory import HostMemory, Memory, Tensor, nbytes

# What idle slots may go on holding.
KEEP_BYTES = 64 << 20


class FeatureRows:
    """`all`: [T, width] f32, every row. `current`: [N, width], those of the last target call.

    most: rows that `all` grows to at once, None for any number. Calls that return a bool say
    whether `all` has moved to other memory, which takes as long as a decode step or two.
    """

    def __init__(self, memory: Memory, width: int, most: int | None) -> None:
        self._memory, self._width, self._most = memory, width, most
        self._front = PREFILL_CHUNK if most is None else min(PREFILL_CHUNK, most)
        rows = self._front
        if most is None and isinstance(memory, HostMemory):  # unwritten rows take no memory
            rows = max(rows, KEEP_BYTES // nbytes((width,), "fp32"))
        self.all = self._allocate(rows)
        self.current = self.all.rows(0, 0)
        self._held: dict[int, list[np.ndarray]] = {}  # rows by slot, in order
        self._taken = np.arange(rows) < self._front  # of `all`: the front, and what is held
        self._next = self._front  # all rows before it are taken

    def _allocate(self, rows: int) -> Tensor:
        shape = (rows, self._width)
        return Tensor(self._memory.allocate(nbytes(shape, "fp32")), shape, "fp32")

    @property
    def too_large_to_keep(self) -> bool:
        """For requests that may need less. Growing again costs as much as a decode step or two."""
        return self.all.nbytes > max(KEEP_BYTES, nbytes((PREFILL_CHUNK, self._width), "fp32"))

    def place(self, count: int) -> bool:
        """Room for the next target call."""
        shift = count - self._front
        if shift > 0:  # held rows move behind the larger front
            old, end = self.all, int(np.flatnonzero(self._taken)[-1]) + 1
            self.all = self._allocate(max(old.shape[0], end + shift))
            self._copy(old, self._front, count, end - self._front)
            self._held = {s: [rows + shift for rows in kept] for s, kept in self._held.items()}
            taken = np.zeros(self.all.shape[0], bool)
            taken[:shift], taken[shift : end + shift] = True, self._taken[:end]
            self._taken = taken
            self._next += shift
            self._front = count
        self.current = self.all.rows(0, count)
        return shift > 0

    def hold(self, index: Mapping[int, np.ndarray]) -> bool:
        """Keep rows of the last target call. index: by slot, non-empty.

        All slots in one go: the rows of a decode step are neighbours, and so are their copies.
        """
        source = np.concatenate(list(index.values()))
        places, grown = self._free_rows(len(source))
        for first, to, count in runs(source, places):
            self._copy(self.all, first, to, count)
        self._taken[places] = True
        self._next = int(places[-1]) + 1
        start = 0
        for slot, rows in index.items():
            self._held.setdefault(slot, []).append(places[start : start + len(rows)])
            start += len(rows)
        return grown

    def _free_rows(self, count: int) -> tuple[np.ndarray, bool]:
        """As many rows that are free, and whether `all` had to grow for them."""
        first, end = self._next, self._next + count
        if end <= len(self._taken) and not self._taken[first:end].any():
            return np.arange(first, end), False
        free = np.flatnonzero(~self._taken)
        lacking = count - len(free)
        if lacking > 0:
            self._grow(lacking)
            free = np.flatnonzero(~self._taken)
        return free[:count], lacking > 0

    def _grow(self, lacking: int) -> None:
        old = self.all
        wanted, least = 2 * old.shape[0], old.shape[0] + lacking
        if self._most is not None:
            wanted = min(wanted, self._most)
            if least > self._most:
                raise DraftgraphError(
                    f"features: {least} rows needed, the engines take {self._most}; decode "
                    "fewer requests at a time or load with a larger capacity"
                )
        self.all = self._allocate(max(wanted, least))
        self._copy(old, 0, 0, old.shape[0])
        self.current = self.all.rows(0, self.current.shape[0])
        self._taken = np.append(self._taken, np.zeros(self.all.shape[0] - old.shape[0], bool))

    def _copy(self, source: Tensor, first: int, to: int, count: int) -> None:
        if count:
            self._memory.copy(source.rows(first, count), self.all.rows(to, count))

    def release(self, slot: int) -> None:
        for rows in self._held.pop(slot, []):
            self._taken[rows] = False
            self._next = min(self._next, int(rows[0]))

    def clear(self) -> None:
        for slot in list(self._held):
            self.release(slot)

    def take(self, context: ContextBatch) -> list[np.ndarray]:
        """Rows of `all` that are the new context of each slot; they are no longer held."""
        taken, at = [], 0
        for slot, count in enumerate(context.counts.tolist(), start=context.first_slot):
            held = self._held.get(slot, []) if count else []
            fresh = count - sum(len(rows) for rows in held)
            rows = context.index[at : at + fresh]
            taken.append(np.concatenate([*held, rows]) if held else rows)
            at += fresh
            if held:
                self.release(slot)
        return taken
