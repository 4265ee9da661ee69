"""The off-switch: bounded cost on useless text, no harm on good text, whole batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime.costs import CostTable
from draftgraph.runtime.offswitch import TRIAL, OffSwitch, Outlook
from draftgraph.runtime.scheduler import ScheduleInput, live_argmax

GAMMA = 7
BASE, TOKEN, DRAFT = 20.0, 1.0, 9.0  # ms of a step, of every token beyond the first, of a draft


def table(draft: float = DRAFT, token: float = TOKEN) -> CostTable:
    """A step of R requests is BASE wide; drafting costs little more for many than for one."""
    cells = {
        (r, n): BASE + token * (n - 1) for r in (1, 2, 4, 8) for n in range(r, r * (GAMMA + 1) + 1)
    }
    return CostTable(cells, {r: draft * (3 + r) / 4 for r in (1, 2, 4, 8)})


def survival(p: float) -> np.ndarray:
    return p ** np.arange(1, GAMMA + 1)


class Decoder:
    """Requests under a switch. Tokens verified: what is best for the true survival."""

    def __init__(self, switch: OffSwitch, horizons: list[int]) -> None:
        self.switch, self.costs = switch, switch.costs
        self.outlooks = [switch.outlook(h) for h in horizons]
        self.spent = self.worth = 0.0
        self.drafted: list[list[bool]] = []

    def round(self, survivals: list[np.ndarray]) -> None:
        count = len(self.outlooks)
        chosen = self.switch.choose(self.outlooks, count)
        lengths = [0] * count
        if any(chosen):
            rates = np.array([[x[0]] * GAMMA for x in survivals])  # c_k of a geometric survival
            limits = np.array([GAMMA if c else 0 for c in chosen])
            schedule = live_argmax(
                ScheduleInput(limits, rates, sampled=np.zeros(count, bool), costs=self.costs)
            )
            lengths = schedule.lengths.tolist()
        spent = self.costs.step_ms(count, count + sum(lengths))
        if any(chosen):
            spent += self.costs.draft(sum(chosen))
        tokens = [1 + s[:n].sum() for s, n in zip(survivals, lengths, strict=True)]
        drawn = [s if c else None for s, c in zip(survivals, chosen, strict=True)]
        self.switch.observe(self.outlooks, chosen, tokens, drawn, spent)
        self.drafted.append(chosen)
        self.spent += spent
        self.worth += self.costs.step_ms(count, count) * sum(tokens) / count

    def run(self, rounds: int, p: list[float]) -> float:
        """Time relative to plain decoding."""
        for _ in range(rounds):
            self.round([survival(x) for x in p])
        return self.spent / self.worth


@pytest.mark.parametrize("horizon", [32, 128, 1024])
@pytest.mark.parametrize("requests", [1, 2, 8])
@pytest.mark.parametrize("draft", [2.0, 20.0])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_useless_drafts_cost_less_than_three_percent(
    horizon: int, requests: int, draft: float, p: float
) -> None:
    decoder = Decoder(OffSwitch(table(draft), GAMMA), [horizon] * requests)
    assert decoder.run(horizon, [p] * requests) <= 1.03


def test_trials_go_on_for_as_long_as_the_text() -> None:
    """More and more rarely."""
    decoder = Decoder(OffSwitch(table(), GAMMA), [256])
    decoder.run(6000, [0.0])
    at = np.flatnonzero([d[0] for d in decoder.drafted])
    gaps = np.diff(at)
    gaps = gaps[gaps > 1]
    assert len(gaps) >= 5
    assert gaps[-1] > 1.9 * gaps[-2] > 10 * gaps[0]


def test_good_text_keeps_drafting() -> None:
    decoder = Decoder(OffSwitch(table(), GAMMA), [256])
    ratio = decoder.run(256, [0.75])
    assert all(d == [True] for d in decoder.drafted)
    always = (BASE + GAMMA * TOKEN + DRAFT) / (BASE * (1 + survival(0.75).sum()))
    assert ratio == pytest.approx(always)


def test_recovers_when_text_becomes_good() -> None:
    decoder = Decoder(OffSwitch(table(), GAMMA), [1024])
    decoder.run(300, [0.0])
    assert not decoder.drafted[-1][0]
    decoder.run(700, [0.8])
    assert all(d[0] for d in decoder.drafted[-50:])


def test_gains_are_not_burnt_when_text_becomes_bad() -> None:
    decoder = Decoder(OffSwitch(table(), GAMMA), [3000])
    decoder.run(1000, [0.85])
    assert all(d[0] for d in decoder.drafted)
    decoder.run(1000, [0.0])
    assert np.mean([d[0] for d in decoder.drafted[1000:]]) < 0.05


def test_a_batch_drafts_for_those_whose_drafts_pay() -> None:
    """Two good requests and two bad ones: the bad ones stop, the good ones go on."""
    decoder = Decoder(OffSwitch(table(draft=4.0, token=0.5), GAMMA), [512] * 4)
    decoder.run(100, [0.8, 0.0, 0.8, 0.0])
    late = np.array(decoder.drafted[50:])
    assert late[:, [0, 2]].all()
    assert late[:, [1, 3]].mean() < 0.1


def test_one_good_request_does_not_slow_a_batch_down() -> None:
    """Alone it would gain; among others, all would wait for its draft."""
    costs = table()
    alone = Decoder(OffSwitch(costs, GAMMA), [512])
    assert alone.run(100, [0.6]) < 0.9
    batch = Decoder(OffSwitch(costs, GAMMA), [512] * 8)
    assert batch.run(512, [0.6, *[0.0] * 7]) <= 1.03
    assert not any(batch.drafted[-1])


def test_a_calibration_tells_what_to_expect() -> None:
    """Where the strongest prompts do not pay nothing is tried, and a short request is tried where
    even the weakest ones pay."""
    hopeless = OffSwitch(table(), GAMMA, strongest=survival(0.2), weakest=survival(0.1))
    decoder = Decoder(hopeless, [64] * 4)
    assert decoder.run(16, [0.1] * 4) == 1.0
    short = [8]
    assert Decoder(OffSwitch(table(), GAMMA), short).run(8, [0.8]) == 1.0  # a risk too large
    strong = OffSwitch(table(), GAMMA, strongest=survival(0.9), weakest=survival(0.7))
    assert Decoder(strong, short).run(8, [0.8]) < 0.6


def test_a_trial_must_promise_more_than_a_request_that_is_known() -> None:
    """Θ is 1.09 of plain decoding by the calibration's strongest prompts, and by its own."""
    known: dict[str, Any] = {"strongest": survival(0.45), "weakest": survival(0.45), "share": 0.5}
    switch = OffSwitch(table(), GAMMA, **known)
    outlook = switch.outlook(64)
    assert switch.choose([outlook], 1) == [False]
    assert OffSwitch(table(), GAMMA, **known, trial_gain=0.05).choose([outlook], 1) == [True]
    for _ in range(TRIAL):
        switch.observe([outlook], [True], [1.5], [survival(0.45)], 30.0)
    assert switch.choose([outlook], 1) == [True]
    with pytest.raises(DraftgraphError, match="trial_gain"):
        OffSwitch(table(), GAMMA, trial_gain=0.0)


