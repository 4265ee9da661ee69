"""Target features that a drafter still needs.

Target calls write their features to the front of one tensor, always to the same address, so that
bindings and captured graphs stay valid. Rows that a request holds for a later draft are copied
behind them, and the backbone reads the whole tensor through its row index.
"""

from __future__ import annotations

import numpy as np

from ....graphs.errors import DraftgraphError
from ..base import PREFILL_CHUNK, ContextBatch
from .memory import Memory, Tensor, nbytes

# What idle slots may go on holding.
KEEP_BYTES = 64 << 20


class FeatureRows:
    """`all`: [T, width] f32, every row. `current`: [N, width], those of the last target call.

    most: rows that `all` grows to at once, None for any number. Calls that return a bool say
    whether `all` has moved to other memory.
    """

    def __init__(self, memory: Memory, width: int, most: int | None) -> None:
        self._memory, self._width, self._most = memory, width, most
        self._front = PREFILL_CHUNK if most is None else min(PREFILL_CHUNK, most)
        self.all = self._allocate(self._front)
        self.current = self.all.rows(0, 0)
        self._held: dict[int, list[np.ndarray]] = {}  # rows by slot, in order
        self._end = self._front  # all held rows are before it

    def _allocate(self, rows: int) -> Tensor:
        shape = (rows, self._width)
        return Tensor(self._memory.allocate(nbytes(shape, "fp32")), shape, "fp32")

    @property
    def too_large_to_keep(self) -> bool:
        """For requests that may need less. Growing again costs as much as a decode step or two."""
        return self.all.nbytes > max(KEEP_BYTES, nbytes((PREFILL_CHUNK, self._width), "fp32"))

    def place(self, count: int) -> bool:
        """Room for the next target call."""
        moved = count > self._front
        if moved:  # held rows move behind the larger front
            shift, old = count - self._front, self.all
            self.all = self._allocate(old.shape[0] + shift)
            for kept in self._held.values():
                for i, rows in enumerate(kept):
                    kept[i] = rows + shift
                    self._copy(old, int(rows[0]), int(kept[i][0]), len(rows))
            self._front, self._end = count, self._end + shift
        self.current = self.all.rows(0, count)
        return moved

    def hold(self, slot: int, index: np.ndarray) -> bool:
        """Keep rows of the last target call. index: non-empty, consecutive."""
        count = len(index)
        start = self._free(count)
        moved = start + count > self.all.shape[0]
        if moved:
            if self._most is not None and start + count > self._most:
                raise DraftgraphError(
                    f"features: {start + count} rows needed, the engines take {self._most}; decode "
                    "fewer requests at a time or load with a larger capacity"
                )
            old, wanted = self.all, 2 * self.all.shape[0]
            wanted = wanted if self._most is None else min(wanted, self._most)
            self.all = self._allocate(max(wanted, start + count))
            self._copy(old, 0, 0, old.shape[0])
            self.current = self.all.rows(0, self.current.shape[0])
        self._copy(self.all, int(index[0]), start, count)
        self._held.setdefault(slot, []).append(np.arange(start, start + count))
        return moved

    def _free(self, count: int) -> int:
        """The first of `count` rows behind the front that nobody holds.

        Gaps are looked for only when the end is reached: rows come one by one, round by round.
        """
        if not self._held:
            self._end = self._front
        start = self._end
        self._end = start + count
        if self._end <= self.all.shape[0]:
            return start
        start = self._front
        pieces = sorted((r for kept in self._held.values() for r in kept), key=lambda r: r[0])
        for rows in pieces:
            if rows[0] - start >= count:
                break
            start = int(rows[-1]) + 1
        last = int(pieces[-1][-1]) + 1 if pieces else 0  # none are held at first
        self._end = max(start + count, last)
        return start

    def _copy(self, source: Tensor, first: int, to: int, count: int) -> None:
        self._memory.copy(source.rows(first, count), self.all.rows(to, count))

    def release(self, slot: int) -> None:
        self._held.pop(slot, None)

    def clear(self) -> None:
        self._held.clear()

    def take(self, context: ContextBatch) -> list[np.ndarray]:
        """Rows of `all` that are the new context of each slot; they are no longer held."""
        taken, at = [], 0
        for slot, count in enumerate(context.counts.tolist(), start=context.first_slot):
            held = self._held.pop(slot, []) if count else []
            fresh = count - sum(len(rows) for rows in held)
            rows = context.index[at : at + fresh]
            taken.append(np.concatenate([*held, rows]) if held else rows)
            at += fresh
        return taken
