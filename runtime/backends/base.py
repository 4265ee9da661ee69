"""What the engine asks of a backend.

A backend owns the sessions (or engines), the caches and every intermediate tensor; only ids,
lengths, confidences and random numbers cross this seam, so a device backend never copies logits or
features to the host. Tensors pass from phase to phase inside the backend under their graph names.

Order of calls in a round: `backbone`, `markov`, `confidence`, `target`, `accept`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of R requests for one target call, packed: N tokens in all, request by request."""

    ids: np.ndarray  # [N] i64
    lengths: np.ndarray  # [R] i64, tokens of each request, at least 1
    past_length: np.ndarray  # [R] i64, committed rows in the target's cache
    last_only: bool = False  # prefill: logits of each request's last token only


@dataclass(frozen=True)
class ContextBatch:
    """Which rows of the last target call became committed context of the drafter."""

    index: np.ndarray  # [R, X] i64 packed token of every new context row
    count: np.ndarray  # [R] i64, how many of them are valid
    past_length: np.ndarray  # [R] i64, rows in the drafter's cache
    anchor: np.ndarray  # [R] i64


@dataclass(frozen=True)
class DraftSampling:
    """How the draft is drawn: greedy for every request when `uniforms` is None."""

    temperature: np.ndarray  # [R] f32, 0 for greedy
    uniforms: np.ndarray | None  # [R, γ] f32


@dataclass(frozen=True)
class AcceptSampling:
    """Parameters of acceptance; greedy for every request when `sample_uniform` is None."""

    verify_length: np.ndarray  # [R] i64
    temperature: np.ndarray  # [R] f32
    draft_temperature: np.ndarray  # [R] f32
    top_k: np.ndarray  # [R] i64, 0 off
    top_p: np.ndarray  # [R] f32, 1 off
    accept_uniform: np.ndarray | None  # [R, γ] f32
    sample_uniform: np.ndarray | None  # [R] f32


class Backend(Protocol):
    """One device running the graphs of a bundle for up to R requests."""

    seconds: dict[str, float]  # time spent inside the device runtime, by phase

    def reserve(self, requests: int, target_rows: int, draft_rows: int) -> None:
        """Make room in the caches; contents are kept, capacity never shrinks while in use.

        Another number of requests than before starts from empty caches; 0 drops them.
        """

    def target(self, batch: TokenBatch) -> None:
        """Run the target; leaves `logits` and `features` for the next calls."""

    def backbone(self, context: ContextBatch) -> None:
        """Write the new context into the drafter's cache and draft one block.

        Leaves `hidden` and `base_logits` for the next calls.
        """

    def markov(self, anchor: np.ndarray, sampling: DraftSampling) -> np.ndarray:
        """Pick the block: draft ids [R, γ] i64."""

    def confidence(self) -> np.ndarray | None:
        """Confidence logits [R, γ] f32, None when the drafter has no confidence head."""

    def accept(self, sampling: AcceptSampling) -> tuple[np.ndarray, np.ndarray]:
        """Judge the last target call: accepted [R] i64 and next_id [R] i64.

        next_id is -1 where the logits were not finite.
        """

    def read(self, name: str) -> np.ndarray:
        """A copy of an intermediate tensor by its graph name, for tests and diagnosis."""