def test_what_does_not_pay_by_the_calibration_is_tried_late() -> None:
    """The schedule would verify one token, so a trial costs at most 9 + 1 ms, which 1.5 % of 34
    plain rounds of 20 ms pay for; four times as many pass. Then the text may be better than that
    of the calibration."""
    switch = OffSwitch(table(), GAMMA, strongest=survival(0.2), weakest=survival(0.0))
    decoder = Decoder(switch, [64])
    decoder.run(300, [0.8])
    assert decoder.drafted.index([True]) == 4 * 34
    assert all(d == [True] for d in decoder.drafted[4 * 34 :])


def test_requests_learn_from_those_before() -> None:
    """What one showed in its trial counts as much as the calibration's guess, what came before it
    three quarters."""
    switch = OffSwitch(table(draft=2.0), GAMMA, strongest=survival(0.8), weakest=survival(0.1))
    np.testing.assert_allclose(switch.outlook(64).survival, survival(0.8))
    for _ in range(2):
        outlook = switch.outlook(64)
        for _ in range(TRIAL):
            switch.observe([outlook], [True], [1.5], [survival(0.4)], step_ms=30.0)
    weight = 1 + 0.75
    expected = (survival(0.8) + weight * survival(0.4)) / (1 + weight)
    np.testing.assert_allclose(switch.outlook(64).survival, expected)


def test_a_trial_may_cost_more_where_drafts_paid_before() -> None:
    def after(p: float) -> bool:
        switch = OffSwitch(table(), GAMMA, strongest=survival(0.8), weakest=survival(0.0))
        outlook = switch.outlook(16)
        for _ in range(TRIAL):
            switch.observe([outlook], [True], [1.5], [survival(p)], step_ms=20.0)
        return any(switch.choose([switch.outlook(16)], 1))

    assert after(0.8)
    assert not after(0.0)


def test_an_outlook_is_a_mean_that_forgets() -> None:
    """What it began with counts until the trial is over."""
    outlook = OffSwitch(table(), GAMMA).outlook(64)
    assert outlook.survival.tolist() == [1.0] * GAMMA
    seen = [survival(0.5), survival(0.9), survival(0.1)]
    for row in seen[:2]:
        outlook.add(row, decay=0.5)
    assert outlook.on_trial
    weights = np.array([1.0, 0.5, 1.0])
    expected = weights @ np.stack([np.ones(GAMMA), *seen[:2]]) / weights.sum()
    np.testing.assert_allclose(outlook.survival, expected)
    outlook.add(seen[2], decay=0.5)
    assert not outlook.on_trial and outlook.drafted == TRIAL
    weights = np.array([0.25, 0.5, 1.0])
    np.testing.assert_allclose(outlook.survival, weights @ np.stack(seen) / weights.sum())


