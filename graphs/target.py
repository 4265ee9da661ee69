"""The target graph: embeds, decodes one chunk of tokens per request, taps features for the drafter.

Serves prefill, plain decoding (one token per request) and verification (1 + ℓ tokens per request).
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import nn

from .contract import DecoderSpec, DType, TargetContract
from .layers import (
    Attention,
    DecoderLayer,
    Embedding,
    Head,
    PaddedRows,
    RMSNorm,
    arange,
    axis_size,
    heads_rope_table,
    query_groups,
    repeat,
    visibility_mask,
    write_cache,
)


class TargetLayer(DecoderLayer):
    """One decoder layer over the target's cache."""

    self_attn: Attention

    def __init__(self, spec: DecoderSpec, dtype: DType):
        super().__init__(spec, dtype, Attention(spec, dtype))

    def forward(
        self,
        op: Any,
        x: ir.Value,
        past: tuple[ir.Value, ir.Value],
        past_length: ir.Value,
        table: tuple[ir.Value, ir.Value],
        mask: ir.Value,
        rows: PaddedRows,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        q, k, v = self.self_attn.project(op, self.attention_input(op, x), rows, *table)
        key = write_cache(op, past[0], k, past_length)
        value = write_cache(op, past[1], v, past_length)
        y = self.self_attn.attend(op, q, key, value, mask, rows)
        return self.add_attention(op, x, y), key, value


class Target(nn.Module):
    """Llama and Qwen3 dense decoders.

    Inputs: input_ids [N] i64; past_length [R] i64, committed rows of each request; cell_token
    [R, S] i64, the packed token of every padded cell, any valid one where there is none;
    token_cell [N] i64, the flattened cell r·S + s of every packed token; logits_index [M] i64, the
    packed tokens that need logits; past_key.i / past_value.i [R, K, C, D], updated in place.
    Outputs: logits [M, V] f32; features [N, m·d] f32 (taps concatenated in contract order);
    present_key.i / present_value.i.
    """

    def __init__(self, contract: TargetContract, tap_ids: tuple[int, ...], dtype: DType):
        super().__init__()
        spec = contract.decoder
        self.embed_tokens = Embedding(contract.vocab_size, spec.hidden_size, dtype)
        self.layers = nn.ModuleList([TargetLayer(spec, dtype) for _ in range(spec.num_layers)])
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = Head(spec.hidden_size, contract.vocab_size, dtype)
        if contract.tied_head:
            self.lm_head.weight = self.embed_tokens.weight
        self.contract = contract
        self.tap_ids = tap_ids
        self.dtype = dtype

    def forward(
        self,
        op: Any,
        input_ids: ir.Value,
        past_length: ir.Value,
        cell_token: ir.Value,
        token_cell: ir.Value,
        logits_index: ir.Value,
        past: list[tuple[ir.Value, ir.Value]],
    ) -> tuple[ir.Value, ir.Value, list[tuple[ir.Value, ir.Value]]]:
        c = self.contract
        rows = PaddedRows.of(op, cell_token, token_cell, c.decoder, self.dtype)
        positions = op.Add(
            op.Unsqueeze(past_length, [1]),
            op.Unsqueeze(arange(op, axis_size(op, cell_token, 1)), [0]),
        )
        packed = op.Gather(op.Reshape(positions, [-1]), token_cell, axis=0)
        table = heads_rope_table(op, packed, c.decoder, c.max_position_embeddings, self.dtype)
        mask = visibility_mask(op, positions, axis_size(op, past[0][0], 2), self.dtype)
        mask = repeat(op, mask, query_groups(c.decoder, self.dtype), axis=2)

        x = self.embed_tokens(op, input_ids)
        stream = {-1: x}  # id i: residual stream after layer i
        present = []
        for i, layer in enumerate(self.layers):
            x, key, value = layer(op, x, past[i], past_length, table, mask, rows)
            stream[i] = x
            present.append((key, value))

        last = self.norm(op, op.Gather(x, logits_index, axis=0))
        logits = self.lm_head(op, last)
        taps = [stream[i] for i in self.tap_ids]
        features = op.Concat(*taps, axis=-1) if len(taps) > 1 else op.Identity(taps[0])
        return logits, features, present
