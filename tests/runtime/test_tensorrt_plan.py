"""What the TensorRT backend decides before anything runs: tiers, padding, profiles, memory.

Padding is proved harmless on ONNX Runtime: the same call at a larger shape leaves the same results
and the same rows in the caches.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ort_device import open_on_ort, spec_of

from draftgraph.export.engines.network import parse_graph
from draftgraph.runtime import Bundle, DraftgraphError, load_bundle
from draftgraph.runtime.backends import open_backend
from draftgraph.runtime.backends import tensorrt as package
from draftgraph.runtime.backends.base import AcceptSampling, ContextBatch, TokenBatch
from draftgraph.runtime.backends.calls import (
    GraphCall,
    accept_call,
    backbone_call,
    runs,
    target_call,
)
from draftgraph.runtime.backends.tensorrt.backend import engines_needed
from draftgraph.runtime.backends.tensorrt.engines import (
    check_aliases,
    check_profiles,
    choose_engines,
)
from draftgraph.runtime.backends.tensorrt.library import LogKeeper
from draftgraph.runtime.backends.tensorrt.plan import (
    EngineSpec,
    call_axes,
    check_room,
    check_slot_stride,
    choose_profile,
    layout,
    pad_call,
    plan_memory,
    request_tiers,
    tier,
    token_tier,
    width_tiers,
)
from draftgraph.runtime.engine_cache import EngineKey, Sidecar, graph_hashes
from draftgraph.runtime.machine import Gpu, gpu
from draftgraph.runtime.profiles import HOLD_ROWS, Limits

BundleFactory = Callable[..., Path]
GAMMA = 7
LIMITS = Limits(128, max_batch=4, prefill_len=32)
CAPACITY = 64


@pytest.fixture(scope="module")
def opened(bundle: BundleFactory) -> Bundle:
    return load_bundle(bundle("qwen3-vanilla", markov_top_k=20))


@pytest.fixture(scope="module")
def spec(opened: Bundle) -> EngineSpec:
    return spec_of(opened, LIMITS)


# Tiers


@pytest.mark.parametrize(
    ("largest", "tiers"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_request_tiers(largest: int, tiers: tuple[int, ...]) -> None:
    assert request_tiers(largest) == tiers
    assert width_tiers(largest - 1) == tiers


def test_every_round_has_a_tier_and_few_shapes_cover_all() -> None:
    shapes = set()
    for requests in range(1, 9):
        r = tier(requests, request_tiers(8))
        for widest in range(1, GAMMA + 2):
            for tokens in range(widest, requests * widest + 1):
                n, width = token_tier(r, tokens, widest, GAMMA)
                assert n >= tokens and width >= widest
                shapes.add((r, n, width))
    # Of 1, 2, 4 and 8 requests: plain decoding, and 4 numbers of tokens at width γ + 1 (3 of one).
    assert len(shapes) == 4 * 5 - 1
    assert token_tier(4, 4, 1, GAMMA) == (4, 1)  # plain decoding pays for one column
    assert token_tier(4, 11, 8, GAMMA) == (16, 8)


# Padding


class Caches:
    """Random caches of a decoder, and one run of a graph over them."""

    def __init__(self, bundle: Bundle, graph: str, slots: int, seed: int) -> None:
        self.session = open_on_ort(bundle.graph_path(graph, cpu=True))
        self.info = bundle.graphs[graph]
        rng = np.random.default_rng(seed)
        self.arrays = {
            t.name: rng.standard_normal((slots, *t.shape[1:2], CAPACITY, *t.shape[3:]), np.float32)
            for t in self.info.inputs
            if t.name.startswith("past_") and len(t.shape) == 4
        }

    def run(self, call: GraphCall, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name; the caches of the first R slots are replaced by what was written."""
        r = len(call.feeds["past_length"]) if self.arrays else 0
        past = {name: array[:r] for name, array in self.arrays.items()}
        names = [t.name for t in self.info.outputs]
        values = self.session.run(names, {**call.feeds, **tensors, **past})
        results = dict(zip(names, values, strict=True))
        for name, array in self.arrays.items():
            array[:r] = results.pop(name.replace("past", "present"))
        return results


