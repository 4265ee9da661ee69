"""The manifest's list of float32 islands is complete and true, by the types in the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest

from draftgraph.runtime import load_bundle

FLOAT, HALF = onnx.TensorProto.FLOAT, {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
MOVES = {"Cast", "Concat", "Gather", "Identity", "Reshape", "Split", "Squeeze", "Unsqueeze"}
MOVES |= {"Shape", "TensorScatter", "Transpose"}


class Typed:
    """One graph with the element type of every tensor."""

    def __init__(self, file: Path) -> None:
        model = onnx.shape_inference.infer_shapes(onnx.load(file, load_external_data=False))
        self.graph = model.graph
        values = [*self.graph.input, *self.graph.output, *self.graph.value_info]
        self.types = {v.name: v.type.tensor_type.elem_type for v in values}
        self.types |= {t.name: t.data_type for t in self.graph.initializer}
        self.producer = {name: node for node in self.graph.node for name in node.output}

    def nodes(self, *ops: str) -> Iterator[onnx.NodeProto]:
        return (n for n in self.graph.node if n.op_type in ops)

    def floats(self, node: onnx.NodeProto) -> set[int]:
        """Float types among the inputs and outputs of a node."""
        names = [n for n in (*node.input, *node.output) if n]
        return {self.types[n] for n in names} & {FLOAT, *HALF}

    def gemm(self, weight: str) -> Iterator[onnx.NodeProto]:
        return (n for n in self.nodes("Gemm") if n.input[1].endswith(weight))


Graphs = dict[str, Typed]
Values = Iterator[set[int]]  # float types of one node each


def residual(graphs: Graphs) -> Values:
    for name in ("target", "backbone"):
        g = graphs[name]
        yield from (f for n in g.nodes("Add") if (f := g.floats(n)))
    yield {graphs["target"].types["features"]}
    yield {graphs["backbone"].types["features"]}


def norms(graphs: Graphs) -> Values:
    for g in graphs.values():
        yield from (g.floats(n) for n in g.nodes("RMSNormalization"))


def rope(graphs: Graphs) -> Values:
    for g in graphs.values():
        yield from (g.floats(n) for n in g.nodes("Sin", "Cos"))


def head(graphs: Graphs) -> Values:
    g = graphs["target"]
    gemm = g.producer["logits"]
    yield g.floats(gemm)
    # Not even the hidden state is rounded: it comes straight from the norm.
    assert g.producer[gemm.input[0]].op_type == "RMSNormalization"


def fc(graphs: Graphs) -> Values:
    g = graphs["backbone"]
    yield from (g.floats(n) for n in g.gemm("backbone.fc.weight"))


def projections(graphs: Graphs) -> Values:
    for g in graphs.values():
        for weight in ("markov.gate_proj.weight", "markov.joint_proj.weight"):
            yield from (g.floats(n) for n in g.gemm(weight))


def confidence(graphs: Graphs) -> Values:
    g = graphs["confidence"]
    yield from (g.floats(n) for n in g.graph.node)


def sampling(graphs: Graphs) -> Values:
    for name, g in graphs.items():
        if name.startswith("accept"):
            yield from (g.floats(n) for n in g.graph.node)
        if name.startswith("markov"):
            yield from (g.floats(n) for n in g.graph.node if n.op_type not in {*MOVES, *PRODUCTS})


PRODUCTS = ("Gemm", "MatMul")
ISLANDS: dict[str, Callable[[Graphs], Values]] = {
    "residual stream and target features": residual,
    "RMS norms": norms,
    "rope tables, rounded where they are applied": rope,
    "target head and logits": head,
    "fc over target features": fc,
    "markov gate and joint projections": projections,
    "confidence head": confidence,
    "sampling and acceptance": sampling,
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["qwen3-gated", "qwen3-rnn"])
def test_float32_islands(name: str, dtype: str, bundle: Callable[..., Path]) -> None:
    opened = load_bundle(bundle(name, dtype=dtype, markov_top_k=20))
    graphs = {graph: Typed(opened.graph_path(graph)) for graph in opened.graphs}
    assert opened.manifest["float32_islands"] == list(ISLANDS)
    for island, values in ISLANDS.items():
        found = [v for v in values(graphs) if v]
        assert found, island
        assert all(v == {FLOAT} for v in found), island
    # Whatever is no island and computes, by graph and operator.
    arithmetic = {
        (graph.split("_")[0], n.op_type)
        for graph, g in graphs.items()
        for n in g.graph.node
        if g.floats(n) & HALF and n.op_type not in MOVES
    }
    decoder = {"Gemm", "Attention", "RotaryEmbedding", "Sigmoid", "Mul"}
    assert arithmetic == {(g, op) for g in ("target", "backbone") for op in decoder} | {
        ("markov", "Gemm"),
        ("markov", "MatMul"),
    }


def test_fp32_has_no_islands(bundle: Callable[..., Path]) -> None:
    opened = load_bundle(bundle("qwen3-vanilla"))
    assert opened.manifest["float32_islands"] == []
    for graph in opened.graphs:
        assert not HALF & set(Typed(opened.graph_path(graph)).types.values())
