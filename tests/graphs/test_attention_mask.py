"""The one additive mask: what it lets every row see, and what it must never let through.

Stale and unwritten cache rows, padded cells and context rows past the count are all garbage that
stays in memory; only lengths keep it out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from helpers import Golden, open_model
from onnx import helper

from draftgraph.export.reference import ReferenceTarget
from draftgraph.graphs.contract import DecoderSpec
from draftgraph.runtime import Bundle, load_bundle

CAPACITY = 48
POISON = 1e4
Arrays = dict[str, np.ndarray]


class Graph:
    """A graph run on numpy arrays, its caches passed explicitly."""

    def __init__(
        self, bundle: Bundle, name: str, edit: Callable[[onnx.GraphProto], None] | None = None
    ) -> None:
        self.spec: DecoderSpec
        self.spec = bundle.target.decoder if name == "target" else bundle.draft.decoder
        model = onnx.load(bundle.graph_path(name))  # weights included
        if edit is not None:
            edit(model.graph)
        self.session = open_model(model)
        self.outputs = [o.name for o in self.session.get_outputs()]

    def caches(self, requests: int, fill: float = 0.0) -> Arrays:
        shape = (requests, self.spec.num_kv_heads, CAPACITY, self.spec.head_dim)
        return {
            f"past_{kind}.{i}": np.full(shape, fill, np.float32)
            for i in range(self.spec.num_layers)
            for kind in ("key", "value")
        }

    def __call__(self, inputs: Arrays, caches: Arrays) -> tuple[Arrays, Arrays]:
        """Outputs, and the caches after the run."""
        values = self.session.run(None, {**inputs, **caches})
        results = dict(zip(self.outputs, values, strict=True))
        after = {n.replace("present", "past"): v for n, v in results.items() if "present" in n}
        return {n: v for n, v in results.items() if "present" not in n}, after


def chunks(ids: list[list[int]], past: list[int]) -> Arrays:
    """Inputs of the target graph for ragged chunks; padded cells repeat the last token."""
    lengths = np.array([len(i) for i in ids])
    width = lengths.max()
    starts = np.cumsum(lengths) - lengths
    columns = np.arange(width)
    valid = columns < lengths[:, None]
    return {
        "input_ids": np.concatenate([np.array(i, np.int64) for i in ids]),
        "past_length": np.array(past, np.int64),
        "cell_token": starts[:, None] + np.minimum(columns, lengths[:, None] - 1),
        "token_cell": np.flatnonzero(valid),
        "logits_index": np.arange(lengths.sum()),
    }


def block(
    features: np.ndarray, rows: list[list[int]], past: list[int], anchors: list[int]
) -> Arrays:
    """Inputs of the backbone graph for requests that all draft."""
    counts = np.array([len(r) for r in rows], np.int64)
    starts, columns = np.cumsum(counts) - counts, np.arange(counts.max())
    everyone = np.arange(len(rows))
    return {
        "features": features,
        "feature_index": np.array([i for r in rows for i in r], np.int64),
        "context_cell": starts[:, None] + np.minimum(columns, np.maximum(counts - 1, 0)[:, None]),
        "feature_count": counts,
        "past_length": np.array(past, np.int64),
        "anchor": np.array(anchors, np.int64),
        "request_block": everyone,
        "block_request": everyone,
    }


def poisoned(caches: Arrays, valid: list[int], value: float) -> Arrays:
    """Every row at and beyond the valid length replaced."""
    result = {n: c.copy() for n, c in caches.items()}
    for cache in result.values():
        for r, length in enumerate(valid):
            cache[r, :, length:] = value
    return result


@pytest.fixture(scope="module", params=["qwen3-vanilla", "llama-vanilla-threshold"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def opened(name: str, bundle: Callable[..., Path]) -> Bundle:
    return load_bundle(bundle(name))


@pytest.fixture(scope="module")
def target(opened: Bundle) -> Graph:
    return Graph(opened, "target")


@pytest.fixture(scope="module")
def backbone(opened: Bundle) -> Graph:
    return Graph(opened, "backbone")


@pytest.fixture(scope="module")
def prompts(name: str, golden: Callable[[str], Golden]) -> list[list[int]]:
    ids = golden(name).prompts[0]["plain_greedy"]
    return [ids[:30], ids[30:50], ids[50:75]]


def test_target_against_float64(
    target: Graph, name: str, golden: Callable[[str], Golden], prompts: list[list[int]]
) -> None:
    """Prefill, a wide chunk and single tokens, ragged, over a cache that holds garbage."""
    reference = ReferenceTarget(golden(name).target, (0, 1, 2), dtype=torch.float64)
    expected = [reference(torch.tensor(p)) for p in prompts]
    caches = target.caches(len(prompts), POISON)
    done = [0] * len(prompts)
    for widths in ([9, 3, 6], [8, 8, 8], [1, 2, 3], [1, 1, 1]):
        parts = [p[a : a + w] for p, a, w in zip(prompts, done, widths, strict=True)]
        outputs, caches = target(chunks(parts, done), caches)
        start = 0
        for r, w in enumerate(widths):
            rows, span = slice(start, start + w), slice(done[r], done[r] + w)
            for output, tensor in zip(("logits", "features"), expected[r], strict=True):
                # Largest error measured: 5e-6.
                np.testing.assert_allclose(
                    outputs[output][rows], tensor[span].numpy(), rtol=0, atol=1e-4
                )
            start += w
            done[r] += w


def with_lengths(total: Callable[[onnx.GraphProto], str], causal: int) -> Callable[..., None]:
    """An edit that replaces the mask by is_causal and nonpad_kv_seqlen, which ORT's CPU honours."""

    def edit(graph: onnx.GraphProto) -> None:
        lengths = total(graph)
        # The new nodes come first; they depend on graph inputs only.
        made = {output: node for node in graph.node for output in node.output}
        for node in graph.node:
            if node.op_type == "Attention":
                query = made[node.input[0]]
                rows = made[query.input[1]]
                if causal and rows.op_type == "Reshape":  # a group of heads has no causal order
                    query.input[1] = rows.input[0]
                node.input[:] = [*node.input[:3], "", "", "", lengths]
                for a in node.attribute:
                    if a.name == "is_causal":
                        a.i = causal

    return edit