def close(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("lengths", "past"),
    [([8], [5]), ([1, 3], [9, 0]), ([8, 0, 2], [20, 3, 11]), ([1, 1, 1], [4, 5, 6])],
)
def test_a_padded_target_call_has_the_same_effect(
    opened: Bundle, lengths: list[int], past: list[int]
) -> None:
    """Logits and features of every token, and every row that counts, of every slot."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 90, sum(lengths))
    call, _ = target_call(TokenBatch(ids, np.array(lengths), np.array(past)))
    plain = Caches(opened, "target", 4, seed=2)
    expected = plain.run(call, {})
    inputs = opened.graphs["target"].inputs
    r = len(lengths)
    for requests in sorted({r, tier(r, request_tiers(4))}):
        idle = np.array([13, 17, 19])[: requests - r]
        for n in {len(ids), *(requests * w for w in width_tiers(GAMMA))}:
            for width in {max(lengths), GAMMA + 1}:
                if n < len(ids):
                    continue
                sizes = {"R": requests, "S": width, "N": n, "M": n}
                padded = pad_call(call, inputs, sizes, idle)
                caches = Caches(opened, "target", 4, seed=2)
                found = caches.run(padded, {})
                assert found["logits"].shape[0] == n
                for name in ("logits", "features"):
                    close(found[name][: len(ids)], expected[name])
                used = [*(p + k for p, k in zip(past, lengths, strict=True)), *idle]
                for name, cache in caches.arrays.items():
                    for slot, rows in enumerate(used):
                        close(cache[slot, :, :rows], plain.arrays[name][slot, :, :rows])


@pytest.mark.parametrize("slots", [[0], [0, 2], [1, 2]])
def test_a_padded_backbone_call_has_the_same_effect(opened: Bundle, slots: list[int]) -> None:
    rng = np.random.default_rng(3)
    counts = np.array([2, 0, 5])
    features = rng.standard_normal((20, *opened.graphs["target"].outputs[1].shape[1:]), np.float32)
    context = ContextBatch(
        counts=counts,
        index=np.array([4, 5, 9, 10, 11, 12, 13]),
        past_length=np.array([6, 14, 3]),
        slots=np.array(slots),
        anchor=np.array([7, 8])[: len(slots)],
    )
    call = backbone_call(context, context.index)
    plain = Caches(opened, "backbone", 4, seed=4)
    expected = plain.run(call, {"features": features})
    inputs = opened.graphs["backbone"].inputs
    for requests, width, rows, blocks in [
        (3, 5, 7, 2),
        (3, 8, 24, 2),
        (4, 8, 32, 2),
        (4, 8, 32, 4),
    ]:
        sizes = {"R": requests, "X": width, "P": rows, "B": blocks}
        padded = pad_call(call, inputs, sizes, np.array([21])[: requests - 3])
        caches = Caches(opened, "backbone", 4, seed=4)
        found = caches.run(padded, {"features": features})
        for name in ("hidden", "base_logits"):
            assert len(found[name]) == blocks
            close(found[name][: len(slots)], expected[name])
            for copy in found[name][len(slots) :]:
                close(copy, expected[name][-1])
        # The context counts for later rounds; the block is overwritten by them.
        used = [8, 14, 8, 21][:requests]
        for name, cache in caches.arrays.items():
            for slot, rows_used in enumerate(used):
                close(cache[slot, :, :rows_used], plain.arrays[name][slot, :, :rows_used])


@pytest.mark.parametrize("graph", ["accept_greedy", "accept_sample", "accept_filtered"])
def test_padded_acceptance_decides_the_same(opened: Bundle, graph: str) -> None:
    """Requests, blocks and logit rows padded; ids and lengths are exactly equal."""
    rng = np.random.default_rng(5)
    v, lengths = opened.target.vocab_size, np.array([8, 3, 1])
    batch = TokenBatch(rng.integers(0, 90, 12), lengths, np.zeros(3, np.int64))
    _, rows = target_call(batch)
    sampled = graph != "accept_greedy"
    filtered = graph == "accept_filtered"
    uniform = rng.random((3, GAMMA + 1), np.float32)
    sampling = AcceptSampling(
        slots=np.arange(3),
        verify_length=lengths - 1,
        temperature=np.array([0.9, 0.0, 1.3], np.float32),
        top_k=np.array([5, 0, 0]) * filtered,
        top_p=np.array([1.0, 0.8, 0.6 if filtered else 1.0], np.float32) ** filtered,
        accept_uniform=uniform[:, :GAMMA] if sampled else None,
        sample_uniform=uniform[:, GAMMA] if sampled else None,
    )
    logits = rng.standard_normal((12, v), np.float32)
    draft_ids = rng.integers(0, v, (3, GAMMA))
    draft_ids[0, :4] = logits[:4].argmax(1)  # so that something is accepted
    draft_logits = rng.standard_normal((3, GAMMA, v), np.float32)
    warm = np.array([0.9, 0.0, 1.3], np.float32)
    session, info = open_on_ort(opened.graph_path(graph)), opened.graphs[graph]

    def decide(total: int, requests: int, blocks: int) -> list[np.ndarray]:
        call = accept_call(
            sampling, dataclasses.replace(rows, total=total), np.arange(3), warm, GAMMA
        )
        assert call.graph == graph
        call = pad_call(call, info.inputs, {"R": requests, "B": blocks, "N": total}, np.zeros(0))
        extra = ((0, total - 12), (0, 0))
        tensors = {
            "target_logits": np.pad(logits, extra, mode="edge"),
            "draft_ids": np.pad(draft_ids, ((0, blocks - 3), (0, 0)), mode="edge"),
            "draft_logits": np.pad(draft_logits, ((0, blocks - 3), (0, 0), (0, 0)), mode="edge"),
        }
        names = {t.name for t in info.inputs}
        feeds = call.feeds | {n: a for n, a in tensors.items() if n in names}
        return [out[:3] for out in session.run(["accepted", "next_id"], feeds)]

    expected = decide(12, 3, 3)
    assert sampled or expected[0].tolist()[0] >= 4
    for shape in [(16, 4, 4), (32, 4, 4), (12, 4, 3), (24, 3, 4)]:
        for found, wanted in zip(decide(*shape), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


# Profiles and guards


def test_a_call_takes_the_first_profile_that_covers_it(opened: Bundle, spec: EngineSpec) -> None:
    inputs = opened.graphs["target"].inputs

    def profile(lengths: list[int], last_only: bool) -> int:
        lengths_ = np.array(lengths)
        batch = TokenBatch(
            np.zeros(sum(lengths), np.int64), lengths_, 0 * lengths_, last_only=last_only
        )
        call, _ = target_call(batch)
        axes = call_axes(call, inputs, {"C": spec.capacity})
        return choose_profile(spec, "target", inputs, axes)

    assert profile([8, 8, 8, 8], False) == 0
    assert profile([5], True) == 0  # a short prompt
    assert profile([32], True) == 1
    assert profile([9, 3], True) == 1
    for lengths, last_only in (([33], True), ([9], False), ([1] * 5, False)):
        with pytest.raises(DraftgraphError, match="no profile of the engine covers this call"):
            profile(lengths, last_only)


def test_the_last_row_fits_and_no_more() -> None:
    past = np.array([10, 50, 3])
    check_room("target", past, 78, 128)
    with pytest.raises(DraftgraphError, match=r"target: 129 cache rows.*capacity is 128.*--capac"):
        check_room("target", past, 79, 128)


def test_every_width_of_a_round_fits_the_promised_length(opened: Bundle, spec: EngineSpec) -> None:
    """A request of capacity - 2γ tokens: its last draft and its last verification, padded."""
    longest = spec.capacity - 2 * GAMMA
    check_room("backbone", np.array([longest - 1]), GAMMA + 1 + GAMMA, spec.capacity)
    check_room("target", np.array([longest - 1]), GAMMA + 1, spec.capacity)


# Memory


def test_memory_is_known_before_it_is_allocated(opened: Bundle, spec: EngineSpec) -> None:
    graphs = engines_needed(opened, "auto")
    plan = plan_memory(opened, spec, graphs)
    target, draft = opened.kv_bytes
    assert plan.slot_bytes == 128 * (target + draft)
    assert plan.device_bytes(4) - plan.device_bytes(1) == 3 * plan.slot_bytes
    features = opened.graphs["target"].outputs[1].shape[1]
    # Rows: a prompt's chunk or a full round, whichever is more, and what four requests may hold.
    assert isinstance(features, int)
    assert plan.tensors["features"] == (32 + 4 * HOLD_ROWS) * features * 4
    v = opened.target.vocab_size
    assert plan.tensors["logits"] == 4 * 8 * v * 4
    assert plan.tensors["draft_ids"] == 256  # 4 · 7 · 8 bytes, aligned
    assert set(plan.results) == {"draft_ids", "confidence_logits", "accepted", "next_id"}
    assert plan.pinned_bytes < 64 << 10
    plan.check(4, plan.device_bytes(4))
    with pytest.raises(DraftgraphError, match=r"4 requests need .* MiB.*caches .*--capacity"):
        plan.check(4, plan.device_bytes(4) - 1)


def test_slots_stay_aligned(opened: Bundle, spec: EngineSpec) -> None:
    graphs = engines_needed(opened, "auto")
    check_slot_stride(plan_memory(opened, spec, graphs), 128)
    odd = spec_of(opened, dataclasses.replace(LIMITS, capacity=129))
    plan = plan_memory(opened, odd, graphs)
    half = {g: {n: b // 2 for n, b in t.items()} for g, t in plan.caches.items()}
    with pytest.raises(DraftgraphError, match="multiple of 16"):
        check_slot_stride(dataclasses.replace(plan, caches=half), 129)


def test_a_block_holds_every_array_aligned() -> None:
    arrays = [np.zeros(1, np.int64), np.zeros(33, np.int64), np.zeros(0, np.int64), np.zeros(2)]
    assert layout(arrays) == ([0, 256, 768, 768], 1024)


def test_rows_are_copied_in_runs() -> None:
    assert runs(np.array([3, 4, 5, 9, 10, 2])) == [(3, 3), (9, 2), (2, 1)]
    assert runs(np.zeros(0, np.int64)) == []
    assert runs(np.array([3, 4, 5, 6]), np.array([0, 1, 7, 8])) == [(3, 0, 2), (5, 7, 2)]


@pytest.mark.parametrize("markov", ["auto", "full"])
def test_the_parsed_networks_take_what_is_planned(
    trt: Any, bundle: BundleFactory, markov: str
) -> None:
    """Every input and output that TensorRT's parser finds has memory of the right size."""
    half = load_bundle(bundle("qwen3-vanilla", dtype="fp16", markov_top_k=20))
    spec = spec_of(half, LIMITS)
    graphs = engines_needed(half, markov)
    plan = plan_memory(half, spec, graphs)
    log = LogKeeper(trt)
    builder = trt.Builder(log.logger)
    staged: dict[str, int] = {}
    for graph in graphs:
        network = parse_graph(trt, builder, log, half, graph, 128).network
        ranges = spec.profiles[graph]
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            assert not tensor.is_shape_tensor  # it would have to lie on the host
            largest = max(int(np.prod(p[tensor.name][2])) for p in ranges.values())
            size = largest * tensor.dtype.itemsize
            name = {"target_logits": "logits"}.get(tensor.name, tensor.name)
            if tensor.name in plan.caches.get(graph, {}):
                assert plan.caches[graph][tensor.name] * LIMITS.max_batch == size
            elif name in plan.tensors:
                assert plan.tensors[name] >= size, (graph, name)
            else:
                staged[graph] = staged.get(graph, 0) + size
    for graph, size in staged.items():
        phase = "accept" if graph.startswith("accept") else graph
        assert plan.staging["draft" if phase not in ("accept", "target") else phase] >= size


