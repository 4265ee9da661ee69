"""The off-switch: bounded cost on useless text, no lasting harm on good text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime.offswitch import OffSwitch

PLAIN, ROUND = 20.0, 38.0  # T(1); d + T(w): a round must commit 1.9 tokens


def run(
    switch: OffSwitch, length: int, tokens: Callable[[int], int], round_ms: float = ROUND
) -> tuple[float, list[bool]]:
    """Time relative to plain decoding and which rounds drafted; tokens(done) of a drafted one."""
    done, time, drafted = 0, 0.0, []
    while done < length:
        drafted.append(switch.drafts())
        if drafted[-1]:
            m = tokens(done)
            switch.observe(m, round_ms, PLAIN)
            time, done = time + round_ms, done + m
        else:
            switch.observe_plain(PLAIN)
            time, done = time + PLAIN, done + 1
    return time / (done * PLAIN), drafted


def geometric(rng: np.random.Generator, p: float) -> Callable[[int], int]:
    return lambda _: 1 + int(np.cumprod(rng.random(7) < p).sum())


@pytest.mark.parametrize("length", [128, 256, 1024, 8192])
@pytest.mark.parametrize("round_ms", [22.0, 28.0, 38.0, 60.0])
def test_useless_text_costs_less_than_three_percent(length: int, round_ms: float) -> None:
    ratio, drafted = run(OffSwitch(horizon=length), length, lambda _: 1, round_ms)
    assert ratio <= 1.03
    assert any(drafted) and not all(drafted)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3])
def test_bad_drafters_cost_less_than_three_percent(p: float) -> None:
    rng = np.random.default_rng(0)
    ratios = [run(OffSwitch(horizon=256), 256, geometric(rng, p))[0] for _ in range(300)]
    assert np.max(ratios) <= 1.03


def test_good_text_keeps_drafting() -> None:
    rng = np.random.default_rng(1)
    shares, ratios = [], []
    for _ in range(200):
        ratio, drafted = run(OffSwitch(horizon=256), 256, geometric(rng, 0.75))
        shares.append(np.mean(drafted))
        ratios.append(ratio)
    assert np.median(shares) == 1
    always = 1.9 / (1 + sum(0.75**j for j in range(1, 8)))
    assert np.mean(ratios) < always + 0.05


def test_recovers_when_text_becomes_good() -> None:
    switch = OffSwitch(horizon=1024)
    _, drafted = run(switch, 1024, lambda done: 1 if done < 300 else 5)
    assert not switch.drafts() or switch.on
    assert switch.on and np.mean(drafted[-50:]) == 1


def test_switches_off_when_text_becomes_bad() -> None:
    """Earlier gains are not burnt first."""
    switch = OffSwitch(horizon=1024)
    _, drafted = run(switch, 3000, lambda done: 6 if done < 2000 else 1)
    bad = drafted[-900:]
    assert np.mean(bad) < 0.05
    assert all(drafted[:300])


def test_waits_double() -> None:
    _, drafted = run(OffSwitch(horizon=64), 30000, lambda _: 1)
    at = np.flatnonzero(drafted)
    gaps = np.diff(at)
    gaps = gaps[gaps > 1][1:]  # the first also waits for the allowance
    assert len(gaps) >= 5 and (gaps[1:] >= 1.9 * gaps[:-1]).all()


def test_hysteresis() -> None:
    """Between the margins a switch that is on stays on, and one that is off stays off."""
    between = 2.0  # tokens per round: an advantage of 5 %
    switch = OffSwitch(horizon=10_000)
    run(switch, 400, lambda _: int(between))
    assert switch.on
    for _ in range(6):
        switch.observe(1, ROUND, PLAIN)
    assert not switch.on
    while not switch.drafts():
        switch.observe_plain(PLAIN)
    switch.observe(between, ROUND, PLAIN)
    assert switch.advantage == pytest.approx(0.0526, abs=1e-3) and not switch.on
    while not switch.drafts():
        switch.observe_plain(PLAIN)
    switch.observe(2.2, ROUND, PLAIN)
    assert switch.on


def test_refusals() -> None:
    for options in ({"share": 0.0}, {"horizon": 0}, {"on_margin": -0.1}, {"decay": 1.0}):
        with pytest.raises(DraftgraphError, match="OffSwitch"):
            OffSwitch(**options)  # type: ignore[arg-type]
    with pytest.raises(DraftgraphError, match="round of nan ms"):
        OffSwitch().observe(1, float("nan"), 1.0)
    with pytest.raises(DraftgraphError, match="tokens"):
        OffSwitch().observe(float("nan"), 1.0, 1.0)
