"""Measures the cost table of a bundle on this machine."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..graphs.errors import DraftgraphError
from ..runtime import Engine
from ..runtime.backends.base import AcceptSampling, ContextBatch, DraftSampling, TokenBatch
from ..runtime.costs import CostTable

WARM_UP = 2


def profile(
    engine: Engine,
    *,
    batches: Sequence[int],
    context: int = 256,
    repeat: int = 11,
    report: Callable[[str], None] = lambda message: None,
) -> CostTable:
    """Median times of target steps and drafts for every (requests, tokens) cell.

    batches: numbers of requests R. Cells of a batch go from R tokens to R · (γ + 1), in steps of
    about R / 4. Half of the passes spread the tokens evenly over the requests; their medians are
    the cells. Half give them to as few as possible: attention runs on the padded view, so such a
    step costs more, and by how much for each cell of padding is fitted for each R. context:
    committed rows of every request. All sessions are alive and take turns, as in decoding: a pass
    runs each cell and one draft.
    """
    gamma, longest = engine.gamma, engine.longest
    if not batches or any(r < 1 for r in batches):
        raise DraftgraphError(f"--batch is {list(batches)}, expected numbers of at least 1")
    if repeat < 3:
        raise DraftgraphError(f"--repeat is {repeat}, expected at least 3")
    if not 1 <= context <= longest - gamma - 1:
        raise DraftgraphError(
            f"--context is {context}, expected 1 to {longest - gamma - 1} (the bundle's capacity "
            "less one block)"
        )
    cells: dict[tuple[int, int], float] = {}
    samples: dict[tuple[int, int], int] = {}
    drafts: dict[int, float] = {}
    pads: dict[int, float] = {}
    report(f"a prompt of {context} tokens into the drafter's cache, {repeat} passes")
    prompt_ms = _measure_context(engine, context, repeat)
    for requests in sorted(set(batches)):
        steps = _steps(requests, gamma)
        report(f"{requests} requests: {len(steps)} widths, {repeat} passes")
        times, drafting = _measure(engine, requests, steps, context, repeat)
        for tokens in steps:
            even = times[tokens, False] + (times[tokens, True] if requests == 1 else [])
            cells[requests, tokens] = round(statistics.median(even), 3)
            samples[requests, tokens] = len(even)
        if requests > 1:
            pads[requests] = round(_padding(requests, gamma, times), 5)
        drafts[requests] = round(statistics.median(drafting), 3)
    engine.backend.reset(1)
    context_ms = round(prompt_ms / context, 5)
    return CostTable(cells, drafts, engine.backend.fingerprint(), samples, context_ms, pads)


def _steps(requests: int, gamma: int) -> list[int]:
    """Token counts to measure: every one for a few requests, coarser for many."""
    step = max(1, requests // 4)
    widest = requests * (gamma + 1)
    return sorted({*range(requests, widest, step), widest})


def split(requests: int, tokens: int, gamma: int, uneven: bool) -> np.ndarray:
    """Widths [R] of a step: as equal as can be, or γ + 1 for the first ones and 1 for the last."""
    if uneven:
        before = gamma * np.arange(requests)
        return 1 + np.clip(tokens - requests - before, 0, gamma)
    widths = np.full(requests, tokens // requests)
    widths[: tokens % requests] += 1
    return widths


def _padding(requests: int, gamma: int, times: Mapping[tuple[int, bool], Sequence[float]]) -> float:
    """ms of a padded cell: least squares over the steps that were measured both ways."""
    cells, longer = [], []
    for tokens in {n for n, _ in times}:
        even, uneven = (split(requests, tokens, gamma, kind).max() for kind in (False, True))
        cells.append(requests * (uneven - even))
        medians = [statistics.median(times[tokens, kind]) for kind in (False, True)]
        longer.append(medians[1] - medians[0])
    return max(0.0, float(np.dot(cells, longer) / np.dot(cells, cells)))


def _measure_context(engine: Engine, context: int, repeat: int) -> float:
    """Median ms by which a draft takes longer that first writes `context` tokens into the cache."""
    backend, gamma = engine.backend, engine.gamma
    backend.reset(1)
    words = np.arange(context) % engine.bundle.target.vocab_size
    backend.reserve(1, context, context + gamma + 1)
    chunk = min(context, backend.prefill_chunk)
    for start in range(0, context, chunk):
        part = words[start : start + chunk]
        backend.target(TokenBatch(part, np.array([len(part)]), np.array([start]), last_only=True))
    longer = []
    for i in range(WARM_UP + repeat):
        times = []
        for count in (1, len(part)):
            start_time = time.perf_counter()
            backend.backbone(
                ContextBatch(
                    counts=np.array([count]),
                    index=np.arange(count),
                    past_length=np.zeros(1, np.int64),
                    slots=np.zeros(1, np.int64),
                    anchor=words[:1],
                )
            )
            times.append(1e3 * (time.perf_counter() - start_time))
        if i >= WARM_UP:
            longer.append((times[1] - times[0]) * context / len(part))
    return max(0.0, statistics.median(longer))


def _measure(
    engine: Engine, requests: int, steps: Sequence[int], context: int, repeat: int
) -> tuple[dict[tuple[int, bool], list[float]], list[float]]:
    """ms of target and acceptance by number of tokens and kind of split, and ms of drafts."""
    backend, gamma = engine.backend, engine.gamma
    backend.reset(requests)
    past = np.full(requests, context)
    rng = np.random.default_rng(0)
    words = rng.integers(0, engine.bundle.target.vocab_size, requests * (gamma + 1))
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    drafting: list[float] = []
    everyone = np.arange(requests)
    zeros = np.zeros(requests, np.float32)
    backend.reserve(requests, context + gamma + 1, context + 2 * gamma + 1)
    for i in range(WARM_UP + repeat):
        turn, uneven = i % len(steps), i % 2 == 1
        for tokens in (*steps[turn:], *steps[:turn]):
            widths = split(requests, tokens, gamma, uneven)
            start = time.perf_counter()
            backend.target(TokenBatch(words[:tokens], widths, past))
            backend.accept(
                AcceptSampling(
                    slots=everyone,
                    verify_length=np.zeros(requests, np.int64),
                    temperature=zeros,
                    top_k=np.zeros(requests, np.int64),
                    top_p=np.ones(requests, np.float32),
                    accept_uniform=None,
                    sample_uniform=None,
                )
            )
            if i >= WARM_UP:
                times[tokens, uneven].append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        backend.backbone(
            ContextBatch(
                counts=np.ones(requests, np.int64),
                index=everyone,
                past_length=past,
                slots=everyone,
                anchor=words[:requests],
            )
        )
        backend.markov(words[:requests], DraftSampling(zeros, None))
        backend.confidence()
        if i >= WARM_UP:
            drafting.append(1e3 * (time.perf_counter() - start))
    return times, drafting