# Which engines


@pytest.fixture
def built(opened: Bundle, tmp_path: Path) -> tuple[Bundle, dict[str, Sidecar]]:
    """A bundle with the sidecars of a build; the engine files hold a few bytes."""
    moved = dataclasses.replace(opened, path=tmp_path)
    spec = spec_of(opened, LIMITS)
    sidecars = {}
    for graph in engines_needed(opened, "auto"):
        graph_hash, weights_hash = graph_hashes(moved, graph)
        key = EngineKey(
            backend="tensorrt-rtx",
            version="1.7.1.116",
            compute_capabilities=("8.9",),
            precision="fp16",
            graph_sha256=graph_hash,
            weights_sha256=weights_hash,
            profiles=json.loads(json.dumps(spec.profiles[graph])),
            settings={"capacity": 128, "max_batch": 4, "prefill_len": 32, "hold_rows": HOLD_ROWS},
        )
        file = tmp_path / "engines" / key.fingerprint / f"{graph}.engine"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"plan")
        sidecars[graph] = Sidecar(graph, key, 1.0, 4, {}, file)
        sidecars[graph].save()
    return moved, sidecars


def choose(bundle: Bundle, **changes: Any) -> dict[str, Sidecar]:
    arguments = {"version": "1.7.1.116", "compute_capability": "8.9", **changes}
    return choose_engines(bundle, engines_needed(bundle, "auto"), "tensorrt-rtx", **arguments)


