"""The engine: prefill, then rounds of draft → schedule → verify → commit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..graphs.errors import DraftgraphError
from .backends import open_backend
from .backends.base import (
    PREFILL_CHUNK,
    AcceptSampling,
    Backend,
    ContextBatch,
    DraftSampling,
    TokenBatch,
)
from .bundle import Bundle, load_bundle
from .calibration import Calibration
from .costs import CostTable, find_costs
from .offswitch import OffSwitch
from .request import Draft, Request
from .results import Output, Round
from .sampling import Purpose, SamplingParams
from .scheduler import POLICIES, ScheduleInput, lagged_survival, survival
from .tokenizer import Prompt, Tokenizer

# Made for a bundle after its export, kept in its directory.
CALIBRATION, COSTS = "calibration.json", "costs"


class Engine:
    """Runs a bundle for up to `max_requests` requests at a time. Not safe for concurrent calls."""

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        *,
        max_requests: int = 8,
        calibration: Calibration | None = None,
        costs: CostTable | None = None,
    ) -> None:
        if max_requests < 1:
            raise DraftgraphError(f"max_requests is {max_requests}, expected at least 1")
        self.bundle = bundle
        self.backend = backend
        self.tokenizer = Tokenizer(bundle)
        self.gamma = bundle.draft.block_size
        self.max_requests = max_requests
        self.longest = min(bundle.max_seq_len, backend.longest or bundle.max_seq_len)
        self.calibration = calibration
        self.costs = costs
        if calibration is not None:
            calibration.check_gamma(self.gamma)
        self._slots: list[Request | None] = []
        self._switch: OffSwitch | None = None
        self._waiting: deque[Request] = deque()
        self._step_seconds = self._step_start = 0.0

    @classmethod
    def load(
        cls,
        path: str | Path,
        provider: str = "cpu",
        *,
        max_requests: int = 8,
        verify: bool = True,
        **options: Any,
    ) -> Engine:
        """Open a bundle directory.

        max_requests: how many requests may decode together; each takes its share of the caches.
        verify: compare every file with its hash first. The bundle's calibration.json and the cost
        table of this machine are used where they exist; set `calibration` and `costs` of the
        engine to use others, or None. provider: "cpu", "cuda", "tensorrt" or "nv-tensorrt-rtx",
        docs/gpu.md has their options; "tensorrt-native" or "tensorrt-rtx-native", see
        docs/engines.md. Of all: markov ("auto": the truncated head where the bundle has
        one, "topk", or "full"), threads (size of the process-wide pool, default all cores) and
        strict_placement. Raises `DraftgraphError`.
        """
        bundle = load_bundle(path, verify=verify)
        backend = open_backend(bundle, provider, max_requests=max_requests, **options)
        fitted = bundle.path / CALIBRATION
        return cls(
            bundle,
            backend,
            max_requests=max_requests,
            calibration=Calibration.load(fitted) if fitted.is_file() else None,
            costs=find_costs(bundle.path / COSTS, backend.fingerprint()),
        )

    # The algorithm

    def step(self) -> list[Request]:
        """One round for every running request; returns those that ended.

        Requests that wait take free slots first, and their prompts are prefilled. An error drops
        all requests and leaves the engine free.
        """
        try:
            return self._step()
        except BaseException:
            slots = len(self._slots)
            self._open_slots(0)  # a NaN that stays in a cache would poison later requests
            self._open_slots(slots)
            raise

    def _step(self) -> list[Request]:
        self._step_start = time.perf_counter()
        ended = self._admit()
        running = self._running()
        if running:
            drafts = self._draft(self._drafting(running))
            lengths = self._schedule(running, drafts)
            accepted, next_ids = self._verify(running, drafts, lengths)
            for i, request in enumerate(running):
                draft = drafts.get(request.slot)
                self._commit(request, draft, lengths[i], int(accepted[i]), int(next_ids[i]))
            self._observe(running, drafts, lengths)
            ended += [r for r in running if r.finish_reason]
        self._step_seconds += time.perf_counter() - self._step_start
        for request in ended:
            self._leave(request)
        return ended

    def _draft(self, drafting: list[Request]) -> dict[int, Draft]:
        """Drafted blocks by slot."""
        if not drafting:
            return {}
        gamma, view = self.gamma, self._view()
        counts = np.zeros(len(view), np.int64)
        rows = np.array([r.draft_rows if r else 0 for r in view])
        for request in drafting:
            counts[request.slot] = request.new_context
        anchor = np.array([r.ids[-1] for r in drafting])
        room = int(rows.max()) + max(1, int(counts.max())) + gamma
        self.backend.reserve(len(self._slots), 0, room)
        self.backend.backbone(
            ContextBatch(
                counts=counts,
                index=np.concatenate([r.context for r in drafting]),
                past_length=rows,
                slots=np.array([r.slot for r in drafting]),
                anchor=anchor,
            )
        )
        for request in drafting:
            request.draft_rows += request.new_context
            request.held_rows, request.context = 0, request.context[:0]
        draws = None
        if not all(r.params.greedy for r in drafting):
            draws = np.stack([r.uniforms(gamma, Purpose.DRAFT) for r in drafting])
        temperature = np.array([r.params.draft_temperature for r in drafting], np.float32)
        ids = self.backend.markov(anchor, DraftSampling(temperature, draws))
        logits = self.backend.confidence()
        confidence = None if logits is None else self._confidence(logits)
        return {
            r.slot: Draft(ids[i].copy(), None if confidence is None else confidence[i])
            for i, r in enumerate(drafting)
        }

    def _schedule(self, running: list[Request], drafts: dict[int, Draft]) -> list[int]:
        """How many drafted tokens each request verifies, decided before the target runs."""
        start = time.perf_counter()
        drafted = np.array([r.slot in drafts for r in running])
        limits = np.array([r.most_verified(self.gamma) for r in running]) * drafted
        known = {slot: d.confidence for slot, d in drafts.items() if d.confidence is not None}
        confidence = None
        if known:
            certain = np.ones(self.gamma)
            confidence = np.stack([known.get(r.slot, certain) for r in running])
        lengths = np.zeros(len(running), np.int64)
        for policy in {r.params.scheduler for r in running if r.slot in drafts}:
            asks = np.array([r.params.scheduler == policy for r in running])
            schedule = POLICIES[policy](
                ScheduleInput(
                    limits=limits * asks,
                    confidence=confidence,
                    threshold=np.array([r.params.threshold for r in running]),
                    sampled=np.array([r.params.draft_temperature > 0 for r in running]) & asks,
                    lagged=lagged_survival(
                        [r.survivals for r in running], self.gamma, self._hoped_for
                    ),
                    costs=self.costs,
                    min_gain=min(
                        r.params.min_gain for r in running if r.params.scheduler == policy
                    ),
                )
            )
            lengths = np.where(asks, schedule.lengths, lengths)
            for request, asked in zip(running, asks & drafted, strict=True):
                request.statuses[schedule.status] += int(asked)
        if confidence is not None:
            for request, row in zip(running, survival(confidence), strict=True):
                if request.slot in drafts:
                    request.survivals = [*request.survivals[-1:], row]
        self.backend.seconds["schedule"] += time.perf_counter() - start
        return [int(n) for n in lengths]

    def _verify(
        self, running: list[Request], drafts: dict[int, Draft], lengths: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the target over every anchor and its drafted ids: accepted counts and next ids."""
        view = self._view()
        tokens, widths = [], np.zeros(len(view), np.int64)
        for request, length in zip(running, lengths, strict=True):
            tokens.append(request.ids[-1])
            if length:
                tokens += drafts[request.slot].ids[:length].tolist()
            widths[request.slot] = 1 + length
        rows = np.array([len(r.ids) - 1 if r else 0 for r in view])
        self._target(TokenBatch(np.array(tokens, np.int64), widths, rows))
        starts = np.cumsum(widths) - widths
        for request in running:
            request.context = starts[request.slot : request.slot + 1]  # extended by _commit
        return self._accept(running, lengths)

    def _commit(
        self, request: Request, draft: Draft | None, length: int, accepted: int, next_id: int
    ) -> None:
        """Append the accepted run and the next token, cut at the first stop id."""
        drafted = [] if draft is None else draft.ids.tolist()
        # The verified rows that are committed now: the anchor and the accepted run. The next
        # backbone call reads their features; rejected rows are overwritten in every cache.
        request.context = request.context[0] + np.arange(accepted + 1)
        start = len(request.ids) - 1
        kept = self._append(request, [*drafted[:accepted], next_id])
        if draft is not None:
            request.rounds.append(
                Round(
                    start=start,
                    draft_ids=drafted,
                    verified=length,
                    accepted=min(accepted, kept),
                    confidence=None if draft.confidence is None else draft.confidence.tolist(),
                    next_id=next_id if kept == accepted + 1 else None,
                )
            )

    def _prefill(self, request: Request) -> None:
        """Write the prompt into the target's cache and draw the first anchor."""
        prompt = np.array(request.ids, np.int64)
        longest = min(PREFILL_CHUNK, self.backend.prefill_chunk)
        for start in range(0, len(prompt), longest):
            chunk = prompt[start : start + longest]
            self._target(
                TokenBatch(
                    chunk,
                    lengths=np.array([len(chunk)]),
                    past_length=np.array([start]),
                    last_only=True,
                    first_slot=request.slot,
                )
            )
            request.context = np.arange(len(chunk))
        _, next_id = self._accept([request], [0])
        self._append(request, [int(next_id[0])])

    def _target(self, batch: TokenBatch) -> None:
        """A target call; features of the call before that are still needed are held."""
        running = self._running()
        needed = {r.slot: r.context for r in running if r.speculative and len(r.context)}
        if needed:
            self.backend.hold(needed)
        for request in running:
            request.held_rows += len(needed.get(request.slot, ()))
            request.context = request.context[:0]
        rows = int((batch.past_length + batch.lengths.max()).max())
        self.backend.reserve(len(self._slots), rows, 0)
        self.backend.target(batch)

    def _accept(self, requests: list[Request], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
        params = [r.params for r in requests]
        accept_draws = sample_draws = None
        if not all(p.greedy for p in params):
            accept_draws = np.stack([r.uniforms(self.gamma, Purpose.ACCEPT) for r in requests])
            sample_draws = np.concatenate([r.uniforms(1, Purpose.TARGET) for r in requests])
        accepted, next_ids = self.backend.accept(
            AcceptSampling(
                slots=np.array([r.slot for r in requests]),
                verify_length=np.array(lengths, np.int64),
                temperature=np.array([p.target_temperature for p in params], np.float32),
                top_k=np.array([p.top_k for p in params], np.int64),
                top_p=np.array([p.top_p for p in params], np.float32),
                accept_uniform=accept_draws,
                sample_uniform=sample_draws,
            )
        )
        if (next_ids < 0).any():
            position = len(requests[int(next_ids.argmin())].ids)
            raise DraftgraphError(
                f"the target's logits are not finite at position {position}; if the bundle is "
                "fp16, export it with --dtype bf16 or fp32"
            )
        return accepted, next_ids

    def _append(self, request: Request, new: list[int]) -> int:
        """Commit ids up to the first stop and the budget; returns how many were kept."""
        kept = new[: request.budget]
        stop_at = next((i for i, token in enumerate(kept) if token in request.stops), None)
        if stop_at is not None:
            kept = kept[: stop_at + 1]
            request.finish_reason = "stop"
        if request.text is not None:
            text, count = request.text.push(kept, request.params.stop)
            request.new_text += text
            if count is not None:
                kept = kept[:count]
                request.finish_reason = "stop"
        request.ids.extend(kept)
        if request.finish_reason is None and request.budget == 0:
            request.finish_reason = "length"
        return len(kept)

    def _drafting(self, running: list[Request]) -> list[Request]:
        """Those that draft: with one token left there is nothing to draft for."""
        able = [r for r in running if r.speculative and r.budget > 1]
        asked = [r for r in able if r.outlook is not None]
        if self._switch is None or not asked:
            return able
        outlooks = [r.outlook for r in asked if r.outlook is not None]
        if self.costs is not None:
            for request, outlook in zip(asked, outlooks, strict=True):
                outlook.pending_ms = self.costs.context_ms * request.new_context
        chosen = self._switch.choose(outlooks, len(running), len(able) - len(asked))
        drafting = {r.slot for r, yes in zip(asked, chosen, strict=True) if yes}
        return [r for r in able if r.outlook is None or r.slot in drafting]

    def _confidence(self, logits: np.ndarray) -> np.ndarray:
        """[B, γ] calibrated where the bundle has a calibration."""
        if self.calibration is not None:
            return self.calibration.apply(logits)
        return 1 / (1 + np.exp(-logits.astype(np.float64)))

    def _observe(
        self, running: list[Request], drafts: dict[int, Draft], lengths: list[int]
    ) -> None:
        """Tell the switch what this round cost, by the cost table, and what it brought.

        The table instead of a clock: the same request then always drafts in the same rounds.
        """
        if self._switch is None or self.costs is None or not any(r.outlook for r in running):
            return
        count, total = len(running), len(running) + sum(lengths)
        if not self.costs.covers(count, total):
            return  # the schedules verify everything then
        if not drafts:
            self._switch.observe_plain([r.outlook for r in running])
            return
        spent = self.costs.step_ms(count, total, 1 + max(lengths)) + self.costs.draft(len(drafts))
        spent += sum(r.outlook.pending_ms for r in running if r.outlook and r.slot in drafts)
        tokens, survivals = [], []
        for request, length in zip(running, lengths, strict=True):
            drafted = request.slot in drafts
            row = self._survival(request, length) if drafted else None
            survivals.append(row)
            tokens.append(1.0 if row is None else 1 + float(row[:length].sum()))
        self._switch.observe(
            [r.outlook for r in running],
            [r.slot in drafts for r in running],
            tokens,
            survivals,
            spent,
        )

    def _survival(self, request: Request, length: int) -> np.ndarray:
        """[γ] of the last round: calibrated, else what happened and, beyond it, the outlook."""
        if self.calibration is not None and request.survivals:
            return request.survivals[-1]
        accepted = request.rounds[-1].accepted
        seen = np.zeros(self.gamma)
        seen[:accepted] = 1
        if accepted == length and request.outlook is not None:
            known = request.outlook.survival
            seen[length:] = known[length:] / known[length - 1] if length else known
        return seen

    # Slots

    def _running(self) -> list[Request]:
        return [r for r in self._slots if r is not None and r.finish_reason is None]

    def _view(self) -> list[Request | None]:
        """The slots up to the last occupied one: what a batched call covers."""
        last = max(i for i, r in enumerate(self._slots) if r is not None)
        return self._slots[: last + 1]

    def _admit(self) -> list[Request]:
        """Give free slots to waiting requests and prefill them; returns those that end at once."""
        ended = []
        for slot, occupant in enumerate(self._slots):
            if occupant is None and self._waiting:
                request = self._waiting.popleft()
                request.slot = slot
                self._slots[slot] = request
                if self._switch is not None and request.may_stop_drafting:
                    request.outlook = self._switch.outlook(request.params.max_new_tokens)
                self._prefill(request)
                stepped = self._step_seconds + time.perf_counter() - self._step_start
                request.clock.first_token(self.backend.seconds, stepped)
                if request.finish_reason:
                    ended.append(request)
        return ended

    def _leave(self, request: Request) -> None:
        request.clock.ended(self.backend.seconds, self._step_seconds)
        self._slots[request.slot] = None
        self.backend.release(request.slot)

    def _drop(self, request: Request) -> None:
        """Take a request out before its end; the others go on."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._slots:
            self._slots[request.slot] = None
            self.backend.release(request.slot)

    def _open_slots(self, count: int) -> None:
        """Start with `count` empty slots; only when nothing is running."""
        self._waiting.clear()
        self._slots = [None] * count
        self._switch = self._new_switch()
        self.backend.reset(count)

    def _new_switch(self) -> OffSwitch | None:
        """It begins anew whenever the engine was idle, so that the same call does the same."""
        if self.costs is None:
            return None
        known = self.calibration
        return OffSwitch(
            self.costs,
            self.gamma,
            strongest=self._hoped_for,
            weakest=None if known is None or not known.weakest else np.array(known.weakest),
        )

    @property
    def _hoped_for(self) -> np.ndarray | None:
        """[γ] survivals of the calibration's strongest prompts: what a new request may show."""
        known = self.calibration
        return None if known is None or not known.strongest else np.array(known.strongest)

    # The public calls

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculative: bool = True,
        number: int = 0,
    ) -> Request:
        """Queue a request for `step`, which it joins as soon as a slot is free.

        number distinguishes the random numbers of requests that share a seed. A request's tokens
        do not depend on the other requests. Raises `DraftgraphError` as `generate` does.
        """
        request = self._request(prompt, params or SamplingParams(), speculative, number)
        if not self.busy:
            self._switch = self._new_switch()
            if len(self._slots) != self.max_requests:
                self._open_slots(self.max_requests)
        self._waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Is any request waiting or running?"""
        return bool(self._waiting) or any(self._slots)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: bool = True,
    ) -> list[Output]:
        """Decode many prompts, up to `max_requests` at a time; outputs in the order of prompts.

        params: one for all or one for each. Request i draws with number i.
        """
        steps = self.stream_batch(prompts, params, speculative=speculative)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                outputs: list[Output] = end.value
                return outputs

    def stream_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: bool = True,
    ) -> Generator[Sequence[Request], None, list[Output]]:
        """`generate_batch` step by step: yields all requests after every step.

        The generator's return value is what `generate_batch` returns. Whatever is wrong with the
        call is raised at its first step. Requests that go on when it is closed are dropped.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise DraftgraphError(f"{len(params)} params for {len(prompts)} prompts")
        self._refuse_busy()
        requests = [
            self._request(prompt, p, speculative, number)
            for number, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        if not requests:
            return []
        self._open_slots(min(self.max_requests, len(requests)))
        self._waiting.extend(requests)
        try:
            while not all(r.clock.done for r in requests):
                if not self.busy:
                    raise DraftgraphError("the requests of a batch were dropped by another caller")
                self.step()
                yield requests
        finally:
            for request in requests:
                self._drop(request)
        return [self.output(r) for r in requests]

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculative: bool = True
    ) -> Output:
        """Decode one prompt to the end.

        prompt: text, a list of token ids, or chat messages [{"role": ..., "content": ...}].
        speculative=False runs the same target graph one token at a time. Raises `DraftgraphError`
        for an empty prompt, a prompt and budget beyond the bundle's max_seq_len, and ids outside
        the vocabulary.
        """
        request = self._start(prompt, params, speculative)
        while not request.clock.done:
            self.step()
        return self.output(request)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculative: bool = True
    ) -> Generator[str, None, Output]:
        """Decode one prompt, yielding text as it is committed; needs a tokenizer.

        The generator's return value is what `generate` returns.
        """
        self.tokenizer.require()
        request = self._start(prompt, params, speculative)
        try:
            while not request.clock.done:
                request.new_text = ""
                self.step()
                if request.new_text:
                    yield request.new_text
            assert request.text is not None
            if rest := request.text.finish():
                yield rest
            return self.output(request)
        finally:
            if not request.clock.done:  # the consumer stopped early
                self._drop(request)

    def output(self, request: Request) -> Output:
        """The result of a request that has ended."""
        assert request.finish_reason is not None
        if request.text is not None:
            request.text.finish()
        return Output(
            prompt_ids=request.ids[: request.prompt_length],
            token_ids=request.generated,
            text=None if request.text is None else request.text.text,
            finish_reason=request.finish_reason,
            rounds=request.rounds,
            stats=request.clock.stats(request),
        )

    def _start(self, prompt: Prompt, params: SamplingParams | None, speculative: bool) -> Request:
        self._refuse_busy()
        request = self._request(prompt, params or SamplingParams(), speculative, 0)
        self._open_slots(1)
        self._waiting.append(request)
        return request

    def _refuse_busy(self) -> None:
        if self.busy:
            raise DraftgraphError(
                "the engine is decoding requests of add_request; call step until it is no longer "
                "busy, or load another engine"
            )

    def _request(
        self, prompt: Prompt, params: SamplingParams, speculative: bool, number: int
    ) -> Request:
        if not 0 <= number < 2**64:
            raise DraftgraphError(f"number is {number!r}, expected an integer in [0, 2**64)")
        ids = self.tokenizer.encode(prompt)
        vocabulary, longest = self.bundle.target.vocab_size, self.longest
        if not ids:
            raise DraftgraphError("the prompt is empty; give at least one token")
        outside = [i for i in ids if not 0 <= i < vocabulary]
        if outside:
            raise DraftgraphError(
                f"prompt: token id {outside[0]} is outside the vocabulary of {vocabulary}"
            )
        whose, remedy = "the bundle's capacity", "export with a larger --max-seq-len"
        if longest < self.bundle.max_seq_len:
            whose, remedy = "the room that the provider's capacity leaves", "raise capacity"
        if len(ids) >= longest:
            raise DraftgraphError(
                f"the prompt has {len(ids)} tokens, {whose} is {longest}; shorten the prompt or "
                f"{remedy}"
            )
        if len(ids) + params.max_new_tokens > longest:
            raise DraftgraphError(
                f"max_new_tokens is {params.max_new_tokens}, but after a prompt of {len(ids)} "
                f"tokens {whose} of {longest} leaves {longest - len(ids)}; lower it or {remedy}"
            )
        bad = [i for i in params.stop_ids or () if i >= vocabulary]
        if bad:
            raise DraftgraphError(f"stop_ids: {bad[0]} is outside the vocabulary of {vocabulary}")
        if params.stop and not self.tokenizer.available:
            raise DraftgraphError("stop: stop strings need a tokenizer and this bundle has none")
        text = self.tokenizer.stream() if self.tokenizer.available else None
        return Request(
            ids, len(ids), params, params.stops(self.bundle.target), speculative, number, text
        )
