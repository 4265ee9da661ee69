"""What a generation returns: tokens, text, rounds and statistics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

PHASES = ("backbone", "markov", "confidence", "schedule", "target", "accept")


@dataclass(frozen=True)
class Round:
    """One draft, schedule, verify round, in the order it happened.

    start: position of the anchor in the full sequence (prompt included). draft_ids: all γ drafted
    ids. verified: how many of them the target checked. accepted: how many of those became output
    (a stop id inside the run ends it). confidence: σ of the head's logits for all γ slots, None
    without a head. next_id: the token the target added after the accepted run (the bonus token
    when everything verified was accepted), or None when a stop id ended the run before it.
    """

    start: int
    draft_ids: list[int]
    verified: int
    accepted: int
    confidence: list[float] | None
    next_id: int | None


@dataclass(frozen=True)
class Stats:
    """Figures of one generation; times in milliseconds.

    tau: committed tokens per round, the bonus token included (the paper's τ); None without rounds.
    accepted_per_verified and accepted_per_drafted: the two acceptance rates in use, both over all
    rounds. phase_ms: time inside the device runtime by phase, of the steps this request took part
    in, prefill not included; host_ms: the rest of those steps' wall time. ttft_ms: until the first
    token. tpot_ms: per token after it. schedules: what the policy reported, by number of rounds.
    """

    prompt_tokens: int
    generated_tokens: int
    rounds: int
    drafted: int
    verified: int
    accepted: int
    tau: float | None
    accepted_per_verified: float | None
    accepted_per_drafted: float | None
    ttft_ms: float
    tpot_ms: float | None
    total_ms: float
    phase_ms: dict[str, float]
    host_ms: float
    schedules: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Output:
    """The result of `Engine.generate`.

    token_ids: generated ids only, up to and including the first stop id, never past the budget.
    text: decoded without special tokens and cut before a stop string; None without a tokenizer.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    rounds: list[Round] = field(repr=False)
    stats: Stats = field(repr=False)
