"""What a target step costs: a measured staircase over (requests, tokens).

A step over R requests and N = Σ (1 + ℓ_r) tokens costs T(R, N) milliseconds if the tokens are
spread evenly. Attention runs on the padded view of R · max(1 + ℓ_r) cells, so each cell by which
another split is wider costs a little more.

Step times are flat between the sizes a device was compiled, captured or tiled for and jump at their
edges, so a lookup rounds up to the next measured size and never interpolates: a value between two
measurements would price tokens that pay for a whole step as if they were nearly free.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ..graphs.errors import DraftgraphError
from .jsonfile import check_version, read_json, write_json

SCHEMA_VERSION = 1
# What must agree between the machine that measured a table and the one that uses it.
FINGERPRINT_KEYS = ("device", "backend", "backend_version", "graphs", "dtype", "threads")
# A row whose largest step is within this fraction of its smallest says nothing about trimming.
FLAT_SPREAD = 0.01


class RoundCost(NamedTuple):
    """One measured round: R requests, N tokens through the target; times in milliseconds."""

    requests: int
    tokens: int
    target_ms: float
    draft_ms: float | None = None


@dataclass(frozen=True)
class CostTable:
    """Median step times.

    cells: (requests, tokens) -> ms of one target step, acceptance included if it was measured with
    it. draft_ms: requests -> ms of drafting one block for each of them. fingerprint: where it was
    measured, see `FINGERPRINT_KEYS`. samples: (requests, tokens) -> measurements behind a median.
    context_ms: of writing one committed token into the drafter's cache; a first draft writes all of
    the prompt. pad_ms: requests -> ms of each padded cell more than an even split has.

    Medians of neighbouring cells can come out in the wrong order. Lookups use their isotonic fit
    per row (inverted neighbours share their mean), since a wider step is never cheaper; `cells`
    keeps what was measured.
    """

    cells: Mapping[tuple[int, int], float]
    draft_ms: Mapping[int, float] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[tuple[int, int], int] = field(default_factory=dict)
    context_ms: float = 0.0
    pad_ms: Mapping[int, float] = field(default_factory=dict)
    _rows: dict[int, np.ndarray] = field(init=False, repr=False, compare=False)
    _bare: dict[tuple[int, float, bool], np.ndarray] = field(init=False, repr=False, compare=False)
    _ends: dict[int, tuple[np.ndarray, np.ndarray]] = field(init=False, repr=False, compare=False)
    _measured: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.cells:
            raise DraftgraphError("a cost table needs at least one measured cell")
        for (requests, tokens), ms in self.cells.items():
            if not (1 <= requests <= tokens):
                raise DraftgraphError(
                    f"cost table: cell (requests {requests}, tokens {tokens}): every request has "
                    "at least one token"
                )
            _check_ms(ms, f"cell (requests {requests}, tokens {tokens})")
        for requests, ms in self.draft_ms.items():
            _check_ms(ms, f"draft_ms of {requests} requests", zero=True)
        _check_ms(self.context_ms, "context_ms", zero=True)
        for requests, ms in self.pad_ms.items():
            _check_ms(ms, f"pad_ms of {requests} requests", zero=True)
        object.__setattr__(self, "_rows", {})
        object.__setattr__(self, "_bare", {})
        object.__setattr__(self, "_ends", {})
        object.__setattr__(self, "_measured", sorted({r for r, _ in self.cells}))

    # Lookup

    @property
    def max_requests(self) -> int:
        return self._measured[-1]

    def max_tokens(self, requests: int) -> int:
        """The widest measured step of the row that prices `requests`."""
        return len(self.row(requests)) - 1

    def covers(self, requests: int, tokens: int) -> bool:
        if not 1 <= requests <= self.max_requests:
            return False
        if self.draft_ms and requests > max(self.draft_ms):
            return False
        return tokens <= self.max_tokens(requests)

    def row(self, requests: int) -> np.ndarray:
        """[max_tokens + 1] ms of an even step by its number of tokens; `requests` rounds up."""
        row = self._rows.get(requests)
        if row is None:
            row = self._rows[requests] = self._staircase(requests)
        return row

    def step_ms(self, requests: int, tokens: int, width: int | None = None) -> float:
        """T(R, N) at the next measured size. Raises `DraftgraphError` beyond the table.

        width: the most tokens of one request; None: of an even split.
        """
        row = self.row(requests)
        if not requests <= tokens < len(row):
            raise DraftgraphError(
                f"the cost table has no step of {tokens} tokens for {requests} requests; it covers "
                f"{requests} to {len(row) - 1}: profile wider steps"
            )
        if width is None:
            return float(row[tokens])
        return float(row[tokens]) + self.pad(requests) * requests * (width - -(-tokens // requests))

    def times(
        self, requests: int, count: int, wider: Sequence[int] | None, *, smooth: bool = False
    ) -> np.ndarray:
        """[count + 1] ms of steps of R … R + `count` tokens.

        wider: the numbers of tokens beyond R from which on the widest request has 2, 3, … tokens.
        None: as if all steps were even. smooth: the largest convex function below the staircase
        in its place, padding as it is.
        """
        span = slice(requests, requests + count + 1)
        column = 0.0 if wider is None else self.pad(requests) * requests
        row = self._without_padding(requests, column, smooth)[span]
        if wider is None or not column:
            return row
        edges = [0, *(min(n, count + 1) for n in wider), count + 1]
        levels = [column * width for width in range(1, len(edges))]
        return np.repeat(levels, [b - a for a, b in pairwise(edges)]) + row

    def ends(self, requests: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Where even steps end, in tokens beyond R, ascending from 0 to `count`; and ms of each."""
        row = self.row(requests)[requests:]
        if requests not in self._ends:
            last = np.unique([0, *np.flatnonzero(row[1:] > row[:-1]), len(row) - 1])
            self._ends[requests] = last, row[last]
        last, ms = self._ends[requests]
        if last[-1] == count:
            return last, ms
        inside = int(last.searchsorted(count))
        return np.append(last[:inside], count), np.append(ms[:inside], row[count])

    def _without_padding(self, requests: int, column: float, smooth: bool) -> np.ndarray:
        """`row` less `column` ms for each column of padded cells, as it is or convex."""
        row = self._bare.get((requests, column, smooth))
        if row is None:
            columns = -(-np.arange(self.max_tokens(requests) + 1) // requests)
            row = self.row(requests) - column * columns
            row = _convex(row, requests) if smooth else row
            self._bare[requests, column, smooth] = row
        return row

    def pad(self, requests: int) -> float:
        """ms of a padded cell, of the next measured batch; 0 where it is not measured."""
        return _at_next(self.pad_ms, requests) or 0.0

    def draft(self, requests: int) -> float:
        """Drafting time in ms, rounded up to the next measured batch; 0 when not measured."""
        if not self.draft_ms:
            return 0.0
        ms = _at_next(self.draft_ms, requests)
        if ms is None:
            raise DraftgraphError(
                f"the cost table has drafting times up to {max(self.draft_ms)} requests, asked for "
                f"{requests}: profile larger batches"
            )
        return ms

    def is_flat(self, requests: int) -> bool:
        """Whether the row has no spread: it cannot tell one width from another."""
        row = self.row(requests)
        return bool(row[-1] <= (1 + FLAT_SPREAD) * row[0])

    def measured_row(self, requests: int) -> tuple[list[int], list[float]]:
        """Measured token counts of one measured batch size, and the fitted ms of each."""
        tokens = sorted(n for r, n in self.cells if r == requests)
        if not tokens:
            raise DraftgraphError(
                f"the cost table has no row for {requests} requests, only for {self._measured}"
            )
        return tokens, _isotonic([self.cells[requests, n] for n in tokens])

    def _staircase(self, requests: int) -> np.ndarray:
        if requests < 1:
            raise DraftgraphError(f"requests is {requests}, expected at least 1")
        index = bisect.bisect_left(self._measured, requests)
        if index == len(self._measured):
            raise DraftgraphError(
                f"the cost table was measured up to {self.max_requests} requests, asked for "
                f"{requests}: profile larger batches"
            )
        tokens, ms = self.measured_row(self._measured[index])
        steps = np.searchsorted(tokens, np.arange(tokens[-1] + 1))
        row = np.array(ms)[steps]
        row.flags.writeable = False
        return row

    # Files

    def check_fingerprint(self, current: Mapping[str, Any]) -> None:
        """Raises `DraftgraphError` that names every key in which the machine differs."""
        keys = [*FINGERPRINT_KEYS, *sorted({*self.fingerprint, *current} - {*FINGERPRINT_KEYS})]
        different = [
            f"{key} (table: {self.fingerprint.get(key)!r}, here: {current.get(key)!r})"
            for key in keys
            if self.fingerprint.get(key) != current.get(key)
        ]
        if different:
            raise DraftgraphError(
                "the cost table was measured elsewhere; it differs in "
                + ", ".join(different)
                + "; run draftgraph profile on this machine"
            )

    def save(self, path: str | Path) -> None:
        """Atomic; the old file stays whole until the new one is."""
        write_json(
            path,
            {
                "schema_version": SCHEMA_VERSION,
                "fingerprint": dict(self.fingerprint),
                "cells": [
                    {"requests": r, "tokens": n, "ms": ms}
                    | ({"samples": self.samples[r, n]} if (r, n) in self.samples else {})
                    for (r, n), ms in sorted(self.cells.items())
                ],
                "draft_ms": {str(r): ms for r, ms in sorted(self.draft_ms.items())},
                "context_ms": self.context_ms,
                "pad_ms": {str(r): ms for r, ms in sorted(self.pad_ms.items())},
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Raises `DraftgraphError` when the file is missing, unreadable or from a newer version."""
        payload = read_json(path, "cost table")
        check_version(payload, SCHEMA_VERSION, f"{path}")
        try:
            cells = {
                (int(c["requests"]), int(c["tokens"])): float(c["ms"]) for c in payload["cells"]
            }
            samples = {
                (int(c["requests"]), int(c["tokens"])): int(c["samples"])
                for c in payload["cells"]
                if "samples" in c
            }
            draft = {int(r): float(ms) for r, ms in payload["draft_ms"].items()}
            context = float(payload.get("context_ms", 0.0))
            pad = {int(r): float(ms) for r, ms in payload.get("pad_ms", {}).items()}
            fingerprint = dict(payload["fingerprint"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DraftgraphError(f"{path}: not a cost table ({error!r})") from error
        return cls(cells, draft, fingerprint, samples, context, pad)


def find_costs(folder: Path, fingerprint: Mapping[str, Any]) -> CostTable | None:
    """The table of this fingerprint in a bundle's costs directory, None when there is none."""
    file = folder / f"{fingerprint_name(fingerprint)}.json"
    if not file.is_file():
        return None
    table = CostTable.load(file)
    table.check_fingerprint(fingerprint)
    return table


def fingerprint_name(fingerprint: Mapping[str, Any]) -> str:
    """A short stable name for `costs/<name>.json`."""
    text = json.dumps(dict(fingerprint), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def derive_from_rounds(
    records: Iterable[RoundCost | tuple[Any, ...]],
    fingerprint: Mapping[str, Any] | None = None,
    *,
    min_samples: int = 1,
) -> CostTable:
    """A table of medians from recorded rounds; cells with fewer than `min_samples` are left out."""
    steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    drafts: dict[int, list[float]] = defaultdict(list)
    for record in records:
        requests, tokens, target_ms, draft_ms = RoundCost(*record)
        steps[int(requests), int(tokens)].append(float(target_ms))
        if draft_ms is not None:
            drafts[int(requests)].append(float(draft_ms))
    kept = {cell: values for cell, values in steps.items() if len(values) >= min_samples}
    if not kept:
        raise DraftgraphError(
            f"no cost cell has {min_samples} recorded rounds; record more or run draftgraph profile"
        )
    return CostTable(
        {cell: median(values) for cell, values in kept.items()},
        {r: median(values) for r, values in drafts.items()},
        fingerprint or {},
        {cell: len(values) for cell, values in kept.items()},
    )


# Tables of other runtimes


def to_sglang(table: CostTable, requests: int) -> dict[str, Any]:
    """One row as SGLang's `SpsCostTable`: steps per second by number of tokens.

    {"sample_batch_tokens": [...], "sample_steps_per_sec": [...], "max_batch_tokens": n}, as read by
    `--speculative-dspark-sps-table-path`. SGLang takes the last probe at or below a size, this
    table the next one at or above, so each step is written with its first size: both look up the
    same. The shape has no request axis and no drafting time.
    """
    tokens, ms = table.measured_row(requests)
    starts = [min(requests, tokens[0]), *(n + 1 for n in tokens[:-1])]
    return {
        "sample_batch_tokens": starts,
        "sample_steps_per_sec": [1e3 / t for t in ms],
        "max_batch_tokens": tokens[-1],
    }


def from_sglang(payload: Mapping[str, Any], requests: Sequence[int]) -> CostTable:
    """A table from SGLang's shapes, with one row for each of `requests`.

    The plain shape (see `to_sglang`) prices every batch size alike. The additive shape
    {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"} means
    T = bias + α(R) + θ(N), interpolated linearly; it is evaluated at its own N probes.
    """
    with _foreign("SGLang cost table"):
        if "bias_seconds" in payload:
            bias, alpha = float(payload["bias_seconds"]), payload["alpha_seconds"]
            probes = list(zip(payload["m_probes"], payload["theta_seconds"], strict=True))
            cells = {
                (r, int(n)): 1e3 * (bias + float(np.interp(r, payload["bs_probes"], alpha)) + theta)
                for r in requests
                for n, theta in probes
                if n >= r
            }
        else:
            starts, rates = payload["sample_batch_tokens"], payload["sample_steps_per_sec"]
            if list(starts) != sorted(set(starts)) or len(starts) != len(rates):
                raise ValueError("sample_batch_tokens must rise and match sample_steps_per_sec")
            ends = [*(n - 1 for n in starts[1:]), int(payload["max_batch_tokens"])]
            cells = {
                (r, int(n)): 1e3 / rate
                for r in requests
                for n, rate in zip(ends, rates, strict=True)
                if n >= r
            }
    return CostTable(cells)


def to_tensorrt_llm(table: CostTable, requests: int, min_gain: float = 0.01) -> dict[str, Any]:
    """One row as TensorRT-LLM's one-axis cost table (`confidence_cost_table_path`).

    {"token_counts", "step_time_ms", "fixed_overhead_ms", "minimum_predicted_gain"}. TensorRT-LLM
    interpolates linearly, so every step is written with both of its ends and looks up the same at
    every whole number of tokens. The drafting time goes into fixed_overhead_ms, the part of a round
    that no trim saves.
    """
    tokens, ms = table.measured_row(requests)
    counts: list[int] = []
    times: list[float] = []
    start = min(requests, tokens[0])
    for end, t in zip(tokens, ms, strict=True):
        for n in sorted({start, end}):
            counts.append(n)
            times.append(t)
        start = end + 1
    return {
        "token_counts": counts,
        "step_time_ms": times,
        "fixed_overhead_ms": table.draft(requests),
        "minimum_predicted_gain": min_gain,
    }


def from_tensorrt_llm(payload: Mapping[str, Any], requests: Sequence[int]) -> CostTable:
    """A table from TensorRT-LLM's shapes.

    The one-axis shape (see `to_tensorrt_llm`) gives a row for each of `requests`;
    fixed_overhead_ms and batch_overhead_ms(batch_sizes) become the drafting time. The exact shape
    (schema_version 2) has "cost_tables": {"R": {"token_counts", "step_time_ms"}} of whole rounds;
    `requests` selects rows, and its count 0, the untrimmed path, is the full width
    R · (max_draft_len + 1). It needs provenance of TensorRT-LLM's own runs, so it is only read.
    """
    with _foreign("TensorRT-LLM cost table"):
        if "cost_tables" in payload:
            width = int(payload["engine_fingerprint"]["max_draft_len"]) + 1
            cells: dict[tuple[int, int], float] = {}
            for r in requests:
                row = payload["cost_tables"][str(r)]
                for n, ms in zip(row["token_counts"], row["step_time_ms"], strict=True):
                    cells.setdefault((r, int(n) or r * width), float(ms))
            return CostTable(cells)
        fixed = float(payload.get("fixed_overhead_ms", 0.0))
        sizes = payload.get("batch_sizes") or [1]
        overhead = payload.get("batch_overhead_ms") or [0.0]
        points = list(zip(payload["token_counts"], payload["step_time_ms"], strict=True))
        cells = {(r, int(n)): float(ms) for r in requests for n, ms in points if n >= r}
        draft = {r: fixed + float(np.interp(r, sizes, overhead)) for r in requests}
    return CostTable(cells, draft)


class _foreign:
    """Turns what a malformed foreign file raises into an error of this package."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, ZeroDivisionError)):
            raise DraftgraphError(f"not a {self.kind}: {error!r}") from error


def _check_ms(ms: float, what: str, zero: bool = False) -> None:
    if not math.isfinite(ms) or ms < 0 or (ms == 0 and not zero):
        raise DraftgraphError(f"cost table: {what} is {ms} ms, expected a positive number")


def _at_next(measured: Mapping[int, float], requests: int) -> float | None:
    """The value of the next measured number of requests, None beyond the largest."""
    return measured.get(min((r for r in measured if r >= requests), default=-1))


def _convex(row: np.ndarray, first: int) -> np.ndarray:
    """The largest convex function below row[first:]; what is before stays as it is."""
    corners: list[int] = []
    for n in range(first, len(row)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (row[b] - row[a]) * (n - a) < (row[n] - row[a]) * (b - a):
                break
            corners.pop()
        corners.append(n)
    below = row.copy()
    below[first:] = np.interp(np.arange(first, len(row)), corners, row[corners])
    return below


def _isotonic(values: Sequence[float]) -> list[float]:
    """Least-squares non-decreasing fit: pool adjacent violators."""
    blocks: list[tuple[float, int]] = []  # mean, size
    for value in values:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] > mean:
            other, count = blocks.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        blocks.append((mean, size))
    return [mean for mean, size in blocks for _ in range(size)]
