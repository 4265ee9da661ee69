"""A CPU form of fp16 and bf16 graphs: computed in float32, rounded after every operator.

ONNX Runtime's CPU provider (1.32) has no bf16 arithmetic. Most of its fp16 operators are float32
ones between casts, and it removes such a pair of casts where they meet, so an fp16 graph runs there
almost unrounded: a value that overflows on a device stays finite, and nothing shows. A half
precision bundle therefore carries this second form of each affected graph, whose rounding is part
of the graph, so that it can be validated and run anywhere; both forms read the same weights.
"""

from __future__ import annotations

import onnx_ir as ir

F32 = ir.DataType.FLOAT
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# Operators that only move data: they keep their type.
_MOVES_DATA = frozenset(
    {"Cast", "Concat", "Gather", "Identity", "Reshape", "Split", "TensorScatter", "Transpose"}
)


def has_half(model: ir.Model) -> bool:
    """Does any tensor of the graph have fp16 or bf16 elements?"""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values()]
    values += [v for node in graph for v in node.outputs]
    return any(v.dtype in HALF for v in values)


class EmulateHalf(ir.passes.InPlacePass):
    """Wrap every arithmetic node over half-precision tensors in casts to float32 and back."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        casts: dict[ir.Value, ir.Value] = {}  # one float32 copy of each half-precision value
        modified = False
        for node in list(graph):
            rounded = [(v, v.dtype) for v in node.outputs if v.dtype in HALF]
            touches = rounded or any(v is not None and v.dtype in HALF for v in node.inputs)
            if node.op_type in _MOVES_DATA or not touches:
                continue
            modified = True
            for i, value in enumerate(node.inputs):
                if value is None or value.dtype not in HALF:
                    continue
                if value not in casts:
                    casts[value] = self._cast(graph, value, F32, before=node)
                node.replace_input_with(i, casts[value])
            for value, dtype in rounded:
                assert dtype is not None
                value.dtype = F32
                users = list(value.uses())
                result = self._cast(graph, value, dtype, after=node)
                for use in users:
                    use.node.replace_input_with(use.idx, result)
        return ir.passes.PassResult(model, modified)

    def _cast(
        self,
        graph: ir.Graph,
        value: ir.Value,
        to: ir.DataType,
        *,
        before: ir.Node | None = None,
        after: ir.Node | None = None,
    ) -> ir.Value:
        node = ir.node("Cast", [value], attributes={"to": to}, version=24)
        out = node.outputs[0]
        out.name = f"{value.name}_as_{to.name.lower()}"
        node.name = f"{out.name}_cast"
        out.dtype, out.shape = to, value.shape
        if before is not None:
            graph.insert_before(before, node)
        else:
            assert after is not None
            graph.insert_after(after, node)
        return out
