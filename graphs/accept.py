"""The acceptance graphs: exact rejection sampling of a drafted block against the target.

Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023. Draft token x is accepted with
probability min(1, p(x)/q(x)); the first rejected position is redrawn from the normalised residual
max(p - q, 0), and when every verified token is accepted the bonus token is drawn from p. The output
then follows p exactly, whatever q is, as long as q is what the draft was really drawn from.

p is the target's processed distribution: temperature, then top-k, then top-p.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import nn

from .sampling import float_constant, inverse_cdf, is_greedy, scaled

# Thresholds are searched from here up to 0. exp(-104) is zero in float32: tokens below have no mass
# and may be kept or dropped alike. A power of two keeps every step of the search exact.
_FLOOR = -128.0
_ITERATIONS = 32


class AcceptGreedy(nn.Module):
    """Acceptance at temperature 0: a draft token stands while it is the target's argmax.

    Inputs: target_logits [N, V] f32; cell_token [R, γ+1] i64, the packed row of every verified
    position (cells past verify_length may name any row); draft_ids [B, γ] i64; request_block [R]
    i64, the drafted block of each request (any where verify_length is 0); verify_length [R] i64,
    0 .. γ. Outputs: accepted [R] i64; next_id [R] i64, the token after the accepted run, or -1 when
    the logits it comes from are not finite.
    """

    def __init__(self, block_size: int):
        super().__init__()
        self.block_size = block_size

    def forward(
        self,
        op: Any,
        target_logits: ir.Value,
        cell_token: ir.Value,
        draft_ids: ir.Value,
        request_block: ir.Value,
        verify_length: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        draft_ids = op.Gather(draft_ids, request_block, axis=0)
        best = op.ArgMax(target_logits, axis=1, keepdims=0)
        # -1 equals no drafted id, so a damaged row ends the run and is the next id.
        best = op.Where(_is_finite(op, target_logits), best, op.Constant(value_int=-1))
        verified = _columns(op, cell_token, self.block_size)
        matches = op.Equal(op.Gather(best, verified, axis=0), draft_ids)
        accepted = _leading_run(op, matches, verify_length, self.block_size)
        row = op.GatherElements(cell_token, op.Unsqueeze(accepted, [1]), axis=1)
        return accepted, op.Gather(best, op.Squeeze(row, [1]), axis=0)


class AcceptSample(nn.Module):
    """Acceptance with per-request sampling parameters; greedy requests may be mixed in.

    Inputs as in `AcceptGreedy`, and: token_request [N] i64, the request of every packed row;
    draft_logits [B, γ, V] f32 as the Markov graph returned them; accept_uniform [R, γ] and
    sample_uniform [R] f32 in [0, 1); temperature [R] f32 of the target, 0 for greedy;
    draft_temperature [B] f32, 0 when the draft was greedy (q is then one-hot); with `filters` also
    top_k [R] i64 (0: off) and top_p [R] f32 (1: off).

    Zero residual mass (p = q up to rounding) redraws from p, its limit. Thresholds of top-k and
    top-p are found by bisection and keep ties: values closer than 3e-8 count as tied.
    """

    def __init__(self, block_size: int, vocab_size: int, filters: bool):
        super().__init__()
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.filters = filters

    def forward(
        self,
        op: Any,
        target_logits: ir.Value,
        cell_token: ir.Value,
        token_request: ir.Value,
        draft_ids: ir.Value,
        draft_logits: ir.Value,
        request_block: ir.Value,
        verify_length: ir.Value,
        accept_uniform: ir.Value,
        sample_uniform: ir.Value,
        temperature: ir.Value,
        draft_temperature: ir.Value,
        top_k: ir.Value | None = None,
        top_p: ir.Value | None = None,
    ) -> tuple[ir.Value, ir.Value]:
        gamma, axis = self.block_size, op.Constant(value_ints=[-1])
        one, zero = float_constant(op, 1.0), float_constant(op, 0.0)

        # p of every packed row, unnormalised weights and their sums.
        z = scaled(
            op, target_logits, op.Unsqueeze(op.Gather(temperature, token_request, axis=0), [1])
        )
        weights = op.Exp(z)
        if self.filters:
            weights = self._filter(op, z, weights, token_request, top_k, top_p)
        p = op.Div(weights, op.ReduceSum(weights, axis, keepdims=1))  # [N, V]
        best = op.ArgMax(target_logits, axis=1, keepdims=0)  # [N]
        finite = _is_finite(op, target_logits)  # [N]

        # p and q of every drafted token, [R, γ].
        block = op.Unsqueeze(request_block, [1])
        q = op.Exp(scaled(op, draft_logits, op.Unsqueeze(draft_temperature, [1, 2])))
        q = op.Div(q, op.ReduceSum(q, axis, keepdims=1))  # [B, γ, V]
        q_drawn = op.Squeeze(op.GatherElements(q, op.Unsqueeze(draft_ids, [2]), axis=2), [2])
        q_drawn = op.Gather(q_drawn, request_block, axis=0)
        draft_ids = op.Gather(draft_ids, request_block, axis=0)
        draft_greedy = op.Gather(is_greedy(op, draft_temperature), block, axis=0)
        q_draft = op.Where(draft_greedy, one, q_drawn)
        verified = _columns(op, cell_token, gamma)
        target_greedy = op.Unsqueeze(is_greedy(op, temperature), [1])
        index = op.Concat(op.Unsqueeze(verified, [2]), op.Unsqueeze(draft_ids, [2]), axis=2)
        is_best = op.Equal(op.Gather(best, verified, axis=0), draft_ids)
        p_draft = op.Where(
            target_greedy, op.Cast(is_best, to=ir.DataType.FLOAT), op.GatherND(p, index)
        )
        accepts = op.Less(op.Mul(accept_uniform, q_draft), p_draft)
        accepts = op.And(accepts, op.Gather(finite, verified, axis=0))
        accepted = _leading_run(op, accepts, verify_length, gamma)

        # The row after the accepted run: the residual where a token was rejected, else p.
        run = op.Unsqueeze(accepted, [1])
        row = op.Squeeze(op.GatherElements(cell_token, run, axis=1), [1])
        p_row = op.Gather(p, row, axis=0)  # [R, V]
        slot = op.Min(run, op.Constant(value_ints=[gamma - 1]))
        q_row = op.GatherND(q, op.Concat(block, slot, axis=1))
        vocabulary = op.Range(
            op.Constant(value_int=0),
            op.Constant(value_int=self.vocab_size),
            op.Constant(value_int=1),
        )
        rejected_id = op.GatherElements(draft_ids, slot, axis=1)
        one_hot = op.Cast(
            op.Equal(op.Unsqueeze(vocabulary, [0]), rejected_id), to=ir.DataType.FLOAT
        )
        q_row = op.Where(draft_greedy, one_hot, q_row)
        residual = op.Max(op.Sub(p_row, q_row), zero)
        has_residual = op.And(
            op.Less(run, op.Unsqueeze(verify_length, [1])),
            op.Greater(op.ReduceSum(residual, axis, keepdims=1), zero),
        )
        drawn = inverse_cdf(
            op, op.Where(has_residual, residual, p_row), sample_uniform, self.vocab_size
        )
        greedy_next = op.Gather(best, row, axis=0)
        next_id = op.Where(is_greedy(op, temperature), greedy_next, drawn)
        bad = op.Constant(value_int=-1)
        return accepted, op.Where(op.Gather(finite, row, axis=0), next_id, bad)

    def _filter(
        self,
        op: Any,
        z: ir.Value,
        weights: ir.Value,
        token_request: ir.Value,
        top_k: ir.Value | None,
        top_p: ir.Value | None,
    ) -> ir.Value:
        """`weights` [N, V] with everything outside top-k, then outside the nucleus, set to 0."""
        axis, zero = op.Constant(value_ints=[-1]), float_constant(op, 0.0)
        k = op.Gather(top_k, token_request, axis=0)
        unlimited = op.LessOrEqual(k, op.Constant(value_int=0))
        k = op.Where(unlimited, op.Constant(value_int=self.vocab_size), k)
        k = op.Unsqueeze(op.Cast(k, to=ir.DataType.FLOAT), [1])
        ones = op.Add(op.Mul(weights, zero), float_constant(op, 1.0))
        weights = op.Where(self._at_least(op, z, ones, k), weights, zero)

        nucleus = op.Unsqueeze(op.Gather(top_p, token_request, axis=0), [1])
        mass = op.Mul(nucleus, op.ReduceSum(weights, axis, keepdims=1))
        kept = op.Where(self._at_least(op, z, weights, mass), weights, zero)
        return op.Where(op.GreaterOrEqual(nucleus, float_constant(op, 1.0)), weights, kept)

    def _at_least(self, op: Any, z: ir.Value, amount: ir.Value, goal: ir.Value) -> ir.Value:
        """Mask of the largest values whose amounts reach the goal: {z >= t} for the largest such t.

        z [N, V] with maximum 0; amount [N, V]; goal [N, 1]. A bisection instead of a sort, because
        TensorRT's TopK stops at 3840 values. The lower end always satisfies the goal or excludes
        only values of zero mass. Each step adds to the lower end once and to nothing else: with two
        ends that feed each other TensorRT-RTX's builder takes a time exponential in the steps
        (1.7.1: 1 s for 8, more than a minute for 16).
        """
        axis, zero = op.Constant(value_ints=[-1]), float_constant(op, 0.0)
        low = op.Add(op.Mul(goal, zero), float_constant(op, _FLOOR))
        for i in range(_ITERATIONS):
            step = float_constant(op, -_FLOOR / 2 ** (i + 1))
            inside = op.Where(op.GreaterOrEqual(z, op.Add(low, step)), amount, zero)
            reached = op.GreaterOrEqual(op.ReduceSum(inside, axis, keepdims=1), goal)
            low = op.Add(low, op.Mul(op.Cast(reached, to=ir.DataType.FLOAT), step))
        return op.GreaterOrEqual(z, low)


def _columns(op: Any, x: ir.Value, count: int) -> ir.Value:
    """The first `count` columns of a matrix."""
    return op.Slice(x, op.Constant(value_ints=[0]), op.Constant(value_ints=[count]), [1])


def _leading_run(op: Any, flags: ir.Value, limit: ir.Value, width: int) -> ir.Value:
    """How many leading flags [R, width] are true before the first false or the limit [R]."""
    slots = op.Unsqueeze(op.Constant(value_ints=list(range(width))), [0])
    ok = op.And(flags, op.Less(slots, op.Unsqueeze(limit, [1])))
    failures = op.CumSum(op.Cast(op.Not(ok), to=ir.DataType.FLOAT), op.Constant(value_int=1))
    run = op.Cast(op.Less(failures, float_constant(op, 0.5)), to=ir.DataType.INT64)
    return op.ReduceSum(run, op.Constant(value_ints=[1]), keepdims=0)


def _is_finite(op: Any, logits: ir.Value) -> ir.Value:
    """bool [N]: rows without NaN or infinity. Maxima may skip a NaN, a sum never does."""
    total = op.ReduceSum(logits, op.Constant(value_ints=[-1]), keepdims=0)
    return op.Less(op.Abs(total), float_constant(op, 3.0e38))
