"""Policies against slow re-implementations, and exactness by enumeration.

The enumeration follows appendix A of DSpark (arXiv 2607.05147): two tokens, target (0.7, 0.3),
drafter (0.5, 0.5), and a confidence of slot 2 that tells which token slot 1 holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import SamplingParams, scheduler
from draftgraph.runtime.costs import CostTable
from draftgraph.runtime.scheduler import POLICIES, Policy, ScheduleInput, lagged_survival, survival

SAMPLED = ["full", "threshold", "early-stop", "lagged"]  # offered with sampled drafts
COST_BASED = ["early-stop", "lagged", "live-argmax"]


def staircase(rng: np.random.Generator, requests: int, gamma: int) -> CostTable:
    """Random measured widths, non-decreasing times with flat parts, draft time and padding.

    Times are multiples of 1/1024 ms, so that sums are exact and ties are ties.
    """
    widths = np.arange(requests, requests * (gamma + 1) + 1)
    ends = {int(widths[0]), int(widths[-1])}
    kept = sorted({*rng.choice(widths, size=len(widths) // 2).tolist(), *ends})
    jumps = rng.exponential(0.4, len(kept)) * (rng.random(len(kept)) < 0.6)
    times = 1 + np.cumsum(np.round(1024 * jumps) / 1024)
    if times[-1] < 1.1 * times[0]:  # it would count as flat
        times[-1] += 1
    cells = {(requests, n): float(t) for n, t in zip(kept, times, strict=True)}
    draft = float(np.round(1024 * rng.exponential(0.3)) / 1024)
    pad = float(rng.choice([0.0, 1 / 64, 1 / 4]))
    return CostTable(cells, {requests: draft}, pad_ms={requests: pad})


def problem(rng: np.random.Generator, min_gain: float = 0.0) -> ScheduleInput:
    requests, gamma = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    # Few distinct values, so that ties are common.
    confidence = rng.choice([0.0, 0.25, 0.5, 0.75, 0.9, 1.0], (requests, gamma))
    limits = np.full(requests, gamma)
    if rng.random() < 0.5:
        limits = rng.integers(0, gamma + 1, requests)
    return ScheduleInput(
        limits=limits,
        confidence=confidence,
        threshold=rng.choice([0.0, 0.3, 0.6, 0.95], requests),
        sampled=np.zeros(requests, bool),
        lagged=survival(rng.choice([0.1, 0.5, 0.8, 1.0], (requests, gamma))),
        costs=staircase(rng, requests, gamma),
        min_gain=min_gain,
    )


# Slow re-implementations, from the definitions


def ranked(values: np.ndarray, limits: np.ndarray) -> list[tuple[float, int, int]]:
    """(survival, request, position) of every candidate, in visiting order."""
    found = [(float(values[r, j]), r, j) for r in range(len(values)) for j in range(int(limits[r]))]
    return sorted(found, key=lambda x: (-x[0], x[2], x[1]))


def largest_convex_below(values: list[float], n: int) -> float:
    chords = [
        values[a] + (values[b] - values[a]) * (n - a) / (b - a)
        for a in range(n)
        for b in range(n + 1, len(values))
    ]
    return min([values[n], *chords])


def throughput(
    data: ScheduleInput, chosen: list[tuple[float, int, int]], smooth: bool = False
) -> float:
    assert data.costs is not None
    requests = len(data.limits)
    tokens = float(requests)
    for value, _, _ in chosen:
        tokens += value
    widest = max((j + 2 for _, _, j in chosen), default=1)
    column = data.costs.pad_ms[requests] * requests
    without_padding = [
        data.costs.step_ms(requests, n) - column * -(-n // requests)
        for n in range(requests, data.costs.max_tokens(requests) + 1)
    ]
    n = len(chosen)
    time = largest_convex_below(without_padding, n) if smooth else without_padding[n]
    return tokens / (data.costs.draft(requests) + time + column * widest)


def slow_early_stop(data: ScheduleInput, values: np.ndarray) -> int:
    order = ranked(values, data.limits)
    count = 0
    for smooth in (True, False):
        while count < len(order):
            now, then = (throughput(data, order[:n], smooth) for n in (count, count + 1))
            if then <= now * (1 + 1e-12):  # equal, but for rounding
                break
            count += 1
    return count


def slow_argmax(data: ScheduleInput, values: np.ndarray) -> int:
    order = ranked(values, data.limits)
    return max(range(len(order) + 1), key=lambda n: (throughput(data, order[:n]), -n))


def slow(name: str, data: ScheduleInput, many: bool = False) -> list[int]:
    """many: as beyond `PADDING_UP_TO` requests."""
    assert data.confidence is not None and data.lagged is not None
    current = np.array([[np.prod(c[: j + 1]) for j in range(len(c))] for c in data.confidence])
    search = slow_early_stop if name == "early-stop" else slow_argmax
    judged = current if name == "live-argmax" else data.lagged
    order = ranked(judged, data.limits)
    best = search(data, judged)
    count = search(data, current) if name == "early-stop" else best
    gain = throughput(data, order[:best]) / throughput(data, order)
    gamma = current.shape[1]
    if many and name == "early-stop" and all(data.limits == gamma):
        for width in range(gamma + 1):
            equal = [cell for cell in order if cell[2] < width]
            gain = max(gain, throughput(data, equal) / throughput(data, order))
    if data.min_gain > 0 and gain < 1 + data.min_gain:
        count = len(order)
    lengths = [0] * len(data.limits)
    for _, r, j in ranked(current, data.limits)[:count]:
        assert lengths[r] == j  # a prefix of every block
        lengths[r] += 1
    return lengths


@pytest.mark.parametrize("min_gain", [0.0, 0.1])
@pytest.mark.parametrize("name", COST_BASED)
def test_against_slow_implementation(name: str, min_gain: float) -> None:
    rng = np.random.default_rng(1)
    trimmed = 0
    for _ in range(400):
        data = problem(rng, min_gain)
        schedule = POLICIES[name](data)
        assert schedule.lengths.tolist() == slow(name, data)
        trimmed += schedule.status == scheduler.TRIMMED
    assert trimmed > 40


@pytest.mark.parametrize("name", COST_BASED)
def test_many_requests_against_slow_implementation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond `PADDING_UP_TO` requests, where only the ends of steps are weighed."""
    monkeypatch.setattr(scheduler, "PADDING_UP_TO", 0)
    rng = np.random.default_rng(2)
    trimmed = 0
    for _ in range(400):
        data = problem(rng, 0.05)
        assert data.confidence is not None and data.costs is not None
        # Tokens that are never accepted are free up to the end of a step: no choice is better.
        data = replace(data, confidence=np.maximum(data.confidence, 0.25))
        data = replace(data, costs=replace(data.costs, pad_ms=dict.fromkeys(data.costs.pad_ms, 0)))
        schedule = POLICIES[name](data)
        assert schedule.lengths.tolist() == slow(name, data, many=True)
        trimmed += schedule.status == scheduler.TRIMMED
    assert trimmed > 40


