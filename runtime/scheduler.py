"""How many drafted tokens each request verifies: pure functions of arrays, before the target runs.

A drafter proposes γ tokens x_1 … x_γ per request. The confidence c_k estimates P(x_k is accepted |
everything before it was), so a_j = Π_{i≤j} c_i is the survival of the prefix of length j. A round
that verifies ℓ_r tokens of each of R requests sends N = Σ (1 + ℓ_r) tokens through the target and
yields Σ (1 + Σ_{j≤ℓ_r} a_{r,j}) expected tokens; its predicted throughput is

    Θ(n) = (R + the sum of the survivals of n verified tokens) / (draft_ms + T(R, R + n))

with T from a measured `CostTable` (DSpark, arXiv 2607.05147, section 3.2), the padding that these n
tokens make included. The cost-based policies differ in how they choose the budget n. All of them
split it the same way: the n largest current survivals, ties by earlier position, then by lower
request index. Survival never rises along a request, so such a set is a prefix of every block.

Exactness. The output follows the target's distribution when whether slot k of a request is
verified depends only on c_1 … c_k of that request and on data that is independent of its current
draft. c_k is a function of x_{<k}: the decision then never looks at the token it drops. A rule
that also looks at later confidences drops a token because of that token, and the output is biased
(appendix A of the paper; `tests/runtime/test_policies.py` has its counterexample). "The past" is
independent of the current draft only if a position that is drafted again gets fresh random
numbers; the budget of `lagged` and the guard below rely on that.

The guard. A trim has to beat full verification by `min_gain` of predicted throughput, or all is
verified. Comparing with full verification reads the survivals of whole blocks, so with sampled
drafts it may only use those of earlier rounds; only `live-argmax` takes the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..graphs.errors import DraftgraphError
from .costs import CostTable

# What a schedule reports about itself.
TRIMMED = "trimmed"
VERIFIED_ALL = "verified all"
NO_CONFIDENCE = "verified all: the drafter has no confidence head"
NO_COSTS = "verified all: no measured cost table; run draftgraph profile"
FLAT_COSTS = "verified all: the cost table is flat, so no trim saves time"
NOT_COVERED = "verified all: the cost table does not cover this batch; profile larger batches"
LOW_GAIN = "verified all: the predicted gain of a trim is below the minimum"

MIN_GAIN = 0.02
# Of many requests one nearly always verifies its whole block, so that padding is the same for all
# budgets and is not worth the microseconds of telling them apart.
PADDING_UP_TO = 64
LAG = 2  # rounds between the survivals that set a budget and the round that spends it


@dataclass(frozen=True)
class ScheduleInput:
    """What a policy may look at.

    limits: [R] int, most tokens each request may verify (0: it did not draft). confidence: [R, γ]
    calibrated c_k, None without a head. threshold: [R], for `threshold`. sampled: [R] bool, the
    request's draft was drawn at random; None counts every draft as drawn. lagged: [R, γ] survivals
    of `LAG` rounds before, 1 or a guess for requests that are newer (see `lagged_survival`); None:
    all are new, 1. costs: target times; None: nothing measured. draft_ms: time of the draft; None
    takes the table's. min_gain: the guard's margin on Θ, as a fraction; 0 switches the guard off.
    """

    limits: np.ndarray
    confidence: np.ndarray | None = None
    threshold: np.ndarray | None = None
    sampled: np.ndarray | None = None
    lagged: np.ndarray | None = None
    costs: CostTable | None = None
    draft_ms: float | None = None
    min_gain: float = MIN_GAIN


@dataclass(frozen=True)
class Schedule:
    """lengths: [R] int64, tokens to verify. status: one of the constants above."""

    lengths: np.ndarray
    status: str


Policy = Callable[[ScheduleInput], Schedule]


def survival(confidence: np.ndarray) -> np.ndarray:
    """[R, γ] float64: a_j = Π_{i≤j} c_i."""
    return np.cumprod(confidence, axis=1, dtype=np.float64)


def lagged_survival(
    histories: Sequence[Sequence[np.ndarray]], gamma: int, new: np.ndarray | None = None
) -> np.ndarray:
    """[R, γ]: each request's survivals of `LAG` rounds before; `new` where it has none yet.

    histories: per request, the survivals [γ] of its past rounds, oldest first. new: [γ], None: 1.
    """
    new = np.ones(gamma) if new is None else new
    return np.stack([h[-LAG] if len(h) >= LAG else new for h in histories])


# Policies that need no costs


def full(confidence: np.ndarray | None, limits: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    """Verify every drafted token. Exact: the length does not depend on the draft at all."""
    return limits


def by_threshold(
    confidence: np.ndarray | None, limits: np.ndarray, threshold: np.ndarray
) -> np.ndarray:
    """Cut before the first slot whose confidence is below the threshold (DeepSpec's rule).

    Exact: slot k is dropped because of c_1 .. c_k, which are functions of x_{<k} only. Without a
    confidence head nothing is cut. The threshold is the caller's choice, so no guard applies.
    """
    if confidence is None:
        return limits
    below = confidence < threshold[:, None]
    first = np.where(below.any(axis=1), below.argmax(axis=1), confidence.shape[1])
    return np.minimum(first, limits)


def _full(data: ScheduleInput) -> Schedule:
    """`full`."""
    return Schedule(data.limits, VERIFIED_ALL)


def _threshold(data: ScheduleInput) -> Schedule:
    """`by_threshold`."""
    if data.confidence is None:
        return Schedule(data.limits, NO_CONFIDENCE)
    if data.threshold is None:
        raise DraftgraphError("threshold: the policy needs a threshold for every request")
    _check_confidence(data.confidence)
    return _result(by_threshold(data.confidence, data.limits, data.threshold), data.limits)


# Policies that weigh tokens against time


def early_stop(data: ScheduleInput) -> Schedule:
    """Algorithm 1: add tokens by decreasing survival while Θ rises; stop at the first that fails.

    No single token pays for the whole step at the edge of a staircase, so the rule alone would
    never cross one. It is applied to the largest convex function below the measured times, then
    once more, from there on, to the times themselves: a step that was begun is filled.

    Exact: whether (r, j) is reached and kept depends on the tokens visited before it, which are
    (r, 1 … j-1) and tokens of other requests, and on a_{r,j} itself. The positions after j are
    never visited earlier, and sums and widths run in visiting order, so they cannot matter. The
    guard takes what the same search would have gained on the survivals of `LAG` rounds before,
    which are independent of the current draft; beyond `PADDING_UP_TO` requests it is enough that
    some equal width of all would have gained as much.
    """
    problem = _prepare(data)
    if isinstance(problem, Schedule):
        return problem
    if data.min_gain > 0 and not problem.gains(problem.past()):
        return Schedule(data.limits, LOW_GAIN)
    values = problem.order(problem.current)
    budget, _ = problem.first_stop(problem.current, values)
    return problem.split(budget, values)


def lagged(data: ScheduleInput) -> Schedule:
    """Budget from the survivals of `LAG` rounds before, split over the current ones.

    The budget is the unconstrained argmax of Θ over the whole staircase (the smallest step among
    equals); a new request with survival 1 asks for everything. This is what the paper runs: the
    budget is known before the draft, and a step's edge does not end the search.

    Exact: the budget and the guard are functions of earlier rounds only; given the budget K, slot
    (r, j) is verified if fewer than K tokens rank before it, and the tokens that do are
    (r, 1 … j-1) and tokens of other requests.
    """
    problem = _prepare(data)
    if isinstance(problem, Schedule):
        return problem
    past = problem.past()
    budget, gain = problem.best(past, problem.order(past))
    if gain < 1 + data.min_gain:
        return Schedule(data.limits, LOW_GAIN)
    return problem.split(budget)


def live_argmax(data: ScheduleInput) -> Schedule:
    """Budget and split from the current survivals: argmax of Θ. Greedy drafting only.

    Exact only when drafts are deterministic: then a verified length is a function of the
    committed tokens, and verifying any prefix of a fixed proposal leaves the target's
    distribution as it is. With sampled drafts the budget would depend on the very tokens that it
    drops (0.85 instead of 0.7 in the paper's example), so this raises `DraftgraphError`.
    """
    if data.sampled is None or np.any(data.sampled):
        raise DraftgraphError(
            "live-argmax needs greedy drafting: with sampled drafts it would bias the output; set "
            'draft_sampling to "greedy" or use the scheduler lagged or early-stop'
        )
    return _live_argmax(data)


def _live_argmax(data: ScheduleInput) -> Schedule:
    """`live_argmax` without its refusal: biased with sampled drafts."""
    problem = _prepare(data)
    if isinstance(problem, Schedule):
        return problem
    values = problem.order(problem.current)
    budget, gain = problem.best(problem.current, values)
    if gain < 1 + data.min_gain:
        return Schedule(data.limits, LOW_GAIN)
    return problem.split(budget, values)


POLICIES: dict[str, Policy] = {
    "full": _full,
    "threshold": _threshold,
    "early-stop": early_stop,
    "lagged": lagged,
    "live-argmax": live_argmax,
}


# They need a measured cost table.
COST_BASED = frozenset({"early-stop", "lagged", "live-argmax"})


# The shared machinery


def wider(survivals: np.ndarray, values: np.ndarray) -> list[int]:
    """The numbers of tokens from which on a step that verifies the largest has a wider request.

    survivals: [γ, R], falling along γ. values: [n] the n largest of them, largest first. Entry j
    is the first count that includes a token of position j. Ties as in `split`: earlier position
    first.
    """
    ascending = values[::-1]
    best = survivals.max(axis=1)
    not_larger = ascending.searchsorted(best, "right").tolist()
    smaller = ascending.searchsorted(best, "left").tolist()
    counts = []
    for position, (upper, lower) in enumerate(zip(not_larger, smaller, strict=True)):
        larger = len(values) - upper
        if upper - lower > 1:
            larger += int(np.count_nonzero(survivals[:position] == best[position]))
        counts.append(larger + 1)
    return counts


@dataclass(frozen=True)
class _Problem:
    """Current survivals and how to weigh any.

    Survivals lie in position order, [γ, R], with -1 beyond a request's limit: sums over requests
    are then long and contiguous, and flat order is the order of ties.
    """

    data: ScheduleInput
    current: np.ndarray
    total: int  # Σ limits
    costs: CostTable
    draft_ms: float

    @property
    def requests(self) -> int:
        return self.current.shape[1]

    def past(self) -> np.ndarray:
        """[γ, R] survivals of `LAG` rounds before."""
        lagged = self.data.lagged
        if lagged is None:
            return _mask(np.ones(self.current.shape), self.data.limits, self.total)
        if lagged.T.shape != self.current.shape:
            raise DraftgraphError(
                f"lagged survivals have shape {lagged.shape}, confidences {self.current.T.shape}"
            )
        if lagged.size and not (lagged.min() >= 0 and lagged.max() <= 1):
            raise DraftgraphError("lagged survivals must lie in [0, 1] and be finite")
        return _mask(lagged.T, self.data.limits, self.total)

    def order(self, survivals: np.ndarray) -> np.ndarray:
        """[total] the survivals within the limits, largest first."""
        flat = survivals.flatten(order="K")  # memory order: no transposition on the way
        flat.sort()
        return flat[::-1][: self.total]

    def gains(self, survivals: np.ndarray) -> bool:
        """The guard of `early_stop`: is there `min_gain` or more over full verification?"""
        least = 1 + self.data.min_gain
        if self.requests > PADDING_UP_TO and self.total == survivals.size:
            # Equal widths need no sorting, and no split of a budget is worse than theirs.
            tokens = self._tokens(survivals.sum(axis=1))
            theta = tokens / self._times(None)[:: self.requests]
            if theta.max() >= least * theta[-1]:
                return True
        return self.first_stop(survivals, self.order(survivals))[1] >= least

    def best(self, survivals: np.ndarray, values: np.ndarray) -> tuple[int, float]:
        """The budget with the largest Θ, and that Θ relative to full verification.

        survivals: [γ, R]; values: their `order`.
        """
        counts = self._wider(survivals, values)
        budgets: np.ndarray | range
        if counts is None:
            # A step costs the same up to its end, so only the ends can be best.
            budgets, times = self.costs.ends(self.requests, self.total)
            tokens = self._tokens(np.add.reduceat(values, budgets[:-1]))
            theta = tokens / (times + self.draft_ms)
        else:
            budgets = range(self.total + 1)
            theta = self._tokens(values) / self._times(counts)
        peak = int(theta.argmax())
        return int(budgets[peak]), float(theta[peak] / theta[-1])

    def first_stop(self, survivals: np.ndarray, values: np.ndarray) -> tuple[int, float]:
        """The budget of `early_stop`, otherwise as `best`."""
        tokens, counts = self._tokens(values), self._wider(survivals, values)
        begun = _first_peak(tokens / self._times(counts, smooth=True))
        rest = tokens[begun:] / self._times(counts)[begun:]
        filled = _first_peak(rest)
        return begun + filled, float(rest[filled] / rest[-1])

    def _tokens(self, values: np.ndarray) -> np.ndarray:
        """[len(values) + 1] expected tokens of a step, by how many of `values` it has."""
        tokens = np.empty(len(values) + 1)
        tokens[0] = self.requests
        tokens[1:] = values
        return np.add.accumulate(tokens)  # `cumsum` and `out` cost a microsecond each

    def _wider(self, survivals: np.ndarray, values: np.ndarray) -> list[int] | None:
        return wider(survivals, values) if self.requests <= PADDING_UP_TO else None

    def _times(self, counts: list[int] | None, smooth: bool = False) -> np.ndarray:
        times = self.costs.times(self.requests, self.total, counts, smooth=smooth)
        return times + self.draft_ms

    def split(self, budget: int, values: np.ndarray | None = None) -> Schedule:
        """The `budget` largest current survivals; `values`: them sorted, when already known."""
        limits, current = self.data.limits, self.current
        if budget >= self.total:
            return Schedule(limits, VERIFIED_ALL)
        if budget == 0:
            return Schedule(np.zeros(self.requests, np.int64), TRIMMED)
        if values is None:
            rank = current.size - budget
            smallest = np.partition(current, rank, axis=None)[rank]
        else:
            smallest = values[budget - 1]
        lengths = (current >= smallest).sum(axis=0)
        tied = values is None or values[budget] == smallest
        surplus = int(lengths.sum()) - budget if tied else 0
        if surplus:  # ties at the edge: earlier position first, then lower request index
            last = np.flatnonzero(current == smallest)
            dropped = last[len(last) - surplus :] % self.requests
            lengths -= np.bincount(dropped, minlength=self.requests)
        return Schedule(lengths, TRIMMED)


def _prepare(data: ScheduleInput) -> _Problem | Schedule:
    """The problem, or the schedule that verifies everything where nothing can be weighed."""
    limits, costs = data.limits, data.costs
    if data.confidence is None:
        return Schedule(limits, NO_CONFIDENCE)
    _check_confidence(data.confidence)
    if costs is None:
        return Schedule(limits, NO_COSTS)
    requests, total = len(limits), int(limits.sum())
    if not costs.covers(requests, requests + total):
        return Schedule(limits, NOT_COVERED)
    if costs.is_flat(requests):
        return Schedule(limits, FLAT_COSTS)
    draft_ms = costs.draft(requests) if data.draft_ms is None else data.draft_ms
    current = data.confidence.T.astype(np.float64, order="C")
    for j in range(1, len(current)):  # `survival`, faster for a short γ
        current[j] *= current[j - 1]
    return _Problem(data, _mask(current, limits, total), total, costs, draft_ms)


def _check_confidence(confidence: np.ndarray) -> None:
    # A NaN fails both comparisons.
    if confidence.size and not (confidence.min() >= 0 and confidence.max() <= 1):
        raise DraftgraphError(
            "confidences must lie in [0, 1] and be finite; the confidence head's output is not, "
            "which usually means a half-precision overflow: export with --dtype bf16 or fp32"
        )


def _mask(values: np.ndarray, limits: np.ndarray, total: int) -> np.ndarray:
    """values [γ, R] with -1 beyond each request's limit; total: Σ limits."""
    if total == values.size:
        return values
    return np.where(np.arange(len(values))[:, None] < limits, values, -1.0)


def _first_peak(curve: np.ndarray) -> int:
    """The first n whose successor is not larger."""
    stops = curve[1:] <= curve[:-1]
    n = int(stops.argmax()) if len(stops) else 0
    return n if len(stops) and stops[n] else len(stops)


def _result(lengths: np.ndarray, limits: np.ndarray) -> Schedule:
    return Schedule(lengths, TRIMMED if np.any(lengths < limits) else VERIFIED_ALL)
