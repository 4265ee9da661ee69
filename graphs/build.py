"""Assembles the modules into ONNX models with named, typed inputs and outputs.

Every model uses opset 24, standard operators only, symbolic batch and widths. Weights are
initializers without data; their names are the names of the tensors in the bundle's weights file, so
the same name in two graphs is one tensor on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript import GraphBuilder, nn

from .accept import AcceptGreedy, AcceptSample
from .backbone import Backbone
from .confidence import Confidence
from .contract import DecoderSpec, DraftContract, DType, TargetContract
from .layers import F32, I64, IR_DTYPE
from .markov import Markov
from .target import Target

OPSET = 24
IR_VERSION = 11

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"

Dim = int | str
# Symbolic axes of every graph; docs/bundle.md explains each.
AXES = {
    "R": "requests (slots of the caches)",
    "B": "requests that draft in this call",
    "N": "packed tokens of all requests",
    "S": "padded width: most tokens of one request",
    "M": "rows that need logits",
    "P": "packed rows of new context of all requests",
    "X": "padded width of new context: most rows of one request",
    "C": "cache capacity in rows",
}


@dataclass(frozen=True)
class Port:
    """One graph input or output."""

    name: str
    dtype: ir.DataType
    shape: tuple[Dim, ...]


def _kv_ports(prefix: str, spec: DecoderSpec, dtype: DType) -> list[Port]:
    shape = ("R", spec.num_kv_heads, "C", spec.head_dim)
    return [
        Port(f"{prefix}_{kind}.{i}", IR_DTYPE[dtype], shape)
        for i in range(spec.num_layers)
        for kind in ("key", "value")
    ]


def _assemble(
    name: str,
    module: nn.Module,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    call: Callable[[Any, list[ir.Value]], list[ir.Value]],
    rename: Callable[[str], str],
) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    builder = GraphBuilder(graph)
    values = [builder.input(p.name, p.dtype, p.shape) for p in inputs]
    results = call(builder.op, values)
    seen: set[str] = set()
    for path, parameter in module.named_parameters():
        tensor = rename(path)
        if tensor not in seen:  # a tied head is the embedding's own parameter
            parameter.name = tensor
            seen.add(tensor)
    if len(results) != len(outputs):
        raise AssertionError(f"{name}: {len(results)} results for {len(outputs)} outputs")
    for value, port in zip(results, outputs, strict=True):
        value.shape = ir.Shape(port.shape)
        value.type = ir.TensorType(port.dtype)
        builder.add_output(value, port.name)
    for node in graph.all_nodes():
        node.metadata_props.clear()  # scope names of the builder: noise in the file
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="draftgraph")


def _pairs(values: Sequence[ir.Value]) -> list[tuple[ir.Value, ir.Value]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _flat(pairs: Sequence[tuple[ir.Value, ir.Value]]) -> list[ir.Value]:
    return [v for pair in pairs for v in pair]


def build_target(contract: TargetContract, tap_ids: tuple[int, ...], dtype: DType) -> ir.Model:
    """See `Target` for the tensors."""
    spec = contract.decoder
    module = Target(contract, tap_ids, dtype)
    inputs = [
        Port("input_ids", I64, ("N",)),
        Port("past_length", I64, ("R",)),
        Port("cell_token", I64, ("R", "S")),
        Port("token_cell", I64, ("N",)),
        Port("logits_index", I64, ("M",)),
        *_kv_ports("past", spec, dtype),
    ]
    outputs = [
        Port("logits", F32, ("M", contract.vocab_size)),
        Port("features", F32, ("N", len(tap_ids) * spec.hidden_size)),
        *_kv_ports("present", spec, dtype),
    ]

    def call(op: Any, v: list[ir.Value]) -> list[ir.Value]:
        logits, features, present = module(op, *v[:5], _pairs(v[5:]))
        return [logits, features, *_flat(present)]

    def rename(path: str) -> str:
        if path in (EMBEDDING, HEAD):
            return EMBEDDING if contract.tied_head else path
        return f"target.{path}"

    return _assemble("target", module, inputs, outputs, call, rename)


def build_backbone(draft: DraftContract, target: TargetContract, dtype: DType) -> ir.Model:
    """See `Backbone` for the tensors."""
    spec = draft.decoder
    embedding, head = draft_embedding_names(draft, target)
    longest = target.max_position_embeddings
    module = Backbone(draft, longest, dtype, tied=embedding == head)
    features = len(draft.tap_ids) * spec.hidden_size
    inputs = [
        Port("features", F32, ("N", features)),
        Port("feature_index", I64, ("P",)),
        Port("context_cell", I64, ("R", "X")),
        Port("feature_count", I64, ("R",)),
        Port("past_length", I64, ("R",)),
        Port("anchor", I64, ("B",)),
        Port("request_block", I64, ("R",)),
        Port("block_request", I64, ("B",)),
        *_kv_ports("past", spec, dtype),
    ]
    outputs = [
        Port("hidden", F32, ("B", draft.block_size, spec.hidden_size)),
        Port("base_logits", F32, ("B", draft.block_size, draft.head_size)),
        *_kv_ports("present", spec, dtype),
    ]

    def call(op: Any, v: list[ir.Value]) -> list[ir.Value]:
        hidden, logits, present = module(op, *v[:8], _pairs(v[8:]))
        return [hidden, logits, *_flat(present)]

    def rename(path: str) -> str:
        return {EMBEDDING: embedding, HEAD: head}.get(path, f"backbone.{path}")

    return _assemble("backbone", module, inputs, outputs, call, rename)


def draft_embedding_names(draft: DraftContract, target: TargetContract) -> tuple[str, str]:
    """Names in the weights file of the drafter's embedding and head."""
    embedding = EMBEDDING if draft.shares_embedding else f"backbone.{EMBEDDING}"
    target_head = EMBEDDING if target.tied_head else HEAD
    shared = draft.shares_head and draft.draft_vocab_size is None
    return embedding, target_head if shared else f"backbone.{HEAD}"


