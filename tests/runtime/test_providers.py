"""The providers of ONNX Runtime.

No GPU is needed: the code that a GPU runs is driven here on the CPU provider, through OrtValues,
byte addresses, staging copies, a frozen cache length and graph ids, and must give the golden ids.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from helpers import GOLDENS, Golden, load_golden, run_cli

from draftgraph.runtime import DraftgraphError, Engine, SamplingParams, load_bundle
from draftgraph.runtime.backends import available
from draftgraph.runtime.backends.base import ContextBatch, TokenBatch
from draftgraph.runtime.backends.onnxruntime import backend as backend_module
from draftgraph.runtime.backends.onnxruntime import caches as caches_module
from draftgraph.runtime.backends.onnxruntime import features as features_module
from draftgraph.runtime.backends.onnxruntime import providers
from draftgraph.runtime.backends.onnxruntime.backend import OnnxRuntime, hosted_inputs
from draftgraph.runtime.backends.onnxruntime.caches import Caches
from draftgraph.runtime.backends.onnxruntime.features import FeatureRows
from draftgraph.runtime.backends.onnxruntime.graphs import Worker
from draftgraph.runtime.backends.onnxruntime.memory import (
    Block,
    DeviceMemory,
    HostMemory,
    Memory,
    Staging,
    Tensor,
    nbytes,
)
from draftgraph.runtime.backends.onnxruntime.placement import placement, shape_nodes
from draftgraph.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from draftgraph.runtime.machine import Gpu
from draftgraph.runtime.profiles import Limits
from draftgraph.tools.bench_steps import measure_steps
from draftgraph.tools.profile import profile

BundleFactory = Callable[..., Path]

NAME = "qwen3-vanilla"
CPU = providers.PROVIDERS["cpu"]
# The CPU provider treated as a device: OrtValues instead of numpy, and ids for CUDA graphs.
DEVICE = dataclasses.replace(CPU, host=False, graph_id="gpu_graph_id")
FIXED = dataclasses.replace(DEVICE, fixed_capacity=True)


def device_engine(path: Path, provider: providers.Provider = DEVICE, **options: Any) -> Engine:
    requests = options.get("max_requests", 8)
    return Engine(
        load_bundle(path),
        OnnxRuntime(load_bundle(path), provider, **options),
        max_requests=requests,
    )


def greedy(golden: Golden) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=golden.max_new_tokens,
        scheduler="threshold",
        threshold=golden.confidence_threshold,
    )


# Decoding through device memory


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("provider", [DEVICE, FIXED], ids=["growing", "fixed"])
def test_golden_ids(name: str, provider: providers.Provider, bundle: BundleFactory) -> None:
    traces = load_golden(name)
    capacity = {"capacity": 300, "max_requests": 2} if provider.fixed_capacity else {}
    engine = device_engine(bundle(name), provider, **capacity)
    for prompt in traces.prompts:
        output = engine.generate(prompt["prompt"], greedy(traces))
        assert output.prompt_ids + output.token_ids == prompt["speculative_greedy"]
        plain = engine.generate(prompt["prompt"], greedy(traces), speculative=False)
        assert plain.prompt_ids + plain.token_ids == prompt["plain_greedy"]
    expected = 300 if capacity else 512  # the last run did not draft
    assert engine.backend.capacity[0] == expected


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("provider", [DEVICE, FIXED], ids=["growing", "fixed"])
def test_half_precision(provider: providers.Provider, dtype: str, bundle: BundleFactory) -> None:
    """Caches of two-byte elements; temperatures, so that all graphs run."""
    path = bundle(NAME, dtype=dtype)
    engine = device_engine(path, provider, capacity=160 if provider.fixed_capacity else None)
    params = SamplingParams(max_new_tokens=40, temperature=0.8, top_k=20, seed=3)
    for prompt in ([5, 6, 7], [9, 8]):
        expected = Engine.load(path).generate(prompt, params)
        found = engine.generate(prompt, params)
        assert found.token_ids == expected.token_ids
        assert [r.draft_ids for r in found.rounds] == [r.draft_ids for r in expected.rounds]


@pytest.mark.parametrize("provider", [DEVICE, FIXED], ids=["growing", "fixed"])
def test_batches(provider: providers.Provider, bundle: BundleFactory) -> None:
    """Slots, held features, requests that draft in some rounds only, and growth in mid-request."""
    path = bundle(NAME)
    golden = load_golden(NAME)
    prompts = [p["prompt"] for p in golden.prompts] + [[5, 6, 7]] * 3
    params = [
        SamplingParams(max_new_tokens=n, temperature=t, seed=i, stop_ids=())
        for i, (n, t) in enumerate(zip([90, 30, 60, 160, 20, 5, 1], [0, 0.7] * 4, strict=False))
    ][: len(prompts)]
    options = {"capacity": 320} if provider.fixed_capacity else {}
    engine = device_engine(path, provider, max_requests=3, **options)
    found = engine.generate_batch(prompts, params)
    expected = Engine.load(path, max_requests=3).generate_batch(prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]


def test_a_long_prompt_joins_a_request_near_the_end_of_the_capacity(bundle: BundleFactory) -> None:
    """The prompt's features are written to its own slot, not in a call as wide as the prompt."""
    path, prompt = bundle(NAME), load_golden(NAME).prompts[3]["prompt"]
    gamma = 7
    longest = len(prompt) + 60
    engine = device_engine(path, FIXED, capacity=longest + 2 * gamma, max_requests=2)
    assert engine.longest == longest
    params = SamplingParams(max_new_tokens=60, stop_ids=())
    first = engine.add_request(prompt, params)
    while len(first.generated) < 40:
        engine.step()
    second = engine.add_request(prompt, params)
    while engine.busy:
        engine.step()
    expected = Engine.load(path).generate(prompt, params).token_ids
    assert engine.output(first).token_ids == engine.output(second).token_ids == expected
    with pytest.raises(DraftgraphError, match=f"provider's capacity leaves of {longest}.*raise"):
        engine.generate(prompt, SamplingParams(max_new_tokens=61))


