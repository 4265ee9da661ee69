"""Target features that a drafter still needs, without copies.

Every target call writes its features into free rows of one tensor, and rows that a request holds
for a later draft stay where they are. The backbone reads the whole tensor through its row index.
"""

from __future__ import annotations

import numpy as np

from ....graphs.errors import DraftgraphError
from ..base import PREFILL_CHUNK, ContextBatch
from .memory import Memory, Tensor, nbytes


class FeatureRows:
    """`all`: [T, width] f32, every row. `current`: [N, width], those of the last target call."""

    def __init__(self, memory: Memory, width: int, most: int | None) -> None:
        self._memory, self._width, self._most = memory, width, most
        self.all = self._allocate(PREFILL_CHUNK if most is None else min(PREFILL_CHUNK, most))
        self.current = self.all.rows(0, 0)
        self._start = 0
        self._held: dict[int, list[np.ndarray]] = {}  # rows by slot, in order

    def _allocate(self, rows: int) -> Tensor:
        shape = (rows, self._width)
        return Tensor(self._memory.allocate(nbytes(shape, "fp32")), shape, "fp32")

    @property
    def grown(self) -> bool:
        return self.all.shape[0] > PREFILL_CHUNK

    def place(self, count: int) -> bool:
        """Choose the rows of the next target call. True when all rows have moved to make room."""
        extents = sorted(
            (int(rows.min()), int(rows.max()) + 1) for kept in self._held.values() for rows in kept
        )
        start = 0
        for first, end in extents:
            if first - start >= count:
                break
            start = max(start, end)
        total = self.all.shape[0]
        moved = start + count > total
        if moved:
            if self._most is not None and start + count > self._most:
                raise DraftgraphError(
                    f"features: {start + count} rows needed, the engines take {self._most}; decode "
                    "fewer requests at a time or load with a larger capacity"
                )
            larger = max(2 * total, start + count)
            old, self.all = self.all, self._allocate(min(larger, self._most or larger))
            self._memory.extend(old, self.all)
        self._start = start
        self.current = self.all.rows(start, count)
        return moved

    def hold(self, slot: int, index: np.ndarray) -> None:
        """Keep rows of the last target call. index: non-empty."""
        self._held.setdefault(slot, []).append(self._start + index)

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
            rows = self._start + context.index[at : at + fresh]
            taken.append(np.concatenate([*held, rows]) if held else rows)
            at += fresh
        return taken
