"""The engine: prefill, then rounds of draft → schedule → verify → commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..graphs.errors import DraftgraphError
from .backends import open_backend
from .backends.base import AcceptSampling, Backend, ContextBatch, DraftSampling, TokenBatch
from .bundle import Bundle, load_bundle
from .results import PHASES, FinishReason, Output, Round, Stats
from .sampling import Purpose, SamplingParams, uniforms
from .scheduler import POLICIES, ScheduleInput
from .tokenizer import Prompt, TextStream, Tokenizer

# Longest chunk of a prompt in one target call; bounds the size of intermediate tensors.
PREFILL_CHUNK = 512


@dataclass
class Request:
    """One sequence being decoded. The last id is the anchor: committed, not yet in any cache."""

    ids: list[int]  # prompt and generated
    prompt_length: int
    params: SamplingParams
    stops: frozenset[int]
    number: int = 0  # keys the random numbers together with the seed
    draft_rows: int = 0  # rows in the drafter's cache
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    rounds: list[Round] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def budget(self) -> int:
        """Tokens it may still produce."""
        return self.params.max_new_tokens - (len(self.ids) - self.prompt_length)

    @property
    def draft_temperature(self) -> float:
        params = self.params
        return 0.0 if params.greedy or params.draft_sampling == "greedy" else params.temperature


class Engine:
    """Runs a bundle. Not safe for concurrent calls: one engine decodes one request at a time."""

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self.bundle = bundle
        self.backend = backend
        self.tokenizer = Tokenizer(bundle)
        self.gamma = bundle.draft.block_size

    @classmethod
    def load(
        cls, path: str | Path, provider: str = "cpu", *, verify: bool = True, **options: Any
    ) -> Engine:
        """Open a bundle directory.

        verify: compare every file with its hash first. Options of the cpu provider: threads (size
        of the process-wide pool, default all cores) and markov ("auto": the truncated head where
        the bundle has one, "topk", or "full"). Raises `DraftgraphError`.
        """
        bundle = load_bundle(path, verify=verify)
        return cls(bundle, open_backend(bundle, provider, **options))

    # The algorithm

    def _round(self, request: Request) -> list[int]:
        """Draft, schedule, verify: the ids that this round commits."""
        limit = min(self.gamma, request.budget)
        draft_ids, confidence = self._draft(request)
        length = self._schedule(request, confidence, limit)
        accepted, next_id = self._verify(request, draft_ids[:length])
        return self._commit(request, draft_ids, confidence, length, accepted, next_id)

    def _draft(self, request: Request) -> tuple[np.ndarray, np.ndarray | None]:
        """draft ids [γ] and confidences [γ] of one block."""
        count = len(request.context)
        anchor = np.array([request.ids[-1]])
        self.backend.reserve(
            1, len(request.ids) + self.gamma, request.draft_rows + count + self.gamma
        )
        self.backend.backbone(
            ContextBatch(
                index=request.context[None, :],
                count=np.array([count]),
                past_length=np.array([request.draft_rows]),
                anchor=anchor,
            )
        )
        request.draft_rows += count
        request.context = request.context[:0]
        temperature = np.array([request.draft_temperature], np.float32)
        draws = None
        if not request.params.greedy:
            draws = self._uniforms(request, self.gamma, Purpose.DRAFT)[None, :]
        ids = self.backend.markov(anchor, DraftSampling(temperature, draws))
        logits = self.backend.confidence()
        return ids[0].copy(), None if logits is None else 1 / (1 + np.exp(-logits[0]))

    def _schedule(self, request: Request, confidence: np.ndarray | None, limit: int) -> int:
        """How many drafted tokens to verify, decided before the target runs."""
        start = time.perf_counter()
        schedule = POLICIES[request.params.scheduler](
            ScheduleInput(
                limits=np.array([limit]),
                confidence=None if confidence is None else confidence[None, :],
                threshold=np.array([request.params.threshold]),
                sampled=np.array([request.draft_temperature > 0]),
            )
        )
        self.backend.seconds["schedule"] += time.perf_counter() - start
        return int(schedule.lengths[0])

    def _verify(self, request: Request, draft_ids: np.ndarray) -> tuple[int, int]:
        """Run the target over the anchor and the drafted ids; accepted count and next id."""
        rows = len(request.ids) - 1
        self.backend.reserve(1, rows + 1 + len(draft_ids), 0)
        tokens = np.concatenate([np.array(request.ids[-1:], np.int64), draft_ids])
        self.backend.target(
            TokenBatch(tokens, lengths=np.array([len(tokens)]), past_length=np.array([rows]))
        )
        return self._accept(request, len(draft_ids))

    def _commit(
        self,
        request: Request,
        draft_ids: np.ndarray,
        confidence: np.ndarray | None,
        length: int,
        accepted: int,
        next_id: int,
    ) -> list[int]:
        """Append the accepted run and the next token, cut at the first stop id."""
        new = [*draft_ids[:accepted].tolist(), next_id]
        kept = self._append(request, new)
        # The verified rows that are now committed: the anchor and the accepted run. The next
        # backbone call reads their features; rejected rows are overwritten in every cache.
        request.context = np.arange(accepted + 1)
        request.rounds.append(
            Round(
                start=len(request.ids) - len(kept) - 1,
                draft_ids=draft_ids.tolist(),
                verified=length,
                accepted=min(accepted, len(kept)),
                confidence=None if confidence is None else confidence.tolist(),
                next_id=next_id if len(kept) == len(new) else None,
            )
        )
        return kept

    def _step(self, request: Request) -> list[int]:
        """One token of plain decoding: the same target graph at width 1."""
        _, next_id = self._verify(request, np.zeros(0, np.int64))
        return self._append(request, [next_id])

    def _prefill(self, request: Request, speculative: bool) -> list[int]:
        """Write the prompt into the caches and draw the first anchor."""
        prompt = np.array(request.ids, np.int64)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = prompt[start : start + PREFILL_CHUNK]
            if start and speculative:  # features of the chunk before, before they are replaced
                self._draft_context(request)
            self.backend.reserve(1, start + len(chunk), 0)
            self.backend.target(
                TokenBatch(
                    chunk,
                    lengths=np.array([len(chunk)]),
                    past_length=np.array([start]),
                    last_only=True,
                )
            )
            request.context = np.arange(len(chunk))
        _, next_id = self._accept(request, 0)
        return self._append(request, [next_id])

    def _draft_context(self, request: Request) -> None:
        """Write pending context into the drafter's cache without using the block."""
        count = len(request.context)
        self.backend.reserve(1, 0, request.draft_rows + count + self.gamma)
        self.backend.backbone(
            ContextBatch(
                index=request.context[None, :],
                count=np.array([count]),
                past_length=np.array([request.draft_rows]),
                anchor=np.array([request.ids[0]]),
            )
        )
        request.draft_rows += count

    def _accept(self, request: Request, length: int) -> tuple[int, int]:
        params = request.params
        accept_draws = sample_draws = None
        if not params.greedy:
            accept_draws = self._uniforms(request, self.gamma, Purpose.ACCEPT)[None, :]
            # The token after the accepted run sits at one of the positions that follow the anchor;
            # its number is keyed by the anchor, which moves past it every round.
            sample_draws = self._uniforms(request, 1, Purpose.TARGET)
        accepted, next_id = self.backend.accept(
            AcceptSampling(
                verify_length=np.array([length]),
                temperature=np.array([params.temperature if not params.greedy else 0], np.float32),
                draft_temperature=np.array([request.draft_temperature], np.float32),
                top_k=np.array([params.top_k]),
                top_p=np.array([params.top_p], np.float32),
                accept_uniform=accept_draws,
                sample_uniform=sample_draws,
            )
        )
        if next_id[0] < 0:
            self.backend.reserve(0, 0, 0)  # a masked NaN would still poison later requests
            raise DraftgraphError(
                f"the target's logits are not finite at position {len(request.ids)}; if the bundle "
                "is fp16, export it with --dtype bf16 or fp32"
            )
        return int(accepted[0]), int(next_id[0])

    def _append(self, request: Request, new: list[int]) -> list[int]:
        """Commit ids up to the first stop id and the budget; returns those that were kept."""
        kept = new[: request.budget]
        for i, token in enumerate(kept):
            if token in request.stops:
                kept = kept[: i + 1]
                request.finish_reason = "stop"
                break
        request.ids.extend(kept)
        if request.finish_reason is None and request.budget == 0:
            request.finish_reason = "length"
        return kept

    def _uniforms(self, request: Request, count: int, purpose: Purpose) -> np.ndarray:
        """Draws for the positions after the anchor."""
        return uniforms(request.params.seed, request.number, len(request.ids), count, purpose)

    # The public calls

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculative: bool = True
    ) -> Output:
        """Decode one prompt to the end.

        prompt: text, a list of token ids, or chat messages [{"role": ..., "content": ...}].
        speculative=False runs the same target graph one token at a time. Raises `DraftgraphError`
        for an empty prompt, a prompt and budget beyond the bundle's max_seq_len, and ids outside
        the vocabulary.
        """
        *_, output = self._run(prompt, params or SamplingParams(), speculative)
        assert isinstance(output, Output)
        return output

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculative: bool = True
    ) -> Generator[str, None, Output]:
        """Decode one prompt, yielding text as it is committed; needs a tokenizer.

        The generator's return value is what `generate` returns.
        """
        params = params or SamplingParams()
        self.tokenizer.stream()  # refuse before the first token
        for item in self._run(prompt, params, speculative):
            if isinstance(item, Output):
                return item
            if item:
                yield item
        raise AssertionError("a run ends with its output")

    def _run(
        self, prompt: Prompt, params: SamplingParams, speculative: bool
    ) -> Iterator[str | Output]:
        request = self._admit(prompt, params)
        stream = self.tokenizer.stream() if self.tokenizer.available else None
        if params.stop and stream is None:
            raise DraftgraphError("stop: stop strings need a tokenizer and this bundle has none")
        clock = _Clock(self.backend)

        def committed(ids: list[int]) -> str:
            return "" if stream is None else self._watch(request, stream, ids)

        yield committed(clock.prefill(lambda: self._prefill(request, speculative)))
        while request.finish_reason is None:
            # With one token left there is nothing to draft for.
            step = self._round if speculative and request.budget > 1 else self._step
            yield committed(clock.round(lambda step=step: step(request)))  # type: ignore[misc]
        if stream is not None:
            yield stream.finish()
        yield Output(
            prompt_ids=request.ids[: request.prompt_length],
            token_ids=request.generated,
            text=None if stream is None else stream.text,
            finish_reason=request.finish_reason,
            rounds=request.rounds,
            stats=clock.stats(request),
        )

    def _watch(self, request: Request, stream: TextStream, ids: list[int]) -> str:
        """Decode newly committed ids; a stop string ends the request after its last token."""
        text, count = stream.push(ids, request.params.stop)
        if count is not None:
            surplus = len(ids) - count
            if surplus:
                del request.ids[-surplus:]
                last = request.rounds[-1]  # only a round commits several ids
                request.rounds[-1] = replace(last, accepted=min(last.accepted, count), next_id=None)
            request.finish_reason = "stop"
        return text

    def _admit(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.tokenizer.encode(prompt)
        vocabulary, longest = self.bundle.target.vocab_size, self.bundle.max_seq_len
        if not ids:
            raise DraftgraphError("the prompt is empty; give at least one token")
        outside = [i for i in ids if not 0 <= i < vocabulary]
        if outside:
            raise DraftgraphError(
                f"prompt: token id {outside[0]} is outside the vocabulary of {vocabulary}"
            )
        if len(ids) >= longest:
            raise DraftgraphError(
                f"the prompt has {len(ids)} tokens, the bundle's capacity is {longest}; shorten "
                "the prompt or export with a larger --max-seq-len"
            )
        if len(ids) + params.max_new_tokens > longest:
            raise DraftgraphError(
                f"max_new_tokens is {params.max_new_tokens}, but after a prompt of {len(ids)} "
                f"tokens the bundle's capacity of {longest} leaves {longest - len(ids)}; lower it "
                "or export with a larger --max-seq-len"
            )
        bad = [i for i in params.stop_ids or () if i >= vocabulary]
        if bad:
            raise DraftgraphError(f"stop_ids: {bad[0]} is outside the vocabulary of {vocabulary}")
        return Request(ids, len(ids), params, params.stops(self.bundle.target))


class _Clock:
    """Wall time of one generation, split into device phases and host time."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.start = time.perf_counter()
        self.first_token = self.end = self.start
        self.busy: dict[str, float] = {}
        self.rounds = 0.0

    def prefill(self, run: Callable[[], list[int]]) -> list[int]:
        result = run()
        self.first_token = self.end = time.perf_counter()
        self.busy = dict(self.backend.seconds)
        return result

    def round(self, run: Callable[[], list[int]]) -> list[int]:
        begin = time.perf_counter()
        result = run()
        self.end = time.perf_counter()
        self.rounds += self.end - begin
        return result

    def stats(self, request: Request) -> Stats:
        rounds = request.rounds
        drafted = sum(len(r.draft_ids) for r in rounds)
        verified = sum(r.verified for r in rounds)
        accepted = sum(r.accepted for r in rounds)
        committed = accepted + sum(r.next_id is not None for r in rounds)
        phases = {p: self.backend.seconds.get(p, 0.0) - self.busy.get(p, 0.0) for p in PHASES}
        count = len(request.generated)
        after_first = self.end - self.first_token
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
            ttft_ms=1e3 * (self.first_token - self.start),
            tpot_ms=1e3 * after_first / (count - 1) if count > 1 else None,
            total_ms=1e3 * (self.end - self.start),
            prefill_ms=1e3 * (self.first_token - self.start),
            phase_ms={p: 1e3 * s for p, s in phases.items()},
            host_ms=1e3 * max(0.0, self.rounds - sum(phases.values())),
        )