def prepend(graph: onnx.GraphProto, *nodes: onnx.NodeProto) -> None:
    existing = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *existing])


def target_rows(graph: onnx.GraphProto) -> str:
    """past_length + S: causal masking then ends every row at its own position."""
    prepend(
        graph,
        helper.make_node("Shape", ["cell_token"], ["width"], start=1, end=2),
        helper.make_node("Add", ["past_length", "width"], ["total_rows"]),
    )
    return "total_rows"


def block_rows(gamma: int) -> Callable[[onnx.GraphProto], str]:
    def add(graph: onnx.GraphProto) -> str:
        prepend(
            graph,
            helper.make_node("Constant", [], ["slots"], value_ints=[gamma]),
            helper.make_node("Add", ["past_length", "feature_count"], ["context_rows"]),
            helper.make_node("Add", ["context_rows", "slots"], ["total_rows"]),
        )
        return "total_rows"

    return add


def test_target_mask_equals_lengths_form(
    opened: Bundle, target: Graph, prompts: list[list[int]]
) -> None:
    other = Graph(opened, "target", with_lengths(target_rows, causal=1))
    caches = target.caches(3, POISON)
    done = [0, 0, 0]
    for width in (10, 8, 1):
        inputs = chunks([p[a : a + width] for p, a in zip(prompts, done, strict=True)], done)
        found, after = target(inputs, caches)
        expected, _ = other(inputs, caches)
        np.testing.assert_allclose(found["logits"], expected["logits"], rtol=0, atol=2e-5)
        np.testing.assert_allclose(found["features"], expected["features"], rtol=0, atol=2e-5)
        caches = after
        done = [a + width for a in done]


