"""Requests in one batch do not touch each other: each gives what it gives alone.

At the level of the backend, where batches are ragged: other lengths, other verify widths, other
sampling parameters, other amounts of new context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from helpers import load_golden, run_backbone, run_target

from draftgraph.runtime import load_bundle
from draftgraph.runtime.backends.base import AcceptSampling, DraftSampling
from draftgraph.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from draftgraph.runtime.sampling import Purpose, uniforms

GAMMA = 7


@dataclass(frozen=True)
class Case:
    """One request's prompt and parameters; it verifies `widths[i]` drafted ids in round i."""

    prompt: list[int]
    widths: tuple[int, ...]
    temperature: float = 0.0
    draft_temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Trace:
    """What a request saw in each round."""

    ids: list[int]
    drafts: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    confidence: list[np.ndarray] = field(default_factory=list)


def decode(backend: OnnxRuntimeCpu, cases: list[Case]) -> list[Trace]:
    """Lockstep rounds of ragged requests."""
    r, rounds = len(cases), len(cases[0].widths)
    traces = [Trace(list(c.prompt)) for c in cases]
    longest = max(len(c.prompt) for c in cases)
    backend.reserve(r, longest + (rounds + 1) * 8, longest + (rounds + 2) * 8)

    run_target(backend, [c.prompt[:-1] for c in cases], [0] * r)
    starts = np.cumsum([0] + [len(c.prompt) - 1 for c in cases])
    rows = [list(range(starts[i], starts[i + 1])) for i in range(r)]
    drafted = [0] * r
    sampled = any(c.temperature for c in cases)
    for j in range(rounds):

        def draw(purpose: Purpose, count: int = GAMMA) -> np.ndarray:
            return np.stack(
                [
                    uniforms(c.seed, 0, len(t.ids), count, purpose)
                    for c, t in zip(cases, traces, strict=True)
                ]
            )

        anchors = [t.ids[-1] for t in traces]
        run_backbone(backend, rows, drafted, anchors)
        drafted = [d + len(x) for d, x in zip(drafted, rows, strict=True)]
        temperature = np.array([c.draft_temperature for c in cases], np.float32)
        drafts = backend.markov(
            np.array(anchors),
            DraftSampling(temperature, draw(Purpose.DRAFT) if sampled else None),
        ).copy()
        confidence = backend.confidence()
        assert confidence is not None
        widths = [c.widths[j] for c in cases]
        chunks = [[a, *d[:w].tolist()] for a, d, w in zip(anchors, drafts, widths, strict=True)]
        run_target(backend, chunks, [len(t.ids) - 1 for t in traces])
        accepted, next_id = backend.accept(
            AcceptSampling(
                slots=np.arange(len(cases)),
                verify_length=np.array(widths),
                temperature=np.array([c.temperature for c in cases], np.float32),
                top_k=np.array([c.top_k for c in cases]),
                top_p=np.array([c.top_p for c in cases], np.float32),
                accept_uniform=draw(Purpose.ACCEPT) if sampled else None,
                sample_uniform=draw(Purpose.TARGET, 1)[:, 0] if sampled else None,
            )
        )
        logits = backend.read("logits")
        starts = np.cumsum([0] + [w + 1 for w in widths])
        rows = []
        for i, t in enumerate(traces):
            n = int(accepted[i])
            t.drafts.append(drafts[i].tolist())
            t.accepted.append(n)
            t.confidence.append(confidence[i].copy())
            t.logits.append(logits[starts[i] : starts[i + 1]])
            t.ids += [*drafts[i, :n].tolist(), int(next_id[i])]
            rows.append(list(range(starts[i], starts[i] + n + 1)))
    return traces


def cases(temperature: float) -> list[Case]:
    texts = [p["prompt"] for p in load_golden("qwen3-vanilla").prompts]
    prompts = [texts[0], texts[1], texts[3][:90], texts[3][-6:]]
    widths = [(7, 7, 7, 7, 7), (7, 0, 3, 1, 7), (1, 2, 7, 0, 5), (0, 7, 0, 7, 2)]
    if not temperature:
        return [Case(p, w) for p, w in zip(prompts, widths, strict=True)]
    return [
        Case(prompts[0], widths[0], 0.8, 0.8, seed=1),
        Case(prompts[1], widths[1], 0.0, 0.0),
        Case(prompts[2], widths[2], 1.2, 0.0, top_k=20, seed=2),
        Case(prompts[3], widths[3], 1.0, 1.0, top_p=0.9, seed=3),
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["qwen3-vanilla", "qwen3-rnn", "llama-vanilla-threshold"])
def test_batch_of_four_equals_each_alone(
    name: str, temperature: float, bundle: Callable[..., Path]
) -> None:
    opened = load_bundle(bundle(name))
    requests = cases(temperature)
    together = decode(OnnxRuntimeCpu(opened), requests)
    assert sum(map(sum, (t.accepted for t in together))) > 0
    for case, found in zip(requests, together, strict=True):
        (alone,) = decode(OnnxRuntimeCpu(opened), [case])
        assert found.ids == alone.ids
        assert found.drafts == alone.drafts
        assert found.accepted == alone.accepted
        for a, b in zip(found.confidence, alone.confidence, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
        for a, b in zip(found.logits, alone.logits, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)


def test_order_of_requests_does_not_matter(bundle: Callable[..., Path]) -> None:
    opened = load_bundle(bundle("qwen3-vanilla"))
    requests = cases(1.0)
    forward = decode(OnnxRuntimeCpu(opened), requests)
    backward = decode(OnnxRuntimeCpu(opened), requests[::-1])
    assert [t.ids for t in forward] == [t.ids for t in backward[::-1]]


def test_writes_past_the_capacity_are_refused(bundle: Callable[..., Path]) -> None:
    """ONNX Runtime would clamp the write and overwrite valid rows."""
    backend = OnnxRuntimeCpu(load_bundle(bundle("qwen3-vanilla")))
    backend.reserve(1, 1, 1)
    capacity = backend.capacity[0]
    with pytest.raises(ValueError, match=f"target: {capacity + 1} cache rows needed"):
        run_target(backend, [[1, 2]], [capacity - 1])
    run_target(backend, [[1, 2]], [capacity - 2])
    with pytest.raises(ValueError, match=r"backbone: .* cache rows needed"):
        run_backbone(backend, [[0, 1]], [capacity - GAMMA], [3])
    run_backbone(backend, [[0]], [capacity - GAMMA - 1], [3])
