"""The replay on made-up traces and tables, where the figures can be worked out by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime.costs import CostTable
from draftgraph.runtime.results import Round
from draftgraph.runtime.scheduler import POLICIES
from draftgraph.runtime.simulate import (
    PLAIN,
    Point,
    RequestTrace,
    load_trace,
    plot_svg,
    points_dict,
    save_trace,
    simulate,
    table_text,
    trace_from_rounds,
)

GAMMA = 7
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)


def calibrated_traces(count: int = 30, seed: int = 0) -> list[RequestTrace]:
    """Confidences that tell the truth."""
    rng = np.random.default_rng(seed)
    traces = []
    for _ in range(count):
        confidence = rng.beta(rng.uniform(1, 6), 1.5, (40, GAMMA))
        accepted = np.cumprod(rng.random(confidence.shape) < confidence, axis=1).sum(axis=1)
        traces.append(RequestTrace(confidence, accepted))
    return traces


def roofline(largest: int = 64, edge: float = 64.0) -> CostTable:
    """Memory-bound up to `edge` tokens, compute-bound beyond; steps of 8."""
    cells = {}
    for r in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        if r <= largest:
            for n in sorted({r, *range(-(-r // 8) * 8, r * (GAMMA + 1) + 1, 8)}):
                cells[r, n] = 10.0 * max(1.0, n / edge)
    return CostTable(cells, {r: 1.0 for r, _ in cells})


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return simulate(calibrated_traces(), roofline(), concurrency=CONCURRENCY, blocks=400)


def by(points: list[Point], policy: str) -> list[Point]:
    return [p for p in points if p.policy == policy]


def test_plain_and_full_by_hand() -> None:
    trace = RequestTrace(np.full((5, 2), 0.9), np.array([2, 2, 2, 2, 2]))
    costs = CostTable({(1, 1): 10.0, (1, 3): 14.0}, {1: 1.0})
    plain, full = simulate([trace], costs, concurrency=[1], policies=[PLAIN, "full"], blocks=30)
    assert plain.throughput == pytest.approx(100) and plain.budget == 0
    assert full.throughput == pytest.approx(3 / 15 * 1e3)
    assert full.budget == 2 and full.tokens_per_round == 3
    assert full.per_user == full.throughput


def test_shape(points: list[Point]) -> None:
    assert len(points) == len(CONCURRENCY) * (1 + len(POLICIES))
    for p in points:
        assert p.per_user == pytest.approx(p.throughput / p.concurrency)
        assert 0 <= p.budget <= GAMMA
    assert {p.budget for p in by(points, "full")} == {GAMMA}


def test_deterministic(points: list[Point]) -> None:
    again = simulate(calibrated_traces(), roofline(), concurrency=CONCURRENCY, blocks=400)
    assert again == points
    other = simulate(calibrated_traces(), roofline(), concurrency=(4,), blocks=400, seed=1)
    assert other != [p for p in points if p.concurrency == 4]


def test_schedules_pay_under_load(points: list[Point]) -> None:
    """The paper's picture: the budget falls with concurrency and throughput beats full width."""
    for name in ("lagged", "early-stop"):
        budgets = [p.budget for p in by(points, name)]
        assert budgets[0] > 6 and budgets[-1] < 4
        for scheduled, full in zip(by(points, name), by(points, "full"), strict=True):
            assert scheduled.throughput > 0.97 * full.throughput
        assert by(points, name)[-1].throughput > 1.2 * by(points, "full")[-1].throughput
    assert by(points, "full")[0].throughput > 2 * by(points, PLAIN)[0].throughput


def test_flat_table_is_reported() -> None:
    cells = {(1, 1): 10.0, (1, 8): 10.0}
    (point,) = simulate(
        calibrated_traces(2), CostTable(cells), concurrency=[1], policies=["lagged"], blocks=5
    )
    assert "flat" in point.status and point.budget == GAMMA


def test_beyond_the_table() -> None:
    with pytest.raises(DraftgraphError, match="does not cover 128 requests"):
        simulate(calibrated_traces(2), roofline(64), concurrency=(64, 128), blocks=1)
    narrow = CostTable({(1, 1): 1.0, (1, 4): 2.0})
    with pytest.raises(DraftgraphError, match="1 requests of 8 tokens"):
        simulate(calibrated_traces(2), narrow, concurrency=(1,), blocks=1)


def test_largest_concurrency() -> None:
    points = simulate(
        calibrated_traces(4), roofline(512), concurrency=(512,), policies=["lagged"], blocks=4
    )
    assert points[0].concurrency == 512


def test_refusals() -> None:
    traces = calibrated_traces(2)
    with pytest.raises(DraftgraphError, match="the trace is empty"):
        simulate([], roofline())
    with pytest.raises(DraftgraphError, match="unknown"):
        simulate(traces, roofline(), policies=["best"])
    with pytest.raises(DraftgraphError, match="greedy drafting"):
        simulate(traces, roofline(), concurrency=[1], policies=["live-argmax"], sampled=True)
    short = RequestTrace(np.full((2, 3), 0.5), np.array([1, 2]))
    with pytest.raises(DraftgraphError, match="different γ"):
        simulate([*traces, short], roofline())
    for confidence, accepted in (
        (np.full((2, 3), np.nan), [1, 2]),
        (np.full((2, 3), 0.5), [1, 4]),
        (np.full((2, 3), 0.5), [1]),
        (np.zeros((0, 3)), []),
    ):
        with pytest.raises(DraftgraphError, match="trace"):
            RequestTrace(confidence, np.array(accepted, int))


def test_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    traces = calibrated_traces(3)
    save_trace(path, traces)
    for a, b in zip(load_trace(path), traces, strict=True):
        assert a.confidence.tolist() == b.confidence.tolist()
        assert a.accepted.tolist() == b.accepted.tolist()
    path.write_text('{"rounds": [{"confidence": [0.5], "accepted": 1}]}\n{"rounds": 1}\n')
    with pytest.raises(DraftgraphError, match="line 2"):
        load_trace(path)
    path.write_text("\n")
    with pytest.raises(DraftgraphError, match="empty"):
        load_trace(path)
    with pytest.raises(DraftgraphError, match="not a readable trace"):
        load_trace(tmp_path / "none.jsonl")


def test_trace_from_rounds() -> None:
    def one(verified: int, next_id: int | None) -> Round:
        return Round(0, [1, 2], verified, 1, [0.5, 0.4], next_id)

    (trace,) = trace_from_rounds([[one(2, 5), one(1, 5), one(2, None)], []], 2)
    assert trace.confidence.tolist() == [[0.5, 0.4]] and trace.accepted.tolist() == [1]
    headless = Round(0, [1, 2], 2, 1, None, 5)
    with pytest.raises(DraftgraphError, match="no confidence head"):
        trace_from_rounds([[headless]], 2)


def test_presentation(points: list[Point]) -> None:
    lines = table_text(points).splitlines()
    assert len(lines) == len(points) + 1 and lines[0].split()[:2] == ["concurrency", "policy"]
    root = ET.fromstring(plot_svg(points, title="a < b"))
    lines_drawn = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines_drawn) == 6 + 5  # plain has no budget
    json.dumps(points_dict(points))
