"""Sampling parameters of a request and its random numbers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from ..graphs.contract import TargetContract
from ..graphs.errors import DraftgraphError
from .scheduler import MIN_GAIN, POLICIES

# At and below this temperature a distribution is its argmax; the graphs use the same limit.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Out-of-range values raise `DraftgraphError` naming the field.

    temperature: 0 (and anything up to 1e-5) is greedy. top_k: 0 is off. top_p: 1.0 is off. Both
    shape the target's distribution p, in the order temperature, top-k, top-p.
    stop_ids: None takes the checkpoint's; generation ends after the first of them, which is kept.
    stop: generation ends when one of these strings appears; the text is cut before it.
    draft_sampling: "sample" draws drafts at `temperature`, "greedy" takes the drafter's argmax;
    both leave the output distribution exactly p. scheduler: "full" verifies the whole block,
    "threshold" cuts it before the first token whose confidence is below `threshold`; "early-stop",
    "lagged" and "live-argmax" (greedy drafts only) weigh confidence against the measured cost table
    and trim where that gains at least `min_gain` of predicted throughput.
    max_verify: most drafted tokens that a round verifies, None for the whole block.
    off_switch: stop drafting while it does not pay (needs the cost table); None: for those three.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    draft_sampling: Literal["greedy", "sample"] = "sample"
    scheduler: str = "full"
    threshold: float = 0.5
    min_gain: float = MIN_GAIN
    max_verify: int | None = None
    off_switch: bool | None = None

    def __post_init__(self) -> None:
        def check(field: str, ok: bool, expected: str) -> None:
            if not ok:
                value = getattr(self, field)
                raise DraftgraphError(f"{field} is {value!r}, expected {expected}")

        def number(x: Any) -> bool:
            return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)

        def integer(x: Any) -> bool:
            return isinstance(x, (int, np.integer)) and not isinstance(x, bool)

        for field in ("stop_ids", "stop"):
            if isinstance(getattr(self, field), list):
                object.__setattr__(self, field, tuple(getattr(self, field)))
        t, p = self.temperature, self.top_p
        check("temperature", number(t) and 0 <= t <= 100, "a number from 0 (greedy) to 100")
        check("top_p", number(p) and 0 < p <= 1, "a number in (0, 1]")
        k_ok = integer(self.top_k) and 0 <= self.top_k < 2**31
        check("top_k", k_ok, "an integer in [0, 2**31), 0 to switch it off")
        n = self.max_new_tokens
        check("max_new_tokens", integer(n) and n >= 1, "an integer of at least 1")
        ids = self.stop_ids
        ids_ok = ids is None or (isinstance(ids, tuple) and all(integer(i) and i >= 0 for i in ids))
        check("stop_ids", ids_ok, "a list of token ids, or None for the checkpoint's")
        stop_ok = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        check("stop", stop_ok, "a list of non-empty strings")
        check("seed", integer(self.seed) and 0 <= self.seed < 2**64, "an integer in [0, 2**64)")
        check("draft_sampling", self.draft_sampling in ("greedy", "sample"), '"greedy" or "sample"')
        check("scheduler", self.scheduler in POLICIES, f"one of {sorted(POLICIES)}")
        c = self.threshold
        check("threshold", number(c) and 0 <= c <= 1, "a number in [0, 1]")
        g = self.min_gain
        check("min_gain", number(g) and 0 <= g < 1, "a number in [0, 1)")
        w = self.max_verify
        check(
            "max_verify", w is None or (integer(w) and w >= 1), "an integer of at least 1, or None"
        )
        check("off_switch", self.off_switch in (None, True, False), "True, False or None")
        if self.scheduler == "live-argmax" and self.draft_temperature > 0:
            raise DraftgraphError(
                "scheduler is 'live-argmax', which would bias the output with sampled drafts; set "
                'draft_sampling to "greedy", or use "lagged" or "early-stop"'
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Parameters from plain data; an unknown name is an error."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise DraftgraphError(f"{name}: unknown sampling parameter; known: {sorted(known)}")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def target_temperature(self) -> float:
        """What the acceptance graphs take: 0 for greedy."""
        return 0.0 if self.greedy else self.temperature

    @property
    def draft_temperature(self) -> float:
        """What the Markov graphs take: 0 when the draft is greedy."""
        return 0.0 if self.draft_sampling == "greedy" else self.target_temperature

    def stops(self, target: TargetContract) -> frozenset[int]:
        """The ids that end generation for this request."""
        return frozenset(target.stop_ids if self.stop_ids is None else self.stop_ids)


class Purpose(IntEnum):
    """What a random number is for; draws of different purposes are independent."""

    DRAFT = 0  # picking the drafted token of a position
    ACCEPT = 1  # accepting or rejecting it
    TARGET = 2  # drawing a token from the target (anchor, residual, bonus)


def uniforms(seed: int, request: int, position: int, count: int, purpose: Purpose) -> np.ndarray:
    """float32 [count] in [0, 1): the numbers of one round, for the slots after its anchor.

    Counter-based (Philox 4x64-10, key = (seed, request), counter = (1, slot, position, purpose)
    with the absolute position after the anchor, the prompt's length before the first), so a draw
    depends on nothing but its round: not on the batch or the time. A position that is drafted again
    in a later round gets fresh numbers; policies that look at earlier rounds rely on that.
    Multiples of 2^-24, which float32 holds exactly.
    """
    key = np.array([seed, request], np.uint64)  # a list would pass through float64
    raw = [  # numpy counts up before it generates: the block of 0 is the one of counter 1
        np.random.Philox(key=key, counter=[0, k, position, int(purpose)]).random_raw()
        for k in range(count)
    ]
    return ((np.array(raw, np.uint64) >> np.uint64(40)) * 2.0**-24).astype(np.float32)
