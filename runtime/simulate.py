"""Replay recorded rounds against any cost table: throughput and budget against concurrency.

A trace holds, per request, the confidences of every round and how many tokens full verification
accepted. For R concurrent requests the replay asks a policy for lengths, caps what was accepted at
the length, and charges draft(R) + T(R, Σ (1 + ℓ_r)) of the table. It answers what a device that was
profiled, but is not at hand, would do (the axes of figures 7 and 8 of DSpark, arXiv 2607.05147).

One simplification: a block that was cut would have been followed by a block from an earlier
position; the replay goes on with the next recorded round instead. It treats rounds of a request as
alike in kind, and keeps their order, which the lagged budget needs.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..graphs.errors import DraftgraphError
from .costs import CostTable
from .jsonfile import write_text
from .results import Round
from .scheduler import LAG, MIN_GAIN, POLICIES, ScheduleInput, lagged_survival, survival

PLAIN = "plain"  # no drafting: one token per request and step
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class RequestTrace:
    """One request's rounds: confidence [rounds, γ], calibrated; accepted [rounds], 0 … γ, under
    full verification."""

    confidence: np.ndarray
    accepted: np.ndarray

    def __post_init__(self) -> None:
        shape = self.confidence.shape
        if len(shape) != 2 or self.accepted.shape != shape[:1] or not len(self.accepted):
            raise DraftgraphError(
                f"trace: confidences {shape} and accepted counts {self.accepted.shape} of a "
                "request do not match, or there are none"
            )
        if not (self.confidence.min() >= 0 and self.confidence.max() <= 1):
            raise DraftgraphError("trace: confidences must lie in [0, 1] and be finite")
        if self.accepted.min() < 0 or self.accepted.max() > shape[1]:
            raise DraftgraphError(f"trace: accepted counts must lie in 0 … {shape[1]}")


@dataclass(frozen=True)
class Point:
    """A policy at one concurrency.

    throughput: tokens per second of all requests. per_user: tokens per second of one request.
    budget: mean number of drafted tokens verified per request and round. tokens_per_round: per
    request, the target's own token included. status: what the policy reported most often.
    """

    policy: str
    concurrency: int
    throughput: float
    per_user: float
    budget: float
    tokens_per_round: float
    status: str


def trace_from_rounds(requests: Iterable[Sequence[Round]], gamma: int) -> list[RequestTrace]:
    """Traces from `Output.rounds` of runs with the scheduler "full".

    Left out: rounds shortened by the token budget, and rounds that a stop id ended early, whose
    acceptance is cut.
    """
    traces = []
    for rounds in requests:
        kept = [r for r in rounds if r.verified == gamma and r.next_id is not None]
        if any(r.confidence is None for r in kept):
            raise DraftgraphError("trace: the drafter has no confidence head, nothing to replay")
        if kept:
            traces.append(
                RequestTrace(
                    np.array([r.confidence for r in kept], np.float64),
                    np.array([r.accepted for r in kept]),
                )
            )
    return traces


def save_trace(path: str | Path, traces: Sequence[RequestTrace]) -> None:
    """One JSON line per request: {"rounds": [{"confidence": [...], "accepted": n}, ...]}."""
    lines = [
        json.dumps(
            {
                "rounds": [
                    {"confidence": c, "accepted": a}
                    for c, a in zip(t.confidence.tolist(), t.accepted.tolist(), strict=True)
                ]
            }
        )
        for t in traces
    ]
    write_text(path, "\n".join(lines) + "\n")


def load_trace(path: str | Path) -> list[RequestTrace]:
    """Raises `DraftgraphError` that names the file and line."""
    traces = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DraftgraphError(f"{path}: not a readable trace ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rounds = json.loads(line)["rounds"]
            confidence = np.array([r["confidence"] for r in rounds], np.float64)
            traces.append(RequestTrace(confidence, np.array([int(r["accepted"]) for r in rounds])))
        except DraftgraphError as error:
            raise DraftgraphError(f"{path}, line {number}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise DraftgraphError(f"{path}, line {number}: not a trace ({error!r})") from error
    if not traces:
        raise DraftgraphError(f"{path}: the trace is empty")
    return traces


def simulate(
    traces: Sequence[RequestTrace],
    costs: CostTable,
    *,
    concurrency: Sequence[int] = CONCURRENCY,
    policies: Sequence[str] = (PLAIN, *POLICIES),
    threshold: float = 0.5,
    min_gain: float = MIN_GAIN,
    sampled: bool = False,
    blocks: int = 2000,
    seed: int = 0,
) -> list[Point]:
    """Every policy at every concurrency; deterministic for a seed.

    sampled: the traces come from sampled drafts, which `live-argmax` refuses. blocks: drafted
    blocks counted per point (in at least 30 rounds, after `LAG` that only fill the history);
    requests start in mid-trace, so that they do not all end at once. Every policy sees the same
    requests in the same order. Raises `DraftgraphError` for an empty trace, unequal γ, and a
    concurrency beyond the table's measured cells.
    """
    if not traces:
        raise DraftgraphError("the trace is empty")
    gammas = {t.confidence.shape[1] for t in traces}
    if len(gammas) != 1:
        raise DraftgraphError(f"trace: requests of different γ: {sorted(gammas)}")
    gamma = gammas.pop()
    unknown = [p for p in policies if p != PLAIN and p not in POLICIES]
    if unknown:
        raise DraftgraphError(f"policy {unknown[0]!r}: unknown; known: {[PLAIN, *POLICIES]}")
    for requests in concurrency:
        if not costs.covers(requests, requests * (gamma + 1)):
            raise DraftgraphError(
                f"the cost table does not cover {requests} requests of {gamma + 1} tokens; it was "
                f"measured up to {costs.max_requests} requests: profile larger batches, or "
                "simulate fewer requests"
            )

    def rounds(requests: int) -> int:
        return max(30, math.ceil(blocks / requests))

    return [
        _replay(
            traces,
            costs,
            policy,
            requests,
            gamma,
            threshold,
            min_gain,
            sampled,
            rounds(requests),
            seed,
        )
        for requests in concurrency
        for policy in policies
    ]


def _replay(
    traces: Sequence[RequestTrace],
    costs: CostTable,
    policy: str,
    requests: int,
    gamma: int,
    threshold: float,
    min_gain: float,
    sampled: bool,
    rounds: int,
    seed: int,
) -> Point:
    rng = np.random.default_rng([seed, requests])
    slots = [_Slot(traces, rng) for _ in range(requests)]
    limits, thresholds = np.full(requests, gamma), np.full(requests, threshold)
    tokens = verified = 0
    milliseconds = 0.0
    statuses: dict[str, int] = {}
    for number in range(-LAG, rounds):
        if policy == PLAIN:
            if number < 0:
                continue
            tokens += requests
            milliseconds += costs.step_ms(requests, requests)
            continue
        now = [slot.next() for slot in slots]
        confidence = np.stack([c for c, _ in now])
        schedule = POLICIES[policy](
            ScheduleInput(
                limits=limits,
                confidence=confidence,
                threshold=thresholds,
                sampled=np.full(requests, sampled),
                lagged=lagged_survival([slot.history for slot in slots], gamma),
                costs=costs,
                min_gain=min_gain,
            )
        )
        for slot, row in zip(slots, survival(confidence), strict=True):
            slot.remember(row)
        if number < 0:
            continue
        accepted = np.minimum([a for _, a in now], schedule.lengths)
        count = int(schedule.lengths.sum())
        tokens += requests + int(accepted.sum())
        verified += count
        width = 1 + int(schedule.lengths.max())
        milliseconds += costs.draft(requests) + costs.step_ms(requests, requests + count, width)
        statuses[schedule.status] = statuses.get(schedule.status, 0) + 1
    throughput = 1e3 * tokens / milliseconds
    return Point(
        policy=policy,
        concurrency=requests,
        throughput=throughput,
        per_user=throughput / requests,
        budget=verified / (rounds * requests),
        tokens_per_round=tokens / (rounds * requests),
        status=max(statuses, key=lambda s: statuses[s]) if statuses else "no drafting",
    )


class _Slot:
    """A place in the batch: plays one recorded request after the other, in random order."""

    def __init__(self, traces: Sequence[RequestTrace], rng: np.random.Generator) -> None:
        # One key per slot, so that no policy changes which requests are drawn.
        self.traces, self.rng = traces, np.random.default_rng(int(rng.integers(2**63)))
        self.history: list[np.ndarray] = []
        self._draw()
        self.at = int(self.rng.integers(len(self.trace.accepted)))

    def next(self) -> tuple[np.ndarray, int]:
        if self.at == len(self.trace.accepted):
            self._draw()
        self.at += 1
        return self.trace.confidence[self.at - 1], int(self.trace.accepted[self.at - 1])

    def _draw(self) -> None:
        self.trace = self.traces[int(self.rng.integers(len(self.traces)))]
        self.at = 0
        self.history.clear()

    def remember(self, row: np.ndarray) -> None:
        self.history.append(row)
        del self.history[:-LAG]


# Presentation


def table_text(points: Sequence[Point]) -> str:
    """Aligned columns, one line per point."""
    head = (
        "concurrency",
        "policy",
        "tokens/s",
        "tokens/s/user",
        "budget",
        "tokens/round",
        "status",
    )
    body = [
        (
            str(p.concurrency),
            p.policy,
            f"{p.throughput:.1f}",
            f"{p.per_user:.2f}",
            f"{p.budget:.2f}",
            f"{p.tokens_per_round:.2f}",
            p.status,
        )
        for p in points
    ]
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    left = (1, 6)  # text columns

    def line(row: Sequence[str]) -> str:
        cells = [
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), *map(line, body)]) + "\n"


COLOURS = {
    "plain": "#6b7280",
    "full": "#b4530a",
    "threshold": "#0f766e",
    "early-stop": "#7c3aed",
    "lagged": "#1d4ed8",
    "live-argmax": "#be123c",
}


def plot_svg(points: Sequence[Point], title: str = "Simulated decoding") -> str:
    """Left: throughput against per-user speed, one mark per concurrency (the paper's figure 7).
    Right: drafted tokens verified per request against concurrency (figure 8)."""
    names = list(dict.fromkeys(p.policy for p in points))
    width, height = 1040, 520
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="70" y="26" font-size="16">{html.escape(title)}</text>',
    ]
    for i, name in enumerate(names):
        x, colour = 70 + 130 * i, COLOURS.get(name, "#222")
        out.append(f'<path d="M{x} 46h22" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{x + 28}" y="50">{html.escape(name)}</text>')
    drafting = [n for n in names if n != PLAIN]
    out += _panel(
        70,
        "per-user speed (tokens/s/request)",
        "throughput (tokens/s)",
        {n: [(p.per_user, p.throughput) for p in points if p.policy == n] for n in names},
        log_y=True,
    )
    out += _panel(
        590,
        "concurrency (requests)",
        "drafted tokens verified per request",
        {n: [(p.concurrency, p.budget) for p in points if p.policy == n] for n in drafting},
        log_x=True,
    )
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _panel(
    left: int,
    x_label: str,
    y_label: str,
    series: dict[str, list[tuple[float, float]]],
    log_x: bool = False,
    log_y: bool = False,
) -> list[str]:
    top, width, height = 80, 400, 370
    xs = [x for line in series.values() for x, _ in line] or [1.0]
    ys = [y for line in series.values() for _, y in line] or [1.0]
    to_x, x_ticks = _axis(xs, log_x)
    to_y, y_ticks = _axis(ys, log_y)
    out = [f'<g transform="translate({left} {top})">']
    for value in x_ticks:
        x = width * to_x(value)
        out.append(f'<path d="M{x:.1f} 0v{height}" stroke="#e5e5e5"/>')
        out.append(f'<text x="{x:.1f}" y="{height + 18}" text-anchor="middle">{value:g}</text>')
    for value in y_ticks:
        y = height * (1 - to_y(value))
        out.append(f'<path d="M0 {y:.1f}h{width}" stroke="#e5e5e5"/>')
        out.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    out.append(f'<rect width="{width}" height="{height}" fill="none" stroke="#888"/>')
    for name, line in series.items():
        colour = COLOURS.get(name, "#222")
        at = [(width * to_x(x), height * (1 - to_y(y))) for x, y in line]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        out.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
    out.append(f'<text x="{width / 2}" y="{height + 40}" text-anchor="middle">{x_label}</text>')
    out.append(
        f'<text transform="translate(-50 {height / 2}) rotate(-90)" text-anchor="middle">'
        f"{y_label}</text>"
    )
    out.append("</g>")
    return out


def _axis(values: Sequence[float], log: bool) -> tuple[Callable[[float], float], list[float]]:
    """A map to 0 … 1 and its ticks: powers of two, or round steps from zero."""
    if log:
        low = math.floor(math.log2(max(min(values), 1e-9)))
        high = max(math.ceil(math.log2(max(max(values), 1e-9))), low + 1)
        every = max(1, (high - low) // 10)
        return (
            lambda v: (math.log2(max(v, 1e-9)) - low) / (high - low),
            [2.0**i for i in range(low, high + 1, every)],
        )
    raw = max(max(values), 1e-9) / 6
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    count = max(1, math.ceil(max(values) / step))
    return lambda v: v / (count * step), [i * step for i in range(count + 1)]


def points_dict(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Plain data for JSON."""
    return [vars(p) for p in points]
