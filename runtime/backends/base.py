"""What the engine asks of a backend.

A backend owns the sessions (or engines), the caches and every intermediate tensor; only ids,
lengths, confidences and random numbers cross this seam, so a device backend never copies logits or
features to the host. Tensors pass from phase to phase inside the backend under their graph names.

Order of calls in a round: `backbone`, `markov`, `confidence`, `target`, `accept`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# Longest chunk of a prompt in one target call; bounds the size of intermediate tensors.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class TokenBatch:
    """Tokens for one target call, packed: N in all, slot by slot.

    The call covers the R consecutive slots from `first_slot` on; other slots are not touched.
    """

    ids: np.ndarray  # [N] i64
    lengths: np.ndarray  # [R] i64, tokens of each slot; 0 for an idle one
    past_length: np.ndarray  # [R] i64, committed rows in the target's cache, idle or not
    last_only: bool = False  # prefill: logits of each slot's last token only
    first_slot: int = 0


@dataclass(frozen=True)
class ContextBatch:
    """New context rows for the drafter's cache, and the slots that draft now.

    Covers R consecutive slots from `first_slot` on, as in `TokenBatch`.
    """

    counts: np.ndarray  # [R] i64, new context rows of each slot, its held rows first
    index: np.ndarray  # [.] i64, packed tokens of the last target call, slot by slot, without held
    past_length: np.ndarray  # [R] i64, rows in the drafter's cache
    slots: np.ndarray  # [B] i64, the slots that draft, in increasing order
    anchor: np.ndarray  # [B] i64
    first_slot: int = 0


@dataclass(frozen=True)
class DraftSampling:
    """How the draft is drawn: greedy for every request when `uniforms` is None."""

    temperature: np.ndarray  # [B] f32, 0 for greedy
    uniforms: np.ndarray | None  # [B, γ] f32


@dataclass(frozen=True)
class AcceptSampling:
    """Parameters of acceptance of A requests; greedy for all when `sample_uniform` is None."""

    slots: np.ndarray  # [A] i64, the slots that had tokens in the last target call
    verify_length: np.ndarray  # [A] i64, 0 for a slot that did not draft
    temperature: np.ndarray  # [A] f32
    top_k: np.ndarray  # [A] i64, 0 off
    top_p: np.ndarray  # [A] f32, 1 off
    accept_uniform: np.ndarray | None  # [A, γ] f32
    sample_uniform: np.ndarray | None  # [A] f32


class Backend(Protocol):
    """One device running the graphs of a bundle for R slots, each holding one request or none."""

    prefill_chunk: int  # most tokens of one prefill call
    seconds: dict[str, float]  # time spent inside the device runtime, by phase

    @property
    def longest(self) -> int | None:
        """Most tokens of a request, prompt and output; None where the caches grow as needed."""

    @property
    def capacity(self) -> tuple[int, int]:
        """Rows per slot that the caches of target and drafter have now."""

    def report(self) -> dict[str, Any]:
        """What runs where and how, for people: plain data."""

    def fingerprint(self) -> dict[str, Any]:
        """What step times depend on: device, backend and version, graphs, dtype, threads."""

    def reserve(self, slots: int, target_rows: int, draft_rows: int) -> None:
        """Make room in the caches of R slots.

        Contents are kept and capacity does not shrink; another number of slots is a `reset`.
        """

    def reset(self, slots: int) -> None:
        """Begin with `slots` empty slots; capacity grown for earlier requests may be given back."""

    def target(self, batch: TokenBatch) -> None:
        """Run the target; leaves `logits` and `features` for the next calls."""

    def backbone(self, context: ContextBatch) -> None:
        """Write the new context into the drafter's cache and draft one block per given slot.

        Leaves `hidden` and `base_logits` for the next calls.
        """

    def markov(self, anchor: np.ndarray, sampling: DraftSampling) -> np.ndarray:
        """Pick the blocks: draft ids [B, γ] i64."""

    def confidence(self) -> np.ndarray | None:
        """Confidence logits [B, γ] f32, None when the drafter has no confidence head."""

    def hold(self, index: Mapping[int, np.ndarray]) -> None:
        """Keep feature rows of the last target call, by slot, for a later `backbone` call.

        For requests that skip drafting: the next target call replaces the features.
        """

    def release(self, slot: int) -> None:
        """Forget what is held for a slot: its request is done."""

    def accept(self, sampling: AcceptSampling) -> tuple[np.ndarray, np.ndarray]:
        """Judge the last target call: accepted [A] i64 and next_id [A] i64.

        next_id is -1 where the logits were not finite.
        """

    def read(self, name: str) -> np.ndarray:
        """A copy of an intermediate tensor by its graph name, for tests and diagnosis."""