def test_chunks_of_wide_context(bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of several prefill calls reaches the drafter in several calls as well."""
    monkeypatch.setattr(backend_module, "PREFILL_CHUNK", 16)
    monkeypatch.setattr("draftgraph.runtime.engine.PREFILL_CHUNK", 16)
    golden = load_golden(NAME)
    engine = device_engine(bundle(NAME), FIXED, capacity=300)
    widths = []
    original = OnnxRuntime._backbone

    def recorded(self: OnnxRuntime, context: ContextBatch, index: np.ndarray) -> None:
        widths.append(int(context.counts.max()))
        original(self, context, index)

    monkeypatch.setattr(OnnxRuntime, "_backbone", recorded)
    output = engine.generate(golden.prompts[3]["prompt"], greedy(golden))
    assert output.prompt_ids + output.token_ids == golden.prompts[3]["speculative_greedy"]
    assert widths[:9] == [16] * 8 + [2]  # 130 rows
    assert max(widths[9:]) <= 8


def test_inputs_that_a_session_wants_on_the_host(bundle: BundleFactory) -> None:
    golden = load_golden(NAME)
    engine = device_engine(bundle(NAME))
    backend = engine.backend
    assert isinstance(backend, OnnxRuntime)
    session = backend._sessions["target"]
    assert hosted_inputs(session, "cpu") == frozenset()
    named = hosted_inputs(session, "cuda")  # this session has no device: it wants everything here
    assert {"cell_token", "past_key.0"} <= named
    backend._hosted |= {"target": frozenset({"cell_token", "logits_index"})}
    output = engine.generate(golden.prompts[0]["prompt"], greedy(golden))
    assert output.prompt_ids + output.token_ids == golden.prompts[0]["speculative_greedy"]
    assert backend.report()["cuda_graphs"]["captured"] > 0
    target = [b for key, b in backend._bindings.items() if key[0] == "target"]
    assert target and not any(b.options for b in target)  # host values would be frozen in a graph


def test_shapes_of_a_graph_share_a_binding(bundle: BundleFactory) -> None:
    """In turns, with other calls in between; every call must read its own inputs."""
    engine = Engine.load(bundle(NAME))
    backend = engine.backend
    assert isinstance(backend, OnnxRuntime)
    ids = np.array(load_golden(NAME).prompts[0]["prompt"][:6])
    backend.reserve(1, 16, 16)

    def logits(start: int, count: int) -> np.ndarray:
        where = np.array([start])
        backend.target(TokenBatch(ids[start : start + count], np.array([count]), where))
        return backend.read("logits")

    whole = logits(0, 6)
    for start, count in ((1, 2), (3, 1), (1, 2), (2, 3), (3, 1), (0, 6)):
        np.testing.assert_allclose(
            logits(start, count), whole[start : start + count], rtol=0, atol=1e-4
        )
    targets = [b for key, b in backend._bindings.items() if key[0] == "target"]
    assert len(targets) == 4 and len({id(b.io) for b in targets}) == 1


def test_measuring_within_a_fixed_capacity(bundle: BundleFactory) -> None:
    """The benchmark's single steps and the cost table, at the longest context that fits."""
    engine = device_engine(bundle(NAME), FIXED, capacity=64, max_requests=2)
    assert engine.longest == 50
    steps = measure_steps(engine, [5, 6, 7])
    assert steps["past_length"] == 42 and list(steps["target_ms"]) == ["1", "2", "4", "8"]
    table = profile(engine, batches=(1, 2), context=42, repeat=3)
    assert {r for r, _ in table.cells} == {1, 2} and table.fingerprint["capacity"] == 64
    with pytest.raises(DraftgraphError, match="expected 1 to 42"):
        profile(engine, batches=(1,), context=43, repeat=3)


# Memory


def memory(kind: str, bundle: BundleFactory) -> Memory:
    if kind == "host":
        return HostMemory()
    path = load_bundle(bundle(NAME)).graph_path("accept_greedy")
    backend_module.use_one_thread_pool(None)
    session = providers.open_session(path, CPU, providers.session_options(None), {}, 0)
    return DeviceMemory("cpu", 0, session)


def fill(memory: Memory, shape: tuple[int, ...], dtype: str = "fp32") -> tuple[Tensor, np.ndarray]:
    """A tensor of distinct values, sent the way inputs are."""
    staging = Staging(memory, {"odd": ((3,), "int64"), "x": (shape, dtype)})
    values = np.arange(np.prod(shape)).reshape(shape).astype(staging.arrays["x"].dtype)
    staging.arrays["x"][...] = values
    staging.send()
    return staging.tensors["x"], values


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int64"])
def test_memory(kind: str, dtype: str, bundle: BundleFactory) -> None:
    where = memory(kind, bundle)
    old, values = fill(where, (2, 3, 4, 5), dtype)
    np.testing.assert_array_equal(where.read(old), values)
    np.testing.assert_array_equal(where.read(old.rows(1, 1)), values[1:])
    shape = (2, 3, 7, 5)
    new = Tensor(where.allocate(nbytes(shape, dtype)), shape, dtype)
    assert not where.read(new).any()
    if isinstance(where, DeviceMemory):
        where.extend(old, new)
        np.testing.assert_array_equal(where.read(new)[:, :, :4], values)
        assert not where.read(new)[:, :, 4:].any()


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_caches(kind: str, dtype: str, bundle: BundleFactory) -> None:
    """Rows stay what they were while their number grows, in place or not."""
    where = memory(kind, bundle)
    caches = Caches(where, ["a", "b", "c"], heads=2, size=5, dtype=dtype, longest=20)
    values: dict[str, np.ndarray] = {}
    held = 0
    for capacity in (3, 4, 20, 50):
        caches.grow(3, capacity)
        assert caches.capacity == capacity
        spans = sorted((t.address, t.address + t.nbytes) for t in caches.tensors.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        for i, (name, tensor) in enumerate(caches.tensors.items()):
            assert tensor.shape == (3, 2, capacity, 5)
            if name in values:
                np.testing.assert_array_equal(where.read(tensor)[:, :, :held], values[name])
            new = np.arange(where.read(tensor).size).reshape(tensor.shape) % 251 + i
            data = Tensor(where.allocate(tensor.nbytes), tensor.shape, dtype)
            where.read(data)[...] = new  # the fake device is this process
            where.copy(data, tensor)
            values[name] = where.read(tensor).copy()
        held = capacity
    caches.clear(forget=True)
    assert (caches.capacity, caches.tensors) == (0, {})
    caches.grow(3, 4)
    assert not any(where.read(t).any() for t in caches.tensors.values())


def test_memory_of_caches_is_used_again_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    where = HostMemory()
    caches = Caches(where, ["a", "b"], heads=2, size=4, dtype="fp32", longest=64)
    caches.grow(1, 8)
    (block,) = {t.block for t in caches.tensors.values()}
    caches.grow(1, 64)  # as long as any request
    caches.clear()
    caches.grow(2, 16)
    assert {t.block for t in caches.tensors.values()} == {block}
    monkeypatch.setattr(caches_module, "KEEP_BYTES", 0)
    caches.clear()
    caches.grow(1, 8)
    assert {t.block for t in caches.tensors.values()} != {block}


def test_caches_take_what_they_need_where_no_more_can_be_reserved() -> None:
    class Tight(HostMemory):
        def allocate(self, size: int) -> Block:
            if size > 4096:
                raise MemoryError
            return super().allocate(size)

    caches = Caches(Tight(), ["a"], heads=1, size=4, dtype="fp32", longest=1 << 20)
    caches.grow(1, 200)
    assert caches.tensors["a"].shape == (1, 1, 200, 4)
    with pytest.raises(MemoryError):
        caches.grow(1, 300)


def test_large_device_memory_is_cleared(
    bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftgraph.runtime.backends.onnxruntime import memory as memory_module

    monkeypatch.setattr(memory_module, "_CLEAR_BYTES", 1000)
    where = memory("device", bundle)
    assert isinstance(where, DeviceMemory)
    for _ in range(3):  # memory of a freed block comes back with its old content
        block = where.allocate(4321)
        content = where.read(Tensor(block, (4320 // 8,), "int64"))
        assert not content.any()
        content[...] = -1
        del block, content


def test_memory_that_does_not_exist(bundle: BundleFactory) -> None:
    where = memory("device", bundle)
    with pytest.raises(DraftgraphError, match=r"cannot allocate .* MiB .*max_requests"):
        where.allocate(1 << 60)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_feature_rows(kind: str, bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "KEEP_BYTES", 0)  # no room is reserved
    where = memory(kind, bundle)
    features = FeatureRows(where, 2, most=None)

    def target_call(count: int, value: float) -> bool:
        moved = features.place(count)
        new, _ = fill(where, (count, 2))
        where.read(features.current)[...] = value  # a session writes here; on the CPU we may
        del new
        return moved

    def context(slot: int, count: int, index: list[int]) -> np.ndarray:
        batch = ContextBatch(
            counts=np.array([count]),
            index=np.array(index, np.int64),
            past_length=np.zeros(1, np.int64),
            slots=np.array([slot]),
            anchor=np.zeros(1, np.int64),
            first_slot=slot,
        )
        (rows,) = features.take(batch)
        return where.read(features.all)[rows][:, 0]

    def hold(*slots: tuple[int, list[int]]) -> bool:
        return features.hold({slot: np.array(rows) for slot, rows in slots})

    assert not target_call(4, 1.0)
    assert hold((0, [1, 2]))  # there was no room behind the front
    moved = features.all.address
    assert not target_call(1, 2.0)
    assert not hold((1, [0]))
    assert not target_call(3, 3.0)
    assert features.current.address == features.all.address == moved  # bindings stay valid
    hold((0, [2]))
    assert target_call(600, 4.0)  # more than the front: held rows keep their content
    assert context(1, 2, [599]).tolist() == [2.0, 4.0]
    size = features.all.shape[0]
    where.read(features.current)[:5, 0] = range(10, 15)
    assert not hold((2, [0]), (1, [1, 2]), (3, [4]))  # one of them where slot 1 had its row
    assert context(0, 3, []).tolist() == [1.0, 1.0, 3.0]
    assert context(0, 0, []).tolist() == []
    assert context(2, 1, []).tolist() == [10.0]
    assert context(1, 2, []).tolist() == [11.0, 12.0]
    features.release(3)
    assert not target_call(512, 5.0)
    for _ in range(50):  # released rows are used again
        hold((0, [*range(200)]), (1, [7]), (2, [*range(220)]))
        for slot in range(3):
            features.release(slot)
    assert features.all.shape[0] == size


def test_held_rows_survive_any_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plain list of values by slot; the reserved rows run out in between."""
    monkeypatch.setattr(features_module, "KEEP_BYTES", 700 * 8)
    where = HostMemory()
    features = FeatureRows(where, 2, most=None)
    assert features.all.shape[0] == 700
    rng = np.random.default_rng(0)
    held: dict[int, list[float]] = {}
    count, value = 0, 0.0
    for _ in range(400):
        match rng.choice(["place", "hold", "take", "release"], p=[0.3, 0.5, 0.1, 0.1]):
            case "place":
                count = int(rng.choice([1, 8, 40, 600, 900], p=[0.4, 0.3, 0.2, 0.05, 0.05]))
                features.place(count)
                where.read(features.current)[:, 0] = value + np.arange(count)
                start, value = value, value + count
            case "hold" if count:
                rows = np.sort(rng.permutation(count)[: rng.integers(1, min(count, 60) + 1)])
                slot = int(rng.integers(0, 6))
                features.hold({slot: rows})
                held.setdefault(slot, []).extend((start + rows).tolist())
            case "release":
                slot = int(rng.integers(0, 6))
                features.release(slot)
                held.pop(slot, None)
            case "take" if held:
                slot = int(rng.choice(list(held)))
                kept = held.pop(slot)
                batch = ContextBatch(
                    counts=np.array([len(kept)]),
                    index=np.zeros(0, np.int64),
                    past_length=np.zeros(1, np.int64),
                    slots=np.array([slot]),
                    anchor=np.zeros(1, np.int64),
                    first_slot=slot,
                )
                (found,) = features.take(batch)
                assert where.read(features.all)[found, 0].tolist() == kept
    assert features.all.shape[0] > 700
    assert int(features._taken.sum()) == features._front + sum(map(len, held.values()))
    assert features._taken[: features._next].all()


def test_a_wide_call_copies_only_what_is_held() -> None:
    """The rows reserved behind it keep their number."""
    features = FeatureRows(HostMemory(), 2, most=None)
    rows = features.all.shape[0]
    features.place(8)
    features.hold({0: np.arange(3)})
    assert features.place(600)
    assert features.all.shape[0] == rows
    assert not features.too_large_to_keep


def test_feature_rows_of_engines_are_limited() -> None:
    features = FeatureRows(HostMemory(), 2, most=600)
    assert not features.place(512)
    assert features.hold({0: np.arange(80)})
    with pytest.raises(DraftgraphError, match="602 rows needed, the engines take 600"):
        features.hold({1: np.arange(10)})
    assert not features.hold({1: np.arange(8)})


# CUDA graphs


def test_graph_ids(bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape runs eagerly once, is captured when it comes again, then replayed."""
    engine = device_engine(bundle(NAME))
    backend = engine.backend
    assert isinstance(backend, OnnxRuntime) and backend._graphs is not None
    params = SamplingParams(max_new_tokens=60, stop_ids=())
    engine.generate([5, 6, 7], params)
    first = dict(backend.report()["cuda_graphs"])
    assert first["eager"] > 0 and first["captured"] > 0 and first["replayed"] > first["eager"]
    engine.generate([5, 6, 7], params)
    second = backend.report()["cuda_graphs"]
    kept = list(backend._bindings.values())
    captured = [b for b in kept if b.options is not None]
    ids = [b.options.get_run_config_entry("gpu_graph_id") for b in captured]
    assert len(set(ids)) == len(ids) == backend._graphs.captured == second["captured"]
    assert second["eager"] - first["eager"] <= len(kept)
    # Dropping the bindings gives their graphs back, and decoding goes on.
    monkeypatch.setattr(backend_module, "_MOST_BINDINGS", 3)
    found = engine.generate([5, 6, 7, 8], params).token_ids
    assert backend._graphs.captured <= len(backend._bindings) <= 3
    assert found == Engine.load(bundle(NAME)).generate([5, 6, 7, 8], params).token_ids


def test_graphs_outlive_a_request_whose_caches_grew(
    bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        backend_module, "capacity_step", lambda rows, finest=64: -(-rows // 16) * 16
    )
    engine = device_engine(bundle(NAME))
    params = SamplingParams(max_new_tokens=60, stop_ids=())
    for _ in range(3):  # the second meets buffers that grew during the first
        before = engine.backend.report()["cuda_graphs"]
        engine.generate([5, 6, 7], params)
    after = engine.backend.report()["cuda_graphs"]
    assert engine.backend.capacity[0] > 16
    assert after["eager"] == before["eager"] and after["replayed"] > before["replayed"]


def test_no_graphs_on_request(bundle: BundleFactory) -> None:
    engine = device_engine(bundle(NAME), cuda_graphs=False)
    assert engine.backend.report()["cuda_graphs"] is None
    with pytest.raises(DraftgraphError, match="provider cpu has no CUDA graphs"):
        Engine.load(bundle(NAME), cuda_graphs=True)


@pytest.mark.parametrize("asked", [None, True])
def test_a_graph_that_cannot_be_captured(
    asked: bool | None, bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime refuses such a session when it is made; it runs without CUDA graphs then."""
    original = providers.open_session

    def refusing(
        path: Path, p: Any, session: Any, options: dict[str, str], device: int
    ) -> ort.InferenceSession:
        if options.pop("graphs", None) and path.name == "backbone.onnx":
            raise DraftgraphError("This session cannot use the graph capture feature")
        return original(path, p, session, options, device)

    monkeypatch.setattr(backend_module, "open_session", refusing)
    monkeypatch.setattr(
        backend_module,
        "provider_options",
        lambda *a, cuda_graphs, **k: {"graphs": "1"} if cuda_graphs else {},
    )
    if asked:
        with pytest.raises(DraftgraphError, match="graph capture"):
            device_engine(bundle(NAME), cuda_graphs=True)
        return
    engine = device_engine(bundle(NAME))
    engine.generate([5, 6, 7], SamplingParams(max_new_tokens=40))
    report = engine.backend.report()
    assert list(report["without_cuda_graphs"]) == ["backbone"]
    bindings = engine.backend._bindings  # type: ignore[attr-defined]
    captured = {key[0] for key, binding in bindings.items() if binding.options is not None}
    assert "backbone" not in captured and "target" in captured


def test_the_worker_hands_errors_over_and_keeps_its_thread() -> None:
    import threading

    worker = Worker()
    assert worker(threading.get_ident) == worker(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        worker(lambda: 1 / 0)


# Placement


@pytest.mark.parametrize("graph", ["target", "backbone", "markov", "accept_filtered"])
def test_shape_nodes(graph: str, bundle: BundleFactory) -> None:
    """The short reader of ONNX files against the onnx package."""
    path = load_bundle(bundle(NAME)).graph_path(graph)
    model = onnx.load(path, load_external_data=False).graph
    constants = {i.name for i in model.initializer}
    shaped: set[str] = set()
    expected = set()
    for node in model.node:
        inputs = {i for i in node.input if i}
        if node.op_type == "Constant":
            constants |= set(node.output)
        elif node.op_type == "Shape" or (inputs <= constants | shaped and inputs & shaped):
            shaped |= set(node.output)
            expected.add(node.name)
    assert shape_nodes(path) == expected
    assert bool(expected) == (graph in ("target", "backbone"))


def test_placement(bundle: BundleFactory) -> None:
    opened = load_bundle(bundle(NAME))
    backend = OnnxRuntimeCpu(opened, strict_placement=True)
    placed = backend.placements["target"]
    assert placed.elsewhere == placed.shapes == ()
    assert list(placed.nodes) == ["CPUExecutionProvider"] and placed.nodes[placed.provider] > 50
    # Asked for another provider, everything is in the wrong place; shapes belong on the host.
    path, session = opened.graph_path("target"), backend._sessions["target"]
    wrong = placement("target", path, "CUDAExecutionProvider", session)
    assert wrong.nodes == placed.nodes
    assert len(wrong.shapes) + len(wrong.elsewhere) == sum(placed.nodes.values())
    assert any(text.startswith("Shape ") for text in wrong.shapes)
    assert any(text.startswith("Attention ") for text in wrong.elsewhere)
    assert not any(text.startswith("Shape ") for text in wrong.elsewhere)


def test_strict_placement(
    bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def elsewhere(graph: str, path: Path, wanted: str, session: Any) -> Any:
        return placement(graph, path, "CUDAExecutionProvider", session)

    monkeypatch.setattr(backend_module, "placement", elsewhere)
    opened = load_bundle(bundle(NAME))
    with pytest.raises(DraftgraphError, match=r"target\.onnx: not on .*Attention .* on CPUExec"):
        OnnxRuntimeCpu(opened, strict_placement=True)
    OnnxRuntimeCpu(opened)
    assert "target.onnx: not on" in caplog.text and "every step waits" in caplog.text


# Options


def limits() -> Limits:
    return Limits(capacity=128, max_batch=2, prefill_len=32)


def test_profile_strings(bundle: BundleFactory) -> None:
    opened = load_bundle(bundle(NAME, dtype="fp16"))
    options = providers.profile_options("trt_profile_", opened, "target", limits())
    assert list(options) == [f"trt_profile_{w}_shapes" for w in ("min", "opt", "max")]
    shapes = [dict(part.split(":") for part in text.split(",")) for text in options.values()]
    names = [t.name for t in opened.graphs["target"].inputs]
    assert all(list(s) == names for s in shapes)  # every input, the same in all three
    assert [s["input_ids"] for s in shapes] == ["1", "16", "32"]
    assert [s["cell_token"] for s in shapes] == ["1x1", "2x8", "2x32"]
    assert [s["logits_index"] for s in shapes] == ["1", "16", "16"]
    kv, d = opened.target.decoder.num_kv_heads, opened.target.decoder.head_dim
    assert [s["past_key.0"] for s in shapes] == [f"{r}x{kv}x128x{d}" for r in (1, 2, 2)]
    backbone = providers.session_profile(opened, "backbone", limits())
    assert backbone.axes["N"] == (1, 16, 2 * 3 * 128)  # features of whole prompts
    assert backbone.axes["P"] == (1, 16, 32)


@pytest.mark.parametrize("name", [n for n in providers.PROVIDERS if n != "cpu"])
def test_provider_options(name: str, bundle: BundleFactory, tmp_path: Path) -> None:
    provider = providers.PROVIDERS[name]
    opened = load_bundle(bundle(NAME, dtype="fp16"))
    made = providers.provider_options(
        provider,
        opened,
        "target",
        device_id=1,
        cuda_graphs=True,
        limits=limits() if provider.fixed_capacity else None,
        cache=tmp_path if provider.fixed_capacity else None,
    )
    expected = {
        "cuda": {"device_id": "1", "enable_cuda_graph": "1", "use_tf32": "0"},
        "tensorrt": {
            "device_id": "1",
            "trt_cuda_graph_enable": "1",
            "trt_engine_cache_enable": "1",
        },
        "nv-tensorrt-rtx": {"enable_cuda_graph": "1", "nv_runtime_cache_path": str(tmp_path)},
    }[name]
    assert expected.items() <= made.items()
    assert sum("profile" in key for key in made) == (3 if provider.fixed_capacity else 0)
    assert all(isinstance(v, str) for v in made.values())
    assert not any("fp16" in k or "int8" in k for k in made)  # graphs are typed as they are


def test_the_cache_length_is_frozen(bundle: BundleFactory) -> None:
    backend = OnnxRuntime(load_bundle(bundle(NAME)), FIXED, capacity=96, max_requests=2)
    for graph in ("target", "backbone"):
        shapes = {i.name: i.shape for i in backend._sessions[graph].get_inputs()}
        assert shapes["past_key.0"][2] == 96
    backend.reserve(2, 5, 5)
    assert backend.capacity == (96, 96)
    with pytest.raises(DraftgraphError, match=r"3 requests at a time.*max_requests 2"):
        backend.reserve(3, 5, 5)


def test_fingerprint(bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = load_bundle(bundle(NAME))
    plain = OnnxRuntimeCpu(opened).fingerprint()
    assert set(plain) == {"device", "backend", "backend_version", "graphs", "dtype", "threads"}
    assert plain["backend"] == "onnxruntime-cpu"
    fixed = OnnxRuntime(opened, FIXED, capacity=96)
    assert fixed.fingerprint() == plain | {"capacity": 96}
    # What a machine with a GPU would answer; only the names are made up.
    monkeypatch.setattr(backend_module, "gpu", lambda index: Gpu("Card", "9.0", "580.1", 1 << 30))
    fixed.provider = dataclasses.replace(FIXED, name="cuda", device="cuda")
    found = fixed.fingerprint()
    assert found["device"] == "Card, driver 580.1" and found["backend"] == "onnxruntime-cuda"
    assert found["cuda_graphs"] is True


# Refusals


def refusal(path: Path, provider: str, **options: Any) -> str:
    with pytest.raises(DraftgraphError) as caught:
        Engine.load(path, provider, **options)
    return str(caught.value)


def test_unknown_names(bundle: BundleFactory) -> None:
    assert "expected one of ['cpu', 'cuda'" in refusal(bundle(NAME), "gpu")
    with pytest.raises(DraftgraphError, match="expected one of"):
        available("gpu")
    assert "unknown option" in refusal(bundle(NAME), "cpu", colour="red")


def test_options_of_other_providers(bundle: BundleFactory) -> None:
    assert "caches of provider cpu grow" in refusal(bundle(NAME), "cpu", capacity=512)
    assert "device_id is 1" in refusal(bundle(NAME), "cpu", device_id=1)


@pytest.mark.parametrize("provider", ["tensorrt", "nv-tensorrt-rtx"])
def test_what_tensorrt_cannot_run(provider: str, bundle: BundleFactory) -> None:
    """Said before anything is looked for on the machine."""
    half = bundle(NAME, dtype="fp16")
    assert "an fp32 bundle" in refusal(bundle(NAME), provider, capacity=512)
    assert "no capacity given" in refusal(half, provider)
    assert "capacity is 20" in refusal(half, provider, capacity=20)


def test_bf16_on_an_old_gpu(bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "gpu", lambda index: Gpu("T4", "7.5", "580.1", 1 << 30))
    cuda = dataclasses.replace(providers.PROVIDERS["cuda"], problem=lambda device_id: None)
    with pytest.raises(DraftgraphError, match=r"T4 .*7\.5.* has no bf16 arithmetic"):
        OnnxRuntime(load_bundle(bundle(NAME, dtype="bf16")), cuda)


def test_no_silent_fallback(bundle: BundleFactory) -> None:
    """ONNX Runtime only warns when a provider cannot start, and runs on the CPU."""
    cuda = dataclasses.replace(providers.PROVIDERS["cuda"], problem=lambda device_id: None)
    with pytest.raises(DraftgraphError, match="could not start CUDAExecutionProvider"):
        OnnxRuntime(load_bundle(bundle(NAME)), cuda)


needs_no_gpu = pytest.mark.skipif(
    available("cuda") is None, reason="this machine can run the CUDA provider"
)


@needs_no_gpu
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_what_is_missing_for_cuda(provider: str, bundle: BundleFactory) -> None:
    reason = available(provider)
    assert reason is not None
    if providers.PROVIDERS[provider].ep in ort.get_available_providers():
        assert "no NVIDIA GPU" in reason or "library of CUDA" in reason
    else:
        assert f"has no {providers.PROVIDERS[provider].ep}" in reason
        assert "onnxruntime-gpu" in reason and "pip uninstall onnxruntime" in reason
    half = bundle(NAME, dtype="fp16")
    capacity = {"capacity": 512} if provider == "tensorrt" else {}
    assert reason in refusal(half, provider, **capacity)
    assert available("cpu") is None


@needs_no_gpu
def test_what_is_missing_for_the_rtx_plugin() -> None:
    """In a process of its own: registering loads the plugin's libraries for good."""
    code = "from draftgraph.runtime.backends import available; print(available('nv-tensorrt-rtx'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if importlib.util.find_spec(providers.RTX_PACKAGE) is None:
        assert "is not installed" in result.stdout and "draftgraph[tensorrt-rtx]" in result.stdout
    else:
        assert "no NVIDIA GPU" in result.stdout or "onnxruntime-gpu" in result.stdout


# The command line


def test_commands(bundle: BundleFactory, tmp_path: Path) -> None:
    path = bundle(NAME)
    arguments = ("generate", path, "--prompt-ids", "5,6,7", "--max-new-tokens", 5)
    assert run_cli(*arguments, "--provider", "cpu", "--strict-placement").exit_code == 0
    for extra, message in (
        (("--provider", "gpu"), "expected one of"),
        (("--capacity", 512), "caches of provider cpu grow"),
        (("--cuda-graphs",), "has no CUDA graphs"),
        (("--device", 1), "device_id is 1"),
        (("--provider", "tensorrt", "--capacity", 512), "an fp32 bundle"),
    ):
        result = run_cli(*arguments, *extra)
        assert result.exit_code == 2 and message in result.stderr
    assert run_cli(*arguments, "--no-cuda-graphs").exit_code == 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "text"}\n')
    for command in (
        ("bench", "--prompts", prompts),
        ("profile",),
        ("calibrate", "--prompts", prompts),
        ("sweep", "--prompts", prompts, "--schedule", "full"),
    ):
        name, *rest = command
        result = run_cli(name, path, *rest, "--provider", "nowhere")
        assert result.exit_code == 2 and "expected one of ['cpu', 'cuda'" in result.stderr
