"""The measured staircase: lookups, files, and the shapes of other runtimes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime.costs import (
    FINGERPRINT_KEYS,
    CostTable,
    RoundCost,
    derive_from_rounds,
    fingerprint_name,
    from_sglang,
    from_tensorrt_llm,
    to_sglang,
    to_tensorrt_llm,
)

FINGERPRINT = {
    "device": "cpu a",
    "backend": "onnxruntime",
    "backend_version": "1.32.0",
    "graphs": "abc",
    "dtype": "fp32",
    "threads": 2,
}


@pytest.fixture
def table() -> CostTable:
    cells = {(1, 1): 10.0, (1, 4): 12.0, (1, 8): 20.0, (4, 4): 15.0, (4, 16): 30.0, (4, 32): 60.0}
    return CostTable(cells, {1: 3.0, 4: 5.0}, FINGERPRINT, context_ms=0.05, pad_ms={4: 0.25})


def test_lookup_rounds_up_and_never_interpolates(table: CostTable) -> None:
    assert [table.step_ms(1, n) for n in range(1, 9)] == [10, 12, 12, 12, 20, 20, 20, 20]
    assert table.step_ms(2, 2) == table.step_ms(4, 4) == 15  # 2 requests run as 4
    assert table.step_ms(3, 17) == 60
    assert [table.draft(r) for r in (1, 2, 4)] == [3, 5, 5]


def test_uneven_steps_pay_for_their_padding(table: CostTable) -> None:
    assert table.step_ms(4, 11, width=3) == table.step_ms(4, 11) == 30  # 4 · 3 cells either way
    assert table.step_ms(4, 11, width=8) == 30 + 0.25 * 4 * (8 - 3)
    assert table.step_ms(3, 11, width=8) == 30 + 0.25 * 3 * (8 - 4)
    assert table.step_ms(1, 5, width=5) == table.step_ms(1, 5)
    # 4 to 9 tokens: the first goes to one request, as do the second and the third.
    times = table.times(4, 5, [1, 2, 3, 9])
    widths = [1, 2, 3, 4, 4, 4]
    assert times.tolist() == [table.step_ms(4, 4 + n, w) for n, w in enumerate(widths)]
    even = [15.0, *[30.0] * 5]
    assert table.times(4, 5, None).tolist() == table.row(4)[4:10].tolist() == even


def test_the_smooth_table_is_the_largest_convex_function_below(table: CostTable) -> None:
    smooth = table.times(1, 7, [1, 2, 3, 4, 5, 6, 7], smooth=True)
    corners = [(1, 10.0), (4, 12.0), (8, 20.0)]
    expected = np.interp(np.arange(1, 9), *zip(*corners, strict=True))
    np.testing.assert_allclose(smooth, expected)
    # With padding: of what the steps would cost without it.
    bare = [table.step_ms(4, n) - 0.25 * 4 * -(-n // 4) for n in range(4, 33)]
    padding = 0.25 * 4 * 2
    smooth = table.times(4, 28, [1], smooth=True)
    assert np.all(smooth[1:] <= np.array(bare[1:]) + padding + 1e-9)
    assert np.all(np.diff(smooth[1:], 2) > -1e-9)


def test_lookup_beyond_the_measured_cells(table: CostTable) -> None:
    with pytest.raises(DraftgraphError, match="up to 4 requests, asked for 5"):
        table.step_ms(5, 5)
    with pytest.raises(DraftgraphError, match="9 tokens for 1 requests"):
        table.step_ms(1, 9)
    with pytest.raises(DraftgraphError, match="1 tokens for 2 requests"):
        table.step_ms(2, 1)
    with pytest.raises(DraftgraphError, match="drafting times up to 4"):
        table.draft(5)
    with pytest.raises(DraftgraphError, match="requests is 0"):
        table.row(0)
    assert table.covers(4, 32) and table.covers(1, 8)
    assert not table.covers(4, 33) and not table.covers(5, 5) and not table.covers(1, 9)


def test_flat() -> None:
    assert CostTable({(1, 1): 10.0}).is_flat(1)
    assert CostTable({(1, 1): 10.0, (1, 8): 10.05}).is_flat(1)
    assert not CostTable({(1, 1): 10.0, (1, 8): 10.5}).is_flat(1)
    assert CostTable({(1, 1): 10.0}).draft(1) == 0


def test_inverted_neighbours_share_their_mean() -> None:
    cells = {(1, 1): 10.0, (1, 2): 14.0, (1, 3): 12.0, (1, 4): 20.0, (1, 5): 18.0, (1, 6): 19.0}
    table = CostTable(cells)
    assert table.row(1)[1:].tolist() == [10, 13, 13, 19, 19, 19]
    assert table.cells[1, 2] == 14  # what was measured stays


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({}, "at least one"),
        ({(2, 1): 1.0}, "every request"),
        ({(0, 1): 1.0}, "every request"),
        ({(1, 1): 0.0}, "positive"),
        ({(1, 1): float("nan")}, "positive"),
    ],
)
def test_impossible_cells(cells: dict[tuple[int, int], float], message: str) -> None:
    with pytest.raises(DraftgraphError, match=message):
        CostTable(cells)


def test_save_and_load(table: CostTable, tmp_path: Path) -> None:
    path = tmp_path / "costs" / f"{fingerprint_name(FINGERPRINT)}.json"
    table.save(path)
    assert CostTable.load(path) == table
    assert json.loads(path.read_text())["schema_version"] == 1
    assert fingerprint_name(dict(reversed(FINGERPRINT.items()))) == path.stem


def test_failure_during_save_keeps_the_old_file(
    table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.json"
    table.save(path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            CostTable({(1, 1): 1.0}).save(path)
    assert CostTable.load(path) == table
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2"),
        ({"schema_version": None}, "schema_version"),
        ({"cells": [{"requests": 1}]}, "not a cost table"),
        ({"cells": None}, "not a cost table"),
        ({"draft_ms": []}, "not a cost table"),
    ],
)
def test_bad_files(table: CostTable, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "costs.json"
    table.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DraftgraphError, match=message):
        CostTable.load(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DraftgraphError, match="no such cost table"):
        CostTable.load(tmp_path / "none.json")
    for text in ("{", "[]"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(DraftgraphError, match=r"bad\.json"):
            CostTable.load(tmp_path / "bad.json")


@pytest.mark.parametrize("key", FINGERPRINT_KEYS)
def test_fingerprint_names_what_differs(table: CostTable, key: str) -> None:
    table.check_fingerprint(dict(FINGERPRINT))
    with pytest.raises(DraftgraphError) as error:
        table.check_fingerprint(FINGERPRINT | {key: "other"})
    others = [k for k in FINGERPRINT_KEYS if k != key]
    assert f"{key} (table: {FINGERPRINT[key]!r}, here: 'other')" in str(error.value)
    assert not any(f"{k} (table" in str(error.value) for k in others)


def test_table_without_a_fingerprint_is_refused(table: CostTable) -> None:
    with pytest.raises(DraftgraphError, match=r"threads \(table: None, here: 2\)"):
        CostTable(table.cells).check_fingerprint(FINGERPRINT)


def test_derive_from_rounds() -> None:
    records = [
        RoundCost(1, 1, 10.0, 2.0),
        RoundCost(1, 1, 11.0, 4.0),
        (1, 1, 90.0, 3.0),  # an outlier
        (1, 8, 20.0),
        (2, 9, 25.0, 6.0),
    ]
    table = derive_from_rounds(records, FINGERPRINT)
    assert table.cells == {(1, 1): 11.0, (1, 8): 20.0, (2, 9): 25.0}
    assert table.draft_ms == {1: 3.0, 2: 6.0}
    assert table.samples == {(1, 1): 3, (1, 8): 1, (2, 9): 1}
    assert derive_from_rounds(records, min_samples=3).cells == {(1, 1): 11.0}
    with pytest.raises(DraftgraphError, match="no cost cell"):
        derive_from_rounds([])


def sglang_lookup(payload: dict[str, Any], tokens: int) -> float:
    """SGLang's: the last probe at or below, clamped."""
    index = np.searchsorted(payload["sample_batch_tokens"], tokens, side="right") - 1
    return float(payload["sample_steps_per_sec"][max(0, index)])