def test_engines_of_one_build(built: tuple[Bundle, dict[str, Sidecar]], spec: EngineSpec) -> None:
    bundle, sidecars = built
    assert choose(bundle) == sidecars
    assert choose(bundle, compute_capability=None) == sidecars
    assert choose(bundle, folder=next(iter(sidecars.values())).file.parent.name) == sidecars
    found = EngineSpec.of(sidecars)
    assert (found.capacity, found.max_batch, found.prefill_len) == (128, 4, 32)
    assert found.profiles["target"] == spec.profiles["target"]
    assert list(found.profiles["target"]) == ["verify", "prefill"]  # the engine's order


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1.8.0.1"}, r"but 1\.8\.0\.1 is installed"),
        ({"compute_capability": "12.0"}, r"this device has 12\.0; .*--compute-capability 12\.0"),
        ({"folder": "tensorrt-rtx-other"}, "no engines tensorrt-rtx-other here; build them"),
    ],
)
def test_engines_that_do_not_fit(
    built: tuple[Bundle, dict[str, Sidecar]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DraftgraphError, match=message):
        choose(built[0], **changes)


def test_engines_that_are_missing_or_old(built: tuple[Bundle, dict[str, Sidecar]]) -> None:
    bundle, sidecars = built
    with pytest.raises(DraftgraphError, match="no tensorrt engines here; build them with"):
        choose_engines(bundle, ["target"], "tensorrt", version="11.4", compute_capability=None)
    changed = dataclasses.replace(
        bundle, files={**bundle.files, "target.onnx": {"sha256": "0" * 64, "bytes": 1}}
    )
    with pytest.raises(DraftgraphError, match=r"stale, the bundle's target graph"):
        choose(changed)
    older = dataclasses.replace(sidecars["target"].key, settings={"capacity": 128})
    with pytest.raises(DraftgraphError, match="built by another version of draftgraph"):
        EngineSpec.of({"target": dataclasses.replace(sidecars["target"], key=older)})
    sidecars["target"].file.with_suffix(".json").unlink()
    with pytest.raises(DraftgraphError, match=r"target\.json: no engine of this graph"):
        choose(bundle)


def test_caches_share_memory_and_nothing_else_does() -> None:
    outputs = ["logits", "present_key.0"]
    check_aliases("target", outputs, {"present_key.0": "past_key.0"}.get)
    for aliased in ({}, {"present_key.0": "past_key.0", "logits": "features"}):
        with pytest.raises(DraftgraphError, match=r"target: .*shares its memory with"):
            check_aliases("target", outputs, aliased.get)


def test_profiles_in_another_order_are_found(built: tuple[Bundle, dict[str, Sidecar]]) -> None:
    sidecar = built[1]["target"]
    ranges = list(sidecar.key.profiles.values())
    check_profiles(sidecar, lambda name, index: ranges[index][name])
    with pytest.raises(DraftgraphError, match=r"has the range .* in profile verify"):
        check_profiles(sidecar, lambda name, index: ranges[1 - index][name])


# Opening it here, without a device


def test_no_library(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(backend: str) -> Any:
        raise DraftgraphError(f"{backend} is not installed")

    monkeypatch.setattr(package, "load_tensorrt", missing)
    for provider in ("tensorrt-native", "tensorrt-rtx-native"):
        with pytest.raises(DraftgraphError, match=provider.removesuffix("-native")):
            open_backend(opened, provider)


@pytest.mark.skipif(gpu() is not None, reason="a GPU is here")
def test_engines_without_a_device(
    trt: Any, built: tuple[Bundle, dict[str, Sidecar]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt, "__version__", "1.7.1.116")
    with pytest.raises(DraftgraphError, match=r'no NVIDIA GPU, or no driver.*provider "cpu"'):
        open_backend(built[0], "tensorrt-rtx-native")


def test_a_device_without_cuda_core(
    trt: Any, built: tuple[Bundle, dict[str, Sidecar]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt, "__version__", "1.7.1.116")
    monkeypatch.setattr(package, "gpu", lambda: Gpu("GPU", "8.9", "580.1", 1 << 30))
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(package, "load_tensorrt", lambda backend: trt)
    with pytest.raises(DraftgraphError, match=r"cuda\.core is not installed; .*\[tensorrt-rtx\]"):
        open_backend(built[0], "tensorrt-rtx-native")


def test_the_calls_of_cuda_py_exist(trt: Any) -> None:
    """TensorRT ships no stubs: every attribute used on its objects is looked up in its module."""
    classes = {
        "trt": trt,
        "self._trt": trt,
        "engine": trt.ICudaEngine,
        "context": trt.IExecutionContext,
        "config": trt.IRuntimeConfig,
        "self._runtime": trt.Runtime,
        "self._runtime_cache": trt.IRuntimeCache,
        "when": trt.DynamicShapesKernelSpecializationStrategy,
        "trt.CudaGraphStrategy": trt.CudaGraphStrategy,
        "self._trt.TensorLocation": trt.TensorLocation,
        "self._trt.ExecutionContextAllocationStrategy": trt.ExecutionContextAllocationStrategy,
    }
    source = Path(str(package.__file__)).with_name("cuda.py").read_text("utf-8")
    used = {
        (ast.unparse(node.value), node.attr)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in classes
    }
    assert len(used) >= 25
    missing = [f"{owner}.{name}" for owner, name in used if not hasattr(classes[owner], name)]
    assert not missing
