"""Single steps of the engine's backend, timed and looked into."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime import Engine
from ..runtime.backends.base import ContextBatch, DraftSampling, TokenBatch
from ..runtime.engine import PREFILL_CHUNK

# Rows before the timed steps, timed passes over all widths, untimed passes before them.
ROWS = 200
PASSES = 16
WARM_UP = 2
COMMITTED = 3  # committed tokens of a typical round
WIDTHS = (1, 2, 4)


def logit_gap(engine: Engine, ids: Sequence[int]) -> tuple[float, tuple[int, int]]:
    """Distance of the target's two best logits after `ids`, and these two tokens."""
    prefill_target(engine, ids)
    logits = engine.backend.read("logits")[-1].astype(np.float64)
    second, best = np.argsort(logits)[-2:]
    return float(logits[best] - logits[second]), (int(best), int(second))


def prefill_target(engine: Engine, ids: Sequence[int]) -> None:
    """Write ids into the target's cache; leaves the logits of the last one."""
    longest = min(PREFILL_CHUNK, engine.backend.prefill_chunk)
    for start in range(0, len(ids), longest):
        chunk = np.array(ids[start : start + longest], np.int64)
        engine.backend.reserve(1, start + len(chunk), 0)
        engine.backend.target(
            TokenBatch(chunk, np.array([len(chunk)]), np.array([start]), last_only=True)
        )


def measure_steps(engine: Engine, ids: Sequence[int]) -> dict[str, Any]:
    """Median ms of target steps at several widths and of the draft phase, all interleaved.

    Every pass runs each width and one draft, in an order that rotates; all sessions stay alive.
    """
    backend, gamma = engine.backend, engine.gamma
    past = min(ROWS, engine.longest - gamma - 1)
    rows = np.resize(np.array(ids, np.int64), past + gamma + 1)
    context = min(COMMITTED, gamma + 1)
    backend.reserve(1, past + gamma + 1, past + context + gamma)
    prefill_target(engine, rows[:past].tolist())
    widths = sorted({*(w for w in WIDTHS if w <= gamma), gamma + 1})
    times: dict[str, list[float]] = defaultdict(list)
    jobs: list[int | None] = [*widths, None]
    for i in range(WARM_UP + PASSES):
        turn = i % len(jobs)
        for width in (*jobs[turn:], *jobs[:turn]):
            if width is None:
                # The draft reads features of the widest step, as after a full verification.
                _target_step(engine, rows, past, gamma + 1)
                taken = _draft(engine, past, context, int(rows[-1]))
            else:
                taken = {f"target_{width}": _target_step(engine, rows, past, width)}
            if i >= WARM_UP:
                for name, seconds in taken.items():
                    times[name].append(1e3 * seconds)
    ms = {name: statistics.median(values) for name, values in times.items()}
    single = ms["target_1"]
    return {
        "past_length": past,
        "passes": PASSES,
        "draft_context_rows": context,
        "target_ms": {str(w): ms[f"target_{w}"] for w in widths},
        "target_relative_to_width_1": {str(w): ms[f"target_{w}"] / single for w in widths},
        "draft_ms": {p: ms[p] for p in ("backbone", "markov", "confidence", "draft")},
        "draft_relative_to_width_1": ms["draft"] / single,
    }


def _target_step(engine: Engine, rows: np.ndarray, past: int, width: int) -> float:
    batch = TokenBatch(rows[past : past + width], np.array([width]), np.array([past]))
    start = time.perf_counter()
    engine.backend.target(batch)
    return time.perf_counter() - start


def _draft(engine: Engine, past: int, context: int, anchor: int) -> dict[str, float]:
    """Seconds of one greedy draft and of its parts."""
    backend = engine.backend
    batch = ContextBatch(
        counts=np.array([context]),
        index=np.arange(context),
        past_length=np.array([past]),
        slots=np.array([0]),
        anchor=np.array([anchor]),
    )
    sampling = DraftSampling(np.zeros(1, np.float32), None)
    marks = [time.perf_counter()]
    backend.backbone(batch)
    marks.append(time.perf_counter())
    backend.markov(batch.anchor, sampling)
    marks.append(time.perf_counter())
    backend.confidence()
    marks.append(time.perf_counter())
    parts = ("backbone", "markov", "confidence")
    taken = {name: b - a for name, a, b in zip(parts, marks, marks[1:], strict=False)}
    return {**taken, "draft": marks[-1] - marks[0]}