def test_backbone_mask_equals_lengths_form(opened: Bundle, backbone: Graph) -> None:
    other = Graph(opened, "backbone", with_lengths(block_rows(opened.draft.block_size), causal=0))
    features = np.random.default_rng(0).standard_normal((12, 192)).astype(np.float32)
    inputs = block(features, [[0, 1, 2, 3, 4], [5, 6], [7, 8, 9]], [0, 0, 0], [5, 6, 7])
    caches = backbone.caches(3, POISON)
    found, caches = backbone(inputs, caches)
    expected, _ = other(inputs, backbone.caches(3, POISON))
    np.testing.assert_allclose(found["hidden"], expected["hidden"], rtol=0, atol=2e-5)
    inputs = block(features, [[10], [11, 3], [4, 5, 6]], [5, 2, 3], [8, 9, 10])
    found, _ = backbone(inputs, caches)
    expected, _ = other(inputs, caches)
    np.testing.assert_allclose(found["hidden"], expected["hidden"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("value", [POISON, -POISON])
def test_target_never_attends_beyond_its_rows(
    target: Graph, prompts: list[list[int]], value: float
) -> None:
    """Bit for bit: a masked row has weight exactly 0."""
    past = [12, 5, 9]
    _, caches = target(
        chunks([p[:n] for p, n in zip(prompts, past, strict=True)], [0, 0, 0]), target.caches(3)
    )
    inputs = chunks([prompts[0][12:20], prompts[1][5:6], prompts[2][9:13]], past)
    clean, _ = target(inputs, poisoned(caches, past, 0.0))
    dirty, _ = target(inputs, poisoned(caches, past, value))
    np.testing.assert_array_equal(clean["logits"], dirty["logits"])
    np.testing.assert_array_equal(clean["features"], dirty["features"])


@pytest.mark.parametrize("value", [POISON, -POISON])
def test_backbone_never_attends_beyond_its_block(backbone: Graph, value: float) -> None:
    features = np.random.default_rng(1).standard_normal((12, 192)).astype(np.float32)
    first = block(features, [[0, 1, 2, 3, 4], [5, 6]], [0, 0], [5, 6])
    _, caches = backbone(first, backbone.caches(2))
    inputs = block(features, [[7], [8, 9, 10, 11]], [5, 2], [1, 2])
    clean, _ = backbone(inputs, poisoned(caches, [5, 2], 0.0))
    dirty, _ = backbone(inputs, poisoned(caches, [5, 2], value))
    np.testing.assert_array_equal(clean["hidden"], dirty["hidden"])


def test_context_rows_past_the_count_are_ignored(backbone: Graph) -> None:
    """They are written, but the block is written over them or the mask ends before them."""
    gamma, width = 7, 12
    features = np.random.default_rng(2).standard_normal((width + 1, 192)).astype(np.float32)
    features[width] = POISON
    for count in (0, 1, 3, gamma, width):  # the garbage reaches past the block when it is wide
        inputs = block(features, [list(range(width))], [0], [5])
        inputs["feature_count"] = np.array([count])
        expected, _ = backbone(inputs, backbone.caches(1))
        inputs["feature_index"] = np.where(np.arange(width) < count, np.arange(width), width)
        found, _ = backbone(inputs, backbone.caches(1))
        np.testing.assert_array_equal(found["hidden"], expected["hidden"])
        assert np.isfinite(found["hidden"]).all()


def test_rejected_target_rows_are_overwritten(target: Graph, prompts: list[list[int]]) -> None:
    """Rolling back is a smaller length: the result is that of a cache that never saw the draft."""
    prompt = prompts[0]
    _, caches = target(chunks([prompt[:10]], [0]), target.caches(1))
    wrong = [(t + 1) % 90 for t in prompt[11:18]]
    _, drafted = target(chunks([[prompt[10], *wrong]], [10]), caches)
    _, rolled_back = target(chunks([prompt[10:12]], [10]), drafted)
    for n in (1, 8):
        inputs = chunks([prompt[12 : 12 + n]], [12])
        found, _ = target(inputs, rolled_back)
        _, clean = target(chunks([prompt[10:12]], [10]), caches)
        expected, _ = target(inputs, clean)
        np.testing.assert_array_equal(found["logits"], expected["logits"])


def test_block_rows_do_not_survive_in_the_draft_cache(backbone: Graph) -> None:
    """The next round's context is written where the last block was."""
    features = np.random.default_rng(3).standard_normal((12, 192)).astype(np.float32)
    _, caches = backbone(block(features, [[0, 1, 2]], [0], [5]), backbone.caches(1))
    found, _ = backbone(block(features, [[3, 4]], [3], [6]), caches)
    expected, _ = backbone(block(features, [[0, 1, 2, 3, 4]], [0], [6]), backbone.caches(1))
    # The context was written in two calls instead of one: rounding only.
    np.testing.assert_allclose(found["hidden"], expected["hidden"], rtol=0, atol=2e-5)


def test_the_last_row_of_the_cache_is_usable(target: Graph, backbone: Graph) -> None:
    """Capacity is exact: the last token may sit in the last row."""
    ids = np.random.default_rng(4).integers(0, 90, CAPACITY).tolist()
    whole, _ = target(chunks([ids], [0]), target.caches(1))
    _, caches = target(chunks([ids[:-3]], [0]), target.caches(1, POISON))
    end, _ = target(chunks([ids[-3:]], [CAPACITY - 3]), caches)
    np.testing.assert_allclose(end["logits"], whole["logits"][-3:], rtol=0, atol=2e-5)

    features = np.random.default_rng(5).standard_normal((CAPACITY - 7, 192)).astype(np.float32)
    rows = list(range(CAPACITY - 7))
    once, _ = backbone(block(features, [rows], [0], [5]), backbone.caches(1))
    _, caches = backbone(block(features, [rows[:-1]], [0], [5]), backbone.caches(1))
    twice, _ = backbone(block(features, [rows[-1:]], [CAPACITY - 8], [5]), caches)
    np.testing.assert_allclose(twice["hidden"], once["hidden"], rtol=0, atol=2e-5)
