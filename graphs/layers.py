"""Building blocks shared by the target and the backbone graphs.

Precision rule of all graphs: linear layers and attention run in the compute dtype; the residual
stream, norms, rope tables, features and the target's logits are float32 islands, because hidden
states of some targets spike far beyond the fp16 range (above 2e4 on Qwen3-8B) and rounded logits
tie. With fp32 the casts vanish.

Linear layers, and in the target rotation, run on packed tokens [N, d]; only attention sees the
padded view [R, S], so the cost of a ragged batch follows its number of tokens. Weights keep
torch's [out, in] layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import nn

from .contract import DecoderSpec, DType
from .rope import inverse_frequencies

IR_DTYPE = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
F32 = ir.DataType.FLOAT
I64 = ir.DataType.INT64

# Additive mask value for a position that must not be attended. In fp16 it must survive being added
# to a score without overflowing; everywhere it must make exp(score + value - max) exactly zero.
MASKED = {"fp32": -1e30, "bf16": -1e30, "fp16": -3e4}
# Logit of a token that cannot be drafted: exp(it - anything sane) is exactly 0.
EXCLUDED = -1e30


def cast(op: Any, x: ir.Value, dtype: DType, to: DType) -> ir.Value:
    """`x` converted from `dtype` to `to`; no node when they are the same."""
    return x if dtype == to else op.Cast(x, to=IR_DTYPE[to])


class Linear(nn.Module):
    """y = x Wᵀ (+ b) for x [N, in]; weight [out, in] as torch stores it."""

    def __init__(self, n_in: int, n_out: int, dtype: DType, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter([n_out, n_in], IR_DTYPE[dtype])
        self.bias = nn.Parameter([n_out], IR_DTYPE[dtype]) if bias else None

    def forward(self, op: Any, x: ir.Value) -> ir.Value:
        if self.bias is None:
            return op.Gemm(x, self.weight, transB=1)
        return op.Gemm(x, self.weight, self.bias, transB=1)


class Head(nn.Module):
    """Logits [N, V] in float32 of hidden states x [N, d] in float32; weight [V, d].

    An island: logits of 16 to 32, as models have them, lie 1/64 apart in fp16 and 1/8 in bf16, so
    rounding them would make ties of the best tokens. Products of fp16 or bf16 numbers are exact in
    float32, so the weight is not rounded again.
    """

    def __init__(self, size: int, vocab_size: int, dtype: DType):
        super().__init__()
        self.weight = nn.Parameter([vocab_size, size], IR_DTYPE[dtype])
        self.dtype = dtype

    def forward(self, op: Any, x: ir.Value) -> ir.Value:
        return op.Gemm(x, cast(op, self.weight, self.dtype, "fp32"), transB=1)


class Embedding(nn.Module):
    """Rows of a [V, d] table as float32."""

    def __init__(self, vocab_size: int, size: int, dtype: DType):
        super().__init__()
        self.weight = nn.Parameter([vocab_size, size], IR_DTYPE[dtype])
        self.dtype = dtype

    def forward(self, op: Any, ids: ir.Value) -> ir.Value:
        return cast(op, op.Gather(self.weight, ids, axis=0), self.dtype, "fp32")


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x²) + eps) over the last axis, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter([size], F32)
        self.eps = eps

    def forward(self, op: Any, x: ir.Value) -> ir.Value:
        return op.RMSNormalization(x, self.weight, axis=-1, epsilon=self.eps)


def head_rows(op: Any, cell_token: ir.Value, heads: int, chosen: range) -> ir.Value:
    """Where the padded view takes heads from: rows of packed heads [N·heads, D].

    cell_token [R, S]: the packed token of every padded cell, any valid one where there is none.
    Returns [R, len(chosen), S]: one Gather pads and puts the heads before the tokens.
    """
    offsets = np.array(chosen, np.int64).reshape(1, -1, 1)
    first = op.Mul(cell_token, op.Constant(value_int=heads))
    return op.Add(op.Unsqueeze(first, [1]), op.Constant(value=ir.tensor(offsets)))


def packed_rows(op: Any, token_cell: ir.Value, width: ir.Value, heads: int) -> ir.Value:
    """The way back: rows [N, heads] of padded heads [R·heads·S, D].

    token_cell [N]: the flattened cell r·S + s of every packed token. width [1]: S.
    """
    before = op.Mul(op.Div(token_cell, width), width)  # r·S
    first = op.Add(token_cell, op.Mul(before, op.Constant(value_int=heads - 1)))
    offsets = op.Mul(op.Constant(value_ints=list(range(heads))), width)
    return op.Add(op.Unsqueeze(first, [1]), op.Unsqueeze(offsets, [0]))


def query_rows(
    op: Any, cell_token: ir.Value, heads: int, spec: DecoderSpec, dtype: DType
) -> ir.Value:
    """`head_rows` of the queries, the first of `heads`: [R, H, S], or grouped [R, K, G·S]."""
    rows = head_rows(op, cell_token, heads, range(spec.num_heads))
    return rows if query_groups(spec, dtype) == 1 else op.Reshape(rows, [0, spec.num_kv_heads, -1])


def axis_size(op: Any, x: ir.Value, axis: int) -> ir.Value:
    """The size of one axis as an int64 tensor of shape [1]."""
    return op.Shape(x, start=axis, end=axis + 1)


def arange(op: Any, size: ir.Value) -> ir.Value:
    """0 .. size-1 as int64 for a size of shape [1]."""
    return op.Range(op.Constant(value_int=0), op.Squeeze(size, [0]), op.Constant(value_int=1))


def rope_table(
    op: Any, positions: ir.Value, spec: DecoderSpec, max_positions: int, dtype: DType
) -> tuple[ir.Value, ir.Value]:
    """cos and sin [R, S, head_dim/2] of positions [R, S], computed in float32 once per run."""
    cos, sin = _angles(op, positions, spec, max_positions)
    return cast(op, cos, "fp32", dtype), cast(op, sin, "fp32", dtype)


def heads_rope_table(
    op: Any, positions: ir.Value, spec: DecoderSpec, max_positions: int, dtype: DType
) -> tuple[ir.Value, ir.Value]:
    """cos and sin [1, N·(H + 2K), head_dim/2] for all heads of packed tokens at positions [N].

    Values get the identity, so that q, k and v go through one rotation before they are padded.
    """
    cos, sin = _angles(op, op.Unsqueeze(positions, [1]), spec, max_positions)  # [N, 1, D/2]
    rotated, values = spec.num_heads + spec.num_kv_heads, spec.num_kv_heads
    turns = op.Constant(value=ir.tensor(np.repeat([True, False], [rotated, values])[:, None]))

    def per_head(x: ir.Value, rest: float) -> ir.Value:
        table = op.Where(turns, x, op.Constant(value=ir.tensor(np.float32(rest))))
        return cast(op, op.Reshape(table, [1, -1, spec.head_dim // 2]), "fp32", dtype)

    return per_head(cos, 1.0), per_head(sin, 0.0)


def _angles(
    op: Any, positions: ir.Value, spec: DecoderSpec, max_positions: int
) -> tuple[ir.Value, ir.Value]:
    """cos and sin [..., head_dim/2] in float32 of positions [A, B]."""
    inv_freq, factor = inverse_frequencies(spec.rope, spec.head_dim, max_positions)
    angle = op.Mul(
        op.Unsqueeze(op.Cast(positions, to=F32), [2]),
        op.Constant(value=ir.tensor(inv_freq.astype(np.float32).reshape(1, 1, -1))),
    )
    cos, sin = op.Cos(angle), op.Sin(angle)
    if factor != 1.0:
        scale = op.Constant(value_float=float(factor))
        cos, sin = op.Mul(cos, scale), op.Mul(sin, scale)
    return cos, sin


def visibility_mask(op: Any, last_visible: ir.Value, capacity: ir.Value, dtype: DType) -> ir.Value:
    """Additive mask [R, 1, S, C]: row s of request r sees cache rows 0 .. last_visible[r, s].

    One explicit mask per run, shared by all layers: `is_causal` and `nonpad_kv_seqlen` are dropped
    silently by the TensorRT parsers, so no portable graph relies on them.
    """
    rows = op.Unsqueeze(last_visible, [1, 3])
    visible = op.LessOrEqual(op.Unsqueeze(arange(op, capacity), [0, 1, 2]), rows)
    zero, masked = (
        op.Constant(value=ir.tensor(np.array(v, np.float32))) for v in (0.0, MASKED[dtype])
    )
    return cast(op, op.Where(visible, zero, masked), "fp32", dtype)


def query_groups(spec: DecoderSpec, dtype: DType) -> int:
    """Query heads that share a key head and become rows of one head; 1 leaves attention as it is.

    The rows of a group see the same cache, so [R, H, S, D] is read as [R, K, H/K·S, D] without
    moving anything, and one matrix product serves the group: half the time on a CPU in batches.
    Half precision keeps the grouped form, for which accelerators have their own kernels.
    """
    return spec.num_heads // spec.num_kv_heads if dtype == "fp32" else 1


def repeat(op: Any, x: ir.Value, times: int, axis: int = 1) -> ir.Value:
    """x `times` times along its axis of query rows, for the G = `query_groups` heads of a group."""
    return x if times == 1 else op.Concat(*[x] * times, axis=axis)


@dataclass(frozen=True)
class PaddedRows:
    """How packed heads and the padded view map to each other, once per run.

    q, k, v: `head_rows`, those of q grouped (`query_rows`): of all heads [N·(H + 2K), D] of a token
    in the target, of the block's queries and of new keys and values in the backbone. packed:
    `packed_rows` of all tokens.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    packed: ir.Value

    @classmethod
    def of(
        cls,
        op: Any,
        cell_token: ir.Value,
        token_cell: ir.Value,
        spec: DecoderSpec,
        dtype: DType,
    ) -> PaddedRows:
        h, k = spec.num_heads, spec.num_kv_heads
        heads = h + 2 * k
        return cls(
            query_rows(op, cell_token, heads, spec, dtype),
            head_rows(op, cell_token, heads, range(h, h + k)),
            head_rows(op, cell_token, heads, range(h + k, heads)),
            packed_rows(op, token_cell, axis_size(op, cell_token, 1), h),
        )


