"""Choosing tokens inside a graph: shared by the Markov head and by acceptance."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

# At and below this temperature a distribution is its argmax (DeepSpec uses the same limit).
GREEDY_TEMPERATURE = 1e-5

# Wide float32 running sums lose low-order bits, so they are taken in two levels of about √V.
_SUM_BLOCK = 256


def is_greedy(op: Any, temperature: ir.Value) -> ir.Value:
    """bool, the shape of `temperature`."""
    return op.LessOrEqual(temperature, op.Constant(value_float=GREEDY_TEMPERATURE))


def scaled(op: Any, logits: ir.Value, temperature: ir.Value) -> ir.Value:
    """logits / temperature, shifted so that the row maximum is 0. [.., V], temperature [.., 1].

    Greedy rows are divided by 1: their argmax is taken from the raw logits, never from here.
    """
    one = op.Constant(value_float=1.0)
    safe = op.Where(is_greedy(op, temperature), one, temperature)
    z = op.Div(logits, safe)
    return op.Sub(z, op.ReduceMax(z, op.Constant(value_ints=[-1]), keepdims=1))


def inverse_cdf(op: Any, weights: ir.Value, uniform: ir.Value, size: int) -> ir.Value:
    """The smallest index whose running sum exceeds uniform · total, per row.

    weights [R, size] f32, non-negative, at least one positive per row; uniform [R] f32 in [0, 1).
    Returns [R] i64. The index found always has a positive weight: `uniform` is kept one float32
    step below 1, so the threshold stays strictly below the running sum's last value.
    """
    last = op.Constant(value_float=float(1 - 2.0**-22))
    u = op.Unsqueeze(op.Min(uniform, last), [1])
    if size <= 4 * _SUM_BLOCK:
        return _first_above(op, weights, u, size)[0]
    blocks = -(-size // _SUM_BLOCK)
    pad = blocks * _SUM_BLOCK - size
    if pad:
        weights = op.Pad(weights, op.Constant(value_ints=[0, 0, 0, pad]))
    grid = op.Reshape(weights, [-1, blocks, _SUM_BLOCK])
    sums = op.ReduceSum(grid, op.Constant(value_ints=[2]), keepdims=0)  # [R, blocks]
    block, before, threshold = _first_above(op, sums, u, blocks)
    row = op.Squeeze(op.GatherND(grid, op.Unsqueeze(block, [1, 2]), batch_dims=1), [1])
    # The same search inside the block for what is left of the threshold, as a share of its sum.
    total = op.GatherElements(sums, op.Unsqueeze(block, [1]), axis=1)
    rest = op.Min(op.Div(op.Sub(threshold, before), total), last)
    inner = _first_above(op, row, op.Max(rest, op.Constant(value_float=0.0)), _SUM_BLOCK)[0]
    return op.Add(op.Mul(block, op.Constant(value_int=_SUM_BLOCK)), inner)


def _first_above(
    op: Any, weights: ir.Value, u: ir.Value, size: int
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Index [R], running sum before it [R, 1] and threshold [R, 1] for u [R, 1]."""
    cdf = op.CumSum(weights, op.Constant(value_int=1))
    total = op.Slice(cdf, op.Constant(value_ints=[size - 1]), op.Constant(value_ints=[size]), [1])
    threshold = op.Mul(u, total)
    above = op.Cast(op.Greater(cdf, threshold), to=ir.DataType.FLOAT)
    index = op.ArgMax(above, axis=1, keepdims=1)
    before = op.Sub(
        op.GatherElements(cdf, index, axis=1), op.GatherElements(weights, index, axis=1)
    )
    return op.Squeeze(index, [1]), before, threshold


def pick(
    op: Any, logits: ir.Value, temperature: ir.Value, uniform: ir.Value, size: int
) -> ir.Value:
    """One token index per row: argmax of greedy rows, otherwise a draw from softmax(logits / T).

    logits [R, size] f32, temperature [R] f32, uniform [R] f32. Returns [R] i64.
    """
    weights = op.Exp(scaled(op, logits, op.Unsqueeze(temperature, [1])))
    drawn = inverse_cdf(op, weights, uniform, size)
    best = op.ArgMax(logits, axis=1, keepdims=0)
    return op.Where(is_greedy(op, temperature), best, drawn)


def float_constant(op: Any, value: float) -> ir.Value:
    """A float32 scalar."""
    return op.Constant(value=ir.tensor(np.array(value, np.float32)))
