"""The TensorRT backend over ONNX Runtime: tiers, staging, holds, chunks, capture and replay.

Everything but the CUDA calls of cuda.py runs here: the goldens' traces, and what the CPU backend
gives for the same requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import GOLDENS, greedy_acceptance, load_golden, run_backbone, run_target
from ort_device import OrtDevice, open_on_cpu

from draftgraph.runtime import (
    DraftgraphError,
    Engine,
    Output,
    SamplingParams,
    load_bundle,
)
from draftgraph.runtime.backends.base import DraftSampling
from draftgraph.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from draftgraph.runtime.backends.tensorrt.backend import TensorRt
from draftgraph.runtime.request import Request

BundleFactory = Callable[..., Path]
GAMMA = 7


def on_cpu(path: Path, max_requests: int = 4, **options: Any) -> tuple[Engine, TensorRt]:
    opened = load_bundle(path)
    backend = open_on_cpu(opened, **options)
    return Engine(opened, backend, max_requests=max_requests), backend


def same(found: list[Output], expected: list[Output]) -> None:
    """Ids, and every round: what was drafted, verified, accepted."""
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids == b.token_ids
        assert a.finish_reason == b.finish_reason
        assert len(a.rounds) == len(b.rounds)
        for x, y in zip(a.rounds, b.rounds, strict=True):
            assert x.draft_ids == y.draft_ids
            assert (x.start, x.verified, x.accepted) == (y.start, y.verified, y.accepted)
            if x.confidence is not None:
                np.testing.assert_allclose(x.confidence, y.confidence, rtol=0, atol=1e-4)


def mixed(count: int, tokens: int = 24) -> list[SamplingParams]:
    """Greedy and sampled requests, with and without filters."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {},
        {"temperature": 1.0, "top_k": 10, "draft_sampling": "greedy"},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 0.7, "scheduler": "threshold", "threshold": 0.3},
    ]
    return [
        SamplingParams(max_new_tokens=tokens + i, seed=i, stop_ids=(), **kinds[i % len(kinds)])
        for i in range(count)
    ]


# Results


@pytest.mark.parametrize("name", GOLDENS)
def test_the_goldens_token_for_token(name: str, bundle: BundleFactory) -> None:
    traces = load_golden(name)
    engine, backend = on_cpu(bundle(name), markov="full")
    params = SamplingParams(
        max_new_tokens=traces.max_new_tokens,
        scheduler="threshold" if traces.confidence_threshold else "full",
        threshold=traces.confidence_threshold,
    )
    for i, prompt in enumerate(traces.prompts):
        output = engine.generate(prompt["prompt"], params)
        assert output.prompt_ids + output.token_ids == prompt["speculative_greedy"]
        for found, reference in zip(output.rounds, traces.comparable_rounds(i), strict=False):
            assert found.draft_ids == reference["draft_tokens"]
            assert found.verified == reference["proposed"]
            assert found.accepted == reference["accepted"]
        plain = engine.generate(prompt["prompt"], params, speculative=False)
        assert plain.prompt_ids + plain.token_ids == prompt["plain_greedy"]
    assert backend.graphs.replayed["draft"] > backend.graphs.eager["draft"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-vanilla", {}),
        ("qwen3-vanilla", {"cuda_graphs": False}),
        ("qwen3-vanilla", {"prefill_len": 11, "max_batch": 3}),  # prompts in many chunks
        ("qwen3-rnn", {"refuse": ("backbone",)}),
    ],
)
def test_draws_are_those_of_the_cpu_backend(
    name: str, options: dict[str, Any], bundle: BundleFactory
) -> None:
    """Seven requests over the slots, joining and leaving, as ragged as can be."""
    path = bundle(name, markov_top_k=20)
    prompts = [p["prompt"] for p in load_golden(name).prompts]
    prompts = [prompts[i % len(prompts)][: 130 - 9 * i] for i in range(7)]
    engine, _ = on_cpu(path, options.get("max_batch", 4), **options)
    reference = Engine.load(path, max_requests=engine.max_requests)
    params = mixed(7)
    same(engine.generate_batch(prompts, params), reference.generate_batch(prompts, params))
    same(
        engine.generate_batch(prompts[::-1], params),
        reference.generate_batch(prompts[::-1], params),
    )