def test_sglang_table(table: CostTable) -> None:
    payload = json.loads(json.dumps(to_sglang(table, 4)))
    assert payload["max_batch_tokens"] == 32
    for tokens in range(4, 33):
        assert 1e3 / sglang_lookup(payload, tokens) == pytest.approx(table.step_ms(4, tokens))
    back = from_sglang(payload, [4])
    np.testing.assert_allclose(back.row(4)[4:], table.row(4)[4:])
    assert from_sglang(payload, [1, 2]).step_ms(2, 5) == pytest.approx(30)


def test_sglang_additive_table() -> None:
    payload = {
        "bias_seconds": 0.01,
        "bs_probes": [1, 3],
        "alpha_seconds": [0.0, 0.002],
        "m_probes": [1, 8, 16],
        "theta_seconds": [0.0, 0.004, 0.008],
    }
    table = from_sglang(payload, [1, 2])
    assert table.step_ms(1, 1) == pytest.approx(10)
    assert table.step_ms(2, 8) == pytest.approx(15)
    assert table.step_ms(2, 9) == pytest.approx(19)


def test_tensorrt_llm_table(table: CostTable) -> None:
    payload = json.loads(json.dumps(to_tensorrt_llm(table, 4)))
    for tokens in range(4, 33):  # TensorRT-LLM interpolates
        ms = np.interp(tokens, payload["token_counts"], payload["step_time_ms"])
        assert ms == pytest.approx(table.step_ms(4, tokens))
    assert payload["fixed_overhead_ms"] == 5
    back = from_tensorrt_llm(payload, [4])
    np.testing.assert_allclose(back.row(4)[4:], table.row(4)[4:])
    assert back.draft(4) == 5


def test_tensorrt_llm_batch_overhead_and_exact_table() -> None:
    payload: dict[str, Any] = {
        "token_counts": [1, 8],
        "step_time_ms": [10.0, 12.0],
        "batch_sizes": [1, 3],
        "batch_overhead_ms": [1.0, 2.0],
    }
    assert from_tensorrt_llm(payload, [1, 2]).draft(2) == pytest.approx(1.5)
    exact = {
        "schema_version": 2,
        "engine_fingerprint": {"max_draft_len": 3},
        "cost_tables": {"2": {"token_counts": [0, 2, 4], "step_time_ms": [9.0, 6.0, 7.0]}},
    }
    assert from_tensorrt_llm(exact, [2]).cells == {(2, 8): 9.0, (2, 2): 6.0, (2, 4): 7.0}


@pytest.mark.parametrize("load", [from_sglang, from_tensorrt_llm])
@pytest.mark.parametrize("payload", [{}, {"sample_batch_tokens": [2, 1]}, {"token_counts": 3}])
def test_malformed_foreign_tables(load: Any, payload: dict[str, Any]) -> None:
    with pytest.raises(DraftgraphError, match="not a "):
        load(payload, [1])