def build_markov(
    draft: DraftContract, dtype: DType, top_k: int | None = None, greedy: bool = False
) -> ir.Model:
    """See `Markov` for the tensors. `top_k` below the size of the head truncates it."""
    gamma, v, d = draft.block_size, draft.vocab_size, draft.decoder.hidden_size
    module = Markov(draft, dtype, top_k, greedy)
    uses_hidden = draft.markov_type in ("gated", "rnn")
    inputs = [Port("base_logits", F32, ("B", gamma, draft.head_size))]
    if uses_hidden:
        inputs.append(Port("hidden", F32, ("B", gamma, d)))
    inputs.append(Port("anchor", I64, ("B",)))
    outputs = [Port("draft_ids", I64, ("B", gamma))]
    if not greedy:
        inputs += [Port("uniforms", F32, ("B", gamma)), Port("temperature", F32, ("B",))]
        outputs.append(Port("draft_logits", F32, ("B", gamma, v)))
    if draft.markov_type != "none":
        outputs.append(Port("prev_embeddings", F32, ("B", gamma, draft.markov_rank)))

    def call(op: Any, values: list[ir.Value]) -> list[ir.Value]:
        base, *rest = values
        hidden = rest.pop(0) if uses_hidden else None
        return module(op, base, hidden, *rest)

    name = "markov" + ("" if top_k is None else "_topk") + ("_greedy" if greedy else "")
    return _assemble(
        name, module, inputs, outputs, call, lambda p: f"markov.{p.removeprefix('markov_')}"
    )


def build_confidence(draft: DraftContract) -> ir.Model:
    """See `Confidence` for the tensors."""
    gamma, d, r = draft.block_size, draft.decoder.hidden_size, draft.markov_rank
    module = Confidence(draft)
    with_markov = draft.confidence_with_markov
    inputs = [
        Port("hidden", F32, ("B", gamma, d)),
        *([Port("prev_embeddings", F32, ("B", gamma, r))] if with_markov else []),
    ]
    outputs = [Port("confidence_logits", F32, ("B", gamma))]

    def call(op: Any, v: list[ir.Value]) -> list[ir.Value]:
        return [module(op, v[0], v[1] if with_markov else None)]

    return _assemble("confidence", module, inputs, outputs, call, lambda p: f"confidence.{p}")


def build_accept(draft: DraftContract, kind: str) -> ir.Model:
    """See `AcceptGreedy` and `AcceptSample`; kind is "greedy", "sample" or "filtered"."""
    gamma, v = draft.block_size, draft.vocab_size
    verified = [
        Port("target_logits", F32, ("N", v)),
        Port("cell_token", I64, ("R", gamma + 1)),
    ]
    drafted = Port("draft_ids", I64, ("B", gamma))
    block = Port("request_block", I64, ("R",))
    length = Port("verify_length", I64, ("R",))
    module: nn.Module
    if kind == "greedy":
        module = AcceptGreedy(gamma)
        inputs = [*verified, drafted, block, length]
    else:
        module = AcceptSample(gamma, v, filters=kind == "filtered")
        inputs = [
            *verified,
            Port("token_request", I64, ("N",)),
            drafted,
            Port("draft_logits", F32, ("B", gamma, v)),
            block,
            length,
            Port("accept_uniform", F32, ("R", gamma)),
            Port("sample_uniform", F32, ("R",)),
            Port("temperature", F32, ("R",)),
            Port("draft_temperature", F32, ("B",)),
        ]
        if kind == "filtered":
            inputs += [Port("top_k", I64, ("R",)), Port("top_p", F32, ("R",))]
    outputs = [Port("accepted", I64, ("R",)), Port("next_id", I64, ("R",))]

    def call(op: Any, values: list[ir.Value]) -> list[ir.Value]:
        return list(module(op, *values))

    return _assemble(f"accept_{kind}", module, inputs, outputs, call, lambda path: path)