class Attention(nn.Module):
    """Grouped-query attention over a static cache that is updated in place.

    New keys and values are written at rows write_index[r] .. write_index[r]+S-1 of the cache
    [R, K, C, D]; attention reads the whole cache through the additive mask. Scale D^-0.5.
    """

    def __init__(self, spec: DecoderSpec, dtype: DType):
        super().__init__()
        heads = spec.num_heads + 2 * spec.num_kv_heads
        self.qkv_proj = Linear(spec.hidden_size, heads * spec.head_dim, dtype, spec.attention_bias)
        self.o_proj = Linear(
            spec.num_heads * spec.head_dim, spec.hidden_size, dtype, spec.attention_out_bias
        )
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.spec = spec
        self.dtype = dtype

    def project(
        self, op: Any, x: ir.Value, rows: PaddedRows, cos: ir.Value, sin: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """x [N, d] -> rotated q as attention reads it, rotated k [R, K, S, D], v [R, K, S, D]."""
        s = self.spec
        heads = self.qkv_proj(op, x)
        if s.qk_norm:
            heads = op.Reshape(heads, [0, -1, s.head_dim])
            split = [s.num_heads, s.num_kv_heads, s.num_kv_heads]
            q, k, v = op.Split(heads, split, axis=1, _outputs=3)
            q = norm_heads(op, self.q_norm, q, self.dtype)
            k = norm_heads(op, self.k_norm, k, self.dtype)
            heads = op.Concat(q, k, v, axis=1)
        heads = op.RotaryEmbedding(op.Reshape(heads, [1, 1, -1, s.head_dim]), cos, sin)
        heads = op.Reshape(heads, [-1, s.head_dim])
        q, k, v = (op.Gather(heads, index, axis=0) for index in (rows.q, rows.k, rows.v))
        return q, k, v

    def attend(
        self,
        op: Any,
        q: ir.Value,
        key: ir.Value,
        value: ir.Value,
        mask: ir.Value,
        rows: PaddedRows,
    ) -> ir.Value:
        """q over caches [R, K, C, D] -> [N, d]."""
        return self.o_proj(op, attention(op, q, key, value, mask, rows.packed, self.spec))


def norm_heads(op: Any, norm: RMSNorm, x: ir.Value, dtype: DType) -> ir.Value:
    """RMSNorm of every head of x [..., D] in the compute dtype; the norm itself is float32."""
    return cast(op, norm(op, cast(op, x, dtype, "fp32")), "fp32", dtype)


def attention(
    op: Any,
    q: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value,
    packed: ir.Value,
    spec: DecoderSpec,
) -> ir.Value:
    """q of `query_rows` over caches [R, K, C, D] through a mask [R, 1, G·S, C] -> [N, H·D].

    packed: `packed_rows` of the tokens that are wanted.
    """
    y = op.Attention(q, key, value, mask, scale=spec.head_dim**-0.5, is_causal=0)
    y = op.Gather(op.Reshape(y, [-1, spec.head_dim]), packed, axis=0)
    return op.Reshape(y, [-1, spec.num_heads * spec.head_dim])


def write_cache(op: Any, past: ir.Value, new: ir.Value, write_index: ir.Value) -> ir.Value:
    """past [R, K, C, D] with rows write_index[r] .. +S-1 replaced by new [R, K, S, D]."""
    return op.TensorScatter(past, new, write_index, axis=-2, mode="linear")


class MLP(nn.Module):
    """down(silu(gate x) * up x), gate and up in one matrix product."""

    def __init__(self, spec: DecoderSpec, dtype: DType):
        super().__init__()
        n = spec.intermediate_size
        self.gate_up_proj = Linear(spec.hidden_size, 2 * n, dtype, spec.mlp_bias)
        self.down_proj = Linear(n, spec.hidden_size, dtype, spec.mlp_bias)
        self.n = n

    def forward(self, op: Any, x: ir.Value) -> ir.Value:
        gate, up = op.Split(self.gate_up_proj(op, x), [self.n, self.n], axis=-1, _outputs=2)
        return self.down_proj(op, op.Mul(op.Mul(gate, op.Sigmoid(gate)), up))


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: x += attention(norm x); x += mlp(norm x). The stream x is float32."""

    def __init__(self, spec: DecoderSpec, dtype: DType, self_attn: nn.Module):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec, dtype)
        self.dtype = dtype

    def attention_input(self, op: Any, x: ir.Value) -> ir.Value:
        return cast(op, self.input_layernorm(op, x), "fp32", self.dtype)

    def add_attention(self, op: Any, x: ir.Value, y: ir.Value) -> ir.Value:
        """The rest of the layer, from the attention's output y on."""
        return self._feed_forward(op, op.Add(x, cast(op, y, self.dtype, "fp32")))

    def _feed_forward(self, op: Any, x: ir.Value) -> ir.Value:
        y = cast(op, self.post_attention_layernorm(op, x), "fp32", self.dtype)
        return op.Add(x, cast(op, self.mlp(op, y), self.dtype, "fp32"))