@pytest.mark.parametrize("name", list(POLICIES))
def test_lengths_stay_within_limits(name: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        data = problem(rng)
        lengths = POLICIES[name](data).lengths
        assert lengths.shape == data.limits.shape and lengths.dtype == np.int64
        assert (lengths >= 0).all() and (lengths <= data.limits).all()


def anticipates(policy: Policy, rng: np.random.Generator, min_gain: float) -> bool:
    """Whether changing confidences after a slot changes if that slot is verified."""
    data = problem(rng, min_gain)
    assert data.confidence is not None
    requests, gamma = data.confidence.shape
    r, k = int(rng.integers(requests)), int(rng.integers(1, gamma + 1))
    before = policy(data).lengths
    other = data.confidence.copy()
    other[r, k:] = rng.choice([0.0, 0.25, 0.5, 0.75, 0.9, 1.0], gamma - k)
    after = policy(replace(data, confidence=other)).lengths
    return bool(min(before[r], k) != min(after[r], k))


@pytest.mark.parametrize("min_gain", [0.0, 0.1])
@pytest.mark.parametrize("name", SAMPLED)
def test_never_anticipates(name: str, min_gain: float) -> None:
    rng = np.random.default_rng(3)
    assert not any(anticipates(POLICIES[name], rng, min_gain) for _ in range(600))


def test_live_argmax_anticipates() -> None:
    """The property test can tell."""
    rng = np.random.default_rng(3)
    assert any(anticipates(scheduler._live_argmax, rng, 0.0) for _ in range(600))


def test_threshold_is_monotone() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        data = problem(rng)
        lengths = [
            POLICIES["threshold"](replace(data, threshold=np.full(len(data.limits), t))).lengths
            for t in np.linspace(0, 1, 11)
        ]
        assert all((b <= a).all() for a, b in pairwise(lengths))


def test_budget_is_monotone_in_cost() -> None:
    """A steeper table never makes lagged verify more."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        data = problem(rng)
        assert data.costs is not None
        first = min(data.costs.cells.values())
        budgets = []
        for slope in (0.1, 0.5, 1.0, 2.0, 5.0):
            cells = {c: first + slope * (ms - first) for c, ms in data.costs.cells.items()}
            steeper = CostTable(cells, data.costs.draft_ms)
            if not steeper.is_flat(len(data.limits)):
                budgets.append(int(POLICIES["lagged"](replace(data, costs=steeper)).lengths.sum()))
        assert budgets == sorted(budgets, reverse=True)


def test_ties_earlier_position_then_request() -> None:
    costs = CostTable({(3, n): 1.0 if n <= 5 else 9.0 for n in range(3, 10)})
    data = ScheduleInput(
        limits=np.array([2, 2, 2]), confidence=np.ones((3, 2)), costs=costs, sampled=np.ones(3)
    )
    assert POLICIES["lagged"](data).lengths.tolist() == [1, 1, 0]
    assert POLICIES["early-stop"](data).lengths.tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["early-stop", "lagged"])
@pytest.mark.parametrize(("confidence", "verified"), [(0.99, 3), (0.3, 0)])
def test_an_edge_is_crossed_where_the_whole_step_pays(
    name: str, confidence: float, verified: int
) -> None:
    """The first token alone does not: 1.99 tokens in 2.1 ms, against 1 in 1 ms."""
    cells = {(1, 1): 1.0, (1, 2): 2.1, (1, 3): 2.1, (1, 4): 2.1, (1, 5): 9.0}
    data = ScheduleInput(
        limits=np.array([4]),
        confidence=np.full((1, 4), confidence),
        lagged=survival(np.full((1, 4), confidence)),
        costs=CostTable(cells),
        min_gain=0.0,
    )
    assert POLICIES[name](data).lengths.tolist() == [verified]


@pytest.mark.parametrize("name", COST_BASED)
def test_padding_is_priced(name: str) -> None:
    """A step takes 10 ms, 0.5 ms for each token and 1 ms for each of 3 · width cells."""
    cells = {(3, n): 10 + 0.5 * n + 3.0 * -(-n // 3) for n in range(3, 13)}
    confidence = np.array([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]])
    data = ScheduleInput(
        limits=np.full(3, 3),
        confidence=confidence,
        lagged=survival(confidence),
        sampled=np.zeros(3, bool),
        costs=CostTable(cells),
        min_gain=0.0,
    )
    assert POLICIES[name](data).lengths.tolist() == [3, 0, 0]
    padded = replace(data, costs=CostTable(cells, pad_ms={3: 1.0}))
    assert POLICIES[name](padded).lengths.tolist() == [2, 0, 0]


def test_flat_part_is_filled() -> None:
    """Inside a step even an unlikely token is free."""
    cells = {(1, 4): 1.0, (1, 5): 9.0, (1, 8): 9.0}
    data = ScheduleInput(
        limits=np.array([7]), confidence=np.full((1, 7), 0.05), costs=CostTable(cells), min_gain=0.0
    )
    assert POLICIES["early-stop"](data).lengths.tolist() == [3]


def test_statuses() -> None:
    steep = CostTable({(2, n): float(n) ** 2 for n in range(2, 7)})
    data = ScheduleInput(
        limits=np.array([2, 2]),
        confidence=np.full((2, 2), 0.1),
        sampled=np.zeros(2, bool),
        lagged=np.full((2, 2), 0.1),
        costs=steep,
    )
    wide = CostTable({(1, n): float(n) for n in (1, 3)})
    flat = CostTable({(2, n): 5.0 + 0.001 * n for n in range(2, 7)})
    mild = CostTable({(2, n): 100.0 + n for n in range(2, 7)})
    for name in COST_BASED:
        cases = {
            scheduler.TRIMMED: data,
            scheduler.NO_COSTS: replace(data, costs=None),
            scheduler.NO_CONFIDENCE: replace(data, confidence=None),
            scheduler.NOT_COVERED: replace(data, costs=wide),
            scheduler.FLAT_COSTS: replace(data, costs=flat),
            scheduler.LOW_GAIN: replace(data, costs=mild, min_gain=0.05),
        }
        for status, case in cases.items():
            schedule = POLICIES[name](case)
            assert schedule.status == status
            assert (schedule.lengths.tolist() == [2, 2]) == (status != scheduler.TRIMMED)


def test_new_requests_ask_for_everything() -> None:
    row = np.array([0.5, 0.2])
    lagged = lagged_survival([[], [row], [row, row * 0.5], [row * 0.1, row, row * 0.5]], 2)
    assert lagged.tolist() == [[1, 1], [1, 1], [0.5, 0.2], [0.5, 0.2]]
    guess = np.array([0.6, 0.3])
    assert lagged_survival([[], [row, row]], 2, guess).tolist() == [[0.6, 0.3], [0.5, 0.2]]
    costs = CostTable({(1, n): 1 + 0.3 * n for n in range(1, 9)})
    data = ScheduleInput(limits=np.array([7]), confidence=np.full((1, 7), 0.1), costs=costs)
    assert POLICIES["lagged"](data).lengths.tolist() == [7]
    assert POLICIES["early-stop"](data).lengths.tolist() == [7]


@pytest.mark.parametrize("name", ["threshold", *COST_BASED])
@pytest.mark.parametrize("value", [np.nan, np.inf, -0.1, 1.1])
def test_bad_confidence_is_refused(name: str, value: float) -> None:
    data = problem(np.random.default_rng(0))
    assert data.confidence is not None
    confidence = data.confidence.copy()
    confidence[0, 0] = value
    with pytest.raises(DraftgraphError, match="confidences must lie"):
        POLICIES[name](replace(data, confidence=confidence))


def test_live_argmax_refuses_sampled_drafts() -> None:
    data = problem(np.random.default_rng(0))
    for sampled in (None, np.arange(len(data.limits)) == 0):
        with pytest.raises(DraftgraphError, match="greedy drafting"):
            POLICIES["live-argmax"](replace(data, sampled=sampled))


def test_sampling_params_know_the_policies() -> None:
    for name in POLICIES:
        assert SamplingParams(scheduler=name).scheduler == name
    with pytest.raises(DraftgraphError, match="scheduler"):
        SamplingParams(scheduler="fastest")


# Exactness by enumeration

P, Q = (0.7, 0.3), (0.5, 0.5)
ACCEPT = tuple(min(1.0, p / q) for p, q in zip(P, Q, strict=True))
RESIDUAL = (1.0, 0.0)  # max(p - q, 0), normalised


def first_token(length: int, x: int) -> tuple[float, float]:
    """Distribution of the round's first token when `length` of a block starting with x is checked:
    exact rejection sampling."""
    if length == 0:
        return P
    reject = 1 - ACCEPT[x]
    return tuple(ACCEPT[x] * (y == x) + reject * RESIDUAL[y] for y in (0, 1))  # type: ignore[return-value]


def enumerate_first(policy: Policy, data: ScheduleInput, tell: np.ndarray) -> np.ndarray:
    """[R, 2]: distribution of every request's first token. tell: [R, 2], c_2 by the token x_1."""
    requests = len(data.limits)
    result = np.zeros((requests, 2))
    for drafts in product((0, 1), repeat=requests):
        weight = np.prod([Q[x] for x in drafts])
        assert data.confidence is not None
        confidence = data.confidence.copy()
        confidence[:, 1] = tell[np.arange(requests), drafts]
        lengths = policy(replace(data, confidence=confidence)).lengths
        for r, x in enumerate(drafts):
            result[r] += weight * np.array(first_token(int(lengths[r]), x))
    return result


# Checking one token does not pay (0.9 < 1), checking two pays only if c_2 is high (1.3 > 1).
APPENDIX_A = ScheduleInput(
    limits=np.array([2]),
    confidence=np.array([[0.8, 0.0]]),
    threshold=np.array([0.5]),
    sampled=np.array([True]),
    costs=CostTable({(1, 1): 1.0, (1, 3): 2.0}),
)
TELL = np.array([[1.0, 0.0]])


@pytest.mark.parametrize("name", SAMPLED)
def test_appendix_a_exact(name: str) -> None:
    for past in ([1.0, 1.0], [0.8, 0.8], [0.8, 0.0], [0.1, 0.0]):
        for threshold in (0.5, 0.9):
            data = replace(
                APPENDIX_A, lagged=np.array([past]), threshold=np.array([threshold]), min_gain=0.0
            )
            found = enumerate_first(POLICIES[name], data, TELL)
            np.testing.assert_allclose(found, [P], atol=1e-15)


def test_appendix_a_forbidden() -> None:
    """live-argmax with sampled drafts: refused, and biased when the refusal is removed."""
    with pytest.raises(DraftgraphError, match="greedy drafting"):
        enumerate_first(POLICIES["live-argmax"], APPENDIX_A, TELL)
    found = enumerate_first(scheduler._live_argmax, APPENDIX_A, TELL)
    np.testing.assert_allclose(found, [(0.85, 0.15)], atol=1e-15)


def test_guard_from_current_survivals_would_be_biased() -> None:
    """Why early-stop takes its guard from earlier rounds."""

    def live_guard(data: ScheduleInput) -> scheduler.Schedule:
        assert data.confidence is not None
        return POLICIES["early-stop"](replace(data, lagged=survival(data.confidence)))

    costs = CostTable({(1, 1): 1.0, (1, 2): 2.5, (1, 3): 2.6})
    data = replace(APPENDIX_A, costs=costs, min_gain=0.02)
    found = enumerate_first(live_guard, data, TELL)
    assert abs(found[0, 0] - P[0]) > 0.1
    np.testing.assert_allclose(enumerate_first(POLICIES["early-stop"], data, TELL), [P])


@pytest.mark.parametrize("name", SAMPLED)
def test_batches_are_exact(name: str) -> None:
    """Three requests that compete for the budget: every marginal is the target's."""
    rng = np.random.default_rng(6)
    lengths = set()
    for _ in range(60):
        data = ScheduleInput(
            limits=np.array([2, 2, 2]),
            confidence=rng.random((3, 2)),
            threshold=rng.random(3),
            sampled=np.ones(3, bool),
            lagged=survival(rng.random((3, 2))),
            costs=staircase(rng, 3, 2),
            min_gain=float(rng.choice([0.0, 0.02])),
        )
        found = enumerate_first(POLICIES[name], data, rng.random((3, 2)))
        np.testing.assert_allclose(found, [P] * 3, atol=1e-12)
        lengths.update(POLICIES[name](data).lengths.tolist())
    assert lengths == ({2} if name == "full" else {0, 1, 2})


# Several rounds: what the budget of an earlier round may depend on

BLOCK = 4
LOW_HIGH = (0.8, 1.0, 1.0)  # c_1, c_2, c_3; c_4 is 1 after token 0 and 0 after token 1


def third_token(fresh: bool) -> np.ndarray:
    """Distribution of the third token under `lagged`, enumerated over all draws of all rounds.

    fresh: a position drafted again gets new draws. Otherwise it gets those of its position again,
    so that a token dropped in one round reappears in the next.
    """
    costs = CostTable({(1, 1): 1.0, (1, BLOCK + 1): 3.8})

    def blocks(
        anchor: int, known: dict[int, int]
    ) -> Iterator[tuple[float, list[int], dict[int, int]]]:
        for bits in product((0, 1), repeat=BLOCK):
            positions = range(anchor + 1, anchor + 1 + BLOCK)
            pairs = list(zip(positions, bits, strict=True))
            if any(known.get(p, b) != b for p, b in pairs):
                continue
            new = sum(p not in known for p, _ in pairs)
            yield 0.5**new, list(bits), {} if fresh else {**known, **dict(pairs)}

    def outcomes(draft: list[int], length: int) -> Iterator[tuple[float, list[int]]]:
        weight = 1.0
        for i in range(length):
            reject = weight * (1 - ACCEPT[draft[i]])
            if reject:
                yield reject, [*draft[:i], 0]
            weight *= ACCEPT[draft[i]]
        for y in (0, 1):
            yield weight * P[y], [*draft[:length], y]

    result = np.zeros(2)

    def rounds(
        weight: float, done: list[int], known: dict[int, int], history: list[np.ndarray]
    ) -> None:
        if len(done) >= 3:
            result[done[2]] += weight
            return
        for w, draft, after in blocks(len(done), known):
            confidence = np.array([[*LOW_HIGH, 1.0 - draft[2]]])
            data = ScheduleInput(
                limits=np.array([BLOCK]),
                confidence=confidence,
                lagged=lagged_survival([history], BLOCK),
                costs=costs,
            )
            length = int(POLICIES["lagged"](data).lengths[0])
            for v, tokens in outcomes(draft, length):
                row = survival(confidence)[0]
                rounds(weight * w * v, [*done, *tokens], after, [*history, row])

    rounds(1.0, [], {}, [])
    return result


def test_lagged_is_exact_over_rounds_with_fresh_draws() -> None:
    np.testing.assert_allclose(third_token(fresh=True), P, atol=1e-12)


def test_lagged_is_biased_if_draws_are_reused() -> None:
    """The survivals of two rounds before know the draws of positions that were dropped since."""
    assert abs(third_token(fresh=False)[0] - P[0]) > 0.005


FULL_ARRAYS: list[Callable[..., np.ndarray]] = [scheduler.full, scheduler.by_threshold]


@pytest.mark.parametrize("function", FULL_ARRAYS)
def test_plain_functions_without_a_head(function: Callable[..., np.ndarray]) -> None:
    limits = np.array([3, 1])
    assert function(None, limits, np.array([0.5, 0.5])).tolist() == [3, 1]
