"""The DFlash backbone graph: one parallel pass over [anchor, mask × (γ-1)].

Source: DSpark (arXiv 2607.05147) equations 2-4, DeepSpec's Qwen3DSparkModel. Every layer's keys and
values come from both the committed context (projected target features) and the block; queries come
from the block only, which sees the whole context and the whole block (bidirectional).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from .contract import DecoderSpec, DraftContract, DType
from .layers import (
    DecoderLayer,
    Embedding,
    Linear,
    PaddedRows,
    RMSNorm,
    arange,
    attention,
    axis_size,
    cast,
    head_rows,
    norm_heads,
    packed_rows,
    query_groups,
    query_rows,
    repeat,
    rope_table,
    visibility_mask,
    write_cache,
)

Table = tuple[ir.Value, ir.Value]


class BlockAttention(nn.Module):
    """Attention of the block over the cached context and itself; no causal order inside the block.

    Context rows and block rows share k_proj and v_proj; context rows get no input norm.
    """

    def __init__(self, spec: DecoderSpec, dtype: DType):
        super().__init__()
        d, h, k = (
            spec.hidden_size,
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
        )
        self.q_proj = Linear(d, h, dtype, spec.attention_bias)
        self.kv_proj = Linear(d, 2 * k, dtype, spec.attention_bias)
        self.o_proj = Linear(h, d, dtype, spec.attention_out_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.spec = spec
        self.dtype = dtype

    def forward(
        self,
        op: Any,
        block: ir.Value,
        context: ir.Value,
        past: tuple[ir.Value, ir.Value],
        past_length: ir.Value,
        tables: tuple[Table, Table],
        rows: PaddedRows,
        mask: ir.Value,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """block [B·γ, d], context [P, d] -> attention output [B·γ, d] and the updated caches.

        tables: of the new cache rows [R, X+γ] and of the block, as q lies. Context and block go
        into each cache in one write, because TensorRT allows one update of a cache per run.
        """
        s = self.spec
        q = op.Reshape(self.q_proj(op, block), [-1, s.head_dim])
        q = op.Gather(norm_heads(op, self.q_norm, q, self.dtype), rows.q, axis=0)
        q = op.RotaryEmbedding(q, *tables[1])
        kv = self.kv_proj(op, op.Concat(context, block, axis=0))
        kv = op.Reshape(kv, [-1, s.head_dim])
        k, v = (op.Gather(kv, index, axis=0) for index in (rows.k, rows.v))
        k = op.RotaryEmbedding(norm_heads(op, self.k_norm, k, self.dtype), *tables[0])
        key = write_cache(op, past[0], k, past_length)
        value = write_cache(op, past[1], v, past_length)
        y = attention(op, q, key, value, mask, rows.packed, s)
        return self.o_proj(op, y), key, value


class BlockLayer(DecoderLayer):
    """u = norm x; x += attention(u, context); x += mlp(norm x)."""

    def __init__(self, spec: DecoderSpec, dtype: DType):
        super().__init__(spec, dtype, BlockAttention(spec, dtype))

    def forward(self, op: Any, x: ir.Value, *inputs: Any) -> tuple[ir.Value, ir.Value, ir.Value]:
        y, key, value = self.self_attn(op, self.attention_input(op, x), *inputs)
        return self.add_attention(op, x, y), key, value


class Backbone(nn.Module):
    """Projects new target features into the draft cache and drafts one block.

    Inputs: features [N, m·d] f32, the target's output as it is; feature_index [P] i64, the rows of
    `features` that became committed tokens, request by request; context_cell [R, X] i64, which of
    those P each padded cell holds (any where there is none); feature_count [R] i64, how many of the
    X are valid; past_length [R] i64, rows already in the draft cache; anchor [B] i64, of the
    requests that draft; request_block [R] i64, the block of each request (any for those that do not
    draft); block_request [B] i64, its inverse; past_key.i / past_value.i [R, K, C, D], updated in
    place. The cache must have room for past_length + X + γ rows.
    Outputs: hidden [B, γ, d] f32 (after the final norm); base_logits [B, γ, U] f32; present_*. U is
    the vocabulary or, with a draft vocabulary, the tokens of it, which the Markov graphs know.

    The committed tokens occupy positions 0 .. past_length + feature_count - 1 and the anchor the
    next one, so a cache row is a position.
    """

    def __init__(
        self, contract: DraftContract, max_positions: int, dtype: DType, tied: bool = False
    ):
        super().__init__()
        spec = contract.decoder
        d = spec.hidden_size
        self.embed_tokens = Embedding(contract.vocab_size, d, dtype)
        # A float32 island: target features may exceed the fp16 range.
        self.fc = Linear(len(contract.tap_ids) * d, d, "fp32")
        self.hidden_norm = RMSNorm(d, spec.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(spec, dtype) for _ in range(spec.num_layers)])
        self.norm = RMSNorm(d, spec.rms_norm_eps)
        self.lm_head = Linear(d, contract.head_size, dtype)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.contract = contract
        self.max_positions = max_positions
        self.dtype = dtype

    def forward(
        self,
        op: Any,
        features: ir.Value,
        feature_index: ir.Value,
        context_cell: ir.Value,
        feature_count: ir.Value,
        past_length: ir.Value,
        anchor: ir.Value,
        request_block: ir.Value,
        block_request: ir.Value,
        past: list[tuple[ir.Value, ir.Value]],
    ) -> tuple[ir.Value, ir.Value, list[tuple[ir.Value, ir.Value]]]:
        c, spec, dtype = self.contract, self.contract.decoder, self.dtype
        gamma, d = c.block_size, spec.hidden_size

        rows = op.Gather(features, feature_index, axis=0)
        context = cast(op, self.hidden_norm(op, self.fc(op, rows)), "fp32", dtype)

        block_start = op.Add(past_length, feature_count)
        slots = op.Constant(value=ir.tensor(np.arange(gamma, dtype=np.int64).reshape(1, gamma)))
        block_cell = _cells(op, request_block, gamma, slots)
        width = op.Add(axis_size(op, context_cell, 1), op.Constant(value_ints=[gamma]))
        columns = op.Unsqueeze(arange(op, width), [0])
        row_positions = op.Add(op.Unsqueeze(past_length, [1]), columns)
        block_positions = op.Add(op.Unsqueeze(block_start, [1]), slots)
        groups = query_groups(spec, dtype)
        tables = (
            rope_table(op, row_positions, spec, self.max_positions, dtype),
            rope_table(op, repeat(op, block_positions, groups), spec, self.max_positions, dtype),
        )
        block_end = op.Add(op.Unsqueeze(block_start, [1]), op.Constant(value_ints=[gamma - 1]))
        last_visible = op.Add(block_end, op.Mul(slots, op.Constant(value_int=0)))
        mask = visibility_mask(op, last_visible, axis_size(op, past[0][0], 2), dtype)
        mask = repeat(op, mask, groups, axis=2)

        # The anchor is an input; the other γ-1 slots hold the mask token.
        ids = op.Unsqueeze(anchor, [1])
        if gamma > 1:
            masks = op.Constant(value=ir.tensor(np.full((1, gamma - 1), c.mask_token_id, np.int64)))
            zero_column = op.Mul(ids, op.Constant(value_int=0))
            ids = op.Concat(ids, op.Add(zero_column, masks), axis=1)
        x = self.embed_tokens(op, op.Reshape(ids, [-1]))

        # Slot j of block b is packed token b·γ + j, and row P + b·γ + j behind the context's rows.
        # The new cache rows of a request are its context, its block, then garbage.
        column = op.Sub(columns, op.Unsqueeze(feature_count, [1]))  # 0 is the anchor
        zero, last = op.Constant(value_int=0), op.Constant(value_int=gamma - 1)
        slot = op.Min(op.Max(column, zero), last)
        in_block = op.Add(_cells(op, request_block, gamma, slot), axis_size(op, feature_index, 0))
        in_context = op.Concat(context_cell, block_cell, axis=1)  # the right part is never chosen
        cell = op.Where(op.Less(column, zero), in_context, in_block)
        block_token = op.Reshape(_cells(op, block_request, gamma, slots), [-1])
        k = spec.num_kv_heads
        rows = PaddedRows(
            query_rows(op, block_cell, spec.num_heads, spec, dtype),
            head_rows(op, cell, 2 * k, range(k)),
            head_rows(op, cell, 2 * k, range(k, 2 * k)),
            packed_rows(op, block_token, op.Constant(value_ints=[gamma]), spec.num_heads),
        )
        present = []
        for i, layer in enumerate(self.layers):
            x, key, value = layer(op, x, context, past[i], past_length, tables, rows, mask)
            present.append((key, value))
        hidden = self.norm(op, x)
        logits = cast(op, self.lm_head(op, cast(op, hidden, "fp32", dtype)), dtype, "fp32")
        return (
            op.Reshape(hidden, [-1, gamma, d]),
            op.Reshape(logits, [-1, gamma, c.head_size]),
            present,
        )


def _cells(op: Any, block: ir.Value, gamma: int, slots: ir.Value) -> ir.Value:
    """block·γ + slot for block [n] and slots [1 or n, k]: [n, k]."""
    return op.Add(op.Mul(op.Unsqueeze(block, [1]), op.Constant(value_int=gamma)), slots)
