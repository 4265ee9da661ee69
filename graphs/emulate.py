"""A CPU form of bf16 graphs: the same values, computed in float32 and rounded after every operator.

ONNX Runtime's CPU provider moves bf16 tensors but has no bf16 arithmetic (1.32; fp16 graphs run as
they are). A bf16 bundle therefore carries this second form of each affected graph, so that it can
be validated and run anywhere; both forms read the same weights.
"""

from __future__ import annotations

import onnx_ir as ir

BF16, F32 = ir.DataType.BFLOAT16, ir.DataType.FLOAT

# Operators that only move data: they keep bf16.
_MOVES_DATA = frozenset(
    {"Cast", "Concat", "Gather", "Identity", "Reshape", "Split", "TensorScatter", "Transpose"}
)


def has_bf16(model: ir.Model) -> bool:
    """Does any tensor of the graph have bf16 elements?"""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values()]
    values += [v for node in graph for v in node.outputs]
    return any(v.dtype == BF16 for v in values)


class EmulateBf16(ir.passes.InPlacePass):
    """Wrap every bf16 arithmetic node in casts to float32 and back."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        casts: dict[ir.Value, ir.Value] = {}  # one float32 copy of each bf16 value
        modified = False
        for node in list(graph):
            bf16_outputs = [v for v in node.outputs if v.dtype == BF16]
            touches = bf16_outputs or any(v is not None and v.dtype == BF16 for v in node.inputs)
            if node.op_type in _MOVES_DATA or not touches:
                continue
            modified = True
            for i, value in enumerate(node.inputs):
                if value is None or value.dtype != BF16:
                    continue
                if value not in casts:
                    casts[value] = self._cast(graph, value, F32, before=node)
                node.replace_input_with(i, casts[value])
            for value in bf16_outputs:
                value.dtype = F32
                users = list(value.uses())
                rounded = self._cast(graph, value, BF16, after=node)
                for use in users:
                    use.node.replace_input_with(use.idx, rounded)
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
