"""One request while it is decoded: its ids, what the drafter has seen of it, and its clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .offswitch import Outlook
from .results import PHASES, FinishReason, Round, Stats
from .sampling import Purpose, SamplingParams, uniforms
from .scheduler import COST_BASED
from .tokenizer import TextStream


class Clock:
    """Wall time of one request, and device time by phase of the steps it took part in."""

    def __init__(self) -> None:
        self.start = self.first = self.end = time.perf_counter()
        self.phases: dict[str, float] = {}
        self.steps = 0.0
        self.done = False

    def first_token(self, device: Mapping[str, float], stepped: float) -> None:
        """The prompt is prefilled. device: seconds by phase; stepped: seconds in steps; so far."""
        self.first = time.perf_counter()
        self.phases = {p: device.get(p, 0.0) for p in PHASES}
        self.steps = stepped

    def ended(self, device: Mapping[str, float], stepped: float) -> None:
        self.end, self.done = time.perf_counter(), True
        self.phases = {p: device.get(p, 0.0) - self.phases[p] for p in PHASES}
        self.steps = stepped - self.steps

    def stats(self, request: Request) -> Stats:
        rounds = request.rounds
        drafted = sum(len(r.draft_ids) for r in rounds)
        verified = sum(r.verified for r in rounds)
        accepted = sum(r.accepted for r in rounds)
        committed = accepted + sum(r.next_id is not None for r in rounds)
        count = len(request.generated)
        after_first = self.end - self.first
        return Stats(
            prompt_tokens=request.prompt_length,
            generated_tokens=count,
            rounds=len(rounds),
            drafted=drafted,
            verified=verified,
            accepted=accepted,
            tau=committed / len(rounds) if rounds else None,
            accepted_per_verified=accepted / verified if verified else None,
            accepted_per_drafted=accepted / drafted if drafted else None,
            ttft_ms=1e3 * (self.first - self.start),
            tpot_ms=1e3 * after_first / (count - 1) if count > 1 else None,
            total_ms=1e3 * (self.end - self.start),
            phase_ms={p: 1e3 * s for p, s in self.phases.items()},
            host_ms=1e3 * max(0.0, self.steps - sum(self.phases.values())),
            schedules={status: n for status, n in request.statuses.items() if n},
        )


@dataclass(eq=False)
class Request:
    """One sequence being decoded. The last id is the anchor: committed, not yet in any cache."""

    ids: list[int]  # prompt and generated
    prompt_length: int
    params: SamplingParams
    stops: frozenset[int]
    speculative: bool
    number: int  # keys the random numbers together with the seed
    text: TextStream | None
    slot: int = -1
    draft_rows: int = 0  # rows in the drafter's cache
    held_rows: int = 0  # committed rows whose features the backend holds
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of the last call
    rounds: list[Round] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    new_text: str = ""  # decoded since a stream took it
    survivals: list[np.ndarray] = field(default_factory=list)  # a_1 … a_γ of its last rounds
    outlook: Outlook | None = None  # by which it is decided whether it drafts; None: always
    statuses: Counter[str] = field(default_factory=Counter)  # what its schedules reported
    clock: Clock = field(default_factory=Clock)

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def budget(self) -> int:
        """Tokens it may still produce."""
        return self.params.max_new_tokens - (len(self.ids) - self.prompt_length)

    def most_verified(self, gamma: int) -> int:
        """Drafted tokens that a round of it may verify."""
        return min(gamma, self.budget, self.params.max_verify or gamma)

    @property
    def may_stop_drafting(self) -> bool:
        """Whether the off-switch decides on its drafts."""
        wanted = self.params.off_switch
        if wanted is None:
            wanted = self.params.scheduler in COST_BASED
        return wanted and self.speculative

    @property
    def new_context(self) -> int:
        """Committed rows that the drafter's cache lacks."""
        return self.held_rows + len(self.context)

    def uniforms(self, count: int, purpose: Purpose) -> np.ndarray:
        """Draws for the slots after the anchor."""
        return uniforms(self.params.seed, self.number, len(self.ids), count, purpose)


@dataclass(frozen=True)
class Draft:
    """The drafted block of one request."""

    ids: np.ndarray  # [γ]
    confidence: np.ndarray | None  # [γ] after the sigmoid
