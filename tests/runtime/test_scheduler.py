"""The policies `full` and `threshold`; the cost-based ones have a file of their own."""

from __future__ import annotations

import numpy as np
import pytest

from draftgraph.runtime.scheduler import by_threshold, full

GAMMA = 6


def lengths(confidence: list[list[float]], limits: list[int], threshold: list[float]) -> list[int]:
    return by_threshold(np.array(confidence), np.array(limits), np.array(threshold)).tolist()


def test_full_takes_the_limit() -> None:
    assert full(None, np.array([7, 3, 0]), np.zeros(3)).tolist() == [7, 3, 0]


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        ([0.9, 0.9, 0.4, 0.9], 2),
        ([0.4, 0.9, 0.9, 0.9], 0),
        ([0.9, 0.9, 0.9, 0.9], 4),
        ([0.9, 0.5, 0.9, 0.9], 4),  # equal to the threshold: kept
        ([0.9, np.nextafter(0.5, 0), 0.9, 0.9], 1),
    ],
)
def test_cut_before_the_first_low_confidence(confidence: list[float], expected: int) -> None:
    assert lengths([confidence], [4], [0.5]) == [expected]


def test_limits_and_thresholds_belong_to_requests() -> None:
    rows = [[0.9, 0.6, 0.3]] * 5
    assert lengths(rows, [3, 3, 3, 1, 0], [0.0, 0.5, 0.95, 0.5, 0.0]) == [3, 2, 0, 1, 0]


def test_without_a_confidence_head_nothing_is_cut() -> None:
    assert by_threshold(None, np.array([3, 1]), np.array([1.0, 1.0])).tolist() == [3, 1]


def test_the_decision_never_looks_at_the_token_it_drops() -> None:
    """Slot k is verified or not because of c_1 .. c_k: what follows may be anything."""
    rng = np.random.default_rng(0)
    confidence = rng.random((500, GAMMA))
    limits = rng.integers(0, GAMMA + 1, 500)
    threshold = rng.random(500) * 0.5
    before = by_threshold(confidence, limits, threshold)
    assert set(before.tolist()) == set(range(GAMMA + 1))
    for k in range(GAMMA):
        changed = confidence.copy()
        changed[:, k + 1 :] = rng.random((500, GAMMA - k - 1))
        after = by_threshold(changed, limits, threshold)
        # Whether slot k is verified stays, and so do all shorter lengths.
        np.testing.assert_array_equal(before > k, after > k)
        np.testing.assert_array_equal(np.minimum(before, k + 1), np.minimum(after, k + 1))


def test_requests_do_not_interact() -> None:
    rng = np.random.default_rng(1)
    confidence, threshold = rng.random((40, GAMMA)), rng.random(40)
    limits = np.full(40, GAMMA)
    together = by_threshold(confidence, limits, threshold)
    for r in range(40):
        one = slice(r, r + 1)
        assert by_threshold(confidence[one], limits[one], threshold[one])[0] == together[r]