@pytest.mark.parametrize("hold_rows", [3, 64])
def test_requests_that_skip_drafts_keep_their_features(
    hold_rows: int, bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held on the device; what would not fit goes into the drafter's cache ahead of time."""
    drafting = Engine._drafting

    def seldom(self: Engine, running: list[Request]) -> list[Request]:
        """Each request in a third of the rounds, a few at a time."""
        turn = [(len(r.generated) + 5 * r.number) // 6 % 3 == 0 for r in running]
        return drafting(self, [r for r, now in zip(running, turn, strict=True) if now])

    monkeypatch.setattr(Engine, "_drafting", seldom)
    path = bundle("qwen3-vanilla", markov_top_k=20)
    prompts = [p["prompt"][:70] for p in load_golden("qwen3-vanilla").prompts]
    params = mixed(len(prompts), tokens=60)
    engine, backend = on_cpu(path)
    backend.spec = type(backend.spec)(**{**vars(backend.spec), "hold_rows": hold_rows})
    found = engine.generate_batch(prompts, params)
    same(found, Engine.load(path, max_requests=4).generate_batch(prompts, params))
    assert sum(len(o.rounds) for o in found) > 10
    assert backend.graphs.eager["feed"] > 0


def test_every_tensor_of_a_round(bundle: BundleFactory) -> None:
    """Intermediate tensors without their padding, by name, at any time."""
    opened = load_bundle(bundle("qwen3-vanilla"))
    ids = load_golden("qwen3-vanilla").prompts[0]["prompt"][:8]
    backends = [OnnxRuntimeCpu(opened, markov="full"), open_on_cpu(opened, markov="full")]
    for backend in backends:
        backend.reserve(3, 60, 60)
        run_target(backend, [ids, ids[:3], ids[2:7]], [0, 0, 0])
    names = ["logits", "features"]
    for name in names:
        found, expected = backends[1].read(name), backends[0].read(name)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    for backend in backends:
        run_backbone(backend, [[0, 1], [8], []], [0, 0, 0], [5, 6, 7])
    for name in ("hidden", "base_logits"):
        found, expected = backends[1].read(name), backends[0].read(name)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    greedy = DraftSampling(np.zeros(3, np.float32), None)
    sampled = DraftSampling(np.ones(3, np.float32), np.full((3, GAMMA), 0.5, np.float32))
    for sampling in (greedy, sampled, greedy):  # again over the same backbone call
        picks = [b.markov(np.array([5, 6, 7]), sampling).copy() for b in backends]
        np.testing.assert_array_equal(*picks)
        np.testing.assert_allclose(
            *(b.confidence() for b in backends),
            rtol=0,
            atol=1e-4,  # type: ignore[misc]
        )
    with pytest.raises(DraftgraphError, match=r"no tensor 'nothing', only \['accepted'"):
        backends[1].read("nothing")


# Graphs


def test_graphs_are_captured_once_and_replayed(bundle: BundleFactory) -> None:
    path = bundle("qwen3-vanilla", markov_top_k=20)
    engine, backend = on_cpu(path)
    prompt = load_golden("qwen3-vanilla").prompts[0]["prompt"]
    params = SamplingParams(max_new_tokens=40, stop_ids=())
    first = engine.generate(prompt, params)
    report = backend.graphs
    rounds = len(first.rounds)
    phases = [key[0] for key in report.captured]
    # One draft and one verification; acceptance of the prompt's token, and of a round's.
    assert sorted(phases) == ["accept", "accept", "draft", "target"]
    assert report.replayed == {"draft": rounds - 1, "target": rounds - 1, "accept": rounds - 1}
    assert not report.refused
    draft = next(key for key in report.captured if key[0] == "draft")
    assert [engine_key[0] for engine_key in draft[1:]] == [
        "backbone",
        "markov_topk_greedy",
        "confidence",
    ]
    device = backend.device
    assert isinstance(device, OrtDevice)
    assert device.saved == 1  # what was compiled for the new shapes
    again = engine.generate(prompt, params)
    assert again.token_ids == first.token_ids
    assert len(report.captured) == 4 and device.saved == 1
    assert report.replayed["draft"] == 2 * rounds - 1
    assert backend.seconds["backbone"] > 0 and backend.seconds["accept"] > 0


def test_a_refused_capture_is_reported_and_runs_eagerly(bundle: BundleFactory) -> None:
    path = bundle("qwen3-vanilla", markov_top_k=20)
    engine, backend = on_cpu(path, refuse=("markov_topk_greedy",))
    prompt = load_golden("qwen3-vanilla").prompts[0]["prompt"]
    params = SamplingParams(max_new_tokens=40, stop_ids=())
    output = engine.generate(prompt, params)
    assert output.token_ids == Engine.load(path).generate(prompt, params).token_ids
    ((key, reason),) = backend.graphs.refused.items()
    assert key[0] == "draft" and reason == "markov_topk_greedy cannot be captured"
    assert backend.graphs.eager["draft"] == len(output.rounds)  # tried once, counted each time
    assert backend.graphs.replayed["draft"] == 0 < backend.graphs.replayed["target"]


def test_a_batch_needs_few_graphs(bundle: BundleFactory) -> None:
    path = bundle("qwen3-vanilla", markov_top_k=20)
    engine, backend = on_cpu(path)
    prompts = [p["prompt"][:40] for p in load_golden("qwen3-vanilla").prompts]
    params = [
        SamplingParams(max_new_tokens=30 + 7 * i, stop_ids=(), scheduler="threshold", threshold=0.4)
        for i in range(12)
    ]
    engine.generate_batch([prompts[i % len(prompts)] for i in range(12)], params)
    report = backend.graphs
    phases = [key[0] for key in report.captured]
    counts = [phases.count(phase) for phase in ("draft", "target", "accept")]
    assert all(n <= limit for n, limit in zip(counts, (4, 8, 10), strict=True)), counts
    assert sum(report.replayed.values()) > 4 * len(report.captured)


# Memory and slots


def test_caches_share_one_address_and_slots_have_their_own(bundle: BundleFactory) -> None:
    opened = load_bundle(bundle("qwen3-vanilla"))
    backend = open_on_cpu(opened)
    backend.reset(3)  # kept for four, the tier
    run_target(backend, [[1, 2], [3], [4]], [0, 0, 0])
    backend.read("logits")
    device = backend.device
    assert isinstance(device, OrtDevice)
    (call,) = device.calls
    assert call.inputs["past_key.0"].shape[0] == 4
    for name, place in call.outputs.items():
        if name.startswith("present"):
            assert place == call.inputs[name.replace("present", "past")]
    caches = {n: t.address for n, t in call.inputs.items() if n.startswith("past_") and "." in n}
    assert len(set(caches.values())) == len(caches)


def test_other_numbers_of_requests_start_with_zeroed_caches(bundle: BundleFactory) -> None:
    """What one request left, a NaN in the worst case, does not reach the next."""
    engine, backend = on_cpu(bundle("qwen3-vanilla", markov_top_k=20))
    prompt = load_golden("qwen3-vanilla").prompts[0]["prompt"]
    params = SamplingParams(max_new_tokens=12, stop_ids=())
    expected = engine.generate(prompt, params).token_ids
    device = backend.device
    assert isinstance(device, OrtDevice)
    for tensors in backend._caches.values():
        for address in tensors.values():
            device.memory[address].view(np.float32)[:] = np.nan
    with pytest.raises(DraftgraphError, match="not finite"):
        engine.generate(prompt, params)
    assert engine.generate(prompt, params).token_ids == expected


def test_more_slots_than_before_drop_the_graphs(bundle: BundleFactory) -> None:
    engine, backend = on_cpu(bundle("qwen3-vanilla", markov_top_k=20))
    prompt = load_golden("qwen3-vanilla").prompts[0]["prompt"]
    params = SamplingParams(max_new_tokens=12, stop_ids=())
    expected = engine.generate(prompt, params)
    assert backend._captured
    together = engine.generate_batch([prompt] * 3, params)
    assert [o.token_ids for o in together] == [expected.token_ids] * 3
    assert engine.generate(prompt, params).token_ids == expected.token_ids
    captured = len(backend.graphs.captured)
    engine.generate_batch([prompt] * 3, params)
    assert engine.generate(prompt, params).token_ids == expected.token_ids
    assert len(backend.graphs.captured) == captured  # none of those for fewer was lost


# Limits


def test_a_request_may_fill_what_was_promised(bundle: BundleFactory) -> None:
    path = bundle("qwen3-vanilla", markov_top_k=20)
    engine, backend = on_cpu(path, capacity=96, prefill_len=64)
    prompt = load_golden("qwen3-vanilla").prompts[0]["prompt"][:30]
    longest = 96 - 2 * GAMMA
    assert backend.longest == engine.longest == longest
    params = SamplingParams(max_new_tokens=longest - 30, stop_ids=())
    output = engine.generate(prompt, params)
    assert len(output.token_ids) == longest - 30
    assert output.token_ids == Engine.load(path).generate(prompt, params).token_ids
    with pytest.raises(DraftgraphError, match=r"capacity leaves of 82 leaves 52.*raise capacity"):
        engine.generate(prompt, SamplingParams(max_new_tokens=longest - 29))
    with pytest.raises(DraftgraphError, match=r"has 90 tokens, the room that .* raise capacity"):
        engine.generate(prompt * 3, params)


def test_past_the_last_tier_the_exact_width_is_tried(bundle: BundleFactory) -> None:
    """Padding never refuses what fits, and never lets through what does not."""
    backend = open_on_cpu(load_bundle(bundle("qwen3-vanilla")), capacity=96, prefill_len=16)
    backend.reserve(1, 96, 96)
    run_target(backend, [[1, 2, 3]], [92])  # with γ + 1 columns it would end at 100
    run_target(backend, [[1, 2, 3]], [93])
    assert backend.graphs.captured == []
    with pytest.raises(DraftgraphError, match="target: 97 cache rows needed"):
        run_target(backend, [[1, 2, 3]], [94])
    run_backbone(backend, [[0, 1]], [96 - GAMMA - 2], [3])
    with pytest.raises(DraftgraphError, match="backbone: 97 cache rows needed"):
        run_backbone(backend, [[0, 1]], [96 - GAMMA - 1], [3])
    with pytest.raises(DraftgraphError, match="target: 97 cache rows needed"):
        backend.reserve(1, 97, 0)


def test_a_full_slot_is_not_taken_in_as_padding(bundle: BundleFactory) -> None:
    """Slot 3 has no room for γ + 1 columns, so a call of slots 0 to 2 stays one of three."""
    opened = load_bundle(bundle("qwen3-vanilla"))
    backend = open_on_cpu(opened, capacity=96, prefill_len=16)
    backend.reserve(4, 96, 96)
    run_target(backend, [[1], [2], [3], [4]], [5, 5, 5, 94])
    run_target(backend, [[1, 5], [2, 6], [3, 7]], [6, 6, 6])
    logits = backend.read("logits")
    device = backend.device
    assert isinstance(device, OrtDevice)
    assert [c.inputs["past_length"].shape for c in device.calls] == [(4,), (3,)]
    cpu = OnnxRuntimeCpu(opened)
    cpu.reserve(4, 96, 96)
    run_target(cpu, [[1], [2], [3], [4]], [5, 5, 5, 94])
    run_target(cpu, [[1, 5], [2, 6], [3, 7]], [6, 6, 6])
    np.testing.assert_allclose(logits, cpu.read("logits"), rtol=0, atol=1e-4)


def test_too_many_requests(bundle: BundleFactory) -> None:
    engine, backend = on_cpu(bundle("qwen3-vanilla", markov_top_k=20), max_requests=5)
    with pytest.raises(DraftgraphError, match=r"5 requests.*max_requests=4.*--max-batch 5"):
        engine.generate_batch([[1, 2]] * 5)
    engine.generate([1, 2], SamplingParams(max_new_tokens=4))
    with pytest.raises(DraftgraphError, match=r"slots 0 to 1 in a call, 1 are reserved"):
        run_target(backend, [[1], [2]], [0, 0])


def test_memory_that_does_not_suffice(bundle: BundleFactory) -> None:
    opened = load_bundle(bundle("qwen3-vanilla"))
    with pytest.raises(DraftgraphError, match=r"1 requests need .* MiB"):
        open_on_cpu(opened, memory_budget=1 << 16)
    budget = open_on_cpu(opened).plan.device_bytes(2)
    backend = open_on_cpu(opened, memory_budget=budget)
    backend.reset(2)
    with pytest.raises(DraftgraphError, match=r"4 requests need .* take fewer requests"):
        backend.reset(3)
    backend.reset(2)  # what there was is still there
    run_target(backend, [[1], [2]], [0, 0])
    assert greedy_acceptance([0, 0]).slots.tolist() == [0, 1]
    accepted, _ = backend.accept(greedy_acceptance([0, 0]))
    assert accepted.tolist() == [0, 0]


def test_markov_options(bundle: BundleFactory) -> None:
    opened = load_bundle(bundle("qwen3-vanilla"))
    with pytest.raises(DraftgraphError, match="no truncated Markov graph"):
        open_on_cpu(opened, markov="topk")
    with pytest.raises(DraftgraphError, match="markov is 'best'"):
        open_on_cpu(opened, markov="best")
    assert open_on_cpu(opened).fingerprint()["backend"] == "tensorrt-native"