def test_losses_are_booked_and_gains_pay_them_back() -> None:
    switch = OffSwitch(table(), GAMMA)
    outlook: Outlook = switch.outlook(64)
    switch.observe([outlook, None], [True, False], [1.0, 1.0], [survival(0.0), None], 40.0)
    plain = BASE + TOKEN
    assert switch.loss_ms == pytest.approx(40 - plain)
    switch.observe([outlook, None], [True, False], [3.0, 1.0], [survival(0.8), None], 40.0)
    assert switch.loss_ms == pytest.approx(40 - plain + 40 - 2 * plain)
    switch.observe([outlook, None], [True, False], [8.0, 1.0], [survival(0.9), None], 40.0)
    assert switch.loss_ms == 0.0
    switch.observe([outlook, None], [False, False], [1.0, 1.0], [None, None], plain)
    assert switch.loss_ms == 0.0 and outlook.waited == outlook.left_out == 1
    switch.observe_plain([outlook, None])
    assert switch.loss_ms == 0.0 and (outlook.waited, outlook.left_out) == (2, 1)
    assert switch._plain_ms == pytest.approx(plain * (2 + 4 + 9 + 2 + 2) / 2)


def test_the_first_draft_also_pays_for_the_prompt() -> None:
    """A trial that fits the allowance alone may not fit with a long prompt to write."""
    switch = OffSwitch(table(), GAMMA, strongest=survival(0.8), weakest=survival(0.0))
    outlooks = [switch.outlook(300), switch.outlook(300)]
    assert switch.choose(outlooks, 2) == [True, True]
    outlooks[0].pending_ms = 2.0
    assert switch.choose(outlooks, 2) == [True, True]
    outlooks[0].pending_ms = 200.0
    assert switch.choose(outlooks, 2) == [False, True]


def test_others_that_draft_anyway_share_the_cost() -> None:
    """With seven drafts under way an eighth is cheap."""
    switch = OffSwitch(table(draft=60.0), GAMMA, strongest=survival(0.7), weakest=survival(0.6))
    assert switch.choose([switch.outlook(64)], 8) == [False]
    assert switch.choose([switch.outlook(64)], 8, others=7) == [True]


class Restless(OffSwitch):
    """Works everything out before every round."""

    def _idle_rounds(self, *about: object) -> int:
        return 0


@pytest.mark.parametrize("seed", range(12))
def test_a_switch_that_rests_chooses_the_same(seed: int) -> None:
    """Batches that shrink and grow, prompts still to be written, survivals that drift."""
    rng = np.random.default_rng(seed)
    most = int(rng.integers(1, 9))
    weakest = survival(rng.uniform(0, 0.4)) if seed % 2 else None
    strongest = survival(rng.uniform(0.3, 0.8)) if seed % 3 else None
    switches = [
        kind(table(), GAMMA, strongest=strongest, weakest=weakest) for kind in (OffSwitch, Restless)
    ]
    horizons = rng.integers(16, 300, most).tolist()
    outlooks = [[s.outlook(h) for h in horizons] for s in switches]
    quality, pending = rng.uniform(0, 0.6, most), np.full(most, 40)
    rested = 0
    for step in range(300):
        count = most if step % 100 < 70 else max(1, most - step % 3)
        for row in outlooks:
            for outlook, rows in zip(row, pending.tolist(), strict=True):
                outlook.pending_ms = 0.05 * rows
        chosen, again = (
            s.choose(row[:count], count) for s, row in zip(switches, outlooks, strict=True)
        )
        assert chosen == again
        rested += not any(chosen) and switches[0]._idle[1] > 0
        quality = np.clip(quality + rng.normal(0, 0.03, most), 0, 0.8)
        drawn = [
            survival(q) if yes else None for q, yes in zip(quality[:count], chosen, strict=True)
        ]
        tokens = [1.0 if d is None else 1 + float(d.sum()) for d in drawn]
        ms = table().step_ms(count, count + GAMMA * sum(chosen))
        ms += table().draft(sum(chosen)) if any(chosen) else 0
        for s, row in zip(switches, outlooks, strict=True):
            s.observe(row[:count], chosen, tokens, drawn, ms)
        pending[:count] = np.where(chosen, 0, pending[:count]) + 1
    assert rested


def test_beyond_the_cost_table_all_draft() -> None:
    switch = OffSwitch(table(draft=1000.0), GAMMA)
    outlooks = [switch.outlook(64) for _ in range(9)]
    assert switch.choose(outlooks, 9) == [True] * 9


def test_refusals() -> None:
    for options in ({"share": 0.0}, {"min_gain": -0.1}, {"decay": 1.0}):
        with pytest.raises(DraftgraphError, match="OffSwitch"):
            OffSwitch(table(), GAMMA, **options)  # type: ignore[arg-type]
    switch = OffSwitch(table(), GAMMA)
    for tokens, ms in ((1.0, float("nan")), (float("nan"), 1.0), (1.0, 0.0)):
        with pytest.raises(DraftgraphError, match="OffSwitch: a round"):
            switch.observe([None], [False], [tokens], [None], ms)
