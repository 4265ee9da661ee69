"""Parsing a graph with TensorRT, and proving that the parser kept what the graph says."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import onnx

from ...graphs.errors import DraftgraphError
from ...runtime.backends.tensorrt.library import LogKeeper
from ...runtime.bundle import Bundle, TensorInfo

_DTYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT64": "int64"}


@dataclass(frozen=True)
class ParsedGraph:
    """A TensorRT network that matches the manifest; the parser must outlive it."""

    network: Any
    parser: Any
    layers: dict[str, int]


def parse_graph(
    trt: Any, builder: Any, log: LogKeeper, bundle: Bundle, graph: str, capacity: int
) -> ParsedGraph:
    """Parse one graph with its cache capacity fixed, and check the network.

    Weights are read from the bundle's weights file, beside the graph.
    """
    path = bundle.graph_path(graph)
    network = builder.create_network(0)  # strongly typed: precision is decided in the graph
    parser = trt.OnnxParser(network, log.logger)
    if not parser.parse(
        freeze_capacity(onnx.load(path, load_external_data=False), capacity), str(path)
    ):
        problems = [parser.get_error(i) for i in range(parser.num_errors)]
        text = "; ".join(f"{e.node_name()} ({e.node_operator()}): {e.desc()}" for e in problems)
        raise DraftgraphError(f"{path}: TensorRT's parser refuses it: {text or log.take()}")
    found = Counter(network.get_layer(i).type.name for i in range(network.num_layers))
    check_signature(network, bundle, graph, capacity)
    decoder = {"target": bundle.target.decoder, "backbone": bundle.draft.decoder}.get(graph)
    check_attention(trt, network, path, decoder.num_layers if decoder else 0)
    kept = {"ATTENTION_INPUT": "attention", "KV_CACHE_UPDATE": "kv_cache_update"}
    return ParsedGraph(network, parser, {word: found[name] for name, word in kept.items()})


def freeze_capacity(model: onnx.ModelProto, capacity: int) -> bytes:
    """The model with axis C of every input and output fixed; external data stays where it is."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "C":
                dim.dim_value = capacity
    return model.SerializeToString()


def check_signature(network: Any, bundle: Bundle, graph: str, capacity: int) -> None:
    """Names, order, dtypes and shapes of inputs and outputs are those of the manifest."""
    info = bundle.graphs[graph]
    for kind, listed, count, get in (
        ("inputs", info.inputs, network.num_inputs, network.get_input),
        ("outputs", info.outputs, network.num_outputs, network.get_output),
    ):
        found = [_describe(get(i)) for i in range(count)]
        expected = [_expect(t, capacity) for t in listed]
        if found != expected:
            wrong = [f"{e} became {f}" for e, f in zip(expected, found, strict=False) if e != f]
            raise DraftgraphError(
                f"{info.file}: {len(found)} {kind} after TensorRT's parser, the manifest has "
                f"{len(expected)}; {'; '.join(wrong[:3])}"
            )


def _describe(tensor: Any) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, _DTYPES.get(tensor.dtype.name, tensor.dtype.name), tuple(tensor.shape)


def _expect(tensor: TensorInfo, capacity: int) -> tuple[str, str, tuple[int, ...]]:
    sizes = {"C": capacity}
    shape = tuple(n if isinstance(n, int) else sizes.get(n, -1) for n in tensor.shape)
    return tensor.name, tensor.dtype, shape


def check_attention(trt: Any, network: Any, path: Any, layers: int) -> None:
    """Every decoder layer has one attention with a mask and no causal kind, and two cache writes.

    The parser drops what it does not know of attention without an error, lengths for one; a mask
    that was lost would show in wrong text only.
    """
    attention, writes = [], 0
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            attention.append(layer.attention)
        elif layer.type == trt.LayerType.KV_CACHE_UPDATE:
            writes += 1
    if (len(attention), writes) != (layers, 2 * layers):
        raise DraftgraphError(
            f"{path}: TensorRT's parser made {len(attention)} attention layers and {writes} cache "
            f"updates, expected {layers} and {2 * layers}"
        )
    for a in attention:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            kind = a.causal_kind
        lost = "" if a.mask is not None else "without its mask"
        if kind != trt.CausalMaskKind.NONE:
            lost = f"with causal kind {kind.name}"
        if lost:
            raise DraftgraphError(f"{path}: TensorRT's parser left {a.name} {lost}")
