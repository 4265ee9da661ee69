"""Where the nodes of a session run.

A node that its provider does not take runs on the CPU without a word, and its tensors are copied
there and back in every step. Nodes that compute shapes only belong on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort


@dataclass(frozen=True)
class Placement:
    """nodes: how many run on each provider. shapes: those elsewhere that compute shapes only.

    elsewhere: all others that do not run on the wanted provider, as "op_type name on provider".
    """

    graph: str
    provider: str
    nodes: dict[str, int]
    shapes: tuple[str, ...]
    elsewhere: tuple[str, ...]


def placement(graph: str, path: Path, wanted: str, session: ort.InferenceSession) -> Placement:
    """Reads the assignment that the session recorded when it was made."""
    for_shapes: set[str] | None = None
    counts: Counter[str] = Counter()
    shapes: list[str] = []
    elsewhere: list[str] = []
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            counts[part.ep_name] += 1
            if part.ep_name == wanted:
                continue
            if for_shapes is None:  # read on demand: with everything in place nobody asks
                for_shapes = shape_nodes(path)
            text = f"{node.op_type} {node.name} on {part.ep_name}"
            (shapes if node.name in for_shapes else elsewhere).append(text)
    return Placement(graph, wanted, dict(counts), tuple(shapes), tuple(elsewhere))


def shape_nodes(path: Path) -> set[str]:
    """Names of the nodes of an ONNX file that depend on shapes and constants only."""
    nodes, constants = _read(path.read_bytes())
    known = dict.fromkeys(constants, False)  # values that come from a shape: True
    found = set()
    for inputs, outputs, name, op_type in nodes:
        if op_type == "Constant":
            known |= dict.fromkeys(outputs, False)
        elif op_type in ("Shape", "Size") or (
            all(i in known for i in inputs if i) and any(known.get(i) for i in inputs)
        ):
            known |= dict.fromkeys(outputs, True)
            found.add(name)
    return found


Node = tuple[list[str], list[str], str, str]  # inputs, outputs, name, operator


def _read(model: bytes) -> tuple[list[Node], list[str]]:
    """Every node, in order, and the names of the initializers, from ONNX's protobuf encoding.

    The runtime does without the onnx package. Numbers of fields: onnx.proto.
    """
    nodes, initializers = [], []
    graphs = [value for field, value in _fields(model) if field == 7]  # ModelProto.graph
    for field, value in (f for graph in graphs for f in _fields(graph)):
        if field == 5:  # GraphProto.initializer; its name is field 8
            initializers += [str(v, "utf-8") for number, v in _fields(value) if number == 8]
        if field == 1:  # GraphProto.node: inputs, outputs, name, operator
            texts: dict[int, list[str]] = {1: [], 2: [], 3: [""], 4: [""]}
            for number, v in _fields(value):
                if number in texts:
                    texts[number].append(str(v, "utf-8"))
            nodes.append((texts[1], texts[2], texts[3][-1], texts[4][-1]))
    return nodes, initializers


def _fields(data: bytes | memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of every field of a message; bytes for those with a length, else None."""
    view, at = memoryview(data), 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = view[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(view):
        number, kind = divmod(varint(), 8)
        value = None
        if kind == 0:
            varint()
        elif kind == 2:
            size = varint()
            value = view[at : at + size]
            at += size
        else:  # fixed 64 or 32 bits
            at += 8 if kind == 1 else 4
        yield number, value
