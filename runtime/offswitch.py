"""Which requests draft at all: speculation must not cost more than a small share of plain decoding.

Every request has an outlook, the mean prefix survival ā_1 … ā_γ of its own past drafts. For R
running requests of which a set D drafts, the step is predicted to yield

    Θ(D) = max_n (R + the sum of the n largest ā_j of D) / (draft_ms(|D|) + T(R, R + n))

tokens per ms, T and draft_ms from the measured `CostTable`; D is empty in plain decoding. The
drafts of a batch share their cost, so the requests are chosen together: by decreasing outlook,
as many as make Θ largest, and none where it gains less than a minimum over plain decoding.

What is not known yet has to be tried. A new request begins with what the strongest prompts of the
calibration did (with survival 1 without a calibration), or more and more what the requests before
it did; one that was left out is tried again after a wait. Such trials are paid from an allowance: a
share of the plain decoding time, against which the losses of all drafted steps are booked as their
predicted tokens tell.

Exact: the choice is made before the draft, from past rounds only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..graphs.errors import DraftgraphError
from .costs import CostTable
from .scheduler import wider

# Rounds until a trial counts as known.
TRIAL = 3
# Failed trials that a calibration stands for where it tells that not even strong prompts pay.
UNTRIED = 2


@dataclass(eq=False)
class Outlook:
    """What is known of one request. horizon: tokens that it is likely to generate.

    pending_ms: what its next draft costs beside drafting, to write what was committed since its
    last draft (at first the prompt) into the drafter's cache; the engine keeps it up to date.
    begin: [γ] expected ā_j while on trial. seen: [γ] mean of what its drafts showed since.
    """

    horizon: int
    begin: np.ndarray
    seen: np.ndarray = field(init=False)
    pending_ms: float = 0.0
    weight: float = 0.0  # rounds behind `seen`
    drafted: int = 0  # rounds since it began, or began anew
    waited: int = 0  # rounds without a draft since the last one
    left_out: int = 0  # times it was left out after drafting

    def __post_init__(self) -> None:
        self.seen = np.zeros_like(self.begin)

    @property
    def on_trial(self) -> bool:
        return self.drafted < TRIAL

    @property
    def survival(self) -> np.ndarray:
        """[γ] ā_j. On trial what it began with counts as one round."""
        if not self.on_trial:
            return self.seen
        return (self.begin + self.weight * self.seen) / (1 + self.weight)

    def add(self, survival: np.ndarray, decay: float) -> None:
        """One more draft."""
        weight = decay * self.weight
        self.seen = (weight * self.seen + survival) / (weight + 1)
        self.weight, self.waited = weight + 1, 0
        self.drafted += 1

    @property
    def hopeful(self) -> bool:
        """Has it begun anew and not drafted since?"""
        return not self.drafted and bool(self.begin.min() == 1)

    def begin_anew(self) -> None:
        """Hopeful, and on trial."""
        self.begin = np.ones_like(self.begin)
        self.weight, self.drafted = 0.0, 0


@dataclass
class OffSwitch:
    """The switch of an engine: call `choose` before each round and `observe` after it.

    After a round in which none drafted, `observe_plain` will do.

    share: of plain decoding time that losses may reach, over the horizon of the longest running
    request or the time since the start, whichever is longer. A trial must fit in what is left of
    it even if it turns out as the weakest prompts of the calibration did (as if nothing were
    accepted, without a calibration), or as the requests before let fear. min_gain: of Θ over plain
    decoding; what few rounds showed is chosen for being good, and tends to fall short. trial_gain:
    the same with all on trial, of which it is only hoped that they do as the strongest. decay:
    weight of the past in an outlook, per drafted round. The wait before another trial lasts until
    the share has paid for the last one, and doubles with every time that a request is left out; it
    is four times as long before the first trial of a request that does not pay by what is known
    before. memory: weight of the past in what the requests before a new one showed, per request.
    """

    costs: CostTable
    gamma: int
    strongest: np.ndarray | None = None
    weakest: np.ndarray | None = None
    share: float = 0.015
    min_gain: float = 0.05
    trial_gain: float = 0.1
    decay: float = 0.9
    memory: float = 0.75

    loss_ms: float = field(default=0.0, init=False)  # gains pay it back, down to 0
    _plain_ms: float = field(default=0.0, init=False)  # plain decoding of the tokens so far
    # A switch that is off is asked before every step: for how many more rounds of this kind it is
    # certain that none drafts; and, by numbers of requests, what their trials lose.
    _idle: tuple[Any, int] = field(default=(None, 0), init=False, repr=False)
    _least: dict[tuple[int, ...], float] = field(default_factory=dict, init=False, repr=False)
    _lost: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False)
    # What requests showed in their first trials, and how many are behind it.
    _before: Any = field(default=0.0, init=False, repr=False)
    _behind: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or not 0 <= self.min_gain <= self.trial_gain:
            raise DraftgraphError(
                "OffSwitch: share must be in (0, 1) and min_gain between 0 and trial_gain"
            )
        if not 0 <= self.decay < 1:
            raise DraftgraphError("OffSwitch: decay must be in [0, 1)")

    def outlook(self, horizon: int) -> Outlook:
        """Of a new request."""
        return Outlook(horizon, self._expected(self._hoped_for()))

    def _hoped_for(self) -> np.ndarray:
        return np.ones(self.gamma) if self.strongest is None else self.strongest

    def _feared(self) -> np.ndarray:
        return np.zeros(self.gamma) if self.weakest is None else self.weakest

    def _expected(self, guess: np.ndarray) -> np.ndarray:
        """[γ] survivals of a new request: a guess counts as one of the requests before it."""
        return (guess + self._behind * self._before) / (1 + self._behind)

    def choose(self, outlooks: Sequence[Outlook], requests: int, others: int = 0) -> list[bool]:
        """Which of the outlooks draft in a round of R = `requests`, of which `others` draft anyway.

        All of them where the cost table does not cover the round.
        """
        if not self._covers(requests, others + len(outlooks)):
            return [True] * len(outlooks)
        kind = (requests, others, list(outlooks))
        before, rounds = self._idle
        if rounds and before == kind:
            self._idle = kind, rounds - 1
            return [False] * len(outlooks)
        self._idle = None, 0
        plain = self._plain(requests)
        longest = max((o.horizon for o in outlooks), default=0)
        left = self.share * max(self._plain_ms, plain * longest) - self.loss_ms
        for o in outlooks:
            if o.waited and o.waited >= self._wait(o, requests):
                o.begin_anew()
        known = [o for o in outlooks if not o.on_trial]
        needed = self._least_risk_ms(outlooks, len(known), requests, others)
        lacking = needed - left
        if lacking > 0:
            chosen = self._best(known, requests, others)
        else:
            chosen, lacking = self._best_within(left, outlooks, requests, others)
        if not chosen:
            self._idle = kind, self._idle_rounds(outlooks, lacking, longest, requests)
        drafting = {id(o) for o in chosen}
        return [id(o) in drafting for o in outlooks]

    def observe(
        self,
        outlooks: Sequence[Outlook | None],
        drafted: Sequence[bool],
        tokens: Sequence[float],
        survivals: Sequence[np.ndarray | None],
        step_ms: float,
    ) -> None:
        """What a round of R requests brought; every sequence has R entries.

        outlooks: None for requests that the switch does not decide on. tokens: committed, or their
        calibrated prediction 1 + Σ a_j, which varies less. survivals: [γ] of those that drafted.
        step_ms: of the draft with its pending writes, and of the target step.
        """
        if not (math.isfinite(step_ms) and step_ms > 0) or not all(t >= 0 for t in tokens):
            raise DraftgraphError(f"OffSwitch: a round of {step_ms} ms and {list(tokens)} tokens")
        requests = len(outlooks)
        worth = self._plain(requests) * sum(tokens) / requests
        self._plain_ms += worth
        if any(drafted):
            self._idle = None, 0
            self.loss_ms = max(0.0, self.loss_ms + step_ms - worth)
        self._left_out(o for o, draft in zip(outlooks, drafted, strict=True) if not draft)
        for o, draft, survival in zip(outlooks, drafted, survivals, strict=True):
            if o is None or not draft:
                continue
            assert survival is not None
            o.add(survival, self.decay)
            if o.drafted == TRIAL and not o.left_out:
                behind = self.memory * self._behind
                self._before = (behind * self._before + o.seen) / (behind + 1)
                self._behind = behind + 1
                self._lost.clear()
                self._least.clear()

    def observe_plain(self, outlooks: Sequence[Outlook | None]) -> None:
        """`observe` of a round in which none drafted: a token each."""
        self._plain_ms += self._plain(len(outlooks))
        self._left_out(outlooks)

    @staticmethod
    def _left_out(outlooks: Iterable[Outlook | None]) -> None:
        for o in outlooks:
            if o is not None:
                o.left_out += o.waited == 0 and o.drafted > 0
                o.waited += 1

    def _best(self, outlooks: Sequence[Outlook], requests: int, others: int) -> list[Outlook]:
        """The set with the largest Θ. Sizes are tried in powers of two: a batch may be large."""
        ranked = sorted(outlooks, key=lambda o: -float(o.survival.sum()))
        idle = self.costs.draft(others) if others else 0.0
        plain = requests / (self._plain(requests) + idle)
        best, chosen = (1 + self.min_gain) * plain, 0
        known = next((i for i, o in enumerate(ranked) if not o.on_trial), len(ranked))
        for size in sorted({1 << i for i in range(len(ranked).bit_length())} | {len(ranked)}):
            if not 0 < size <= len(ranked):
                continue
            survivals = np.stack([o.survival for o in ranked[:size]], axis=1)
            theta, _ = self._theta(survivals, requests, self.costs.draft(others + size))
            peak = float(theta.max())
            if peak >= best and (size > known or peak >= (1 + self.trial_gain) * plain):
                best, chosen = peak, size
        return ranked[:chosen]

    def _best_within(
        self, left: float, outlooks: Sequence[Outlook], requests: int, others: int
    ) -> tuple[list[Outlook], float]:
        """`_best` with as many trials as `left` ms pay for.

        And how many ms more would let in other trials: infinite if no more are wanted.
        """
        chosen, lacking = self._best(outlooks, requests, others), math.inf
        trials = [o for o in chosen if o.on_trial]
        while trials:
            excess = self._risk_ms(trials, len(chosen), requests, others) - left
            if excess <= 0:
                break
            lacking = min(lacking, excess)
            trials = sorted(trials, key=lambda o: o.pending_ms)[: len(trials) // 2]
            tried = {id(o) for o in trials}
            known = [o for o in outlooks if not o.on_trial or id(o) in tried]
            chosen = self._best(known, requests, others)
            trials = [o for o in chosen if o.on_trial]
        return chosen, lacking

    def _least_risk_ms(
        self, outlooks: Sequence[Outlook], known: int, requests: int, others: int
    ) -> float:
        """What a trial costs at least, of any number of them beside any number of `known`."""
        trials = [o.pending_ms for o in outlooks if o.on_trial]
        if not trials:
            return math.inf
        key = (len(trials), known, requests, others)
        if key not in self._least:
            most = others + known + len(trials)
            draft = np.array([0.0, *(self.costs.draft(n) for n in range(1, most + 1))])
            beside = others + np.arange(known + 1)
            self._least[key] = min(
                float((draft[beside + n] - draft[beside]).min()) + self._verify_ms(n, requests)
                for n in range(1, len(trials) + 1)
            )
        return min(trials) + self._least[key]

    def _idle_rounds(
        self, outlooks: Sequence[Outlook], lacking: float, longest: int, requests: int
    ) -> int:
        """After a round in which none drafts: in how many more can none, whatever they bring?

        lacking: ms that trials cost more than is left, infinite where none would pay. longest:
        horizon; the allowance stays as it is until so many rounds have passed, then a plain round
        adds its share. Pending writes grow meanwhile, so waits and prices can only rise.
        """
        plain = self._plain(requests)
        rounds = max(0.0, longest - self._plain_ms / plain) + lacking / (self.share * plain)
        for o in outlooks:
            if not o.hopeful:
                rounds = min(rounds, self._wait(o, requests) - o.waited)
        return max(0, math.ceil(min(rounds, 1 << 31)) - 1)

    def _risk_ms(
        self, trials: Sequence[Outlook], drafting: int, requests: int, others: int
    ) -> float:
        pending = sum(o.pending_ms for o in trials)
        return pending + self._trial_ms(len(trials), drafting, requests, others)

    def _trial_ms(self, trials: int, drafting: int, requests: int, others: int) -> float:
        """What a step loses to its trials, scheduled as hoped, if they do as the weakest do."""
        idle = self.costs.draft(others + drafting - trials) if others + drafting > trials else 0.0
        return self.costs.draft(others + drafting) - idle + self._verify_ms(trials, requests)

    def _verify_ms(self, trials: int, requests: int) -> float:
        """The part of it that is not drafting."""
        lost = self._lost.get((trials, requests))
        if lost is None:
            survivals = np.repeat(self._hoped_for()[:, None], trials, axis=1)
            theta, times = self._theta(survivals, requests, self.costs.draft(trials))
            tokens = int(theta.argmax())
            width = -(-tokens // trials)
            gained = tokens * float(self._expected(self._feared())[:width].mean()) if tokens else 0
            lost = float(times[tokens]) - self._plain(requests) * (1 + gained / requests)
            self._lost[trials, requests] = lost
        return lost

    def _theta(
        self, survivals: np.ndarray, requests: int, draft_ms: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """By verified tokens: Θ, and ms of the target step. survivals: [γ, drafting requests]."""
        values = np.sort(survivals, axis=None)[::-1]
        tokens = requests + np.concatenate([[0.0], np.cumsum(values)])
        times = self.costs.times(requests, len(values), wider(survivals, values))
        return tokens / (times + draft_ms), times

    def _wait(self, o: Outlook, requests: int) -> int:
        """Plain rounds before another trial."""
        cost = self._risk_ms([o], 1, requests, 0) / (self.share * self._plain(requests))
        # Not drafted so far: its trial did not pay by the calibration, which is no mere guess.
        tried = o.left_out or o.drafted or self.strongest is None
        doubled = max(o.left_out - 1, 0) if tried else UNTRIED
        return max(1, math.ceil(cost)) << min(doubled, 32)

    def _plain(self, requests: int) -> float:
        return float(self.costs.row(requests)[requests])

    def _covers(self, requests: int, drafting: int) -> bool:
        return self.costs.covers(requests, requests + drafting * self.gamma)
